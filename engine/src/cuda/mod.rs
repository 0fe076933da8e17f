//! CUDA without a toolkit: kernels as text, compiled when they are first needed, and what is launched for an operation.
//!
//! In: the operands of instructions at planned device addresses. Out: [`Launch`]es, and the machine code of their kernels for an
//! architecture, by NVRTC, from a cache on disk where it has been made before. Never: a step on a device; that part is not
//! there yet, and none of the kernels has run on one (docs/gpu.md).
//!
//! ```text
//! Op::cuda ──▶ Launch{family, name, grid, arguments}
//!                       └─▶ Family::source ──▶ Nvrtc::compile ──▶ Cache ──▶ CUBIN
//! ```

mod cache;
mod device;
mod error;
mod executor;
mod family;
pub mod launch;
mod nvrtc;
#[cfg(test)]
mod tests;

pub use cache::Cache;
pub use device::{Device, DeviceError, Recording};
pub use error::KernelError;
pub use executor::Executor;
pub use family::Family;
pub use launch::{Kernel, Launch, Operand, Operands, Product, Random};
pub use nvrtc::{Architecture, Nvrtc};

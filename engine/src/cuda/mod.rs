//! CUDA without a toolkit: kernels as text, compiled when they are first needed, and what is launched for an operation.
//!
//! In: a planned program. Out: its launches in order ([`Executor`]), for a [`Device`] that records and replays them, and the machine
//! code of their kernels for an architecture, by NVRTC, from a cache on disk where it has been made before. Never: a
//! figure from a device; nothing here has run on one (docs/gpu.md).
//!
//! ```text
//! Op::cuda ──▶ Launch ─┬─▶ Product{a, b, c, epilogue, …} ──▶ cuBLASLt
//!                      └─▶ Kernel{family, name, grid, arguments}
//!                               └─▶ Family::source, a file or generated ──▶ Nvrtc ──▶ Cache ──▶ CUBIN
//! ```

mod cache;
mod cublaslt;
mod device;
mod error;
mod event;
mod executor;
mod family;
mod function;
pub(crate) mod fused;
pub mod launch;
mod mapped;
mod nvidia;
mod nvrtc;
mod profile;
mod staging;
#[cfg(test)]
mod tests;

pub use cache::Cache;
pub use device::{Describe, Device, DeviceError, DeviceMemory, Recording};
pub use error::KernelError;
pub use executor::Executor;
pub use family::{Family, Generated};
pub use fused::{Constant, Fusible};
pub use launch::{Kernel, Launch, Operand, Operands, Product, Random};
pub use nvidia::Nvidia;
pub use nvrtc::{Architecture, Nvrtc};
pub use profile::Timed;

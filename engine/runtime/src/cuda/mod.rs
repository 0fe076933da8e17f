//! CUDA without a toolkit: kernels as text, compiled when they are first needed, and what is launched for an operation.
//!
//! In: a planned program. Out: its launches in order ([`CudaBackend`]), for a [`Device`] that records and replays them, and the machine
//! code of their kernels for an architecture, by NVRTC, from a cache on disk where it has been made before. Never: a
//! figure from a device; nothing here has run on one (docs/gpu.md).
//!
//! ```text
//! Op::cuda ──▶ Launch ─┬─▶ Product{a, b, c, epilogue, …} ──▶ cuBLASLt
//!                      └─▶ Kernel{family, name, grid, arguments}
//!                               └─▶ Family::source, a file or generated ──▶ Nvrtc ──▶ Cache ──▶ CUBIN
//! ```

mod backend;
mod cache;
mod context;
mod cublaslt;
mod device;
mod error;
mod event;
mod function;
mod libraries;
mod mapped;
mod named;
mod nvidia;
mod nvrtc;
mod peers;
mod place;
mod profile;
mod resources;
mod runner;
mod session;
mod slots;
mod staging;
mod stream;

pub use backend::CudaBackend;
pub use cache::Cache;
pub use device::{Describe, Device, DeviceError, DeviceMemory, Recording};
pub use error::KernelError;
pub use gapless_kernels::cuda::{
    Constant, Family, Features, Fusible, Generated, Kernel, Launch, Operand, Operands, Product, Random, launch,
};
pub use nvidia::Nvidia;
pub use nvrtc::{Architecture, Compiled, Nvrtc};
pub use profile::{Timed, Work};
pub use resources::Resources;

//! Running planned programs on a GPU, without a CUDA toolkit: kernels are source text that NVRTC compiles when they
//! are first needed.
//!
//! - In: a planned program.
//! - Out: the program's launches in order ([`CudaBackend`]), on a [`Device`] that records and replays them. The
//!   machine code of the kernels is compiled per architecture by NVRTC, or read from a cache on disk.
//! - Never: a dependency on a CUDA toolkit or its headers. Driver, cuBLASLt and NVRTC are loaded at run time
//!   (docs/gpu.md).
//!
//! ```text
//! Op::cuda ──▶ Launch ─┬─▶ Product{a, b, c, epilogue, …} ──▶ cuBLASLt
//!                      └─▶ Kernel{family, name, grid, arguments}
//!                               └─▶ Family::source, a file or generated ──▶ Nvrtc ──▶ Cache ──▶ CUBIN
//! ```

mod backend;
mod cache;
mod context;
mod copies;
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
mod refused;
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
    Constant, Family, Features, Fusible, Generated, HostCopy, Kernel, Launch, Operand, Operands, Product, Random,
    launch,
};
pub use nvidia::Nvidia;
pub use nvrtc::{Architecture, Compiled, Nvrtc};
pub use profile::{LaunchWork, Timed, Work};
pub use refused::MissingKernel;
pub use resources::Resources;

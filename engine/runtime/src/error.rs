//! The errors of preparing and running a program.

use candle_core::DType;
use gapless_alloc::draw::Bytes;

/// `Result` with this crate's [`enum@Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error from preparing or running a program.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages name the fields")]
pub enum Error {
    #[error(transparent)]
    Compile(#[from] gapless_compile::Error),
    #[error("{name:?} is {dtype:?}; only floating-point tensors can be read and written this way")]
    NotFloat { name: String, dtype: DType },
    #[error("the CPU has no kernels for {dtype:?}; run the step in f32 or bf16")]
    NoKernels { dtype: DType },
    #[error(
        "{instruction} writes into a tensor with gaps, which only GPU kernels support; lower its program for Target::Cpu"
    )]
    OtherTarget { instruction: String },
    #[cfg(feature = "cuda")]
    #[error(
        "{} cannot run on a GPU: {}; choose another element type, give the operation kernels (Op::cuda), lower a program of your own for \
         Target::Cuda, or run it on the CPU (device = \"cpu\", DeviceChoice::Cpu)",
        if missing.len() == 1 { "an operation".to_owned() } else { format!("{} operations", missing.len()) },
        missing.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
    )]
    NoDeviceKernels { missing: Vec<crate::cuda::MissingKernel> },
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Device(crate::cuda::DeviceError),
    #[error("{name:?} takes {expected} elements, but {given} were given")]
    ElementCount { name: String, expected: usize, given: usize },
    #[error(
        "the arena needs {} ({needed} bytes), but {limit} leaves {} ({available} bytes)\nlargest at the peak:\n{largest}\nwhat helps: \
         recomputation within a budget (memory.budget), more micro-batches, a shorter sequence, a smaller batch, a smaller model",
        Bytes(*needed),
        Bytes(*available)
    )]
    DoesNotFit { needed: u64, available: u64, limit: crate::process_memory::MemoryLimit, largest: String },
    #[cfg(feature = "cuda")]
    #[error(
        "messages between GPUs through host memory need {} ({needed} bytes), but {limit} leaves {} ({available} bytes); install NCCL, which \
         sends them from GPU to GPU, or use more micro-batches or fewer data ranks per host",
        Bytes(*needed),
        Bytes(*available)
    )]
    NoHostMemory { needed: u64, available: u64, limit: crate::process_memory::MemoryLimit },
    #[error(
        "the system refuses to reserve {} ({bytes} bytes) for the arena: a limit of the process or container is lower; raise it, \
         or shrink the arena: recomputation within a \
         budget (memory.budget), more micro-batches, a smaller batch",
        Bytes(*bytes)
    )]
    Reserve { bytes: u64 },
    #[error("non-finite loss {loss} at step {step}; the first non-finite value came out of {culprit}")]
    NonFinite { step: u64, loss: f32, culprit: String },
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
    #[error("{instruction}: {source}")]
    Communicator { instruction: String, source: gapless_communicator::CommunicatorError },
    #[error("{instruction}: {source}")]
    Routing { instruction: String, source: Box<gapless_alloc::arena::Overflow> },
    #[error("{instruction}: the arena would have to grow to {needed} bytes, which is above its limit: {source}")]
    Growth { instruction: String, needed: u64, source: Box<gapless_alloc::arena::Overflow> },
    #[error("internal error: {what}")]
    BadRun { what: String },
    #[error("{what}: {source}; choose another folder to offload to (memory.offload_to), or offload less")]
    Offload { what: String, source: std::io::Error },
    #[error(
        "cannot start worker threads: {0}; use fewer threads or ranks, or raise the limit of processes (ulimit -u) or of memory (ulimit -v)"
    )]
    Workers(#[from] rayon::ThreadPoolBuildError),
}

/// Errors of the offload file are the same as on the CPU.
#[cfg(feature = "cuda")]
impl From<crate::cuda::DeviceError> for Error {
    fn from(error: crate::cuda::DeviceError) -> Self {
        error.into_offload().map_or_else(Self::Device, |(what, source)| Self::Offload { what, source })
    }
}

impl From<gapless_alloc::Error> for Error {
    fn from(error: gapless_alloc::Error) -> Self {
        Self::Compile(error.into())
    }
}

//! The errors of preparing and running a program.

use candle_core::DType;

/// `Result` with this crate's [`enum@Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error from preparing or running a program.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages name the fields")]
pub enum Error {
    #[error(transparent)]
    Compile(#[from] gapless_compile::Error),
    #[error("{name:?} is {dtype:?}; only tensors of floats are read and written this way")]
    NotFloat { name: String, dtype: DType },
    #[error("the CPU has no kernels for {dtype:?}; run the step in f32 or bf16")]
    NoKernels { dtype: DType },
    #[error(
        "{instruction} writes into a tensor with gaps, as only kernels of a GPU do; lower its program for Target::Cpu"
    )]
    OtherTarget { instruction: String },
    #[cfg(feature = "cuda")]
    #[error(
        "{instruction} cannot run on a GPU, with inputs of {dtypes:?}; docs/gpu.md says what can; choose another optimizer or element \
         type, or the CPU (DeviceChoice::Cpu); an executable of one's own is to be lowered for Target::Cuda"
    )]
    NoDeviceKernels { instruction: String, dtypes: Vec<DType> },
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Device(#[from] crate::cuda::DeviceError),
    #[error("{name:?} holds {expected} elements, not {given}")]
    ElementCount { name: String, expected: usize, given: usize },
    #[error(
        "the arena needs {needed} bytes, but {available} are available by {limit}\nlargest at the peak:\n{largest}\nwhat helps: \
         recomputation within a budget (Recompute::budget), more micro-batches, a shorter sequence, a smaller batch, a smaller model"
    )]
    DoesNotFit { needed: u64, available: u64, limit: crate::process_memory::MemoryLimit, largest: String },
    #[cfg(feature = "cuda")]
    #[error(
        "tensors on their way from GPU to GPU through host memory need {needed} bytes of it, but {available} are available by \
         {limit}; install NCCL, by which they do not pass through it, or use more micro-batches or fewer data ranks per host"
    )]
    NoHostMemory { needed: u64, available: u64, limit: crate::process_memory::MemoryLimit },
    #[error(
        "the system refuses to reserve {bytes} bytes for the arena; a limit of the process or container is below it; raise that, \
         or shrink the arena: recomputation within a \
         budget (Recompute::budget), more micro-batches, a smaller batch"
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
    #[error(
        "{instruction}: the arena cannot grow: with what it lacks it is {needed} bytes, more than there may be: {source}"
    )]
    Growth { instruction: String, needed: u64, source: Box<gapless_alloc::arena::Overflow> },
    #[error("internal error: {what}")]
    BadRun { what: String },
    #[error("{what}: {source}; choose another folder to offload to, or offload less")]
    Offload { what: String, source: std::io::Error },
    #[error(
        "cannot start worker threads: {0}; use fewer threads or ranks, or raise the limit of processes (ulimit -u) or of memory (ulimit -v)"
    )]
    Workers(#[from] rayon::ThreadPoolBuildError),
}

impl From<gapless_alloc::Error> for Error {
    fn from(error: gapless_alloc::Error) -> Self {
        Self::Compile(error.into())
    }
}

//! What can go wrong between a model's source and its last step.

use candle_core::{DType, Shape};

/// `Result` with this crate's [`enum@Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Every error of graph building, compiling and running.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages name the fields")]
pub enum Error {
    #[error("{op} in {}: {what} (inputs: {})", layer_or_root(.layer), list(.shapes))]
    Shape { op: String, layer: String, what: String, shapes: Vec<Shape> },
    #[error("{op} has no gradient with respect to its input {input}, which depends on a parameter")]
    NoGradient { op: String, input: usize },
    #[error("{op} has no gradient for its output {output}, which the loss depends on")]
    NoOutputGradient { op: String, output: usize },
    #[error("the loss has shape {shape:?}; it must be a scalar (use mean_all or sum_all)")]
    LossNotScalar { shape: Shape },
    #[error("the loss depends on no parameter, so there is nothing to train")]
    NothingToTrain,
    #[error("parameter {name:?} is asked for as {asked:?}, but was made as {made:?}")]
    ParameterShape { name: String, asked: Shape, made: Shape },
    #[error("{name:?} is declared twice with different types")]
    TypeClash { name: String },
    #[error("tensors of two different graphs meet in {op}")]
    TwoGraphs { op: String },
    #[error("no tensor named {name:?}; nearest: {nearest}")]
    UnknownTensor { name: String, nearest: String },
    #[error("{name:?} is {dtype:?}; only f32 tensors are read and written this way")]
    NotF32 { name: String, dtype: DType },
    #[error(
        "the CPU computes in f32, not {dtype:?}; run such a step on a GPU, plan it with Trainer::plan, or run it in f32"
    )]
    NoKernels { dtype: DType },
    #[cfg(feature = "cuda")]
    #[error(
        "{instruction} cannot run on a GPU yet, with inputs of {dtypes:?} and the scratch that was planned; lower for Target::Cuda; \
         docs/gpu.md says what can"
    )]
    NoDeviceKernels { instruction: String, dtypes: Vec<DType> },
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Device(#[from] crate::cuda::DeviceError),
    #[error("{name:?} holds {expected} elements, not {given}")]
    ElementCount { name: String, expected: usize, given: usize },
    #[error(
        "the arena needs {needed} bytes, but {available} bytes of memory are available\nlargest at the peak:\n{largest}\nwhat helps: more micro-batches, a shorter sequence, a smaller batch, a smaller model"
    )]
    DoesNotFit { needed: u64, available: u64, largest: String },
    #[error(
        "no recomputation fits {budget} bytes; the smallest step found takes {smallest}\nwhat helps: more micro-batches, a shorter sequence, a smaller batch, more ranks"
    )]
    OverBudget { budget: u64, smallest: u64 },
    #[error("non-finite loss {loss} at step {step}; the first non-finite value came out of {culprit}")]
    NonFinite { step: u64, loss: f32, culprit: String },
    #[error("internal error: the plan violates its own constraints: {what}")]
    BadPlan { what: String },
    #[error("token {id} is outside the model's vocabulary of {vocabulary}; the data was made with another tokenizer")]
    TokenOutOfRange { id: u32, vocabulary: usize },
    #[error("{what}: {why}; {remedy}")]
    Config { what: &'static str, why: String, remedy: &'static str },
    #[error(transparent)]
    Alloc(#[from] gapless_alloc::Error),
    #[error(transparent)]
    Schedule(#[from] gapless_parallel::Error),
    #[error(transparent)]
    LearningRate(#[from] crate::learning_rate::LearningRateError),
    #[error(transparent)]
    Checkpoint(#[from] crate::checkpoint::CheckpointError),
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
    #[error("{instruction}: {source}")]
    Communicator { instruction: String, source: crate::communicator::CommunicatorError },
    #[error("{instruction}: {source}")]
    Routing { instruction: String, source: Box<gapless_alloc::arena::Overflow> },
    #[error(
        "{instruction}: the arena cannot grow: with what it lacks it is {needed} bytes, more than there may be: {source}"
    )]
    Growth { instruction: String, needed: u64, source: Box<gapless_alloc::arena::Overflow> },
    #[error("internal error: what was served while the step ran overlaps: {what}")]
    BadRun { what: String },
    #[error(transparent)]
    Ranks(#[from] crate::communicator::CommunicatorError),
    #[error("rank {rank} could not save: {why}")]
    NotSaved { rank: usize, why: String },
    #[error("{what}: {source}; choose another folder to offload to, or offload less")]
    Offload { what: String, source: std::io::Error },
    #[error("cannot start worker threads: {0}")]
    Workers(#[from] rayon::ThreadPoolBuildError),
}

fn layer_or_root(layer: &str) -> &str {
    if layer.is_empty() { "the model" } else { layer }
}

fn list(shapes: &[Shape]) -> String {
    shapes.iter().map(|s| format!("{:?}", s.dims())).collect::<Vec<_>>().join(", ")
}

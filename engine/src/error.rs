//! Errors of a trainer.

use gapless_checkpoint::CheckpointError;
use gapless_communicator::CommunicatorError;

use crate::learning_rate::LearningRateError;

/// `Result` with [`TrainError`].
pub type Result<T, E = TrainError> = std::result::Result<T, E>;

/// All errors of a trainer. It passes on the errors of lower layers unchanged.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages name the fields")]
pub enum TrainError {
    /// The model could not be built.
    #[error(transparent)]
    Graph(gapless_graph::Error),
    /// A program could not be compiled or planned.
    #[error(transparent)]
    Compile(gapless_compile::Error),
    /// A program failed while it ran.
    #[error(transparent)]
    Runtime(gapless_runtime::Error),
    #[error("{name:?} takes {expected} elements, but {given} were given")]
    ElementCount { name: String, expected: usize, given: usize },
    #[error("{name:?} has the shape {expected:?}, but a value of shape {given:?} was given")]
    Shape { name: String, expected: Vec<usize>, given: Vec<usize> },
    #[error("non-finite loss {loss} at step {step}; the first non-finite value came out of {culprit}")]
    NonFinite { step: u64, loss: f32, culprit: String },
    #[error("token {id} is outside the model's vocabulary of {vocabulary}; encode the data with the model's tokenizer")]
    TokenOutOfRange { id: u32, vocabulary: usize },
    #[error("{name:?} is on rank {rank} of the mesh; read it there")]
    OnAnotherRank { name: String, rank: usize },
    #[error(transparent)]
    LearningRate(#[from] LearningRateError),
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error(transparent)]
    Ranks(#[from] CommunicatorError),
    #[error(
        "rank {rank} has another {what} than rank 0 (on this rank: {here}); start all ranks with the same program, options and data"
    )]
    RanksDiffer { rank: usize, what: &'static str, here: String },
    #[error(
        "the parameter {name} is not the same on ranks {first} and {rank}, which train copies of it: nothing was saved; resume from the last checkpoint"
    )]
    CopiesDiffer { name: String, first: usize, rank: usize },
    #[error("rank {rank} could not save: {why}")]
    NotSaved { rank: usize, why: String },
}

impl TrainError {
    /// Creates the error for a refused setting. `what` is the name of the setting, `why` the reason, and `remedy` what
    /// to do instead.
    pub fn config(what: &'static str, why: impl Into<String>, remedy: &'static str) -> Self {
        gapless_graph::Error::config(what, why, remedy).into()
    }

    /// If the error is a refused setting, returns the setting's name, the reason, and what to do instead. Returns
    /// `None` for any other error.
    pub fn refused(&self) -> Option<(&'static str, &str, &'static str)> {
        match self {
            Self::Graph(gapless_graph::Error::Config { what, why, remedy }) => Some((what, why, remedy)),
            _ => None,
        }
    }
}

impl From<gapless_graph::Error> for TrainError {
    fn from(error: gapless_graph::Error) -> Self {
        Self::Graph(error)
    }
}

impl From<candle_core::Error> for TrainError {
    fn from(error: candle_core::Error) -> Self {
        Self::Graph(error.into())
    }
}

/// Passes on the graph errors that a compiler error contains.
impl From<gapless_compile::Error> for TrainError {
    fn from(error: gapless_compile::Error) -> Self {
        match error {
            gapless_compile::Error::Graph(error) => Self::Graph(error),
            error => Self::Compile(error),
        }
    }
}

/// Passes on the errors of lower layers that a runtime error contains.
impl From<gapless_runtime::Error> for TrainError {
    fn from(error: gapless_runtime::Error) -> Self {
        match error {
            gapless_runtime::Error::Compile(error) => error.into(),
            gapless_runtime::Error::NonFinite { step, loss, culprit } => Self::NonFinite { step, loss, culprit },
            error => Self::Runtime(error),
        }
    }
}

impl From<gapless_parallel::Error> for TrainError {
    fn from(error: gapless_parallel::Error) -> Self {
        Self::Compile(error.into())
    }
}

impl From<gapless_alloc::Error> for TrainError {
    fn from(error: gapless_alloc::Error) -> Self {
        Self::Compile(error.into())
    }
}

#[cfg(feature = "cuda")]
impl From<gapless_runtime::cuda::DeviceError> for TrainError {
    fn from(error: gapless_runtime::cuda::DeviceError) -> Self {
        Self::Runtime(error.into())
    }
}

/// Lets functions that return [`gapless_graph::Error`] use a trainer with `?`.
impl From<TrainError> for gapless_graph::Error {
    fn from(error: TrainError) -> Self {
        match error {
            TrainError::Graph(error) => error,
            error => Self::wrap(error),
        }
    }
}

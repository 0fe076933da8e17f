//! Why a run ends before its last step.

use std::path::PathBuf;

use gapless_communicator::{CommunicatorError, RankError};
use gapless_engine::TrainError;
use gapless_engine::checkpoint::CheckpointError;
use gapless_engine::data::DataError;
use gapless_engine::metrics::MetricsError;
use gapless_models::hf::HfError;

use super::ConfigError;

/// Why a run ended before its last step.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RunError {
    /// The configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The data.
    #[error(transparent)]
    Data(#[from] DataError),
    /// A Hugging Face folder.
    #[error(transparent)]
    Pretrained(Box<HfError>),
    /// The trainer.
    #[error(transparent)]
    Train(Box<TrainError>),
    /// The folder or its checkpoints.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// Figures that cannot be written.
    #[error(transparent)]
    Metrics(#[from] MetricsError),
    /// Nothing to go on from.
    #[error("there is no checkpoint in {}; run without --resume first", path.display())]
    NothingToResume {
        /// Where checkpoints would be.
        path: PathBuf,
    },
    /// No step is left to do.
    #[error("{} has done {done} steps, and steps is {steps}; raise steps", path.display())]
    NothingLeft {
        /// The checkpoint.
        path: PathBuf,
        /// Its steps.
        done: u64,
        /// Steps in all.
        steps: u64,
    },
    /// The saved run was another one.
    #[error("the run in {} has another configuration: {}; these keys cannot change: restore them from the run.toml beside its checkpoints, or choose another --out", path.display(), differences.join(", "))]
    Changed {
        /// The checkpoint.
        path: PathBuf,
        /// Each key with its values.
        differences: Vec<String>,
    },
    /// Loss spikes without end.
    #[error(
        "{skipped} steps in a row, up to step {step}, had a loss or gradient norm far above the steps before and were skipped; the last checkpoint is older: set guard.rollbacks to roll back to it, continue from it with --fork and a lower learning_rate.peak or another seed, or raise guard.norm and guard.loss"
    )]
    Spikes {
        /// The last.
        step: u64,
        /// How many.
        skipped: u64,
    },
    /// The folder of a run was deleted or moved while the run went on.
    #[error(
        "{} was deleted, moved or replaced while the run was writing into it, and the run has ended; its checkpoints are where the folder \
         is now: continue there with --resume, or start the run again",
        path.display()
    )]
    FolderGone {
        /// Where the folder was.
        path: PathBuf,
    },
    /// What a callback of [`Fit::run`](super::Fit::run) answered.
    #[error(transparent)]
    Callback(#[from] Box<dyn std::error::Error + Send + Sync>),
    /// A file of the run's folder that cannot be written, or signals that cannot be listened to.
    #[error("{what}: {source}")]
    Io {
        /// What was to be done.
        what: String,
        /// Why it cannot be done.
        source: std::io::Error,
    },
}

impl From<HfError> for RunError {
    fn from(error: HfError) -> Self {
        Self::Pretrained(Box::new(error))
    }
}

impl From<TrainError> for RunError {
    fn from(error: TrainError) -> Self {
        Self::Train(Box::new(error))
    }
}

impl From<CommunicatorError> for RunError {
    fn from(error: CommunicatorError) -> Self {
        TrainError::from(error).into()
    }
}

impl RankError for RunError {
    fn communicator(&self) -> Option<&CommunicatorError> {
        match self {
            Self::Train(error) => error.communicator(),
            _ => None,
        }
    }
}

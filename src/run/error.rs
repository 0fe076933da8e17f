//! Errors that end a run before its last step.

use std::path::{Path, PathBuf};

use gapless_communicator::{CommunicatorError, RankError};
use gapless_engine::TrainError;
use gapless_engine::checkpoint::CheckpointError;
use gapless_engine::data::DataError;
use gapless_engine::metrics::MetricsError;
use gapless_models::hf::HfError;

use super::ConfigError;

/// The error that ended a run before its last step.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RunError {
    /// The configuration is invalid.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The data cannot be used.
    #[error(transparent)]
    Data(#[from] DataError),
    /// A Hugging Face folder cannot be used.
    #[error(transparent)]
    Pretrained(Box<HfError>),
    /// The trainer failed.
    #[error(transparent)]
    Train(Box<TrainError>),
    /// The run's folder or a checkpoint cannot be used.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The metrics cannot be written.
    #[error(transparent)]
    Metrics(#[from] MetricsError),
    /// There is no checkpoint to resume from.
    #[error("there is no checkpoint in {}; run without --resume first", path.display())]
    NothingToResume {
        /// Folder in which checkpoints are expected.
        path: PathBuf,
    },
    /// The run has not saved a checkpoint yet, because it is still before its first one or has failed before it.
    #[error("the run in {} has no checkpoint yet{}", path.display(), in_earlier(earlier.as_deref()))]
    NoCheckpointYet {
        /// The run's folder.
        path: PathBuf,
        /// The subfolder of the newest earlier run of this folder that has checkpoints.
        earlier: Option<PathBuf>,
    },
    /// The checkpoint has already done all steps of the run.
    #[error(
        "{} has done {done} steps, and the run has {steps}; raise steps (or epochs, if the run has epochs)",
        path.display()
    )]
    NothingLeft {
        /// Path of the checkpoint.
        path: PathBuf,
        /// Number of steps that are done.
        done: u64,
        /// Number of steps that the run should have.
        steps: u64,
    },
    /// The checkpoint was saved by a run with other settings, which must not change.
    #[error("the run in {} has another configuration: {}; these keys cannot change: restore them from the run.toml beside its checkpoints, or choose another --out", path.display(), differences.join(", "))]
    Changed {
        /// Path of the checkpoint.
        path: PathBuf,
        /// Each key that differs, with its saved value and its new value.
        differences: Vec<String>,
    },
    /// Too many steps in a row were skipped because of loss spikes, and no rollback is possible.
    #[error(
        "{skipped} steps in a row, up to step {step}, had a loss or gradient norm far above the steps before and were skipped; the last checkpoint is older: set guard.rollbacks to roll back to it, continue from it with --fork and a lower learning_rate.peak or another seed, or raise guard.norm and guard.loss"
    )]
    Spikes {
        /// The last skipped step.
        step: u64,
        /// Number of steps skipped in a row.
        skipped: u64,
    },
    /// The folder of the run was deleted, moved or replaced during the run.
    #[error(
        "{} was deleted, moved or replaced while the run was writing into it, and the run has ended; its checkpoints are where the folder \
         is now: continue there with --resume, or start the run again",
        path.display()
    )]
    FolderGone {
        /// The original path of the folder.
        path: PathBuf,
    },
    /// The error that a callback of [`TrainingLoop::run`](super::TrainingLoop::run) returned.
    #[error(transparent)]
    Callback(#[from] Box<dyn std::error::Error + Send + Sync>),
    /// A file of the run's folder cannot be written, or signals cannot be handled.
    #[error("{what}: {source}")]
    Io {
        /// The operation that failed.
        what: String,
        /// The system's error.
        source: std::io::Error,
    },
}

fn in_earlier(earlier: Option<&Path>) -> String {
    match earlier {
        Some(earlier) => format!("; an earlier run is in {}: name this folder to use it", earlier.display()),
        None => "; train it until it has saved one".to_owned(),
    }
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

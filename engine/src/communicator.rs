//! How ranks exchange tensors: [`gapless_communicator`], for what returns a trainer's error.

use crate::error::TrainError;

pub use gapless_communicator::*;

/// [`gapless_communicator::on_threads`] for what returns a trainer's error.
///
/// # Errors
/// The first rank's error that is not the mere echo of another rank's failure.
///
/// # Panics
/// When a rank does, once all have ended; its end makes the others' waits fail.
pub fn on_threads<T: Send>(
    ranks: usize,
    f: impl Fn(Box<dyn Communicator>) -> Result<T, TrainError> + Sync,
) -> Result<Vec<T>, TrainError> {
    gapless_communicator::on_threads(ranks, f)
}

impl RankError for TrainError {
    fn communicator(&self) -> Option<&CommunicatorError> {
        match self {
            Self::Ranks(source) | Self::Runtime(gapless_runtime::Error::Communicator { source, .. }) => Some(source),
            _ => None,
        }
    }
}

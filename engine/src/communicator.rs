//! The [`gapless_communicator`] crate, with [`on_threads`] for functions that return a trainer's error.

use crate::error::TrainError;

pub use gapless_communicator::*;

/// [`gapless_communicator::on_threads`] for functions that return a [`TrainError`].
///
/// # Errors
/// Returns an error if a rank fails. If several ranks fail, this is the first rank's error that is not just a
/// consequence of another rank's failure.
///
/// # Panics
/// Panics if a rank panics, after all ranks have ended. When one rank panics, the waits of the other ranks return
/// errors, so these ranks end too.
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

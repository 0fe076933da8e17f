//! How ranks exchange tensors: [`gapless_communicator`], with the engine's error.

use crate::error::Error;

pub use gapless_communicator::*;

/// [`gapless_communicator::on_threads`] for what returns the engine's error.
///
/// # Errors
/// The first rank's error that is not the mere echo of another rank's failure.
///
/// # Panics
/// When a rank does, once all have ended; its end makes the others' waits fail.
pub fn on_threads<T: Send>(
    ranks: usize,
    f: impl Fn(Box<dyn Communicator>) -> Result<T, Error> + Sync,
) -> Result<Vec<T>, Error> {
    gapless_communicator::on_threads(ranks, f)
}

impl RankError for Error {
    fn communicator(&self) -> Option<&CommunicatorError> {
        match self {
            Self::Ranks(source) | Self::Communicator { source, .. } => Some(source),
            _ => None,
        }
    }
}

//! Ranks that are threads of this process.

use std::panic::resume_unwind;

use crate::{Communicator, CommunicatorError, InProcess, Result};

/// Runs `f` once per rank, each on its own thread, and returns the results in the order of ranks.
///
/// ```
/// use gapless_communicator::{CommunicatorError, on_threads};
///
/// let sums = on_threads(3, |mut world| {
///     let mut values = [world.rank() as f32 + 1.0];
///     world.all_reduce(&mut values)?;
///     Ok::<_, CommunicatorError>(values[0])
/// })?;
/// assert_eq!(sums, [6.0, 6.0, 6.0]);
/// # Ok::<(), CommunicatorError>(())
/// ```
///
/// # Errors
/// Returns the error of the lowest rank whose error is not just a consequence of another rank's failure. Returns
/// [`CommunicatorError::NoThread`] if the system cannot start a thread.
///
/// # Panics
/// Panics if a rank panics, after all ranks have ended. The waits of the other ranks return errors.
pub fn on_threads<T: Send, E: RankError>(
    ranks: usize,
    f: impl Fn(Box<dyn Communicator>) -> Result<T, E> + Sync,
) -> Result<Vec<T>, E> {
    let outcomes: Vec<_> = std::thread::scope(|scope| {
        let f = &f;
        let start = |(number, rank): (usize, InProcess)| {
            let thread = std::thread::Builder::new().spawn_scoped(scope, move || f(Box::new(rank)));
            thread.map_err(|error| CommunicatorError::NoThread { rank: number, why: error.to_string() })
        };
        let threads: Vec<_> = InProcess::world(ranks).into_iter().enumerate().map(start).collect();
        // If the thread of a rank could not be started, the other ranks treat that rank like one that has dropped its
        // communicator.
        let end = |thread: Result<std::thread::ScopedJoinHandle<_>, CommunicatorError>| match thread {
            Ok(thread) => thread.join(),
            Err(error) => Ok(Err(error.into())),
        };
        threads.into_iter().map(end).collect()
    });
    let mut values = Vec::with_capacity(ranks);
    let mut echo = None;
    for outcome in outcomes {
        match outcome {
            Err(panic) => resume_unwind(panic),
            Ok(Ok(value)) => values.push(value),
            Ok(Err(error)) if is_echo(&error) => _ = echo.get_or_insert(error),
            Ok(Err(error)) => return Err(error),
        }
    }
    echo.map_or(Ok(values), Err)
}

/// The error of a rank's work. The error may be a consequence of another rank's failure.
pub trait RankError: Send + From<CommunicatorError> {
    /// Returns the communicator's error that caused this error, or `None` if it has another cause.
    fn communicator(&self) -> Option<&CommunicatorError>;
}

impl RankError for CommunicatorError {
    fn communicator(&self) -> Option<&CommunicatorError> {
        Some(self)
    }
}

fn is_echo(error: &impl RankError) -> bool {
    matches!(error.communicator(), Some(CommunicatorError::PeerGone { .. }))
}

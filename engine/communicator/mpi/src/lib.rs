//! Ranks that are processes, on one host or many, and the world in which this process was started.
//!
//! The trainer only depends on [`Communicator`]. So enabling the feature `mpi` recompiles only this crate and the
//! crates that depend on it.

#[cfg(feature = "mpi")]
mod mpi;

use gapless_communicator::{Communicator, InProcess, Result};
use gapless_parallel::World;

#[cfg(feature = "mpi")]
pub use mpi::Mpi;

/// Returns the world in which this process was started. Under `mpirun` and similar launchers it is MPI's world,
/// otherwise a world of this process alone.
///
/// # Errors
/// Returns an error if the environment describes several ranks but this program was built without the feature `mpi`, if
/// the environment contradicts itself, or if MPI cannot be started.
pub fn world() -> Result<Box<dyn Communicator>> {
    match World::discover()? {
        #[cfg(feature = "mpi")]
        Some(_) => Ok(Box::new(Mpi::world()?)),
        #[cfg(not(feature = "mpi"))]
        Some(world) if world.size > 1 => Err(gapless_communicator::CommunicatorError::Unsupported {
            what: "a world of several processes in a program built without the feature `mpi`",
            remedy: "build it with --features mpi, or run the ranks as threads (on_threads)",
        }),
        _ => Ok(Box::new(InProcess::world(1).remove(0))),
    }
}

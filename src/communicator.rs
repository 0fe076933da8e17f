//! How ranks exchange tensors: threads ([`on_threads`]), or whatever started this process ([`world`]).

pub use gapless_engine::communicator::*;
#[cfg(feature = "mpi")]
pub use gapless_mpi::Mpi;
pub use gapless_mpi::world;

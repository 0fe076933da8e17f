//! How ranks exchange tensors: threads ([`on_threads`]), or whatever started this process ([`world`]).

pub use gapless_engine::communicator::*;
pub use gapless_mpi::*;

//! Communication between ranks. Ranks are threads ([`on_threads`]), or processes that a launcher has started
//! ([`world`]).

pub use gapless_engine::communicator::*;
pub use gapless_mpi::*;

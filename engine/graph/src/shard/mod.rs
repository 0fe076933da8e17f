//! The sharding pass: turns the graph of a whole step into that of one rank, with collectives.

mod analysis;
mod dims;
mod rule;

pub use rule::Rule;

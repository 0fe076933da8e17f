//! The CPU device: arena, threads, executor, and what kernels are made of.

mod arena;
pub(crate) mod args;
pub mod attention;
mod elementwise;
mod executor;
pub mod gemm;
pub(crate) mod links;
pub mod math;
mod offload;
mod outside;
mod pieces;
pub(crate) mod reduce;
mod routed;
mod run;
pub(crate) mod scratch;
pub mod simd;
mod tasks;
mod workers;

#[cfg(feature = "cuda")]
pub(crate) use args::Address;
pub use args::{Args, Element};
pub(crate) use elementwise::{BLOCK, arch, last_extent, map, row_of, rows_per_task, vectorize, zip};
pub use executor::{Executor, PersistentBytes, RunOptions};
pub use links::Communicators;
pub(crate) use pieces::{InPieces, Pieces};
pub use scratch::{Scratch, ScratchMemory};
pub use workers::{Workers, resolve_threads};

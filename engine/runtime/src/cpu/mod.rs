//! The CPU backend: arena, threads, and running programs.

mod arena;
mod backend;
pub(crate) mod run;
mod workers;

pub use backend::CpuBackend;
pub use workers::{MAX_THREADS, Workers, resolve_threads};

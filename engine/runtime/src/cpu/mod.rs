//! The CPU backend: arena, threads, and running programs.

mod arena;
mod backend;
mod offload;
pub(crate) mod run;
mod workers;

pub use backend::CpuBackend;
pub use workers::{MAX_THREADS, Workers, resolve_threads};

//! The CPU: arena, threads, executor.

mod arena;
mod executor;
mod offload;
mod routed;
pub(crate) mod run;
mod workers;

pub use executor::{Executor, PersistentBytes, RunOptions};
pub use workers::{Workers, resolve_threads};

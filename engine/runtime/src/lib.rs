//! Runs planned programs: on the CPU in an arena whose bytes candle tensors can view, on a GPU as recorded launches.
//!
//! In: an [`Executable`](gapless_compile::Executable). Out: results as candle tensors over the arena's own bytes, and
//! messages to other ranks. Never: an address that was not planned, or an allocation while a program runs.
//!
//! ```text
//! Executable ─▶ Session ─┬─▶ CpuBackend ──▶ kernels on all threads
//!                        └─▶ CudaBackend ─▶ Device: record once, replay
//!                    Transfers: messages and collectives; each borrows its memory from its start to its wait
//! ```
#![warn(missing_docs)]

pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
mod error;
mod offload;
mod routed;
mod transfers;

pub mod process_memory;
mod session;

pub use error::{Error, Result};
pub use session::{Backend, PersistentBytes, RunOptions, Session, Times};
pub use transfers::Communicators;

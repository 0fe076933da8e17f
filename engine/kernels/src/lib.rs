//! The kernels of a training step. For the CPU they are Rust functions; for GPUs they are sources and descriptions of
//! their launches.
//!
//! In: slices of an arena ([`Args`]), or addresses on a device ([`cuda::Operands`]). Out: results in the same arena,
//! or a list of [`cuda::Launch`]es. Never: a dependency on operations, graphs or plans. The kernels do not allocate,
//! and the launches are described without calling a driver.
//!
//! ```
//! use gapless_kernels::{Numbers, Stream};
//!
//! // Random numbers are a function of seed, step, micro-batch and place: nothing is stored, and any thread can draw them.
//! let dropout: Numbers = Stream::new(7, 0, 0).place(1, 1024);
//! assert_eq!(dropout.uniform(5), Stream::new(7, 0, 0).place(1, 1024).uniform(5));
//! ```
//!
//! ```text
//! cpu::{gemm, attention, elementwise, …}   compiled for each instruction set, the same bits on all
//! cuda::kernels/*.cu ── Family             sources as text, compiled where they are needed
//! cuda::launch ─▶ Launch                   plain data: which kernel, how many blocks, which addresses
//! ```
#![warn(missing_docs)]
#![allow(clippy::single_range_in_vec_init, reason = "windows hold lists of ranges")]

pub mod cpu;
pub mod cuda;
mod fold;
mod loss;
mod random;
mod spec;
mod window;

pub use cpu::{Args, Element};
pub use fold::Fold;
pub use loss::{LossTerms, RowLoss};
pub use random::{Numbers, StochasticRounding, Stream};
pub use spec::{Spec, width};
pub use window::{Spread, Window};

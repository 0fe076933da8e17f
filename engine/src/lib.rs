//! Compiles a training step into one planned arena, and runs it.
//!
//! A model is written with candle's API over symbolic [`Tensor`]s. [`autodiff`] appends its gradients and [`optim`] the
//! update. [`compile`] lowers everything along a schedule into one list of instructions. The list defines the lifetime
//! of every tensor, so all memory is planned before the first step. [`runtime`] then runs the list without allocating.
//! [`Trainer`] ties these together.
//!
//! ```
//! use gapless_engine::nn::{Linear, Module, VarBuilder, embedding, linear};
//! use gapless_engine::{Model, Result, Tensor, StepOptions, Trainer};
//!
//! struct Bigram { embed: gapless_engine::nn::Embedding, head: Linear }
//!
//! impl Model for Bigram {
//!     fn forward(&self, tokens: &Tensor, _train: bool) -> Result<Tensor> {
//!         self.head.forward(&self.embed.forward(tokens)?)
//!     }
//! }
//!
//! let build = |vb: VarBuilder| {
//!     Ok(Bigram { embed: embedding(16, 8, vb.pp("embed"))?, head: linear(8, 16, vb.pp("head"))? })
//! };
//! let options = StepOptions { batch: 2, sequence: 4, ..StepOptions::default() };
//! let mut trainer = Trainer::new(build, options)?;
//! let tokens: Vec<u32> = (0..8).collect();
//! let targets: Vec<u32> = (1..9).collect();
//! let first = trainer.step(&tokens, &targets)?.loss;
//! let second = trainer.step(&tokens, &targets)?.loss;
//! assert!(second < first);
//! assert_eq!(trainer.report().gap, 1.0); // arena height ÷ proven lower bound
//! # Ok::<(), gapless_engine::TrainError>(())
//! ```
//!
//! ```text
//! Model::forward ─▶ Graph ─▶ autodiff ─▶ recompute ─▶ lower(schedule) ─▶ Program ─▶ lifetimes ─▶ plan ─▶ check
//!                                                                                                         │
//!     loss, norm ◀── Session ◀─── Executable{instructions, addresses} ◀───────────────────────────────────┘
//! ```
#![warn(missing_docs)]
#![allow(clippy::single_range_in_vec_init, reason = "windows hold lists of ranges")]

pub mod communicator;
mod error;
mod gradient_check;
pub mod learning_rate;
pub mod metrics;
#[cfg(test)]
mod tests;
mod train;

pub use gapless_checkpoint as checkpoint;
pub use gapless_compile as compile;
pub use gapless_compile::recompute;
#[cfg(feature = "data")]
pub use gapless_data as data;
pub use gapless_graph as graph;
pub use gapless_graph::{autodiff, nn, ops, optim, reference};
pub use gapless_kernels as kernels;
pub use gapless_runtime as runtime;
#[cfg(feature = "cuda")]
pub use gapless_runtime::cuda;

pub use error::TrainError;
pub use gapless_alloc::Role;
pub use gapless_compile::report::Report;
pub use gapless_compile::step::{
    MemoryOptions, Overflow, ParameterGroup, Pipeline, Precision, StepOptions, UpdateOptions,
};
pub use gapless_graph::{
    Args, Array, Causality, Culprit, DType, Error, Gradient, Model, Numbers, Op, Reference, Result, RowUse, Spec,
    Stream, Tensor, Window,
};
pub use gapless_kernels::LossTerms;
pub use gapless_runtime::Times;
pub use gradient_check::{GradientError, gradient_check};
pub use train::{
    Batch, DeviceChoice, DeviceInfo, GenerateOptions, Generation, IGNORED, LossParts, NextToken, Sampling,
    SkipThresholds, StepReport, TrainOptions, Trainer, TrainerBuilder,
};

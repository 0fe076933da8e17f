//! Compiles a training step into one planned arena, and runs it.
//!
//! A model is written with candle's vocabulary over symbolic [`Tensor`]s. [`autodiff`] appends its gradients, [`optim`]
//! the update, [`compile`] lowers everything along a schedule into one list of instructions. That list is the lifetime of
//! every tensor, so all memory is planned before the first step; [`cpu::Executor`] then runs it without allocating.
//! [`Trainer`] ties it together.
//!
//! ```
//! use gapless_engine::nn::{Linear, Module, VarBuilder, embedding, linear};
//! use gapless_engine::{Model, Result, Tensor, TrainOptions, Trainer};
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
//! let options = TrainOptions { batch: 2, sequence: 4, ..TrainOptions::default() };
//! let mut trainer = Trainer::new(build, options)?;
//! let tokens: Vec<u32> = (0..8).collect();
//! let targets: Vec<u32> = (1..9).collect();
//! let first = trainer.step(&tokens, &targets)?.loss;
//! let second = trainer.step(&tokens, &targets)?.loss;
//! assert!(second < first);
//! assert_eq!(trainer.report().gap, 1.0); // arena height ÷ proven lower bound
//! # Ok::<(), gapless_engine::Error>(())
//! ```
//!
//! ```text
//! Model::forward ─▶ Graph ─▶ autodiff ─▶ recompute ─▶ lower(schedule) ─▶ Program ─▶ lifetimes ─▶ plan ─▶ check
//!                                                                                                         │
//!     loss, norm ◀── Executor ◀── Executable{instructions, addresses} ◀───────────────────────────────────┘
//! ```
#![warn(missing_docs)]

pub mod autodiff;
pub mod communicator;
pub mod compile;
pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
mod error;
mod gradient_check;
pub mod graph;
pub mod learning_rate;
pub mod metrics;
pub mod nn;
mod op;
pub mod ops;
pub mod optim;
mod random;
pub mod recompute;
pub mod reference;
mod report;
mod train;

pub use candle_core::DType;
pub use cpu::Args;
pub use error::{Error, Result};
pub use gapless_alloc::Role;
pub use gapless_checkpoint as checkpoint;
pub use gapless_data as data;
pub use gradient_check::{GradientError, gradient_check};
pub use graph::{Spec, Tensor};
pub use op::{Gradient, Op, Rows};
pub use random::{Numbers, Stream};
pub use reference::{Array, Reference};
pub use report::Report;
pub use train::{DeviceChoice, Model, Overflow, Pipeline, RunsOn, SampleOptions, StepReport, TrainOptions, Trainer};

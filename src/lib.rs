//! gapless: an LLM training engine whose memory has no gaps.
//!
//! The engine compiles a training step into one list of instructions. The list determines the lifetime of every tensor,
//! so all memory is planned before the first step, at the proven lower bound, and the step runs in one arena without
//! allocating.
//!
//! ```
//! use gapless::models::{Gpt, GptConfig};
//! use gapless::{StepOptions, Trainer};
//!
//! let config = GptConfig { vocabulary: 256, sequence: 32, layers: 2, heads: 2, width: 32, ..GptConfig::default() };
//! let options = StepOptions { batch: 4, sequence: 32, ..StepOptions::default() };
//! let mut trainer = Trainer::new(|vb| Gpt::new(&config, vb), options)?;
//! println!("{}", trainer.report()); // parameters, arena, lower bound, gap, bytes by role: known before any step
//!
//! let text = b"the quick brown fox jumps over the lazy dog. ".repeat(4);
//! let tokens: Vec<u32> = text[..128].iter().map(|&b| b.into()).collect();
//! let targets: Vec<u32> = text[1..129].iter().map(|&b| b.into()).collect();
//! let first = trainer.step(&tokens, &targets)?.loss;
//! for _ in 0..5 {
//!     trainer.step(&tokens, &targets)?;
//! }
//! assert!(trainer.step(&tokens, &targets)?.loss < first);
//! # Ok::<(), gapless::TrainError>(())
//! ```
//!
//! ```text
//! models ─▶ engine: graph ─▶ autodiff ─▶ lower ─▶ lifetimes ─▶ alloc: plan ─▶ check ─▶ run
//!                                          ▲
//!                     parallel: schedule ──┘
//! ```
//!
//! - [`models`]: GPT, Llama and mixtures of experts, written with candle's API; [`models::hf`] reads and writes
//!   pretrained weights.
//! - [`engine`]: the compiler and the runtime; [`Trainer`] is the entry point.
//! - [`communicator`]: exchanges tensors between ranks, which are threads or processes.
//! - [`alloc`]: the memory planner, usable on its own.
//! - [`allocators`]: models of other allocators that are in use today, for comparison.
//! - [`parallel`]: pipeline schedules.
//! - [`plan`]: computes the memory that a run will take.
//! - [`run`]: run files, run folders, the training loop and reports.
//! - [`step`]: a single training step: its programs, plans and estimated time.
//! - [`sweep`]: many steps: their bytes under each allocator, and their estimated time.
//! - [`timeline`]: a page with each rank's actions over time.
//! - [`prelude`]: the names that most programs use.
#![forbid(unsafe_code)]
#![warn(missing_docs)]

/// Compiles the examples of the documentation pages.
#[cfg(doctest)]
mod pages {
    macro_rules! pages {
        ($($name:ident = $path:literal),* $(,)?) => { $(#[doc = include_str!($path)] struct $name;)* };
    }
    pages! {
        Readme = "../README.md",
        Arena = "../docs/arena.md",
        Candle = "../docs/candle.md",
        Generation = "../docs/generation.md",
        HuggingFace = "../docs/hugging_face.md",
        Moe = "../docs/moe.md",
        Optimizers = "../docs/optimizers.md",
        Planner = "../docs/planner.md",
        Ranks = "../docs/ranks.md",
        Recompute = "../docs/recompute.md",
        Tour = "../docs/tour.md",
    }
}

pub mod communicator;
#[cfg(feature = "runs")]
mod page;
pub mod plan;
pub mod prelude;
#[cfg(feature = "runs")]
pub mod run;
#[cfg(feature = "sweep")]
pub mod step;
#[cfg(feature = "sweep")]
pub mod sweep;
#[cfg(feature = "sweep")]
pub mod timeline;

// Inlined, so that the documentation of this crate has their pages.
#[doc(inline)]
pub use gapless_alloc as alloc;
#[cfg(feature = "sweep")]
#[doc(inline)]
pub use gapless_allocators as allocators;
#[doc(inline)]
pub use gapless_engine as engine;
#[doc(inline)]
pub use gapless_models as models;
#[doc(inline)]
pub use gapless_parallel as parallel;

pub use candle_core::{self, D};
pub use gapless_alloc::arena::Reserve;
pub use gapless_engine::checkpoint::Checkpoint;
#[cfg(feature = "data")]
pub use gapless_engine::data::{DataOptions, Dataset, Source, VocabularyChoice};
pub use gapless_engine::graph::{Device, IndexOp};
pub use gapless_engine::learning_rate::LearningRate;
pub use gapless_engine::metrics::JsonLines;
pub use gapless_engine::nn::{Lora, LoraInit, Quantize, QuantizedFormat, Trainable};
pub use gapless_engine::optim::{Adafactor, AdamW, AdamW8bit, GaLore, Lion, Muon};
pub use gapless_engine::recompute::{Layers, Recompute, RecomputePolicy};
pub use gapless_engine::{
    Batch, Causality, DType, DeviceChoice, DeviceInfo, Error, GenerateOptions, Generation, IGNORED, LossParts,
    LossTerms, MemoryOptions, Model, NextToken, Op, Overflow, ParameterGroup, Pipeline, Precision, Report, Result,
    Sampling, SkipThresholds, StepOptions, StepReport, Tensor, TrainError, TrainOptions, Trainer, TrainerBuilder,
    UpdateOptions, Window, nn,
};
pub use gapless_parallel::Mesh;

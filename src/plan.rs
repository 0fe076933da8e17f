//! Computes the memory that a run will take. `gapless plan` and your own tests can use this module.
//!
//! In: a configuration and options. Out: the plan of every rank, which covers the training step, the evaluation and the
//! generation in one arena. The size of this arena is exactly the size that a [`Trainer`] reserves. Planning loads no
//! weights, opens no device and reserves no arena.
//!
//! ```
//! use gapless::models::hf::Config;
//! use gapless::{DeviceChoice, Lora, StepOptions, TrainOptions, Trainable};
//!
//! # let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/evidence/hf/models/mixtral_bf16/checkpoint");
//! let config = Config::read(folder)?;
//! let trainable = Trainable::Lora(Lora::default());
//! let step = StepOptions { batch: 2, sequence: 16, trainable, ..StepOptions::default() };
//! let options = TrainOptions { step, device: DeviceChoice::Cpu, ..TrainOptions::default() };
//! gapless::plan::assert_fits(&config, &options, 1 << 20);
//! # Ok::<(), gapless::models::hf::HfError>(())
//! ```

use gapless_engine::compile::{self, Executable, Program};
#[cfg(feature = "hugging-face")]
use gapless_models::hf::Config;

use crate::nn::VarBuilder;
use crate::{Model, TrainError, TrainOptions};
#[cfg(feature = "hugging-face")]
use crate::{Report, Trainer};

/// Returns the program of a rank's training step. Its buffers do not have addresses yet. The checker and the simulator
/// of [`parallel`](crate::parallel) accept such programs.
///
/// # Errors
/// Returns an error if the options or the model's shapes do not fit together, or if there is no such rank.
pub fn program<M: Model>(
    build: impl Fn(VarBuilder) -> crate::Result<M>,
    options: &TrainOptions,
    rank: usize,
) -> Result<Program, TrainError> {
    Ok(compile::step::program(build, &options.step, rank, options.target())?)
}

/// Plans only the training step of a rank. The arena of a trainer may be larger, because it also serves evaluation and
/// generation.
///
/// # Errors
/// Returns the errors of [`program`], and an error if no recomputation fits the budget.
pub fn step<M: Model>(
    build: impl Fn(VarBuilder) -> crate::Result<M>,
    options: &TrainOptions,
    rank: usize,
) -> Result<Executable, TrainError> {
    Ok(compile::step::plan(build, &options.step, rank, options.target())?)
}

/// Plans every rank of the options' mesh. Returns one report per rank.
///
/// # Errors
/// Returns an error if the options or the model's shapes do not fit together, or if no recomputation fits the budget.
#[cfg(feature = "hugging-face")]
pub fn ranks(config: &Config, options: &TrainOptions) -> Result<Vec<Report>, TrainError> {
    Trainer::builder(|vb| config.model(vb), options.clone()).plan_all()
}

/// Asserts that a run takes at most `bytes` bytes on every rank.
///
/// # Panics
/// Panics if a rank takes more than `bytes` bytes; the message then has the bytes of each role. Also panics if the run
/// cannot be planned.
#[cfg(feature = "hugging-face")]
#[track_caller]
pub fn assert_fits(config: &Config, options: &TrainOptions, bytes: u64) {
    let ranks = ranks(config, options).unwrap_or_else(|error| panic!("the run cannot be planned: {error}"));
    for (rank, report) in ranks.iter().enumerate() {
        let arena = report.arena_bytes;
        assert!(arena <= bytes, "rank {rank} takes {arena} bytes, {} more than {bytes}\n{report}", arena - bytes);
    }
}

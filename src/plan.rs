//! What a run takes, before there is one: for a user's own tests, and for `gapless plan`.
//!
//! In: a configuration and options. Out: every rank's plan, of the training step, the evaluation and the sampling in one arena, which
//! is what a [`Trainer`] reserves, to the byte. Never: weights, a device, or an arena.
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

/// The program of a rank's training step, before anything has an address: what the checker and the simulator of
/// [`parallel`](crate::parallel) can be asked about.
///
/// # Errors
/// When the options or the model's shapes do not fit together, or there is no such rank.
pub fn program<M: Model>(
    build: impl Fn(VarBuilder) -> crate::Result<M>,
    options: &TrainOptions,
    rank: usize,
) -> Result<Program, TrainError> {
    Ok(compile::step::program(build, &options.step, rank, options.target())?)
}

/// The plan of a rank's training step alone, without the evaluation and the sampling that a trainer has in the same arena.
///
/// # Errors
/// As [`program`], or when a budget is too small.
pub fn step<M: Model>(
    build: impl Fn(VarBuilder) -> crate::Result<M>,
    options: &TrainOptions,
    rank: usize,
) -> Result<Executable, TrainError> {
    Ok(compile::step::plan(build, &options.step, rank, options.target())?)
}

/// The plan of every rank of the options' mesh, in figures.
///
/// # Errors
/// When the options or the model's shapes do not fit together, or a budget is too small.
#[cfg(feature = "hugging-face")]
pub fn ranks(config: &Config, options: &TrainOptions) -> Result<Vec<Report>, TrainError> {
    Trainer::builder(|vb| config.model(vb), options.clone()).plan_all()
}

/// Asserts that a run takes at most so many bytes on every rank.
///
/// # Panics
/// When it does not, with the bytes of each role, or when there is no such run.
#[cfg(feature = "hugging-face")]
#[track_caller]
pub fn assert_fits(config: &Config, options: &TrainOptions, bytes: u64) {
    let ranks = ranks(config, options).unwrap_or_else(|error| panic!("the run cannot be planned: {error}"));
    for (rank, report) in ranks.iter().enumerate() {
        let arena = report.arena_bytes;
        assert!(arena <= bytes, "rank {rank} takes {arena} bytes, {} more than {bytes}\n{report}", arena - bytes);
    }
}

//! What a run takes, before there is one: for a user's own tests, and for `gapless plan`.
//!
//! In: a configuration and options. Out: every rank's plan, of the training step, the evaluation and the sampling in one arena, which
//! is what a [`Trainer`] reserves, to the byte. Never: weights, a device, or an arena.
//!
//! ```
//! use gapless::models::hf::Config;
//! use gapless::{DeviceChoice, Lora, TrainOptions, Trainable};
//!
//! # let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/evidence/hf/models/mixtral_bf16/checkpoint");
//! let config = Config::read(folder)?;
//! let trainable = Trainable::Lora(Lora::default());
//! let options = TrainOptions { batch: 2, sequence: 16, trainable, device: DeviceChoice::Cpu, ..TrainOptions::default() };
//! gapless::plan::assert_fits(&config, &options, 1 << 20);
//! # Ok::<(), gapless::models::hf::HfError>(())
//! ```

use gapless_engine::Report;
use gapless_models::hf::Config;

use crate::{TrainError, TrainOptions, Trainer};

/// The plan of every rank of the options' mesh, in figures.
///
/// # Errors
/// When the options or the model's shapes do not fit together, or a budget is too small.
pub fn ranks(config: &Config, options: &TrainOptions) -> Result<Vec<Report>, TrainError> {
    (0..options.mesh.ranks()?).map(|rank| Trainer::plan_run(|vb| config.model(vb), options, rank)).collect()
}

/// Asserts that a run takes at most so many bytes on every rank.
///
/// # Panics
/// When it does not, with the bytes of each role, or when there is no such run.
#[track_caller]
pub fn assert_fits(config: &Config, options: &TrainOptions, bytes: u64) {
    let ranks = ranks(config, options).unwrap_or_else(|error| panic!("there is no such run: {error}"));
    for (rank, report) in ranks.iter().enumerate() {
        let arena = report.arena_bytes;
        assert!(arena <= bytes, "rank {rank} takes {arena} bytes, {} more than {bytes}\n{report}", arena - bytes);
    }
}

//! The options of a trainer.

use gapless_compile::Target;
use gapless_compile::step::{MemoryOptions, StepOptions};
use gapless_runtime::cpu::{MAX_THREADS, resolve_threads};

use super::DeviceChoice;
use crate::error::{Result, TrainError};
use crate::learning_rate::LearningRate;

/// The options of a trainer: the options of the training step, and the settings of the run (learning rate, seed,
/// device, threads).
#[derive(Debug, Clone)]
pub struct TrainOptions {
    /// The options that determine the step's programs and their memory.
    pub step: StepOptions,
    /// The learning rate schedule. The default is [`LearningRate::DEFAULT_PEAK`] at every step. Run files have the same
    /// peak and decay by a cosine ([`LearningRate::cosine`]), because they know the number of steps.
    pub learning_rate: LearningRate,
    /// Seed of the initial parameters and of dropout.
    pub seed: u64,
    /// The device to run on. [`TrainerBuilder::plan`](super::TrainerBuilder::plan) plans for the CPU unless this option
    /// names a GPU.
    pub device: DeviceChoice,
    /// Number of worker threads of each rank; 0 uses all cores. If several ranks are threads of one process, 0 starts
    /// more threads than there are cores. The results do not depend on the number of threads.
    pub threads: usize,
    /// Whether a GPU rounds the operands of f32 matrix products to TF32 (10 bits of mantissa instead of 23) and multiplies
    /// them on tensor cores. Sums are f32. Products are then several times as fast, and as inexact as those of bf16 with
    /// three more bits. Attention and the products of experts are not affected, nor is a CPU.
    pub tf32: bool,
    /// Whether dead ranges of the arena are filled with NaN between instructions. This is a debugging aid: if it
    /// changes the results, an instruction reads a dead range. A GPU then runs instruction by instruction, and no recording.
    pub poison: bool,
}

impl Default for TrainOptions {
    fn default() -> Self {
        Self {
            step: StepOptions::default(),
            learning_rate: LearningRate::constant(LearningRate::DEFAULT_PEAK),
            seed: 0,
            device: DeviceChoice::default(),
            threads: 0,
            tf32: false,
            poison: false,
        }
    }
}

impl From<StepOptions> for TrainOptions {
    fn from(step: StepOptions) -> Self {
        Self { step, ..Self::default() }
    }
}

impl TrainOptions {
    /// Returns the target for which a step is planned: the CPU, unless [`Self::device`] names a GPU.
    pub fn target(&self) -> Target {
        #[cfg(feature = "cuda")]
        if let DeviceChoice::Cuda(_) = self.device {
            return Target::Cuda;
        }
        Target::Cpu { threads: resolve_threads(self.threads) }
    }

    /// Returns the settings that must be equal on all ranks, with their names. The device, the number of threads, the
    /// offload folder, the planner's work limit and debugging aids may differ.
    pub(super) fn shared_by_ranks(&self) -> Vec<(&'static str, String)> {
        let Self { step, learning_rate, seed, device: _, threads: _, tf32, poison: _ } = self;
        let StepOptions { sequence_parallel, zero_stage, prefetch, reductions, .. } = step;
        let StepOptions { batch, micro_batches, sequence, precision, mesh, pipeline, memory, .. } = step;
        let StepOptions {
            trainable, loss, preference, optimizer, update, documents, keep_gradients, generation, ..
        } = step;
        let MemoryOptions { recompute, budget, rates, compress, offload, offload_to: _, .. } = memory;
        let MemoryOptions { routing, overflow, release_gradients, planning: _, .. } = memory;
        vec![
            ("mesh", format!("{mesh:?}")),
            ("pipeline schedule", format!("{pipeline:?}")),
            ("batch size", batch.to_string()),
            ("number of micro-batches", micro_batches.to_string()),
            ("sequence length", sequence.to_string()),
            ("sequence parallelism", sequence_parallel.to_string()),
            ("ZeRO stage", zero_stage.to_string()),
            ("overlap of gathers and sums", format!("{prefetch} {reductions}")),
            ("packing of documents", documents.to_string()),
            ("precision", format!("{precision:?}")),
            ("trainable part", format!("{trainable:?}")),
            ("loss", format!("{loss:?}")),
            ("preference", format!("{preference:?}")),
            ("optimizer", format!("{optimizer:?}")),
            ("update", format!("{update:?}")),
            ("learning rate", format!("{learning_rate:?}")),
            ("seed", seed.to_string()),
            ("tf32", tf32.to_string()),
            ("recompute policy", format!("{recompute:?}")),
            ("budget", format!("{budget:?} {rates:?}")),
            ("set of compressed operations", format!("{compress:?}")),
            ("set of offloaded operations", format!("{offload:?}")),
            ("reserve for routed rows", format!("{routing:?}")),
            ("overflow policy", format!("{overflow:?}")),
            ("release_gradients", release_gradients.to_string()),
            ("keep_gradients", keep_gradients.to_string()),
            ("generation", format!("{generation:?}")),
        ]
    }

    /// Returns the maximum size of the arena in bytes.
    pub(super) fn most_bytes(&self) -> u64 {
        self.step.memory.budget.unwrap_or(u64::MAX)
    }

    /// Checks the options.
    ///
    /// # Errors
    /// Returns an error if a setting is invalid; [`TrainError::refused`] returns the setting's name.
    pub fn check(&self) -> Result<()> {
        if self.threads > MAX_THREADS {
            let why = format!("{} are more than the maximum of {MAX_THREADS}", self.threads);
            let remedy = "use as many as the machine has cores, or 0 for all of them";
            return Err(TrainError::config("threads", why, remedy));
        }
        if self.tf32 && self.device == DeviceChoice::Cpu {
            let why = "only GPUs multiply in TF32, and the device is the CPU";
            return Err(TrainError::config("tf32", why, "leave it out, or use a GPU"));
        }
        self.step.check()?;
        self.learning_rate.check()?;
        Ok(())
    }
}

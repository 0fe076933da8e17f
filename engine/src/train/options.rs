//! How to train.

use gapless_parallel::Mesh;

use super::Pipeline;
use crate::error::{Error, Result};
use crate::learning_rate::{LearningRate, Shape};
use crate::optim::AdamW;

/// Everything but the model and the data.
#[derive(Debug, Clone)]
pub struct TrainOptions {
    /// Sequences per step, of all ranks together.
    pub batch: usize,
    /// Parts into which a data rank's share of the batch is cut; more of them need less memory and more time.
    pub micro_batches: usize,
    /// Tokens per sequence.
    pub sequence: usize,
    /// The update rule.
    pub optimizer: AdamW,
    /// Step → learning rate.
    pub learning_rate: LearningRate,
    /// Seed of the initial parameters and of dropout.
    pub seed: u64,
    /// Worker threads of each rank; 0 for all cores, which is too many where ranks are threads of one machine. The bits of
    /// the results do not depend on it.
    pub threads: usize,
    /// How many ranks there are, and what each is. More than one need [`Trainer::on`](super::Trainer::on).
    pub mesh: Mesh,
    /// How the ranks of a pipeline work together.
    pub pipeline: Pipeline,
    /// Hold every gradient until the next step, so that it can be read; costs their bytes.
    pub keep_gradients: bool,
    /// Fill every dead range of the arena with NaN between instructions (for tests; results must not change).
    pub poison: bool,
}

impl Default for TrainOptions {
    fn default() -> Self {
        Self {
            batch: 8,
            micro_batches: 1,
            sequence: 256,
            optimizer: AdamW::default(),
            learning_rate: LearningRate { peak: 3e-4, floor: 3e-4, warmup_steps: 0, steps: 0, shape: Shape::Constant },
            seed: 0,
            threads: 0,
            mesh: Mesh::default(),
            pipeline: Pipeline::default(),
            keep_gradients: false,
            poison: false,
        }
    }
}

impl TrainOptions {
    /// Sequences per evaluation: as many as a micro-batch has.
    pub fn evaluation_batch(&self) -> usize {
        self.batch / self.micro_batches.saturating_mul(self.mesh.data).max(1)
    }

    pub(super) fn check(&self) -> Result<()> {
        let fail = |what, why: String, remedy| Err(Error::Config { what, why, remedy });
        if self.batch == 0 || self.sequence == 0 || self.micro_batches == 0 {
            return fail("batch, sequence and micro_batches", "one of them is 0".into(), "each is at least 1");
        }
        self.mesh.ranks()?;
        let parts = self.micro_batches.saturating_mul(self.mesh.data);
        if !self.batch.is_multiple_of(parts) {
            let why = format!("{} sequences do not divide into {parts}", self.batch);
            return fail("micro_batches", why, "micro-batches × data ranks must be a divisor of the batch");
        }
        if self.pipeline.chunks == 0 {
            return fail("pipeline", "0 chunks per rank".into(), "at least 1");
        }
        if self.keep_gradients && self.mesh.data > 1 {
            let why = "data ranks have only parts of the gradients".to_owned();
            return fail("keep_gradients", why, "keep them with one data rank");
        }
        self.learning_rate.check()?;
        if !(0.0..1.0).contains(&self.optimizer.beta1) || !(0.0..1.0).contains(&self.optimizer.beta2) {
            return fail("optimizer", "a beta is outside [0, 1)".into(), "0.9 and 0.95 are usual");
        }
        let AdamW { eps, weight_decay, max_norm, .. } = self.optimizer;
        if !(eps > 0.0 && weight_decay >= 0.0 && max_norm > 0.0) {
            let why = format!("eps {eps}, weight_decay {weight_decay}, max_norm {max_norm}");
            return fail("optimizer", why, "eps and max_norm are above 0, weight_decay at least 0");
        }
        Ok(())
    }
}

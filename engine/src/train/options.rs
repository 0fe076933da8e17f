//! How to train.

use crate::error::{Error, Result};
use crate::learning_rate::{LearningRate, Shape};
use crate::optim::AdamW;

/// Everything but the model and the data.
#[derive(Debug, Clone)]
pub struct TrainOptions {
    /// Sequences per step.
    pub batch: usize,
    /// Parts into which a batch is cut; more of them need less memory and more time.
    pub micro_batches: usize,
    /// Tokens per sequence.
    pub sequence: usize,
    /// The update rule.
    pub optimizer: AdamW,
    /// Step → learning rate.
    pub learning_rate: LearningRate,
    /// Seed of the initial parameters and of dropout.
    pub seed: u64,
    /// Worker threads; 0 for all cores. The bits of the results do not depend on it.
    pub threads: usize,
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
            keep_gradients: false,
            poison: false,
        }
    }
}

impl TrainOptions {
    /// Sequences per evaluation: as many as a micro-batch has.
    pub fn evaluation_batch(&self) -> usize {
        self.batch / self.micro_batches.max(1)
    }

    pub(super) fn check(&self) -> Result<()> {
        let fail = |what, why: String, remedy| Err(Error::Config { what, why, remedy });
        if self.batch == 0 || self.sequence == 0 || self.micro_batches == 0 {
            return fail("batch, sequence and micro_batches", "one of them is 0".into(), "each is at least 1");
        }
        if !self.batch.is_multiple_of(self.micro_batches) {
            let why = format!("{} sequences do not divide into {}", self.batch, self.micro_batches);
            return fail("micro_batches", why, "choose a divisor of the batch");
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

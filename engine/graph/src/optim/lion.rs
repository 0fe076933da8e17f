//! Lion (Chen et al., arXiv 2302.06675, algorithm 2).

use candle_core::DType;

use super::momentum::{Direction, MomentumUpdate};
use super::{AdamW, Optimizer, ParameterInfo, ParameterUpdate, SCALARS, State};
use crate::error::Result;
use crate::tensor::Tensor;

/// Lion. Every element moves against the sign of a weighted mean of the moment and the gradient, so each element
/// changes by the learning rate. Lion keeps one moment, while AdamW keeps two.
///
/// The learning rate should be 3 to 10 times smaller than AdamW's, and the weight decay larger by the same factor
/// (section 5 of the paper). Weight decay applies to matrices, not to vectors. Gradients are clipped by their global
/// norm.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Lion {
    /// Weight of the moment in the mean whose sign gives the direction of a step.
    pub beta1: f64,
    /// Decay of the moment.
    pub beta2: f64,
    /// Decoupled weight decay of matrices; vectors do not decay.
    pub weight_decay: f64,
    /// The maximum global norm of the gradients. Gradients with a larger norm are scaled down to this norm. Infinity
    /// means no clipping.
    pub max_norm: f64,
}

impl Default for Lion {
    fn default() -> Self {
        Self { beta1: 0.9, beta2: 0.99, weight_decay: 0.1, max_norm: 1.0 }
    }
}

impl Lion {
    /// Returns an AdamW with the same weight decay and clipping, which checks and applies these settings.
    fn as_adamw(&self) -> AdamW {
        let Self { beta1, beta2, weight_decay, max_norm } = *self;
        AdamW { beta1, beta2, weight_decay, max_norm, ..AdamW::default() }
    }
}

impl Optimizer for Lion {
    fn check(&self) -> Result<()> {
        self.as_adamw().check()
    }

    fn needs_norm(&self) -> bool {
        self.as_adamw().needs_norm()
    }

    fn states(&self, parameter: &ParameterInfo<'_>) -> Vec<State> {
        let mut states = self.as_adamw().states(parameter);
        states.retain(|state| state.name != "exp_avg_sq");
        states
    }

    fn sum_dtype(&self, parameter: &ParameterInfo<'_>) -> DType {
        parameter.state_dtype()
    }

    fn scalars(&self, _: u64, lr: f64) -> [f32; SCALARS] {
        let mut scalars = [0.0; SCALARS];
        scalars[0] = lr as f32;
        scalars
    }

    fn update(&self, update: ParameterUpdate<'_>) -> Result<Tensor> {
        let op = MomentumUpdate {
            name: "lion",
            direction: Direction::Sign { beta: self.beta1 },
            moment_factor: self.beta2,
            gradient_factor: 1.0 - self.beta2,
            decay: self.as_adamw().decay(&update.info),
            max_norm: self.max_norm,
            has_master: update.states.len() > 1,
        };
        op.record(&update, None)
    }
}

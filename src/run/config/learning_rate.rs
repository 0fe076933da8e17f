//! `[learning_rate]`: the learning rate of each step.

use gapless_engine::learning_rate::{LearningRate, Shape};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::RunConfig;

/// The table `[learning_rate]` of a run file.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct RateConfig {
    /// The highest learning rate. The default is that of every trainer.
    pub peak: f64,
    /// The learning rate of the last step. The default is a tenth of `peak`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub floor: Option<f64>,
    /// The number of steps over which the learning rate rises to `peak`, at most a quarter of all steps.
    pub warmup_steps: u64,
    /// The shape of the decay after the warm-up.
    pub shape: RateShape,
    /// The number of decay steps of the shape `wsd`. The default is a fifth of all steps.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decay_steps: Option<u64>,
}

/// The shape of the learning rate after the warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum RateShape {
    /// The learning rate stays at `peak`.
    Constant,
    /// It falls linearly to `floor`.
    Linear,
    /// It falls along half a cosine to `floor`.
    Cosine,
    /// It falls with the inverse square root of the step.
    InverseSqrt,
    /// Warm-up, stable, decay: it stays at `peak` until the last `decay_steps` steps.
    Wsd,
}

impl Default for RateConfig {
    fn default() -> Self {
        Self {
            peak: LearningRate::DEFAULT_PEAK,
            floor: None,
            warmup_steps: 20,
            shape: RateShape::Cosine,
            decay_steps: None,
        }
    }
}

impl RunConfig {
    /// Returns the learning rate schedule of this run.
    pub(super) fn learning_rate(&self) -> LearningRate {
        // Without data, the number of steps of an epoch is not known, and no warm-up or decay is too long.
        let steps = if self.epochs.is_some() { u64::MAX } else { self.steps };
        let RateConfig { peak, floor, warmup_steps, shape, decay_steps } = self.learning_rate;
        let shape = match shape {
            RateShape::Constant => Shape::Constant,
            RateShape::Linear => Shape::Linear,
            RateShape::Cosine => Shape::Cosine,
            RateShape::InverseSqrt => Shape::InverseSqrt,
            RateShape::Wsd => Shape::Wsd { decay_steps: decay_steps.unwrap_or(steps / 5) },
        };
        // A warm-up that is too long for a short run is shortened, so that users need not change it by hand.
        let warmup_steps = warmup_steps.min(steps / 4);
        LearningRate { peak, floor: floor.unwrap_or(peak / 10.0), warmup_steps, steps, shape }
    }
}

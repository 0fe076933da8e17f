//! `[learning_rate]`: step → learning rate.

use gapless_engine::learning_rate::{LearningRate, Shape};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::RunConfig;

/// `[learning_rate]`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct RateConfig {
    /// The highest.
    pub peak: f64,
    /// The last; a tenth of the highest where it is absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub floor: Option<f64>,
    /// Steps on which it rises; a quarter of all, at most.
    pub warmup_steps: u64,
    /// What comes then.
    pub shape: RateShape,
    /// Steps of the decay of `wsd`; a fifth of all where it is absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decay_steps: Option<u64>,
}

/// What a learning rate does after the warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum RateShape {
    /// It stays.
    Constant,
    /// A line.
    Linear,
    /// Half a cosine.
    Cosine,
    /// One over the root of the step.
    InverseSqrt,
    /// Warm-up, stable, decay.
    Wsd,
}

impl Default for RateConfig {
    fn default() -> Self {
        Self { peak: 1e-3, floor: None, warmup_steps: 20, shape: RateShape::Cosine, decay_steps: None }
    }
}

impl RunConfig {
    /// The schedule of all steps.
    pub(super) fn learning_rate(&self) -> LearningRate {
        let RateConfig { peak, floor, warmup_steps, shape, decay_steps } = self.learning_rate;
        let shape = match shape {
            RateShape::Constant => Shape::Constant,
            RateShape::Linear => Shape::Linear,
            RateShape::Cosine => Shape::Cosine,
            RateShape::InverseSqrt => Shape::InverseSqrt,
            RateShape::Wsd => Shape::Wsd { decay_steps: decay_steps.unwrap_or(self.steps / 5) },
        };
        // A short run is no reason to shorten the warm-up by hand.
        let warmup_steps = warmup_steps.min(self.steps / 4);
        LearningRate { peak, floor: floor.unwrap_or(peak / 10.0), warmup_steps, steps: self.steps, shape }
    }
}

//! Protection against loss spikes: a step is skipped if its loss or gradient norm is far above those of recent steps.
//! After too many skipped steps in a row, the run returns to a checkpoint.

use std::collections::VecDeque;

use gapless_engine::{SkipThresholds, StepReport};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// `[guard]`: the conditions under which a step is skipped. A skipped step changes no parameter and no optimizer state.
/// Its row in metrics.jsonl has `skipped`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct GuardConfig {
    /// A step is skipped if its gradient norm is more than this multiple of the median norm of recent steps.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub norm: Option<f32>,
    /// A step is skipped if its loss exceeds the median loss of recent steps by more than this amount.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loss: Option<f32>,
    /// The number of recent steps from which the medians are computed. Skipped steps do not count. Until this many
    /// steps are done, a step is only skipped if its loss or gradient norm is not finite.
    pub window: usize,
    /// The number of skipped steps in a row that end the run or trigger a rollback.
    pub patience: u64,
    /// The maximum number of rollbacks. A rollback returns to the last checkpoint from before a series of skipped
    /// steps, and continues with data that the run has not seen.
    pub rollbacks: u64,
}

impl Default for GuardConfig {
    fn default() -> Self {
        Self { norm: None, loss: None, window: 50, patience: 10, rollbacks: 0 }
    }
}

impl GuardConfig {
    /// True if these settings allow a step to be skipped.
    pub fn is_on(&self) -> bool {
        self.norm.is_some() || self.loss.is_some()
    }
}

/// Recent losses and norms. Checkpoints store them, so that a resumed run skips the same steps.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub(super) struct Recent {
    losses: VecDeque<f32>,
    norms: VecDeque<f32>,
    /// Number of steps skipped in a row, up to now.
    pub skipped: u64,
    /// Number of rollbacks so far.
    #[serde(default)]
    pub rollbacks: u64,
    /// The number of batches that rollbacks have skipped in the data: step n reads batch n + `data_offset`.
    #[serde(default, rename = "ahead")]
    pub data_offset: u64,
}

impl Recent {
    /// Returns the thresholds above which the next step is skipped.
    pub fn thresholds(&self, guard: &GuardConfig) -> SkipThresholds {
        if self.losses.len() < guard.window {
            return SkipThresholds::default();
        }
        SkipThresholds {
            loss: guard.loss.map_or(f32::INFINITY, |above| median(&self.losses) + above),
            gradient_norm: guard.norm.map_or(f32::INFINITY, |times| median(&self.norms) * times),
        }
    }

    pub fn push(&mut self, step: &StepReport, guard: &GuardConfig) {
        if step.skipped {
            self.skipped += 1;
            return;
        }
        self.skipped = 0;
        for (all, new) in [(&mut self.losses, step.loss), (&mut self.norms, step.gradient_norm)] {
            all.push_back(new);
            all.drain(..all.len().saturating_sub(guard.window));
        }
    }

    /// Returns the state after a rollback to the checkpoint that contains `self`. `now` is the state right before the
    /// rollback, `steps` steps after the checkpoint.
    pub fn rolled_back(self, now: &Self, steps: u64) -> Self {
        Self { skipped: 0, rollbacks: now.rollbacks + 1, data_offset: now.data_offset + steps, ..self }
    }
}

/// Returns the median of finite values. If their number is even, this is the larger of the two values in the middle.
/// Without values, returns infinity.
fn median(values: &VecDeque<f32>) -> f32 {
    let mut sorted: Vec<f32> = values.iter().copied().collect();
    sorted.sort_unstable_by(f32::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f32::INFINITY)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_above_medians_of_what_was_done() {
        let guard = GuardConfig { norm: Some(3.0), loss: Some(0.5), window: 3, patience: 2, rollbacks: 0 };
        let step = |loss, gradient_norm, skipped| StepReport {
            step: 0,
            loss,
            loss_parts: None,
            rewards: None,
            gradient_norm,
            lr: 0.0,
            skipped,
        };
        let mut recent = Recent::default();
        for (loss, norm) in [(9.0, 90.0), (4.0, 1.0), (5.0, 3.0)] {
            assert_eq!(recent.thresholds(&guard), SkipThresholds::default());
            recent.push(&step(loss, norm, false), &guard);
        }
        assert_eq!(recent.thresholds(&guard), SkipThresholds { loss: 5.5, gradient_norm: 9.0 });
        recent.push(&step(50.0, 7.0, true), &guard);
        assert_eq!((recent.thresholds(&guard), recent.skipped), (SkipThresholds { loss: 5.5, gradient_norm: 9.0 }, 1));
        recent.push(&step(2.0, 2.0, false), &guard);
        assert_eq!((recent.thresholds(&guard), recent.skipped), (SkipThresholds { loss: 4.5, gradient_norm: 6.0 }, 0));
        let text = serde_json::to_string(&recent).unwrap();
        assert_eq!(serde_json::from_str::<Recent>(&text).unwrap(), recent);
    }
}

//! Events that a training loop reports to its callback.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use gapless_engine::nn::Rewards;
use gapless_engine::{StepReport, Times, Trainer};
use serde::Serialize;

/// An event of a [`TrainingLoop`](super::TrainingLoop). `Display` formats an event as a line of text. Serde serializes
/// an event as a row for a file ([`Console::row`](super::Console::row)).
#[derive(Debug, Clone, Serialize)]
#[serde(untagged)]
pub enum Event {
    /// A step was done.
    Step {
        /// The trainer's report.
        #[serde(flatten)]
        report: StepReport,
        /// Mean tokens per second since the loop began. Only the time of steps counts, not the time between them.
        tokens_per_second: f64,
        /// Durations of the parts of this step.
        seconds: Seconds,
    },
    /// The validation loss was measured.
    Evaluation {
        /// Number of steps done before the evaluation.
        step: u64,
        /// Mean −log p over the targets of the validation windows, without the other terms of a training loss. `None`
        /// if no target counts.
        val_loss: Option<f32>,
        /// Mean rewards of the pairs of the validation windows; `None` if the run does not train on preferences. The loss
        /// is then the mean loss of these pairs.
        #[serde(skip_serializing_if = "Option::is_none")]
        val_rewards: Option<Rewards>,
        /// Duration of this evaluation.
        seconds: Seconds,
    },
    /// A checkpoint was saved.
    Saved {
        /// Folder of the checkpoint.
        saved: PathBuf,
    },
    /// Too many steps in a row were skipped, and the run returned to a checkpoint
    /// ([`GuardConfig::rollbacks`](super::GuardConfig::rollbacks)).
    RolledBack {
        /// Number of steps of the trainer before the rollback.
        from: u64,
        /// Number of steps of the trainer after the rollback, which is the checkpoint's number of steps.
        to: u64,
    },
}

/// Durations of the parts of a step or evaluation, in seconds. A field is `None` if the part took no time, or if its
/// time is unknown.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Seconds {
    /// Reading the tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data: Option<f32>,
    /// The whole step except for reading the tokens; includes the parts below.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step: Option<f32>,
    /// The forward pass.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub forward: Option<f32>,
    /// The backward pass, including recomputation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backward: Option<f32>,
    /// The update: gradient norm, clipping and optimizer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub update: Option<f32>,
    /// Starting messages and collectives, and waiting for them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub communication: Option<f32>,
    /// The evaluation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub evaluation: Option<f32>,
}

impl Seconds {
    /// Returns the times of the step that the trainer has just done.
    pub(super) fn of_step(trainer: &Trainer, data: Duration, step: Duration) -> Self {
        let there = |time: Duration| Some(time.as_secs_f32()).filter(|_| !time.is_zero());
        let part = |select: fn(Times) -> Duration| trainer.times().and_then(|times| there(select(times)));
        Self {
            data: there(data),
            step: there(step),
            forward: part(|times| times.forward),
            backward: part(|times| times.backward),
            update: part(|times| times.update),
            communication: part(|times| times.communication),
            evaluation: None,
        }
    }
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Step { report, tokens_per_second, .. } => {
                let StepReport { step, loss, gradient_norm, lr, skipped, .. } = report;
                let parts = report.loss_parts.map_or(String::new(), |parts| format!(" ({parts})"));
                let rewards = report.rewards.map_or(String::new(), |rewards| format!(" {rewards}"));
                let left_out = if *skipped { " skipped" } else { "" };
                write!(
                    f,
                    "step {step:>5} loss {loss:.3}{parts}{rewards} norm {gradient_norm:.2} lr {lr:.1e} {tokens_per_second:.0} tokens/s{left_out}"
                )
            }
            Self::Evaluation { step, val_loss: Some(loss), val_rewards, .. } => {
                let rewards = val_rewards.map_or(String::new(), |rewards| format!(" {rewards}"));
                write!(f, "step {step:>5} validation loss {loss:.4}{rewards}")
            }
            Self::Evaluation { step, val_loss: None, .. } => {
                write!(f, "step {step:>5} validation loss not measured: all targets are ignored")
            }
            Self::Saved { saved } => write!(f, "saved {}", saved.display()),
            Self::RolledBack { from, to } => {
                write!(f, "rolled back from step {from} to the checkpoint of step {to}; continuing with other data")
            }
        }
    }
}

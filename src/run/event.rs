//! What a loop tells whoever follows it.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use gapless_engine::{StepReport, Times, Trainer};
use serde::Serialize;

/// What has happened in a [`Fit`](super::Fit): a line to read, or a row for a file ([`Console::row`](super::Console::row)).
#[derive(Debug, Clone, Serialize)]
#[serde(untagged)]
pub enum Event {
    /// A step.
    Step {
        /// What it says.
        #[serde(flatten)]
        report: StepReport,
        /// Mean since the loop began, of steps alone.
        tokens_per_second: f64,
        /// Where its time went.
        seconds: Seconds,
    },
    /// An evaluation.
    Evaluation {
        /// The last step before it, counted from 0.
        step: u64,
        /// Mean −log p over the targets of the validation windows, without whatever else a training loss counts; none where no target
        /// counts.
        val_loss: Option<f32>,
        /// Where its time went.
        seconds: Seconds,
    },
    /// A checkpoint.
    Saved {
        /// Its folder.
        saved: PathBuf,
    },
    /// Too many steps in a row were left out, and the run has gone back ([`GuardConfig::rollbacks`](super::GuardConfig::rollbacks)).
    RolledBack {
        /// Steps that were done.
        from: u64,
        /// Those of the checkpoint.
        to: u64,
    },
}

/// Where time went, in seconds; what there was none of, or what is not known, is not said.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Seconds {
    /// Reading tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data: Option<f32>,
    /// The step: what is below, and what is around it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step: Option<f32>,
    /// The forward pass.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub forward: Option<f32>,
    /// The backward pass, with what it computes again.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backward: Option<f32>,
    /// Norm, clipping, optimizer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub update: Option<f32>,
    /// Messages and collectives: beginning them, and waiting.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub communication: Option<f32>,
    /// An evaluation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub evaluation: Option<f32>,
}

impl Seconds {
    /// Of a step that has just been done.
    pub(super) fn of_step(trainer: &Trainer, data: Duration, step: Duration) -> Self {
        let there = |time: Duration| Some(time.as_secs_f32()).filter(|_| !time.is_zero());
        let part = |of: fn(Times) -> Duration| trainer.times().and_then(|times| there(of(times)));
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
                let left_out = if *skipped { " skipped" } else { "" };
                write!(
                    f,
                    "step {step:>5} loss {loss:.3}{parts} norm {gradient_norm:.2} lr {lr:.1e} {tokens_per_second:.0} tokens/s{left_out}"
                )
            }
            Self::Evaluation { step, val_loss: Some(loss), .. } => {
                write!(f, "step {step:>5} validation loss {loss:.4}")
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

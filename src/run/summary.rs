//! The summary of a run that has ended: `summary.json` and the last line of output.

use std::fmt;
use std::path::PathBuf;

use gapless_engine::Trainer;
use gapless_engine::metrics::peak_rss_bytes;
use serde::Serialize;

use super::{Ended, TrainingOutcome};

/// The summary of a run that has ended: `summary.json`.
#[derive(Debug, Clone, Serialize)]
pub struct Summary {
    /// Loss of the last step; null if no step was left to do.
    pub final_loss: Option<f32>,
    /// Validation loss of the last evaluation; null if there was no evaluation.
    pub val_loss: Option<f32>,
    /// Mean tokens per second of this process. Only the time of steps counts.
    pub tokens_per_second: f64,
    /// Number of steps done in total.
    pub steps: u64,
    /// Number of trained parameters.
    pub parameters: u64,
    /// Size of the planned arena.
    pub arena_bytes: u64,
    /// Lower bound of the arena: no plan is smaller.
    pub lower_bound_bytes: u64,
    /// Arena divided by lower bound.
    pub gap: f64,
    /// Peak resident memory of the process.
    pub peak_rss_bytes: Option<u64>,
    /// Time that planning took.
    pub plan_ms: f64,
    /// Hash of the plan; equal plans have equal hashes.
    pub plan_hash: String,
    /// The reason why the run ended.
    pub ended: Ended,
    /// The number of the signal that ended the run early; null if no signal arrived.
    pub signal: Option<u8>,
    /// Name of the subfolder with the trained weights. Null if the model did not come from a folder.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weights: Option<PathBuf>,
}

impl Summary {
    /// Summarizes a run that has ended. `signal` is the signal that ended the run, or `None`.
    pub fn new(trainer: &Trainer, fitted: &TrainingOutcome, signal: Option<u8>) -> Self {
        let report = trainer.report();
        Self {
            final_loss: fitted.loss,
            val_loss: fitted.val_loss,
            tokens_per_second: fitted.tokens_per_second,
            steps: trainer.steps(),
            parameters: report.parameters,
            arena_bytes: report.arena_bytes,
            lower_bound_bytes: report.lower_bound_bytes,
            gap: report.gap,
            peak_rss_bytes: peak_rss_bytes(),
            plan_ms: report.plan_ms,
            plan_hash: report.plan_hash.to_string(),
            ended: fitted.ended,
            signal,
            weights: None,
        }
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} steps", self.steps)?;
        if let Some(loss) = self.final_loss {
            write!(f, ", loss {loss:.4}, {:.0} tokens/s", self.tokens_per_second)?;
        }
        if let Some(loss) = self.val_loss {
            write!(f, ", validation loss {loss:.4}")?;
        }
        let mebibytes = self.arena_bytes as f64 / f64::from(1 << 20);
        write!(f, ", arena {mebibytes:.1} MiB ({:.4} of the lower bound)", self.gap)
    }
}

//! How a run ended: what it says last, and `summary.json`.

use std::fmt;
use std::path::PathBuf;

use gapless_engine::Trainer;
use gapless_engine::metrics::peak_rss_bytes;
use serde::Serialize;

use super::{Ended, Fitted};

/// How a run ended: `summary.json`.
#[derive(Debug, Clone, Serialize)]
pub struct Summary {
    /// Loss of the last step; none where no step was left to do.
    pub final_loss: Option<f32>,
    /// Mean loss over the validation windows; none where there are too few.
    pub val_loss: Option<f32>,
    /// Mean since the start of the process.
    pub tokens_per_second: f64,
    /// Steps done.
    pub steps: u64,
    /// Numbers that are trained.
    pub parameters: u64,
    /// Of the planned arena.
    pub arena_bytes: u64,
    /// No plan is smaller.
    pub lower_bound_bytes: u64,
    /// Arena ÷ lower bound.
    pub gap: f64,
    /// Most memory that the process has held.
    pub peak_rss_bytes: Option<u64>,
    /// Of planning.
    pub plan_ms: f64,
    /// Same hash, same plan.
    pub plan_hash: String,
    /// Why it ended.
    pub ended: Ended,
    /// The signal that ended it early.
    pub signal: Option<u8>,
    /// The folder of the trained weights within the run's folder, where the model came as a folder.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weights: Option<PathBuf>,
}

impl Summary {
    /// Of a run that has ended, by a signal or not.
    pub fn new(trainer: &Trainer, fitted: &Fitted, signal: Option<u8>) -> Self {
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

//! The result of a command, as text and as JSON.

use serde::Serialize;
use serde_json::{Value, json};

/// The outcome of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    Done,
    /// A result was measured, and it is wrong.
    Failed,
    /// There is no GPU.
    Skipped,
}

/// The outcome of a command, with the text that it prints and the JSON that it writes.
#[derive(Debug)]
pub struct Found {
    pub outcome: Outcome,
    pub text: String,
    pub json: Value,
}

impl Found {
    /// Creates the outcome of a measurement, which failed unless `is_right`.
    pub fn new(is_right: bool, text: String, figures: &impl Serialize) -> anyhow::Result<Self> {
        let outcome = if is_right { Outcome::Done } else { Outcome::Failed };
        Ok(Self { outcome, text, json: serde_json::to_value(figures)? })
    }

    /// Creates the outcome of a command that needs a GPU on a machine without one. `why` is the engine's reason.
    pub fn skipped(why: &str) -> Self {
        Self { outcome: Outcome::Skipped, text: format!("skipped: {why}"), json: json!({ "skipped": why }) }
    }
}

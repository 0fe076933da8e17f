//! The result of a command, as text and as JSON.

use serde::Serialize;
use serde_json::{Value, json};

/// The outcome of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    Done,
    /// A measured result is wrong.
    Failed,
    /// There is no GPU.
    Skipped,
}

/// A command's outcome, the text that it prints and the JSON that it writes.
#[derive(Debug)]
pub struct Found {
    pub outcome: Outcome,
    pub text: String,
    pub json: Value,
}

impl Found {
    /// A measurement, and whether it is correct.
    pub fn new(is_right: bool, text: String, figures: &impl Serialize) -> anyhow::Result<Self> {
        let outcome = if is_right { Outcome::Done } else { Outcome::Failed };
        Ok(Self { outcome, text, json: serde_json::to_value(figures)? })
    }

    /// A missing GPU, with the engine's reason.
    pub fn skipped(why: &str) -> Self {
        Self { outcome: Outcome::Skipped, text: format!("skipped: {why}"), json: json!({ "skipped": why }) }
    }
}

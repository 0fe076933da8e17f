//! What a command found: for readers, and for programs.

use serde::Serialize;
use serde_json::{Value, json};

/// How a command ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    Done,
    /// Something was found to be wrong.
    Failed,
    /// There is no GPU.
    Skipped,
}

/// What a command prints and writes.
#[derive(Debug)]
pub struct Found {
    pub outcome: Outcome,
    pub text: String,
    pub json: Value,
}

impl Found {
    /// What was measured, and whether it is as it has to be.
    pub fn new(is_right: bool, text: String, figures: &impl Serialize) -> anyhow::Result<Self> {
        let outcome = if is_right { Outcome::Done } else { Outcome::Failed };
        Ok(Self { outcome, text, json: serde_json::to_value(figures)? })
    }

    /// That there is no GPU, in the engine's words.
    pub fn skipped(why: &str) -> Self {
        Self { outcome: Outcome::Skipped, text: format!("skipped: {why}"), json: json!({ "skipped": why }) }
    }
}

//! Finds the largest micro-batch whose arena fits a budget. Only plans steps, without running them.

use gapless::engine::Error;
use serde::Serialize;

use super::batch::largest;
use super::record::Found;
use super::step::{Float, Model, Planned, Step};

#[derive(Debug, Clone, Copy, clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    shape: Shape,
    /// Maximum bytes of the arena
    #[arg(long, value_name = "BYTES")]
    budget: u64,
}

/// The options of a step, except its micro-batch.
#[derive(Debug, Clone, Copy, clap::Args)]
#[group(skip)]
pub struct Shape {
    #[arg(long, value_enum, default_value_t = Model::Gpt2)]
    pub model: Model,
    /// Tokens per sequence.
    #[arg(long, default_value_t = 1024)]
    pub sequence: usize,
    #[arg(long, value_enum, default_value_t = Float::Bf16)]
    pub dtype: Float,
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
}

/// A step with its plan, for the largest micro-batch within a budget or for a given one.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Sized {
    pub budget_bytes: Option<u64>,
    #[serde(flatten)]
    pub step: Step,
    #[serde(flatten)]
    pub planned: Planned,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<Found> {
    let found = arguments.shape.largest(arguments.budget)?;
    let Sized { step, planned, .. } = &found;
    let text = format!(
        "micro-batch {} × {} in {}: an arena of {} bytes within {}",
        step.micro_batch, step.sequence, step.dtype, planned.arena_bytes, arguments.budget
    );
    Found::new(true, text, &found)
}

impl Shape {
    /// Returns the step with this micro-batch.
    pub fn step(&self, micro_batch: usize) -> Step {
        let &Self { model, sequence, dtype, seed, .. } = self;
        Step { model, dtype, micro_batch, sequence, seed }
    }

    /// Returns the step with this micro-batch, and its plan.
    ///
    /// # Errors
    /// Returns an error if the step cannot be planned.
    pub fn sized(&self, micro_batch: usize) -> anyhow::Result<Sized> {
        let step = self.step(micro_batch);
        Ok(Sized { budget_bytes: None, step, planned: step.plan()? })
    }

    /// Finds the largest micro-batch whose arena fits a budget.
    ///
    /// # Errors
    /// Returns an error if one sequence does not fit, or if a step cannot be planned.
    pub fn largest(&self, budget: u64) -> anyhow::Result<Sized> {
        let mut smallest = None;
        let found = largest(|micro_batch| {
            let planned = self.step(micro_batch).plan()?;
            smallest.get_or_insert(planned.arena_bytes);
            Ok::<_, Error>((planned.arena_bytes <= budget).then_some(planned))
        })?;
        let Some((micro_batch, planned)) = found else {
            let needed = smallest.unwrap_or_default();
            anyhow::bail!("one sequence needs an arena of {needed} bytes, but the budget is {budget}");
        };
        Ok(Sized { budget_bytes: Some(budget), step: self.step(micro_batch), planned })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_of_a_step_finds_that_step_and_one_byte_less_the_one_before() {
        let shape = Shape { model: Model::Small, sequence: 16, dtype: Float::Bf16, seed: 0 };
        let bytes = |micro_batch| shape.sized(micro_batch).unwrap().planned.arena_bytes;
        for micro_batch in [2, 5] {
            let budget = bytes(micro_batch);
            assert_eq!(shape.largest(budget).unwrap().step.micro_batch, micro_batch);
            assert_eq!(shape.largest(budget - 1).unwrap().step.micro_batch, micro_batch - 1);
        }
        let refused = shape.largest(1000).unwrap_err().to_string();
        assert_eq!(refused, format!("one sequence needs an arena of {} bytes, but the budget is 1000", bytes(1)));
    }
}

//! The largest micro-batch whose arena fits a budget: from plans alone.

use gapless::engine::Error;
use serde::Serialize;

use super::batch::largest;
use super::record::Found;
use super::step::{Float, Model, Planned, Step};

#[derive(Debug, Clone, Copy, clap::Args)]
#[group(skip)]
pub struct Arguments {
    #[arg(long, value_enum, default_value_t = Model::Gpt2)]
    pub model: Model,
    /// Bytes that the arena may take.
    #[arg(long, value_name = "BYTES")]
    pub budget: u64,
    /// Tokens per sequence.
    #[arg(long, default_value_t = 1024)]
    pub sequence: usize,
    #[arg(long, value_enum, default_value_t = Float::Bf16)]
    pub dtype: Float,
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
}

/// The step of the largest micro-batch within a budget.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Largest {
    pub budget_bytes: u64,
    #[serde(flatten)]
    pub step: Step,
    #[serde(flatten)]
    pub planned: Planned,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<Found> {
    let found = arguments.largest()?;
    let Largest { budget_bytes, step, planned } = &found;
    let text = format!(
        "micro-batch {} × {} in {}: an arena of {} bytes within {budget_bytes}",
        step.micro_batch, step.sequence, step.dtype, planned.arena_bytes
    );
    Found::new(true, text, &found)
}

impl Arguments {
    /// A step of a given micro-batch.
    pub fn step(&self, micro_batch: usize) -> Step {
        let &Self { model, sequence, dtype, seed, .. } = self;
        Step { model, dtype, micro_batch, sequence, seed }
    }

    /// Searches plans for it.
    ///
    /// # Errors
    /// When not even one sequence fits, or there is no such step.
    pub fn largest(&self) -> anyhow::Result<Largest> {
        let mut smallest = None;
        let found = largest(|micro_batch| {
            let planned = self.step(micro_batch).plan()?;
            smallest.get_or_insert(planned.arena_bytes);
            Ok::<_, Error>((planned.arena_bytes <= self.budget).then_some(planned))
        })?;
        let Some((micro_batch, planned)) = found else {
            let needed = smallest.unwrap_or_default();
            anyhow::bail!("one sequence needs an arena of {needed} bytes, and the budget is {}", self.budget);
        };
        Ok(Largest { budget_bytes: self.budget, step: self.step(micro_batch), planned })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_of_a_step_finds_that_step_and_one_byte_less_the_one_before() {
        let within = |budget| Arguments { model: Model::Small, budget, sequence: 16, dtype: Float::Bf16, seed: 0 };
        let bytes = |micro_batch| within(0).step(micro_batch).plan().unwrap().arena_bytes;
        for micro_batch in [2, 5] {
            let budget = bytes(micro_batch);
            assert_eq!(within(budget).largest().unwrap().step.micro_batch, micro_batch);
            assert_eq!(within(budget - 1).largest().unwrap().step.micro_batch, micro_batch - 1);
        }
        let refused = within(1000).largest().unwrap_err().to_string();
        assert_eq!(refused, format!("one sequence needs an arena of {} bytes, and the budget is 1000", bytes(1)));
    }
}

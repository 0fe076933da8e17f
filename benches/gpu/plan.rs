//! Plans a step without running it: the largest micro-batch whose arena fits a budget, or what a given micro-batch
//! recomputes within a budget.

use gapless::engine::Error;
use gapless::engine::compile::report::{RecomputedLayer, recomputed_layers};
use serde::Serialize;

use super::batch::largest;
use super::record::Found;
use super::step::{Float, Model, Step};

#[derive(Debug, Clone, Copy, clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    shape: Shape,
    /// Sequences of a micro-batch; without it, the largest one that fits the budget without recomputation is searched
    #[arg(long, required_unless_present = "budget")]
    micro_batch: Option<usize>,
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
    /// Maximum bytes of the arena; a given micro-batch that does not fit is recomputed in part
    #[arg(long, value_name = "BYTES")]
    pub budget: Option<u64>,
}

#[derive(Debug, Serialize)]
struct Figures {
    #[serde(flatten)]
    step: Step,
    arena_bytes: u64,
    /// Arithmetic of recomputed operations, relative to all other arithmetic.
    recomputed: f64,
    layers: Vec<RecomputedLayer>,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<Found> {
    let step = arguments.shape.chosen(arguments.micro_batch)?;
    let program = step.program()?;
    let recomputed = step.arithmetic()?.recomputed(program.flops());
    let mut layers = recomputed_layers(&program);
    layers.retain(|layer| !layer.ops.is_empty());
    let arena_bytes = step.compiled(program)?.arena_bytes();
    let within = step.budget_bytes.map_or_else(String::new, |budget| format!(" within {budget}"));
    let mut text = format!(
        "micro-batch {} × {} in {}: an arena of {arena_bytes} bytes{within}; recomputed: {:.2}% of the arithmetic",
        step.micro_batch,
        step.sequence,
        step.dtype,
        100.0 * recomputed,
    );
    for group in layers.chunk_by(|a, b| a.ops == b.ops) {
        let (first, last) = (&group[0], &group[group.len() - 1]);
        let range = if group.len() == 1 { first.layer.clone() } else { format!("{} … {}", first.layer, last.layer) };
        text += &format!("\n{range}: {}", first.ops.join(", "));
    }
    Found::new(true, text, &Figures { step, arena_bytes, recomputed, layers })
}

impl Shape {
    /// Returns the step with this micro-batch.
    pub fn step(&self, micro_batch: usize) -> Step {
        let &Self { model, sequence, dtype, seed, budget, .. } = self;
        Step { model, dtype, micro_batch, sequence, seed, budget_bytes: budget }
    }

    /// Returns the step with this micro-batch or, if none is given, with the largest one that fits the budget without
    /// recomputation.
    ///
    /// # Errors
    /// Returns an error if one sequence does not fit, if a step cannot be planned, or if both are missing.
    pub fn chosen(&self, micro_batch: Option<usize>) -> anyhow::Result<Step> {
        match (micro_batch, self.budget) {
            (Some(micro_batch), _) => Ok(self.step(micro_batch)),
            (None, Some(budget)) => self.largest(budget),
            (None, None) => anyhow::bail!("give --budget or --micro-batch"),
        }
    }

    fn largest(&self, budget: u64) -> anyhow::Result<Step> {
        let mut smallest = None;
        let found = largest(|micro_batch| {
            let bytes = Step { budget_bytes: None, ..self.step(micro_batch) }.arena_bytes()?;
            smallest.get_or_insert(bytes);
            Ok::<_, Error>((bytes <= budget).then_some(()))
        })?;
        let Some((micro_batch, ())) = found else {
            let needed = smallest.unwrap_or_default();
            anyhow::bail!("one sequence needs an arena of {needed} bytes, but the budget is {budget}");
        };
        Ok(self.step(micro_batch))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_of_a_step_finds_that_step_and_one_byte_less_the_one_before() {
        let shape = Shape { model: Model::Small, sequence: 16, dtype: Float::Bf16, seed: 0, budget: None };
        let bytes = |micro_batch| shape.step(micro_batch).arena_bytes().unwrap();
        for micro_batch in [2, 5] {
            let budget = bytes(micro_batch);
            assert_eq!(shape.largest(budget).unwrap().micro_batch, micro_batch);
            assert_eq!(shape.largest(budget - 1).unwrap().micro_batch, micro_batch - 1);
        }
        let refused = shape.largest(1000).unwrap_err().to_string();
        assert_eq!(refused, format!("one sequence needs an arena of {} bytes, but the budget is 1000", bytes(1)));
    }
}

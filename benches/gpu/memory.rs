//! Breaks down the device memory in use, as the driver reports it: the arena and all other uses, to the page.

use gapless::engine::cuda::DeviceMemory;
use serde::Serialize;

use super::probe::{Card, Gpu};
use super::record::Found;
use super::step::{Float, Model, Step};
use super::tokens::Tokens;

#[derive(Debug, clap::Args)]
pub struct Arguments {
    #[arg(long, value_enum, default_value_t = Model::Gpt2)]
    model: Model,
    /// The GPU.
    #[arg(long, default_value_t = Gpu(0))]
    device: Gpu,
    #[arg(long, value_enum, default_value_t = Float::Bf16)]
    dtype: Float,
    /// Number of steps before the driver is asked for the memory in use
    #[arg(long, default_value_t = 3)]
    steps: usize,
    #[arg(long, default_value_t = 4)]
    micro_batch: usize,
    #[arg(long, default_value_t = 1024)]
    sequence: usize,
}

#[derive(Debug, Serialize)]
struct Figures {
    #[serde(flatten)]
    card: Card,
    #[serde(flatten)]
    step: Step,
    planned_bytes: u64,
    losses: Vec<f32>,
    #[serde(flatten)]
    memory: DeviceMemory,
    rounding: i64,
    unexplained: i64,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<Found> {
    let card = match arguments.device.found() {
        Ok(card) => card,
        Err(why) => return Ok(Found::skipped(&why)),
    };
    let &Arguments { model, dtype, micro_batch, sequence, .. } = arguments;
    let step = Step { model, dtype, micro_batch, sequence, seed: 0 };
    let mut trainer = step.trainer(arguments.device.choice())?;
    let mut text = Tokens::uniform(step.config().vocabulary(), step.seed);
    let mut losses = Vec::new();
    for _ in 0..arguments.steps {
        let (tokens, targets) = text.batch(micro_batch, sequence);
        losses.push(trainer.step(&tokens, &targets)?.loss);
    }
    let memory = trainer.device_memory()?.ok_or_else(|| anyhow::anyhow!("{}", trainer.device()))?;
    let planned_bytes = trainer.report().arena_bytes;
    let (rounding, unexplained) = (memory.rounding(), memory.unexplained());
    let text = format!("{card}, after {} steps; {planned_bytes} bytes planned\n{memory}", arguments.steps);
    Found::new(unexplained == 0, text, &Figures { card, step, planned_bytes, losses, memory, rounding, unexplained })
}

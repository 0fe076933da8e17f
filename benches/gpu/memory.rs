//! Breaks down the device memory in use, as the driver reports it: the arena and all other uses, to the page.

use gapless::engine::cuda::DeviceMemory;
use serde::Serialize;

use super::plan::Shape;
use super::probe::{Card, Gpu};
use super::record::Found;
use super::step::Step;
use super::tokens::Tokens;

#[derive(Debug, clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    shape: Shape,
    /// The GPU.
    #[arg(long, default_value_t = Gpu(0))]
    device: Gpu,
    /// Number of steps before the driver is asked for the memory in use
    #[arg(long, default_value_t = 3)]
    steps: usize,
    #[arg(long, default_value_t = 4)]
    micro_batch: usize,
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
    let step = arguments.shape.step(arguments.micro_batch);
    let mut trainer = step.trainer(arguments.device.choice())?;
    let mut text = Tokens::uniform(step.config().vocabulary(), step.seed);
    let mut losses = Vec::new();
    for _ in 0..arguments.steps {
        let (tokens, targets) = text.batch(step.micro_batch, step.sequence);
        losses.push(trainer.step(&tokens, &targets)?.loss);
    }
    let memory = trainer.device_memory()?.ok_or_else(|| anyhow::anyhow!("{}", trainer.device()))?;
    let planned_bytes = trainer.report().arena_bytes;
    let (rounding, unexplained) = (memory.rounding(), memory.unexplained());
    let text = format!("{card}, after {} steps; {planned_bytes} bytes planned\n{memory}", arguments.steps);
    Found::new(unexplained == 0, text, &Figures { card, step, planned_bytes, losses, memory, rounding, unexplained })
}

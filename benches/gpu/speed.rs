//! Measures tokens per second with a given micro-batch, or with the largest one that fits a budget.

use std::time::Instant;

use anyhow::Context;
use gapless::Trainer;
use gapless::engine::cuda::DeviceMemory;
use serde::Serialize;

use super::figures::{PeakArguments, median};
use super::plan::{Shape, Sized};
use super::probe::{Card, Gpu};
use super::record::Found;
use super::tokens::Tokens;

#[derive(Debug, clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    shape: Shape,
    /// Maximum bytes of the arena; the largest micro-batch that fits is measured
    #[arg(long, value_name = "BYTES", required_unless_present = "micro_batch")]
    budget: Option<u64>,
    /// Sequences of a micro-batch; without it, the largest one that fits the budget is searched
    #[arg(long, conflicts_with = "budget")]
    micro_batch: Option<usize>,
    /// The GPU.
    #[arg(long, default_value_t = Gpu(0))]
    device: Gpu,
    /// Measured steps.
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..))]
    steps: u64,
    /// Steps before them.
    #[arg(long, default_value_t = 5)]
    warmup: u64,
    #[command(flatten)]
    peak: PeakArguments,
}

#[derive(Debug, Serialize)]
struct Figures {
    #[serde(flatten)]
    card: Card,
    #[serde(flatten)]
    sized: Sized,
    tokens_per_second: f64,
    step_ms: Vec<f64>,
    losses: Vec<f32>,
    flops_per_token: f64,
    peak_flops: Option<f64>,
    mfu: Option<f64>,
    /// Bytes of the trainer's arena, including evaluation and generation.
    trainer_bytes: u64,
    memory: DeviceMemory,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<Found> {
    let card = match arguments.device.found() {
        Ok(card) => card,
        Err(why) => return Ok(Found::skipped(&why)),
    };
    let (sized, mut trainer) = arguments.trainer()?;
    let step = sized.step;
    let mut text = Tokens::uniform(step.config().vocabulary(), step.seed);
    let (mut step_ms, mut losses) = (Vec::new(), Vec::new());
    for index in 0..arguments.warmup + arguments.steps {
        let (tokens, targets) = text.batch(step.micro_batch, step.sequence);
        let start = Instant::now();
        let loss = trainer.step(&tokens, &targets)?.loss;
        if index >= arguments.warmup {
            step_ms.push(start.elapsed().as_secs_f64() * 1e3);
            losses.push(loss);
        }
    }
    let ms = median(step_ms.clone()).context("--steps is at least 1")?;
    let memory = trainer.device_memory()?.context("the trainer does not run on a GPU")?;
    let tokens_per_second = step.tokens() as f64 / ms * 1e3;
    let flops_per_token = step.model_flops(&sized.planned) / step.tokens() as f64;
    let peak_flops = arguments.peak.flops(&card.card, step.dtype);
    let mfu = peak_flops.map(|peak| tokens_per_second * flops_per_token / peak);
    let trainer_bytes = trainer.report().arena_bytes;
    let text = format!(
        "{card}: micro-batch {} × {} in {}, {ms:.2} ms per step (median of {})\n\
         {tokens_per_second:.0} tokens/s, MFU {}\n\
         {trainer_bytes} bytes of arena{}; {} bytes in use on the device, by all processes",
        step.micro_batch,
        step.sequence,
        step.dtype,
        step_ms.len(),
        mfu.map_or_else(
            || "unknown: give this device's peak with --peak-tflops".into(),
            |mfu| format!("{:.1}%", mfu * 100.0)
        ),
        sized.budget_bytes.map_or_else(String::new, |budget| format!(" within {budget}")),
        memory.in_use,
    );
    let figures = Figures {
        card,
        sized,
        tokens_per_second,
        step_ms,
        losses,
        flops_per_token,
        peak_flops,
        mfu,
        trainer_bytes,
        memory,
    };
    Found::new(true, text, &figures)
}

impl Arguments {
    /// Returns the trainer to measure. The trainer can also evaluate and generate in the same arena, which may need
    /// more memory than the step, for example for the logits of a short batch. Only the step must fit the budget when
    /// the micro-batch is chosen.
    fn trainer(&self) -> anyhow::Result<(Sized, Trainer)> {
        let sized = match (self.micro_batch, self.budget) {
            (Some(micro_batch), _) => self.shape.sized(micro_batch)?,
            (None, Some(budget)) => self.shape.largest(budget)?,
            (None, None) => anyhow::bail!("give --budget or --micro-batch"),
        };
        let trainer = sized.step.trainer(self.device.choice())?;
        let bytes = trainer.report().arena_bytes;
        if let Some(budget) = sized.budget_bytes {
            anyhow::ensure!(
                bytes <= budget,
                "the trainer's evaluation and sampling take {bytes} bytes, but the budget is {budget}"
            );
        }
        Ok((sized, trainer))
    }
}

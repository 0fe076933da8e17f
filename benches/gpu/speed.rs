//! Tokens per second of the largest micro-batch that fits a budget.

use std::time::Instant;

use anyhow::Context;
use gapless::Trainer;
use gapless::engine::cuda::DeviceMemory;
use serde::Serialize;

use super::figures::{PeakArguments, median};
use super::plan::{self, Largest};
use super::probe::Gpu;
use super::record::Found;
use super::tokens::Tokens;

#[derive(Debug, clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    plan: plan::Arguments,
    /// Which GPU.
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
    device: String,
    #[serde(flatten)]
    largest: Largest,
    tokens_per_second: f64,
    step_ms: Vec<f64>,
    losses: Vec<f32>,
    flops_per_token: f64,
    peak_flops: Option<f64>,
    mfu: Option<f64>,
    /// Of the trainer, with its evaluation and its sampling.
    trainer_bytes: u64,
    memory: DeviceMemory,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<Found> {
    let device = match arguments.device.name() {
        Ok(device) => device,
        Err(why) => return Ok(Found::skipped(&why)),
    };
    let (largest, mut trainer) = within_budget(arguments)?;
    let step = largest.step;
    let mut text = Tokens::new(step.config().vocabulary, step.seed);
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
    let memory = trainer.device_memory()?.context("it was to run on a GPU")?;
    let tokens_per_second = step.tokens() as f64 / ms * 1e3;
    let flops_per_token = step.model_flops(&largest.planned) / step.tokens() as f64;
    let peak_flops = arguments.peak.flops(&device, step.dtype);
    let mfu = peak_flops.map(|peak| tokens_per_second * flops_per_token / peak);
    let trainer_bytes = trainer.report().arena_bytes;
    let text = format!(
        "{device}: micro-batch {} × {} in {}, {ms:.2} ms per step (median of {})\n\
         {tokens_per_second:.0} tokens/s, MFU {}\n\
         {trainer_bytes} bytes of arena within {}; {} bytes in use on the device, by anybody",
        step.micro_batch,
        step.sequence,
        step.dtype,
        step_ms.len(),
        mfu.map_or_else(
            || "unknown: this device's peak is not; give it with --peak-tflops".into(),
            |mfu| format!("{:.1}%", mfu * 100.0)
        ),
        largest.budget_bytes,
        memory.in_use,
    );
    let figures = Figures {
        device,
        largest,
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

/// The trainer of the largest micro-batch. A trainer evaluates and samples in the same arena; where these take more than its step, as
/// the logits of a short batch do, the micro-batch is still the step's.
fn within_budget(arguments: &Arguments) -> anyhow::Result<(Largest, Trainer)> {
    let largest = arguments.plan.largest()?;
    let trainer = largest.step.trainer(arguments.device.choice())?;
    let (bytes, budget) = (trainer.report().arena_bytes, largest.budget_bytes);
    anyhow::ensure!(
        bytes <= budget,
        "the trainer's evaluation and sampling take {bytes} bytes, and the budget is {budget}"
    );
    Ok((largest, trainer))
}

//! Measures tokens per second with a given micro-batch, which is recomputed in part if it exceeds a budget, or with the
//! largest micro-batch that fits a budget without recomputation.

use std::time::Instant;

use anyhow::Context;
use gapless::engine::cuda::DeviceMemory;
use serde::Serialize;

use super::figures::{PeakArguments, median};
use super::plan::Shape;
use super::probe::{Card, Gpu};
use super::record::Found;
use super::step::Step;
use super::tokens::Tokens;

#[derive(Debug, clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    shape: Shape,
    /// Sequences of a micro-batch; without it, the largest one that fits the budget without recomputation is searched
    #[arg(long, required_unless_present = "budget")]
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
    step: Step,
    tokens_per_second: f64,
    step_ms: Vec<f64>,
    losses: Vec<f32>,
    flops_per_token: f64,
    peak_flops: Option<f64>,
    mfu: Option<f64>,
    /// Bytes of the trainer's arena, including evaluation and generation.
    trainer_bytes: u64,
    /// Arithmetic of recomputed operations, relative to all other arithmetic.
    recomputed: f64,
    memory: DeviceMemory,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<Found> {
    let card = match arguments.device.found() {
        Ok(card) => card,
        Err(why) => return Ok(Found::skipped(&why)),
    };
    let step = arguments.shape.chosen(arguments.micro_batch)?;
    let mut trainer = step.trainer(arguments.device.choice())?;
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
    let arithmetic = step.arithmetic()?;
    let flops_per_token = arithmetic.required / step.tokens() as f64;
    let peak_flops = arguments.peak.flops(&card.card, step.dtype);
    let mfu = peak_flops.map(|peak| tokens_per_second * flops_per_token / peak);
    let trainer_bytes = trainer.report().arena_bytes;
    let recomputed = arithmetic.recomputed(trainer.report().flops_per_step);
    let text = format!(
        "{card}: micro-batch {} × {} in {}, {ms:.2} ms per step (median of {})\n\
         {tokens_per_second:.0} tokens/s, MFU {}\n\
         {trainer_bytes} bytes of arena{}, with {:.2}% of the arithmetic recomputed; {} bytes in use on the device, by \
         all processes",
        step.micro_batch,
        step.sequence,
        step.dtype,
        step_ms.len(),
        mfu.map_or_else(
            || "unknown: give this device's peak with --peak-tflops".into(),
            |mfu| format!("{:.1}%", mfu * 100.0)
        ),
        step.budget_bytes.map_or_else(String::new, |budget| format!(" within {budget}")),
        100.0 * recomputed,
        memory.in_use,
    );
    let figures = Figures {
        card,
        step,
        tokens_per_second,
        step_ms,
        losses,
        flops_per_token,
        peak_flops,
        mfu,
        trainer_bytes,
        recomputed,
        memory,
    };
    Found::new(true, text, &figures)
}

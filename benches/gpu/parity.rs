//! Trains on the CPU in f32, and on a GPU in f32 and bf16, and compares the losses. Each loss is compared with that
//! of the CPU in f32.

use gapless::DeviceChoice;
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
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u64).range(1..))]
    steps: u64,
    #[arg(long, default_value_t = 2)]
    micro_batch: usize,
    #[arg(long, default_value_t = 64)]
    sequence: usize,
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Maximum difference of a loss in f32, as a fraction of the CPU's loss. Both sides sum in f32, in different
    /// orders, with errors of about 2⁻²⁴ each. The default of a thousandth allows for the growth of these errors during
    /// training.
    #[arg(long, default_value_t = 1e-3)]
    tolerance_f32: f64,
    /// Maximum difference of a loss in bf16. By default, this is twice the maximum difference of the CPU's own losses
    /// in bf16, but at least 2⁻⁸, which is the rounding error of one stored value. Both sides round at the same
    /// places, after sums in different orders, so the effects of rounding on training are of the same size.
    #[arg(long)]
    tolerance_bf16: Option<f64>,
}

/// A training run on the GPU, compared with the CPU.
#[derive(Debug, Serialize)]
struct Side {
    dtype: Float,
    losses: Vec<f32>,
    /// The largest difference of a loss, relative to the CPU's.
    difference: f64,
    at_step: usize,
    tolerance: f64,
}

#[derive(Debug, Serialize)]
struct Figures {
    #[serde(flatten)]
    card: Card,
    #[serde(flatten)]
    step: Step,
    cpu_losses: Vec<f32>,
    cpu_bf16_losses: Vec<f32>,
    sides: Vec<Side>,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<Found> {
    let card = match arguments.device.found() {
        Ok(card) => card,
        Err(why) => return Ok(Found::skipped(&why)),
    };
    let step = arguments.step(Float::F32);
    let cpu_losses = arguments.losses(step, DeviceChoice::Cpu)?;
    let cpu_bf16_losses = arguments.losses(arguments.step(Float::Bf16), DeviceChoice::Cpu)?;
    let rounding = farthest(&cpu_losses, &cpu_bf16_losses).1;
    let tolerance_bf16 = arguments.tolerance_bf16.unwrap_or_else(|| tolerance_of(rounding));
    let mut sides = Vec::new();
    for (dtype, tolerance) in [(Float::F32, arguments.tolerance_f32), (Float::Bf16, tolerance_bf16)] {
        let losses = arguments.losses(arguments.step(dtype), arguments.device.choice())?;
        let (at_step, difference) = farthest(&cpu_losses, &losses);
        sides.push(Side { dtype, losses, difference, at_step, tolerance });
    }
    let mut text = format!(
        "{} steps of {} × {} random ids on {card}, compared with the CPU in f32, whose loss goes from {:.4} to {:.4}; the CPU in bf16 \
         differs by {rounding:.2e}\n\
         type   last loss   largest relative difference   at step   tolerance",
        arguments.steps,
        step.micro_batch,
        step.sequence,
        cpu_losses[0],
        cpu_losses[cpu_losses.len() - 1],
    );
    for Side { dtype, losses, difference, at_step, tolerance } in &sides {
        let (last, verdict) = (losses[losses.len() - 1], if difference <= tolerance { "" } else { "   TOO LARGE" });
        text += &format!("\n{dtype:4} {last:11.4} {difference:29.2e} {at_step:9} {tolerance:11.0e}{verdict}");
    }
    let is_right = sides.iter().all(|side| side.difference <= side.tolerance);
    Found::new(is_right, text, &Figures { card, step, cpu_losses, cpu_bf16_losses, sides })
}

impl Arguments {
    fn step(&self, dtype: Float) -> Step {
        let &Self { model, micro_batch, sequence, seed, .. } = self;
        Step { model, dtype, micro_batch, sequence, seed }
    }

    fn losses(&self, step: Step, device: DeviceChoice) -> anyhow::Result<Vec<f32>> {
        let mut trainer = step.trainer(device)?;
        let mut text = Tokens::chain(step.config().vocabulary(), step.seed);
        let mut losses = Vec::new();
        for _ in 0..self.steps {
            let (tokens, targets) = text.batch(step.micro_batch, step.sequence);
            losses.push(trainer.step(&tokens, &targets)?.loss);
        }
        Ok(losses)
    }
}

/// Returns the tolerance for bf16 on a GPU, given the error of bf16 on the CPU.
fn tolerance_of(rounding: f64) -> f64 {
    (2.0 * rounding).max(1.0 / 256.0)
}

/// Returns the step at which the losses of two runs differ most, and this difference relative to the first run's loss.
fn farthest(expected: &[f32], losses: &[f32]) -> (usize, f64) {
    let apart = |(&a, &b): (&f32, &f32)| f64::from(b - a).abs() / f64::from(a).abs();
    let all = expected.iter().zip(losses).map(apart).enumerate();
    all.max_by(|a, b| a.1.total_cmp(&b.1)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        arguments: Arguments,
    }

    #[test]
    fn the_largest_difference_is_found_and_nan_is_the_largest() {
        assert_eq!(farthest(&[4.0, 2.0, 1.0], &[4.0, 2.5, 1.125]), (1, 0.25));
        let (step, difference) = farthest(&[4.0, 2.0], &[f32::NAN, 2.0]);
        assert!(step == 0 && difference.is_nan());
    }

    #[test]
    fn the_text_can_be_learned_and_a_run_repeated() {
        let line = ["parity", "--model", "small", "--steps", "40", "--sequence", "16", "--micro-batch", "4"];
        let arguments = Line::parse_from(line).arguments;
        let losses = |dtype| arguments.losses(arguments.step(dtype), DeviceChoice::Cpu).unwrap();
        let first = losses(Float::F32);
        assert_eq!(first, losses(Float::F32));
        assert!(first[39] < first[0] - 0.1, "{} to {}", first[0], first[39]);
        // The error of bf16 is visible. The tolerance derived from it is far less than the amount by which the loss
        // falls.
        let rounding = farthest(&first, &losses(Float::Bf16)).1;
        println!("bf16 on the CPU is off by {rounding:.2e}");
        assert!(rounding > 0.0 && tolerance_of(rounding) < 0.1 / f64::from(first[0]), "{rounding}");
    }
}

//! Trains on the CPU and on a GPU, each in f32 and bf16, and compares the losses. Each loss is compared with that of the
//! CPU in f32. The CPU's losses can be computed beforehand, on another machine (`--cpu-only`, `--reference`).

use std::fmt;
use std::path::{Path, PathBuf};

use anyhow::Context;
use gapless::DeviceChoice;
use serde::{Deserialize, Serialize};

use super::probe::{Card, Gpu};
use super::record::Found;
use super::step::{Float, Model, Step};
use super::tokens::Tokens;

#[derive(Debug, clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    setting: Setting,
    /// The GPU.
    #[arg(long, default_value_t = Gpu(0))]
    device: Gpu,
    /// Only train on the CPU; with --json, the losses are a reference for later runs
    #[arg(long)]
    cpu_only: bool,
    /// A file from --cpu-only with the same arguments, whose losses are used instead of training on the CPU
    #[arg(long, value_name = "FILE", conflicts_with = "cpu_only")]
    reference: Option<PathBuf>,
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

/// The arguments that determine the losses.
#[derive(Debug, Clone, Copy, PartialEq, clap::Args, Serialize, Deserialize)]
#[group(skip)]
struct Setting {
    #[arg(long, value_enum, default_value_t = Model::Gpt2)]
    model: Model,
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u64).range(1..))]
    steps: u64,
    #[arg(long, default_value_t = 2)]
    micro_batch: usize,
    #[arg(long, default_value_t = 64)]
    sequence: usize,
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

/// The CPU's losses.
#[derive(Debug, Serialize, Deserialize)]
struct Reference {
    #[serde(flatten)]
    setting: Setting,
    cpu_losses: Vec<f32>,
    cpu_bf16_losses: Vec<f32>,
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
    reference: Reference,
    sides: Vec<Side>,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<Found> {
    let setting = arguments.setting;
    if arguments.cpu_only {
        let reference = Reference::new(setting)?;
        return Found::new(true, reference.to_string(), &reference);
    }
    let card = match arguments.device.found() {
        Ok(card) => card,
        Err(why) => return Ok(Found::skipped(&why)),
    };
    let reference = match &arguments.reference {
        Some(path) => Reference::read(path, setting)?,
        None => Reference::new(setting)?,
    };
    let tolerance_bf16 = arguments.tolerance_bf16.unwrap_or_else(|| tolerance_of(reference.rounding()));
    let mut sides = Vec::new();
    for (dtype, tolerance) in [(Float::F32, arguments.tolerance_f32), (Float::Bf16, tolerance_bf16)] {
        let losses = setting.losses(dtype, arguments.device.choice())?;
        let (at_step, difference) = farthest(&reference.cpu_losses, &losses);
        sides.push(Side { dtype, losses, difference, at_step, tolerance });
    }
    let mut text = format!("{card}: {reference}\ntype   last loss   largest relative difference   at step   tolerance");
    for Side { dtype, losses, difference, at_step, tolerance } in &sides {
        let (last, verdict) = (losses[losses.len() - 1], if difference <= tolerance { "" } else { "   TOO LARGE" });
        text += &format!("\n{dtype:4} {last:11.4} {difference:29.2e} {at_step:9} {tolerance:11.0e}{verdict}");
    }
    let is_right = sides.iter().all(|side| side.difference <= side.tolerance);
    Found::new(is_right, text, &Figures { card, reference, sides })
}

impl Setting {
    /// Trains on the ids of a Markov chain. Returns the loss of each step.
    fn losses(&self, dtype: Float, device: DeviceChoice) -> anyhow::Result<Vec<f32>> {
        let &Self { model, micro_batch, sequence, seed, steps } = self;
        let step = Step { model, dtype, micro_batch, sequence, seed, budget_bytes: None };
        let mut trainer = step.trainer(device)?;
        let mut text = Tokens::chain(step.config().vocabulary(), seed);
        let mut losses = Vec::new();
        for _ in 0..steps {
            let (tokens, targets) = text.batch(micro_batch, sequence);
            losses.push(trainer.step(&tokens, &targets)?.loss);
        }
        Ok(losses)
    }
}

impl Reference {
    /// Trains on the CPU.
    fn new(setting: Setting) -> anyhow::Result<Self> {
        let losses = |dtype| setting.losses(dtype, DeviceChoice::Cpu);
        Ok(Self { setting, cpu_losses: losses(Float::F32)?, cpu_bf16_losses: losses(Float::Bf16)? })
    }

    /// Reads a file from `--cpu-only`.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read, or if its losses are those of other arguments.
    fn read(path: &Path, setting: Setting) -> anyhow::Result<Self> {
        let at = || format!("the reference {}", path.display());
        let found: Self = serde_json::from_slice(&std::fs::read(path).with_context(at)?).with_context(at)?;
        anyhow::ensure!(found.setting == setting, "{} is for {:?}, not for {setting:?}", at(), found.setting);
        let lengths = [&found.cpu_losses, &found.cpu_bf16_losses].map(Vec::len);
        anyhow::ensure!(lengths == [setting.steps as usize; 2], "{} has the losses of {lengths:?} steps", at());
        Ok(found)
    }

    /// Returns the largest relative difference of the CPU's losses in bf16.
    fn rounding(&self) -> f64 {
        farthest(&self.cpu_losses, &self.cpu_bf16_losses).1
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Setting { steps, micro_batch, sequence, .. } = self.setting;
        let (first, last, rounding) = (self.cpu_losses[0], self.cpu_losses[self.cpu_losses.len() - 1], self.rounding());
        write!(
            f,
            "{steps} steps of {micro_batch} × {sequence} random ids; on the CPU in f32, the loss goes from {first:.4} to {last:.4}, and in bf16 \
             it differs by {rounding:.2e}"
        )
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
    fn a_reference_is_read_for_the_same_arguments_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("reference.json");
        for model in ["small-mixture", "small-deepseek"] {
            let line = ["parity", "--model", model, "--sequence", "16", "--steps", "3"];
            let setting = Line::parse_from(line).arguments.setting;
            let reference = Reference::new(setting).unwrap();
            let first = reference.cpu_losses[0];
            assert!((first - 512f32.ln()).abs() < 0.2 && reference.cpu_losses[2] < first, "{reference:?}");
            assert!(reference.rounding() > 0.0 && reference.rounding() < 1e-2, "{reference}");
            std::fs::write(&path, serde_json::to_string(&reference).unwrap()).unwrap();
            let read = Reference::read(&path, setting).unwrap();
            assert_eq!((read.cpu_losses, read.cpu_bf16_losses), (reference.cpu_losses, reference.cpu_bf16_losses));
            for other in [
                Setting { model: Model::Gpt2, ..setting },
                Setting { steps: 4, ..setting },
                Setting { micro_batch: 3, ..setting },
                Setting { sequence: 8, ..setting },
                Setting { seed: 1, ..setting },
            ] {
                let refused = Reference::read(&path, other).unwrap_err().to_string();
                assert!(refused.contains("reference.json is for Setting {"), "{refused}");
            }
        }
    }

    #[test]
    fn the_text_can_be_learned_and_a_run_repeated() {
        let line = ["parity", "--model", "small", "--steps", "40", "--sequence", "16", "--micro-batch", "4"];
        let arguments = Line::parse_from(line).arguments;
        let losses = |dtype| arguments.setting.losses(dtype, DeviceChoice::Cpu).unwrap();
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

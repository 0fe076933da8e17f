//! One side of the comparison, as a process. For each line of input, it does a training step and prints the
//! measurement.

#[path = "../../tests/candle/mod.rs"]
#[allow(dead_code, reason = "the tests use more of it")]
mod candle;

use std::io::BufRead;
use std::time::Instant;

use candle_core::{DType, Var};
use candle_nn::{AdamW, Optimizer, ParamsAdamW, VarMap};
use cpu_time::ProcessTime;
use gapless::{DeviceChoice, StepOptions, TrainOptions, Trainer};
use serde::{Deserialize, Serialize};

use crate::Options;
use crate::model::Model;

/// A side of the comparison.
#[derive(Debug, Clone, Copy, PartialEq, clap::ValueEnum)]
pub enum Side {
    /// This project.
    Gapless,
    /// Gapless in bf16, with f32 masters.
    GaplessBf16,
    /// Candle's eager tensors and autograd, with candle-nn's optimizer.
    Candle,
    /// PyTorch's eager modules, with its fused AdamW.
    Pytorch,
    /// PyTorch's eager modules under bf16 autocast.
    PytorchAutocast,
}

impl Side {
    /// True if the side's products have bf16 operands.
    pub fn is_bf16(self) -> bool {
        matches!(self, Self::GaplessBf16 | Self::PytorchAutocast)
    }

    /// Returns the side's name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Gapless => "gapless",
            Self::GaplessBf16 => "gapless-bf16",
            Self::Candle => "candle",
            Self::Pytorch => "pytorch",
            Self::PytorchAutocast => "pytorch-autocast",
        }
    }
}

/// The measurement of a step.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Measurement {
    pub ms: f64,
    /// CPU time of all threads, which other work on the machine hardly affects.
    pub cpu_ms: f64,
    pub loss: f32,
    /// Peak memory of the process since its start.
    pub peak_rss_bytes: Option<u64>,
}

/// Does a step for every line of the standard input.
pub fn serve(side: Side, options: &Options) -> anyhow::Result<()> {
    let (tokens, targets) = batch(options);
    match side {
        Side::Gapless | Side::GaplessBf16 => {
            let dtype = if matches!(side, Side::Gapless) { DType::F32 } else { DType::BF16 };
            let mut trainer = trainer(options, dtype)?;
            answer(|| Ok(trainer.step(&tokens, &targets)?.loss))
        }
        Side::Candle => {
            let Model::Gpt(model) = Model::new(options) else { anyhow::bail!("candle's side is a GPT") };
            let twin = candle::Reference::gpt(&model, VarMap::new(), DType::F32)?;
            let mut optimizer = candle_optimizer(&twin)?;
            let (tokens, targets) = (candle::ids(&tokens, options.batch())?, candle::ids(&targets, options.batch())?);
            answer(|| {
                let (loss, gradients) = twin.backward(&tokens, &targets)?;
                optimizer.step(&gradients)?;
                Ok(loss.to_scalar()?)
            })
        }
        Side::Pytorch | Side::PytorchAutocast => anyhow::bail!("PyTorch's side is pytorch.py"),
    }
}

/// Returns the options of gapless's step.
pub fn step_options(options: &Options, dtype: DType) -> anyhow::Result<StepOptions> {
    let (batch, sequence, precision) = (options.batch(), options.sequence(), dtype.try_into()?);
    Ok(StepOptions { batch, sequence, precision, ..StepOptions::default() })
}

/// Creates gapless's trainer.
pub fn trainer(options: &Options, dtype: DType) -> anyhow::Result<Trainer> {
    let train = TrainOptions {
        step: step_options(options, dtype)?,
        threads: options.threads,
        device: DeviceChoice::Cpu,
        ..TrainOptions::default()
    };
    Model::new(options).trainer(train)
}

/// Returns the batch and its targets. The ids are pairs of adjacent bytes of this file, little-endian, modulo the
/// vocabulary size, or single bytes if the vocabulary has 256 ids. The target of each id is the id that follows it.
pub fn batch(options: &Options) -> (Vec<u32>, Vec<u32>) {
    let text = || include_bytes!("side.rs").iter().map(|&byte| u32::from(byte)).cycle();
    let vocabulary = options.vocabulary() as u32;
    let mut ids = text().zip(text().skip(1)).map(move |(first, second)| (first + 256 * second) % vocabulary);
    let tokens: Vec<u32> = ids.by_ref().take(options.tokens_per_step()).collect();
    let targets = tokens[1..].iter().copied().chain(ids.next()).collect();
    (tokens, targets)
}

/// Creates candle-nn's optimizer with the options of gapless's update rule. One difference remains: candle-nn applies
/// weight decay to all parameters.
fn candle_optimizer(twin: &candle::Reference) -> candle_core::Result<AdamW> {
    let variables: Vec<Var> = twin.variables().into_iter().map(|(_, variable)| variable).collect();
    let lr = TrainOptions::default().learning_rate.peak;
    let gapless::engine::optim::AdamW { beta1, beta2, eps, weight_decay, .. } = Default::default();
    AdamW::new(variables, ParamsAdamW { lr, beta1, beta2, eps, weight_decay })
}

fn answer(mut step: impl FnMut() -> anyhow::Result<f32>) -> anyhow::Result<()> {
    for line in std::io::stdin().lock().lines() {
        line?;
        let (start, cpu) = (Instant::now(), ProcessTime::now());
        let loss = step()?;
        let (ms, cpu_ms) = (start.elapsed().as_secs_f64() * 1e3, cpu.elapsed().as_secs_f64() * 1e3);
        let peak_rss_bytes = gapless::engine::metrics::peak_rss_bytes();
        let measurement = Measurement { ms, cpu_ms, loss, peak_rss_bytes };
        println!("{}", serde_json::to_string(&measurement)?);
    }
    Ok(())
}

//! Compares training steps of gapless with candle's eager ones and, optionally, with PyTorch's. All use the same
//! model, the same batch and AdamW.
//!
//! `cargo bench -p gapless --bench train_step` compares with candle in f32. Options after `--`:
//! - `--quick`: a small model;
//! - `--profile`: the time of each kind of instruction in gapless;
//! - `--adapters`: LoRA in bf16 beside quantized frozen weights and DoRA, for `--model llama`;
//! - `--pytorch PYTHON`: also compare with PyTorch;
//! - `--model llama` or `--model mixtral`: without candle; PyTorch's side uses the package `transformers`.
//!
//! Each side is a process of its own, so that its peak memory can be measured. The sides take turns of two steps, so
//! that other work on the machine affects all of them. The second step is measured, as in training, where one step
//! follows another; in the first, threads that slept while the other sides worked are woken, and caches are filled. All
//! sides do the same work, with one exception: candle's side does not clip gradients by their global norm. With `-p`,
//! candle is built as for its users. If the whole workspace were built, candle's matrix products would use the AVX-512
//! feature that the engine's own benchmarks enable.

mod adapters;
mod model;
mod profile;
mod side;

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};

use anyhow::Context;
use clap::Parser;
use gapless::engine::kernels::cpu::peak::{Bf16Products, Peak, has_amx};
use model::{Kind, Model};
use side::{Measurement, Side};

#[derive(Debug, Clone, Parser)]
struct Options {
    #[arg(long, value_enum, default_value = "gpt")]
    model: Kind,
    /// A small model and few steps, as a smoke test
    #[arg(long)]
    quick: bool,
    /// Only gapless: print a table of how the time of a step is spent
    #[arg(long)]
    profile: bool,
    /// Only gapless: LoRA in bf16, the same on quantized weights, and DoRA
    #[arg(long, conflicts_with = "profile")]
    adapters: bool,
    /// Number of measured steps of each side
    #[arg(long, default_value_t = 7)]
    steps: usize,
    #[arg(long)]
    layers: Option<usize>,
    #[arg(long)]
    width: Option<usize>,
    #[arg(long)]
    heads: Option<usize>,
    #[arg(long)]
    sequence: Option<usize>,
    #[arg(long)]
    batch: Option<usize>,
    /// The profile in bf16.
    #[arg(long, requires = "profile")]
    bf16: bool,
    /// Threads of gapless; 0 for all cores. RAYON_NUM_THREADS sets those of candle
    #[arg(long, default_value_t = 0)]
    threads: usize,
    /// A Python with PyTorch: also measure PyTorch in f32 and under bf16 autocast, and gapless in bf16
    #[arg(long, value_name = "PYTHON")]
    pytorch: Option<PathBuf>,
    /// Used by the program itself for processes that it starts: be one side, and do a step for every line of input
    #[arg(long, hide = true)]
    side: Option<Side>,
    /// An argument that cargo passes to every bench
    #[arg(long, hide = true)]
    bench: bool,
}

impl Options {
    fn vocabulary(&self) -> usize {
        match (self.model, self.quick) {
            (Kind::Gpt, _) => 256,
            (Kind::Llama, false) => 8192,
            _ => 2048,
        }
    }

    fn sequence(&self) -> usize {
        self.sequence.unwrap_or(match (self.model, self.quick) {
            (_, true) => 64,
            (Kind::Mixtral, _) => 128,
            _ => 256,
        })
    }

    fn batch(&self) -> usize {
        self.batch.unwrap_or(if self.quick { 4 } else { 8 })
    }

    /// Returns the number of cores that a step uses.
    fn cores(&self) -> usize {
        let all = std::thread::available_parallelism().map_or(1, usize::from);
        if self.threads > 0 { self.threads.min(all) } else { all }
    }

    fn tokens_per_step(&self) -> usize {
        self.batch() * self.sequence()
    }
}

/// Describes the rate of the machine's multiply-adds, so that results of different machines can be compared.
pub fn describe(peak: Peak) -> String {
    let gflops = |rate: f64| format!("{:.0} GFLOP/s", rate / 1e9);
    format!(
        "peak per core: f32 {}, bf16 pairs {}; products of bf16 by {}{}",
        gflops(peak.f32),
        peak.bf16_pairs.map_or("absent".to_owned(), gflops),
        Bf16Products::chosen().name(),
        if has_amx() { "; AMX is present and not used" } else { "" }
    )
}

fn main() -> anyhow::Result<()> {
    let options = Options::parse();
    match options.side {
        _ if options.profile => profile::run(&options),
        _ if options.adapters => adapters::run(&options),
        Some(side) => side::serve(side, &options),
        None => compare(&options),
    }
}

fn compare(options: &Options) -> anyhow::Result<()> {
    let (model, batch, sequence) = (Model::new(options).describe(), options.batch(), options.sequence());
    println!("{model}; batch {batch} × {sequence} tokens; f32, AdamW");
    let mut sides = vec![Side::Gapless];
    if options.model == Kind::Gpt {
        sides.push(Side::Candle);
    }
    if options.pytorch.is_some() {
        sides.extend([Side::Pytorch, Side::GaplessBf16, Side::PytorchAutocast]);
    }
    let mut processes = sides.iter().map(|side| Process::start(*side, options)).collect::<anyhow::Result<Vec<_>>>()?;
    let mut measurements = vec![vec![]; sides.len()];
    let mut peak = Peak::known();
    for _ in 0..options.steps {
        // A core that wakes up, or that others use for a moment, is slower.
        let Peak { f32, bf16_pairs } = Peak::measured();
        peak = Peak { f32: peak.f32.max(f32), bf16_pairs: peak.bf16_pairs.zip(bf16_pairs).map(|(a, b)| a.max(b)) };
        for (process, measurements) in processes.iter_mut().zip(&mut measurements) {
            process.step()?;
            measurements.push(process.step()?);
        }
    }
    for process in processes {
        process.finish()?;
    }

    let flops = Model::new(options).program(&side::step_options(options, candle_core::DType::F32)?)?.flops() as f64;
    println!("{}; a step takes {:.1} GFLOP", describe(peak), flops / 1e9);
    println!(
        "side               tokens/s    ms/step   ms/step from–to   CPU ms/step   of peak   peak resident MiB      loss"
    );
    for (side, measured) in sides.iter().zip(&measurements) {
        let ms = sorted(measured.iter().map(|m| m.ms));
        let last = measured.last().context("--steps is at least 1")?;
        println!(
            "{:16} {:10.0} {:10.1}   {:15} {:13.1} {:9.2} {:19} {:9.4}",
            side.name(),
            options.tokens_per_step() as f64 / median(&ms) * 1000.0,
            median(&ms),
            format!("{:.1}–{:.1}", ms[0], ms[ms.len() - 1]),
            median(&sorted(measured.iter().map(|m| m.cpu_ms))),
            // The fraction is relative to the multiply-adds that all cores together could do in the time of the step.
            flops / (median(&ms) / 1e3 * options.cores() as f64 * if side.is_bf16() { peak.bf16() } else { peak.f32 }),
            last.peak_rss_bytes.map_or("unknown".into(), |bytes| format!("{:.0}", bytes as f64 / f64::from(1 << 20))),
            last.loss,
        );
    }
    // Steps of one round run under the same conditions, so these are medians of their ratios rather than ratios of
    // medians.
    let of =
        |side: Side| sides.iter().zip(&measurements).find(|(other, _)| **other == side).map(|(_, measured)| measured);
    let beside = [
        (Side::Gapless, Side::Candle),
        (Side::Gapless, Side::Pytorch),
        (Side::GaplessBf16, Side::PytorchAutocast),
        (Side::GaplessBf16, Side::Gapless),
    ];
    if sides.len() > 1 {
        println!("\n{:35} tokens/s   tokens per CPU second   peak resident memory", "");
    }
    for (ours, theirs) in beside {
        let (Some(our), Some(their)) = (of(ours), of(theirs)) else { continue };
        let ratio = |time: fn(&Measurement) -> f64| {
            median(&sorted(our.iter().zip(their).map(|(our, their)| time(their) / time(our))))
        };
        let peak = |side: &[Measurement]| side.last().and_then(|m| m.peak_rss_bytes).map(|bytes| bytes as f64);
        let memory = peak(our).zip(peak(their)).map_or("unknown".into(), |(our, their)| format!("{:.2}×", our / their));
        let pair = format!("{} beside {}", ours.name(), theirs.name());
        println!("{pair:35} {:7.2}× {:22.2}× {memory:>22}", ratio(|m| m.ms), ratio(|m| m.cpu_ms));
    }
    Ok(())
}

fn sorted(values: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values
}

fn median(sorted: &[f64]) -> f64 {
    sorted[sorted.len() / 2]
}

/// Returns the command that runs PyTorch's side of the same step.
fn pytorch(python: &Path, side: Side, options: &Options) -> Command {
    let mut command = Command::new(python);
    command.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/benches/train_step/pytorch.py"));
    for (name, value) in Model::new(options).flags() {
        command.arg(format!("--{name}={value}"));
    }
    for (name, value) in [("sequence", options.sequence()), ("batch", options.batch()), ("threads", options.threads)] {
        command.arg(format!("--{name}={value}"));
    }
    if matches!(side, Side::PytorchAutocast) {
        command.arg("--autocast");
    }
    command
}

/// The running process of one side.
struct Process {
    child: Child,
    answers: BufReader<ChildStdout>,
}

impl Process {
    fn start(side: Side, options: &Options) -> anyhow::Result<Self> {
        let mut command = match (side, &options.pytorch) {
            (Side::Pytorch | Side::PytorchAutocast, Some(python)) => pytorch(python, side, options),
            _ => {
                let mut command = Command::new(std::env::current_exe()?);
                command.args(std::env::args_os().skip(1)).args(["--side", side.name()]);
                command
            }
        };
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let answers = BufReader::new(child.stdout.take().context("its output was asked for")?);
        Ok(Self { child, answers })
    }

    fn step(&mut self) -> anyhow::Result<Measurement> {
        writeln!(self.child.stdin.as_mut().context("its input was asked for")?)?;
        let mut line = String::new();
        self.answers.read_line(&mut line)?;
        serde_json::from_str(&line).context("a measured process (gapless, candle or PyTorch) ended early")
    }

    /// Closes the standard input, which ends the process.
    fn finish(mut self) -> anyhow::Result<()> {
        drop(self.child.stdin.take());
        anyhow::ensure!(self.child.wait()?.success(), "a measured process (gapless, candle or PyTorch) failed");
        Ok(())
    }
}

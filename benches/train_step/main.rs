//! Training steps of gapless beside candle's eager ones (and PyTorch's): the same model, the same batch, f32, AdamW.
//!
//! `cargo bench -p gapless --bench train_step`, with `-- --quick` for a small model, with `-- --profile` for the time of
//! each kind of instruction on our side, with `-- --pytorch PYTHON` beside PyTorch, too. `-- --model llama` and `-- --model mixtral`
//! have no side in candle; PyTorch's is that of the package `transformers`.
//!
//! Each side is a process of its own, so that its peak memory is its own; the sides take their steps in turn, so that the
//! machine's other work hits all. None computes what another leaves out, but for one thing: candle's does not clip by the
//! gradients' global norm. With `-p`, candle is built as its users get it; built with the whole workspace, its matrix
//! products would take over the AVX-512 feature that the engine's own benches turn on.

mod model;
mod profile;
mod side;

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};

use anyhow::Context;
use clap::Parser;
use model::{Kind, Model};
use side::{Measurement, Side};

#[derive(Debug, Clone, Parser)]
struct Options {
    #[arg(long, value_enum, default_value = "gpt")]
    model: Kind,
    /// A small model and few steps, to see that it all works.
    #[arg(long)]
    quick: bool,
    /// Only our side: a table of where its time goes.
    #[arg(long)]
    profile: bool,
    /// Measured steps of each side.
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
    /// Threads of our side; 0 for all cores. Candle's are set by RAYON_NUM_THREADS.
    #[arg(long, default_value_t = 0)]
    threads: usize,
    /// A Python that has PyTorch: its steps too, in f32 and under bf16 autocast, and ours in bf16.
    #[arg(long, value_name = "PYTHON")]
    pytorch: Option<PathBuf>,
    /// Be one of the sides: a step for every line that comes in.
    #[arg(long, hide = true)]
    side: Option<Side>,
    /// What cargo passes to a bench.
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

    fn tokens_per_step(&self) -> usize {
        self.batch() * self.sequence()
    }
}

fn main() -> anyhow::Result<()> {
    let options = Options::parse();
    match options.side {
        _ if options.profile => profile::run(&options),
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
    for round in 0..=options.steps {
        for (process, measurements) in processes.iter_mut().zip(&mut measurements) {
            let measurement = process.step()?;
            // The first step warms the caches and the allocator, and touches memory for the first time.
            if round > 0 {
                measurements.push(measurement);
            }
        }
    }
    for process in processes {
        process.finish()?;
    }

    println!("side               tokens/s    ms/step   ms/step from–to   CPU ms/step   peak resident MiB      loss");
    for (side, measured) in sides.iter().zip(&measurements) {
        let ms = sorted(measured.iter().map(|m| m.ms));
        let last = measured.last().context("--steps is at least 1")?;
        println!(
            "{:16} {:10.0} {:10.1}   {:15} {:13.1} {:19} {:9.4}",
            side.name(),
            options.tokens_per_step() as f64 / median(&ms) * 1000.0,
            median(&ms),
            format!("{:.1}–{:.1}", ms[0], ms[ms.len() - 1]),
            median(&sorted(measured.iter().map(|m| m.cpu_ms))),
            last.peak_rss_bytes.map_or("unknown".into(), |bytes| format!("{:.0}", bytes as f64 / f64::from(1 << 20))),
            last.loss,
        );
    }
    // Steps that were taken one after the other saw the same machine: the median of their ratios, not the ratio of medians.
    if sides.len() > 1 {
        println!("\ngapless beside     tokens/s   tokens per CPU second   peak resident memory");
    }
    let [ours, others @ ..] = &measurements[..] else { anyhow::bail!("there are no sides to measure") };
    for (side, theirs) in sides[1..].iter().zip(others) {
        let pairs = || ours.iter().zip(theirs);
        let speed = sorted(pairs().map(|(ours, theirs)| theirs.ms / ours.ms));
        let cpu = sorted(pairs().map(|(ours, theirs)| theirs.cpu_ms / ours.cpu_ms));
        let peak = |side: &[Measurement]| side.last().and_then(|m| m.peak_rss_bytes).map(|bytes| bytes as f64);
        let memory =
            peak(ours).zip(peak(theirs)).map_or("unknown".into(), |(ours, theirs)| format!("{:.2}×", ours / theirs));
        println!("{:16} {:9.2}× {:22.2}× {memory:>22}", side.name(), median(&speed), median(&cpu));
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

/// PyTorch's side of the same step.
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

/// One side, running.
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
        serde_json::from_str(&line).context("the process of one side ended early")
    }

    /// Closing its input ends it.
    fn finish(mut self) -> anyhow::Result<()> {
        drop(self.child.stdin.take());
        anyhow::ensure!(self.child.wait()?.success(), "the process of one side failed");
        Ok(())
    }
}

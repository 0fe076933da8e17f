//! Measures training on a GPU: whether it computes the same as the CPU, how much memory it takes, how fast it is, and
//! where the time goes.
//!
//! `cargo bench -p gapless --bench gpu -- COMMAND` runs a command: `parity`, `memory`, `speed`, `kernels`,
//! `products`, `plan`, `estimate`, `compile` or `device`. `-- help` says more. The program can also be copied to a
//! machine without Rust. `benches/gpu/run` calls all commands, together with PyTorch (docs/gpu.md).
//!
//! Without a GPU, a command that needs one prints `skipped:` and the engine's reason. This is only an error with
//! `--require-gpu`.
#![cfg_attr(
    test,
    allow(
        unused_imports,
        dead_code,
        reason = "cargo sets cfg(test) for a bench too, whose tests run in tests/gpu_bench.rs"
    )
)]

mod batch;
mod compile;
mod estimate;
mod figures;
mod kernels;
mod memory;
mod parity;
mod plan;
mod probe;
mod products;
mod record;
mod speed;
mod step;
mod tokens;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

pub use record::Outcome;

#[derive(Debug, Parser)]
#[command(name = "gpu", about = "Training on a GPU: parity, memory, speed, kernels")]
pub struct Options {
    #[command(subcommand)]
    command: Command,
    /// Fail if there is no GPU
    #[arg(long, global = true)]
    require_gpu: bool,
    /// Also write the results to this file, as JSON
    #[arg(long, global = true, value_name = "FILE")]
    json: Option<PathBuf>,
    /// An argument that cargo passes to every bench
    #[arg(long, global = true, hide = true)]
    bench: bool,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Describe the GPU of this machine
    Device(probe::Arguments),
    /// Compile every kernel: registers, spills and shared memory, and machine code for the cache; needs no GPU
    Compile(compile::Arguments),
    /// Find the largest micro-batch whose arena fits a budget, or what a given one recomputes in it; needs no GPU
    Plan(plan::Arguments),
    /// Estimate the time of a step on an H200 by launch, from measured rates; needs no GPU
    Estimate(estimate::Arguments),
    /// Compare training on the GPU in f32 and bf16 with training on the CPU, in the same process or beforehand
    Parity(parity::Arguments),
    /// Break down the device memory in use
    Memory(memory::Arguments),
    /// Measure the tokens per second of a micro-batch, or of the largest one that fits a budget
    Speed(speed::Arguments),
    /// Measure the time of a step by operation, layer and launch, and compare it with the minimum at the device's
    /// rates
    Kernels(kernels::Arguments),
    /// Measure the products of a GPT-2 step, each alone
    Products(products::Arguments),
}

fn main() -> ExitCode {
    let options = Options::parse();
    tracing::subscriber::set_global_default(warnings(std::io::stderr)).expect("nothing was set before");
    match run(&options) {
        Ok(Outcome::Done | Outcome::Skipped) => ExitCode::SUCCESS,
        Ok(Outcome::Failed) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("failed: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Returns a subscriber that prints the engine's warnings, for example about a product without an algorithm for its
/// epilogue.
pub fn warnings<W>(writer: W) -> impl tracing::Subscriber + Send + Sync
where
    W: for<'a> tracing_subscriber::fmt::MakeWriter<'a> + Send + Sync + 'static,
{
    let lines = tracing_subscriber::fmt().with_max_level(tracing::Level::WARN).with_ansi(false).without_time();
    lines.with_writer(writer).finish()
}

/// Runs a command, prints its table and writes its record.
///
/// # Errors
/// Returns the error of the command. A missing GPU is only an error with `--require-gpu`.
pub fn run(options: &Options) -> anyhow::Result<Outcome> {
    let found = match &options.command {
        Command::Device(arguments) => probe::run(arguments)?,
        Command::Compile(arguments) => compile::run(arguments)?,
        Command::Plan(arguments) => plan::run(arguments)?,
        Command::Estimate(arguments) => estimate::run(arguments)?,
        Command::Parity(arguments) => parity::run(arguments)?,
        Command::Memory(arguments) => memory::run(arguments)?,
        Command::Speed(arguments) => speed::run(arguments)?,
        Command::Kernels(arguments) => kernels::run(arguments)?,
        Command::Products(arguments) => products::run(arguments)?,
    };
    println!("{}", found.text);
    if let Some(path) = &options.json {
        std::fs::write(path, serde_json::to_string_pretty(&found.json)?)?;
    }
    anyhow::ensure!(
        found.outcome != Outcome::Skipped || !options.require_gpu,
        "a GPU is required (--require-gpu); {}",
        found.text
    );
    Ok(found.outcome)
}

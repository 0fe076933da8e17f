//! Compares the bytes and times that `gapless::step` predicts with those of steps that then run on this machine. The
//! models are dense, on one rank or on two. Ranks are threads or MPI processes.
//!
//! `cargo bench -p gapless --bench predicted` runs all configurations, and with `-- --every N` every Nth one. With
//! `--features mpi` and `-- --processes`, it runs the configurations of two ranks as processes that `mpirun` starts.
//!
//! The bytes are those of each rank's arena. Predicted and reserved bytes must be equal. The time is predicted from
//! operations that [`gapless::step::ThisMachine`] times one by one, without running a whole step. The predicted time is
//! compared with the median step of the slowest rank.

use std::time::Instant;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use gapless::communicator::{on_threads, world};
use gapless::run::RunConfig;
use gapless::step::Step;
use gapless::{DeviceChoice, TrainError, TrainOptions, Trainer};
use gapless_testing::mpirun;

#[derive(Parser)]
struct Options {
    /// Every Nth configuration.
    #[arg(long, default_value_t = 1)]
    every: usize,
    /// Number of measured steps of each configuration, after one that warms up
    #[arg(long, default_value_t = 5)]
    steps: usize,
    /// Run ranks as processes over MPI; configurations of one rank are skipped
    #[arg(long)]
    processes: bool,
    /// Used by the program itself for processes that it starts: run a rank of a step with these keys
    #[arg(long, hide = true, value_name = "KEYS")]
    rank_of: Option<String>,
    /// An argument that cargo passes to every bench
    #[arg(long, hide = true)]
    bench: bool,
}

/// Models whose ranks take from two to some hundreds of mebibytes.
const MODELS: [&str; 3] = [
    "gpt:vocabulary=512,layers=4,heads=4,width=128",
    "gpt:vocabulary=2048,layers=6,heads=6,width=384",
    "llama:vocabulary=1024,layers=4,heads=4,kv_heads=2,width=256,hidden=704,tied=true",
];
/// Further keys of the step.
const STEPS: [&str; 12] = [
    "batch = 4\nsequence = 128",
    "batch = 8\nsequence = 128\nmicro_batches = 4",
    "batch = 8\nsequence = 256\nmicro_batches = 2\nrecompute = \"layers\"",
    "batch = 4\nsequence = 256\nprecision = \"bf16\"",
    "batch = 4\nsequence = 128\noptimizer = \"adamw8bit\"",
    "batch = 8\nsequence = 128\nmicro_batches = 4\npipeline_ranks = 2",
    "batch = 8\nsequence = 128\nmicro_batches = 8\npipeline_ranks = 2\nschedule = \"gpipe\"",
    "batch = 8\nsequence = 128\nmicro_batches = 4\npipeline_ranks = 2\nschedule = \"zb-h1\"",
    "batch = 8\nsequence = 128\nmicro_batches = 8\npipeline_ranks = 2\nschedule = \"zbv\"\nchunks = 2",
    "batch = 8\nsequence = 128\nmicro_batches = 4\npipeline_ranks = 2\nschedule = \"interleaved\"\nchunks = 2",
    "batch = 8\nsequence = 256\nmicro_batches = 4\npipeline_ranks = 2\nrecompute = \"layers\"",
    "batch = 8\nsequence = 128\nmicro_batches = 2\ndata_ranks = 2",
];

/// The measurement of a rank.
#[derive(Debug, Clone, Copy)]
struct Measured {
    arena_bytes: u64,
    milliseconds: f64,
}

fn main() -> Result<()> {
    let options = Options::parse();
    if let Some(keys) = &options.rank_of {
        return one_process(&step(keys)?.0, options.steps);
    }
    println!("predicted ms  measured ms  ratio      arena bytes  configuration");
    let mut off = Vec::new();
    let specs = MODELS
        .iter()
        .flat_map(|model| STEPS.map(|keys| format!("profile = \"this-machine\"\nmodel = \"{model}\"\n{keys}")));
    for keys in specs.step_by(options.every.max(1)) {
        let (step, ranks) = step(&keys)?;
        if options.processes && ranks == 1 {
            continue;
        }
        let (bytes, predicted) = predicted(&step, ranks)?;
        let measured = match options.processes {
            true => on_processes(&keys, ranks, options.steps)?,
            false => measured(&step, ranks, options.steps)?,
        };
        let arenas: Vec<u64> = measured.iter().map(|rank| rank.arena_bytes).collect();
        ensure!(arenas == bytes, "{keys}: arenas of {arenas:?} bytes, {bytes:?} predicted");
        let milliseconds = measured.iter().map(|rank| rank.milliseconds).fold(0.0, f64::max);
        let ratio = predicted / milliseconds;
        off.push((ratio - 1.0).abs());
        let most = bytes.iter().max().copied().unwrap_or(0);
        println!("{predicted:12.2} {milliseconds:12.2} {ratio:6.3} {most:16}  {}", keys.replace('\n', ", "));
    }
    ensure!(!off.is_empty(), "none of these configurations has several ranks");
    off.sort_by(f64::total_cmp);
    let part = |tenths: usize| 100.0 * off[(off.len() - 1) * tenths / 10];
    println!(
        "{} configurations, all bytes equal; error of the time: median {:.1} %, 90th percentile {:.1} %",
        off.len(),
        part(5),
        part(9)
    );
    Ok(())
}

/// Returns the step with these keys, and its number of ranks. The ranks share the cores.
fn step(keys: &str) -> Result<(Step, usize)> {
    let keys: Vec<String> = keys.lines().map(str::to_owned).collect();
    let mut step = Step::new(&RunConfig::parse("", &keys)?)?;
    let ranks = step.options.mesh.ranks()?;
    step.threads = (std::thread::available_parallelism()?.get() / ranks).max(1);
    Ok((step, ranks))
}

/// Returns the options of the step's trainers.
fn options(step: &Step) -> TrainOptions {
    TrainOptions {
        step: step.options.clone(),
        threads: step.threads,
        device: DeviceChoice::Cpu,
        ..TrainOptions::default()
    }
}

/// Predicts the bytes of each rank's arena, and the milliseconds of a step.
fn predicted(step: &Step, ranks: usize) -> Result<(Vec<u64>, f64)> {
    let runs = (0..ranks).map(|rank| Ok(Trainer::builder(|vb| step.build(vb), options(step)).plan(rank)?.arena_bytes));
    let bytes = runs.collect::<Result<Vec<u64>, TrainError>>()?;
    let programs = step.programs(&step.record()?)?;
    Ok((bytes, step.timing(&programs)?.nanoseconds() as f64 / 1e6))
}

/// Runs the step with ranks that are threads.
fn measured(step: &Step, ranks: usize, steps: usize) -> Result<Vec<Measured>> {
    let run = |trainer| timed(step, trainer, steps);
    let build = |vb| step.build(vb);
    let measured = match ranks {
        1 => Trainer::new(build, options(step)).and_then(run).map(|rank| vec![rank]),
        _ => on_threads(ranks, |world| run(Trainer::builder(build, options(step)).distributed(world).build()?)),
    };
    Ok(measured?)
}

/// Runs the steps of a rank and measures them.
fn timed(step: &Step, mut trainer: Trainer, steps: usize) -> Result<Measured, TrainError> {
    let tokens: Vec<u32> = (0..=step.options.batch * step.options.sequence).map(|i| (i * i % 499) as u32).collect();
    let (inputs, targets) = (&tokens[..tokens.len() - 1], &tokens[1..]);
    trainer.step(inputs, targets)?;
    let mut times = Vec::new();
    for _ in 0..steps.max(1) {
        let begun = Instant::now();
        trainer.step(inputs, targets)?;
        times.push(begun.elapsed().as_secs_f64() * 1e3);
    }
    times.sort_by(f64::total_cmp);
    Ok(Measured { arena_bytes: trainer.report().arena_bytes, milliseconds: times[times.len() / 2] })
}

/// Runs the step with ranks that are processes. Each process runs this program.
fn on_processes(keys: &str, ranks: usize, steps: usize) -> Result<Vec<Measured>> {
    let output = mpirun(ranks)
        .args(["--bind-to", "none"])
        .arg(std::env::current_exe()?)
        .args(["--steps", &steps.to_string(), "--rank-of", keys])
        .output()
        .context("mpirun cannot be run")?;
    let (said, complaints) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    ensure!(output.status.success(), "{keys}: {complaints}");
    let line = |line: &str| -> Option<(usize, Measured)> {
        let mut words = line.strip_prefix("rank ")?.split(' ');
        let rank = words.next()?.parse().ok()?;
        let (arena_bytes, milliseconds) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
        Some((rank, Measured { arena_bytes, milliseconds }))
    };
    let mut all: Vec<(usize, Measured)> = said.lines().filter_map(line).collect();
    all.sort_by_key(|(rank, _)| *rank);
    ensure!(all.len() == ranks, "{keys}: {said}{complaints}");
    Ok(all.into_iter().map(|(_, measured)| measured).collect())
}

/// Runs the rank of this process, and prints its measurement.
fn one_process(step: &Step, steps: usize) -> Result<()> {
    let world = world()?;
    let rank = world.rank();
    let trainer = Trainer::builder(|vb| step.build(vb), options(step)).distributed(world).build()?;
    let Measured { arena_bytes, milliseconds } = timed(step, trainer, steps)?;
    println!("rank {rank} {arena_bytes} {milliseconds}");
    Ok(())
}

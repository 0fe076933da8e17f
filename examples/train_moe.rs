//! Trains a small mixture of experts on real text, and shows how its tokens are routed.
//!
//! `--style` selects the kind of routing. With `--expert-ranks 2`, two ranks, which are threads here, share the experts
//! and exchange rows as two GPUs would. The line that is printed for each step has one bar per expert, which shows the
//! expert's load over all layers.

use std::fmt::Write;
use std::ops::ControlFlow::Continue;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Error, Result, ensure};
use clap::{CommandFactory, FromArgMatches, Parser, ValueEnum, parser::ValueSource};
use gapless::models::{Moe, MoeConfig, MoeStyle};
use gapless::prelude::*;
use gapless::run::{Console, Event, RunError, RunFolder, Stop, TrainingLoop, dataset, with_saved};
use gapless::{Mesh, Reserve, VocabularyChoice, communicator};
use serde::{Deserialize, Serialize};
use serde_json::json;

/// Train a small mixture of experts on real text, and show where its tokens go
#[derive(Parser, Serialize, Deserialize)]
struct Args {
    #[arg(long, value_enum, default_value = "mixtral")]
    style: Style,
    /// A file or folder of .txt, .rs, .md or .jsonl, or a Cargo.lock for the Rust sources that it names
    #[arg(long, default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/../Cargo.lock"))]
    data: PathBuf,
    /// Where checkpoints and the memory map go
    #[arg(long, default_value = "runs/train_moe")]
    out: PathBuf,
    /// Resume from the newest checkpoint in --out, with its flags
    #[arg(long)]
    #[serde(skip)]
    resume: bool,
    #[arg(long, default_value_t = 200)]
    steps: u64,
    /// Steps between checkpoints
    #[arg(long, default_value_t = 100)]
    save_every: u64,
    /// Sequences per step, over all ranks
    #[arg(long, default_value_t = 8)]
    batch: usize,
    /// Parts into which each rank's share of the batch is split
    #[arg(long, default_value_t = 2)]
    micro_batches: usize,
    /// Tokens per sequence
    #[arg(long, default_value_t = 128)]
    sequence: usize,
    /// Tokens of the BPE vocabulary; 256 for plain bytes
    #[arg(long, default_value_t = 2048)]
    vocabulary: usize,
    /// Ranks that share the experts, as threads of this process
    #[arg(long, default_value_t = 1)]
    expert_ranks: usize,
    /// The device: auto, cpu, cuda or cuda:1; with auto, expert ranks take GPUs in turn
    #[arg(long, default_value = "auto")]
    device: String,
    /// Room for received rows, as a multiple of the rows of balanced routing; by default enough for the worst case
    #[arg(long)]
    reserve: Option<f64>,
    /// The policy when that room is not enough: error, grow or recompute
    #[arg(long, default_value = "error")]
    overflow: String,
    /// Where to write the load of the experts in every tenth step, for --expert-load recorded:FILE.csv of gapless compare
    #[arg(long, value_name = "FILE.csv")]
    #[serde(skip)]
    load: Option<PathBuf>,
    #[arg(long, default_value_t = 2e-3)]
    lr: f64,
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Worker threads of each rank; 0 for all cores
    #[arg(long, default_value_t = 0)]
    threads: usize,
}

/// Flags that may change when a run is resumed: none of them affects the steps done so far.
const MAY_CHANGE: &[&str] =
    &["out", "steps", "save_every", "expert_ranks", "device", "reserve", "overflow", "lr", "threads"];

/// The styles of routing that docs/moe.md describes.
#[derive(Debug, Clone, Copy, ValueEnum, Serialize, Deserialize)]
enum Style {
    Switch,
    Mixtral,
    Qwen,
    DeepSeek,
    ExpertChoice,
}

impl Style {
    fn config(self, vocabulary: usize) -> MoeConfig {
        let style = match self {
            Self::Switch => MoeStyle::Switch,
            Self::Mixtral => MoeStyle::Mixtral,
            Self::Qwen => MoeStyle::Qwen,
            Self::DeepSeek => MoeStyle::DeepSeek,
            Self::ExpertChoice => MoeStyle::ExpertChoice,
        };
        MoeConfig::small(style, vocabulary)
    }
}

fn main() -> Result<ExitCode> {
    let flags = Args::command().get_matches();
    let (mut args, console) = (Args::from_arg_matches(&flags)?, Console::default());
    ensure!(args.expert_ranks > 0, "--expert-ranks is at least 1");
    let (folder, load) = (RunFolder::open(&args.out)?, args.load.take());
    let checkpoint = if args.resume { Some(folder.newest()?) } else { None };
    if let Some(checkpoint) = &checkpoint {
        let is_given = |flag: &str| flags.value_source(flag) == Some(ValueSource::CommandLine);
        args = with_saved(&args, is_given, checkpoint, "flags", MAY_CHANGE, &console)?;
    }
    let source = Source::from(args.data.clone());
    let vocabulary = VocabularyChoice::of_size(args.vocabulary);
    let dataset = dataset(&source, &DataOptions { vocabulary, ..DataOptions::default() }, checkpoint.as_ref())?;
    let training = dataset.training(args.sequence, args.batch, args.seed)?;
    let config = args.style.config(dataset.vocabulary().size());
    let (parameters, active) = (config.parameters(), config.active_parameters());
    console.say(format_args!("{parameters} parameters, {active} of them active per token"));

    let (options, stop) = (options(&args)?, Stop::on_signals()?);
    let run = json!({ "flags": args, "config": config, "data": dataset.folder(), "data_hash": dataset.hash() });
    let fit = TrainingLoop::new(&training, args.steps).save(&folder, args.save_every, run).stop(&stop);
    let trained = communicator::on_threads(args.expert_ranks, |world| {
        let mut trainer = Trainer::builder(|vb| Moe::new(&config, vb), options.clone()).distributed(world).build()?;
        Ok(train(&mut trainer, &fit, &folder, checkpoint.as_ref(), load.as_deref(), &console))
    });
    trained?.into_iter().collect::<Result<(), _>>()?;
    Ok(console.exit_code(&stop)?)
}

fn options(args: &Args) -> Result<TrainOptions> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    Ok(TrainOptions {
        step: StepOptions {
            batch: args.batch,
            micro_batches: args.micro_batches,
            sequence: args.sequence,
            mesh: Mesh { expert: args.expert_ranks, ..Mesh::default() },
            memory: MemoryOptions {
                routing: args.reserve.map_or(Reserve::Worst, |factor| Reserve::Balanced { factor }),
                overflow: args.overflow.parse().map_err(Error::msg)?,
                ..MemoryOptions::default()
            },
            ..StepOptions::default()
        },
        learning_rate: LearningRate::cosine(args.lr, args.steps),
        seed: args.seed,
        threads: if args.threads == 0 { (cores / args.expert_ranks).max(1) } else { args.threads },
        device: args.device.parse().map_err(Error::msg)?,
        ..TrainOptions::default()
    })
}

/// Runs the training loop of this rank. Only rank 0 prints, and writes the loads to `load`.
fn train(
    trainer: &mut Trainer,
    fit: &TrainingLoop,
    folder: &RunFolder,
    checkpoint: Option<&Checkpoint>,
    load: Option<&Path>,
    console: &Console,
) -> Result<(), RunError> {
    folder.begin(trainer, checkpoint, console)?;
    let mut recorded = String::from("step,layer,expert,tokens\n");
    fit.run(trainer, |event, trainer| {
        let is_told = trainer.rank() == 0;
        match &event {
            Event::Step { .. } if is_told && trainer.steps() % 10 == 0 => {
                if let Some(path) = load {
                    record(trainer, &mut recorded)?;
                    std::fs::write(path, &recorded).with_context(|| format!("cannot write {}", path.display()))?;
                }
                let Balance { bars, most, dropped } = balance(trainer)?;
                console.say(format_args!("{event} load {bars} most {most:.2} × the mean, {dropped} dropped"));
            }
            Event::Saved { .. } if is_told => console.say(&event),
            _ => {}
        }
        Ok(Continue(()))
    })?;
    if trainer.rank() == 0 {
        match trainer.routing() {
            Some(report) => console.say(report.to_string().trim_end()),
            None => console.say("one rank has all experts, so all sizes were planned"),
        }
    }
    Ok(())
}

/// Adds the load of the last step: a line for each expert of each layer.
fn record(trainer: &Trainer, recorded: &mut String) -> Result<()> {
    for (name, layer) in trainer.watched_names().filter_map(|name| Some((name, name.strip_suffix(".load")?))) {
        let tokens: Vec<f32> = trainer.watched(name)?.flatten_all()?.to_vec1()?;
        for (expert, tokens) in tokens.iter().enumerate() {
            writeln!(recorded, "{},{layer},{expert},{tokens}", trainer.steps())?;
        }
    }
    Ok(())
}

/// Routing statistics of a step.
struct Balance {
    /// One bar per expert. The height of a bar is proportional to the expert's number of tokens.
    bars: String,
    /// Number of tokens of the busiest expert, divided by the mean over the experts.
    most: f32,
    /// Number of choices that exceeded an expert's capacity or, if experts choose tokens, number of tokens that no
    /// expert chose.
    dropped: f32,
}

/// Returns the routing statistics of the last step, summed over all layers.
fn balance(trainer: &Trainer) -> Result<Balance> {
    let (mut load, mut dropped): (Vec<f32>, f32) = (Vec::new(), 0.0);
    for name in trainer.watched_names() {
        let values: Vec<f32> = trainer.watched(name)?.flatten_all()?.to_vec1()?;
        if name.ends_with(".load") {
            load.resize(values.len(), 0.0);
            load.iter_mut().zip(values).for_each(|(sum, tokens)| *sum += tokens);
        } else if name.ends_with(".dropped") {
            dropped += values.iter().sum::<f32>();
        }
    }
    let most = load.iter().copied().fold(0.0, f32::max);
    let bar = |tokens: &f32| ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'][(7.0 * tokens / most.max(1.0)) as usize];
    let mean = load.iter().sum::<f32>() / load.len().max(1) as f32;
    // If experts choose tokens, the load is always even, and is not counted.
    let bars = if load.is_empty() { "even".into() } else { load.iter().map(bar).collect() };
    Ok(Balance { bars, most: if mean > 0.0 { most / mean } else { 1.0 }, dropped })
}

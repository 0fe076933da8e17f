//! Trains a small mixture of experts on real text, and shows where its tokens go.
//!
//! `--style` picks a way of routing; `--expert-ranks 2` shares the experts over threads that exchange rows, as GPUs would. The
//! line of each step shows how even the load of all layers together is, one bar per expert.

use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Result, ensure};
use clap::{Parser, ValueEnum};
use gapless::engine::data::{DataOptions, Dataset, RustSources, Source, VocabularyChoice};
use gapless::engine::learning_rate::{LearningRate, Shape};
use gapless::models::{Moe, MoeConfig, MoeStyle};
use gapless::run::Console;
use gapless::{DeviceChoice, Mesh, Overflow, Reserve, TrainOptions, Trainer, communicator};

#[derive(Parser)]
#[command(about = "Trains a small mixture of experts on real text, and shows where its tokens go")]
struct Args {
    #[arg(long, value_enum, default_value = "mixtral")]
    style: Style,
    /// A file or folder of .txt, .rs, .md or .jsonl; by default this workspace's Rust sources and those of its dependencies
    #[arg(long)]
    data: Option<PathBuf>,
    #[arg(long, default_value_t = 200)]
    steps: u64,
    /// Sequences per step, of all ranks together
    #[arg(long, default_value_t = 8)]
    batch: usize,
    /// Parts into which each rank's share of the batch is cut
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
    /// What runs it: auto, cpu, cuda or cuda:1; with auto, expert ranks take GPUs in turn
    #[arg(long, default_value = "auto")]
    device: DeviceChoice,
    /// Room for received rows as a multiple of what even routing needs; without it, for the worst case
    #[arg(long)]
    reserve: Option<f64>,
    /// What to do when that does not do: error, grow or recompute
    #[arg(long, default_value = "error")]
    overflow: Overflow,
    #[arg(long, default_value_t = 2e-3)]
    lr: f64,
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Worker threads of each rank; 0 for all cores
    #[arg(long, default_value_t = 0)]
    threads: usize,
}

/// What docs/moe.md describes.
#[derive(Debug, Clone, Copy, ValueEnum)]
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

fn main() -> Result<()> {
    let args = Args::parse();
    ensure!(args.expert_ranks > 0, "--expert-ranks is at least 1");
    let lock = Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.lock");
    let source = args.data.clone().map_or_else(|| Source::RustSources(RustSources::of_lock(lock)), Source::Path);
    let vocabulary = match args.vocabulary {
        256 => VocabularyChoice::Bytes,
        size => VocabularyChoice::Bpe { size },
    };
    let console = Console::default();
    console.say("preparing the data…");
    let dataset = Dataset::prepare(&source, &DataOptions { vocabulary, ..DataOptions::default() })?;
    let config = args.style.config(dataset.vocabulary().size());
    let (parameters, active) = (config.parameters(), config.active_parameters());
    console.say(format_args!("{parameters} parameters, {active} of them work on a token"));

    let options = options(&args);
    let trained = communicator::on_threads(args.expert_ranks, |world| {
        let tells = (world.rank() == 0).then_some(&console);
        let trainer = Trainer::on(world, |vb| Moe::new(&config, vb), options.clone())?;
        Ok(train(trainer, &dataset, &args, tells))
    });
    trained?.into_iter().collect::<Result<()>>()?;
    Ok(console.finish()?)
}

fn options(args: &Args) -> TrainOptions {
    let warmup_steps = 20.min(args.steps / 4);
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    TrainOptions {
        batch: args.batch,
        micro_batches: args.micro_batches,
        sequence: args.sequence,
        learning_rate: LearningRate {
            peak: args.lr,
            floor: args.lr / 10.0,
            warmup_steps,
            steps: args.steps,
            shape: Shape::Cosine,
        },
        seed: args.seed,
        threads: if args.threads == 0 { (cores / args.expert_ranks).max(1) } else { args.threads },
        device: args.device,
        mesh: Mesh { expert: args.expert_ranks, ..Mesh::default() },
        routing: args.reserve.map_or(Reserve::Worst, |factor| Reserve::Balanced { factor }),
        overflow: args.overflow,
        ..TrainOptions::default()
    }
}

/// What one rank does; the first has a console.
fn train(mut trainer: Trainer, dataset: &Dataset, args: &Args, console: Option<&Console>) -> Result<()> {
    if let Some(console) = console {
        console.say(trainer.device());
        console.say(trainer.report());
    }
    let training = dataset.training(args.sequence, args.batch, args.seed)?;
    let (mut tokens, mut targets) = (vec![0; args.batch * args.sequence], vec![0; args.batch * args.sequence]);
    let begun = Instant::now();
    while trainer.steps() < args.steps {
        training.fill(trainer.steps(), 0, &mut tokens, &mut targets)?;
        let step = trainer.step(&tokens, &targets)?;
        if let Some(console) = console.filter(|_| step.step % 10 == 0 || trainer.steps() == args.steps) {
            let rate = (trainer.steps() * tokens.len() as u64) as f64 / begun.elapsed().as_secs_f64();
            let Balance { bars, most, dropped } = balance(&trainer)?;
            console.say(format_args!(
                "step {:>5} loss {:.3} norm {:.2} {rate:.0} tokens/s load {bars} most {most:.2} × the mean, {dropped} dropped",
                step.step, step.loss, step.gradient_norm
            ));
        }
    }
    if let Some(console) = console {
        match trainer.routing() {
            Some(report) => console.say(report.to_string().trim_end()),
            None => console.say("one rank has all experts: every size was planned"),
        }
    }
    Ok(())
}

/// Where the tokens of a step went.
struct Balance {
    /// One bar per expert, full for the most tokens.
    bars: String,
    /// The most tokens of an expert ÷ the mean.
    most: f32,
    /// Choices that found no room, or tokens that no expert took.
    dropped: f32,
}

/// All layers together.
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
    // Experts that choose have an even load: nothing is counted.
    let bars = if load.is_empty() { "even".into() } else { load.iter().map(bar).collect() };
    Ok(Balance { bars, most: if mean > 0.0 { most / mean } else { 1.0 }, dropped })
}

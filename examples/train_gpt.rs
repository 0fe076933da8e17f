//! Trains a small GPT on real text: the binary to copy.
//!
//! Without flags it learns from the Rust sources of this workspace and of its unpacked dependencies. `--help` lists the
//! rest; `--resume` goes on where the last run of the same `--out` stopped, to the same bits. Ctrl-C, SIGTERM and SIGHUP save first;
//! the exit code is then 128 + the signal.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::{Parser, ValueEnum};
use gapless::alloc::draw::Bytes;
use gapless::engine::checkpoint::Checkpoint;
use gapless::engine::data::{
    DataError, DataOptions, Dataset, RustSources, Source, ValidationWindows, VocabularyChoice,
};
use gapless::engine::learning_rate::{LearningRate, Shape};
use gapless::engine::metrics::{JsonLines, peak_rss_bytes};
use gapless::engine::optim::{AdamW, AdamW8bit, GaLore};
use gapless::models::{Gpt, GptConfig};
use gapless::run::{Console, ErrorOutput, RunFolder, Stop};
use gapless::{DType, DeviceChoice, GenerateOptions, Generation, Offload, Recompute, Sampling, TrainOptions, Trainer};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;

#[derive(Parser)]
#[command(about = "Trains a small GPT on real text, out of one planned arena")]
struct Args {
    /// A file or folder of .txt, .rs, .md or .jsonl, or a .bin of u16 token ids; by default this workspace's Rust sources
    /// and those of its dependencies
    #[arg(long)]
    data: Option<PathBuf>,
    /// Where checkpoints and the memory map go
    #[arg(long, default_value = "runs/train_gpt")]
    out: PathBuf,
    /// Goes on from the newest checkpoint in --out
    #[arg(long)]
    resume: bool,
    #[arg(long, default_value_t = 300)]
    steps: u64,
    /// Sequences per step
    #[arg(long, default_value_t = 8)]
    batch: usize,
    /// Parts into which a batch is cut: more of them need less memory
    #[arg(long, default_value_t = 2)]
    micro_batches: usize,
    /// Tokens per sequence
    #[arg(long, default_value_t = 256)]
    sequence: usize,
    #[arg(long, default_value_t = 6)]
    layers: usize,
    #[arg(long, default_value_t = 6)]
    heads: usize,
    #[arg(long, default_value_t = 384)]
    width: usize,
    #[arg(long, default_value_t = 0.0)]
    dropout: f64,
    /// Tokens of the BPE vocabulary; 256 for plain bytes
    #[arg(long, default_value_t = 4096)]
    vocabulary: usize,
    /// A tokenizer.json to use instead of training one
    #[arg(long)]
    tokenizer: Option<PathBuf>,
    #[arg(long, default_value = "adamw")]
    optimizer: Rule,
    /// Directions that GaLore keeps of each weight
    #[arg(long, default_value_t = 96)]
    rank: usize,
    /// What GaLore scales its steps by
    #[arg(long, default_value_t = 0.25)]
    alpha: f64,
    /// The highest learning rate
    #[arg(long, default_value_t = 1e-3)]
    lr: f64,
    #[arg(long, default_value = "cosine")]
    schedule: Schedule,
    #[arg(long, default_value_t = 20)]
    warmup: u64,
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Worker threads; 0 for all cores
    #[arg(long, default_value_t = 0)]
    threads: usize,
    /// Steps between validations
    #[arg(long, default_value_t = 100)]
    eval_every: u64,
    /// Steps between checkpoints
    #[arg(long, default_value_t = 100)]
    save_every: u64,
    /// How the sampled text begins
    #[arg(long, default_value = "pub fn ")]
    prompt: String,
    /// Tokens to sample at the end
    #[arg(long, default_value_t = 120)]
    sample: usize,
    /// Writes one JSON object per step and a summary here
    #[arg(long)]
    json: Option<PathBuf>,
    /// Writes a trace for chrome://tracing or Perfetto here
    #[arg(long)]
    trace: Option<PathBuf>,
    /// What is computed again in the backward: none, layers, first:3, layers:h.0,h.2 or ops:layer_norm,gelu
    #[arg(long, default_value = "none")]
    recompute: Recompute,
    /// Bytes of the arena, at most, e.g. 600MiB: what is computed again is then chosen so that it costs least time
    #[arg(long, value_name = "SIZE", value_parser = Bytes::read, conflicts_with = "recompute")]
    budget: Option<u64>,
    /// Operations whose results wait for the backward in 8 bits, e.g. gelu,linear
    #[arg(long, value_name = "OPS", value_delimiter = ',')]
    compress: Vec<String>,
    /// Operations whose results wait for the backward in a file, e.g. gelu,linear
    #[arg(long, value_name = "OPS", value_delimiter = ',')]
    offload: Vec<String>,
    /// Where that file is; a disk, best
    #[arg(long, value_name = "FOLDER", default_value = ".")]
    offload_to: PathBuf,
    /// What runs it: auto, cpu, cuda or cuda:1
    #[arg(long, default_value = "auto")]
    device: DeviceChoice,
    /// Stores parameters and activations in f32, or in bf16 with masters in f32
    #[arg(long, default_value = "f32")]
    dtype: Float,
    /// Fills every dead range of the arena with NaN between instructions
    #[arg(long)]
    poison: bool,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Schedule {
    Cosine,
    Wsd,
    Constant,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Float {
    F32,
    Bf16,
}

/// What docs/optimizers.md compares.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum Rule {
    Adamw,
    Adamw8bit,
    Galore,
}

fn main() -> Result<ExitCode> {
    let args = Args::parse();
    let mut console = Console::default();
    let _trace = start_tracing(args.trace.as_deref(), console.errors())?;
    // All that may be refused comes before the folder is changed.
    let mut folder = RunFolder::open(&args.out)?;
    let checkpoint = if args.resume { Some(newest(&folder)?) } else { None };
    let dataset = open_data(&args, checkpoint.as_ref(), &console)?;
    let config = GptConfig {
        vocabulary: dataset.vocabulary().size(),
        sequence: args.sequence,
        layers: args.layers,
        heads: args.heads,
        width: args.width,
        dropout: args.dropout,
        ..GptConfig::default()
    };
    let training = dataset.training(args.sequence, args.batch, args.seed)?;
    let validation = match dataset.validation(args.sequence, 32.max(args.batch)) {
        // Too little of it is no reason not to train.
        Err(error @ DataError::TooShort { .. }) => {
            console.say(format_args!("no validation: {error}"));
            None
        }
        validation => validation?,
    };
    let prompt = if args.sample > 0 { prompt(&dataset, &args, &console)? } else { None };
    let run = json!({
        "data": dataset.folder(), "data_hash": dataset.hash(), "config": config, "seed": args.seed, "batch": args.batch,
        "micro_batches": args.micro_batches, "lr": args.lr, "schedule": format!("{:?}", args.schedule),
        "warmup": args.warmup, "optimizer": format!("{:?}", options(&args).optimizer),
    });
    if let Some(checkpoint) = &checkpoint {
        checkpoint.expect("run", &run).context("resume with the flags of the run that was saved")?;
    }
    let mut trainer = Trainer::new(|vb| Gpt::new(&config, vb), options(&args))?;
    if let Some(checkpoint) = &checkpoint {
        trainer.resume(checkpoint)?;
    }
    console.say(trainer.device());
    let report = trainer.report();
    console.say(&report);

    folder.claim()?;
    let map = args.out.join("memory.html");
    std::fs::write(&map, trainer.memory_map().html()).with_context(|| format!("cannot write {}", map.display()))?;
    console.say(format_args!("memory map: {}", map.display()));
    if let Some(path) = &args.json {
        console = console.with_rows(if args.resume { JsonLines::append(path) } else { JsonLines::create(path) }?);
    }
    if let Some(checkpoint) = checkpoint {
        console.say(format_args!("resumed after {} steps from {}", checkpoint.step(), checkpoint.path().display()));
    } else if let Some(earlier) = folder.set_aside()? {
        console.say(format_args!("checkpoints of an earlier run are now in {}", earlier.display()));
    }
    let stop = Stop::on_signals()?;
    let (mut tokens, mut targets) = (vec![0; args.batch * args.sequence], vec![0; args.batch * args.sequence]);
    let first_step = trainer.steps();
    let progress = progress_bar(args.steps, first_step);
    let (mut final_loss, mut val_loss, mut busy) = (None, None, Duration::ZERO);
    let tokens_per_second = |steps: u64, busy: Duration| {
        (steps * (args.batch * args.sequence) as u64) as f64 / busy.as_secs_f64().max(1e-9)
    };
    while trainer.steps() < args.steps && stop.signal().is_none() {
        let begun = Instant::now();
        training.fill(trainer.steps(), 0, &mut tokens, &mut targets)?;
        let step = trainer.step(&tokens, &targets).with_context(|| {
            format!("the last good checkpoint, if any, is in {}; a lower --lr may help", folder.checkpoints().display())
        })?;
        busy += begun.elapsed();
        final_loss = Some(step.loss);
        let rate = tokens_per_second(trainer.steps() - first_step, busy);
        progress.set_position(trainer.steps());
        progress.set_message(format!(
            "loss {:.3} norm {:.2} lr {:.1e} {rate:.0} tokens/s arena {:.0} MiB gap {:.3}",
            step.loss,
            step.gradient_norm,
            step.lr,
            report.arena_bytes as f64 / f64::from(1 << 20),
            report.gap
        ));
        if progress.is_hidden() && (step.step % 10 == 0 || trainer.steps() == args.steps) {
            console.say(format_args!("step {:>5} {}", step.step, progress.message()));
        }
        console.row(&json!({
            "step": step.step, "loss": step.loss, "gradient_norm": step.gradient_norm, "lr": step.lr,
            "tokens_per_second": rate,
        }));
        if trainer.steps() % args.eval_every.max(1) == 0 || trainer.steps() == args.steps {
            val_loss = validate(&mut trainer, validation.as_ref())?;
            let shown = val_loss.map_or("not measured: no validation data".into(), |loss| format!("{loss:.4}"));
            progress.suspend(|| console.say(format_args!("step {:>5} validation loss {shown}", step.step)));
        }
        if trainer.steps() % args.save_every.max(1) == 0 && trainer.steps() < args.steps {
            folder.save(&mut trainer, run.clone())?;
        }
    }
    progress.finish_and_clear();
    console.say(format_args!("saved {}", folder.save(&mut trainer, run)?.display()));
    let summary = json!({
        "final_loss": final_loss,
        "val_loss": val_loss,
        "tokens_per_second": tokens_per_second(trainer.steps() - first_step, busy),
        "steps": trainer.steps(),
        "parameters": report.parameters,
        "arena_bytes": report.arena_bytes,
        "lower_bound_bytes": report.lower_bound_bytes,
        "gap": report.gap,
        "peak_rss_bytes": peak_rss_bytes(),
        "plan_ms": report.plan_ms,
        "plan_hash": report.plan_hash,
    });
    console.say(format_args!("{summary:#}"));
    console.row(&summary);
    if let Some(signal) = stop.signal() {
        console.say(format_args!("stopped by signal {signal}; --resume goes on from here"));
    } else if let Some(prompt) = prompt {
        sample(&mut trainer, &dataset, &args, &prompt, &console)?;
    }
    match stop.exit_code() {
        Some(code) => Ok(code),
        None => Ok(console.finish().map(|()| ExitCode::SUCCESS)?),
    }
}

fn options(args: &Args) -> TrainOptions {
    let shape = match args.schedule {
        Schedule::Cosine => Shape::Cosine,
        Schedule::Wsd => Shape::Wsd { decay_steps: args.steps / 5 },
        Schedule::Constant => Shape::Constant,
    };
    let optimizer = match args.optimizer {
        Rule::Adamw => AdamW::default().into(),
        Rule::Adamw8bit => AdamW8bit::default().into(),
        Rule::Galore => GaLore { rank: args.rank, alpha: args.alpha, ..GaLore::default() }.into(),
    };
    let warmup_steps = args.warmup.min(args.steps / 4);
    TrainOptions {
        batch: args.batch,
        micro_batches: args.micro_batches,
        sequence: args.sequence,
        device: args.device,
        dtype: match args.dtype {
            Float::F32 => DType::F32,
            Float::Bf16 => DType::BF16,
        },
        optimizer,
        learning_rate: LearningRate { peak: args.lr, floor: args.lr / 10.0, warmup_steps, steps: args.steps, shape },
        seed: args.seed,
        threads: args.threads,
        recompute: args.budget.map_or_else(|| args.recompute.clone(), Recompute::budget),
        compress: args.compress.clone(),
        offload: (!args.offload.is_empty())
            .then(|| Offload { ops: args.offload.clone(), folder: args.offload_to.clone() }),
        generation: (args.sample > 0).then(Generation::default),
        poison: args.poison,
        ..TrainOptions::default()
    }
}

/// The checkpoint to go on from.
fn newest(folder: &RunFolder) -> Result<Checkpoint> {
    let nothing = || format!("nothing to resume in {}; run without --resume first", folder.checkpoints().display());
    Checkpoint::latest(folder.checkpoints())?.with_context(nothing)
}

/// The data of the run that is resumed, or that of the flags.
fn open_data(args: &Args, checkpoint: Option<&Checkpoint>, console: &Console) -> Result<Dataset> {
    if let Some(folder) = checkpoint.and_then(|c| c.metadata()["run"]["data"].as_str()) {
        return Ok(Dataset::open_prepared(Path::new(folder))?);
    }
    ensure!(checkpoint.is_none() || args.data.is_some(), "the saved run read a .bin: name it again with --data");
    let lock = Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.lock");
    let source = args.data.clone().map_or_else(|| Source::RustSources(RustSources::of_lock(lock)), Source::Path);
    let vocabulary = match &args.tokenizer {
        Some(file) => VocabularyChoice::File(file.clone()),
        None if args.vocabulary == 256 => VocabularyChoice::Bytes,
        None => VocabularyChoice::Bpe { size: args.vocabulary },
    };
    console.say("preparing the data…");
    let dataset = Dataset::prepare(&source, &DataOptions { vocabulary, ..DataOptions::default() })?;
    if let Some(corpus) = dataset.corpus() {
        console.say(corpus);
    }
    let (training, validation) = (dataset.training_tokens(), dataset.validation_tokens());
    console.say(format_args!("{training} training tokens, {validation} validation tokens"));
    Ok(dataset)
}

/// Mean loss over all validation windows; nothing if there are fewer than a batch of them.
fn validate(trainer: &mut Trainer, windows: Option<&ValidationWindows>) -> Result<Option<f32>> {
    let batch = trainer.options().evaluation_batch();
    let batches = windows.map_or(0, |windows| windows.count() / batch);
    let Some(windows) = windows.filter(|_| batches > 0) else { return Ok(None) };
    let size = batch * trainer.options().sequence;
    let (mut tokens, mut targets) = (vec![0; size], vec![0; size]);
    let mut sum = 0.0;
    for i in 0..batches {
        windows.fill(i * batch, &mut tokens, &mut targets)?;
        sum += trainer.evaluate(&tokens, &targets)?;
    }
    Ok(Some(sum / batches as f32))
}

/// The prompt as ids; nothing where there is no tokenizer, as with bare ids.
fn prompt(dataset: &Dataset, args: &Args, console: &Console) -> Result<Option<Vec<u32>>> {
    ensure!(!args.prompt.is_empty(), "--prompt is empty; begin with at least one character, or use --sample 0");
    match dataset.vocabulary().encode(&args.prompt) {
        Ok(ids) => Ok(Some(ids)),
        Err(error) => {
            console.say(format_args!("no sample at the end: {error}"));
            Ok(None)
        }
    }
}

fn sample(trainer: &mut Trainer, dataset: &Dataset, args: &Args, prompt: &[u32], console: &Console) -> Result<()> {
    let sampling = Sampling { seed: args.seed, ..Sampling::default() };
    let options = GenerateOptions { tokens: args.sample, sampling, stop: Vec::new() };
    let continuation = trainer.generate(&[prompt], &options, |_| ControlFlow::Continue(()))?.remove(0);
    console.say(format_args!("---\n{}{}\n---", args.prompt, dataset.vocabulary().decode(&continuation)?));
    Ok(())
}

fn progress_bar(steps: u64, done: u64) -> ProgressBar {
    let style = ProgressStyle::with_template("{pos}/{len} {wide_msg} ETA {eta}").expect("the template is sound");
    ProgressBar::new(steps).with_style(style).with_position(done)
}

/// Warnings go to standard error; with a path, spans go there until the guard is dropped.
fn start_tracing(path: Option<&Path>, errors: ErrorOutput) -> Result<Option<tracing_chrome::FlushGuard>> {
    use tracing_subscriber::filter::LevelFilter;
    use tracing_subscriber::{Layer, layer::SubscriberExt, util::SubscriberInitExt};
    let warnings = tracing_subscriber::fmt::layer().without_time().with_writer(move || errors.clone());
    let registry = tracing_subscriber::registry().with(warnings.with_filter(LevelFilter::WARN));
    let Some(path) = path else {
        registry.init();
        return Ok(None);
    };
    let file = std::fs::File::create(path).with_context(|| format!("cannot create {}", path.display()))?;
    let (spans, guard) = tracing_chrome::ChromeLayerBuilder::new().writer(file).include_args(true).build();
    // A tokenizer's training has spans in its inner loops.
    let own = tracing_subscriber::filter::filter_fn(|metadata| metadata.target().starts_with("gapless"));
    registry.with(spans.with_filter(own)).init();
    Ok(Some(guard))
}

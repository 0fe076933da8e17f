//! Trains a small GPT on real text. Use it as a template for programs of your own. `--resume` continues the last run in
//! the folder `--out`, with the same bits as an uninterrupted run. Flags that are not given are taken from the last
//! run. On a signal, the program saves a checkpoint and exits with 128 + the number of the signal.

use std::{path::PathBuf, process::ExitCode};

use anyhow::{Error, Result};
use clap::{CommandFactory, FromArgMatches, Parser, parser::ValueSource};
use gapless::models::{Gpt, GptConfig};
use gapless::run::{Console, RunFolder, Stop, Summary, TrainingLoop, dataset, validation_windows, with_saved};
use gapless::{GenerateOptions, Generation, VocabularyChoice, prelude::*};
use serde::{Deserialize, Serialize};
use serde_json::json;

/// Train a small GPT on real text in one planned arena
#[derive(Parser, Serialize, Deserialize)]
struct Args {
    /// A file or folder of .txt, .rs, .md or .jsonl, a .bin of u16 ids, or a Cargo.lock for the Rust sources that it names
    #[arg(long, default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/../Cargo.lock"))]
    data: PathBuf,
    #[arg(long, default_value = "runs/train_gpt", help = "Where checkpoints and the memory map go")]
    out: PathBuf,
    #[arg(long, help = "Resume from the newest checkpoint in --out, with its flags")]
    #[serde(skip)]
    resume: bool,
    #[arg(long, default_value_t = 300)]
    steps: u64,
    #[arg(long, default_value_t = 8, help = "Sequences per step")]
    batch: usize,
    #[arg(long, default_value_t = 2, help = "Parts into which a batch is split; more parts need less memory")]
    micro_batches: usize,
    #[arg(long, default_value_t = 256, help = "Tokens per sequence")]
    sequence: usize,
    #[arg(long, default_value_t = 6)]
    layers: usize,
    #[arg(long, default_value_t = 6)]
    heads: usize,
    #[arg(long, default_value_t = 384)]
    width: usize,
    #[arg(long, default_value_t = 4096, help = "Tokens of the BPE vocabulary; 256 for plain bytes")]
    vocabulary: usize,
    #[arg(long, default_value_t = 1e-3, help = "The highest learning rate")]
    lr: f64,
    #[arg(long, default_value_t = 0)]
    seed: u64,
    #[arg(long, default_value_t = 100, help = "Steps between validations")]
    eval_every: u64,
    #[arg(long, default_value_t = 100, help = "Steps between checkpoints")]
    save_every: u64,
    #[arg(long, default_value = "pub fn", help = "The beginning of the sampled text")]
    prompt: String,
    #[arg(long, default_value_t = 120, help = "Tokens to sample at the end")]
    sample: usize,
    #[arg(long, help = "Where to write one JSON object per step and a summary")]
    json: Option<PathBuf>,
    #[arg(long, value_parser = gapless::alloc::draw::Bytes::read, help = "Maximum bytes of the arena, e.g. 600MiB")]
    budget: Option<u64>,
    #[arg(long, default_value = "auto", help = "The device: auto, cpu, cuda or cuda:1")]
    device: String,
    #[arg(
        long,
        default_value = "f32",
        help = "The type of parameters and activations: f32, or bf16 with masters in f32"
    )]
    dtype: String,
}

/// Flags that may change when a run is resumed: none of them affects the steps done so far.
const MAY_CHANGE: &[&str] =
    &["out", "steps", "lr", "eval_every", "save_every", "prompt", "sample", "json", "budget", "device"];

fn main() -> Result<ExitCode> {
    let flags = Args::command().get_matches();
    let (mut args, mut console) = (Args::from_arg_matches(&flags)?, Console::default());
    let errors = console.errors();
    tracing_subscriber::fmt().with_max_level(tracing::Level::WARN).with_writer(move || errors.clone()).init();
    // All checks that may fail come before the first change to the folder.
    let folder = RunFolder::open(&args.out)?;
    let checkpoint = if args.resume { Some(folder.newest()?) } else { None };
    if let Some(checkpoint) = &checkpoint {
        let is_given = |flag: &str| flags.value_source(flag) == Some(ValueSource::CommandLine);
        args = with_saved(&args, is_given, checkpoint, "flags", MAY_CHANGE, &console)?;
    }
    let Args { steps, batch, micro_batches, sequence, layers, heads, width, seed, sample, .. } = args;
    let data = DataOptions { vocabulary: VocabularyChoice::of_size(args.vocabulary), ..DataOptions::default() };
    let dataset = dataset(&Source::from(args.data.clone()), &data, checkpoint.as_ref())?;
    let training = dataset.training(sequence, batch, seed)?;
    let vocabulary = dataset.vocabulary();
    let _ = (sample > 0).then(|| vocabulary.encode(&args.prompt)).transpose()?;
    let config = GptConfig { vocabulary: vocabulary.size(), sequence, layers, heads, width, ..GptConfig::default() };
    let options = TrainOptions {
        step: StepOptions {
            batch,
            micro_batches,
            sequence,
            precision: args.dtype.parse()?,
            generation: (sample > 0).then(Generation::default),
            memory: MemoryOptions { budget: args.budget, ..MemoryOptions::default() },
            ..StepOptions::default()
        },
        seed,
        learning_rate: LearningRate::cosine(args.lr, steps),
        device: args.device.parse().map_err(Error::msg)?,
        ..TrainOptions::default()
    };
    let mut trainer = Trainer::new(|vb| Gpt::new(&config, vb), options)?;
    folder.begin(&mut trainer, checkpoint.as_ref(), &console)?;
    if let Some(path) = &args.json {
        console.write_rows(path, checkpoint.is_some())?;
    }
    let stop = Stop::on_signals()?;
    let saved = json!({ "flags": args, "config": config, "data": dataset.folder(), "data_hash": dataset.hash() });
    let fitted = TrainingLoop::new(&training, steps)
        .evaluate(validation_windows(&dataset, sequence, 32)?.as_ref(), args.eval_every)
        .save(&folder, args.save_every, saved)
        .stop(&stop)
        .run(&mut trainer, |event, _| console.event(&event))?;
    let summary = Summary::new(&trainer, &fitted, stop.signal());
    console.say(format_args!("{:#}", json!(summary)));
    console.row(&summary);
    if sample > 0 && stop.signal().is_none() {
        let options = GenerateOptions { tokens: sample, ..GenerateOptions::default() };
        let text = gapless::run::sample(&mut trainer, vocabulary, &args.prompt, &options)?;
        console.say(format_args!("---\n{text}\n---"));
    }
    Ok(console.exit_code(&stop)?)
}

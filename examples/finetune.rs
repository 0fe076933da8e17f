//! Fine-tunes pretrained weights on a text. Reads a Hugging Face folder and writes a folder of the same form. With
//! `--lora`, only an adapter is trained, and the folder has the adapter in PEFT's format. With `--merge` as well, the
//! merged model is also written.
//!
//! `cargo run --release --example finetune -- SmolLM-135M my.txt SmolLM-135M-mine`
//! `cargo run --release --example finetune -- SmolLM-135M my.txt my-adapter --lora 16 --merge SmolLM-135M-merged`

use std::ops::ControlFlow::Continue;
use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Parser;
use gapless::alloc::draw::Bytes;
use gapless::engine::data::{DataOptions, Dataset, Source, VocabularyChoice};
use gapless::models::hf::Folder;
use gapless::run::TrainingLoop;
use gapless::{DeviceChoice, LearningRate, Lora, MemoryOptions, StepOptions, TrainOptions, Trainable, Trainer};

#[derive(Parser)]
#[command(about = "Fine-tune pretrained weights on a text: a Hugging Face folder in, a folder out")]
struct Args {
    /// A folder with config.json, safetensors files and tokenizer.json
    model: PathBuf,
    /// A file or folder of .txt, .rs, .md or .jsonl
    data: PathBuf,
    /// The new folder; an existing one must be empty
    out: PathBuf,
    #[arg(long, default_value_t = 20)]
    steps: u64,
    /// Sequences per step
    #[arg(long, default_value_t = 4)]
    batch: usize,
    /// Tokens per sequence
    #[arg(long, default_value_t = 64)]
    sequence: usize,
    #[arg(long, default_value_t = 1e-4)]
    lr: f64,
    /// Train only adapters (LoRA) of this rank
    #[arg(long, value_name = "RANK")]
    lora: Option<usize>,
    /// Alpha of the adapters' scale, alpha ÷ rank; by default twice the rank
    #[arg(long, requires = "lora")]
    alpha: Option<f64>,
    /// Probability of dropout on the adapters' inputs
    #[arg(long, requires = "lora", default_value_t = 0.0)]
    dropout: f64,
    /// Layers that have adapters, e.g. q_proj,o_proj; by default queries and values
    #[arg(long, requires = "lora", value_delimiter = ',')]
    targets: Vec<String>,
    /// Where to save the model with the adapters merged as well
    #[arg(long, requires = "lora")]
    merge: Option<PathBuf>,
    /// Bytes that the arena must fit into, if need be by recomputation, e.g. 600MiB
    #[arg(long, value_name = "SIZE", value_parser = Bytes::read)]
    budget: Option<u64>,
    /// The device: auto, cpu, cuda or cuda:1
    #[arg(long, default_value = "auto")]
    device: DeviceChoice,
    /// Maximum bytes of tensors per saved file; by default files are split as in the source
    #[arg(long, value_name = "SIZE", value_parser = Bytes::read)]
    max_shard_size: Option<u64>,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let folder = Folder::open(&args.model)?;
    let options = TrainOptions {
        step: StepOptions {
            batch: args.batch,
            sequence: args.sequence,
            trainable: trainable(&args, &folder),
            memory: MemoryOptions { budget: args.budget, ..MemoryOptions::default() },
            ..StepOptions::default()
        },
        device: args.device,
        learning_rate: LearningRate::constant(args.lr),
        ..TrainOptions::default()
    };
    let mut trainer = Trainer::new(|vb| folder.model(vb), options)?;
    println!("{}\n{}", trainer.device(), trainer.report());
    folder.load(&mut trainer)?;

    let vocabulary = VocabularyChoice::File(args.model.join("tokenizer.json"));
    let data = DataOptions { vocabulary, ..DataOptions::default() };
    let dataset = Dataset::prepare(&Source::Path(args.data), &data).context("cannot read the text")?;
    let training = dataset.training(args.sequence, args.batch, 0)?;
    TrainingLoop::new(&training, args.steps).run(&mut trainer, |event, _| {
        println!("{event}");
        Ok(Continue(()))
    })?;
    match args.lora {
        Some(_) => folder.save_adapter(&trainer, &args.out)?,
        None => folder.save(&trainer, &args.out, args.max_shard_size)?,
    }
    if let Some(merged) = &args.merge {
        folder.save(&trainer, merged, args.max_shard_size)?;
    }
    println!("saved to {}", args.out.display());
    Ok(())
}

fn trainable(args: &Args, folder: &Folder) -> Trainable {
    let Some(rank) = args.lora else { return Trainable::All };
    let targets =
        if args.targets.is_empty() { folder.config().architecture().lora_targets() } else { args.targets.clone() };
    let alpha = args.alpha.unwrap_or(2.0 * rank as f64);
    Trainable::Lora(Lora { rank, alpha, dropout: args.dropout, targets, ..Lora::default() })
}

//! Trains somebody's weights on a text: a Hugging Face folder in, a folder of the same form out.
//!
//! `cargo run --release --example finetune -- SmolLM-135M my.txt SmolLM-135M-mine`

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Parser;
use gapless::alloc::draw::Bytes;
use gapless::engine::data::{DataOptions, Dataset, Source, VocabularyChoice};
use gapless::engine::learning_rate::{LearningRate, Shape};
use gapless::models::hf::Folder;
use gapless::{DeviceChoice, Recompute, TrainOptions, Trainer};

#[derive(Parser)]
#[command(about = "Trains somebody's weights on a text: a Hugging Face folder in, a folder out")]
struct Args {
    /// A folder with config.json, safetensors files and tokenizer.json
    model: PathBuf,
    /// A file or folder of .txt, .rs, .md or .jsonl
    data: PathBuf,
    /// A folder that is not there yet
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
    /// Bytes that the step must fit into, at the price of computing some of it again
    #[arg(long, value_name = "SIZE", value_parser = Bytes::read)]
    budget: Option<u64>,
    /// What runs it: auto, cpu, cuda or cuda:1
    #[arg(long, default_value = "auto")]
    device: DeviceChoice,
    /// Bytes of tensors per saved file at most; without it, files are as they were
    #[arg(long, value_name = "SIZE", value_parser = Bytes::read)]
    max_shard_size: Option<u64>,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let folder = Folder::open(&args.model)?;
    let options = TrainOptions {
        batch: args.batch,
        sequence: args.sequence,
        device: args.device,
        recompute: args.budget.map_or(Recompute::None, Recompute::budget),
        learning_rate: LearningRate {
            peak: args.lr,
            floor: args.lr,
            warmup_steps: 0,
            steps: 0,
            shape: Shape::Constant,
        },
        ..TrainOptions::default()
    };
    let mut trainer = Trainer::new(|vb| folder.model(vb), options)?;
    println!("{}\n{}", trainer.device(), trainer.report());
    folder.load(&mut trainer)?;

    let vocabulary = VocabularyChoice::File(args.model.join("tokenizer.json"));
    let data = DataOptions { vocabulary, ..DataOptions::default() };
    let dataset = Dataset::prepare(&Source::Path(args.data), &data).context("the text cannot be read")?;
    let training = dataset.training(args.sequence, args.batch, 0)?;
    let mut tokens = vec![0; args.batch * args.sequence];
    let mut targets = tokens.clone();
    while trainer.steps() < args.steps {
        training.fill(trainer.steps(), 0, &mut tokens, &mut targets)?;
        let step = trainer.step(&tokens, &targets)?;
        println!("step {:>4} loss {:.4} norm {:.2}", step.step, step.loss, step.gradient_norm);
    }
    folder.save(&trainer, &args.out, args.max_shard_size)?;
    println!("saved to {}", args.out.display());
    Ok(())
}

//! `gapless export`: writes a run's model as a Hugging Face folder.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::ensure;
use gapless::run::TrainedRun;

use crate::output::{exit_code, tell};

/// Write the model of a run as a Hugging Face folder, which transformers, other programs and `sample` open.
///
/// The folder has config.json, model.safetensors and the tokenizer. Adapters (LoRA) are added to the weights. A model that was trained
/// from scratch gets the family that computes the same (gpt2, llama, mistral, qwen2, qwen3, olmo2, gemma2, gemma3_text, mixtral, qwen2_moe, qwen3_moe,
/// deepseek_v3); if there is none, the differences to the nearest family are printed.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// A run's folder (its newest checkpoint is used), or one of its checkpoints.
    run: PathBuf,
    /// The new folder; an existing one must be empty.
    out: PathBuf,
    /// Use the averages of the run's weights (optimizer.average) instead of the weights.
    #[arg(long)]
    average: bool,
}

/// Runs the command and reports errors.
pub fn run(arguments: &Arguments) -> ExitCode {
    exit_code("export", export(arguments))
}

fn export(arguments: &Arguments) -> anyhow::Result<()> {
    let Arguments { run: path, out, average } = arguments;
    ensure!(
        TrainedRun::is_at(path),
        "{} is not a run: it has no run.toml; name a folder that `gapless train` has written (an adapter is merged by \
         `gapless merge`)",
        path.display()
    );
    let mut run = TrainedRun::open(path)?;
    run.average = *average;
    run.export(out)?;
    tell(format_args!("{}: {}, {} steps", out.display(), run.checkpoint.path().display(), run.checkpoint.step()));
    Ok(())
}

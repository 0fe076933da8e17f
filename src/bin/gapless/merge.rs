//! `gapless merge`: adds an adapter to the weights of its base model.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{bail, ensure};
use gapless::Trainable;
use gapless::run::TrainedRun;

use crate::output::{exit_code, tell};
use crate::weights;

/// Add an adapter (LoRA) to the weights of its base model, and write the model as a Hugging Face folder.
///
/// The adapter is that of a run, or a folder in PEFT's format. A run needs no base, because its checkpoint has all weights. For a
/// folder, the new folder has the names, types and files of the base, and the adapter's tokenizer where it has one. Weights are added
/// in f32 and rounded once, to the type that the base stores.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// A run with adapters (its newest checkpoint is used), one of its checkpoints, or an adapter's folder, with
    /// adapter_config.json and adapter_model.safetensors.
    adapter: PathBuf,
    /// The new folder; an existing one must be empty.
    out: PathBuf,
    /// The base model's folder, if it is not the one that an adapter's folder names.
    #[arg(long)]
    base: Option<PathBuf>,
}

/// Runs the command and reports errors.
pub fn run(arguments: &Arguments) -> ExitCode {
    exit_code("merge", merge(arguments))
}

fn merge(arguments: &Arguments) -> anyhow::Result<()> {
    let Arguments { adapter: path, out, base } = arguments;
    if TrainedRun::is_at(path) {
        ensure!(base.is_none(), "a run has the weights of its base in its checkpoints; leave --base out");
        let run = TrainedRun::open(path)?;
        ensure!(
            matches!(run.config.trainable, Trainable::Lora(_)),
            "the run in {} has no adapters; `gapless export` writes its weights",
            path.display()
        );
        run.export(out)?;
        tell(format_args!("{}: {}, {} steps", out.display(), run.checkpoint.path().display(), run.checkpoint.step()));
        return Ok(());
    }
    let Some((adapter, base)) = weights::with_base(path, base.as_deref())? else {
        bail!("{} is not an adapter: it has no adapter_config.json; nor is it a run with adapters", path.display());
    };
    base.notices().iter().for_each(tell);
    adapter.merge(&base, out)?;
    tell(format_args!("{}: {} with {}", out.display(), base.path().display(), path.display()));
    Ok(())
}

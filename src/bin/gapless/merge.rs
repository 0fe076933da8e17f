//! `gapless merge`: adds an adapter to the weights of its base model.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::bail;

use crate::output::{exit_code, tell};
use crate::weights;

/// Add an adapter (LoRA, in PEFT's format) to the weights of its base model, and write the model as a Hugging Face folder.
///
/// The new folder has the names, types and files of the base, and the adapter's tokenizer where it has one. Weights are added in f32
/// and rounded once, to the type that the base stores.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// The adapter's folder, with adapter_config.json and adapter_model.safetensors.
    adapter: PathBuf,
    /// The new folder; an existing one must be empty.
    out: PathBuf,
    /// The base model's folder, if it is not the one that the adapter names.
    #[arg(long)]
    base: Option<PathBuf>,
}

/// Runs the command and reports errors.
pub fn run(arguments: &Arguments) -> ExitCode {
    exit_code("merge", merge(arguments))
}

fn merge(arguments: &Arguments) -> anyhow::Result<()> {
    let Arguments { adapter: path, out, base } = arguments;
    let Some((adapter, base)) = weights::with_base(path, base.as_deref())? else {
        bail!("{} is not an adapter: it has no adapter_config.json", path.display());
    };
    base.notices().iter().for_each(tell);
    adapter.merge(&base, out)?;
    tell(format_args!("{}: {} with {}", out.display(), base.path().display(), path.display()));
    Ok(())
}

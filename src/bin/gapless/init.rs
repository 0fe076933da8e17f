//! `gapless init NAME`: prints a commented run file to start from.

use std::process::ExitCode;

use clap::ValueEnum;
use gapless::run::RunConfig;

use crate::output::{print, tell_error};

/// Print a run file to start from: gapless init small-gpt > run.toml
#[derive(clap::Args)]
pub struct Arguments {
    /// The template
    name: Name,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Name {
    /// A GPT of 0.8 million parameters on bytes, from scratch: first words after a minute on two cores
    Tiny,
    /// A GPT of 10 million parameters, from scratch, on a CPU in minutes
    SmallGpt,
    /// A small Llama, from scratch
    Llama,
    /// A small mixture of experts, from scratch
    Moe,
    /// The small GPT, recomputed to fit three quarters of its memory
    Budget,
    /// A GPT as a pipeline of two ranks
    Pipeline,
    /// Adapters (LoRA) on pretrained weights, with a text of yours
    Lora,
    /// Fine-tuning of pretrained weights, with prompts and answers of yours
    Sft,
    /// Training on preferences (DPO), with pairs of answers of yours
    Dpo,
    /// The JSON schema of all keys of a run file, for editors that complete and check them
    Schema,
}

pub fn run(arguments: &Arguments) -> ExitCode {
    let schema;
    let text = match arguments.name {
        Name::Schema => {
            schema = serde_json::to_string_pretty(&RunConfig::schema()).expect("a schema is JSON") + "\n";
            &schema
        }
        Name::Tiny => include_str!("presets/tiny.toml"),
        Name::SmallGpt => include_str!("presets/small-gpt.toml"),
        Name::Llama => include_str!("presets/llama.toml"),
        Name::Moe => include_str!("presets/moe.toml"),
        Name::Budget => include_str!("presets/budget.toml"),
        Name::Pipeline => include_str!("presets/pipeline.toml"),
        Name::Lora => include_str!("presets/lora.toml"),
        Name::Sft => include_str!("presets/sft.toml"),
        Name::Dpo => include_str!("presets/dpo.toml"),
    };
    match print(|out| out.write_all(text.as_bytes())) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tell_error("gapless init", &error);
            ExitCode::FAILURE
        }
    }
}

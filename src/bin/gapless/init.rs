//! `gapless init NAME`: prints a commented run file to start from.

use std::process::ExitCode;

use clap::ValueEnum;
use gapless::run::RunConfig;

use crate::output::{print, tell_error};

/// Prints a run's file to begin with: gapless init small-gpt > run.toml
#[derive(clap::Args)]
pub struct Arguments {
    /// Which
    name: Name,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Name {
    /// A GPT of 10 million parameters, from scratch, on a CPU in minutes
    SmallGpt,
    /// A small Llama, from scratch
    Llama,
    /// A small mixture of experts, from scratch
    Moe,
    /// The small GPT in three quarters of its memory
    Budget,
    /// The layers of a GPT on two ranks
    Pipeline,
    /// Adapters of somebody's weights, on a text of yours
    Lora,
    /// Somebody's weights, on prompts and answers of yours
    Sft,
    /// No run, but every key that one may have: a JSON schema, for editors that complete and check by it
    Schema,
}

pub fn run(arguments: &Arguments) -> ExitCode {
    let schema;
    let text = match arguments.name {
        Name::Schema => {
            schema = serde_json::to_string_pretty(&RunConfig::schema()).expect("a schema is JSON") + "\n";
            &schema
        }
        Name::SmallGpt => include_str!("presets/small-gpt.toml"),
        Name::Llama => include_str!("presets/llama.toml"),
        Name::Moe => include_str!("presets/moe.toml"),
        Name::Budget => include_str!("presets/budget.toml"),
        Name::Pipeline => include_str!("presets/pipeline.toml"),
        Name::Lora => include_str!("presets/lora.toml"),
        Name::Sft => include_str!("presets/sft.toml"),
    };
    match print(|out| out.write_all(text.as_bytes())) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tell_error("gapless init", &error);
            ExitCode::FAILURE
        }
    }
}

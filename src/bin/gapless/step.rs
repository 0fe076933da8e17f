//! The flags that name a training step: those of `plan`, `compare`, `schedule` and `sweep`, and the keys of a file's `[step]`.

use std::path::PathBuf;

use anyhow::Context;
use gapless::step::{Step, StepSpec};
use serde::Serialize;

/// A training step. Each flag is a key of the `[step]` of `--step FILE.toml`, where it has underscores, and goes before it.
#[derive(Debug, clap::Args, Serialize)]
#[command(next_help_heading = "Training step")]
#[group(id = "training_step")]
pub struct StepArguments {
    /// A file whose [step] says what the flags don't.
    #[arg(long = "step", value_name = "FILE.toml")]
    #[serde(skip)]
    step_file: Option<PathBuf>,
    /// The model: small, gpt2, gpt2-medium, gpt2-large, gpt2-xl, llama2-7b, llama3-8b, mixtral8x7b, qwen-moe; gpt, llama or moe with
    /// extents, as llama:layers=4,width=256; or a folder or config.json of Hugging Face's, whose weights are not read.
    #[arg(long, value_name = "NAME|CONFIG")]
    #[serde(skip_serializing_if = "Option::is_none")]
    model: Option<String>,
    /// Sequences per step, of all ranks together; 8 if not given.
    #[arg(long, allow_negative_numbers = true)]
    #[serde(skip_serializing_if = "Option::is_none")]
    batch: Option<usize>,
    /// Parts into which a data rank's share of the batch is cut; 1 if not given.
    #[arg(long, allow_negative_numbers = true)]
    #[serde(skip_serializing_if = "Option::is_none")]
    micro_batches: Option<usize>,
    /// Tokens per sequence; 1024 if not given.
    #[arg(long, allow_negative_numbers = true)]
    #[serde(skip_serializing_if = "Option::is_none")]
    sequence: Option<usize>,
    /// Element type: f32; bf16, the optimizer's states too; or mixed, bf16 but for masters, moments and sums of gradients.
    #[arg(long, value_name = "TYPE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    dtype: Option<String>,
    /// The update rule: adamw, adamw8bit or galore.
    #[arg(long, value_name = "RULE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    optimizer: Option<String>,
    /// Ranks that share the batch, and the optimizer's states (ZeRO stage 1).
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    #[serde(skip_serializing_if = "Option::is_none")]
    data_ranks: Option<usize>,
    /// Ranks of a pipeline.
    #[arg(long, value_name = "P", visible_alias = "ranks", allow_negative_numbers = true)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pipeline_ranks: Option<usize>,
    /// Ranks that share the experts.
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    #[serde(skip_serializing_if = "Option::is_none")]
    expert_ranks: Option<usize>,
    /// The order of work in the pipeline, as `gapless schedule` names it; 1f1b if not given.
    #[arg(long, value_name = "NAME")]
    #[serde(skip_serializing_if = "Option::is_none")]
    schedule: Option<String>,
    /// Stages per rank; one if not given, two for schedules in the shape of a V.
    #[arg(long, value_name = "V")]
    #[serde(skip_serializing_if = "Option::is_none")]
    chunks: Option<usize>,
    /// What is computed again: none, layers, first:8, layers:h.3,h.7 or ops:layer_norm,gelu.
    #[arg(long, value_name = "POLICY")]
    #[serde(skip_serializing_if = "Option::is_none")]
    recompute: Option<String>,
    /// Bytes that a rank's step must fit into, e.g. 20GiB: the cheapest recomputation that does is sought.
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    #[serde(skip_serializing_if = "Option::is_none")]
    budget: Option<String>,
    /// Operations whose results wait for the backward in 8 bits, e.g. gelu,linear.
    #[arg(long, value_name = "OPS", value_delimiter = ',')]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    compress: Vec<String>,
    /// Operations whose results wait for the backward in a file.
    #[arg(long, value_name = "OPS", value_delimiter = ',')]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    offload: Vec<String>,
    /// Train adapters of this rank beside some layers, and nothing else; with alpha (by default the rank) behind it, e.g. 16:32.
    #[arg(long, value_name = "RANK[:ALPHA]")]
    #[serde(skip_serializing_if = "Option::is_none")]
    lora: Option<String>,
    /// The layers that have adapters, e.g. q_proj,o_proj; by default queries and values.
    #[arg(long, value_name = "LAYERS", value_delimiter = ',')]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    lora_targets: Vec<String>,
    /// Train these parameters or modules alone, e.g. lm_head,*norm*.
    #[arg(long, value_name = "PATTERNS", value_delimiter = ',')]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    train: Vec<String>,
    /// Whose kernels it is planned for, cpu or cuda: they need other scratch; cpu if not given.
    #[arg(long, value_name = "DEVICE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    kernels: Option<String>,
    /// Whose lifetimes: gapless; eager, an eager framework's (PyTorch 2); or eager-amp, with autocast; gapless if not given. Sweeps
    /// replay them through other allocators than gapless.
    #[arg(long, value_name = "NAME")]
    #[serde(skip_serializing_if = "Option::is_none")]
    lowering: Option<String>,
    /// Room for the rows that an expert rank receives, as a multiple of what even routing needs; without it, for the worst case.
    #[arg(long, value_name = "FACTOR", allow_negative_numbers = true)]
    #[serde(skip_serializing_if = "Option::is_none")]
    routing: Option<f64>,
    /// The device that time is estimated for: a100-80, h100, h200, b200, this-machine, or a file (docs/sweep.md); h100 if not given.
    #[arg(long, value_name = "NAME|FILE.toml", alias = "card")]
    #[serde(skip_serializing_if = "Option::is_none")]
    profile: Option<String>,
    /// TFLOP/s of its matrix products, where they are not the profile's.
    #[arg(long, value_name = "NUMBER", allow_negative_numbers = true)]
    #[serde(skip_serializing_if = "Option::is_none")]
    tflops: Option<f64>,
    /// TB/s of its memory, where they are not the profile's.
    #[arg(long, value_name = "NUMBER", allow_negative_numbers = true)]
    #[serde(skip_serializing_if = "Option::is_none")]
    terabytes: Option<f64>,
    /// The most work of the planner, in rectangles looked at; 2500000 takes some tens of milliseconds at most.
    #[arg(long, value_name = "WORK")]
    #[serde(skip_serializing_if = "Option::is_none")]
    planning: Option<u64>,
    /// The ranks of the pipeline that are asked about: numbers with commas between them, or all; 0 if not given.
    #[arg(long, value_name = "RANKS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    rank: Option<String>,
}

impl StepArguments {
    /// What the flags and the file say.
    pub fn spec(&self) -> anyhow::Result<StepSpec> {
        self.spec_with(None)
    }

    /// The same, with a schedule that is named in another place.
    pub fn spec_with(&self, schedule: Option<&str>) -> anyhow::Result<StepSpec> {
        let mut over = toml::Table::try_from(self).context("flags that are no keys")?;
        over.extend(schedule.map(|name| ("schedule".to_owned(), name.into())));
        Ok(StepSpec::read(self.step_file.as_deref(), &over)?)
    }

    /// Whether the extents of a pipeline are given, rather than their defaults.
    pub fn has_pipeline(&self) -> bool {
        self.step_file.is_some() || self.pipeline_ranks.is_some()
    }

    /// Whether the number of micro-batches is given.
    pub fn has_micro_batches(&self) -> bool {
        self.step_file.is_some() || self.micro_batches.is_some()
    }

    /// Whether a model is named.
    pub fn names_a_model(&self) -> anyhow::Result<bool> {
        Ok(self.model.is_some() || self.step_file.is_some() && self.spec()?.model.is_some())
    }

    /// The step that they mean.
    pub fn step(&self) -> anyhow::Result<Step> {
        Ok(self.spec()?.check()?)
    }
}

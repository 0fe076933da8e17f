//! A run as a file says it: TOML → [`RunConfig`] → what a [`Trainer`](crate::Trainer) and a [`Dataset`](crate::Dataset) are made of.
//!
//! Two stages. Reading refuses keys that do not exist and values of the wrong type, with their line. [`RunConfig::options`] and
//! [`RunConfig::check`] refuse what cannot be together, with the keys' names.

mod check;
mod data;
mod learning_rate;
mod memory;
mod optimizer;
mod read;
mod schema;
mod step;

use std::path::PathBuf;

use gapless_engine::data::Vocabulary;
use gapless_engine::nn::Trainable;
use gapless_engine::optim::AdamW;
use gapless_engine::{Generation, LossTerms, Sampling, TrainOptions};
use gapless_models::hf::{self, Architecture, Config, Folder};
use gapless_models::{GptConfig, LlamaConfig, MoeConfig};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use data::{DataConfig, SourceConfig};
pub use learning_rate::{RateConfig, RateShape};
pub use memory::MemoryConfig;
pub use optimizer::{GroupConfig, OptimizerConfig, Rule};
pub use read::ConfigError;
pub(crate) use read::text_of;
#[cfg(feature = "sweep")]
pub(crate) use read::{line_of, size, with_nearest};
pub(crate) use step::pipeline;
pub use step::{Float, StepConfig};

use super::GuardConfig;
use crate::{Offload, Recompute};

/// All that decides a run. Every key has a default but `model` and `data.path`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RunConfig {
    /// Steps in all.
    #[serde(default = "default_steps")]
    pub steps: u64,
    /// Minutes of training after which it ends with a checkpoint, to be resumed; without, there is no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_minutes: Option<f64>,
    /// Of the initial parameters, of dropout and of the order of the data.
    #[serde(default)]
    pub seed: u64,
    /// What is trained.
    pub model: ModelConfig,
    /// The part of it that is trained: `"all"`, `[trainable.lora]` with `rank`, `alpha`, `dropout`, `targets` and
    /// `rank_stabilised`, or `trainable.only` with patterns of names.
    #[serde(default)]
    pub trainable: Trainable,
    /// What it learns from.
    pub data: DataConfig,
    /// A step's extents, and where it runs.
    #[serde(default)]
    pub step: StepConfig,
    /// What the training loss counts.
    #[serde(default, skip_serializing_if = "is_default")]
    pub loss: LossConfig,
    /// The update rule.
    #[serde(default)]
    pub optimizer: OptimizerConfig,
    /// Step → learning rate.
    #[serde(default)]
    pub learning_rate: RateConfig,
    /// Which steps are left out.
    #[serde(default, skip_serializing_if = "is_default")]
    pub guard: GuardConfig,
    /// What of a step's memory is saved, and how.
    #[serde(default)]
    pub memory: MemoryConfig,
    /// When the validation loss is measured.
    #[serde(default)]
    pub evaluation: EvaluationConfig,
    /// When the run is saved.
    #[serde(default)]
    pub checkpoints: CheckpointConfig,
    /// What is generated at each evaluation.
    #[serde(default)]
    pub sample: SampleConfig,
}

/// `[model.gpt]`, `[model.llama]`, `[model.moe]` with the extents of one that starts from random numbers, or `model.folder`. The
/// vocabulary is the data's, and a GPT's positions are as many as a sequence has tokens.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[expect(clippy::large_enum_variant, reason = "there is one of it")]
pub enum ModelConfig {
    /// GPT-2 and its like.
    Gpt(GptConfig),
    /// Llama and its like.
    Llama(LlamaConfig),
    /// Mixtures of experts.
    Moe(MoeConfig),
    /// A Hugging Face folder: its weights, and its tokenizer unless `data` names another.
    Folder(PathBuf),
}

impl ModelConfig {
    /// Its family and extents. Of a folder they are in its config.json, and its weights are not looked at.
    ///
    /// # Errors
    /// As [`Config::read`].
    pub fn architecture(&self) -> hf::Result<Architecture> {
        Ok(match self {
            Self::Gpt(gpt) => Architecture::Gpt(gpt.clone()),
            Self::Llama(llama) => Architecture::Llama(llama.clone()),
            Self::Moe(moe) => Architecture::Moe(moe.clone()),
            Self::Folder(path) => Config::read(path)?.architecture().clone(),
        })
    }

    /// The same with the folder, where there is one, whose weights are then there.
    pub(in crate::run) fn open(&self) -> hf::Result<(Architecture, Option<Folder>)> {
        let Self::Folder(path) = self else { return Ok((self.architecture()?, None)) };
        let folder = Folder::open(path)?;
        Ok((folder.config().architecture().clone(), Some(folder)))
    }
}

/// `[loss]`: what it counts beside the likelihood of the next token, in training; docs/optimizers.md has the formula.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct LossConfig {
    /// The part of a target's probability that is spread over the whole vocabulary.
    pub label_smoothing: f64,
    /// What the square of the log-sum-exp is multiplied by; 1e-4 is usual.
    pub z_loss: f64,
}

/// `[evaluation]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct EvaluationConfig {
    /// Steps from one to the next; 0 for the end alone.
    pub every: u64,
    /// Windows of `step.sequence` tokens that it is measured on, at most, spread evenly over the validation part; 0 for all.
    pub windows: usize,
    /// The run ends when so many in a row have not lowered the validation loss; 0 for never.
    pub patience: u64,
}

/// `[checkpoints]`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct CheckpointConfig {
    /// Steps from one to the next; 0 for the end alone.
    pub every: u64,
    /// Minutes from one to the next, whatever the steps; without, time does not count.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub minutes: Option<f64>,
    /// How many of the newest are kept.
    pub keep_last: usize,
    /// How many of those with the lowest validation loss are kept, of those that are saved right behind an evaluation.
    pub keep_best: usize,
}

/// `[sample]`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct SampleConfig {
    /// How it begins; nothing is sampled without.
    pub prompt: String,
    /// Tokens to add.
    pub tokens: usize,
    /// Divides the logits; 0 takes the likeliest token.
    pub temperature: f32,
    /// Only the so many likeliest tokens; 0 for all.
    pub top_k: usize,
    /// Only the likeliest tokens that have this much probability together; 1 for all.
    pub top_p: f32,
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

fn default_steps() -> u64 {
    300
}

impl Default for EvaluationConfig {
    fn default() -> Self {
        Self { every: 100, windows: 32, patience: 0 }
    }
}

impl Default for CheckpointConfig {
    fn default() -> Self {
        Self { every: 100, minutes: None, keep_last: 2, keep_best: 0 }
    }
}

impl Default for SampleConfig {
    fn default() -> Self {
        let Sampling { temperature, top_k, top_p, .. } = Sampling::default();
        Self { prompt: String::new(), tokens: 120, temperature, top_k, top_p }
    }
}

impl SampleConfig {
    /// How tokens are drawn, of seed 0.
    pub fn sampling(&self) -> Sampling {
        let &Self { temperature, top_k, top_p, .. } = self;
        Sampling { temperature, top_k, top_p, ..Sampling::default() }
    }
}

impl RunConfig {
    /// As TOML, with all defaults, and with what the data say of the model and of the end of their documents.
    pub fn resolved(&self, vocabulary: &Vocabulary) -> String {
        let mut resolved = Self { model: self.model(vocabulary.size()), ..self.clone() };
        let is_given = self.data.tokenizer.is_some() || matches!(self.model, ModelConfig::Folder(_));
        resolved.data.end_of_text = vocabulary.text_options().filter(|_| is_given).and_then(|options| options.end);
        toml::to_string(&resolved).expect("tables of numbers and texts are TOML")
    }

    /// Whether a text is this configuration as [`Self::resolved`] writes it.
    pub(in crate::run) fn is_written_as(&self, text: &str) -> bool {
        toml::to_string(self).is_ok_and(|written| written == text)
    }

    /// The model for data of a vocabulary.
    pub fn model(&self, vocabulary: usize) -> ModelConfig {
        let llama = |llama: &LlamaConfig| LlamaConfig { vocabulary, ..llama.clone() };
        match &self.model {
            ModelConfig::Gpt(gpt) => {
                ModelConfig::Gpt(GptConfig { vocabulary, sequence: self.step.sequence, ..gpt.clone() })
            }
            ModelConfig::Llama(config) => ModelConfig::Llama(llama(config)),
            ModelConfig::Moe(moe) => ModelConfig::Moe(MoeConfig { llama: llama(&moe.llama), ..moe.clone() }),
            ModelConfig::Folder(path) => ModelConfig::Folder(path.clone()),
        }
    }

    /// What a [`Trainer`](crate::Trainer) is made with.
    ///
    /// # Errors
    /// Texts that mean nothing, where the configuration was not read from a file.
    pub fn options(&self) -> Result<TrainOptions, ConfigError> {
        let wrong = |key: &str, why: String| ConfigError::value(key, why, "correct it");
        let memory = &self.memory;
        let offload = (!memory.offload.is_empty())
            .then(|| Offload { ops: memory.offload.clone(), folder: memory.offload_to.clone() });
        let recompute = match memory.budget {
            Some(bytes) => Recompute::budget(bytes),
            None => memory.recompute.parse().map_err(|e| wrong("memory.recompute", format!("{e}")))?,
        };
        Ok(TrainOptions {
            batch: self.step.batch,
            micro_batches: self.step.micro_batches,
            sequence: self.step.sequence,
            documents: self.data.has_documents(),
            device: self.step.device.parse().map_err(|why| wrong("step.device", why))?,
            dtype: self.step.dtype.into(),
            loss: LossTerms { label_smoothing: self.loss.label_smoothing, z_loss: self.loss.z_loss },
            optimizer: self.optimizer.optimizer(AdamW::default().masters),
            update: self.optimizer.update(AdamW::default().masters, self.guard.is_on()),
            learning_rate: self.learning_rate(),
            seed: self.seed,
            threads: self.step.threads,
            mesh: self.step.mesh(),
            pipeline: pipeline("step.schedule", &self.step.schedule, self.step.chunks)?,
            recompute,
            compress: memory.compress.clone(),
            offload,
            trainable: self.trainable.clone(),
            generation: (!self.sample.prompt.is_empty()).then(Generation::default),
            ..TrainOptions::default()
        })
    }
}

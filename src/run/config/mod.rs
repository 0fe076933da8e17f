//! The description of a run: a TOML file is read into a [`RunConfig`], from which a [`Trainer`](crate::Trainer) and a
//! [`Dataset`](crate::Dataset) are created.
//!
//! Settings are checked in two stages. Reading returns an error for unknown keys and for values of the wrong type; the
//! error has the line. [`RunConfig::check`] returns an error for invalid values and combinations; the error names the
//! keys.

mod check;
mod data;
mod estimate;
mod expert_load;
mod learning_rate;
mod model;
mod names;
mod optimizer;
mod presets;
mod read;

use std::path::PathBuf;

use gapless_engine::compile::step::text;
use gapless_engine::data::Vocabulary;
use gapless_engine::nn::{Preference, Trainable};
use gapless_engine::{
    DeviceChoice, Generation, LossTerms, MemoryOptions, Pipeline, Sampling, StepOptions, TrainOptions,
};
use gapless_models::{GptConfig, LlamaConfig, MoeConfig, hf};
use gapless_parallel::Mesh;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;

#[cfg(feature = "sweep")]
pub(crate) use check::refused;
pub use data::{DataConfig, SourceConfig};
pub use estimate::{EstimateConfig, Fsdp2Config, Lowering, MegatronConfig};
pub use expert_load::{ExpertLoad, RecordedLoad};
pub use learning_rate::{RateConfig, RateShape};
pub use model::ModelConfig;
pub use names::NAMES;
#[cfg(feature = "sweep")]
pub(crate) use names::{flatten, key_of, move_former_names, set, value_at};
pub use optimizer::{GroupConfig, OptimizerConfig, Rule};
pub use presets::PRESETS;
pub use read::ConfigError;
pub(crate) use read::text_of;
#[cfg(feature = "sweep")]
pub(crate) use read::{assign, line_of, with_nearest};

use super::GuardConfig;

/// The contents of a run file. All keys have defaults except `model` and, for training, `data.path`.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RunConfig {
    /// The number of training steps.
    #[serde(default = "default_steps")]
    pub steps: u64,
    /// The number of passes over the training data, in place of `steps`. A run of 1.5 epochs has as many steps as its
    /// batches need to read one and a half times the windows of an epoch, rounded up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epochs: Option<f64>,
    /// The run saves a checkpoint and ends after this many minutes of training; `--resume` continues it. Without this
    /// key there is no time limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_minutes: Option<f64>,
    /// The seed of the initial parameters, of dropout and of the order of the data.
    #[serde(default)]
    pub seed: u64,
    /// The device that runs the steps. `auto` takes the first NVIDIA GPU if it supports the run, and the CPU otherwise.
    /// `cpu`, `cuda` and `cuda:1` name one.
    #[serde(default, with = "text")]
    #[schemars(with = "String")]
    pub device: DeviceChoice,
    /// The number of worker threads of each rank; 0 uses all cores.
    #[serde(default)]
    pub threads: usize,
    /// Whether a GPU rounds the operands of f32 matrix products to TF32 (10 bits of mantissa instead of 23) and multiplies
    /// them on tensor cores, which is faster and less exact. A CPU is not affected.
    #[serde(default, skip_serializing_if = "is_default")]
    pub tf32: bool,
    /// The model to train. Give a table, or a string: the name of a preset (`"gpt2"`), a family with sizes
    /// (`"llama:layers=4,width=256"`) or the path of a Hugging Face folder.
    #[serde(deserialize_with = "model::deserialize")]
    pub model: ModelConfig,
    /// The parameters that are trained: `"all"`; low-rank adapters (`[trainable.lora]`); or `trainable.only`, a list of
    /// name patterns.
    #[serde(default)]
    pub trainable: Trainable,
    /// The training data.
    #[serde(default)]
    pub data: DataConfig,
    /// The sizes of a training step and its precision.
    #[serde(default)]
    pub step: StepOptions,
    /// The number of ranks along each axis of parallelism. The product is the number of ranks of the run.
    #[serde(default)]
    pub mesh: Mesh,
    /// The pipeline schedule.
    #[serde(default)]
    pub pipeline: Pipeline,
    /// Terms of the training loss in addition to the likelihood of the next token. docs/optimizers.md has the formula.
    #[serde(default, skip_serializing_if = "is_default")]
    pub loss: LossTerms,
    /// The loss of pairs of answers, for `data.format = "preference"`, or of answers with labels, for `"unpaired"`. docs/fine_tuning.md has an example.
    #[serde(default, skip_serializing_if = "is_default")]
    pub preference: Preference,
    /// The update rule.
    #[serde(default)]
    pub optimizer: OptimizerConfig,
    /// The learning rate of each step.
    #[serde(default)]
    pub learning_rate: RateConfig,
    /// The conditions under which a step is skipped because its loss or gradient norm is unusually high.
    #[serde(default, skip_serializing_if = "is_default")]
    pub guard: GuardConfig,
    /// Settings that trade memory for time, and the limits of the arena.
    #[serde(default)]
    pub memory: MemoryOptions,
    /// The interval of evaluations, and the amount of validation data that they use.
    #[serde(default)]
    pub evaluation: EvaluationConfig,
    /// When checkpoints are saved, and how many are kept.
    #[serde(default)]
    pub checkpoints: CheckpointConfig,
    /// The text that is generated at each evaluation.
    #[serde(default)]
    pub sample: SampleConfig,
    /// Settings of `plan`, `compare`, `schedule` and `sweep`. They do not change the run.
    #[serde(default, skip_serializing_if = "is_default")]
    pub estimate: EstimateConfig,
    /// Messages for the author of the file about keys that have moved to another place.
    #[serde(skip)]
    pub notices: Vec<String>,
}

/// Two configurations are equal if they serialize to the same keys and values.
impl PartialEq for RunConfig {
    fn eq(&self, other: &Self) -> bool {
        json!(self) == json!(other)
    }
}

/// `[evaluation]`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct EvaluationConfig {
    /// The data to evaluate on: a file or folder of the same kind and format as `data.path`. It is held in memory. With
    /// this key, no part of the training data is used for validation (`data.validation_every`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<PathBuf>,
    /// The number of steps between evaluations; 0 evaluates only at the end.
    pub every: u64,
    /// The maximum number of windows of `step.sequence` tokens per evaluation, spread evenly over the validation data;
    /// 0 uses all.
    pub windows: usize,
    /// The run ends when this many evaluations in a row have not lowered the validation loss; 0 turns early stopping
    /// off.
    pub patience: u64,
}

/// `[checkpoints]`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct CheckpointConfig {
    /// The number of steps between checkpoints; 0 saves only at the end.
    pub every: u64,
    /// The number of minutes between checkpoints, in addition to `every`. Without this key only steps count.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub minutes: Option<f64>,
    /// The number of newest checkpoints that are kept.
    pub keep_last: usize,
    /// The number of checkpoints with the lowest validation loss that are kept in addition. Only checkpoints that
    /// follow an evaluation compete.
    pub keep_best: usize,
}

/// `[sample]`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct SampleConfig {
    /// The text to continue. Nothing is generated if it is empty.
    pub prompt: String,
    /// The number of tokens to generate.
    pub tokens: usize,
    /// The logits are divided by the temperature; 0 always takes the likeliest token.
    pub temperature: f32,
    /// Sampling considers only this many of the likeliest tokens; 0 considers all.
    pub top_k: usize,
    /// Sampling considers only the likeliest tokens whose probabilities sum to this value; 1 considers all.
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
        Self { path: None, every: 100, windows: 32, patience: 0 }
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
    /// Sampling settings, with seed 0.
    pub fn sampling(&self) -> Sampling {
        let &Self { temperature, top_k, top_p, .. } = self;
        Sampling { temperature, top_k, top_p, ..Sampling::default() }
    }
}

impl RunConfig {
    /// Returns the configuration with absolute paths. Relative paths are relative to the working directory. So a run that
    /// stores this configuration can be used from any directory.
    #[must_use]
    pub fn with_absolute_paths(mut self) -> Self {
        let data = &mut self.data;
        let sources = data.mix.iter_mut().map(|source| &mut source.path);
        let mut paths: Vec<&mut PathBuf> = sources.chain(&mut data.tokenizer).collect();
        paths.extend([&mut data.path, &mut data.cache]);
        paths.extend(&mut self.evaluation.path);
        if let ModelConfig::Folder(path) = &mut self.model {
            paths.push(path);
        }
        for path in paths {
            // A path that is empty, as `data.path` of a plan, stays empty.
            if let Ok(absolute) = std::path::absolute(&*path) {
                *path = absolute;
            }
        }
        self
    }

    /// Returns the settings that are compared when a run is resumed. Sizes that the data or other keys determine are left
    /// out, so that the run.toml of a run's folder, which has them, is the same as the file from which the run started.
    /// The hash of the data stands for the end-of-text token and for the paths of mixed sources.
    pub(in crate::run) fn compared(&self) -> serde_json::Value {
        let mut compared = Self { model: self.model(0), ..self.clone() };
        if let ModelConfig::Gpt(gpt) = &mut compared.model {
            gpt.sequence = 0;
        }
        compared.data.end_of_text = None;
        compared.data.validation_every = self.validation_every();
        compared.data.mix.iter_mut().for_each(|source| source.path = PathBuf::new());
        json!(compared)
    }

    /// Returns the configuration as TOML. All defaults are written out, and also the vocabulary size and the
    /// end-of-text token of the data.
    pub fn resolved(&self, vocabulary: &Vocabulary) -> String {
        let mut resolved = Self { model: self.model(vocabulary.size()), ..self.clone() };
        let is_given = self.data.tokenizer.is_some() || matches!(self.model, ModelConfig::Folder(_));
        resolved.data.end_of_text = vocabulary.text_options().filter(|_| is_given).and_then(|options| options.end);
        toml::to_string(&resolved).expect("tables of numbers and texts are TOML")
    }

    /// True if `text` is exactly what [`Self::resolved`] writes for this configuration.
    pub(in crate::run) fn is_written_as(&self, text: &str) -> bool {
        toml::to_string(self).is_ok_and(|written| written == text)
    }

    /// Returns the model with the given vocabulary size. A model folder keeps its own vocabulary size.
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

    /// Fills in the settings of adapters that follow from the model.
    fn with_targets(mut self) -> Self {
        if let Trainable::Lora(lora) = &mut self.trainable {
            if let ModelConfig::Folder(folder) = &self.model {
                if let Ok(config) = hf::Config::read(folder) {
                    *lora = config.complete(std::mem::take(lora));
                }
            } else if lora.targets.is_empty()
                && let Ok(architecture) = self.model.architecture()
            {
                lora.targets = architecture.lora_targets();
            }
        }
        self
    }

    /// Returns the options of a [`Trainer`](crate::Trainer) for this run.
    pub fn options(&self) -> TrainOptions {
        TrainOptions {
            step: self.step_options(),
            learning_rate: self.learning_rate(),
            seed: self.seed,
            device: self.device,
            threads: self.threads,
            tf32: self.tf32,
            poison: false,
        }
    }

    /// Returns the options of this run's training step.
    pub fn step_options(&self) -> StepOptions {
        StepOptions {
            mesh: self.mesh,
            pipeline: self.pipeline.clone(),
            memory: self.memory.clone(),
            trainable: self.trainable.clone(),
            loss: self.loss,
            preference: self.data.format.has_preferences().then_some(self.preference),
            optimizer: self.optimizer.optimizer(),
            update: self.optimizer.update(self.guard.is_on()),
            documents: self.data.has_documents(),
            generation: (!self.sample.prompt.is_empty()).then(Generation::default),
            ..self.step.clone()
        }
    }

    /// Returns a [JSON schema](https://json-schema.org/draft/2020-12) of run files: keys, types, defaults and
    /// descriptions. Editors with TOML support use such a schema to complete and check keys. The schema does not
    /// describe which values can be combined, so it may accept a file that [`RunConfig::check`] does not.
    pub fn schema() -> serde_json::Value {
        schemars::schema_for!(Self).into()
    }
}

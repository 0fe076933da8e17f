//! A run as a file says it: TOML → [`RunConfig`] → what a [`Trainer`](crate::Trainer) and a [`Dataset`] are made of.
//!
//! Two stages. Reading refuses keys that do not exist and values of the wrong type, with their line. [`RunConfig::options`] and
//! [`RunConfig::check`] refuse what cannot be together, with the keys' names.

mod check;
mod read;
mod schema;

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;

use gapless_alloc::draw::Bytes;
use gapless_engine::data::{DataOptions, Dataset, Format, Source, VocabularyChoice};
use gapless_engine::learning_rate::{LearningRate, Shape};
use gapless_engine::nn::Trainable;
use gapless_engine::optim::{Adafactor, AdamW, AdamW8bit, GaLore, Lion, Muon, Optimizer};
use gapless_engine::{
    DType, DeviceChoice, Generation, LossTerms, ParameterGroup, Sampling, TrainOptions, UpdateOptions,
};
use gapless_models::{GptConfig, LlamaConfig, MoeConfig};
use gapless_parallel::{Mesh, Placement, by_name};
use schemars::JsonSchema;
use serde::de::Visitor;
use serde::{Deserialize, Deserializer, Serialize};

pub use read::ConfigError;
pub(crate) use read::{line_of, text_of, with_nearest};

use super::GuardConfig;
use crate::{Offload, Pipeline, Recompute};

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

/// `[data]`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DataConfig {
    /// A file or folder of .txt, .rs, .md or .jsonl, also as .gz or .zst, or of .parquet, a .bin of token ids or a folder of them, or a `Cargo.lock` for the Rust
    /// sources that it names.
    pub path: PathBuf,
    /// Further sources, each with its part of the windows; `path` has the rest.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mix: Vec<SourceConfig>,
    /// Tokens of the byte-pair encoding that is trained on it, 4096 where neither this nor `tokenizer` is there; 256 for plain bytes.
    /// Not beside `tokenizer`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vocabulary: Option<usize>,
    /// A tokenizer.json that is there already; of `model.folder` its own where this is absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokenizer: Option<PathBuf>,
    /// What a line of a .jsonl file, or a row of a .parquet file, holds: `text`; `prompt` and `completion`; or `chat`, a conversation. Of the latter two only
    /// completions, or what the assistant says, count in the loss, and examples are packed into sequences without seeing each other.
    #[serde(default)]
    pub format: Format,
    /// Whether documents that share a sequence of the format `text` neither see each other nor share their places.
    #[serde(default)]
    pub isolate_documents: bool,
    /// Every n-th document is for validation; 0 for none.
    #[serde(default = "default_validation")]
    pub validation_every: usize,
    /// Where tokens are kept.
    #[serde(default = "default_cache")]
    pub cache: PathBuf,
}

/// `[[data.mix]]`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SourceConfig {
    /// As `data.path`.
    pub path: PathBuf,
    /// Its part of the windows, of 1.
    pub weight: f64,
}

/// `[step]`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct StepConfig {
    /// Sequences.
    pub batch: usize,
    /// Parts into which the batch is cut: more of them need less memory.
    pub micro_batches: usize,
    /// Tokens per sequence.
    pub sequence: usize,
    /// What it computes in; not f16, whose range gradients leave.
    pub dtype: Float,
    /// `auto`, `cpu`, `cuda` or `cuda:1`.
    #[serde(deserialize_with = "parses_as::<DeviceChoice, _>")]
    pub device: String,
    /// Worker threads of each rank; 0 for all cores.
    pub threads: usize,
    /// Ranks that share the batch.
    pub data_ranks: usize,
    /// Ranks of a pipeline, each with a part of the layers.
    pub pipeline_ranks: usize,
    /// Ranks that share the experts.
    pub expert_ranks: usize,
    /// The order of work in the pipeline, by the name that `gapless schedule` lists.
    pub schedule: String,
    /// Stages per rank of the pipeline; one where it is absent, two for schedules in the shape of a V.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chunks: Option<usize>,
}

/// Types that a model can be trained in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Float {
    /// 32 bits.
    F32,
    /// 16 bits, with 32-bit masters.
    Bf16,
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

/// `[optimizer]`: `name`, and the keys of that rule.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct OptimizerConfig {
    /// The rule.
    pub name: Rule,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Decoupled weight decay of matrices.
    pub weight_decay: f64,
    /// The global norm to which larger gradients are scaled.
    pub max_norm: f64,
    /// Directions that GaLore keeps of each weight.
    pub rank: usize,
    /// What GaLore scales its steps by.
    pub alpha: f64,
    /// Decay of Muon's moment.
    pub momentum: f64,
    /// How far an element of a gradient may be from 0: what is farther is cut off, before the norm is taken.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_value: Option<f64>,
    /// Keeps an exponential moving average of every trained parameter in f32: what stays of it in a step, 0.999 or more.
    /// `gapless sample --average` uses it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub average: Option<f64>,
    /// Parameters that are updated otherwise; of several that name one, the first counts.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<GroupConfig>,
}

/// `[[optimizer.groups]]`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct GroupConfig {
    /// Names of parameters, or of modules that they are in; `*` stands for any text: `"*.bias"`, `"h.0"`.
    pub names: Vec<String>,
    /// What their learning rate is multiplied by.
    #[serde(default = "one")]
    pub learning_rate: f64,
    /// Their weight decay; without, that of all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight_decay: Option<f64>,
    /// Their rule; without, that of all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<Rule>,
}

/// Update rules; docs/optimizers.md compares them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Rule {
    /// AdamW.
    AdamW,
    /// AdamW with moments in eight bits.
    AdamW8bit,
    /// AdamW in a subspace.
    GaLore,
    /// The sign of a moment.
    Lion,
    /// Orthogonal steps of matrices.
    Muon,
    /// Means of rows and columns in place of second moments.
    Adafactor,
}

/// `[learning_rate]`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct RateConfig {
    /// The highest.
    pub peak: f64,
    /// The last; a tenth of the highest where it is absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub floor: Option<f64>,
    /// Steps on which it rises; a quarter of all, at most.
    pub warmup_steps: u64,
    /// What comes then.
    pub shape: RateShape,
    /// Steps of the decay of `wsd`; a fifth of all where it is absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decay_steps: Option<u64>,
}

/// What a learning rate does after the warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum RateShape {
    /// It stays.
    Constant,
    /// A line.
    Linear,
    /// Half a cosine.
    Cosine,
    /// One over the root of the step.
    InverseSqrt,
    /// Warm-up, stable, decay.
    Wsd,
}

/// `[memory]`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct MemoryConfig {
    /// What is computed again in the backward: `none`, `layers`, `first:3`, `layers:h.0,h.2` or `ops:layer_norm,gelu`.
    #[serde(deserialize_with = "parses_as::<Recompute, _>")]
    pub recompute: String,
    /// Bytes of the arena, at most, as a number or a text (`"600MiB"`): what is computed again is then chosen so that it costs least time.
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "size")]
    #[schemars(schema_with = "schema::size")]
    pub budget: Option<u64>,
    /// Operations whose results wait for the backward in eight bits.
    pub compress: Vec<String>,
    /// Operations whose results wait for the backward in a file.
    pub offload: Vec<String>,
    /// Where that file is.
    pub offload_to: PathBuf,
}

/// `[evaluation]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct EvaluationConfig {
    /// Steps from one to the next; 0 for the end alone.
    pub every: u64,
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

fn one() -> f64 {
    1.0
}

fn default_steps() -> u64 {
    300
}

fn default_validation() -> usize {
    DataOptions::default().validation_every
}

fn default_cache() -> PathBuf {
    DataOptions::default().cache
}

impl Default for StepConfig {
    fn default() -> Self {
        let (dtype, device) = (Float::F32, "auto".to_owned());
        let (data_ranks, pipeline_ranks, expert_ranks, schedule, chunks) = (1, 1, 1, "1f1b".to_owned(), None);
        let (batch, micro_batches, sequence, threads) = (8, 1, 256, 0);
        Self {
            batch,
            micro_batches,
            sequence,
            dtype,
            device,
            threads,
            data_ranks,
            pipeline_ranks,
            expert_ranks,
            schedule,
            chunks,
        }
    }
}

impl Default for OptimizerConfig {
    fn default() -> Self {
        let (AdamW { beta1, beta2, weight_decay, max_norm, .. }, galore) = (AdamW::default(), GaLore::default());
        let (name, rank, alpha, momentum) = (Rule::AdamW, galore.rank, galore.alpha, Muon::default().momentum);
        let (max_value, average, groups) = (None, None, Vec::new());
        Self { name, beta1, beta2, weight_decay, max_norm, rank, alpha, momentum, max_value, average, groups }
    }
}

impl Default for RateConfig {
    fn default() -> Self {
        Self { peak: 1e-3, floor: None, warmup_steps: 20, shape: RateShape::Cosine, decay_steps: None }
    }
}

impl Default for MemoryConfig {
    fn default() -> Self {
        let (compress, offload) = (Vec::new(), Vec::new());
        Self { recompute: "none".into(), budget: None, compress, offload, offload_to: ".".into() }
    }
}

impl Default for EvaluationConfig {
    fn default() -> Self {
        Self { every: 100, patience: 0 }
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

/// A text that means a `T`, kept as it is written.
fn parses_as<'de, T: FromStr<Err: fmt::Display>, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    let text = String::deserialize(from)?;
    T::from_str(&text).map(|_| text).map_err(serde::de::Error::custom)
}

/// A number of bytes, or a text that means one.
pub(crate) fn size<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u64>, D::Error> {
    struct Size;
    impl Visitor<'_> for Size {
        type Value = Option<u64>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a number of bytes, like 4096 or \"600MiB\"")
        }

        fn visit_i64<E: serde::de::Error>(self, bytes: i64) -> Result<Self::Value, E> {
            u64::try_from(bytes).map(Some).map_err(|_| E::invalid_value(serde::de::Unexpected::Signed(bytes), &self))
        }

        fn visit_u64<E: serde::de::Error>(self, bytes: u64) -> Result<Self::Value, E> {
            Ok(Some(bytes))
        }

        fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Self::Value, E> {
            Bytes::read(text).map(Some).map_err(E::custom)
        }
    }
    from.deserialize_any(Size)
}

impl OptimizerConfig {
    /// The rule, with or without masters of parameters that are stored in less than f32.
    pub fn optimizer(&self, masters: bool) -> Arc<dyn Optimizer> {
        let &Self { name, beta1, beta2, weight_decay, max_norm, rank, alpha, momentum, .. } = self;
        let adamw = AdamW { beta1, beta2, weight_decay, max_norm, masters, ..AdamW::default() };
        match name {
            Rule::AdamW => adamw.into(),
            Rule::AdamW8bit => AdamW8bit { rule: adamw, ..AdamW8bit::default() }.into(),
            Rule::GaLore => GaLore { rule: adamw, rank, alpha, ..GaLore::default() }.into(),
            Rule::Lion => Lion { beta1, beta2, weight_decay, max_norm, masters }.into(),
            Rule::Muon => Muon { rule: adamw, momentum, ..Muon::default() }.into(),
            Rule::Adafactor => Adafactor { weight_decay, max_norm, masters, ..Adafactor::default() }.into(),
        }
    }

    /// What the update does beside that; `guarded` says whether steps may be left out.
    pub fn update(&self, masters: bool, guarded: bool) -> UpdateOptions {
        let group = |group: &GroupConfig| {
            let name = group.name.unwrap_or(self.name);
            let rule = Self {
                name,
                weight_decay: group.weight_decay.unwrap_or(self.weight_decay),
                groups: Vec::new(),
                ..self.clone()
            };
            ParameterGroup {
                names: group.names.clone(),
                optimizer: rule.optimizer(masters),
                learning_rate: group.learning_rate,
            }
        };
        let (max_value, average) = (self.max_value, self.average);
        UpdateOptions { groups: self.groups.iter().map(group).collect(), max_value, guarded, average }
    }
}

impl StepConfig {
    /// The ranks that do it together.
    pub fn mesh(&self) -> Mesh {
        Mesh { data: self.data_ranks, pipeline: self.pipeline_ranks, expert: self.expert_ranks }
    }
}

/// The pipeline of a schedule's name; `key` is what an unknown name is the value of.
pub(crate) fn pipeline(key: &str, name: &str, chunks: Option<usize>) -> Result<Pipeline, ConfigError> {
    let schedule = by_name(name)
        .map_err(|why| ConfigError::value(key, why.to_string(), "`gapless schedule --help` says what each is"))?;
    let chunks = chunks.unwrap_or(match schedule.placement() {
        Placement::Loop => 1,
        Placement::V => 2,
    });
    Ok(Pipeline { schedule: schedule.into(), chunks, ..Pipeline::default() })
}

impl SampleConfig {
    /// How tokens are drawn, of seed 0.
    pub fn sampling(&self) -> Sampling {
        let &Self { temperature, top_k, top_p, .. } = self;
        Sampling { temperature, top_k, top_p, ..Sampling::default() }
    }
}

impl DataConfig {
    /// Whether several documents, or examples, share a sequence without seeing each other.
    pub fn has_documents(&self) -> bool {
        self.isolate_documents || self.format.has_answers()
    }
}

impl RunConfig {
    /// As TOML, with all defaults, and with what the data say of the model.
    pub fn resolved(&self, vocabulary: usize) -> String {
        let resolved = Self { model: self.model(vocabulary), ..self.clone() };
        toml::to_string(&resolved).expect("tables of numbers and texts are TOML")
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
            dtype: match self.step.dtype {
                Float::F32 => DType::F32,
                Float::Bf16 => DType::BF16,
            },
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

    fn learning_rate(&self) -> LearningRate {
        let RateConfig { peak, floor, warmup_steps, shape, decay_steps } = self.learning_rate;
        let shape = match shape {
            RateShape::Constant => Shape::Constant,
            RateShape::Linear => Shape::Linear,
            RateShape::Cosine => Shape::Cosine,
            RateShape::InverseSqrt => Shape::InverseSqrt,
            RateShape::Wsd => Shape::Wsd { decay_steps: decay_steps.unwrap_or(self.steps / 5) },
        };
        // A short run is no reason to shorten the warm-up by hand.
        let warmup_steps = warmup_steps.min(self.steps / 4);
        LearningRate { peak, floor: floor.unwrap_or(peak / 10.0), warmup_steps, steps: self.steps, shape }
    }

    /// The data, tokenized: read anew, or as an earlier run left them.
    ///
    /// # Errors
    /// As [`Dataset::prepare`].
    pub fn dataset(&self) -> Result<Dataset, gapless_engine::data::DataError> {
        let DataConfig { path, mix, vocabulary, tokenizer, format, isolate_documents: _, validation_every, cache } =
            self.data.clone();
        let tokenizer = tokenizer.or_else(|| match &self.model {
            ModelConfig::Folder(folder) => Some(folder.join("tokenizer.json")),
            _ => None,
        });
        let vocabulary = match (tokenizer, vocabulary) {
            (Some(file), _) => VocabularyChoice::File(file),
            (None, size) => VocabularyChoice::of_size(size.unwrap_or(4096)),
        };
        let options = DataOptions { vocabulary, validation_every, cache };
        if mix.is_empty() {
            return match format.has_answers() {
                true => Dataset::examples(&path, format, &options),
                false => Dataset::prepare(&Source::from(path), &options),
            };
        }
        let rest = 1.0 - mix.iter().map(|source| source.weight).sum::<f64>();
        let sources = std::iter::once((path, rest)).chain(mix.into_iter().map(|source| (source.path, source.weight)));
        if format.has_answers() {
            let parts = sources.map(|(path, weight)| Ok((Dataset::examples(&path, format, &options)?, weight)));
            return Dataset::mixture(parts.collect::<Result<_, _>>()?);
        }
        let sources: Vec<(Source, f64)> = sources.map(|(path, weight)| (Source::from(path), weight)).collect();
        Dataset::prepare_mixture(&sources, &options)
    }
}

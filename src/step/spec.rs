//! The keys of a step, and the step that they mean.

use gapless_alloc::arena::Reserve;
use gapless_engine::compile::step::{Build, StepGraph};
use gapless_engine::compile::{CompileOptions, Error as CompileError, Executable, Program, compile};
use gapless_engine::nn::{Lora, Trainable, VarBuilder};
use gapless_engine::recompute::{Offload, Recompute};
use gapless_engine::{DType, DeviceChoice, TrainError, TrainOptions, Trainer};
use gapless_models::hf::{Architecture, Config, Pretrained};
use gapless_parallel::Mesh;
use serde::{Deserialize, Serialize};

use super::device::DeviceProfile;
use super::eager::Lowering;
use super::machine;
use super::model::{ModelSpec, Resolved};
use crate::run::{ConfigError, OptimizerConfig, Rule, pipeline, size};

/// A training step as flags and files say it: `pipeline_ranks = 4` in a file is `--pipeline-ranks 4`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct StepSpec {
    /// What is trained: [`ModelSpec`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<ModelSpec>,
    /// Sequences per step, of all ranks together.
    pub batch: usize,
    /// Parts into which a data rank's share of the batch is cut.
    pub micro_batches: usize,
    /// Tokens per sequence.
    pub sequence: usize,
    /// Element type.
    pub dtype: Precision,
    /// The update rule.
    pub optimizer: Rule,
    /// Ranks that share the batch, and the optimizer's states (ZeRO stage 1).
    pub data_ranks: usize,
    /// Ranks of a pipeline.
    pub pipeline_ranks: usize,
    /// Ranks that share the experts.
    pub expert_ranks: usize,
    /// The order of work in the pipeline, by the name that `gapless schedule` lists.
    pub schedule: String,
    /// Stages per rank; one where it is absent, two for schedules in the shape of a V.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chunks: Option<usize>,
    /// What is computed again: `none`, `layers`, `first:8`, `layers:h.3,h.7` or `ops:layer_norm,gelu`.
    pub recompute: String,
    /// Bytes that a rank's step must fit into: the cheapest recomputation that does is sought.
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "size")]
    pub budget: Option<u64>,
    /// Operations whose results wait for the backward in 8 bits.
    pub compress: Vec<String>,
    /// Operations whose results wait for the backward in a file.
    pub offload: Vec<String>,
    /// Adapters of this rank are trained, and nothing else; with alpha behind it, `16:32`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lora: Option<String>,
    /// The layers that have adapters.
    pub lora_targets: Vec<String>,
    /// Parameters or modules that alone are trained.
    pub train: Vec<String>,
    /// Whose kernels it is planned for, `cpu` or `cuda`.
    pub kernels: String,
    /// Who turns it into lifetimes.
    pub lowering: Lowering,
    /// Room for the rows that an expert rank receives, as a multiple of what even routing needs; the worst case where it is absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub routing: Option<f64>,
    /// The device that time is estimated for: a name of [`DeviceProfile::known`], or a file of one.
    pub profile: String,
    /// TFLOP/s of matrix products, where they are not the profile's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tflops: Option<f64>,
    /// TB/s of memory, where they are not the profile's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub terabytes: Option<f64>,
    /// The most work of the planner; its default where it is absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub planning: Option<u64>,
    /// The ranks of the pipeline that are asked about: numbers with commas between them, or `all`. Ranks that share the batch or the
    /// experts with them have the same plans.
    pub rank: String,
}

impl Default for StepSpec {
    fn default() -> Self {
        Self {
            model: None,
            batch: 8,
            micro_batches: 1,
            sequence: 1024,
            dtype: Precision::F32,
            optimizer: Rule::AdamW,
            data_ranks: 1,
            pipeline_ranks: 1,
            expert_ranks: 1,
            schedule: "1f1b".into(),
            chunks: None,
            recompute: "none".into(),
            budget: None,
            compress: Vec::new(),
            offload: Vec::new(),
            lora: None,
            lora_targets: Vec::new(),
            train: Vec::new(),
            kernels: "cpu".into(),
            lowering: Lowering::Gapless,
            routing: None,
            profile: "h100".into(),
            tflops: None,
            terabytes: None,
            planning: None,
            rank: "0".into(),
        }
    }
}

/// Types of floating-point numbers that a step can be planned in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// 32 bits.
    F32,
    /// 16 bits, the optimizer's states too.
    Bf16,
    /// 16 bits, but for the optimizer's masters and moments and gradients of several micro-batches.
    Mixed,
}

/// A step that can be compiled, if its extents fit together, which recording it tells.
#[derive(Debug, Clone)]
pub struct Step {
    /// What a trainer of it would be made with.
    pub options: TrainOptions,
    /// The device that time is estimated for.
    pub device: DeviceProfile,
    /// The type of its numbers.
    pub precision: Precision,
    /// Who turns it into lifetimes.
    pub lowering: Lowering,
    /// Ranks of the pipeline that are asked about.
    pub ranks: Vec<usize>,
    model: Resolved,
}

impl StepSpec {
    /// The step that the keys mean.
    ///
    /// # Errors
    /// [`ConfigError::Value`] with the key of a value that means nothing.
    pub fn check(&self) -> Result<Step, ConfigError> {
        let model =
            self.model.as_ref().ok_or_else(|| ConfigError::value("model", "is missing", "name one, e.g. gpt2"))?;
        let model = Resolved::new(model, self.sequence)
            .map_err(|why| ConfigError::value("model", why, "name a model, its extents, or its config.json"))?;
        self.check_extents()?;
        self.check_lowering()?;
        let device = self.profile()?;
        Ok(Step {
            options: TrainOptions {
                batch: self.batch,
                micro_batches: self.micro_batches,
                sequence: self.sequence,
                device: self
                    .kernels
                    .parse::<DeviceChoice>()
                    .map_err(|why| ConfigError::value("kernels", why, "use cpu or cuda"))?,
                dtype: if self.dtype == Precision::F32 { DType::F32 } else { DType::BF16 },
                trainable: self.trainable(&model.architecture)?,
                optimizer: OptimizerConfig { name: self.optimizer, ..OptimizerConfig::default() }
                    .optimizer(self.dtype == Precision::Mixed),
                planning: self.planning.unwrap_or(CompileOptions::default().planner.work),
                mesh: Mesh { data: self.data_ranks, pipeline: self.pipeline_ranks, expert: self.expert_ranks },
                pipeline: pipeline("schedule", &self.schedule, self.chunks)?,
                recompute: self.recompute(&device)?,
                compress: self.compress.clone(),
                // Nothing is written to it.
                offload: (!self.offload.is_empty()).then(|| Offload { ops: self.offload.clone(), folder: ".".into() }),
                routing: self.routing.map_or(Reserve::Worst, |factor| Reserve::Balanced { factor }),
                ..TrainOptions::default()
            },
            ranks: self.ranks()?,
            precision: self.dtype,
            lowering: self.lowering,
            device,
            model,
        })
    }

    fn check_extents(&self) -> Result<(), ConfigError> {
        let Self { batch, micro_batches, sequence, data_ranks, pipeline_ranks, expert_ranks, .. } = *self;
        let extents = [
            ("batch", batch),
            ("micro_batches", micro_batches),
            ("sequence", sequence),
            ("data_ranks", data_ranks),
            ("pipeline_ranks", pipeline_ranks),
            ("expert_ranks", expert_ranks),
            ("chunks", self.chunks.unwrap_or(1)),
        ];
        if let Some((key, _)) = extents.into_iter().find(|(_, extent)| *extent == 0) {
            return Err(ConfigError::value(key, "is 0", "it is at least 1"));
        }
        match self.routing.filter(|factor| !(factor.is_finite() && *factor >= 0.0)) {
            Some(factor) => {
                Err(ConfigError::value("routing", format!("is {factor}"), "it is at least 0; 1.25 is usual"))
            }
            None => Ok(()),
        }
    }

    /// What eager frameworks have no rules for.
    fn check_lowering(&self) -> Result<(), ConfigError> {
        let remedy = "leave lowering out, or the other key";
        let refuse = |key, why| Err(ConfigError::value(key, format!("{why} of an eager framework"), remedy));
        match self.lowering {
            Lowering::Gapless => Ok(()),
            _ if self.optimizer != Rule::AdamW => refuse("optimizer", "nothing but adamw is known"),
            _ if !self.compress.is_empty() => refuse("compress", "nothing is known"),
            _ if !self.offload.is_empty() => refuse("offload", "nothing is known"),
            Lowering::EagerAmp if self.dtype != Precision::Mixed => refuse("dtype", "autocast makes it mixed"),
            _ => Ok(()),
        }
    }

    /// The device, with what the keys say of it.
    fn profile(&self) -> Result<DeviceProfile, ConfigError> {
        if self.profile == machine::NAME && self.kernels != "cpu" {
            return Err(ConfigError::value("kernels", "are for another device than this machine", "use cpu"));
        }
        let mut device = DeviceProfile::find(&self.profile)
            .map_err(|why| ConfigError::value("profile", why, "name a profile, or a TOML file of one"))?;
        if let Some(tflops) = self.tflops {
            device.set_flops(tflops * 1e12);
        }
        if let Some(terabytes) = self.terabytes {
            device.bytes = terabytes * 1e12;
        }
        if !device.rates(self.dtype).are_sound() {
            let rates = device.rates(self.dtype);
            let why = format!("{} TFLOP/s and {} TB/s are no device", rates.flops / 1e12, rates.bytes / 1e12);
            return Err(ConfigError::value("tflops, terabytes", why, "both are above 0"));
        }
        Ok(device)
    }

    fn recompute(&self, device: &DeviceProfile) -> Result<Recompute, ConfigError> {
        let policy: Recompute = self.recompute.parse().map_err(|error| match error {
            CompileError::Config { why, remedy, .. } => ConfigError::value("recompute", why, remedy),
            other => ConfigError::value("recompute", other, "use none or layers"),
        })?;
        match self.budget {
            Some(_) if policy != Recompute::None => {
                let why = "a budget chooses itself what is computed again";
                Err(ConfigError::value("budget", why, "leave recompute or budget out"))
            }
            Some(bytes) => Ok(Recompute::Budget { bytes, rates: device.rates(self.dtype) }),
            None => Ok(policy),
        }
    }

    fn trainable(&self, architecture: &Architecture) -> Result<Trainable, ConfigError> {
        let Some(text) = &self.lora else {
            if !self.lora_targets.is_empty() {
                return Err(ConfigError::value(
                    "lora_targets",
                    "stand without lora",
                    "give lora the rank of the adapters, e.g. 16",
                ));
            }
            return Ok(if self.train.is_empty() { Trainable::All } else { Trainable::Only(self.train.clone()) });
        };
        if !self.train.is_empty() {
            return Err(ConfigError::value("train", "stands beside lora", "leave one of them out"));
        }
        let (rank, alpha) = text.split_once(':').unwrap_or((text, text));
        let (Ok(rank), Ok(alpha)) = (rank.parse(), alpha.parse()) else {
            return Err(ConfigError::value(
                "lora",
                format!("{text:?} is no rank, or rank:alpha"),
                "write, for example, 16:32",
            ));
        };
        let targets = match self.lora_targets.is_empty() {
            true => architecture.lora_targets(),
            false => self.lora_targets.clone(),
        };
        Ok(Trainable::Lora(Lora { rank, alpha, targets, ..Lora::default() }))
    }

    fn ranks(&self) -> Result<Vec<usize>, ConfigError> {
        let all = self.pipeline_ranks;
        if self.rank == "all" {
            return Ok((0..all).collect());
        }
        let number = |text: &str| {
            text.trim().parse::<usize>().ok().filter(|&rank| rank < all).ok_or_else(|| {
                let why = format!("{text:?} is no rank of a pipeline of {all}");
                ConfigError::value("rank", why, "use numbers from 0 with commas between them, or all")
            })
        };
        self.rank.split(',').map(number).collect()
    }
}

impl Step {
    /// What people call the model.
    pub fn title(&self) -> &str {
        &self.model.title
    }

    /// Its family and extents.
    pub fn architecture(&self) -> &Architecture {
        &self.model.architecture
    }

    /// The config.json, if it was one.
    pub fn config(&self) -> Option<&Config> {
        self.model.config.as_ref()
    }

    /// Declares its model, as a trainer builds it.
    ///
    /// # Errors
    /// When the extents do not fit together.
    pub fn build(&self, vb: VarBuilder) -> gapless_engine::Result<Pretrained> {
        self.model.architecture.model(vb)
    }

    /// What the user of a config.json should know ([`Config::notices`]).
    pub fn notices(&self) -> Vec<String> {
        self.model.config.as_ref().map(Config::notices).unwrap_or_default()
    }

    /// The graph of all ranks.
    ///
    /// # Errors
    /// As [`Self::build`].
    pub fn record(&self) -> Result<StepGraph, TrainError> {
        let build: &Build<'_> = &|vb| Ok(Box::new(self.build(vb)?));
        Trainer::record(build, &self.options)
    }

    /// What decides that graph: steps with equal texts share it.
    pub fn graph_key(&self) -> String {
        format!("{:?} {}", self.model.architecture, Trainer::graph_key(&self.options))
    }

    /// The program of a rank of the pipeline.
    ///
    /// # Errors
    /// When it was not recorded with such options; [`OverBudget`](gapless_engine::compile::Error::OverBudget).
    pub fn program(&self, graph: &StepGraph, rank: usize) -> Result<Program, TrainError> {
        Trainer::lower(graph, &self.options, rank)
    }

    /// Those of all ranks.
    ///
    /// # Errors
    /// As [`Self::program`].
    pub fn programs(&self, graph: &StepGraph) -> Result<Vec<Program>, TrainError> {
        (0..self.options.mesh.pipeline).map(|rank| self.program(graph, rank)).collect()
    }

    /// The plan of a program.
    ///
    /// # Errors
    /// As [`compile`].
    pub fn plan(&self, program: &Program) -> Result<Executable, TrainError> {
        self.plan_within(program, self.options.planning)
    }

    /// The same with so much work of the planner, rather than the step's.
    ///
    /// # Errors
    /// As [`compile`].
    pub fn plan_within(&self, program: &Program, work: u64) -> Result<Executable, TrainError> {
        let TrainOptions { recompute, routing, .. } = &self.options;
        Ok(compile(std::slice::from_ref(program), &CompileOptions::within(recompute.capacity(), work, *routing))?)
    }

    /// The same step under another recompute policy.
    pub fn recomputing(&self, recompute: Recompute) -> Self {
        Self { options: TrainOptions { recompute, ..self.options.clone() }, ..self.clone() }
    }
}

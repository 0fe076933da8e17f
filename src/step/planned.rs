//! The training step of a run, which can be compiled, planned and timed without running it.

use std::path::Path;

use gapless_engine::compile::step::{CompiledStep, RankPlan, StepGraph, WholeStep, boxed_build, compile_step};
use gapless_engine::compile::{Executable, Program, Target, compile};
use gapless_engine::nn::{Trainable, VarBuilder};
use gapless_engine::recompute::Recompute;
use gapless_engine::{DeviceChoice, Precision, StepOptions, TrainError, TrainOptions};
use gapless_models::hf::{Architecture, Config, Pretrained};

use super::device::{DeviceProfile, OLDEST_CAPABILITY};
use super::eager::Fsdp;
use super::machine;
use crate::run::{ConfigError, ExpertLoad, Lowering, MegatronConfig, ModelConfig, Rule, RunConfig};

/// A training step that can be recorded, compiled, planned and timed.
#[derive(Debug, Clone)]
pub struct Step {
    /// The options of the step.
    pub options: StepOptions,
    /// The device for which time is estimated.
    pub device: DeviceProfile,
    /// Whether the run names the device, so that the step must fit into its memory.
    pub has_named_device: bool,
    /// The source of the tensor lifetimes.
    pub lowering: Lowering,
    /// Settings of [`Lowering::Megatron`].
    pub megatron: MegatronConfig,
    /// FSDP2 on the step's ranks, for [`Lowering::Fsdp2`].
    pub(super) fsdp: Option<Fsdp>,
    /// The distribution of tokens over experts, for comparisons with other allocators.
    pub expert_load: ExpertLoad,
    /// The pipeline ranks that the commands report on.
    pub ranks: Vec<usize>,
    /// Worker threads per rank; 0 uses all cores.
    pub threads: usize,
    target: Target,
    title: String,
    architecture: Architecture,
    /// The config.json, if the model is a folder.
    config: Option<Config>,
}

impl Step {
    /// Creates the step of a run. The data and weights of the run need not exist.
    ///
    /// # Errors
    /// Returns a [`ConfigError::Value`] that names the key of the first invalid value.
    pub fn new(run: &RunConfig) -> Result<Self, ConfigError> {
        let model = run.planned_model().map_err(|why| ConfigError::value("model", why, "name a model that exists"))?;
        let config = match &model {
            ModelConfig::Folder(path) => Some(read(path)?),
            _ => None,
        };
        let mut architecture = match &config {
            Some(config) => config.architecture().clone(),
            None => model.architecture().map_err(|why| ConfigError::value("model", why, "correct it"))?,
        };
        let options = run.options();
        let target = options.target();
        let TrainOptions { step: mut options, device, threads, .. } = options;
        options.check_values().map_err(|error| super::refused(error.into()))?;
        check_lowering(run, &architecture)?;
        if run.estimate.lowering == Lowering::Megatron {
            pad_vocabulary(&mut architecture, 128 * options.mesh.tensor);
        }
        let fsdp = (run.estimate.lowering == Lowering::Fsdp2).then(|| Fsdp::new(&run.estimate.fsdp2, &options));
        if fsdp.is_some() {
            // The graph is that of data ranks. The lowering divides their parameters.
            options.mesh.data *= options.mesh.shard;
            options.mesh.shard = 1;
        }
        check_load(&run.estimate.expert_load, &architecture)?;
        // Adapters are f32 in every precision.
        if run.optimizer.name == Rule::GaLore
            && options.precision != Precision::F32
            && !matches!(options.trainable, Trainable::Lora(_))
        {
            let why = "galore needs step.precision = \"f32\"";
            return Err(ConfigError::value(
                "optimizer.name",
                why,
                "set step.precision to f32, or choose another optimizer",
            ));
        }
        if run.estimate.profile_name() == machine::NAME && matches!(device, DeviceChoice::Cuda(_)) {
            return Err(ConfigError::value("device", "is a GPU, but estimate.profile is this-machine", "use cpu"));
        }
        Ok(Self {
            ranks: ranks(&run.estimate.rank, options.mesh.pipeline)?,
            target,
            device: DeviceProfile::of(run)?,
            has_named_device: run.estimate.profile.is_some(),
            lowering: run.estimate.lowering,
            megatron: run.estimate.megatron.clone(),
            fsdp,
            expert_load: run.estimate.expert_load.clone(),
            title: run.model.title(),
            options,
            threads,
            architecture,
            config,
        })
    }

    /// The name of the model, for reports.
    pub fn title(&self) -> &str {
        &self.title
    }

    /// The precision of parameters, activations and gradients.
    pub fn precision(&self) -> Precision {
        self.options.precision
    }

    /// The family and sizes of the model.
    pub fn architecture(&self) -> &Architecture {
        &self.architecture
    }

    /// Sets the number of layers of the model.
    pub(super) fn set_layers(&mut self, layers: usize) {
        self.architecture.set_layers(layers);
    }

    /// Returns notices about settings in the model's config.json that are ignored, and about a device that does not
    /// match the kernels.
    pub fn notices(&self) -> Vec<String> {
        let mut notices = self.config.as_ref().map_or_else(Vec::new, Config::notices);
        let DeviceProfile { name, capability, .. } = &self.device;
        if self.has_named_device && !self.device.is_measured() {
            if *capability < OLDEST_CAPABILITY {
                notices.push(format!(
                    "{name} has compute capability {capability:.1}, and steps run on {OLDEST_CAPABILITY:.1} or later: this is only a plan"
                ));
            }
            if matches!(self.target, Target::Cpu { .. }) {
                notices.push(format!("planned with the kernels of CPUs; --device cuda plans with those of {name}"));
            }
        }
        notices
    }

    /// Returns a key for the step's graph. Steps with equal keys have equal graphs.
    pub fn graph_key(&self) -> String {
        format!("{:?} {}", self.architecture, StepGraph::key(&self.options))
    }

    /// Builds the model.
    ///
    /// # Errors
    /// Returns an error if the model's shapes do not fit together.
    pub fn build(&self, vb: VarBuilder) -> gapless_engine::Result<Pretrained> {
        self.architecture.model(vb)
    }

    /// Records the graph of the step.
    ///
    /// # Errors
    /// Returns an error if the options or the model's shapes do not fit together.
    pub fn record(&self) -> Result<StepGraph, TrainError> {
        Ok(StepGraph::record(&boxed_build(|vb| self.build(vb)), &self.options)?)
    }

    /// Returns a key for what [`Self::record_whole`] records. Steps with equal keys have it in common.
    pub fn whole_key(&self) -> String {
        format!("{:?} {}", self.architecture, WholeStep::key(&self.options))
    }

    /// Records the forward and the gradients of the step, before ranks divide them.
    ///
    /// # Errors
    /// Returns an error if the options or the model's shapes do not fit together.
    pub fn record_whole(&self) -> Result<WholeStep, TrainError> {
        Ok(WholeStep::record(&boxed_build(|vb| self.build(vb)), &self.options)?)
    }

    /// Records the graph of the step from the forward and the gradients of a step with the same [key](Self::whole_key).
    ///
    /// # Errors
    /// Returns the errors of [`Self::record`], and an error if the keys differ.
    pub fn record_from(&self, whole: &WholeStep) -> Result<StepGraph, TrainError> {
        Ok(StepGraph::record_from(whole, &boxed_build(|vb| self.build(vb)), &self.options)?)
    }

    /// Compiles all programs that a pipeline rank runs in one arena, as a trainer does: the training step, the
    /// evaluation and the generation.
    ///
    /// # Errors
    /// Returns an error if the options or the model's shapes do not fit together, and
    /// [`OverBudget`](gapless_engine::compile::Error::OverBudget) if no recomputation fits the budget.
    pub fn compile(&self, rank: usize) -> Result<(Executable, CompiledStep), TrainError> {
        let fullest = self.options.mesh.fullest(rank);
        let ranks = RankPlan::of(&self.options, fullest)?;
        Ok(compile_step(&boxed_build(|vb| self.build(vb)), &self.options, &ranks, self.target)?)
    }

    /// Lowers the training step of a pipeline rank to a program.
    ///
    /// # Errors
    /// Returns an error if the graph was recorded with other options, and
    /// [`OverBudget`](gapless_engine::compile::Error::OverBudget) if no recomputation fits the budget.
    pub fn program(&self, graph: &StepGraph, rank: usize) -> Result<Program, TrainError> {
        Ok(graph.program(&self.options, rank, self.target)?)
    }

    /// Lowers the training step of every pipeline rank.
    ///
    /// # Errors
    /// Returns the errors of [`Self::program`].
    pub fn programs(&self, graph: &StepGraph) -> Result<Vec<Program>, TrainError> {
        (0..self.options.mesh.pipeline).map(|rank| self.program(graph, rank)).collect()
    }

    /// The kind of the kernels, for reports: `CPU` or `CUDA`.
    pub fn kernels(&self) -> &'static str {
        match self.target {
            Target::Cpu { .. } => "CPU",
            Target::Cuda | Target::CudaUnfused => "CUDA",
        }
    }

    /// Returns the changes of settings that would lower the memory of this step. See [`StepOptions::remedies`].
    pub fn remedies(&self) -> Vec<&'static str> {
        self.options.remedies()
    }

    /// The target of compilation.
    pub(super) fn target(&self) -> Target {
        self.target
    }

    /// Plans the arena of a program.
    ///
    /// # Errors
    /// Returns the errors of [`compile`].
    pub fn plan(&self, program: &Program) -> Result<Executable, TrainError> {
        Ok(compile(std::slice::from_ref(program), &self.options.planning())?)
    }

    /// Returns a copy of the step with this memory budget. If `budget` is `None`, the copy has neither a budget nor
    /// recomputation.
    pub fn within(&self, budget: Option<u64>) -> Self {
        let mut step = self.clone();
        (step.options.memory.budget, step.options.memory.recompute) = (budget, Recompute::None);
        step
    }
}

fn read(path: &Path) -> Result<Config, ConfigError> {
    Config::read(path).map_err(|why| ConfigError::value("model", why, "name a folder with a config.json"))
}

/// Checks that the step can be lowered as an eager framework would run it, if `lowering` asks for this.
fn check_lowering(run: &RunConfig, architecture: &Architecture) -> Result<(), ConfigError> {
    let remedy = "leave estimate.lowering out, or the other key";
    let refuse = |key, why| Err(ConfigError::value(key, format!("{why} for eager frameworks"), remedy));
    match run.estimate.lowering {
        Lowering::Gapless => Ok(()),
        _ if run.optimizer.name != Rule::AdamW => refuse("optimizer.name", "only adamw is supported"),
        _ if !run.memory.compress.is_empty() => refuse("memory.compress", "is not supported"),
        _ if !run.memory.offload.is_empty() => refuse("memory.offload", "is not supported"),
        Lowering::Megatron | Lowering::Fsdp2 if run.step.precision != Precision::Bf16 => {
            refuse("step.precision", "megatron and fsdp2 require bf16 with f32 masters")
        }
        Lowering::Megatron | Lowering::Fsdp2 if matches!(architecture, Architecture::Moe(_)) => {
            refuse("estimate.lowering", "megatron and fsdp2 have no experts")
        }
        Lowering::Fsdp2 if !matches!(architecture, Architecture::Llama(_)) => refuse(
            "estimate.lowering",
            "fsdp2 has the layers of torchtitan's Llama, and another model is not supported",
        ),
        Lowering::Megatron if run.estimate.megatron.optimizer_ranks == Some(0) => {
            refuse("estimate.megatron.optimizer_ranks", "is 0, but at least one rank has the states")
        }
        Lowering::Eager | Lowering::EagerAmp if run.mesh.tensor > 1 => {
            refuse("mesh.tensor", "is supported by megatron and fsdp2 alone")
        }
        Lowering::EagerAmp if run.step.precision != Precision::Bf16 => {
            refuse("step.precision", "autocast requires bf16")
        }
        _ => Ok(()),
    }
}

/// Pads the vocabulary to a multiple, as Megatron does so that tensor ranks have equal parts.
fn pad_vocabulary(architecture: &mut Architecture, multiple: usize) {
    let vocabulary = match architecture {
        Architecture::Gpt(gpt) => &mut gpt.vocabulary,
        Architecture::Llama(llama) => &mut llama.vocabulary,
        Architecture::Moe(moe) => &mut moe.llama.vocabulary,
    };
    *vocabulary = vocabulary.next_multiple_of(multiple);
}

/// Checks that recorded loads are of a model with as many layers of experts, and with at least as many experts.
fn check_load(load: &ExpertLoad, architecture: &Architecture) -> Result<(), ConfigError> {
    let (ExpertLoad::Recorded(load), Architecture::Moe(moe)) = (load, architecture) else { return Ok(()) };
    let layers = (0..moe.llama.layers).filter(|layer| !moe.dense_layers.contains(layer)).count();
    let experts = moe.router.experts;
    let refused = |why| Err(ConfigError::value("estimate.expert_load", why, "name a recording of the same model"));
    if let Some(why) = load.error() {
        return refused(why);
    }
    if (load.layers(), load.experts().max(experts)) == (layers, experts) {
        return Ok(());
    }
    refused(format!(
        "has {} layer(s) of {} experts, but the model has {layers} of {experts}",
        load.layers(),
        load.experts()
    ))
}

/// Parses a list of ranks separated by commas, or the word `all`. The parameter `all` is the number of ranks.
fn ranks(text: &str, all: usize) -> Result<Vec<usize>, ConfigError> {
    if text == "all" {
        return Ok((0..all).collect());
    }
    let number = |text: &str| {
        text.trim().parse::<usize>().ok().filter(|&rank| rank < all).ok_or_else(|| {
            let why = format!("{text:?} is not a rank of a pipeline of {all}");
            ConfigError::value("estimate.rank", why, "use numbers from 0, separated by commas, or all")
        })
    };
    text.split(',').map(number).collect()
}

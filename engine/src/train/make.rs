//! Builds trainers, for one or several ranks, on a CPU or GPU.
//!
//! - In: a model, options, and optionally a communicator to other ranks or a device.
//! - Out: a trainer whose arena is reserved and initialized.
//! - Never: a mesh with both CPU and GPU ranks, because their copies of a parameter would drift apart.

use std::path::Path;

use gapless_alloc::Role;
use gapless_compile::report::{Report, largest_at_peak};
use gapless_compile::step::{
    Build, CompiledStep, Overflow, RankPlan, Share, StepOptions, boxed_build, compile_inference, compile_step,
};
use gapless_compile::{Executable, Target};
use gapless_graph::nn::VarBuilder;
use gapless_graph::{Causality, Model};
use gapless_runtime::Error as RuntimeError;
use gapless_runtime::Session;
use gapless_runtime::cpu::{Workers, resolve_threads};
#[cfg(feature = "cuda")]
use gapless_runtime::cuda;
use gapless_runtime::process_memory::available_memory;

#[cfg(not(feature = "cuda"))]
use super::device;
use super::documents::DocumentInputs;
use super::ranks::{BatchCheck, communicators, expect_equal, expect_one_rank, expect_ranks, groups};
use super::{DeviceChoice, DeviceInfo, LossParts, Programs, SkipThresholds, TrainOptions, Trainer, not_causal};
use crate::communicator::Communicator;
use crate::error::{Result, TrainError};

/// The purpose of a trainer.
#[derive(Debug, Clone, Copy)]
enum Purpose {
    Training,
    Inference,
}

impl Purpose {
    fn compile(
        self,
        build: &Build<'_>,
        options: &StepOptions,
        plan: &RankPlan,
        target: Target,
    ) -> Result<(Executable, CompiledStep)> {
        Ok(match self {
            Self::Training => compile_step(build, options, plan, target)?,
            Self::Inference => compile_inference(build, options, plan, target)?,
        })
    }
}

/// Builds a [`Trainer`]; see [`Trainer::builder`].
#[must_use]
pub struct TrainerBuilder<'a> {
    build: Box<Build<'a>>,
    options: TrainOptions,
    purpose: Purpose,
    world: Option<Box<dyn Communicator>>,
    #[cfg(feature = "cuda")]
    device: Option<Box<dyn cuda::Device>>,
}

impl TrainerBuilder<'_> {
    /// Builds the model for evaluation and generation only, without gradients and optimizer states. If
    /// [`StepOptions::generation`] is not set, the model has a cache for one sequence.
    pub fn for_inference(mut self) -> Self {
        self.options.step.generation.get_or_insert_default();
        Self { purpose: Purpose::Inference, ..self }
    }

    /// Builds one rank of a distributed trainer.
    ///
    /// `world` must have as many ranks as the mesh. All ranks must build their trainers with the same model and
    /// options. After that, the methods that step, evaluate, generate and save must be called on all ranks, in the same
    /// order and with the same arguments. [`Trainer::step`] takes the whole batch, and each rank uses its share. A rank
    /// can only read tensors of its own stages and, if states are divided among data ranks, its own part of each state.
    /// With [`DeviceChoice::Auto`], all ranks run on CPUs if one of them finds no GPU.
    pub fn distributed(self, world: Box<dyn Communicator>) -> Self {
        Self { world: Some(world), ..self }
    }

    /// Uses this device, to which the trainer needs exclusive access.
    #[cfg(feature = "cuda")]
    pub fn on_device(self, device: Box<dyn cuda::Device>) -> Self {
        Self { device: Some(device), ..self }
    }

    /// Plans one rank of the mesh without reserving memory. The plan covers training step, evaluation and generation in
    /// one arena. Returns the same report as [`Trainer::report`] of a trainer with these options. The plan is for the
    /// CPU, unless the options name a GPU.
    ///
    /// # Errors
    /// Returns an error if the options or the model's shapes do not fit together, if the mesh has no rank of this
    /// index, or if no plan fits the budget ([`OverBudget`](gapless_compile::Error::OverBudget)).
    pub fn plan(&self, rank: usize) -> Result<Report> {
        let Self { build, options, .. } = self;
        options.check()?;
        let ranks = RankPlan::of(&options.step, rank)?;
        let (executable, compiled) = self.purpose.compile(build, &options.step, &ranks, options.target())?;
        Ok(Report::of(&executable, compiled.parameters, compiled.layout.frozen_elements()))
    }

    /// Checks everything about a rank that can be checked without its memory and without the data: the options, the
    /// model, the budget, and that a GPU that is named exists. On a CPU, also checks that the step can fit the available
    /// memory. Returns the bytes of the tensors that this rank writes into a checkpoint.
    ///
    /// # Errors
    /// Returns the errors of [`Self::plan`], and an error
    ///
    /// - if the options name a GPU that is missing, or that lacks kernels for the step
    ///   (`RuntimeError::NoDeviceKernels`);
    /// - if the step can only run on the CPU, and the available memory is less than any plan needs
    ///   ([`RuntimeError::DoesNotFit`](gapless_runtime::Error::DoesNotFit)).
    pub fn check(&self, rank: usize) -> Result<u64> {
        let Self { build, options, .. } = self;
        options.check()?;
        options.device.expect_there()?;
        let ranks = RankPlan::of(&options.step, rank)?;
        let mut step = options.step.clone();
        // The device that `Auto` finds decides about the budget. Without a budget, any plan will do.
        let decides = options.device == DeviceChoice::Auto && options.device.may_be_gpu();
        step.memory.budget = step.memory.budget.filter(|_| !decides);
        if step.memory.budget.is_none() {
            step.memory.planning = 0;
        }
        let (executable, compiled) = self.purpose.compile(build, &step, &ranks, options.target())?;
        #[cfg(feature = "cuda")]
        if options.target() == Target::Cuda {
            Session::launches(&executable)?;
        }
        let least = executable.solution().lower_bound;
        if !options.device.may_be_gpu()
            && let Some((available, limit)) = available_memory().filter(|(bytes, _)| *bytes < least)
        {
            let largest = largest_at_peak(&executable, 8);
            return Err(RuntimeError::DoesNotFit { needed: least, available, limit, largest }.into());
        }
        let is_saved = |name: &str| compiled.layout.is_first_copy(name, ranks.mesh, ranks.at);
        let tensors = [Role::Parameter, Role::OptimizerState].into_iter().flat_map(|role| executable.specs(role));
        Ok(tensors.filter(|(name, _)| is_saved(name)).map(|(_, spec)| spec.bytes()).sum())
    }

    /// Plans all ranks of the mesh. Of the ranks with the same stages, only the one that holds most is planned
    /// ([`gapless_parallel::Mesh::fullest`]): all of them get its report.
    ///
    /// # Errors
    /// Returns the errors of [`Self::plan`].
    pub fn plan_all(&self) -> Result<Vec<Report>> {
        let mesh = self.options.step.mesh;
        let ranks = mesh.ranks()?;
        let stages = (0..mesh.pipeline).map(|stage| self.plan(mesh.fullest(stage))).collect::<Result<Vec<Report>>>()?;
        Ok((0..ranks).map(|rank| stages[mesh.coordinate(rank).pipeline].clone()).collect())
    }

    /// Compiles the training step, the evaluation and the generation of a model into one arena, and initializes the
    /// model's parameters.
    ///
    /// # Errors
    /// Returns the errors of [`Self::plan`], and an error
    ///
    /// - if the arena does not fit the device's memory;
    /// - if the offload file cannot be created ([`RuntimeError::Offload`](gapless_runtime::Error::Offload));
    /// - if the host has too little pinned memory for activations that a GPU offloads (`RuntimeError::Device`);
    /// - if a requested GPU is missing or has no kernels for a step (`RuntimeError::Device`,
    ///   `RuntimeError::NoDeviceKernels`);
    /// - if there are several ranks, and `world` and the mesh have different numbers of ranks;
    /// - if there are several ranks, and another rank fails or runs on another kind of device.
    pub fn build(mut self) -> Result<Trainer> {
        let Some(mut world) = self.world.take() else {
            expect_one_rank(self.options.step.mesh)?;
            return self.rank(0);
        };
        let (rank, choice, options) = (world.rank(), self.options.device, self.options.clone());
        expect_equal(&mut *world, &options.shared_by_ranks())?;
        expect_ranks(&*world, options.step.mesh)?;
        #[cfg(feature = "cuda")]
        let choice = if self.device.is_some() { DeviceChoice::Cuda(0) } else { choice };
        let mut trainer = self.rank(rank)?;
        if !same_device_kind(&mut *world, trainer.device.is_gpu, choice)? && trainer.device.is_gpu {
            self.options.device = DeviceChoice::Cpu;
            trainer = Trainer { options, ..self.rank(rank)? };
            trainer.device.reason = Some("another rank has found no GPU".into());
        }
        trainer.join(world)
    }

    /// Builds the trainer of a rank, without a connection to the other ranks.
    fn rank(&mut self, rank: usize) -> Result<Trainer> {
        let Self { build, options, purpose, .. } = self;
        let _span = tracing::info_span!("compile", rank).entered();
        options.check()?;
        #[cfg(feature = "cuda")]
        if let Some(device) = self.device.take() {
            return Trainer::with_device(|| Ok(device), build, options.clone(), rank, *purpose);
        }
        let because = match Trainer::on_gpu(build, options, rank, *purpose)? {
            Ok(trainer) => return Ok(trainer),
            Err(because) => because,
        };
        let (threads, step) = (resolve_threads(options.threads), &options.step);
        let plan = RankPlan::of(step, rank)?;
        let (executable, compiled) = purpose.compile(build, step, &plan, Target::Cpu { threads })?;
        let mut session = Session::on_cpu(executable, Workers::new(threads)?, options.seed)?;
        if !step.memory.offload.is_empty() {
            session.offload_to(step.memory.offload_to.as_deref().unwrap_or(Path::new(".")))?;
        }
        Trainer::of(Box::new(session), DeviceInfo::cpu(threads, because), compiled, &plan, options.clone())
    }
}

impl Trainer {
    /// Builds a trainer with one rank. Use [`Self::builder`] for other trainers.
    ///
    /// # Errors
    /// Returns the errors of [`TrainerBuilder::build`].
    pub fn new<M: Model>(
        build: impl Fn(VarBuilder) -> gapless_graph::Result<M>,
        options: impl Into<TrainOptions>,
    ) -> Result<Self> {
        Self::builder(build, options).build()
    }

    /// Creates a builder from a model and options. Unlike [`Self::new`], a builder can build trainers for several
    /// ranks, for a given device or for inference. It can also plan a trainer without building one.
    pub fn builder<'a, M: Model + 'a>(
        build: impl Fn(VarBuilder) -> gapless_graph::Result<M> + 'a,
        options: impl Into<TrainOptions>,
    ) -> TrainerBuilder<'a> {
        TrainerBuilder {
            build: Box::new(boxed_build(build)),
            options: options.into(),
            purpose: Purpose::Training,
            world: None,
            #[cfg(feature = "cuda")]
            device: None,
        }
    }

    /// Connects this rank to the other ranks, after checking that all ranks have the same model.
    fn join(mut self, mut world: Box<dyn Communicator>) -> Result<Self> {
        expect_equal(&mut *world, &[("model", self.model.clone())])?;
        let mesh = self.options.step.mesh;
        let groups = groups(&mut *world, mesh, self.session.executable())?;
        let communicators = match self.between_devices(&mut *world)? {
            Some(mut devices) => communicators(&mut *devices, mesh, &groups)?,
            None => communicators(&mut *world, mesh, &groups)?,
        };
        self.session.connect(communicators)?;
        self.batch_check = Some(BatchCheck::new(world.size()));
        self.world = Some(world);
        Ok(self)
    }

    /// Returns a communicator of the same ranks that exchanges device memory, or `None` if the device does not support
    /// this.
    #[cfg(feature = "cuda")]
    fn between_devices(&mut self, world: &mut dyn Communicator) -> Result<Option<Box<dyn Communicator>>> {
        Ok(self.session.connect_devices(world)?)
    }

    #[cfg(not(feature = "cuda"))]
    fn between_devices(&mut self, _: &mut dyn Communicator) -> Result<Option<Box<dyn Communicator>>> {
        Ok(None)
    }

    /// Returns a trainer on the device that `open` returns, which is only called if the device has kernels for every
    /// operation.
    #[cfg(feature = "cuda")]
    fn with_device(
        open: impl FnOnce() -> Result<Box<dyn cuda::Device>>,
        build: &Build<'_>,
        options: TrainOptions,
        rank: usize,
        purpose: Purpose,
    ) -> Result<Self> {
        let step = &options.step;
        let plan = RankPlan::of(step, rank)?;
        let (executable, compiled) = purpose.compile(build, step, &plan, Target::Cuda)?;
        let Share { first, stride, .. } = Share::of(step, plan.at);
        Session::launches(&executable)?;
        let mut device = open()?;
        if options.tf32 {
            device.use_tf32();
        }
        if let Some(folder) = &options.step.memory.offload_to {
            device.offload_to(folder);
        }
        let session = Session::on_cuda(executable, device, options.seed, (first as u64, stride as u64))?;
        let device = DeviceInfo { name: session.device(), is_gpu: true, reason: None };
        Self::of(Box::new(session), device, compiled, &plan, options)
    }

    fn of(
        mut session: Box<Session>,
        device: DeviceInfo,
        compiled: CompiledStep,
        plan: &RankPlan,
        options: TrainOptions,
    ) -> Result<Self> {
        if options.step.memory.overflow == Overflow::Grow {
            session.allow_overflow_heap(options.most_bytes());
        }
        let find = |name| session.executable().program(name);
        let programs = Programs {
            train: find("train"),
            evaluate: find("evaluate").expect("it is always compiled"),
            logits: find("logits"),
            generation: find("prefill").zip(find("decode")),
        };
        let schedule = options.learning_rate.check()?;
        tracing::info!("{device}");
        let CompiledStep { parameters, vocabulary, layout, watched, model, causality, uncached, program: _ } = compiled;
        if let Some(culprit) = uncached {
            tracing::warn!("{culprit} combines tokens and has no cache: each generated token reads the whole window");
        }
        if let (Causality::NotCausal(culprit), Some(_)) = (&causality, programs.train) {
            tracing::warn!("{}; the model cannot learn to predict the next token", not_causal(culprit));
        }
        let (at, step, world) = (plan.at, 0, None);
        let scalars_inputs = options.step.update.scalars_inputs();
        let share = Share::of(&options.step, at);
        let loss_parts = LossParts::outputs(&session, programs.train);
        let documents =
            DocumentInputs::new(if options.step.documents { options.step.batch * options.step.sequence } else { 0 });
        Ok(Self {
            session,
            device,
            options,
            schedule,
            programs,
            parameters,
            vocabulary,
            layout,
            watched,
            model,
            causality,
            at,
            share,
            step,
            limits: SkipThresholds::default(),
            loss_parts,
            scalars_inputs,
            world,
            batch_check: None,
            documents,
        })
    }

    /// Returns a trainer on a GPU. If the trainer must run on the CPU instead, returns an inner error: `None` if the
    /// options choose the CPU, or else the reason why `Auto` finds no usable GPU.
    #[cfg(feature = "cuda")]
    fn on_gpu(
        build: &Build<'_>,
        options: &TrainOptions,
        rank: usize,
        purpose: Purpose,
    ) -> Result<Result<Self, Option<String>>> {
        let on = |ordinal| {
            DeviceChoice::Cuda(ordinal).expect_there()?;
            let open = || -> Result<Box<dyn cuda::Device>> {
                Ok(Box::new(cuda::Nvidia::new(ordinal, cuda::Cache::of_user())?))
            };
            Self::with_device(open, build, options.clone(), rank, purpose)
        };
        match options.device {
            DeviceChoice::Cpu => Ok(Err(None)),
            DeviceChoice::Cuda(ordinal) => on(ordinal).map(Ok),
            DeviceChoice::Auto => match on(local_index(rank) % cuda::Nvidia::count().max(1)) {
                // Only the absence of a usable GPU leads to the CPU. A GPU that is full or fails is an error, because
                // training on the CPU would be unexpectedly slow. An invalid model is an error as well.
                Err(TrainError::Runtime(RuntimeError::Device(why))) if !why.is_absence() => Err(why.into()),
                Err(why @ TrainError::Runtime(RuntimeError::Device(_) | RuntimeError::NoDeviceKernels { .. })) => {
                    Ok(Err(Some(why.to_string())))
                }
                Err(why) if why.refused().is_some_and(|(what, ..)| what == "device") => Ok(Err(Some(why.to_string()))),
                other => other.map(Ok),
            },
        }
    }

    /// A build without GPU support finds no GPU.
    #[cfg(not(feature = "cuda"))]
    fn on_gpu(_: &Build<'_>, options: &TrainOptions, _: usize, _: Purpose) -> Result<Result<Self, Option<String>>> {
        match options.device {
            DeviceChoice::Cpu => Ok(Err(None)),
            DeviceChoice::Auto => Ok(Err(Some(device::without_cuda().to_string()))),
            DeviceChoice::Cuda(_) => Err(device::without_cuda()),
        }
    }
}

/// Returns a rank's index among the ranks of its host. If the ranks are processes, the launcher provides this index. If
/// they are threads, all are on one host, and the index is the rank.
#[cfg(feature = "cuda")]
fn local_index(rank: usize) -> usize {
    let launched = gapless_parallel::World::discover().ok().flatten();
    launched.and_then(|world| world.local_rank).unwrap_or(rank)
}

/// Returns true if all ranks run on the same kind of device. If the result is false, all ranks must be built again on
/// the CPU.
///
/// # Errors
/// Returns an error if the ranks run on different kinds of devices, and the options of at least one rank name a GPU.
fn same_device_kind(world: &mut dyn Communicator, is_gpu: bool, choice: DeviceChoice) -> Result<bool> {
    const CPU: u8 = 0;
    const HOPED_FOR: u8 = 1;
    const ASKED_FOR: u8 = 2;
    let mine = match choice {
        _ if !is_gpu => CPU,
        DeviceChoice::Auto => HOPED_FOR,
        _ => ASKED_FOR,
    };
    let mut all = vec![CPU; world.size()];
    world.all_gather(&[mine], &mut all)?;
    let all_alike = all.iter().all(|&kind| (kind == CPU) == (mine == CPU));
    if !all_alike && all.contains(&ASKED_FOR) {
        let why = "some ranks run on GPUs and others on CPUs, so their copies of a parameter would drift apart";
        return Err(TrainError::config("device", why, "use GPUs on all ranks, or CPUs"));
    }
    Ok(all_alike)
}

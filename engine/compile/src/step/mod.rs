//! From a model's source to the executable of everything that a trainer runs.
//!
//! [`compile_step`] is the table of contents of this crate. What it calls stands in a file of its own each: recording
//! (`record`), the update (`update`), recomputation ([`recompute`](crate::recompute)), lowering and the passes
//! (`lower`, `passes`), and addresses (`link`).

#[cfg(test)]
mod budget_reference;
mod generation;
mod graph;
mod options;
mod overflow;
mod ranks;
mod record;
#[cfg(test)]
mod split_reference;
pub mod text;
mod update;

use std::collections::{BTreeSet, HashMap};

use candle_core::{D, DType};
use gapless_alloc::{Role, lower_bound};
use gapless_graph::nn::VarBuilder;
use gapless_graph::{LossPart, Model};
use gapless_parallel::{Kind, StageId};

pub use self::generation::{Generation, compile_inference};
pub use self::graph::StepGraph;
pub use self::options::{MemoryOptions, ParameterGroup, Precision, StepOptions, UpdateOptions};
pub use self::overflow::Overflow;
pub use self::ranks::{Pipeline, RankPlan, Share};
use self::record::{Trace, TrainStep};
pub use self::update::{CheckpointLayout, KeptPart};
use crate::Executable;
use crate::error::{Error, Result};
use crate::lifetimes::lifetimes;
use crate::link::{compile, height};
use crate::lower::{alive_nodes, lower};
use crate::lowering::{Lowering, Output, Target};
use crate::partition::{ParameterStages, cut_like};
use crate::passes::dump;
use crate::program::{BufferKind, Program};
use crate::recompute::{RematPlan, Resolving, stages_twice};

/// What makes a model, whichever it is: so what records and compiles steps is compiled once, and not for every model anew.
pub type Build<'a> = dyn Fn(VarBuilder) -> gapless_graph::Result<Box<dyn Model + 'a>> + 'a;

/// The same for any model.
pub fn of_any<'a, M: Model + 'a>(
    build: impl Fn(VarBuilder) -> gapless_graph::Result<M> + 'a,
) -> impl Fn(VarBuilder) -> gapless_graph::Result<Box<dyn Model + 'a>> + 'a {
    move |vb| Ok(Box::new(build(vb)?))
}

/// Micro-batches, by ranks of a pipeline, after which its schedules repeat what they keep.
const MICRO_BATCHES_PER_RANK: usize = 3;

/// The input that carries the optimizer's numbers of a step.
pub const SCALARS_INPUT: &str = "step.scalars";

/// The input that says above which loss and above which norm a guarded step is left out.
pub const LIMITS_INPUT: &str = "step.limits";

/// The inputs of a step over packed documents, beside `tokens` and `targets`, all [batch, sequence]: the first token of each token's
/// document and its place therein (u32), what its loss is multiplied by, and what it counts in the statistics of routers (f32).
pub const DOCUMENT_INPUTS: [&str; 4] = ["starts", "positions", "weights", "routed"];

/// The outputs of a training step that say what parts its loss has, of those that it has.
pub const LOSS_PARTS: [(LossPart, &str); 3] = [
    (LossPart::Likelihood, "likelihood"),
    (LossPart::Balance, "loss of balance"),
    (LossPart::RouterZ, "z-loss of routers"),
];

/// What there is to know of a trainer's programs beside the executable.
#[derive(Debug)]
pub struct CompiledStep {
    /// Trained numbers.
    pub parameters: u64,
    /// Ids that tokens may have.
    pub vocabulary: usize,
    /// What the ranks keep between steps.
    pub layout: CheckpointLayout,
    /// Names of what the step shows beside the loss.
    pub watched: Vec<String>,
    /// A digest of the model's graph and its gradients, the same on all ranks of a mesh.
    pub model: String,
    /// The program of the training step; none if the model is not trained.
    pub program: Option<Program>,
}

/// The name under which a gradient can be read.
pub fn gradient_output(parameter: &str) -> String {
    format!("gradient of {parameter}")
}

/// The name under which a watched value can be read.
pub fn watched_output(name: &str) -> String {
    format!("watched {name}")
}

/// Compiles the training step, the evaluation and the logits of one sequence into one arena.
///
/// # Errors
/// When the options or the model's shapes do not fit together; [`Error::OverBudget`].
pub fn compile_step(
    build: &Build<'_>,
    options: &StepOptions,
    ranks: &RankPlan,
    target: Target,
) -> Result<(Executable, CompiledStep)> {
    options.check()?;
    // What is computed: the forward, its stages, its gradients, the update.
    let step = record(build, options, ranks)?;
    // The forward alone, twice, with its parameters where the training step has them.
    let evaluate = evaluation(build, options, ranks, &step.stages, target)?;
    let (logits, vocabulary) = logits(build, options, ranks, &step.stages, target)?;
    // What continues sequences, whose caches lie where the training step has its activations.
    let generation = match options.caches(target) {
        Some(generation) => generation.programs(build, options, ranks, target)?,
        None => Vec::new(),
    };
    // What of it is computed again, so that all fit; instructions, and the passes over them.
    let recomputation = {
        let others: Vec<&Program> = [&evaluate, &logits].into_iter().chain(&generation).collect();
        recompute(&step, options, ranks, target, &others)?
    };
    let train = step.lower(ranks, target, &recomputation)?;
    let programs: Vec<Program> = [train, evaluate, logits].into_iter().chain(generation).collect();
    programs.iter().for_each(|program| dump("compile", program));
    if ranks.mesh.pipeline > 1 || ranks.mesh.expert > 1 {
        expect_same_parameters(&programs)?;
    }
    // Lifetimes, the plan, its check, and addresses.
    let executable = compile(&programs, &options.planning())?;
    let TrainStep { parameters, layout, watched, model, .. } = step;
    let program = programs.into_iter().next();
    Ok((executable, CompiledStep { parameters, vocabulary, layout, watched, model, program }))
}

/// The program of a rank's training step, before anything has an address: what the checker and the simulator of `parallel` can be asked
/// about.
///
/// # Errors
/// When the options or the model's shapes do not fit together, or there is no such rank.
pub fn program<M: Model>(
    build: impl Fn(VarBuilder) -> gapless_graph::Result<M>,
    options: &StepOptions,
    rank: usize,
    target: Target,
) -> Result<Program> {
    lowered(&of_any(build), options, rank, target)
}

/// The plan of a rank's training step alone, without the evaluation and the sampling that a trainer has in the same arena. Reserves nothing.
///
/// # Errors
/// As [`program`]; [`Error::OverBudget`].
pub fn plan<M: Model>(
    build: impl Fn(VarBuilder) -> gapless_graph::Result<M>,
    options: &StepOptions,
    rank: usize,
    target: Target,
) -> Result<Executable> {
    compile(&[program(build, options, rank, target)?], &options.planning())
}

fn lowered(build: &Build<'_>, options: &StepOptions, rank: usize, target: Target) -> Result<Program> {
    options.check()?;
    let ranks = RankPlan::of(options, rank)?;
    let step = record(build, options, &ranks)?;
    let recomputation = recompute(&step, options, &ranks, target, &[])?;
    step.lower(&ranks, target, &recomputation)
}

/// The graph of a training step.
fn record(build: &Build<'_>, options: &StepOptions, ranks: &RankPlan) -> Result<TrainStep> {
    let mut step = TrainStep::forward(build, options, ranks)?;
    step.partition(options, ranks)?;
    let text = step.graph().to_string();
    step.model = blake3::hash(text.as_bytes()).to_hex()[..16].to_owned();
    step.differentiate(options)?;
    step.update(options, ranks)?;
    dump("graph", &*step.graph());
    Ok(step)
}

/// What a step computes again; twice in those stages of a split backward where that lowers the most bytes that are alive on the rank.
fn recompute(
    step: &TrainStep,
    options: &StepOptions,
    ranks: &RankPlan,
    target: Target,
    others: &[&Program],
) -> Result<RematPlan> {
    let _span = tracing::info_span!("recompute").entered();
    let once = policy(step, options, ranks, target, others)?;
    let Some(stages) = can_be_twice(options, ranks, &once) else { return Ok(once) };
    let graph = step.graph();
    let short = fewer_micro_batches(options, ranks);
    let (twice, _) = stages_twice(stages, |stages| {
        let train = step.lower_graph(&graph, &short, target, &once.clone().twice_in(&graph, stages))?;
        let programs: Vec<&Program> = [&train].into_iter().chain(others.iter().copied()).collect();
        Ok::<u64, Error>(lower_bound(&lifetimes(&programs)?.problem))
    })?;
    Ok(once.twice_in(&graph, &twice))
}

/// The same rank in a step of as many micro-batches as are ever under way in the schedules of this repository, with some behind them: once
/// as many are alive as ever will be, more of them repeat what was there.
fn fewer_micro_batches(options: &StepOptions, ranks: &RankPlan) -> RankPlan {
    let fewer = MICRO_BATCHES_PER_RANK * options.mesh.pipeline;
    let short = (fewer < options.micro_batches)
        .then(|| RankPlan::new(options.mesh, options.mesh.rank(ranks.at), &options.pipeline, fewer).ok());
    short.flatten().unwrap_or_else(|| ranks.clone())
}

/// The stages of a rank that may compute twice again: those whose backward is split, by a policy that names what it drops. Where rows
/// are let go while the step runs, what makes them again reads what waits.
fn can_be_twice(options: &StepOptions, ranks: &RankPlan, once: &RematPlan) -> Option<BTreeSet<StageId>> {
    let row = &ranks.table[ranks.at.pipeline];
    let split = row.iter().filter(|action| action.kind == Kind::BackwardInput);
    let stages: BTreeSet<StageId> = split.map(|action| action.stage).collect();
    let is_named = options.memory.budget.is_none() && !once.is_empty();
    (is_named && options.memory.overflow != Overflow::Recompute && !stages.is_empty()).then_some(stages)
}

/// What the policy says. A budget is for the step and `others` in one arena: each way that the search tries is lowered and placed.
fn policy(
    step: &TrainStep,
    options: &StepOptions,
    ranks: &RankPlan,
    target: Target,
    others: &[&Program],
) -> Result<RematPlan> {
    let alive = alive_nodes(&step.graph(), step.outputs());
    let graph = step.graph();
    let row = &ranks.table[ranks.at.pipeline];
    let MemoryOptions { recompute, budget, rates, overflow, .. } = &options.memory;
    let can_be_twice = *overflow != Overflow::Recompute;
    let resolving = Resolving { graph: &graph, alive: &alive, row, stashing: options.stashing(), can_be_twice };
    resolving.resolve(recompute, budget.map(|bytes| (bytes, *rates)), |recomputation, capacity| {
        let train = step.lower_graph(&graph, ranks, target, recomputation)?;
        let programs: Vec<&Program> = [&train].into_iter().chain(others.iter().copied()).collect();
        height(&programs, options.planning_within(capacity))
    })
}

/// The loss of as many sequences as a micro-batch has, without dropout.
fn evaluation(
    build: &Build<'_>,
    options: &StepOptions,
    ranks: &RankPlan,
    stages: &ParameterStages,
    target: Target,
) -> Result<Program> {
    let (trace, model) = Trace::new(build, options, ranks, (options.evaluation_batch(), options.sequence), false)?;
    let loss = trace.loss(&*model, options.documents, false)?;
    forward(&trace, "evaluate", Output::everywhere("loss", loss.id()), ranks, stages, target)
}

/// The logits of one sequence in f32, and how many ids tokens may have.
fn logits(
    build: &Build<'_>,
    options: &StepOptions,
    ranks: &RankPlan,
    stages: &ParameterStages,
    target: Target,
) -> Result<(Program, usize)> {
    let (trace, model) = Trace::new(build, options, ranks, (1, options.sequence), false)?;
    let logits = model.forward(&trace.tokens, false)?;
    let vocabulary = logits.dim(D::Minus1)?.min(trace.smallest_table());
    let logits = logits.contiguous()?.to_dtype(DType::F32)?;
    let program = forward(&trace, "logits", Output::everywhere("logits", logits.id()), ranks, stages, target)?;
    Ok((program, vocabulary))
}

/// A program of the forward pass alone, cut where the training step is.
fn forward(
    trace: &Trace,
    name: &str,
    output: Output,
    ranks: &RankPlan,
    stages: &ParameterStages,
    target: Target,
) -> Result<Program> {
    cut_like(&mut trace.lock(), stages);
    lower(&Lowering {
        name,
        graph: &trace.lock(),
        table: &ranks.forward_table(),
        rank: ranks.at.pipeline,
        outputs: &[output],
        roles: &HashMap::new(),
        recomputation: &RematPlan::default(),
        evicts: false,
        target,
    })
}

/// What only a later program reads would not follow the training.
fn expect_same_parameters(programs: &[Program]) -> Result<()> {
    let held = |program: &Program| -> BTreeSet<String> {
        let always = program.buffers.iter().filter(|b| matches!(b.kind, BufferKind::Always { .. }));
        always.filter(|b| b.label.role == Role::Parameter).map(|b| b.label.tensor.clone()).collect()
    };
    let trained = held(&programs[0]);
    for program in &programs[1..] {
        if let Some(name) = held(program).difference(&trained).next() {
            let why = format!("{:?} reads {name:?}, which the training step does not read", program.name);
            let remedy = "read it in the loss too, or use one rank per copy of the model";
            return Err(Error::config("a model for several ranks", why, remedy));
        }
    }
    Ok(())
}

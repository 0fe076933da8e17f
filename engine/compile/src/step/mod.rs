//! Compiles a model's source to the executable of everything that a trainer runs.
//!
//! [`compile_step`] is the table of contents of this crate. Each part that it calls has its own file: recording
//! (`record`), the update (`update`), recomputation ([`recompute`](crate::recompute)), lowering and the passes
//! (`lower`, `passes`), and addresses (`link`).

#[cfg(test)]
mod budget_reference;
mod equal_layers;
mod equal_ranks;
mod generation;
mod graph;
mod options;
mod overflow;
mod ranks;
mod record;
mod shard;
#[cfg(test)]
mod split_reference;
pub mod text;
mod update;

use std::collections::{BTreeSet, HashMap};

use candle_core::{D, DType};
use gapless_alloc::{Role, lower_bound};
use gapless_graph::nn::VarBuilder;
use gapless_graph::shard::Shares;
use gapless_graph::{Causality, Culprit, LossPart, Model, SequenceLoss, Sequences, ValueId, cache_obstacle, causality};
use gapless_parallel::{Action, Kind, StageId};

pub use self::equal_layers::EqualLayers;
pub use self::generation::{Generation, compile_inference};
pub use self::graph::{RankSketch, StepGraph, WholeStep};
pub use self::options::{MemoryOptions, ParameterGroup, Precision, StepOptions, UpdateOptions};
pub use self::overflow::Overflow;
pub use self::ranks::{Pipeline, RankPlan, Share};
use self::record::{Held, Trace, TrainStep};
pub use self::update::{CheckpointLayout, Shard};
use crate::Executable;
use crate::error::{Error, Result};
use crate::lifetimes::lifetimes;
use crate::link::{compile, height};
use crate::lower::{alive_nodes, lower};
use crate::lowering::{Lowering, Output, Target};
use crate::partition::partition_like;
use crate::passes::dump;
use crate::program::{BufferKind, Program};
use crate::recompute::{RematPlan, Resolving, stages_that_recompute_twice};

/// A function that builds any model. It is a trait object so that recording and compiling steps need not be
/// instantiated for every model type.
pub type Build<'a> = dyn Fn(VarBuilder) -> gapless_graph::Result<Box<dyn Model + 'a>> + 'a;

/// Turns a function that builds one type of model into a [`Build`].
pub fn boxed_build<'a, M: Model + 'a>(
    build: impl Fn(VarBuilder) -> gapless_graph::Result<M> + 'a,
) -> impl Fn(VarBuilder) -> gapless_graph::Result<Box<dyn Model + 'a>> + 'a {
    move |vb| Ok(Box::new(build(vb)?))
}

/// Number of micro-batches per pipeline rank after which every schedule is in a steady state. From then on, the
/// schedule keeps the same values for each further micro-batch.
const MICRO_BATCHES_PER_RANK: usize = 3;

/// The input that carries the optimizer's scalars of a step.
pub const SCALARS_INPUT: &str = "step.scalars";

/// The input that holds the limits of a guarded step. The step is skipped if its loss exceeds the first limit, or its
/// norm the second.
pub const LIMITS_INPUT: &str = "step.limits";

/// Inputs of a step over packed documents, in addition to `tokens` and `targets`. All are [batch, sequence]:
///
/// - `starts` (u32): index of the first token of each token's document;
/// - `positions` (u32): position of each token in its document;
/// - `weights` (f32): weight of each token's loss;
/// - `routed` (f32): weight of each token in the statistics of routers.
pub const DOCUMENT_INPUTS: [&str; 4] = ["starts", "positions", "weights", "routed"];

/// The input of a step over preferences that holds the log-likelihood of each sequence under the reference model: f32
/// `[batch]`. A step without a reference lacks it.
pub const REFERENCE_INPUT: &str = "reference";

/// The input of a step over answers with labels (`kto`): f32 `[batch]`, 1 for a desirable answer and 0 for an undesirable
/// one.
pub const LABELS_INPUT: &str = "labels";

/// The output of an evaluation of preferences that holds the log-likelihood of each sequence.
pub const LOG_LIKELIHOODS: &str = "log_likelihoods";

/// The outputs of a training step for the terms of the loss. A step has only the outputs for terms that its loss
/// contains.
pub const LOSS_PARTS: [(LossPart, &str); 7] = [
    (LossPart::Likelihood, "likelihood"),
    (LossPart::Balance, "loss of balance"),
    (LossPart::RouterZ, "z-loss of routers"),
    (LossPart::ChosenReward, "rewards of chosen answers"),
    (LossPart::RejectedReward, "rewards of rejected answers"),
    (LossPart::RewardMargin, "margins of rewards"),
    (LossPart::RewardAccuracy, "accuracy of rewards"),
];

/// Information about the compiled programs that a trainer needs in addition to the executable.
#[derive(Debug)]
pub struct CompiledStep {
    /// Number of trained parameters.
    pub parameters: u64,
    /// Number of token ids, which is the size of the vocabulary.
    pub vocabulary: usize,
    /// The tensors that ranks keep between steps.
    pub layout: CheckpointLayout,
    /// Names of the watched values that the step outputs.
    pub watched: Vec<String>,
    /// A digest of the model's graph before its gradients are added. The digest is the same on all ranks of a mesh. It
    /// is empty if the model is not trained.
    pub model: String,
    /// Whether the logits of a token depend on later tokens.
    pub causality: Causality,
    /// The operation because of which sequences are continued without the caches that the options set.
    pub uncached: Option<Culprit>,
    /// The program of the training step; `None` if the model is not trained.
    pub program: Option<Program>,
}

/// Returns the name of the output that holds a parameter's gradient.
pub fn gradient_output(parameter: &str) -> String {
    format!("gradient of {parameter}")
}

/// Returns the name of the output that holds a watched value.
pub fn watched_output(name: &str) -> String {
    format!("watched {name}")
}

/// Compiles into one arena the programs for the training step, the evaluation and the logits of one sequence. If
/// [`StepOptions::caches`] returns caches and the model can use them, adds the programs `prefill` and `decode`.
///
/// # Errors
/// Returns an error if the options or the model's shapes do not fit together, and [`Error::OverBudget`] if nothing fits
/// the budget.
pub fn compile_step(
    build: &Build<'_>,
    options: &StepOptions,
    ranks: &RankPlan,
    target: Target,
) -> Result<(Executable, CompiledStep)> {
    options.check()?;
    // The graph of the training step: the forward, its stages, its gradients, the update.
    let step = record(build, options, ranks)?;
    // Two programs of the forward alone, with parameters on the same ranks as in the training step.
    let evaluate = evaluation(build, options, ranks, &step.held, target)?;
    let logits = Logits::record(build, options, ranks, &step.held, target)?;
    // The programs that continue sequences. Their caches share memory with the activations of the training step.
    let (generation, uncached) = generation::cached(build, (options, ranks), &step.held, target, &logits)?;
    let Logits { program: logits, vocabulary, causality, obstacle: _ } = logits;
    // What is recomputed is chosen so that all programs fit. Then the training step is lowered, and the passes run.
    let helped = |error: Error| error.with_remedies(options);
    let recomputation = {
        let others: Vec<&Program> = [&evaluate, &logits].into_iter().chain(&generation).collect();
        choose_recomputation(&step, options, ranks, target, &others).map_err(helped)?
    };
    let train = step.lower(options, ranks, target, &recomputation)?;
    let programs: Vec<Program> = [train, evaluate, logits].into_iter().chain(generation).collect();
    programs.iter().for_each(|program| dump("compile", program));
    if ranks.mesh.pipeline > 1 || ranks.expert_ranks().ranks > 1 || ranks.mesh.tensor > 1 {
        expect_same_parameters(&programs)?;
    }
    // Lifetimes, the plan, its check, and addresses.
    let executable = compile(&programs, &options.planning()).map_err(helped)?;
    let TrainStep { parameters, layout, watched, model, .. } = step;
    let program = programs.into_iter().next();
    Ok((executable, CompiledStep { parameters, vocabulary, layout, watched, model, causality, uncached, program }))
}

/// Returns the program of a rank's training step, without addresses. The checker and the simulator of `parallel` work
/// on it.
///
/// # Errors
/// Returns an error if the options or the model's shapes do not fit together, or if there is no such rank.
pub fn program<M: Model>(
    build: impl Fn(VarBuilder) -> gapless_graph::Result<M>,
    options: &StepOptions,
    rank: usize,
    target: Target,
) -> Result<Program> {
    lowered(&boxed_build(build), options, rank, target)
}

/// Plans a rank's training step alone, without the evaluation and sampling programs that share the arena in a trainer.
/// Reserves no memory for the arena.
///
/// # Errors
/// Returns the errors of [`program`], and [`Error::OverBudget`] if nothing fits the budget.
pub fn plan<M: Model>(
    build: impl Fn(VarBuilder) -> gapless_graph::Result<M>,
    options: &StepOptions,
    rank: usize,
    target: Target,
) -> Result<Executable> {
    compile(&[program(build, options, rank, target)?], &options.planning())
        .map_err(|error| error.with_remedies(options))
}

fn lowered(build: &Build<'_>, options: &StepOptions, rank: usize, target: Target) -> Result<Program> {
    options.check()?;
    let ranks = RankPlan::of(options, rank)?;
    let step = record(build, options, &ranks)?;
    let recomputation =
        choose_recomputation(&step, options, &ranks, target, &[]).map_err(|error| error.with_remedies(options))?;
    step.lower(options, &ranks, target, &recomputation)
}

/// Records the graph of a training step.
fn record(build: &Build<'_>, options: &StepOptions, ranks: &RankPlan) -> Result<TrainStep> {
    divided(record_whole(build, options, ranks)?, options, ranks)
}

/// Records the forward and the gradients of a training step.
fn record_whole(build: &Build<'_>, options: &StepOptions, ranks: &RankPlan) -> Result<TrainStep> {
    let mut step = TrainStep::forward(build, options, ranks)?;
    step.partition(options, ranks)?;
    let text = step.graph().to_string();
    step.model = blake3::hash(text.as_bytes()).to_hex()[..16].to_owned();
    step.differentiate(options)?;
    Ok(step)
}

/// Divides a step among its ranks, and records the update.
fn divided(mut step: TrainStep, options: &StepOptions, ranks: &RankPlan) -> Result<TrainStep> {
    step.shard(options, ranks)?;
    step.update(options, ranks)?;
    dump("graph", &*step.graph());
    Ok(step)
}

/// Decides which values a step recomputes. In a split backward, a stage recomputes twice if that lowers the rank's peak
/// of live bytes, unless this could make tensor ranks with unequal parts repeat other exchanges.
fn choose_recomputation(
    step: &TrainStep,
    options: &StepOptions,
    ranks: &RankPlan,
    target: Target,
    others: &[&Program],
) -> Result<RematPlan> {
    let _span = tracing::info_span!("recompute").entered();
    let once = policy(step, options, ranks, target, others)?;
    let Some(stages) = can_be_twice(options, &ranks.table[ranks.at.pipeline], &once) else { return Ok(once) };
    let graph = step.graph();
    // All ranks of a group must repeat the same collectives, and the peaks of ranks with unequal parts may lead to others.
    if once.repeats_exchanges(&graph) && !step.held.is_even(ranks.mesh.tensor) {
        return Ok(once);
    }
    let short = shortened(options, ranks);
    let (twice, _) = stages_that_recompute_twice(stages, |stages| {
        let twice = once.clone().recompute_in_both_halves(&graph, stages);
        let train = step.lower_graph(&graph, options, &short, target, &twice)?;
        let programs: Vec<&Program> = [&train].into_iter().chain(others.iter().copied()).collect();
        Ok::<u64, Error>(lower_bound(&lifetimes(&programs)?.problem))
    })?;
    Ok(once.recompute_in_both_halves(&graph, &twice))
}

/// Returns the plan of the same rank in a shorter step, with just enough micro-batches for the schedule to reach its
/// steady state.
fn shortened(options: &StepOptions, ranks: &RankPlan) -> RankPlan {
    let fewer = MICRO_BATCHES_PER_RANK * options.mesh.pipeline;
    let short = (fewer < options.micro_batches)
        .then(|| RankPlan::new(options.mesh, options.mesh.rank(ranks.at), &options.pipeline, fewer).ok());
    short.flatten().unwrap_or_else(|| ranks.clone())
}

/// Returns the stages of a rank's actions that may recompute twice: those with a split backward. Returns `None` if there are
/// no such stages, or if no policy names the values to drop. Also returns `None` with [`Overflow::Recompute`], because the
/// recomputation of evicted rows reads values that must be kept.
fn can_be_twice<'a>(
    options: &StepOptions,
    row: impl IntoIterator<Item = &'a Action>,
    once: &RematPlan,
) -> Option<BTreeSet<StageId>> {
    let split = row.into_iter().filter(|action| action.kind == Kind::BackwardInput);
    let stages: BTreeSet<StageId> = split.map(|action| action.stage).collect();
    let is_named = options.memory.budget.is_none() && !once.is_empty();
    (is_named && options.memory.overflow != Overflow::Recompute && !stages.is_empty()).then_some(stages)
}

/// Resolves the policy or, if there is a budget, searches for the recomputation that fits the budget. The budget is for
/// the step and the programs `others` in one arena. Each plan that the search tries is lowered and placed.
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
        let train = step.lower_graph(&graph, options, ranks, target, recomputation)?;
        let programs: Vec<&Program> = [&train].into_iter().chain(others.iter().copied()).collect();
        height(&programs, options.planning_within(capacity))
    })
}

/// Returns a program that computes the loss of as many sequences as a micro-batch has, without dropout.
fn evaluation(
    build: &Build<'_>,
    options: &StepOptions,
    ranks: &RankPlan,
    held: &Held,
    target: Target,
) -> Result<Program> {
    let (mut trace, model) = Trace::new(build, options, ranks, (options.evaluation_batch(), options.sequence), false)?;
    if options.preference.is_some() {
        trace.lock().set_sequence_loss(SequenceLoss::LogLikelihoods);
    }
    let loss = trace.loss(&*model, options.documents, false)?;
    let log_likelihoods = trace.lock().log_likelihoods();
    let named = [Some(("loss", loss.id())), log_likelihoods.map(|id| (LOG_LIKELIHOODS, id))];
    forward(&mut trace, "evaluate", &named.into_iter().flatten().collect::<Vec<_>>(), (options, ranks), held, target)
}

/// The forward of one sequence.
struct Logits {
    /// The program that computes the logits in f32.
    program: Program,
    /// Number of token ids.
    vocabulary: usize,
    causality: Causality,
    /// The operation because of which the model cannot continue sequences with caches, as far as the forward of a whole
    /// sequence shows it.
    obstacle: Option<Culprit>,
}

impl Logits {
    fn record(build: &Build<'_>, options: &StepOptions, ranks: &RankPlan, held: &Held, target: Target) -> Result<Self> {
        let (mut trace, model) = Trace::new(build, options, ranks, (1, options.sequence), false)?;
        let logits = model.forward(&trace.tokens, false)?;
        let vocabulary = logits.dim(D::Minus1)?.min(trace.smallest_table());
        let (causality, obstacle) = {
            let (graph, tokens) = (trace.lock(), trace.tokens.id());
            (causality(&graph, tokens, logits.id()), cache_obstacle(&graph, tokens, logits.id()))
        };
        let logits = logits.contiguous()?.to_dtype(DType::F32)?;
        let program = forward(&mut trace, "logits", &[("logits", logits.id())], (options, ranks), held, target)?;
        Ok(Self { program, vocabulary, causality, obstacle })
    }
}

/// Returns a program of the forward alone, with the same stages and the same parts of parameters as the training step.
fn forward(
    trace: &mut Trace,
    name: &str,
    outputs: &[(&str, ValueId)],
    (options, ranks): (&StepOptions, &RankPlan),
    held: &Held,
    target: Target,
) -> Result<Program> {
    partition_like(&mut trace.lock(), &held.stages);
    // A step that continues sequences may have fewer tokens than there are ranks.
    let is_continued = matches!(trace.lock().sequences(), Sequences::Continued { .. });
    let mut ids: Vec<ValueId> = outputs.iter().map(|&(_, id)| id).collect();
    for mut sharing in ranks.sharings(options) {
        if let Shares::Parameters { sequence } = &mut sharing.shares {
            *sequence &= !is_continued;
        }
        let sharded = trace.shard(&sharing, &ids, &[], Some(&held.windows))?;
        ids.iter_mut().for_each(|id| *id = sharded.value(*id));
    }
    // Parameters that shard ranks divide are gathered here too.
    let sharing = ranks.full_sharing(options).filter(|sharing| sharing.parameters);
    let gathering = sharing.map(|sharing| trace.fully_shard(&sharing, &held.divided, &[])).transpose()?;
    let id_of = |id| gathering.as_ref().map_or(id, |gathering| gathering.value(id));
    let named = outputs.iter().zip(ids);
    let outputs: Vec<Output> = named.map(|(&(name, _), id)| Output::everywhere(name, id_of(id))).collect();
    lower(&Lowering {
        name,
        graph: &trace.lock(),
        table: &ranks.forward_table(),
        rank: ranks.at.pipeline,
        outputs: &outputs,
        roles: &HashMap::new(),
        recomputation: &RematPlan::default(),
        evicts: false,
        overlap: options.overlap(),
        target,
    })
}

/// Checks that the other programs read no parameter that the training step lacks, because such a parameter would not be
/// updated.
fn expect_same_parameters(programs: &[Program]) -> Result<()> {
    let held = |program: &Program| -> BTreeSet<String> {
        let always = program.buffers.iter().filter(|b| matches!(b.kind, BufferKind::Persistent { .. }));
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

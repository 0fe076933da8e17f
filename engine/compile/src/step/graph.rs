//! The graph of a step, recorded once and lowered many times.
//!
//! - In: a model's source, and the options of a step.
//! - Out: the programs of any rank of the pipeline, under any recompute policy, and any schedule with the same number
//!   of stages.
//! - Never: a program for options with which the graph was not recorded.

use std::sync::{MutexGuard, OnceLock};

use gapless_graph::Graph;
use gapless_parallel::{Action, Mesh};

use super::equal_ranks::{first_equal_ranks, number_ops};
use super::record::TrainStep;
use super::{Build, RankPlan, StepOptions, can_be_twice, choose_recomputation, divided, policy, record, record_whole};
use crate::error::{Error, Result};
use crate::lower::{Shared, lower_as};
use crate::lowering::{Lowering, Target};
use crate::program::Program;
use crate::recompute::RematPlan;

/// The graph of a training step: forward, gradients and update of all stages.
#[derive(Debug)]
pub struct StepGraph {
    step: TrainStep,
    key: String,
    /// The numbers of the nodes' operations, once a sketch has needed them.
    ops: OnceLock<Vec<u64>>,
}

/// The forward and the gradients of a training step, before ranks divide tensors and update parameters. Meshes on which each
/// rank has the same share of the batch and the same stages have them in common.
#[derive(Debug)]
pub struct WholeStep {
    step: TrainStep,
    key: String,
}

impl WholeStep {
    /// Returns a text that contains all options on which the forward and the gradients depend. For the same model, equal
    /// texts mean equal graphs.
    pub fn key(options: &StepOptions) -> String {
        let StepOptions { batch, micro_batches, sequence, documents, precision, mesh, memory, pipeline, .. } = options;
        let StepOptions { trainable, loss, preference, optimizer, update, .. } = options;
        let (parts, stages, has_context) = (options.parts(), options.stages(), mesh.context > 1);
        let experts = first_rank(options).expert_ranks();
        format!(
            "{batch} {parts} {} {sequence} {documents} {precision:?} {stages} {:?} {has_context} {experts:?} {trainable:?} \
             {loss:?} {preference:?} {optimizer:?} {update:?} {:?}",
            *micro_batches > 1,
            pipeline.cut,
            memory.overflow
        )
    }

    /// True if ranks divide tensors or parameters. Only then is the graph of a step made from its forward and gradients: if
    /// not, the update is recorded in the same graph.
    pub fn is_divided(options: &StepOptions) -> bool {
        let ranks = first_rank(options);
        ranks.sharings(options).next().is_some() || ranks.full_sharing(options).is_some()
    }

    /// Records the forward and the gradients of a step.
    ///
    /// # Errors
    /// Returns an error if the options or the model's shapes do not fit together.
    pub fn record(build: &Build<'_>, options: &StepOptions) -> Result<Self> {
        options.check()?;
        Ok(Self { step: record_whole(build, options, &first_rank(options))?, key: Self::key(options) })
    }
}

/// Returns the plan of the first rank. The actions of a rank are only needed when its program is lowered.
pub(super) fn first_rank(options: &StepOptions) -> RankPlan {
    let (mesh, stages) = (options.mesh, options.stages());
    RankPlan { mesh, at: mesh.coordinate(mesh.fullest(0)), stages, table: Vec::new() }
}

fn other_options() -> Error {
    Error::config("options", "the step's graph was recorded with other options", "record it with these options")
}

/// The programs of a pipeline rank for two micro-batches ([`StepGraph::sketch`]).
#[derive(Debug)]
pub struct RankSketch {
    /// The rank.
    pub rank: usize,
    /// The first rank whose programs are equal to those of this rank: this rank itself, or an earlier one. Names differ,
    /// the numbers of stages and of the peers of micro-batches' messages are those of the other rank, and so is the order
    /// of values that the update receives.
    pub like: usize,
    /// The programs; none if they are those of an earlier rank.
    pub programs: Vec<Program>,
}

impl StepGraph {
    /// Returns a text that contains all options on which the graph depends. For the same model, equal texts mean equal
    /// graphs. The text contains neither the order of the schedule, nor which values are recomputed, compressed or
    /// offloaded, nor how many collectives of shard ranks may be under way.
    pub fn key(options: &StepOptions) -> String {
        let StepOptions {
            batch,
            micro_batches,
            sequence,
            sequence_parallel,
            zero_stage,
            documents,
            precision,
            mesh,
            memory,
            ..
        } = options;
        let StepOptions { trainable, loss, preference, optimizer, update, pipeline, keep_gradients, .. } = options;
        let (stages, cut) = (options.stages(), &pipeline.cut);
        format!(
            "{batch} {micro_batches} {sequence} {sequence_parallel} {zero_stage} {documents} {precision:?} {stages} {cut:?} {:?} {trainable:?} {loss:?} {preference:?} {optimizer:?} {update:?} \
             {:?} {} {keep_gradients}",
            Mesh { pipeline: 1, ..*mesh },
            memory.overflow,
            memory.release_gradients
        )
    }

    /// Records the graph of a step. The graph is the same on the first rank of every stage.
    ///
    /// # Errors
    /// Returns an error if the options or the model's shapes do not fit together.
    pub fn record(build: &Build<'_>, options: &StepOptions) -> Result<Self> {
        options.check()?;
        Ok(Self::of(record(build, options, &first_rank(options))?, options))
    }

    /// Like [`Self::record`], but starts from the forward and the gradients `whole` if ranks divide tensors.
    ///
    /// # Errors
    /// Returns the errors of [`Self::record`], and an error if `whole` was recorded with options of another
    /// [key](WholeStep::key).
    pub fn record_from(whole: &WholeStep, build: &Build<'_>, options: &StepOptions) -> Result<Self> {
        if !WholeStep::is_divided(options) {
            return Self::record(build, options);
        }
        options.check()?;
        if WholeStep::key(options) != whole.key {
            return Err(other_options());
        }
        Ok(Self::of(divided(whole.step.clone(), options, &first_rank(options))?, options))
    }

    fn of(step: TrainStep, options: &StepOptions) -> Self {
        Self { step, key: Self::key(options), ops: OnceLock::new() }
    }

    /// Locks the recorded graph. No program can be lowered while the guard is held.
    pub fn graph(&self) -> MutexGuard<'_, Graph> {
        self.step.graph()
    }

    /// Returns the number of trained parameters over all ranks.
    pub fn parameters(&self) -> u64 {
        self.step.parameters
    }

    /// Returns the program of a rank of the pipeline. If several ranks have the same stages, returns the program of the
    /// first of these ranks.
    ///
    /// # Errors
    /// Returns the errors of [`program`](super::program), and an error if the graph was recorded with other options.
    pub fn program(&self, options: &StepOptions, rank: usize, target: Target) -> Result<Program> {
        let first = self.first_of(options, rank)?;
        let ranks = RankPlan::of(options, first)?;
        self.lower(options, &ranks, target)
    }

    /// Returns programs of all pipeline ranks, or of one, for a table with fewer micro-batches. Each micro-batch costs and
    /// keeps as much as in the whole step. Usually, a rank has one program. If the policy may recompute twice in a split
    /// backward, there are two: the first program never recomputes twice, and the second always does. A budget has no
    /// effect.
    ///
    /// # Errors
    /// Returns the errors of [`Self::program`].
    pub fn sketch(
        &self,
        options: &StepOptions,
        table: Vec<Vec<Action>>,
        only: Option<usize>,
        target: Target,
    ) -> Result<Vec<RankSketch>> {
        let at = options.mesh.coordinate(self.first_of(options, 0)?);
        let ranks = RankPlan { mesh: options.mesh, at, stages: options.stages(), table };
        let once = policy(&self.step, options, &ranks, target, &[])?;
        let graph = self.graph();
        let both = can_be_twice(options, ranks.table.iter().flatten(), &once)
            .map(|stages| once.clone().recompute_in_both_halves(&graph, &stages));
        let plans: Vec<RematPlan> = [Some(once), both].into_iter().flatten().collect();
        let lowering = |rank, plan| Lowering { rank, ..self.step.lowering(&graph, options, &ranks, target, plan) };
        let last = lowering(0, &plans[plans.len() - 1]);
        let shared = Shared::new(&last);
        let lowered = match only {
            Some(rank) => vec![(rank, rank)],
            None => {
                let ops = self.ops.get_or_init(|| number_ops(&graph));
                first_equal_ranks(&last, &shared, ops)?.into_iter().enumerate().collect()
            }
        };
        let of_rank = |(rank, like): (usize, usize)| {
            let plans = if like == rank { &plans[..] } else { &[] };
            let programs = plans.iter().map(|plan| lower_as(&lowering(rank, plan), &shared)).collect::<Result<_>>()?;
            Ok(RankSketch { rank, like, programs })
        };
        lowered.into_iter().map(of_rank).collect()
    }

    /// Returns the first rank that has the stages of pipeline rank `rank`. Returns an error if the graph was recorded
    /// with other options.
    fn first_of(&self, options: &StepOptions, rank: usize) -> Result<usize> {
        if Self::key(options) != self.key {
            return Err(other_options());
        }
        if rank >= options.mesh.pipeline {
            let why = format!("rank {rank} is not one of a pipeline of {} ranks", options.mesh.pipeline);
            return Err(Error::config("rank", why, "count the pipeline's ranks from 0"));
        }
        Ok(options.mesh.fullest(rank))
    }

    fn lower(&self, options: &StepOptions, ranks: &RankPlan, target: Target) -> Result<Program> {
        let recomputation = choose_recomputation(&self.step, options, ranks, target, &[])?;
        self.step.lower(options, ranks, target, &recomputation)
    }
}

#[cfg(test)]
mod tests {
    use super::super::boxed_build;
    use super::super::budget_reference::Chain;
    use super::*;

    /// Steps on meshes whose ranks have equal shares of the batch are recorded from the same forward and gradients, and are
    /// the same as if each was recorded on its own.
    #[test]
    fn meshes_with_equal_shares_have_forward_and_gradients_in_common() {
        let of = |mesh: Mesh, micro_batches, zero_stage, sequence_parallel| {
            let sizes = StepOptions { batch: 16, micro_batches, sequence: 16, ..StepOptions::default() };
            StepOptions { mesh, zero_stage, sequence_parallel, ..sizes }
        };
        let one = Mesh { pipeline: 2, ..Mesh::default() };
        let steps = [
            of(Mesh { data: 2, ..one }, 4, 3, false),
            of(Mesh { tensor: 2, ..one }, 8, 3, false),
            of(Mesh { tensor: 2, ..one }, 8, 3, true),
            of(Mesh { shard: 2, ..one }, 4, 2, false),
            of(Mesh { shard: 2, ..one }, 4, 3, false),
            of(Mesh { shard: 2, tensor: 2, data: 2, ..one }, 2, 3, true),
        ];
        let build = boxed_build(|vb| Chain::new(&[64, 96, 64, 64], vb));
        let whole = WholeStep::record(&build, &steps[0]).unwrap();
        let before = whole.step.graph().to_string();
        let mut texts = Vec::new();
        for options in &steps {
            let [own, shared] = [StepGraph::record(&build, options), StepGraph::record_from(&whole, &build, options)];
            let [own, shared] = [own, shared].map(|graph| graph.unwrap().graph().to_string());
            assert_eq!(own, shared, "{options:?}");
            texts.push(own);
        }
        assert_eq!(whole.step.graph().to_string(), before);
        texts.sort_unstable();
        texts.dedup();
        assert_eq!(texts.len(), steps.len());
        let other = of(Mesh { tensor: 2, ..one }, 4, 3, false);
        let refused = StepGraph::record_from(&whole, &build, &other).unwrap_err();
        assert!(refused.to_string().contains("other options"), "{refused}");
    }
}

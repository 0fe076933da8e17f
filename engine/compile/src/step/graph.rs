//! A step's graph, recorded once for everything that is lowered from it.
//!
//! In: a model's source and the options of a step. Out: the programs of any rank of its pipeline, under any schedule of as many stages
//! and any recompute policy. Never: a graph that the options were not recorded with.

use std::sync::MutexGuard;

use gapless_graph::Graph;
use gapless_parallel::Action;

use super::record::TrainStep;
use super::{Build, RankPlan, StepOptions, can_be_twice, policy, recompute, record};
use crate::error::{Error, Result};
use crate::lowering::Target;
use crate::program::Program;

/// The graph of a training step: forward, gradients and update of all stages.
#[derive(Debug)]
pub struct StepGraph {
    step: TrainStep,
    key: String,
}

impl StepGraph {
    /// What of the options decides the graph, as text: equal texts, equal graphs of one model. Neither the order of a schedule nor what
    /// is recomputed, compressed or offloaded is in it.
    pub fn key(options: &StepOptions) -> String {
        let StepOptions { batch, micro_batches, sequence, documents, precision, mesh, memory, .. } = options;
        let StepOptions { trainable, loss, optimizer, update, pipeline, keep_gradients, .. } = options;
        let (stages, cut) = (options.stages(), &pipeline.cut);
        format!(
            "{batch} {micro_batches} {sequence} {documents} {precision:?} {stages} {cut:?} {} {} {trainable:?} {loss:?} {optimizer:?} {update:?} \
             {:?} {} {keep_gradients}",
            mesh.data, mesh.expert, memory.overflow, memory.release_gradients
        )
    }

    /// Records the graph that the first rank of every stage has.
    ///
    /// # Errors
    /// When the options or the model's shapes do not fit together.
    pub fn record(build: &Build<'_>, options: &StepOptions) -> Result<Self> {
        options.check()?;
        // Which rank does what when is asked about when it is lowered.
        let (mesh, stages) = (options.mesh, options.stages());
        let ranks = RankPlan { mesh, at: mesh.coordinate(0), stages, table: Vec::new() };
        Ok(Self { step: record(build, options, &ranks)?, key: Self::key(options) })
    }

    /// What is recorded; nothing is lowered while it is held.
    pub fn graph(&self) -> MutexGuard<'_, Graph> {
        self.step.graph()
    }

    /// Trained numbers, of all ranks together.
    pub fn parameters(&self) -> u64 {
        self.step.parameters
    }

    /// The program of a rank of the pipeline: of the first with its stages.
    ///
    /// # Errors
    /// As [`program`](super::program), and when the graph was recorded with other options.
    pub fn program(&self, options: &StepOptions, rank: usize, target: Target) -> Result<Program> {
        let first = self.first_of(options, rank)?;
        let ranks = RankPlan::of(options, first)?;
        self.lower(options, &ranks, target)
    }

    /// The program of the same rank for a table of fewer micro-batches: what each of them costs and keeps, it does in the whole step.
    /// Where the schedule may have a split backward compute twice again, the program that never does, and the one that always does.
    ///
    /// # Errors
    /// As [`Self::program`].
    pub fn sketch(
        &self,
        options: &StepOptions,
        rank: usize,
        table: Vec<Vec<Action>>,
        target: Target,
    ) -> Result<Vec<Program>> {
        let (mesh, stages) = (options.mesh, options.stages());
        let at = mesh.coordinate(self.first_of(options, rank)?);
        let ranks = RankPlan { mesh, at, stages, table };
        let once = policy(&self.step, options, &ranks, target, &[])?;
        let mut programs = vec![self.step.lower(&ranks, target, &once)?];
        if let Some(stages) = can_be_twice(options, &ranks, &once) {
            let twice = once.twice_in(&self.graph(), &stages);
            programs.push(self.step.lower(&ranks, target, &twice)?);
        }
        Ok(programs)
    }

    /// The first rank with the stages of a rank of the pipeline, if the graph is that of such a step.
    fn first_of(&self, options: &StepOptions, rank: usize) -> Result<usize> {
        if Self::key(options) != self.key {
            let why = "the step's graph was recorded with other options";
            return Err(Error::config("options", why, "record it with these options"));
        }
        if rank >= options.mesh.pipeline {
            let why = format!("rank {rank} is not one of a pipeline of {} ranks", options.mesh.pipeline);
            return Err(Error::config("rank", why, "count the pipeline's ranks from 0"));
        }
        Ok(rank * options.mesh.expert)
    }

    fn lower(&self, options: &StepOptions, ranks: &RankPlan, target: Target) -> Result<Program> {
        let recomputation = recompute(&self.step, options, ranks, target, &[])?;
        self.step.lower(ranks, target, &recomputation)
    }
}

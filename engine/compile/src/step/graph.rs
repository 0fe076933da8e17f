//! The graph of a step, recorded once and lowered many times.
//!
//! - In: a model's source, and the options of a step.
//! - Out: the programs of any rank of the pipeline, under any recompute policy, and any schedule with the same number
//!   of stages.
//! - Never: a program for options with which the graph was not recorded.

use std::sync::MutexGuard;

use gapless_graph::Graph;
use gapless_parallel::{Action, Mesh};

use super::record::TrainStep;
use super::{Build, RankPlan, StepOptions, can_be_twice, choose_recomputation, policy, record};
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
    /// Returns a text that contains all options on which the graph depends. For the same model, equal texts mean equal
    /// graphs. The text contains neither the order of the schedule nor which values are recomputed, compressed or
    /// offloaded.
    pub fn key(options: &StepOptions) -> String {
        let StepOptions {
            batch,
            micro_batches,
            sequence,
            sequence_parallel,
            zero_stage,
            prefetch,
            reductions,
            documents,
            precision,
            mesh,
            memory,
            ..
        } = options;
        let StepOptions { trainable, loss, preference, optimizer, update, pipeline, keep_gradients, .. } = options;
        let (stages, cut) = (options.stages(), &pipeline.cut);
        format!(
            "{batch} {micro_batches} {sequence} {sequence_parallel} {zero_stage} {prefetch} {reductions} {documents} {precision:?} {stages} {cut:?} {:?} {trainable:?} {loss:?} {preference:?} {optimizer:?} {update:?} \
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
        // The actions of a rank are only needed when its program is lowered.
        let (mesh, stages) = (options.mesh, options.stages());
        let ranks = RankPlan { mesh, at: mesh.coordinate(mesh.fullest(0)), stages, table: Vec::new() };
        Ok(Self { step: record(build, options, &ranks)?, key: Self::key(options) })
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

    /// Returns programs of a pipeline rank for a table with fewer micro-batches. Each micro-batch costs and keeps as
    /// much as in the whole step. Usually there is one program. If the policy may recompute twice in a split backward,
    /// there are two: the first program never recomputes twice, and the second always does.
    ///
    /// # Errors
    /// Returns the errors of [`Self::program`].
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
            let twice = once.recompute_in_both_halves(&self.graph(), &stages);
            programs.push(self.step.lower(&ranks, target, &twice)?);
        }
        Ok(programs)
    }

    /// Returns the first rank that has the stages of pipeline rank `rank`. Returns an error if the graph was recorded
    /// with other options.
    fn first_of(&self, options: &StepOptions, rank: usize) -> Result<usize> {
        if Self::key(options) != self.key {
            let why = "the step's graph was recorded with other options";
            return Err(Error::config("options", why, "record it with these options"));
        }
        if rank >= options.mesh.pipeline {
            let why = format!("rank {rank} is not one of a pipeline of {} ranks", options.mesh.pipeline);
            return Err(Error::config("rank", why, "count the pipeline's ranks from 0"));
        }
        Ok(options.mesh.fullest(rank))
    }

    fn lower(&self, options: &StepOptions, ranks: &RankPlan, target: Target) -> Result<Program> {
        let recomputation = choose_recomputation(&self.step, options, ranks, target, &[])?;
        self.step.lower(ranks, target, &recomputation)
    }
}

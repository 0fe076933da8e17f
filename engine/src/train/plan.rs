//! What a training step takes, and its programs, before there is a trainer.

use gapless_compile::report::Report;
use gapless_compile::step::{self, Build, RankPlan, StepGraph, of_any};
use gapless_compile::{Executable, Program, Target, compile};
use gapless_graph::Model;
use gapless_graph::nn::VarBuilder;
use gapless_parallel::Action;

use super::{TrainOptions, Trainer};
use crate::error::Result;

impl Trainer {
    /// Plans the training step of a model without reserving a byte: what rank 0 of its mesh would take, exactly, on the CPU, or on
    /// a GPU if the options name one. In [`TrainOptions::dtype`] bf16 too.
    ///
    /// # Errors
    /// When the options or the model's shapes do not fit together.
    pub fn plan<M: Model>(
        build: impl Fn(VarBuilder) -> gapless_graph::Result<M>,
        options: &TrainOptions,
    ) -> Result<Executable> {
        Self::plan_rank(build, options, 0)
    }

    /// [`Self::plan`] for any rank of the mesh.
    ///
    /// # Errors
    /// As [`Self::plan`], or when there is no such rank.
    pub fn plan_rank<M: Model>(
        build: impl Fn(VarBuilder) -> gapless_graph::Result<M>,
        options: &TrainOptions,
        rank: usize,
    ) -> Result<Executable> {
        let within = options.planning_within(options.recompute.capacity());
        Ok(compile(&[Self::program(build, options, rank)?], &within)?)
    }

    /// What a rank's trainer takes in all, without reserving a byte: the training step, the evaluation and the sampling in one arena,
    /// as [`Self::report`] then says it.
    ///
    /// # Errors
    /// As [`Self::plan_rank`]; [`OverBudget`](gapless_compile::Error::OverBudget).
    pub fn plan_run<M: Model>(
        build: impl Fn(VarBuilder) -> gapless_graph::Result<M>,
        options: &TrainOptions,
        rank: usize,
    ) -> Result<Report> {
        options.check()?;
        let ranks = RankPlan::new(options.mesh, rank, &options.pipeline, options.micro_batches)?;
        let (executable, compiled) = step::compile_step(&of_any(build), &options.step(), &ranks, options.target())?;
        Ok(Report::of(&executable, compiled.parameters))
    }

    /// The program of a rank's training step, before anything has an address: what the checker and the simulator of
    /// `parallel` can be asked about.
    ///
    /// # Errors
    /// As [`Self::plan_rank`].
    pub fn program<M: Model>(
        build: impl Fn(VarBuilder) -> gapless_graph::Result<M>,
        options: &TrainOptions,
        rank: usize,
    ) -> Result<Program> {
        Self::program_for(build, options, rank, options.target())
    }

    /// [`Self::program`] for other kernels than those of [`TrainOptions::device`].
    ///
    /// # Errors
    /// As [`Self::plan_rank`].
    pub fn program_for<M: Model>(
        build: impl Fn(VarBuilder) -> gapless_graph::Result<M>,
        options: &TrainOptions,
        rank: usize,
        target: Target,
    ) -> Result<Program> {
        options.check()?;
        Ok(step::program(&of_any(build), &options.step(), rank, target)?)
    }

    /// The graph of a training step, from which [`Self::lower`] makes the programs of ranks, schedules and recompute policies without
    /// recording it anew.
    ///
    /// # Errors
    /// As [`Self::plan`].
    pub fn record(build: &Build<'_>, options: &TrainOptions) -> Result<StepGraph> {
        options.check()?;
        Ok(StepGraph::record(build, &options.step())?)
    }

    /// What of the options decides that graph: with equal texts, [`Self::record`] makes equal graphs of one model.
    pub fn graph_key(options: &TrainOptions) -> String {
        StepGraph::key(&options.step())
    }

    /// The program of a rank of the pipeline, from a graph that was recorded with such options.
    ///
    /// # Errors
    /// As [`Self::program`], and when the graph was recorded with options that make another.
    pub fn lower(graph: &StepGraph, options: &TrainOptions, rank: usize) -> Result<Program> {
        options.check()?;
        Ok(graph.program(&options.step(), rank, options.target())?)
    }

    /// The programs of a rank for a table of fewer micro-batches ([`StepGraph::sketch`]).
    ///
    /// # Errors
    /// As [`Self::lower`].
    pub fn sketch(
        graph: &StepGraph,
        options: &TrainOptions,
        rank: usize,
        table: Vec<Vec<Action>>,
    ) -> Result<Vec<Program>> {
        options.check()?;
        Ok(graph.sketch(&options.step(), rank, table, options.target())?)
    }
}

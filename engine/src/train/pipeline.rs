//! How a step is spread over ranks: which stage runs where, and in which order.

use std::fmt;
use std::sync::Arc;

use gapless_parallel::{Action, Coordinate, Kind, Mesh, OneForwardOneBackward, Schedule, Shape, StageId};

use super::TrainOptions;
use crate::communicator::Communicator;
use crate::compile::Cut;
use crate::cpu::Communicators;
use crate::error::{Error, Result};

/// The order of work in a pipeline, and how the model is cut for it.
#[derive(Clone)]
pub struct Pipeline {
    /// Who does what when.
    pub schedule: Arc<dyn Schedule + Send + Sync>,
    /// Stages per rank.
    pub chunks: usize,
    /// Where stages begin.
    pub cut: Cut,
}

impl Default for Pipeline {
    /// 1F1B, one stage per rank, balanced.
    fn default() -> Self {
        Self { schedule: Arc::new(OneForwardOneBackward), chunks: 1, cut: Cut::Balanced }
    }
}

impl fmt::Debug for Pipeline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { schedule, chunks, cut } = self;
        f.debug_struct("Pipeline")
            .field("schedule", &schedule.name())
            .field("chunks", chunks)
            .field("cut", cut)
            .finish()
    }
}

/// What one rank of a mesh needs to know to compile its programs.
#[derive(Debug, Clone)]
pub(super) struct RankPlan {
    pub mesh: Mesh,
    pub at: Coordinate,
    pub stages: usize,
    /// The actions of a training step, of every rank of the pipeline.
    pub table: Vec<Vec<Action>>,
}

impl RankPlan {
    /// # Errors
    /// When the mesh has no such rank, or the schedule does not exist for its shape.
    pub fn new(mesh: Mesh, rank: usize, pipeline: &Pipeline, micro_batches: usize) -> Result<Self> {
        let ranks = mesh.ranks()?;
        let fail = |why, remedy| Err(Error::Config { what: "mesh", why, remedy });
        if rank >= ranks {
            return fail(format!("rank {rank} of {ranks}"), "start as many ranks as the mesh has");
        }
        let number = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let (chunks, micro_batches) = (number(pipeline.chunks), number(micro_batches));
        let shape = Shape { ranks: number(mesh.pipeline), chunks, micro_batches };
        let table = pipeline.schedule.actions(&shape)?;
        if table.len() != mesh.pipeline {
            let why = format!("{} has {} rows for {} ranks", pipeline.schedule.name(), table.len(), mesh.pipeline);
            return Err(Error::Config { what: "schedule", why, remedy: "one row of actions per rank" });
        }
        let stages = mesh.pipeline * pipeline.chunks;
        let violations =
            gapless_parallel::check(&table, number(stages), micro_batches, gapless_parallel::Sends::Buffered);
        if let Some(violation) = violations.first() {
            let why = format!("{}: {violation}", pipeline.schedule.name());
            return Err(Error::Config {
                what: "schedule",
                why,
                remedy: "check its table with gapless_parallel::check",
            });
        }
        Ok(Self { mesh, at: mesh.coordinate(rank), stages, table })
    }

    /// Ranks with the same stages: each has a share of the batch.
    pub fn batch_ranks(&self) -> usize {
        self.mesh.data * self.mesh.expert
    }

    /// Which of them this is.
    pub fn batch_rank(&self) -> usize {
        self.at.data * self.mesh.expert + self.at.expert
    }

    /// Only the forward pass of one micro-batch.
    pub fn forward_table(&self) -> Vec<Vec<Action>> {
        let forward = |row: &Vec<Action>| {
            let mut stages: Vec<StageId> = row.iter().map(|action| action.stage).collect();
            stages.sort_unstable();
            stages.dedup();
            stages.into_iter().map(|stage| Action::new(Kind::Forward, stage.0, 0)).collect()
        };
        self.table.iter().map(forward).collect()
    }
}

/// Which of the equal parts of a batch a rank computes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Share {
    pub parts: usize,
    pub first: usize,
    /// How many parts on the next is: expert ranks take turns, so that an expert's rows come in the order of the batch.
    pub stride: usize,
    pub count: usize,
}

impl Share {
    /// A rank's of a training batch.
    pub fn of(options: &TrainOptions, at: Coordinate) -> Self {
        let &TrainOptions { micro_batches, mesh, .. } = options;
        let first = at.data * micro_batches * mesh.expert + at.expert;
        Self { parts: options.parts(), first, stride: mesh.expert, count: micro_batches }
    }
}

/// Refuses what is for several ranks.
pub(super) fn expect_one_rank(mesh: Mesh) -> Result<()> {
    let ranks = mesh.ranks()?;
    if ranks != 1 {
        let why = format!("a mesh of {ranks} ranks in a trainer of one");
        return Err(Error::Config { what: "mesh", why, remedy: "make it with Trainer::on, once per rank" });
    }
    Ok(())
}

/// A rank's ways to the others that it has to do with, out of the way to all.
pub(super) fn communicators(world: &mut dyn Communicator, mesh: Mesh) -> Result<Communicators> {
    let (size, ranks) = (world.size(), mesh.ranks()?);
    if size != ranks {
        let why = format!("{ranks} ranks, but {size} were started");
        return Err(Error::Config { what: "mesh", why, remedy: "data × pipeline × expert is the number of ranks" });
    }
    let at = mesh.coordinate(world.rank());
    let Mesh { expert, .. } = mesh;
    let pipeline = world.split(at.data * expert + at.expert, at.pipeline)?;
    let batch = world.split(at.pipeline, at.data * expert + at.expert)?;
    let mut communicators = Communicators { pipeline: Some(pipeline), batch: Some(batch), ..Default::default() };
    if expert > 1 {
        let copy = at.data * mesh.pipeline + at.pipeline;
        communicators.experts = Some(world.split(copy, at.expert)?);
        communicators.replicas = Some(world.split(at.pipeline * expert + at.expert, at.data)?);
    }
    Ok(communicators)
}

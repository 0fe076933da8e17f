//! The distribution of a step over ranks: which stage runs where, and in which order.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use gapless_graph::nn::ExpertRanks;
use gapless_parallel::{Action, Coordinate, Kind, Mesh, OneForwardOneBackward, Schedule, Shape, StageId, by_name};
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::{Deserialize, Serialize};

use super::{StepOptions, text};
use crate::error::{Error, Result};
use crate::partition::StagePartition;

/// The order of work in a pipeline, and the partition of the model into stages.
#[derive(Clone, Serialize, Deserialize)]
#[serde(try_from = "PipelineConfig", into = "PipelineConfig")]
pub struct Pipeline {
    /// The schedule, which gives each rank's actions in order.
    pub schedule: Arc<dyn Schedule + Send + Sync>,
    /// Stages per rank.
    pub chunks: usize,
    /// The stage boundaries.
    pub cut: StagePartition,
}

impl Default for Pipeline {
    /// 1F1B, with one stage per rank and balanced stages.
    fn default() -> Self {
        Self { schedule: Arc::new(OneForwardOneBackward), chunks: 1, cut: StagePartition::Balanced }
    }
}

/// A pipeline as a run file's `[pipeline]` describes it.
#[derive(Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct PipelineConfig {
    /// The name of the pipeline schedule; `gapless schedule --help` lists them. A name that ends in `.csv` is the path of
    /// a table, as `gapless schedule --csv` writes it.
    #[serde(default = "usual_schedule")]
    schedule: String,
    /// The number of stages per rank. The default is 1, 2 for V-shaped schedules, and for a table its own number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    chunks: Option<usize>,
    /// The stage boundaries. `"balanced"` minimizes the time of the slowest stage. `"equal"` gives all stages the same
    /// number of layers, as Megatron does. A list has the paths of the layers at which stages begin, except for the
    /// first stage: `["h.4", "h.8"]` makes three stages.
    #[serde(default, skip_serializing_if = "StagePartition::is_balanced", with = "text::cut")]
    #[schemars(schema_with = "text::cut::schema")]
    cut: StagePartition,
}

fn usual_schedule() -> String {
    Pipeline::default().schedule.name().to_owned()
}

impl From<Pipeline> for PipelineConfig {
    fn from(Pipeline { schedule, chunks, cut }: Pipeline) -> Self {
        Self { schedule: schedule.key(), chunks: Some(chunks), cut }
    }
}

impl TryFrom<PipelineConfig> for Pipeline {
    type Error = Error;

    fn try_from(PipelineConfig { schedule, chunks, cut }: PipelineConfig) -> Result<Self> {
        let schedule = by_name(&schedule)?;
        let usual = schedule.usual_chunks() as usize;
        Ok(Self { schedule: schedule.into(), chunks: chunks.unwrap_or(usual), cut })
    }
}

impl JsonSchema for Pipeline {
    fn schema_name() -> Cow<'static, str> {
        "Pipeline".into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        PipelineConfig::json_schema(generator)
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

/// The information about the mesh that one rank needs to compile its programs.
#[derive(Debug, Clone)]
pub struct RankPlan {
    /// The number of ranks along each axis.
    pub mesh: Mesh,
    /// The coordinate of this rank.
    pub at: Coordinate,
    /// Number of pipeline stages.
    pub stages: usize,
    /// The actions of a training step, for every rank of the pipeline.
    pub table: Vec<Vec<Action>>,
}

impl RankPlan {
    /// Returns the plan of one rank of this step.
    ///
    /// # Errors
    /// Returns the errors of [`Self::new`].
    pub fn of(options: &StepOptions, rank: usize) -> Result<Self> {
        Self::new(options.mesh, rank, &options.pipeline, options.micro_batches)
    }

    /// Determines a rank's coordinate in the mesh, and the actions of its pipeline.
    ///
    /// # Errors
    /// Returns an error if the mesh has no such rank, or if the schedule does not support the shape of the mesh.
    pub fn new(mesh: Mesh, rank: usize, pipeline: &Pipeline, micro_batches: usize) -> Result<Self> {
        let ranks = mesh.ranks()?;
        let fail = |why, remedy| Err(Error::config("mesh", why, remedy));
        if rank >= ranks {
            return fail(format!("rank {rank} is not one of its {ranks} ranks"), "start as many ranks as the mesh has");
        }
        let number = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let (chunks, micro_batches) = (number(pipeline.chunks), number(micro_batches));
        let shape = Shape { ranks: number(mesh.pipeline), chunks, micro_batches };
        let table = pipeline.schedule.actions(&shape)?;
        if table.len() != mesh.pipeline {
            let why = format!("{} has {} rows for {} ranks", pipeline.schedule.name(), table.len(), mesh.pipeline);
            return Err(Error::config("pipeline.schedule", why, "give it one row of actions per rank"));
        }
        let stages = mesh.pipeline * pipeline.chunks;
        let violations =
            gapless_parallel::check(&table, number(stages), micro_batches, gapless_parallel::Sends::Buffered);
        if let Some(violation) = violations.first() {
            let why = format!("{}: {violation}", pipeline.schedule.name());
            return Err(Error::config(
                "pipeline.schedule",
                why,
                "correct its table; gapless_parallel::check lists all violations",
            ));
        }
        Ok(Self { mesh, at: mesh.coordinate(rank), stages, table })
    }

    /// Returns the ranks that divide the experts of a layer, and this one among them.
    pub fn expert_ranks(&self) -> ExpertRanks {
        let axes = self.mesh.experts();
        ExpertRanks { axes, ranks: self.mesh.size(axes), rank: self.mesh.index(self.at, axes) }
    }

    /// Returns a table of actions with only the forward of one micro-batch.
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

/// The share of a batch that a rank computes. The batch is divided into equal parts, of which the rank has some.
#[derive(Debug, Clone, Copy)]
pub struct Share {
    /// Number of equal parts of the batch.
    pub parts: usize,
    /// Index of the first part of this rank.
    pub first: usize,
    /// Distance between adjacent parts of this rank. Expert ranks take parts in turn, so that the rows of an expert
    /// arrive in the order of the batch.
    pub stride: usize,
    /// Number of parts of this rank.
    pub count: usize,
}

impl Share {
    /// Returns the share of a training batch that the rank at coordinate `at` computes.
    pub fn of(options: &StepOptions, at: Coordinate) -> Self {
        let &StepOptions { micro_batches, mesh, .. } = options;
        let copy = at.data * mesh.shard + at.shard;
        let first = copy * micro_batches * mesh.expert + at.expert;
        Self { parts: options.parts(), first, stride: mesh.expert, count: micro_batches }
    }
}

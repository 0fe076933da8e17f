//! `[step]`: the extents of a step, and where it runs.

use gapless_engine::{DType, DeviceChoice};
use gapless_parallel::{Mesh, Placement, by_name};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::ConfigError;
use super::read::parses_as;
use crate::Pipeline;

/// `[step]`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct StepConfig {
    /// Sequences.
    pub batch: usize,
    /// Parts into which the batch is cut: more of them need less memory.
    pub micro_batches: usize,
    /// Tokens per sequence.
    pub sequence: usize,
    /// What it computes in; not f16, whose range gradients leave.
    pub dtype: Float,
    /// `auto`, `cpu`, `cuda` or `cuda:1`.
    #[serde(deserialize_with = "parses_as::<DeviceChoice, _>")]
    pub device: String,
    /// Worker threads of each rank; 0 for all cores.
    pub threads: usize,
    /// Ranks that share the batch.
    pub data_ranks: usize,
    /// Ranks of a pipeline, each with a part of the layers.
    pub pipeline_ranks: usize,
    /// Ranks that share the experts.
    pub expert_ranks: usize,
    /// The order of work in the pipeline, by the name that `gapless schedule` lists.
    pub schedule: String,
    /// Stages per rank of the pipeline; one where it is absent, two for schedules in the shape of a V.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chunks: Option<usize>,
}

/// Types that a model can be trained in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Float {
    /// 32 bits.
    F32,
    /// 16 bits, with 32-bit masters.
    Bf16,
}

impl From<Float> for DType {
    fn from(float: Float) -> Self {
        match float {
            Float::F32 => Self::F32,
            Float::Bf16 => Self::BF16,
        }
    }
}

impl Default for StepConfig {
    fn default() -> Self {
        let (dtype, device) = (Float::F32, "auto".to_owned());
        let (data_ranks, pipeline_ranks, expert_ranks, schedule, chunks) = (1, 1, 1, "1f1b".to_owned(), None);
        let (batch, micro_batches, sequence, threads) = (8, 1, 256, 0);
        Self {
            batch,
            micro_batches,
            sequence,
            dtype,
            device,
            threads,
            data_ranks,
            pipeline_ranks,
            expert_ranks,
            schedule,
            chunks,
        }
    }
}

impl StepConfig {
    /// The ranks that do it together.
    pub fn mesh(&self) -> Mesh {
        Mesh { data: self.data_ranks, pipeline: self.pipeline_ranks, expert: self.expert_ranks }
    }
}

/// The pipeline of a schedule's name; `key` is what an unknown name is the value of.
pub(crate) fn pipeline(key: &str, name: &str, chunks: Option<usize>) -> Result<Pipeline, ConfigError> {
    let schedule = by_name(name)
        .map_err(|why| ConfigError::value(key, why.to_string(), "`gapless schedule --help` says what each is"))?;
    let chunks = chunks.unwrap_or(match schedule.placement() {
        Placement::Loop => 1,
        Placement::V => 2,
    });
    Ok(Pipeline { schedule: schedule.into(), chunks, ..Pipeline::default() })
}

//! What decides a step's programs and their memory.

use std::sync::Arc;

use candle_core::DType;
use gapless_alloc::arena::Reserve;
use gapless_graph::nn::Trainable;
use gapless_graph::optim::{AdamW, Optimizer};
use gapless_parallel::Mesh;

use super::{Generation, Overflow, Pipeline};
use crate::executable::CompileOptions;
use crate::recompute::{Recompute, Stashing};

/// What decides a step's programs and their memory: of a trainer's options those that are neither data, nor time, nor device.
#[derive(Debug, Clone)]
pub struct StepOptions {
    /// Sequences per step, of all ranks together.
    pub batch: usize,
    /// Parts into which a data rank's share of the batch is cut.
    pub micro_batches: usize,
    /// Tokens per sequence.
    pub sequence: usize,
    /// Whether sequences hold several documents, which do not see each other ([`DOCUMENT_INPUTS`](super::DOCUMENT_INPUTS)).
    pub documents: bool,
    /// Type of parameters, activations and gradients.
    pub dtype: DType,
    /// Which part of the model is trained.
    pub trainable: Trainable,
    /// The update rule.
    pub optimizer: Arc<dyn Optimizer>,
    /// The most work that planning the arena may be.
    pub planning: u64,
    /// How many ranks there are.
    pub mesh: Mesh,
    /// How the ranks of a pipeline work together.
    pub pipeline: Pipeline,
    /// What is computed again in the backward.
    pub recompute: Recompute,
    /// Operations whose results wait for the backward in eight bits.
    pub compress: Vec<String>,
    /// Operations whose results wait for the backward in a file.
    pub offload: Vec<String>,
    /// Room for the rows that expert ranks receive.
    pub routing: Reserve,
    /// What becomes of a step that runs out of that room.
    pub overflow: Overflow,
    /// Update each parameter as soon as its gradient is complete.
    pub release_gradients: bool,
    /// Hold every gradient until the next step.
    pub keep_gradients: bool,
    /// The programs that continue sequences, if there are to be any.
    pub generation: Option<Generation>,
}

impl Default for StepOptions {
    fn default() -> Self {
        Self {
            batch: 8,
            micro_batches: 1,
            sequence: 256,
            documents: false,
            dtype: DType::F32,
            trainable: Trainable::All,
            optimizer: AdamW::default().into(),
            planning: CompileOptions::default().planner.work,
            mesh: Mesh::default(),
            pipeline: Pipeline::default(),
            recompute: Recompute::None,
            compress: Vec::new(),
            offload: Vec::new(),
            routing: Reserve::Worst,
            overflow: Overflow::Error,
            release_gradients: false,
            keep_gradients: false,
            generation: None,
        }
    }
}

impl StepOptions {
    /// Parts into which the batch is cut: micro-batches of all ranks that share it.
    pub fn parts(&self) -> usize {
        self.micro_batches.saturating_mul(self.mesh.data).saturating_mul(self.mesh.expert)
    }

    /// Sequences per evaluation: as many as a micro-batch has.
    pub fn evaluation_batch(&self) -> usize {
        self.batch / self.parts().max(1)
    }

    /// What is kept otherwise than as it is.
    pub fn stashing(&self) -> Stashing<'_> {
        Stashing { compress: &self.compress, offload: &self.offload }
    }

    /// How an arena is planned that must fit so many bytes, if any.
    pub fn planning_within(&self, capacity: Option<u64>) -> CompileOptions {
        CompileOptions::within(capacity, self.planning, self.routing)
    }
}

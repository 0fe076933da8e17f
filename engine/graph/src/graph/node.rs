//! One operation applied to values: when in a step it runs, and where.

use std::sync::Arc;

use gapless_parallel::StageId;

use super::ValueId;
use crate::op::Op;

/// Index of a node in its graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub(super) u32);

impl NodeId {
    /// The id as a table index.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Which part of the step a node belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Phase {
    /// The forward pass, once per micro-batch.
    Forward,
    /// Gradients that earlier layers wait for (I), once per micro-batch.
    BackwardInput,
    /// Gradients of weights, which nobody waits for before the update (W), once per micro-batch.
    BackwardWeight,
    /// Once per step, after the last micro-batch.
    Update,
}

/// Who runs a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Place {
    /// The rank that has the stage.
    Stage(StageId),
    /// Every rank for itself. Only in the update.
    Everywhere,
}

impl Default for Place {
    fn default() -> Self {
        Self::Stage(StageId(0))
    }
}

/// One operation applied to values.
#[derive(Debug, Clone)]
pub struct Node {
    /// What is computed.
    pub op: Arc<dyn Op>,
    /// From what.
    pub inputs: Vec<ValueId>,
    /// Into what.
    pub outputs: Vec<ValueId>,
    /// The layer it stands in, e.g. `h.3.attn`; empty outside of layers.
    pub layer: Arc<str>,
    /// Which part of the step.
    pub phase: Phase,
    /// Who runs it.
    pub place: Place,
}

impl Node {
    /// The inputs that it changes. An operation that names others than when it was recorded changes none by them.
    pub fn changed(&self) -> impl Iterator<Item = ValueId> {
        self.op.mutates().iter().filter_map(|&(input, _)| self.inputs.get(input).copied())
    }
}

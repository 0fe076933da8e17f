//! Nodes: one operation applied to values, with the phase and the place in which it runs.

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

/// The phase of the step in which a node runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Phase {
    /// The forward pass, once per micro-batch.
    Forward,
    /// Gradients that earlier layers wait for (I), once per micro-batch.
    BackwardInput,
    /// Gradients of weights, which are needed only by the update (W), once per micro-batch.
    BackwardWeight,
    /// The update, once per step, after the last micro-batch.
    Update,
}

/// The ranks on which a node runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Place {
    /// The rank that holds the stage.
    Stage(StageId),
    /// Every rank for itself; in the update only.
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
    /// The operation.
    pub op: Arc<dyn Op>,
    /// Values that the operation reads, in its order.
    pub inputs: Vec<ValueId>,
    /// Values that the operation produces, in its order.
    pub outputs: Vec<ValueId>,
    /// The layer to which the node belongs, e.g. `h.3.attn`; empty outside of layers.
    pub layer: Arc<str>,
    /// The phase in which it runs.
    pub phase: Phase,
    /// The ranks on which it runs.
    pub place: Place,
}

impl Node {
    /// The inputs that the node changes in place. Indices that the node does not have are skipped, in case the
    /// operation's answer differs from when it was recorded.
    pub fn mutated_inputs(&self) -> impl Iterator<Item = ValueId> {
        self.op.mutates().iter().filter_map(|&(input, _)| self.inputs.get(input).copied())
    }
}

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
    /// The forward pass; its nodes run once per micro-batch.
    Forward,
    /// Gradients that earlier layers wait for (I); their nodes run once per micro-batch.
    BackwardInput,
    /// Gradients of weights, which only the update reads (W); their nodes run once per micro-batch.
    BackwardWeight,
    /// The update; its nodes run once per step, after the last micro-batch.
    Update,
}

/// The ranks on which a node runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Place {
    /// The rank that holds the stage.
    Stage(StageId),
    /// Every rank runs the node. Only nodes of the update have this place.
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
    /// Values that the operation reads, in the order that the operation defines.
    pub inputs: Vec<ValueId>,
    /// Values that the operation produces, in the order that the operation defines.
    pub outputs: Vec<ValueId>,
    /// The layer to which the node belongs, e.g. `h.3.attn`; empty outside of layers.
    pub layer: Arc<str>,
    /// The phase in which the node runs.
    pub phase: Phase,
    /// The ranks on which the node runs.
    pub place: Place,
}

impl Node {
    /// Returns the inputs that the node changes in place. Indices for which there is no input are skipped: a user's
    /// [`Op::mutates`] may return other indices than those that were checked when the node was recorded.
    pub fn mutated_inputs(&self) -> impl Iterator<Item = ValueId> {
        self.op.mutates().iter().filter_map(|&(input, _)| self.inputs.get(input).copied())
    }
}

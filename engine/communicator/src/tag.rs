//! Tags, which distinguish the messages between two ranks.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The direction of a message in a pipeline.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
pub enum Direction {
    /// Activations, to the next stage.
    #[default]
    Forward,
    /// Gradients, to the stage before.
    Backward,
    /// Tensors that are exchanged once per step: losses, norms, weights that stages share.
    Update,
}

/// The identity of a message. Sender and receiver use the same tag, and errors name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
pub struct Tag {
    /// Activations, gradients, or neither.
    pub direction: Direction,
    /// The stage that produces the tensor.
    pub stage: u32,
    /// The micro-batch that the tensor belongs to.
    pub micro_batch: u32,
    /// Index among the tensors that are sent between the two stages.
    pub tensor: u32,
}

impl fmt::Display for Tag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match self.direction {
            Direction::Forward => "activations",
            Direction::Backward => "gradients",
            Direction::Update => return write!(f, "the update's tensor {} of stage {}", self.tensor, self.stage),
        };
        write!(f, "the {what} of stage {}, micro-batch {}", self.stage, self.micro_batch)?;
        if self.tensor > 0 { write!(f, ", tensor {}", self.tensor) } else { Ok(()) }
    }
}

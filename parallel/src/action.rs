//! One thing that a rank does.

use std::fmt;

/// Index of a stage: a contiguous run of the model's layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StageId(pub u32);

/// Index of a micro-batch within a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MicroBatch(pub u32);

/// What is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// The forward pass (F).
    Forward,
    /// The whole backward pass (B).
    Backward,
    /// Only the gradient with respect to the stage's input (I).
    BackwardInput,
    /// Only the gradients with respect to the stage's weights (W).
    BackwardWeight,
}

/// One cell of a schedule: what is done, of which stage, for which micro-batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Action {
    /// What is done.
    pub kind: Kind,
    /// Of which stage.
    pub stage: StageId,
    /// For which micro-batch.
    pub micro_batch: MicroBatch,
}

impl Action {
    /// An action from plain numbers.
    pub fn new(kind: Kind, stage: u32, micro_batch: u32) -> Self {
        Self { kind, stage: StageId(stage), micro_batch: MicroBatch(micro_batch) }
    }
}

/// PyTorch's notation: stage, kind, micro-batch, e.g. `0F3`.
impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            Kind::Forward => "F",
            Kind::Backward => "B",
            Kind::BackwardInput => "I",
            Kind::BackwardWeight => "W",
        };
        write!(f, "{}{kind}{}", self.stage.0, self.micro_batch.0)
    }
}

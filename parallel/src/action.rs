//! The cells of a schedule: actions, communication and updates.

use std::fmt;

/// Index of a stage: a contiguous run of the model's layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StageId(pub u32);

/// Index of a micro-batch within a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MicroBatch(pub u32);

/// The kind of an action.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// The forward pass (F).
    Forward,
    /// The whole backward pass (B).
    Backward,
    /// The gradient with respect to the stage's input only (I).
    BackwardInput,
    /// The gradients with respect to the stage's weights only (W).
    BackwardWeight,
}

/// An action: a pass of one stage for one micro-batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Action {
    /// The pass to run.
    pub kind: Kind,
    /// The stage that runs the pass.
    pub stage: StageId,
    /// The micro-batch that the pass is for.
    pub micro_batch: MicroBatch,
}

impl Action {
    /// Creates an action from plain numbers.
    pub fn new(kind: Kind, stage: u32, micro_batch: u32) -> Self {
        Self { kind, stage: StageId(stage), micro_batch: MicroBatch(micro_batch) }
    }
}

impl Kind {
    /// Returns the letter of this kind in PyTorch's notation.
    pub fn letter(self) -> char {
        match self {
            Self::Forward => 'F',
            Self::Backward => 'B',
            Self::BackwardInput => 'I',
            Self::BackwardWeight => 'W',
        }
    }
}

/// Formats an action in PyTorch's notation: stage, kind, micro-batch, e.g. `0F3`.
impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}{}", self.stage.0, self.kind.letter(), self.micro_batch.0)
    }
}

/// One cell of a table: an action, or a forward and a backward meant to run at the same time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Cell {
    /// An action by itself.
    One(Action),
    /// A forward of one stage and a backward of another that run at the same time.
    Overlap(Action, Action),
    /// Communication that a rank does between its actions.
    Communicate(Communication),
    /// The optimizer's step on the weights of a stage. PyTorch's tables leave this step to the caller, so the notation
    /// `UPDATE` is an addition of this crate.
    Update(StageId),
}

/// Communication of a rank between its actions. The tables of schedules contain no communication; tables from files may
/// contain some.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Communication {
    /// The kind of communication.
    pub kind: CommunicationKind,
    /// The stage that the communication belongs to.
    pub stage: StageId,
    /// The micro-batch of a message; `None` if the communication concerns the stage's weights.
    pub micro_batch: Option<MicroBatch>,
}

/// The kinds of communication of PyTorch's tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(missing_docs, reason = "the names say it all")]
pub enum CommunicationKind {
    SendForward,
    ReceiveForward,
    SendBackward,
    ReceiveBackward,
    WaitSendForward,
    WaitSendBackward,
    Unshard,
    Reshard,
    ReduceGradient,
    WaitReduceGradient,
}

impl Communication {
    /// Creates a message from plain numbers.
    pub fn message(kind: CommunicationKind, stage: u32, micro_batch: u32) -> Self {
        Self { kind, stage: StageId(stage), micro_batch: Some(MicroBatch(micro_batch)) }
    }

    /// Returns the other end of a message: the receive for a send, or the send for a receive. Returns `None` for
    /// communication that is not a message, and for a gradient that stage 0 would send to a stage before it.
    pub fn other_end(self) -> Option<Self> {
        let (kind, stage) = match self.kind {
            CommunicationKind::SendForward => (CommunicationKind::ReceiveForward, self.stage.0.checked_add(1)),
            CommunicationKind::ReceiveForward => (CommunicationKind::SendForward, self.stage.0.checked_sub(1)),
            CommunicationKind::SendBackward => (CommunicationKind::ReceiveBackward, self.stage.0.checked_sub(1)),
            CommunicationKind::ReceiveBackward => (CommunicationKind::SendBackward, self.stage.0.checked_add(1)),
            _ => return None,
        };
        Some(Self { kind, stage: StageId(stage?), ..self })
    }
}

impl CommunicationKind {
    /// Every kind with its name in PyTorch's notation.
    pub const WORDS: [(Self, &'static str); 10] = [
        (Self::SendForward, "SEND_F"),
        (Self::ReceiveForward, "RECV_F"),
        (Self::SendBackward, "SEND_B"),
        (Self::ReceiveBackward, "RECV_B"),
        (Self::WaitSendForward, "WAIT_SEND_F"),
        (Self::WaitSendBackward, "WAIT_SEND_B"),
        (Self::Unshard, "UNSHARD"),
        (Self::Reshard, "RESHARD"),
        (Self::ReduceGradient, "REDUCE_GRAD"),
        (Self::WaitReduceGradient, "WAIT_REDUCE_GRAD"),
    ];

    /// True if communication of this kind concerns one micro-batch rather than the stage's weights.
    pub fn has_micro_batch(self) -> bool {
        !matches!(self, Self::Unshard | Self::Reshard | Self::ReduceGradient | Self::WaitReduceGradient)
    }

    fn word(self) -> &'static str {
        Self::WORDS.iter().find(|(kind, _)| *kind == self).expect("every kind has its word").1
    }
}

/// Formats communication in PyTorch's notation, e.g. `0SEND_F3` or `0UNSHARD`.
impl fmt::Display for Communication {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.stage.0, self.kind.word())?;
        self.micro_batch.map_or(Ok(()), |micro_batch| write!(f, "{}", micro_batch.0))
    }
}

impl Cell {
    /// Returns the actions of the cell, in an order that is also valid if they run one after the other.
    pub fn actions(&self) -> impl Iterator<Item = Action> + use<> {
        let (first, second) = match *self {
            Self::One(action) => (Some(action), None),
            Self::Overlap(first, second) => (Some(first), Some(second)),
            Self::Communicate(_) | Self::Update(_) => (None, None),
        };
        first.into_iter().chain(second)
    }
}

/// Formats a cell in PyTorch's notation, e.g. `0F3` or `(0F3;3B1)OVERLAP_F_B`; an update is `0UPDATE`.
impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::One(action) => action.fmt(f),
            Self::Overlap(first, second) => write!(f, "({first};{second})OVERLAP_F_B"),
            Self::Communicate(communication) => communication.fmt(f),
            Self::Update(stage) => write!(f, "{}UPDATE", stage.0),
        }
    }
}

impl From<Action> for Cell {
    fn from(action: Action) -> Self {
        Self::One(action)
    }
}

impl From<Communication> for Cell {
    fn from(communication: Communication) -> Self {
        Self::Communicate(communication)
    }
}

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

impl Kind {
    /// The letter of PyTorch's notation.
    pub fn letter(self) -> char {
        match self {
            Self::Forward => 'F',
            Self::Backward => 'B',
            Self::BackwardInput => 'I',
            Self::BackwardWeight => 'W',
        }
    }
}

/// PyTorch's notation: stage, kind, micro-batch, e.g. `0F3`.
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
    /// A forward and a backward of another stage, side by side.
    Overlap(Action, Action),
    /// What a rank does around its actions.
    Communicate(Communication),
    /// The optimizer's step on the weights of a stage. PyTorch's tables leave it to the caller: this word is ours.
    Update(StageId),
}

/// What a rank does around its actions: generators leave it out, tables from elsewhere may have it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Communication {
    /// What is done.
    pub kind: CommunicationKind,
    /// Of which stage.
    pub stage: StageId,
    /// For which micro-batch; none for what concerns the stage's weights.
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
    /// A message from plain numbers.
    pub fn message(kind: CommunicationKind, stage: u32, micro_batch: u32) -> Self {
        Self { kind, stage: StageId(stage), micro_batch: Some(MicroBatch(micro_batch)) }
    }

    /// What the other end does: the receive of a send, the send of a receive. None for what has no other end, and for a
    /// gradient that stage 0 would send upwards.
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
    /// Every kind with its word in PyTorch's notation.
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

    /// Whether it is about one micro-batch, rather than about the stage's weights.
    pub fn has_micro_batch(self) -> bool {
        !matches!(self, Self::Unshard | Self::Reshard | Self::ReduceGradient | Self::WaitReduceGradient)
    }

    fn word(self) -> &'static str {
        Self::WORDS.iter().find(|(kind, _)| *kind == self).expect("every kind has its word").1
    }
}

/// PyTorch's notation, e.g. `0SEND_F3` or `0UNSHARD`.
impl fmt::Display for Communication {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.stage.0, self.kind.word())?;
        self.micro_batch.map_or(Ok(()), |micro_batch| write!(f, "{}", micro_batch.0))
    }
}

impl Cell {
    /// What is computed, in an order that is right for one after the other too.
    pub fn actions(&self) -> impl Iterator<Item = Action> + use<> {
        let (first, second) = match *self {
            Self::One(action) => (Some(action), None),
            Self::Overlap(first, second) => (Some(first), Some(second)),
            Self::Communicate(_) | Self::Update(_) => (None, None),
        };
        first.into_iter().chain(second)
    }
}

/// PyTorch's notation, e.g. `0F3` or `(0F3;3B1)OVERLAP_F_B`; an update is `0UPDATE`.
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

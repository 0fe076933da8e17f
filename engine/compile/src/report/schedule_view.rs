//! A rank's program as a row of a schedule table.
//!
//! - In: a program.
//! - Out: the cells of the row, including messages, for the checker and the simulator of `parallel`. Also the
//!   activations and messages that live across several cells; values that live within one cell are left out.
//! - Never: an address.

use std::collections::{HashMap, HashSet};

use gapless_alloc::Role;
use gapless_communicator::{Direction, Tag};
use gapless_parallel::{Action, Cell, Communication, CommunicationKind, KeptBuffer, Kind, MicroBatch, StageId};

use crate::program::{BufferKind, InstrKind, Message, Program};

impl Program {
    /// Returns the row of a schedule table that this program runs: the actions, and the messages between them. If the
    /// last stage is only a head that computes its gradients in the forward, the row still lists the head's backward.
    pub fn cells(&self) -> Vec<Cell> {
        self.cells_of_instructions().0
    }

    /// Returns the peak bytes of activations and messages that live across several cells.
    pub fn peak_bytes_between_cells(&self) -> u64 {
        let (cells, cell_of) = self.cells_of_instructions();
        let mut change = vec![0i128; cells.len() + 1];
        for (bytes, born, dead) in self.outliving(&cell_of) {
            change[born] += i128::from(bytes);
            change[dead + 1] -= i128::from(bytes);
        }
        let live = change.iter().scan(0i128, |live, change| {
            *live += change;
            Some(*live)
        });
        live.max().unwrap_or(0) as u64
    }

    /// Returns the values that live across several cells. The simulator takes these values from a program with one
    /// micro-batch.
    pub fn kept(&self) -> Vec<KeptBuffer> {
        let (cells, cell_of) = self.cells_of_instructions();
        self.outliving(&cell_of)
            .map(|(bytes, born, dead)| KeptBuffer { bytes, from: cells[born], until: cells[dead] })
            .collect()
    }

    /// Returns the bytes of activations and messages that live across several cells, with the indices of the cells of
    /// their first and last use.
    fn outliving(&self, cell_of: &[Option<usize>]) -> impl Iterator<Item = (u64, usize, usize)> {
        let mut used: Vec<Option<(usize, usize)>> = vec![None; self.buffers.len()];
        for (instr, cell) in self.instrs.iter().zip(cell_of) {
            let &Some(cell) = cell else { continue };
            for operand in instr.inputs.iter().chain(&instr.outputs) {
                let (first, last) = used[operand.buffer.index()].unwrap_or((cell, cell));
                used[operand.buffer.index()] = Some((first.min(cell), last.max(cell)));
            }
        }
        self.buffers.iter().zip(used).filter_map(|(buffer, used)| {
            let (born, dead) = used?;
            let counted = matches!(buffer.label.role, Role::Activation | Role::Communication);
            (counted && matches!(buffer.kind, BufferKind::Temporary) && born < dead).then_some((
                buffer.bytes,
                born,
                dead,
            ))
        })
    }

    /// Returns the cells, and the cell of each instruction, which is `None` for work that is done once per step.
    fn cells_of_instructions(&self) -> (Vec<Cell>, Vec<Option<usize>>) {
        let mut cells: Vec<Cell> = Vec::new();
        let mut cell_of = vec![None; self.instrs.len()];
        let mut receiving = vec![false; self.requests];
        let mut within_forward = self.backwards_within_forwards();
        for part in &self.parts {
            for index in part.instrs.clone() {
                if let InstrKind::Send(Message { tag, .. }) = &self.instrs[index].kind
                    && tag.direction == Direction::Backward
                {
                    let stage_and_micro_batch = (StageId(tag.stage), MicroBatch(tag.micro_batch));
                    cells.extend(within_forward.remove(&stage_and_micro_batch).map(Cell::One));
                }
                let cell = match (&self.instrs[index].kind, part.action) {
                    (InstrKind::Receive(message), Some(action)) => {
                        receiving[message.request] = true;
                        communication(message.tag, Act::Receive, Some(action.stage))
                    }
                    (InstrKind::Wait(message), Some(action)) if receiving[message.request] => {
                        communication(message.tag, Act::Receive, Some(action.stage))
                    }
                    (InstrKind::Wait(message), _) => communication(message.tag, Act::Wait, None),
                    (InstrKind::Send(message), _) => communication(message.tag, Act::Send, None),
                    (InstrKind::Collective(..) | InstrKind::Finish(_), _) => None,
                    (_, Some(action)) => Some(Cell::One(action)),
                    (_, None) => None,
                };
                let Some(cell) = cell else { continue };
                if cells.last() != Some(&cell) {
                    cells.push(cell);
                }
                cell_of[index] = Some(cells.len() - 1);
            }
        }
        (cells, cell_of)
    }

    /// Returns the backwards that have no instructions of their own, by stage and micro-batch. Their gradient is
    /// computed and sent in the forward.
    fn backwards_within_forwards(&self) -> HashMap<(StageId, MicroBatch), Action> {
        let stage_and_micro_batch = |action: &Action| (action.stage, action.micro_batch);
        let actions = || self.parts.iter().filter(|part| !part.instrs.is_empty()).filter_map(|part| part.action);
        let with = |kinds: &'static [Kind]| -> HashSet<_> {
            actions()
                .filter(|action| kinds.contains(&action.kind))
                .map(|action| stage_and_micro_batch(&action))
                .collect()
        };
        let (inputs, weights) = (with(&[Kind::Backward, Kind::BackwardInput]), with(&[Kind::BackwardWeight]));
        let lacking =
            actions().filter(|action| action.kind == Kind::Forward && !inputs.contains(&stage_and_micro_batch(action)));
        lacking
            .map(|forward| {
                let is_split = weights.contains(&stage_and_micro_batch(&forward));
                let kind = if is_split { Kind::BackwardInput } else { Kind::Backward };
                (stage_and_micro_batch(&forward), Action { kind, ..forward })
            })
            .collect()
    }
}

enum Act {
    Send,
    Receive,
    Wait,
}

/// Returns a message as a cell in PyTorch's terms: a send and its wait belong to the sender's stage, and a receive to
/// the receiver's stage. Returns `None` for messages of the update.
fn communication(tag: Tag, act: Act, receiver: Option<StageId>) -> Option<Cell> {
    let kind = match (tag.direction, act) {
        (Direction::Forward, Act::Send) => CommunicationKind::SendForward,
        (Direction::Forward, Act::Receive) => CommunicationKind::ReceiveForward,
        (Direction::Forward, Act::Wait) => CommunicationKind::WaitSendForward,
        (Direction::Backward, Act::Send) => CommunicationKind::SendBackward,
        (Direction::Backward, Act::Receive) => CommunicationKind::ReceiveBackward,
        (Direction::Backward, Act::Wait) => CommunicationKind::WaitSendBackward,
        (Direction::Update, _) => return None,
    };
    let micro_batch = Some(MicroBatch(tag.micro_batch));
    Some(Cell::Communicate(Communication { kind, stage: receiver.unwrap_or(StageId(tag.stage)), micro_batch }))
}

//! Checks that every rank gets to the end of its row.

use std::collections::BTreeSet;

use super::{Sends, Table, Violation};
use crate::{Action, Cell, Communication, CommunicationKind, Kind, MicroBatch, StageId};

/// A message from a stage to its neighbour: the activation to the next stage, or the gradient to the stage before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Message {
    forward: bool,
    from: StageId,
    micro_batch: MicroBatch,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// Waits for the result of another stage on the same rank.
    TakeOver(Message),
    Receive(Message),
    Compute(Message),
    Send(Message),
}

impl Table {
    /// Checks that every rank reaches the end of its row. It advances each rank as far as possible, and repeats this
    /// until no rank advances.
    pub(super) fn progress(&self, sends: Sends, violations: &mut Vec<Violation>) {
        let rows = self.rows.iter().enumerate();
        let programs: Vec<Vec<(Step, Cell)>> = rows
            .map(|(rank, row)| {
                row.iter().flat_map(|&cell| self.steps(rank, cell).into_iter().map(move |step| (step, cell))).collect()
            })
            .collect();
        let mut at = vec![0; programs.len()];
        let (mut made, mut sent) = (BTreeSet::new(), BTreeSet::new());
        let mut unfinished: Vec<usize> = (0..programs.len()).collect();
        loop {
            unfinished.retain(|&rank| at[rank] < programs[rank].len());
            let mut moved = false;
            for &rank in &unfinished {
                while let Some(&(step, _)) = programs[rank].get(at[rank]) {
                    match step {
                        Step::Compute(message) => _ = made.insert((rank, message)),
                        Step::TakeOver(message) if !made.contains(&(rank, message)) => break,
                        Step::TakeOver(_) => {}
                        Step::Receive(message) if sends == Sends::Buffered && !sent.contains(&message) => break,
                        Step::Receive(message) if sends == Sends::Blocking => {
                            let sender = self.owners.get(&message.from).copied().filter(|&sender| sender != rank);
                            let sending = |&sender: &usize| {
                                programs[sender].get(at[sender]).map(|&(step, _)| step) == Some(Step::Send(message))
                            };
                            let Some(sender) = sender.filter(sending) else { break };
                            at[sender] += 1;
                        }
                        Step::Receive(_) => {}
                        // A blocking send ends when its receiver reaches the receive, which advances the sender.
                        Step::Send(_) if sends == Sends::Blocking => break,
                        Step::Send(message) => _ = sent.insert(message),
                    }
                    at[rank] += 1;
                    moved = true;
                }
            }
            if !moved {
                break;
            }
        }
        let stuck =
            programs.iter().zip(at).enumerate().filter_map(|(rank, (program, at))| Some((rank, program.get(at)?.1)));
        violations.extend(stuck.map(|(rank, at)| Violation::Deadlock { rank, at, sends }));
    }

    /// Returns the steps of a cell, in four groups: taking over inputs from this rank, receiving, computing, sending.
    /// Messages that the table contains are separate cells, so they are left out here.
    fn steps(&self, rank: usize, cell: Cell) -> Vec<Step> {
        if let Cell::Communicate(communication) = cell {
            return message_step(communication).into_iter().collect();
        }
        let (mut before, mut computes, mut after) = (Vec::new(), Vec::new(), Vec::new());
        for action in cell.actions() {
            let Action { kind, stage, micro_batch } = action;
            let forward = match kind {
                Kind::Forward => true,
                Kind::Backward | Kind::BackwardInput => false,
                Kind::BackwardWeight => continue,
            };
            let message = |from| Message { forward, from, micro_batch };
            if let Some(source) = self.source(action) {
                if self.owners.get(&source) == Some(&rank) {
                    before.push(Step::TakeOver(message(source)));
                } else if !self.has_messages() {
                    before.push(Step::Receive(message(source)));
                }
            }
            computes.push(Step::Compute(message(stage)));
            let target =
                if forward { Some(StageId(stage.0.saturating_add(1))) } else { stage.0.checked_sub(1).map(StageId) };
            // There is no message to the same rank, or to a stage that no rank runs.
            let to_another = |target| self.owners.get(&target).is_some_and(|&owner| owner != rank);
            if !self.has_messages() && target.filter(|target| target.0 < self.stages).is_some_and(to_another) {
                after.push(Step::Send(message(stage)));
            }
        }
        [before, computes, after].concat()
    }
}

fn message_step(communication: Communication) -> Option<Step> {
    let micro_batch = communication.micro_batch?;
    let sender = |communication: Communication| communication.other_end().map(|send| send.stage);
    match communication.kind {
        CommunicationKind::SendForward => {
            Some(Step::Send(Message { forward: true, from: communication.stage, micro_batch }))
        }
        CommunicationKind::SendBackward => {
            Some(Step::Send(Message { forward: false, from: communication.stage, micro_batch }))
        }
        CommunicationKind::ReceiveForward => {
            Some(Step::Receive(Message { forward: true, from: sender(communication)?, micro_batch }))
        }
        CommunicationKind::ReceiveBackward => {
            Some(Step::Receive(Message { forward: false, from: sender(communication)?, micro_batch }))
        }
        _ => None,
    }
}

//! Adds the messages between ranks to a table: every send, and the place of its receive.
//!
//! In: a table of actions, with or without the work on weights. Out: the same cells in the same order, with sends,
//! receives and waits between them. Two stages of one rank need no messages between them. The order of actions never
//! changes.
//!
//! The pass walks all ranks in rounds, one cell of each rank per round. A send goes right after its action. In the same
//! round, its receive is appended to the peer's row:
//!
//! ```text
//! rank 0 │ 0F0 0SEND_F0         0F1 0SEND_F1 0RECV_B0 …
//! rank 1 │              1RECV_F0                       1F0 …
//! ```
//!
//! So all messages have one order, and the order of each rank's row agrees with it. No rank ever waits for a message
//! that comes later in this order. So the table is free of deadlock, whether sends are buffered or blocking. PyTorch's
//! runtime exchanges messages in the same order.

use std::collections::{BTreeMap, BTreeSet};

use crate::{Action, Cell, Communication, CommunicationKind, Kind, StageId, Stuck};

/// The point at which a rank waits until one of its own sends is done. The sent buffer must stay alive until then.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Waits {
    /// As in PyTorch: a rank waits for the send of an activation after the backward of the same micro-batch, and for
    /// the send of a gradient at the end of the row. So all M gradients of a stage stay alive.
    #[default]
    Late,
    /// A rank waits for a send before the same stage's next send in the same direction. So one buffer per stage and
    /// direction stays alive.
    NextSend,
}

/// Returns the table with SEND_F, RECV_F, SEND_B, RECV_B and the waits for the sends. Messages that the table already
/// has are replaced.
///
/// # Errors
/// Returns [`Stuck`] if an action waits for an action that never runs. [`crate::check()`] reports everything that is
/// wrong with such a table.
pub fn communicate(table: &[Vec<Cell>], waits: Waits) -> Result<Vec<Vec<Cell>>, Stuck> {
    let is_message = |cell: &Cell| matches!(cell, Cell::Communicate(message) if message.micro_batch.is_some());
    let todo: Vec<Vec<Cell>> =
        table.iter().map(|row| row.iter().copied().filter(|cell| !is_message(cell)).collect()).collect();
    let mut lowered = exchange(&todo)?;
    for row in &mut lowered {
        *row = match waits {
            Waits::Late => wait_late(row),
            Waits::NextSend => wait_before_next_send(row),
        };
    }
    Ok(lowered)
}

/// Adds sends and receives, without waits.
fn exchange(table: &[Vec<Cell>]) -> Result<Vec<Vec<Cell>>, Stuck> {
    let owners: BTreeMap<StageId, usize> = (0..)
        .zip(table)
        .flat_map(|(rank, row)| row.iter().flat_map(Cell::actions).map(move |action| (action.stage, rank)))
        .collect();
    let last = owners.keys().last().copied();
    let mut lowered: Vec<Vec<Cell>> = vec![Vec::new(); table.len()];
    let mut there: Vec<BTreeSet<Cell>> = vec![BTreeSet::new(); table.len()];
    let mut at = vec![0; table.len()];
    let mut unfinished: Vec<usize> = (0..table.len()).collect();
    loop {
        unfinished.retain(|&rank| at[rank] < table[rank].len());
        let mut moved = false;
        for &rank in &unfinished {
            let cell = table[rank][at[rank]];
            if !cell.actions().all(|action| has_input(action, last, &there[rank])) {
                continue;
            }
            lowered[rank].push(cell);
            there[rank].extend(cell.actions().map(Cell::One));
            for (send, receive) in cell.actions().filter_map(message) {
                let Some(&peer) = owners.get(&receive.stage).filter(|&&peer| peer != rank) else { continue };
                lowered[rank].push(Cell::Communicate(send));
                lowered[peer].push(Cell::Communicate(receive));
                there[peer].insert(Cell::Communicate(receive));
            }
            at[rank] += 1;
            moved = true;
        }
        if !moved {
            break;
        }
    }
    match table.iter().zip(at).enumerate().find_map(|(rank, (row, at))| Some((rank, *row.get(at)?))) {
        Some((rank, cell)) => Err(Stuck { rank, cell }),
        None => Ok(lowered),
    }
}

/// True if the input from the neighbouring stage is available: it was received, or produced on this rank.
fn has_input(action: Action, last: Option<StageId>, there: &BTreeSet<Cell>) -> bool {
    let Action { kind, stage, micro_batch } = action;
    let made = |kind, stage| there.contains(&Cell::One(Action { kind, stage, micro_batch }));
    let received =
        |kind| there.contains(&Cell::Communicate(Communication { kind, stage, micro_batch: Some(micro_batch) }));
    match kind {
        Kind::BackwardWeight => true,
        Kind::Forward => match stage.0.checked_sub(1) {
            None => true,
            Some(above) => received(CommunicationKind::ReceiveForward) || made(Kind::Forward, StageId(above)),
        },
        Kind::Backward | Kind::BackwardInput if last == Some(stage) => true,
        Kind::Backward | Kind::BackwardInput => {
            let below = StageId(stage.0 + 1);
            let gradient = || made(Kind::Backward, below) || made(Kind::BackwardInput, below);
            received(CommunicationKind::ReceiveBackward) || gradient()
        }
    }
}

/// Returns the send of an action's result to another stage, and its receive. Returns `None` if the result stays in the
/// stage.
fn message(action: Action) -> Option<(Communication, Communication)> {
    let kind = match action.kind {
        Kind::Forward => CommunicationKind::SendForward,
        Kind::Backward | Kind::BackwardInput => CommunicationKind::SendBackward,
        Kind::BackwardWeight => return None,
    };
    let send = Communication { kind, stage: action.stage, micro_batch: Some(action.micro_batch) };
    Some((send, send.other_end()?))
}

fn wait_late(row: &[Cell]) -> Vec<Cell> {
    let mut waited = Vec::with_capacity(row.len() + row.len() / 3);
    let mut activations = BTreeSet::new();
    let mut gradients = Vec::new();
    for &cell in row {
        waited.push(cell);
        match cell {
            Cell::Communicate(send) if send.kind == CommunicationKind::SendForward => {
                activations.insert((send.stage, send.micro_batch));
            }
            Cell::Communicate(send) if send.kind == CommunicationKind::SendBackward => gradients.extend(wait_for(send)),
            _ => {}
        }
        let backwards = cell.actions().filter(|a| matches!(a.kind, Kind::Backward | Kind::BackwardInput));
        for Action { stage, micro_batch, .. } in backwards {
            if activations.remove(&(stage, Some(micro_batch))) {
                let kind = CommunicationKind::WaitSendForward;
                waited.push(Cell::Communicate(Communication { kind, stage, micro_batch: Some(micro_batch) }));
            }
        }
    }
    waited.extend(gradients);
    waited
}

fn wait_before_next_send(row: &[Cell]) -> Vec<Cell> {
    let mut waited = Vec::with_capacity(row.len() + row.len() / 3);
    let mut pending: BTreeMap<(CommunicationKind, StageId), Cell> = BTreeMap::new();
    for &cell in row {
        if let Cell::Communicate(send) = cell
            && let Some(wait) = wait_for(send)
        {
            waited.extend(pending.insert((send.kind, send.stage), wait));
        }
        waited.push(cell);
    }
    waited.extend(pending.into_values());
    waited
}

fn wait_for(send: Communication) -> Option<Cell> {
    let kind = match send.kind {
        CommunicationKind::SendForward => CommunicationKind::WaitSendForward,
        CommunicationKind::SendBackward => CommunicationKind::WaitSendBackward,
        _ => return None,
    };
    Some(Cell::Communicate(Communication { kind, ..send }))
}

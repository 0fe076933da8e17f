//! What a rank does about a stage's weights around the actions: fetch them where they are sharded, reduce their
//! gradients over the data-parallel ranks, update them.
//!
//! In and out: tables. Each pass adds its cells and leaves the order of the others as it is. [`crate::communicate`] comes
//! last: every cell counts in its rounds.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroUsize;

use crate::{Action, Cell, Communication, CommunicationKind, Kind, StageId};

/// REDUCE_GRAD and WAIT_REDUCE_GRAD after each stage's last weight gradient.
pub fn reduce_gradients(table: &[Vec<Cell>]) -> Vec<Vec<Cell>> {
    let cells = |stage| {
        [CommunicationKind::ReduceGradient, CommunicationKind::WaitReduceGradient].map(|kind| about(kind, stage))
    };
    after_last_gradient(table, cells)
}

/// UPDATE of every stage at the end of its rank's row, in the order of the stages: an optimizer that clips by the norm
/// of all gradients starts no sooner.
pub fn update_weights(table: &[Vec<Cell>]) -> Vec<Vec<Cell>> {
    let row = |row: &Vec<Cell>| {
        let stages: BTreeSet<StageId> = row.iter().flat_map(Cell::actions).map(|action| action.stage).collect();
        row.iter().copied().chain(stages.into_iter().map(Cell::Update)).collect()
    };
    table.iter().map(row).collect()
}

/// UNSHARD and RESHARD, so that each rank holds the whole weights of the `at_once` stages that it needs next, and of no
/// other. PyTorch's runtime holds three: one computes forward, one backward, one arrives.
pub fn fetch_weights(table: &[Vec<Cell>], at_once: NonZeroUsize) -> Vec<Vec<Cell>> {
    let row = |row: &Vec<Cell>| {
        let mut fetched = Vec::with_capacity(row.len() + 4);
        let mut held: Vec<StageId> = Vec::new();
        for (at, &cell) in row.iter().enumerate() {
            let next = next_stages(&row[at..], at_once);
            // In the order of the stages, whatever the order in which they came.
            held.sort_unstable();
            for &stage in held.iter().filter(|stage| !next.contains(stage)) {
                fetched.push(about(CommunicationKind::Reshard, stage));
            }
            for &stage in next.iter().filter(|stage| !held.contains(stage)) {
                fetched.push(about(CommunicationKind::Unshard, stage));
            }
            held = next;
            fetched.push(cell);
        }
        held.sort_unstable();
        fetched.extend(held.into_iter().map(|stage| about(CommunicationKind::Reshard, stage)));
        fetched
    };
    table.iter().map(row).collect()
}

/// Each input gradient with its weight gradient right after it, as one whole backward.
pub fn merge_backwards(table: &[Vec<Cell>]) -> Vec<Vec<Cell>> {
    let row = |row: &Vec<Cell>| {
        let mut merged: Vec<Cell> = Vec::with_capacity(row.len());
        for &cell in row {
            match (merged.last_mut(), cell) {
                (Some(Cell::One(input)), Cell::One(weight))
                    if input.kind == Kind::BackwardInput
                        && weight == (Action { kind: Kind::BackwardWeight, ..*input }) =>
                {
                    input.kind = Kind::Backward;
                }
                _ => merged.push(cell),
            }
        }
        merged
    };
    table.iter().map(row).collect()
}

/// The next few different stages of a row, in the order in which they come.
fn next_stages(row: &[Cell], count: NonZeroUsize) -> Vec<StageId> {
    let mut next = Vec::new();
    for &cell in row {
        let of_weights = match cell {
            Cell::Communicate(communication) => Some(communication.stage),
            Cell::Update(stage) => Some(stage),
            Cell::One(_) | Cell::Overlap(..) => None,
        };
        for stage in cell.actions().map(|action| action.stage).chain(of_weights) {
            if !next.contains(&stage) {
                next.push(stage);
            }
        }
        // A pair needs both of its stages, even where one of them is too many.
        if next.len() >= count.get() {
            break;
        }
    }
    next
}

fn after_last_gradient<const N: usize>(table: &[Vec<Cell>], cells: impl Fn(StageId) -> [Cell; N]) -> Vec<Vec<Cell>> {
    let row = |row: &Vec<Cell>| {
        let gradients = |cell: &Cell| {
            cell.actions().filter(|a| matches!(a.kind, Kind::Backward | Kind::BackwardWeight)).map(|a| a.stage)
        };
        let last: BTreeMap<StageId, usize> =
            row.iter().enumerate().flat_map(|(at, cell)| gradients(cell).map(move |stage| (stage, at))).collect();
        let after = |(at, cell): (usize, &Cell)| {
            let ended = gradients(cell).filter(|stage| last[stage] == at);
            [*cell].into_iter().chain(ended.flat_map(&cells)).collect::<Vec<_>>()
        };
        row.iter().enumerate().flat_map(after).collect()
    };
    table.iter().map(row).collect()
}

fn about(kind: CommunicationKind, stage: StageId) -> Cell {
    Cell::Communicate(Communication { kind, stage, micro_batch: None })
}

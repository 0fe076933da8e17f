//! Adds the work on a stage's weights between the actions: fetching sharded weights, reducing gradients over the
//! data-parallel ranks, and updating the weights.
//!
//! In and out: tables. Each pass adds its cells and keeps the order of all others. [`crate::communicate`] must run
//! after these passes, because its rounds count every cell, including those added here.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroUsize;

use crate::{Action, Cell, Communication, CommunicationKind, Kind, StageId};

/// Adds REDUCE_GRAD and WAIT_REDUCE_GRAD after each stage's last weight gradient.
pub fn reduce_gradients(table: &[Vec<Cell>]) -> Vec<Vec<Cell>> {
    let cells = |stage| {
        [CommunicationKind::ReduceGradient, CommunicationKind::WaitReduceGradient].map(|kind| about(kind, stage))
    };
    after_last_gradient(table, cells)
}

/// Adds the UPDATE of every stage at the end of its rank's row, in the order of the stages. An optimizer that clips by
/// the norm of all gradients cannot start sooner.
pub fn update_weights(table: &[Vec<Cell>]) -> Vec<Vec<Cell>> {
    let row = |row: &Vec<Cell>| {
        let stages: BTreeSet<StageId> = row.iter().flat_map(Cell::actions).map(|action| action.stage).collect();
        row.iter().copied().chain(stages.into_iter().map(Cell::Update)).collect()
    };
    table.iter().map(row).collect()
}

/// Adds UNSHARD and RESHARD so that each rank holds the whole weights of only the next `at_once` stages that it runs.
/// PyTorch's runtime holds three stages: one computes forward, one computes backward, one is being fetched.
pub fn fetch_weights(table: &[Vec<Cell>], at_once: NonZeroUsize) -> Vec<Vec<Cell>> {
    let row = |row: &Vec<Cell>| {
        let mut fetched = Vec::with_capacity(row.len() + 4);
        let mut held: Vec<StageId> = Vec::new();
        for (at, &cell) in row.iter().enumerate() {
            let next = next_stages(&row[at..], at_once);
            // Sorting by stage makes the order independent of when the weights were fetched.
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

/// Merges each input gradient with the weight gradient right after it into one whole backward.
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

/// Returns the next `count` different stages of a row, in order of their first use.
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
        // A pair needs both of its stages, even if the second one exceeds `count`.
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

//! Exact live bytes of a rank, from the buffers that one micro-batch keeps between cells.
//!
//! In: the row of cells that a rank runs, and the buffers of each micro-batch with the cells in which they are born and
//! die. Out: the most bytes alive at once, over all micro-batches together.

use std::collections::{BTreeSet, HashMap};

use crate::{Action, Cell, Communication, MicroBatch};

/// A buffer of one stage and micro-batch that stays alive after the cell in which it is born.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeptBuffer {
    /// Size of the buffer in bytes.
    pub bytes: u64,
    /// The cell in which the buffer is born.
    pub from: Cell,
    /// The last cell in which the buffer is alive.
    pub until: Cell,
}

/// Returns the most bytes alive in any cell of `row`. `kept(m)` returns the buffers that micro-batch m keeps. The cells
/// of these buffers also name a micro-batch, which is ignored. A buffer is alive from the start of the cell in which it
/// is born to the end of its last cell. A buffer does not count if `row` lacks one of these two cells.
pub fn peak_bytes<'a>(row: &[Cell], kept: impl Fn(MicroBatch) -> &'a [KeptBuffer]) -> u64 {
    let at: HashMap<Cell, usize> = row.iter().enumerate().map(|(index, &cell)| (cell, index)).collect();
    let micro_batches: BTreeSet<MicroBatch> = row.iter().filter_map(micro_batch).collect();
    // For each cell of the row, the bytes born at its start and the bytes that die at its end.
    let mut changes = vec![(0, 0); row.len()];
    for (micro_batch, kept) in micro_batches.iter().flat_map(|&m| kept(m).iter().map(move |kept| (m, kept))) {
        let [from, until] = [kept.from, kept.until].map(|cell| at.get(&with(cell, micro_batch)).copied());
        if let (Some(from), Some(until)) = (from, until)
            && from <= until
        {
            changes[from].0 += kept.bytes;
            changes[until].1 += kept.bytes;
        }
    }
    let mut live = 0;
    let at_start = changes.into_iter().map(|(born, dead)| {
        let now = live + born;
        live = now - dead;
        now
    });
    at_start.max().unwrap_or(0)
}

fn micro_batch(cell: &Cell) -> Option<MicroBatch> {
    match cell {
        Cell::One(action) => Some(action.micro_batch),
        Cell::Communicate(communication) => communication.micro_batch,
        _ => None,
    }
}

/// Returns the same cell of another micro-batch.
fn with(cell: Cell, micro_batch: MicroBatch) -> Cell {
    match cell {
        Cell::One(action) => Cell::One(Action { micro_batch, ..action }),
        Cell::Communicate(communication) => Cell::Communicate(Communication {
            micro_batch: communication.micro_batch.map(|_| micro_batch),
            ..communication
        }),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Kind;

    #[test]
    fn overlapping_bytes_are_added() {
        let cell = |kind, micro_batch| Cell::One(Action::new(kind, 0, micro_batch));
        let kept = |bytes, from, until| KeptBuffer { bytes, from: cell(from, 0), until: cell(until, 0) };
        let saved = kept(10, Kind::Forward, Kind::Backward);
        let split = kept(1, Kind::BackwardInput, Kind::BackwardWeight);
        let row: Vec<Cell> = [
            (Kind::Forward, 0),
            (Kind::Forward, 1),
            (Kind::Backward, 0),
            (Kind::Forward, 2),
            (Kind::Backward, 1),
            (Kind::Backward, 2),
        ]
        .map(|(kind, micro_batch)| cell(kind, micro_batch))
        .to_vec();
        let all = [saved, split];
        let peak = |row: &[Cell], kept: &[KeptBuffer]| peak_bytes(row, |_| kept);
        assert_eq!(peak(&row, &all[..1]), 20);
        assert_eq!(peak(&row, &all), 20, "no cell of the split kind");
        assert_eq!(peak(&row[..2], &all[..1]), 0, "never dies");
        assert_eq!(peak(&[], &all), 0);
        let larger = kept(15, Kind::Forward, Kind::Backward);
        let by_way = [saved, larger];
        assert_eq!(peak_bytes(&row, |micro_batch| &by_way[micro_batch.0 as usize / 2..][..1]), 25);
    }
}

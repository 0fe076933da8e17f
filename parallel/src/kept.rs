//! Exact live bytes of a rank from what one micro-batch keeps alive between cells.
//!
//! In: the row of cells that a rank runs, and the buffers of *one* micro-batch with the cells that they are born in and die
//! in, for each way in which micro-batches go through the rank. Out: the most bytes that are alive at a time, all
//! micro-batches together.

use std::collections::{BTreeSet, HashMap};

use crate::{Action, Cell, Communication, MicroBatch};

/// A buffer of some stage and micro-batch that outlives the cell it is born in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kept {
    /// Its size.
    pub bytes: u64,
    /// The cell in which it is born.
    pub from: Cell,
    /// The cell after which it is dead.
    pub until: Cell,
}

/// The most bytes that are alive in any cell of `row`, if each micro-batch keeps what `kept` says of it (whatever
/// micro-batch its cells name). What is born in a cell is there from its start, what dies in it until its end; a buffer
/// whose cells `row` doesn't have counts nothing.
pub fn peak_bytes<'a>(row: &[Cell], kept: impl Fn(MicroBatch) -> &'a [Kept]) -> u64 {
    let at: HashMap<Cell, usize> = row.iter().enumerate().map(|(index, &cell)| (cell, index)).collect();
    let micro_batches: BTreeSet<MicroBatch> = row.iter().filter_map(micro_batch).collect();
    // By cell: bytes born at its start, bytes dead at its end.
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

/// The same cell of another micro-batch.
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
        let kept = |bytes, from, until| Kept { bytes, from: cell(from, 0), until: cell(until, 0) };
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
        let peak = |row: &[Cell], kept: &[Kept]| peak_bytes(row, |_| kept);
        assert_eq!(peak(&row, &all[..1]), 20);
        assert_eq!(peak(&row, &all), 20, "no cell of the split kind");
        assert_eq!(peak(&row[..2], &all[..1]), 0, "never dies");
        assert_eq!(peak(&[], &all), 0);
        let larger = kept(15, Kind::Forward, Kind::Backward);
        let by_way = [saved, larger];
        assert_eq!(peak_bytes(&row, |micro_batch| &by_way[micro_batch.0 as usize / 2..][..1]), 25);
    }
}

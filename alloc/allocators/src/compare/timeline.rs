//! An allocator's memory over time, at the resolution of a picture.

use crate::{Allocator, Extent};

/// Reserved and allocated bytes and the layout of reserved memory, in at most [`Timeline::COLUMNS`] columns.
#[derive(Debug)]
pub struct Timeline {
    requests: u64,
    columns: Vec<Column>,
}

/// The state of an allocator during some consecutive requests.
#[derive(Debug, Default)]
pub struct Column {
    /// The most bytes reserved during these requests.
    pub reserved: u64,
    /// The most bytes allocated during these requests.
    pub allocated: u64,
    /// The reserved memory after the last of these requests, from the lowest address up. Bytes in use and bytes of the
    /// hole above them alternate.
    pub layout: Vec<u64>,
}

impl Timeline {
    /// Most columns of a timeline.
    pub const COLUMNS: u64 = 480;

    /// An empty timeline for this many requests.
    pub(super) fn new(requests: u64) -> Self {
        Self { requests, columns: Vec::new() }
    }

    /// The columns, in time order.
    pub fn columns(&self) -> &[Column] {
        &self.columns
    }

    /// Records the allocator's state after a request. Requests count from 1.
    pub(super) fn observe(&mut self, request: u64, allocator: &dyn Allocator) {
        let column_of = |request: u64| {
            (u128::from(request) * u128::from(Self::COLUMNS.min(self.requests)) / u128::from(self.requests)) as usize
        };
        let column = column_of(request - 1);
        if column == self.columns.len() {
            self.columns.push(Column::default());
        }
        let current = &mut self.columns[column];
        let statistics = allocator.statistics();
        current.reserved = current.reserved.max(statistics.reserved.current);
        current.allocated = current.allocated.max(statistics.allocated.current);
        if column_of(request) != column {
            current.layout = runs(&allocator.extents());
        }
    }
}

/// Returns bytes in use and bytes of holes, alternating. Neighbouring extents of one kind are joined.
fn runs(extents: &[Extent]) -> Vec<u64> {
    let mut runs = Vec::new();
    let mut in_use = true;
    let mut bytes = 0;
    for extent in extents {
        if extent.in_use != in_use {
            runs.push(std::mem::take(&mut bytes));
            in_use = extent.in_use;
        }
        bytes += extent.bytes;
    }
    runs.push(bytes);
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_alternate() {
        let check = |pieces: &[(u64, bool)], expected: &[u64]| {
            let extent = |&(bytes, in_use): &(u64, bool)| Extent { address: 0, bytes, in_use };
            assert_eq!(runs(&pieces.iter().map(extent).collect::<Vec<_>>()), expected);
        };
        check(&[], &[0]);
        check(&[(1, true), (2, true), (3, false), (4, true)], &[3, 3, 4]);
        check(&[(1, false), (2, true)], &[0, 1, 2]);
    }
}

//! An index of the addresses that stay unused during a lifetime.
//!
//! In: rectangles of bytes × time in descending order of their last tick. Between the rectangles come queries, in
//! descending order of their first tick. Out: the ranges that stay idle from the first tick of a query to the query's
//! last tick. A query about a single tick is not supported.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::Lifetime;

/// The tick at which each address is used next, for a sweep that goes back in time.
///
/// A rectangle is painted when the sweep passes the rectangle's last tick. From then on, the next use of the
/// rectangle's addresses is at the rectangle's first tick. Since rectangles don't overlap, the rectangle that was
/// painted last is the nearest in time.
#[derive(Debug, Clone)]
pub(super) struct NextUse {
    /// The tick of the next use, keyed by the first address of a range. Each range extends to the next key.
    pieces: BTreeMap<u64, u64>,
}

/// Next use of an address that is never used again.
const NEVER: u64 = u64::MAX;

impl NextUse {
    /// An index in which no address is used.
    pub(super) fn new() -> Self {
        Self { pieces: BTreeMap::from([(0, NEVER)]) }
    }

    /// Marks `addresses` as in use during `ticks`.
    pub(super) fn paint(&mut self, addresses: Range<u64>, ticks: &Lifetime) {
        if addresses.is_empty() {
            return;
        }
        let (_, &behind) = self.pieces.range(..=addresses.end).next_back().expect("address 0 has a piece");
        self.pieces.insert(addresses.end, behind);
        let inside: Vec<u64> = self.pieces.range(addresses.clone()).map(|(&at, _)| at).collect();
        inside.iter().for_each(|at| _ = self.pieces.remove(at));
        self.pieces.insert(addresses.start, ticks.start);
    }

    /// Returns the ranges below `limit` that are idle during all of `ticks`. Before the call, the sweep must have gone
    /// back to the first of `ticks`. The ranges ascend, are as long as possible, and begin and end at multiples of
    /// `grain`.
    pub(super) fn idle(&self, ticks: &Lifetime, limit: u64, grain: u64) -> Vec<Range<u64>> {
        let mut ranges: Vec<Range<u64>> = Vec::new();
        let mut open: Option<u64> = None;
        let mut close = |open: &mut Option<u64>, end: u64| {
            if let Some(start) = open.take().and_then(|start: u64| start.checked_next_multiple_of(grain)) {
                let end = end / grain * grain;
                if start < end {
                    ranges.push(start..end);
                }
            }
        };
        for (&at, &next) in self.pieces.range(..limit) {
            if next < ticks.end {
                close(&mut open, at);
            } else {
                open.get_or_insert(at);
            }
        }
        close(&mut open, limit);
        ranges
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_for_the_whole_lifetime_only() {
        let mut next = NextUse::new();
        next.paint(20..40, &(8..12));
        next.paint(0..30, &(5..7));
        let check = |ticks: Lifetime, limit, grain, expected: &[(u64, u64)]| {
            let idle = next.idle(&ticks, limit, grain).into_iter().map(|range| (range.start, range.end));
            assert_eq!(idle.collect::<Vec<_>>(), expected, "{ticks:?}");
        };
        // The sweep is at tick 7: addresses below 30 are next used at tick 5, those above at tick 8.
        check(4..5, 100, 1, &[(0, 100)]);
        check(4..6, 100, 1, &[(30, 100)]);
        check(4..9, 100, 1, &[(40, 100)]);
        check(4..9, 100, 16, &[(48, 96)]);
        check(6..7, 40, 1, &[(30, 40)]);
        check(4..6, 30, 1, &[]);
    }
}

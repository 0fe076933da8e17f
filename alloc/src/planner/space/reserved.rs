//! Pre-placed items; a sweep places all other items around them.

use std::ops::Range;

use super::by_clique::Occupied;
use crate::planner::budget::Budget;
use crate::planner::decompose::timeline::Timeline;

/// Offsets that are fixed before a sweep.
#[derive(Debug, Clone, Default)]
pub(crate) struct Reserved {
    /// Offset of each item; empty if nothing is reserved.
    places: Vec<Option<u64>>,
    by_start: ByClique,
}

impl Reserved {
    /// Keeps the `fixed` items at their offsets, then gives each of `members` in turn the lowest place that is left.
    /// Returns `None` if the address space is too small or the budget is spent.
    pub fn place(timeline: &Timeline, fixed: &[(u32, u64)], members: &[u32], budget: &mut Budget) -> Option<Self> {
        if fixed.is_empty() && members.is_empty() {
            return Some(Self::default());
        }
        let mut reserved = Self { places: vec![None; timeline.items.len()], ..Self::default() };
        let mut occupied = Occupied::new(timeline.cliques);
        for (i, at) in fixed.iter().map(|&(i, at)| (i, Some(at))).chain(members.iter().map(|&i| (i, None))) {
            if reserved.places[i as usize].is_some() {
                continue;
            }
            let item = timeline.item(i);
            let at = match at {
                Some(at) => at,
                None if budget.left() == 0 => return None,
                None => occupied.lowest(item, budget)?,
            };
            occupied.insert(item, at, budget);
            reserved.places[i as usize] = Some(at);
            reserved.by_start.entries.push((item.start, at, at + item.bytes));
        }
        reserved.by_start.build();
        Some(reserved)
    }

    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// The reserved offset of an item; `None` if the item is not pre-placed.
    pub fn offset(&self, item: u32) -> Option<u64> {
        self.places.get(item as usize).copied().flatten()
    }

    /// Writes the ranges of the items that start within `cliques` to `ranges`, ascending and disjoint. Returns the
    /// number of ranges looked at.
    pub fn starting(&self, cliques: Range<u32>, ranges: &mut Vec<(u64, u64)>) -> u64 {
        self.by_start.between(cliques, ranges)
    }
}

/// Address ranges by clique. The ranges of many cliques together are read as a few unions.
#[derive(Debug, Clone, Default)]
struct ByClique {
    /// The ranges as `(clique, from, to)`, ascending.
    entries: Vec<(u32, u64, u64)>,
    /// A tree of unions; empty if there are few entries. Node `k` joins the ranges of nodes `2k` and `2k + 1`. The
    /// leaves, which come last, are blocks of [`BLOCK`] entries.
    unions: Vec<Vec<(u64, u64)>>,
}

/// Entries per block. Entries outside of whole blocks are read one by one.
const BLOCK: usize = 16;

impl ByClique {
    fn build(&mut self) {
        self.entries.sort_unstable();
        let blocks = self.entries.len() / BLOCK;
        if blocks < 4 {
            return;
        }
        let leaves = blocks.next_power_of_two();
        self.unions = vec![Vec::new(); 2 * leaves];
        for (union, block) in self.unions[leaves..].iter_mut().zip(self.entries.chunks_exact(BLOCK)) {
            union.extend(block.iter().map(|entry| (entry.1, entry.2)));
            join(union);
        }
        for node in (1..leaves).rev() {
            let mut union = [&self.unions[2 * node][..], &self.unions[2 * node + 1]].concat();
            join(&mut union);
            self.unions[node] = union;
        }
    }

    /// Writes the ranges of the entries within `cliques` to `ranges`, ascending and disjoint. Returns the number of
    /// ranges looked at.
    fn between(&self, cliques: Range<u32>, ranges: &mut Vec<(u64, u64)>) -> u64 {
        ranges.clear();
        if self.entries.is_empty() {
            return 0;
        }
        let from = self.entries.partition_point(|entry| entry.0 < cliques.start);
        let to = self.entries.partition_point(|entry| entry.0 < cliques.end);
        let (first, last) = (from.div_ceil(BLOCK), to / BLOCK);
        let mut one_by_one =
            |entries: &[(u32, u64, u64)]| ranges.extend(entries.iter().map(|entry| (entry.1, entry.2)));
        if self.unions.is_empty() || first >= last {
            one_by_one(&self.entries[from.min(to)..to]);
        } else {
            one_by_one(&self.entries[from..first * BLOCK]);
            one_by_one(&self.entries[last * BLOCK..to]);
            let leaves = self.unions.len() / 2;
            let (mut low, mut high) = (leaves + first, leaves + last);
            while low < high {
                if low % 2 == 1 {
                    ranges.extend(&self.unions[low]);
                    low += 1;
                }
                if high % 2 == 1 {
                    high -= 1;
                    ranges.extend(&self.unions[high]);
                }
                (low, high) = (low / 2, high / 2);
            }
        }
        let looked_at = ranges.len() as u64;
        join(ranges);
        looked_at
    }
}

/// Sorts ranges and merges those that touch or overlap.
fn join(ranges: &mut Vec<(u64, u64)>) {
    // The ranges consist of a few sorted runs, which the stable sort merges quickly.
    ranges.sort();
    ranges.dedup_by(|next, kept| {
        let touches = next.0 <= kept.1;
        if touches {
            kept.1 = kept.1.max(next.1);
        }
        touches
    });
}

#[cfg(test)]
mod tests {
    use gapless_testing::prelude::*;

    use super::*;

    generated! {
        /// Compared with the entries themselves, few or many.
        #[test]
        fn unions_hold_what_their_entries_hold(
            entries in prop::collection::vec((0..40u32, 0..50u64, 1..9u64), 0..400),
            cliques in (0..42u32, 0..42u32),
        ) {
            let mut by_clique = ByClique::default();
            by_clique.entries.extend(entries.iter().map(|&(clique, from, bytes)| (clique, from, from + bytes)));
            by_clique.build();
            let mut ranges = Vec::new();
            by_clique.between(cliques.0..cliques.1, &mut ranges);
            prop_assert!(ranges.windows(2).all(|pair| pair[0].1 < pair[1].0));
            for byte in 0..60 {
                let taken = |&(clique, from, bytes): &(u32, u64, u64)| {
                    (cliques.0..cliques.1).contains(&clique) && (from..from + bytes).contains(&byte)
                };
                let met = ranges.iter().any(|range| (range.0..range.1).contains(&byte));
                prop_assert_eq!(met, entries.iter().any(taken), "byte {}", byte);
            }
        }
    }
}

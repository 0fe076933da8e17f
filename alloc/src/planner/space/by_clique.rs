//! An index of the addresses taken during a range of cliques, by rectangles placed in any order.
//!
//! The index is a segment tree over the cliques. A rectangle is stored at the few nodes that cover its cliques. Each
//! node has two sets of addresses. The set `covering` has the addresses of the rectangles stored at the node itself,
//! and the set `within` also has those of all nodes below. A query reads `within` at the nodes that cover its range,
//! and `covering` at the nodes above.

use std::ops::Range;

use super::lowest_gap;
use crate::planner::budget::Budget;
use crate::planner::decompose::parts::Item;

/// The addresses taken, by clique.
pub(crate) struct Occupied {
    /// Number of leaves. Node `k` has the children `2k` and `2k + 1`; the leaves come last.
    leaves: usize,
    covering: Vec<Union>,
    within: Vec<Union>,
    /// The ranges that the last query found.
    met: Vec<(u64, u64)>,
}

impl Occupied {
    pub fn new(cliques: u32) -> Self {
        let leaves = (cliques as usize).next_power_of_two();
        let empty = || vec![Union::default(); 2 * leaves];
        Self { leaves, covering: empty(), within: empty(), met: Vec::new() }
    }

    /// Marks `[at, at + bytes)` as taken during the item's cliques. The budget pays for the rectangle.
    pub fn insert(&mut self, item: Item, at: u64, budget: &mut Budget) {
        let range = (at, at + item.bytes);
        budget.spend(1);
        let leaves = self.leaves_of(item);
        // The `within` set of a node includes the sets of all nodes below that node.
        for mut node in [leaves.start, leaves.end - 1] {
            while node > 1 && self.within[node / 2].add(range) {
                node /= 2;
            }
        }
        making_up(leaves, |node| {
            self.covering[node].add(range);
            self.within[node].add(range);
        });
    }

    /// Returns the lowest offset that is free during all of the item's cliques, or `None` if the address space has no
    /// room for the item. The budget pays for the ranges and nodes looked at.
    pub fn lowest(&mut self, item: Item, budget: &mut Budget) -> Option<u64> {
        let taken = self.taken(item, budget);
        lowest_gap(taken.iter().copied(), item.bytes, item.alignment)
    }

    /// Returns the ranges taken in any of the item's cliques, ascending by their first byte. The ranges may overlap.
    pub fn taken(&mut self, item: Item, budget: &mut Budget) -> &[(u64, u64)] {
        self.met.clear();
        let mut nodes = 0;
        let leaves = self.leaves_of(item);
        let mut above = [leaves.start / 2, (leaves.end - 1) / 2];
        making_up(leaves, |node| {
            self.met.extend_from_slice(&self.within[node].0);
            nodes += 1;
        });
        // Some of these nodes are among the nodes visited, or below them. The ranges at those nodes are taken in the
        // item's cliques as well.
        while above[0] > 0 {
            let count = if above[0] == above[1] { 1 } else { 2 };
            for &node in &above[..count] {
                self.met.extend_from_slice(&self.covering[node].0);
            }
            nodes += count as u64;
            above = above.map(|node| node / 2);
        }
        self.met.sort_unstable();
        budget.spend(nodes + self.met.len() as u64);
        &self.met
    }

    /// The leaves of the item's cliques.
    fn leaves_of(&self, item: Item) -> Range<usize> {
        self.leaves + item.start as usize..self.leaves + item.end as usize
    }
}

/// Visits the fewest nodes that together cover these leaves.
fn making_up(leaves: Range<usize>, mut visit: impl FnMut(usize)) {
    let Range { mut start, mut end } = leaves;
    while start < end {
        if start % 2 == 1 {
            visit(start);
        }
        if end % 2 == 1 {
            visit(end - 1);
        }
        (start, end) = (start.div_ceil(2), end / 2);
    }
}

/// A set of addresses: disjoint ranges that don't touch, ascending.
#[derive(Debug, Clone, Default)]
struct Union(Vec<(u64, u64)>);

impl Union {
    /// Adds a range. Returns true if some byte of the range was not yet in the set.
    fn add(&mut self, (from, to): (u64, u64)) -> bool {
        let first = self.0.partition_point(|range| range.1 < from);
        let Some(met) = self.0.get_mut(first).filter(|met| met.0 <= to) else {
            self.0.insert(first, (from, to));
            return true;
        };
        if met.0 <= from && to <= met.1 {
            return false;
        }
        met.0 = met.0.min(from);
        let more = self.0[first + 1..].iter().take_while(|range| range.0 <= to).count();
        let end = self.0[first + more].1.max(to);
        self.0[first].1 = end;
        if more > 0 {
            self.0.drain(first + 1..=first + more);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use gapless_testing::prelude::*;

    use super::*;

    generated! {
        /// Compared with a list of everything that was placed.
        #[test]
        fn taken_is_what_somebody_took(
            placed in prop::collection::vec((0..21u32, 1..=21u32, 1..9u64, 0..40u64), 0..40),
            asked in (0..21u32, 1..=21u32),
        ) {
            let item = |start: u32, cliques: u32, bytes| {
                Item { start, end: (start + cliques).min(21), bytes, alignment: 1 }
            };
            let placed: Vec<(Item, u64)> = placed.into_iter().map(|(s, c, b, at)| (item(s, c, b), at)).collect();
            let mut occupied = Occupied::new(21);
            placed.iter().for_each(|&(item, at)| occupied.insert(item, at, &mut Budget::default()));
            let asked = item(asked.0, asked.1, 1);
            let met = |byte: u64| placed.iter().any(|&(p, at)| p.meets(asked.start..asked.end) && at <= byte && byte < at + p.bytes);
            let taken = occupied.taken(asked, &mut Budget::default());
            prop_assert!(taken.is_sorted());
            for byte in 0..60 {
                prop_assert_eq!(taken.iter().any(|&(from, to)| from <= byte && byte < to), met(byte), "byte {}", byte);
            }
        }
    }
}

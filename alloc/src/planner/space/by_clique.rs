//! Which addresses are taken during a range of cliques, by rectangles placed in any order.
//!
//! A segment tree over the cliques. Each node has two sets of addresses: those of the rectangles that cover all of its cliques,
//! and those of all rectangles stored at it or below it. A rectangle is stored at the few nodes that make up its cliques; a query
//! reads the second set of the nodes that make up its range, and the first set of those above.

use super::lowest_gap;
use crate::planner::budget::Budget;
use crate::planner::decompose::parts::Item;

/// Addresses by clique.
pub(crate) struct Occupied {
    /// Number of leaves: node `k` has the children `2k` and `2k + 1`, the leaves come last.
    leaves: usize,
    covering: Vec<Union>,
    within: Vec<Union>,
    /// Ranges of the last query.
    met: Vec<(u64, u64)>,
}

impl Occupied {
    pub fn new(cliques: u32) -> Self {
        let leaves = (cliques as usize).next_power_of_two();
        let empty = || vec![Union::default(); 2 * leaves];
        Self { leaves, covering: empty(), within: empty(), met: Vec::new() }
    }

    /// Takes `[at, at + bytes)` during the item's cliques.
    pub fn insert(&mut self, item: Item, at: u64) {
        let range = (at, at + item.bytes);
        for node in self.making_up(item) {
            self.covering[node].add(range);
            self.within[node].add(range);
        }
        for node in self.above(item) {
            self.within[node].add(range);
        }
    }

    /// The lowest offset that is free during all of the item's cliques; `budget` pays for the ranges and nodes looked at. `None`
    /// when the address space ends.
    pub fn lowest(&mut self, item: Item, budget: &mut Budget) -> Option<u64> {
        let taken = self.taken(item, budget);
        lowest_gap(taken, item.bytes, item.alignment)
    }

    /// The ranges that are taken in some of the item's cliques, ascending by their first byte; they may overlap.
    pub fn taken(&mut self, item: Item, budget: &mut Budget) -> &[(u64, u64)] {
        self.met.clear();
        for node in self.making_up(item) {
            self.met.extend(&self.within[node].0);
            budget.spend(1);
        }
        for node in self.above(item) {
            self.met.extend(&self.covering[node].0);
            budget.spend(1);
        }
        self.met.sort_unstable();
        budget.spend(self.met.len() as u64);
        &self.met
    }

    /// The fewest nodes whose leaves are the item's cliques.
    fn making_up(&self, item: Item) -> impl Iterator<Item = usize> + use<> {
        let (mut from, mut to) = (self.leaves + item.start as usize, self.leaves + item.end as usize);
        std::iter::from_fn(move || {
            if from >= to {
                return None;
            }
            let mut nodes = [None, None];
            if from % 2 == 1 {
                nodes[0] = Some(from);
                from += 1;
            }
            if to % 2 == 1 {
                to -= 1;
                nodes[1] = Some(to);
            }
            (from, to) = (from / 2, to / 2);
            Some(nodes.into_iter().flatten())
        })
        .flatten()
    }

    /// The nodes above the item's first and last clique, each once. Some of them may be among, or below, those that make
    /// the item up: what they hold is no more than the truth there either.
    fn above(&self, item: Item) -> impl Iterator<Item = usize> + use<> {
        let (mut first, mut last) = (self.leaves + item.start as usize, self.leaves + item.end as usize - 1);
        std::iter::from_fn(move || {
            (first, last) = (first / 2, last / 2);
            (first > 0).then(|| [Some(first), (last != first).then_some(last)].into_iter().flatten())
        })
        .flatten()
    }
}

/// Disjoint ranges that don't touch, ascending.
#[derive(Debug, Clone, Default)]
struct Union(Vec<(u64, u64)>);

impl Union {
    fn add(&mut self, (from, to): (u64, u64)) {
        let first = self.0.partition_point(|range| range.1 < from);
        let end = first + self.0[first..].partition_point(|range| range.0 <= to);
        if first == end {
            self.0.insert(first, (from, to));
            return;
        }
        self.0[first] = (from.min(self.0[first].0), to.max(self.0[end - 1].1));
        self.0.drain(first + 1..end);
    }
}

#[cfg(test)]
mod tests {
    use gapless_testing::prelude::*;

    use super::*;

    generated! {
        /// Against a list of everything that was placed.
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
            placed.iter().for_each(|&(item, at)| occupied.insert(item, at));
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

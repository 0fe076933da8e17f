//! Strips, as in STAlloc's planner: items of one size share strips of the arena. Large sizes come first. Smaller items
//! first fill the idle space of larger strips, and then get strips of their own.

use std::collections::{BTreeMap, BTreeSet};

use crate::order::sort_by_key;
use crate::planner::budget::Budget;
use crate::planner::decompose::parts::{Item, Part};

/// Returns the offset of each item, or `None` if the part has pins or alignments, or if the budget is spent.
pub(crate) fn strips(part: &Part, budget: &mut Budget) -> Option<Vec<u64>> {
    let is_too_much = part.is_large() && budget.left() < WORK_PER_ITEM * part.items.len() as u64;
    if !part.is_free() || is_too_much {
        return None;
    }
    let items = &part.items;
    let mut by_size: BTreeMap<u64, Vec<u32>> = BTreeMap::new();
    for (i, item) in (0..).zip(items) {
        by_size.entry(item.bytes).or_default().push(i);
    }
    let mut strips: Vec<Strip> = Vec::new();
    let mut offsets = vec![0; items.len()];
    let mut height = 0u64;
    for (bytes, alike) in by_size.into_iter().rev() {
        let mut left = Vec::new();
        for i in chains(items, alike).into_iter().flatten() {
            if budget.left() == 0 {
                return None;
            }
            match strips.iter_mut().find_map(|strip| strip.stack(items[i as usize], budget)) {
                Some(at) => offsets[i as usize] = at,
                None => left.push(i),
            }
        }
        for chain in chains(items, left) {
            let mut strip = Strip { offset: height, bytes, skyline: BTreeMap::from([(0, 0)]) };
            height = height.checked_add(bytes)?;
            for i in chain {
                offsets[i as usize] = strip.stack(items[i as usize], budget)?;
            }
            strips.push(strip);
        }
    }
    Some(offsets)
}

/// Work per item without which a large part gets no strips: sorting the items by size alone costs about as much.
const WORK_PER_ITEM: u64 = 16;

/// An address range over all of time, which is filled from the bottom.
struct Strip {
    offset: u64,
    bytes: u64,
    /// The height that is filled at each clique; an entry applies until the next key.
    skyline: BTreeMap<u32, u64>,
}

impl Strip {
    /// Puts an item on top of everything that the strip holds during the item's cliques. Returns the item's offset, or
    /// `None` if the item does not fit.
    fn stack(&mut self, item: Item, budget: &mut Budget) -> Option<u64> {
        let room = self.bytes.checked_sub(item.bytes)?;
        let at = |clique: u32| self.skyline.range(..=clique).next_back().map_or(0, |step| *step.1);
        let mut top = at(item.start);
        budget.spend(1);
        for (_, &height) in self.skyline.range(item.start..item.end) {
            budget.spend(1);
            if top > room {
                break;
            }
            top = top.max(height);
        }
        if top > room {
            return None;
        }
        let after = at(item.end);
        let covered: Vec<u32> = self.skyline.range(item.start..item.end).map(|step| *step.0).collect();
        for clique in covered {
            self.skyline.remove(&clique);
        }
        self.skyline.insert(item.start, top + item.bytes);
        self.skyline.entry(item.end).or_insert(after);
        Some(self.offset + top)
    }
}

/// Groups items into chains in which each item starts after the one before has ended. Items are visited in order of
/// their starts, and each joins the chain that ended last.
fn chains(items: &[Item], mut numbers: Vec<u32>) -> Vec<Vec<u32>> {
    sort_by_key(&mut numbers, |&i| (items[i as usize].start, i));
    let mut chains: Vec<Vec<u32>> = Vec::new();
    let mut ends: BTreeSet<(u32, usize)> = BTreeSet::new();
    for i in numbers {
        let item = items[i as usize];
        let chain = match ends.range(..=(item.start, usize::MAX)).next_back().copied() {
            Some(end) => {
                ends.remove(&end);
                end.1
            }
            None => {
                chains.push(Vec::new());
                chains.len() - 1
            }
        };
        chains[chain].push(i);
        ends.insert((item.end, chain));
    }
    chains
}

#[cfg(test)]
mod tests {
    use gapless_testing::prelude::*;

    use super::*;
    use crate::planner::tests::{is_plan, part};

    generated! {
        /// Every pair of items is checked for overlaps. Items of one size need no more than the most bytes alive
        /// together.
        #[test]
        fn strips_are_a_plan(rows in prop::collection::vec((0..30u32, 1..=30u32, 1..9u64), 1..60), is_one_size: bool) {
            let size = |row: &(u32, u32, u64)| (row.0, row.1, if is_one_size { 5 } else { row.2 });
            let part = part(&rows.iter().map(size).collect::<Vec<_>>(), 30);
            let offsets = strips(&part, &mut Budget { work: 100_000, ..Budget::default() }).unwrap();
            let placement = part.placement(offsets);
            prop_assert!(is_plan(&part, &placement));
            prop_assert!(!is_one_size || placement.height == part.bound);
            prop_assert_eq!(strips(&part, &mut Budget::default()), None);
        }
    }

    /// The second item of size 2 fits into the idle space of the strip of size 4. The item of size 1 lies on top of the
    /// item of size 2.
    #[test]
    fn small_items_fill_large_strips() {
        let part = part(&[(0, 6, 2), (0, 3, 4), (3, 2, 2), (4, 2, 1)], 6);
        let offsets = strips(&part, &mut Budget { work: 1_000, ..Budget::default() });
        assert_eq!(offsets, Some(vec![4, 0, 0, 2]));
    }
}

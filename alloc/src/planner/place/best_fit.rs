//! One sweep from an edge of time in which each item takes the smallest free range that is large enough.
//!
//! The free ranges are kept in order of address and in order of size, so a sweep takes O(n log n) even where thousands
//! of ranges are free at once. So every part has such a plan, however little work may be spent.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use crate::order::sort_by_key;
use crate::planner::decompose::timeline::Timeline;

/// Work per item: the updates of both orders when the item is born and when it dies.
pub(super) const WORK_PER_ITEM: u64 = 8;

/// Most ranges that are tried for an item with an alignment.
const MAX_TRIES: usize = 16;

/// Returns the height and the offsets of the sweep, or `None` if the address space is too small. Pins are ignored.
pub(super) fn best_fit(timeline: &Timeline) -> Option<(u64, Vec<u64>)> {
    let mut free = Free::default();
    let mut offsets = vec![0; timeline.items.len()];
    let mut height = 0;
    let mut born = Vec::new();
    for clique in 0..timeline.cliques {
        for &i in timeline.dying(clique) {
            let at = offsets[i as usize];
            free.give_back(at, at + timeline.item(i).bytes);
        }
        born.clear();
        born.extend_from_slice(timeline.born(clique));
        sort_by_key(&mut born, |&i| Reverse(timeline.item(i).bytes));
        for &i in &born {
            let item = timeline.item(i);
            let at = free.take(item.bytes, item.alignment)?;
            offsets[i as usize] = at;
            height = height.max(at + item.bytes);
        }
    }
    Some((height, offsets))
}

/// The free ranges at one moment.
#[derive(Default)]
struct Free {
    /// The ranges below the surface: `from` to `to`.
    by_address: BTreeMap<u64, u64>,
    /// The same ranges as `(bytes, from)`.
    by_size: BTreeSet<(u64, u64)>,
    /// Everything from here on is free.
    surface: u64,
}

impl Free {
    fn add(&mut self, from: u64, to: u64) {
        if from < to {
            self.by_address.insert(from, to);
            self.by_size.insert((to - from, from));
        }
    }

    fn remove(&mut self, from: u64, to: u64) {
        self.by_address.remove(&from);
        self.by_size.remove(&(to - from, from));
    }

    /// Takes `bytes` at the bottom of the smallest range that is large enough.
    fn take(&mut self, bytes: u64, alignment: u64) -> Option<u64> {
        let fits = |&(room, from): &(u64, u64)| {
            let at = from.checked_next_multiple_of(alignment)?;
            (room - bytes >= at - from).then_some((from, from + room, at))
        };
        let tightest = self.by_size.range((bytes, 0)..).take(MAX_TRIES).find_map(fits);
        let Some((from, to, at)) = tightest else {
            let at = self.surface.checked_next_multiple_of(alignment)?;
            let end = at.checked_add(bytes)?;
            self.add(self.surface, at);
            self.surface = end;
            return Some(at);
        };
        self.remove(from, to);
        self.add(from, at);
        self.add(at + bytes, to);
        Some(at)
    }

    /// Frees a range and merges it with the free ranges on both sides.
    fn give_back(&mut self, mut from: u64, mut to: u64) {
        if let Some((&start, &end)) = self.by_address.range(..from).next_back().filter(|range| *range.1 == from) {
            self.remove(start, end);
            from = start;
        }
        if to == self.surface {
            self.surface = from;
            return;
        }
        if let Some(&end) = self.by_address.get(&to) {
            self.remove(to, end);
            to = end;
        }
        self.add(from, to);
    }
}

#[cfg(test)]
mod tests {
    use gapless_testing::prelude::*;

    use super::*;
    use crate::planner::decompose::parts::{Item, Part};
    use crate::planner::tests::is_plan;

    generated! {
        /// Compared with a list of the live items, from which the free ranges are computed at each birth.
        #[test]
        fn each_item_takes_the_tightest_range(
            rows in prop::collection::vec((0..12u32, 1..12u32, 1..20u64, 0..3u32), 1..17),
        ) {
            let item = |&(start, cliques, bytes, power): &(u32, u32, u64, u32)| {
                Item { start, end: (start + cliques).min(12), bytes, alignment: 1 << power }
            };
            let mut items: Vec<Item> = rows.iter().map(item).collect();
            sort_by_key(&mut items, |item| (item.start, Reverse(item.end)));
            let part = Part::from_items(items, 12);
            for timeline in [Timeline::forward(&part), Timeline::backward(&part)] {
                let (height, offsets) = best_fit(&timeline).unwrap();
                let placement = part.placement(offsets.clone());
                prop_assert_eq!(placement.height, height);
                prop_assert!(is_plan(&part, &placement));
                let mut order: Vec<u32> = (0..12).flat_map(|clique| timeline.born(clique).to_vec()).collect();
                sort_by_key(&mut order, |&i| (timeline.item(i).start, Reverse(timeline.item(i).bytes)));
                for (k, &i) in order.iter().enumerate() {
                    let item = timeline.item(i);
                    let range = |&j: &u32| (offsets[j as usize], offsets[j as usize] + timeline.item(j).bytes);
                    let alive = order[..k].iter().filter(|&&j| timeline.item(j).end > item.start);
                    let mut taken: Vec<(u64, u64)> = alive.map(range).collect();
                    taken.sort_unstable();
                    let ends = std::iter::once(0).chain(taken.iter().map(|range| range.1));
                    let rooms = ends.zip(taken.iter().map(|range| range.0).chain([u64::MAX]));
                    let places = rooms.filter_map(|(from, to)| {
                        let at = from.next_multiple_of(item.alignment);
                        (at + item.bytes <= to).then_some((to - from, at))
                    });
                    prop_assert_eq!(places.min().map(|(_, at)| at), Some(offsets[i as usize]));
                }
            }
        }
    }

    /// The last item takes the tighter one of the two ranges that are free by then, and the address space may be too
    /// small.
    #[test]
    fn the_tightest_range_is_taken() {
        let part = crate::planner::tests::part(&[(0, 1, 9), (0, 2, 5), (0, 1, 4), (0, 2, 3), (1, 1, 2)], 2);
        let (height, offsets) = best_fit(&Timeline::forward(&part)).unwrap();
        let last = part.items.iter().position(|item| item.start == 1).unwrap();
        assert_eq!((height, offsets[last]), (21, 14));
        let whole = crate::planner::tests::part(&[(0, 1, u64::MAX)], 1);
        assert_eq!(best_fit(&Timeline::forward(&whole)).unwrap().0, u64::MAX);
    }
}

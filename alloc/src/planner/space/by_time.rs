//! An interval index of placed items: the items that share a clique with a given item, and their addresses.
//!
//! Time is cut into slices of equal length. Each slice lists the items born in it. An item that lives on into later
//! slices is also listed at the few nodes of a segment tree that cover those slices. So the items alive when a slice
//! begins are exactly those listed on the path from the slice's leaf to the root. A query for a short item looks only
//! at items near it in time, and a long item is listed in few places.

use crate::planner::decompose::parts::{Item, Part};

/// An item at its offset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Rectangle {
    /// First byte.
    pub from: u64,
    /// One past the last byte.
    pub to: u64,
    /// First clique.
    pub start: u32,
    /// One past the last clique.
    pub end: u32,
    /// Number of the item.
    pub item: u32,
}

/// The index. All lists ascend by address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ByTime {
    /// Cliques per slice.
    slice: u32,
    born: Vec<Vec<Rectangle>>,
    /// A segment tree over the slices. Node `k` has the children `2k` and `2k + 1`; the second half are the leaves.
    crossing: Vec<Vec<Rectangle>>,
}

/// Least number of slices. With this many slices, a query for a short item looks at few other items.
const SLICES: u32 = 256;

/// Largest average number of items per slice. If there are more items, there are more slices.
const BIRTHS: u32 = 16;

impl ByTime {
    fn new(part: &Part) -> Self {
        let wanted = SLICES.max(part.items.len() as u32 / BIRTHS);
        let slice = part.cliques.div_ceil(wanted).max(1);
        let count = part.cliques.div_ceil(slice) as usize;
        let nodes = 2 * count.next_power_of_two();
        Self { slice, born: vec![Vec::new(); count], crossing: vec![Vec::new(); nodes] }
    }

    /// Builds the index of the items that have a place. Also returns the work that this takes.
    pub fn of(part: &Part, places: &[Option<u64>]) -> (Self, u64) {
        let mut index = Self::new(part);
        let mut cost = 0;
        for ((i, &item), place) in (0..).zip(&part.items).zip(places) {
            let Some(at) = *place else { continue };
            let rectangle = Rectangle { from: at, to: at + item.bytes, start: item.start, end: item.end, item: i };
            index.in_lists(item, |list| {
                list.push(rectangle);
                cost += 1;
            });
        }
        for list in index.born.iter_mut().chain(&mut index.crossing) {
            list.sort_unstable_by_key(|other| (other.from, other.item));
        }
        (index, cost)
    }

    /// Adds item number `i` at the offset `at`. Returns the work that this takes.
    pub fn insert(&mut self, i: u32, item: Item, at: u64) -> u64 {
        let rectangle = Rectangle { from: at, to: at + item.bytes, start: item.start, end: item.end, item: i };
        let mut cost = 0;
        self.in_lists(item, |list| {
            cost += 1 + list.len() as u64 / MOVED_AT_ONCE;
            let position = list.partition_point(|other| (other.from, other.item) < (at, i));
            list.insert(position, rectangle);
        });
        cost
    }

    /// Removes item number `i` from the offset `at`, where the item was added before. Returns the work that this takes.
    pub fn remove(&mut self, i: u32, item: Item, at: u64) -> u64 {
        let mut cost = 0;
        self.in_lists(item, |list| {
            cost += 1 + list.len() as u64 / MOVED_AT_ONCE;
            let position = list.partition_point(|other| (other.from, other.item) < (at, i));
            debug_assert_eq!(list[position].item, i);
            list.remove(position);
        });
        cost
    }

    /// Calls `meet` with the items that share a clique with `item`. Returns the number of items looked at.
    pub fn beside(&self, item: Item, mut meet: impl FnMut(&Rectangle)) -> u64 {
        let (first, last) = self.slices(item);
        let leaf = self.crossing.len() / 2 + first;
        let way_up = std::iter::successors(Some(leaf), |&node| (node > 1).then_some(node / 2));
        let mut looked = 0;
        for list in way_up.map(|node| &self.crossing[node]).chain([&self.born[first]]) {
            looked += 1 + list.len() as u64;
            list.iter().filter(|other| item.meets(other.start..other.end)).for_each(&mut meet);
        }
        for slice in first + 1..=last {
            let list = &self.born[slice];
            looked += 1 + list.len() as u64;
            list.iter().filter(|other| slice < last || other.start < item.end).for_each(&mut meet);
        }
        looked
    }

    fn slices(&self, item: Item) -> (usize, usize) {
        ((item.start / self.slice) as usize, ((item.end - 1) / self.slice) as usize)
    }

    /// Applies `change` to the lists that hold an item.
    fn in_lists(&mut self, item: Item, mut change: impl FnMut(&mut Vec<Rectangle>)) {
        let (first, last) = self.slices(item);
        change(&mut self.born[first]);
        let leaves = self.crossing.len() / 2;
        let (mut from, mut to) = (leaves + first + 1, leaves + last + 1);
        while from < to {
            if from % 2 == 1 {
                change(&mut self.crossing[from]);
                from += 1;
            }
            if to % 2 == 1 {
                to -= 1;
                change(&mut self.crossing[to]);
            }
            (from, to) = (from / 2, to / 2);
        }
    }
}

/// Number of list entries that can be moved for the cost of looking at one entry.
const MOVED_AT_ONCE: u64 = 16;

#[cfg(test)]
mod tests {
    use gapless_testing::prelude::*;

    use super::*;

    generated! {
        /// Compared with a list of everything that was added and not removed.
        #[test]
        fn neighbours_of_an_item_share_its_cliques(
            placed in prop::collection::vec((0..900u32, 1..900u32, 0..40u64, any::<bool>()), 1..60),
            asked in (0..900u32, 1..900u32),
        ) {
            let item = |start: u32, cliques: u32| Item { start, end: (start + cliques).min(900), bytes: 3, alignment: 1 };
            let items: Vec<Item> = placed.iter().map(|&(start, cliques, ..)| item(start, cliques)).collect();
            let part = Part::from_items(items.clone(), 900);
            let mut index = ByTime::new(&part);
            for (i, &(_, _, at, _)) in placed.iter().enumerate() {
                index.insert(i as u32, items[i], at);
            }
            let places: Vec<Option<u64>> = placed.iter().map(|p| Some(p.2)).collect();
            prop_assert_eq!(&ByTime::of(&part, &places).0, &index);
            for (i, &(_, _, at, _)) in placed.iter().enumerate().filter(|(_, p)| p.3) {
                index.remove(i as u32, items[i], at);
            }
            let asked = item(asked.0, asked.1);
            let mut found = Vec::new();
            index.beside(asked, |other| found.push(other.item));
            found.sort_unstable();
            let stays = |&i: &u32| !placed[i as usize].3 && items[i as usize].meets(asked.start..asked.end);
            prop_assert_eq!(found, (0..placed.len() as u32).filter(stays).collect::<Vec<_>>());
        }
    }
}

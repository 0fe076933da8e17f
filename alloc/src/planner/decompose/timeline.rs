//! A part in one direction of time: the items that are born and those that die at each clique.
//!
//! In the backward direction everything is mirrored: the last clique is clique 0, and an item is born where it ends. So
//! searches are written for one direction only.

use std::borrow::Cow;
use std::cmp::Reverse;

use super::parts::{Item, Part};
use crate::order::sort_by_key;

/// Indices grouped by a small key.
#[derive(Debug, Clone)]
pub(crate) struct Buckets {
    /// For each key, the index of the key's first entry. The number of all entries follows at the end.
    pub starts: Vec<u32>,
    pub entries: Vec<u32>,
}

impl Buckets {
    /// Groups the indices `0..` by `keys`, each below `count`. Indices of one key stay in order.
    pub fn new(count: u32, keys: impl Iterator<Item = u32> + Clone) -> Self {
        let mut starts = vec![0u32; count as usize + 1];
        let mut total = 0;
        for key in keys.clone() {
            starts[key as usize] += 1;
            total += 1;
        }
        let mut next = 0;
        for start in &mut starts {
            next += std::mem::replace(start, next);
        }
        let mut free = starts.clone();
        let mut entries = vec![0; total];
        for (index, key) in (0..).zip(keys) {
            let slot = &mut free[key as usize];
            entries[*slot as usize] = index;
            *slot += 1;
        }
        Self { starts, entries }
    }

    /// The entries of a key.
    pub fn entries_of(&self, key: u32) -> &[u32] {
        &self.entries[self.starts[key as usize] as usize..self.starts[key as usize + 1] as usize]
    }
}

/// A part's items in one direction of time.
pub(crate) struct Timeline<'p> {
    pub items: Cow<'p, [Item]>,
    pub cliques: u32,
    births: Buckets,
    deaths: Buckets,
}

impl<'p> Timeline<'p> {
    pub fn forward(part: &'p Part) -> Self {
        Self::new(Cow::Borrowed(&part.items), part.cliques)
    }

    pub fn backward(part: &'p Part) -> Self {
        let last = part.cliques;
        let mirrored = |item: &Item| Item { start: last - item.end, end: last - item.start, ..*item };
        Self::new(part.items.iter().map(mirrored).collect(), part.cliques)
    }

    fn new(items: Cow<'p, [Item]>, cliques: u32) -> Self {
        let mut births = Buckets::new(cliques + 1, items.iter().map(|item| item.start));
        let deaths = Buckets::new(cliques + 1, items.iter().map(|item| item.end));
        if let Cow::Owned(items) = &items {
            for range in births.starts.windows(2).filter(|range| range[1] - range[0] > 1) {
                let born = &mut births.entries[range[0] as usize..range[1] as usize];
                sort_by_key(born, |&i| Reverse(items[i as usize].end));
            }
        }
        Self { items, cliques, births, deaths }
    }

    pub fn item(&self, i: u32) -> Item {
        self.items[i as usize]
    }

    /// The items born in a clique, the longest-lived first.
    pub fn born(&self, clique: u32) -> &[u32] {
        self.births.entries_of(clique)
    }

    /// Returns the items whose last clique is the one before `clique`.
    pub fn dying(&self, clique: u32) -> &[u32] {
        self.deaths.entries_of(clique)
    }

    /// The items alive in a clique, in ascending order.
    pub fn alive(&self, clique: u32) -> Vec<u32> {
        (0..).zip(self.items.iter()).filter(|(_, item)| item.meets(clique..clique + 1)).map(|(i, _)| i).collect()
    }
}

#[cfg(test)]
mod tests {
    use gapless_testing::prelude::*;

    use super::*;
    use crate::planner::tests::part;

    generated! {
        /// Compared with a scan over all items.
        #[test]
        fn births_and_deaths_are_those_of_the_items(
            rows in prop::collection::vec((0..20u32, 1..=20u32, Just(1u64)), 1..40),
        ) {
            let part = part(&rows, 20);
            for timeline in [Timeline::forward(&part), Timeline::backward(&part)] {
                let those = |wanted: &dyn Fn(Item) -> bool| -> Vec<u32> {
                    (0..part.items.len() as u32).filter(|&i| wanted(timeline.item(i))).collect()
                };
                for clique in 0..20 {
                    let mut born = timeline.born(clique).to_vec();
                    prop_assert!(born.windows(2).all(|pair| timeline.item(pair[0]).end >= timeline.item(pair[1]).end));
                    born.sort_unstable();
                    prop_assert_eq!(born, those(&|item| item.start == clique));
                    prop_assert_eq!(timeline.dying(clique), those(&|item| item.end == clique));
                    prop_assert_eq!(timeline.alive(clique), those(&|item| item.start <= clique && clique < item.end));
                }
            }
        }
    }
}

//! Sizes that keep to themselves where a part is fullest.
//!
//! A training step is fullest once per micro-batch, each time with the same sizes in other hands. Where several cliques
//! have no byte to spare, whoever is born between two of them must fill exactly what died, and a hole cut too small is
//! never made good. So what is alive at any of these cliques falls into classes of sizes, each with as many bytes as it
//! has at the fullest cliques, in a region of its own. A size that needs more than that in between, since one is born
//! before its like is gone, shares a region with another that needs less meanwhile: the fewer sizes in a region, the
//! easier it is to plan. What is alive at none of these cliques, where there is room, flows around them.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use super::meter::Meter;
use super::part::{Item, Part, gcd};

/// Items of a few sizes, which never need more bytes than they have at the fullest cliques.
#[derive(Debug)]
pub(crate) struct Class {
    pub part: Part,
    /// What each item is in the whole part.
    pub members: Vec<u32>,
}

/// The classes of a part, those that are full for longest first. None where one clique is fullest, where pins or
/// alignments are in the way, or where the meter stops.
pub(crate) fn classes(part: &Part, meter: &mut Meter) -> Vec<Class> {
    let live = part.live();
    let most = live.iter().copied().max().unwrap_or(0);
    let full: Vec<u32> = (0..part.cliques).filter(|&k| live[k as usize] == most).collect();
    if full.len() < 2 || !part.pins.is_empty() || part.items.iter().any(|item| item.alignment > 1) {
        return Vec::new();
    }
    let is_alive_at_one = |item: &Item| {
        let next = full.partition_point(|&k| k < item.start);
        full.get(next).is_some_and(|&k| k < item.end)
    };
    let mut of_size: BTreeMap<u64, Vec<u32>> = BTreeMap::new();
    for (i, item) in (0..).zip(&part.items).filter(|(_, item)| is_alive_at_one(item)) {
        of_size.entry(item.bytes).or_default().push(i);
    }
    let mut classes: Vec<Class> = Vec::new();
    while let Some((bytes, members)) = of_size.pop_last() {
        meter.spend(members.len() as u64 + u64::from(part.cliques));
        let mut grid = bytes;
        let mut class = Class::new(part, members);
        while !class.is_level(&full) {
            let Some(partner) = class.partner(part, &full, grid, &of_size, &classes, meter) else { return Vec::new() };
            let others = match partner {
                Partner::Size(other) => {
                    grid = gcd(grid, other);
                    of_size.remove(&other).unwrap_or_default()
                }
                Partner::Class(index) => classes.remove(index).members,
            };
            class = class.with(part, &others);
        }
        if meter.stopped().is_some() {
            return Vec::new();
        }
        classes.push(class);
    }
    classes.sort_by_key(|class| Reverse(class.fullness()));
    classes
}

/// With whom a class may share its region: a size that has none yet, or a class that has one.
#[derive(Debug, Clone, Copy)]
enum Partner {
    Size(u64),
    Class(usize),
}

impl Class {
    fn new(whole: &Part, mut members: Vec<u32>) -> Self {
        members.sort_unstable();
        let items: Vec<Item> = members.iter().map(|&i| whole.items[i as usize]).collect();
        let mut part = Part { items, cliques: whole.cliques, ..Part::default() };
        part.bound = part.live().into_iter().max().unwrap_or(0);
        Self { part, members }
    }

    fn with(&self, whole: &Part, others: &[u32]) -> Self {
        Self::new(whole, [&self.members, others].concat())
    }

    /// Who shares the region of a class that is not level. It should be one with whom it is; else, and among those, comes
    /// the size of the coarsest common grid, then the class of the smallest items. `None` where there is nobody, or the
    /// meter stops.
    fn partner(
        &self,
        whole: &Part,
        full: &[u32],
        grid: u64,
        of_size: &BTreeMap<u64, Vec<u32>>,
        classes: &[Class],
        meter: &mut Meter,
    ) -> Option<Partner> {
        let mut sizes: Vec<(u64, &[u32])> = of_size.iter().map(|(&bytes, members)| (bytes, &members[..])).collect();
        sizes.sort_by_key(|&(bytes, _)| Reverse((gcd(grid, bytes), bytes)));
        let sizes = sizes.into_iter().map(|(bytes, members)| (Partner::Size(bytes), members));
        let classes = classes.iter().enumerate().map(|(index, class)| (Partner::Class(index), &class.members[..]));
        let mut first = None;
        for (partner, others) in sizes.chain(classes.rev()) {
            first.get_or_insert(partner);
            meter.spend((self.members.len() + others.len()) as u64 + u64::from(whole.cliques));
            if meter.stopped().is_some() {
                return None;
            }
            if self.with(whole, others).is_level(full) {
                return Some(partner);
            }
        }
        first
    }

    /// Whether the class has its most bytes at each of these cliques.
    fn is_level(&self, full: &[u32]) -> bool {
        let live = self.part.live();
        full.iter().all(|&k| live[k as usize] == self.part.bound)
    }

    /// Cliques for which the class is full, on average over its bytes.
    fn fullness(&self) -> u64 {
        let area: u128 = self.part.items.iter().map(|item| u128::from(item.bytes) * u128::from(item.cliques())).sum();
        (area / u128::from(self.part.bound.max(1))) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of `(start, end, bytes)`.
    fn part(rows: &[(u32, u32, u64)]) -> Part {
        let items: Vec<Item> =
            rows.iter().map(|&(start, end, bytes)| Item { start, end, bytes, alignment: 1 }).collect();
        let cliques = items.iter().map(|item| item.end).max().unwrap_or(0);
        Part { items, cliques, ..Part::default() }
    }

    fn of(rows: &[(u32, u32, u64)]) -> Vec<(u64, Vec<u32>)> {
        classes(&part(rows), &mut Meter { work: 1_000, ..Meter::default() })
            .into_iter()
            .map(|class| (class.part.bound, class.members))
            .collect()
    }

    /// The fours take turns. The second two is born before the first died, so that it needs what ones leave.
    #[test]
    fn sizes_that_need_more_in_between_share_a_region() {
        let rows = [(0, 1, 4), (2, 3, 4), (0, 2, 2), (1, 3, 2), (0, 1, 1), (0, 1, 1), (2, 3, 1), (2, 3, 1)];
        assert_eq!(of(&rows), [(4, vec![2, 3, 4, 5, 6, 7]), (4, vec![0, 1])]);
    }

    /// The threes stay, so that the second two needs what the seven leaves, and nobody else shares their region.
    #[test]
    fn one_that_leaves_enough_is_enough() {
        let rows = [(0, 1, 7), (2, 3, 7), (0, 3, 3), (0, 2, 2), (1, 3, 2), (0, 3, 1)];
        assert_eq!(of(&rows), [(3, vec![2]), (1, vec![5]), (9, vec![0, 1, 3, 4])]);
    }

    /// Where no smaller size is left, the class before it takes the smallest in.
    #[test]
    fn the_smallest_may_join_a_larger_size() {
        assert_eq!(of(&[(0, 1, 2), (2, 3, 2), (0, 2, 1), (1, 3, 1)]), [(3, vec![0, 1, 2, 3])]);
    }

    /// What is alive at none of the fullest cliques belongs to no class.
    #[test]
    fn only_the_fullest_cliques_count() {
        assert_eq!(of(&[(0, 1, 3), (1, 2, 2), (2, 3, 3)]), [(3, vec![0, 2])]);
        assert_eq!(of(&[(0, 1, 3), (1, 2, 2)]), [], "one clique is fullest: any stack will do");
        let mut pinned = part(&[(0, 1, 3), (2, 3, 3)]);
        let found = |part: &Part, work: u64| classes(part, &mut Meter { work, ..Meter::default() }).len();
        assert_eq!((found(&pinned, 1_000), found(&pinned, 1)), (1, 0));
        pinned.pins = vec![(0, 0)];
        assert_eq!(found(&pinned, 1_000), 0);
    }
}

//! One region of the arena per size.
//!
//! At a fullest clique, items in any order leave no gap. So each size can have a region that is as large as the size's
//! live bytes at that clique. Items of one size take turns in the slots of their region, and each region is planned
//! separately. Two kinds of items get no place in a region, and later use bytes that the regions leave idle at other
//! times:
//!
//! - items of sizes that occur at no fullest clique;
//! - the shortest-lived items of a size, wherever more of its items are alive than fit into the region.
//!
//! If there are several fullest cliques, a size may have more live bytes at one of these cliques than at another. Such
//! a size shares its region with sizes that have fewer live bytes where this size has more.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use super::parts::{Item, Part, gcd};
use crate::order::sort_by_key;
use crate::planner::budget::Budget;

/// Most pairs of a size and a fullest clique. Each takes eight bytes of memory.
const MAX_CELLS: usize = 50_000_000;

/// The items of one region, which are planned separately.
#[derive(Debug)]
pub(crate) struct Region {
    /// The region's items as a part of their own. The bound of that part is the height of the region.
    pub part: Part,
    /// Index in the whole part of each item.
    pub members: Vec<u32>,
}

/// Returns the regions of a part. The regions whose bytes are in use for longest come first. If `whole`, sizes also
/// share a region when that avoids leaving items out. Returns no regions if the part has pins or alignments, if no
/// partner is found for a class that needs one, or if the budget does not suffice.
pub(crate) fn regions(part: &Part, whole: bool, budget: &mut Budget) -> Vec<Region> {
    if !part.is_free() {
        return Vec::new();
    }
    let full = part.fullest_cliques();
    let mut distinct: Vec<u64> = part.items.iter().map(|item| item.bytes).collect();
    distinct.sort_unstable();
    distinct.dedup();
    // Regions suit few sizes. In a packing without gaps, almost every item has a size of its own and every clique is
    // full.
    let cells = distinct.len().saturating_mul(full.len());
    if cells > MAX_CELLS {
        return Vec::new();
    }
    let mut of_size: BTreeMap<u64, Vec<u32>> = BTreeMap::new();
    let is_at_full =
        |item: &Item| full[full.partition_point(|&k| k < item.start)..].first().is_some_and(|&k| k < item.end);
    for (i, item) in (0..).zip(&part.items).filter(|(_, item)| !whole || is_at_full(item)) {
        of_size.entry(item.bytes).or_default().push(i);
    }
    let mut sizes: Vec<Class> = of_size.into_values().map(|members| Class::new(part, &full, members)).collect();
    sizes.retain(|class| class.at_full.iter().any(|&bytes| bytes > 0));
    let mut classes: Vec<Class> = Vec::new();
    while let Some(mut class) = sizes.pop() {
        while !class.is_level() || (whole && class.most(part) > class.at_full[0]) {
            budget.spend((class.members.len() + full.len() * (sizes.len() + classes.len())) as u64);
            if budget.stopped().is_some() {
                return Vec::new();
            }
            match class.partner(part, whole, &sizes, &classes) {
                Some(Partner::Size(index)) => class.join(sizes.remove(index)),
                Some(Partner::Class(index)) => class.join(classes.remove(index)),
                None if class.is_level() => break,
                None => return Vec::new(),
            }
        }
        classes.push(class);
    }
    // Each region of a large part takes several passes over the cliques.
    if part.is_large() && classes.len() as u64 * u64::from(part.cliques) / 2 > budget.left() {
        return Vec::new();
    }
    budget.spend(classes.iter().map(|class| class.members.len() as u64 + u64::from(part.cliques) / 8).sum());
    let mut regions: Vec<Region> = classes.into_iter().map(|class| class.trimmed(part, &full)).collect();
    sort_by_key(&mut regions, |region| Reverse(region.fullness()));
    regions
}

/// Items of one or more sizes that share a region.
#[derive(Debug)]
struct Class {
    members: Vec<u32>,
    /// The greatest common divisor of the sizes.
    grid: u64,
    /// Live bytes of the class at each of the fullest cliques.
    at_full: Vec<u64>,
}

/// The partner that a class shares its region with: a size that has no region yet, or a class that has one.
#[derive(Debug, Clone, Copy)]
enum Partner {
    Size(usize),
    Class(usize),
}

impl Class {
    fn new(part: &Part, full: &[u32], members: Vec<u32>) -> Self {
        let mut at_full = vec![0u64; full.len() + 1];
        for &i in &members {
            let item = part.items[i as usize];
            let [from, to] = [item.start, item.end].map(|clique| full.partition_point(|&k| k < clique));
            at_full[from] = at_full[from].wrapping_add(item.bytes);
            at_full[to] = at_full[to].wrapping_sub(item.bytes);
        }
        for k in 1..at_full.len() {
            at_full[k] = at_full[k].wrapping_add(at_full[k - 1]);
        }
        at_full.pop();
        Self { grid: members.iter().map(|&i| part.items[i as usize].bytes).fold(0, gcd), members, at_full }
    }

    /// True if the class has the same number of live bytes at all of the fullest cliques.
    fn is_level(&self) -> bool {
        self.at_full.windows(2).all(|pair| pair[0] == pair[1])
    }

    /// The most bytes of the class that are alive at once.
    fn most(&self, part: &Part) -> u64 {
        self.part(part).bound
    }

    fn part(&self, part: &Part) -> Part {
        Part::from_items(self.members.iter().map(|&i| part.items[i as usize]).collect(), part.cliques)
    }

    fn join(&mut self, other: Self) {
        self.members.extend(other.members);
        self.members.sort_unstable();
        self.grid = gcd(self.grid, other.grid);
        self.at_full.iter_mut().zip(other.at_full).for_each(|(bytes, more)| *bytes += more);
    }

    /// Chooses the partner that this class shares its region with. A good partner makes the class level. If `whole`,
    /// the two together must also never need more bytes between the fullest cliques than at them. Without a good
    /// partner, a class that is not level takes the first candidate, and a level class gets `None`. Also returns `None`
    /// if there are no candidates. The candidates are the sizes, those with the coarsest common grid first, and then
    /// the classes, those of the smallest items first.
    fn partner(&self, part: &Part, whole: bool, sizes: &[Self], classes: &[Self]) -> Option<Partner> {
        let mut by_grid: Vec<usize> = (0..sizes.len()).collect();
        sort_by_key(&mut by_grid, |&index| Reverse((gcd(self.grid, sizes[index].grid), sizes[index].grid)));
        let sizes = by_grid.into_iter().map(|index| (Partner::Size(index), &sizes[index]));
        let classes = classes.iter().enumerate().rev().map(|(index, class)| (Partner::Class(index), class));
        let mut first = None;
        for (partner, other) in sizes.chain(classes) {
            first.get_or_insert(partner);
            let level = self.at_full[0] + other.at_full[0];
            if self.at_full.iter().zip(&other.at_full).any(|(a, b)| a + b != level) {
                continue;
            }
            let members = || [&self.members[..], &other.members].concat();
            if !whole || (Self { members: members(), grid: 0, at_full: Vec::new() }).most(part) == level {
                return Some(partner);
            }
        }
        first.filter(|_| !self.is_level())
    }

    /// Returns the region of the class. Wherever more bytes of the class are alive than at the fullest cliques, the
    /// shortest-lived items are left out.
    fn trimmed(self, whole: &Part, full: &[u32]) -> Region {
        let items: Vec<Item> = self.members.iter().map(|&i| whole.items[i as usize]).collect();
        let room = self.at_full[0];
        // The items alive, by length and by end.
        let mut by_length: BTreeSet<(u32, usize)> = BTreeSet::new();
        let mut by_end: BTreeSet<(u32, u32, usize)> = BTreeSet::new();
        let mut is_kept = vec![true; items.len()];
        let mut bytes = 0;
        for (k, item) in items.iter().enumerate() {
            while let Some(&(_, length, gone)) = by_end.first().filter(|&&(end, ..)| end <= item.start) {
                by_end.pop_first();
                by_length.remove(&(length, gone));
                bytes -= items[gone].bytes;
            }
            // An item that is alive in a fullest clique is never left out.
            let next = full.partition_point(|&clique| clique < item.start);
            let length = full.get(next).filter(|&&clique| clique < item.end).map_or(item.cliques(), |_| u32::MAX);
            by_length.insert((length, k));
            by_end.insert((item.end, length, k));
            bytes += item.bytes;
            while bytes > room
                && let Some((length, left_out)) = by_length.pop_first()
            {
                by_end.remove(&(items[left_out].end, length, left_out));
                bytes -= items[left_out].bytes;
                is_kept[left_out] = false;
            }
        }
        let mut kept = is_kept.iter();
        let members: Vec<u32> = self.members.into_iter().filter(|_| kept.next() == Some(&true)).collect();
        let items = members.iter().map(|&i| whole.items[i as usize]).collect();
        Region { part: Part::from_items(items, whole.cliques), members }
    }
}

impl Region {
    /// Average number of cliques for which a byte of the region is in use.
    fn fullness(&self) -> u64 {
        let area: u128 = self.part.items.iter().map(|item| u128::from(item.bytes) * u128::from(item.cliques())).sum();
        (area / u128::from(self.part.bound.max(1))) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A part of `(start, end, bytes)`.
    fn part(rows: &[(u32, u32, u64)]) -> Part {
        let items: Vec<Item> =
            rows.iter().map(|&(start, end, bytes)| Item { start, end, bytes, alignment: 1 }).collect();
        let cliques = items.iter().map(|item| item.end).max().unwrap_or(0);
        Part::from_items(items, cliques)
    }

    /// Bytes and members of each region.
    fn regions_of(rows: &[(u32, u32, u64)], whole: bool) -> Vec<(u64, Vec<u32>)> {
        let regions = regions(&part(rows), whole, &mut Budget { work: 1_000, ..Budget::default() });
        regions.into_iter().map(|region| (region.part.bound, region.members)).collect()
    }

    /// The two items of size 4 take turns. The two items of size 2 overlap in time. So either one item of size 2 is
    /// left out, or the items of size 2 share a region with the items of size 1.
    #[test]
    fn sizes_that_need_more_in_between_are_cut_or_share_a_region() {
        let rows = [(0, 1, 4), (0, 2, 2), (0, 1, 1), (0, 1, 1), (1, 3, 2), (2, 3, 4), (2, 3, 1), (2, 3, 1)];
        assert_eq!(regions_of(&rows, true), [(4, vec![1, 2, 3, 4, 6, 7]), (4, vec![0, 5])]);
        assert_eq!(regions_of(&rows, false), [(4, vec![0, 5]), (2, vec![4]), (2, vec![2, 3, 6, 7])]);
    }

    /// The items of sizes 3 and 1 live throughout and keep their regions. The second item of size 2 needs bytes that
    /// the first item of size 7 frees, so sizes 2 and 7 share a region.
    #[test]
    fn one_that_leaves_enough_is_enough() {
        let rows = [(0, 1, 7), (0, 3, 3), (0, 3, 1), (0, 2, 2), (1, 3, 2), (2, 3, 7)];
        assert_eq!(regions_of(&rows, true), [(3, vec![1]), (1, vec![2]), (9, vec![0, 3, 4, 5])]);
    }

    /// If no smaller size is left as a partner, the smallest size joins the class found before.
    #[test]
    fn the_smallest_may_join_a_larger_size() {
        assert_eq!(regions_of(&[(0, 1, 2), (0, 2, 1), (1, 3, 1), (2, 3, 2)], true), [(3, vec![0, 1, 2, 3])]);
    }

    /// Two items of size 2 follow one of size 4, so both sizes share a region.
    #[test]
    fn sizes_are_level_at_all_fullest_cliques() {
        let rows = [(0, 1, 4), (0, 3, 2), (2, 3, 2), (2, 3, 2)];
        assert_eq!(regions_of(&rows, false), [(6, vec![0, 1, 2, 3])]);
    }

    /// A size that no fullest clique has gets no region.
    #[test]
    fn only_the_fullest_cliques_count() {
        assert_eq!(regions_of(&[(0, 1, 3), (1, 2, 2), (2, 3, 3)], false), [(3, vec![0, 2])]);
        let mut pinned = part(&[(0, 1, 3), (2, 3, 3)]);
        let found = |part: &Part, work: u64| regions(part, true, &mut Budget { work, ..Budget::default() }).len();
        assert_eq!(found(&pinned, 1_000), 1);
        pinned.pins = vec![(0, 0)];
        assert_eq!(found(&pinned, 1_000), 0);
    }

    /// Every item has a size of its own and every clique is full, as in a packing without gaps.
    #[test]
    fn many_sizes_at_many_full_cliques_get_no_regions() {
        let rows = |cliques: u32| -> Vec<(u32, u32, u64)> {
            let pair = |k: u32| [(k, k + 1, 1 + u64::from(k)), (k, k + 1, 19_999 - u64::from(k))];
            (0..cliques).flat_map(pair).collect()
        };
        let found = |cliques: u32| {
            regions(&part(&rows(cliques)), false, &mut Budget { work: u64::MAX, ..Budget::default() }).len()
        };
        assert_eq!(found(20), 1);
        assert_eq!(found(5_100), 0);
    }

    /// All ten sizes are alive in the first clique, which is the fullest.
    #[test]
    fn a_large_part_gets_regions_if_the_work_suffices() {
        let later = (1..81_000).map(|k| (k, k + 1, 1 + u64::from(k % 10)));
        let part = part(&(0..10).map(|k| (0, 1, 1 + k)).chain(later).collect::<Vec<_>>());
        let found = |work: u64| regions(&part, false, &mut Budget { work, ..Budget::default() }).len();
        assert_eq!(found(100_000), 0);
        assert_eq!(found(1_000_000), 10);
    }

    /// The shortest-lived of three items that overlap in two slots is left out, unless a fullest clique has it.
    #[test]
    fn the_shortest_lived_are_left_out() {
        let rows = [(0, 3, 1), (0, 5, 1), (0, 1, 9), (1, 2, 1), (3, 4, 1), (4, 9, 1), (5, 8, 1), (6, 9, 1)];
        assert_eq!(regions_of(&rows, false)[0], (2, vec![0, 1, 4, 5, 7]));
    }
}

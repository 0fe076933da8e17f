//! Items with a place of their own, placed one by one before a sweep flows around them.

use std::ops::Range;

use super::part::{Item, Part};
use super::sweep::Start;

/// Places given ahead of a sweep.
#[derive(Debug, Clone, Default)]
pub(crate) struct Reserved {
    /// By item; empty when nothing is reserved.
    places: Vec<Option<u64>>,
    by_start: ByClique,
    by_end: ByClique,
    /// Rectangles looked at while placing.
    pub work: u64,
}

impl Reserved {
    /// Keeps the part's pins and the stack that the sweep starts from, then gives each of `members` the lowest place left by those before it. `None` when the
    /// address space ends.
    pub fn place(part: &Part, start: Start, members: &[u32]) -> Option<Self> {
        if part.pins.is_empty() && members.is_empty() {
            return Some(Self::default());
        }
        let mut reserved = Self { places: vec![None; part.items.len()], ..Self::default() };
        let mut index = Index::new(part);
        for &(i, at) in &part.pins {
            reserved.put(part, &mut index, i, at);
        }
        if let Start::Stack(_, stack) = start {
            let mut at = 0;
            for &i in stack {
                reserved.put(part, &mut index, i, at);
                at += part.items[i as usize].bytes;
            }
        }
        let mut taken = Vec::new();
        for &i in members {
            if reserved.places[i as usize].is_none() {
                index.overlapping(part.items[i as usize], &mut taken);
                reserved.work += taken.len() as u64;
                taken.sort_unstable();
                let at = lowest_gap(&taken, part.items[i as usize])?;
                reserved.put(part, &mut index, i, at);
            }
        }
        reserved.by_start.build();
        reserved.by_end.build();
        Some(reserved)
    }

    pub fn is_empty(&self) -> bool {
        self.by_start.entries.is_empty()
    }

    /// An item's place.
    pub fn of(&self, item: u32) -> Option<u64> {
        self.places.get(item as usize).copied().flatten()
    }

    /// Ranges of the items that start within `cliques`: ascending, disjoint.
    pub fn starting(&self, cliques: Range<u32>, ranges: &mut Vec<(u64, u64)>) {
        self.by_start.between(cliques, ranges);
    }

    /// Ranges of the items that end within `cliques`: ascending, disjoint.
    pub fn ending(&self, cliques: Range<u32>, ranges: &mut Vec<(u64, u64)>) {
        self.by_end.between(cliques, ranges);
    }

    fn put(&mut self, part: &Part, index: &mut Index, i: u32, at: u64) {
        let item = part.items[i as usize];
        self.places[i as usize] = Some(at);
        self.by_start.entries.push((item.start, at, at + item.bytes));
        self.by_end.entries.push((item.end, at, at + item.bytes));
        index.insert(item, at);
    }
}

/// Ranges by clique: those of a stretch of cliques are read as a few unions, however many they are.
#[derive(Debug, Clone, Default)]
struct ByClique {
    /// `(clique, from, to)`: ascending.
    entries: Vec<(u32, u64, u64)>,
    /// Where [`BLOCK`]s of entries are many: node `k` joins the ranges of `2k` and `2k + 1`, the blocks come last.
    unions: Vec<Vec<(u64, u64)>>,
}

/// Entries that are read one by one.
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

    /// Ranges of the entries within `cliques`: ascending, disjoint.
    fn between(&self, cliques: Range<u32>, ranges: &mut Vec<(u64, u64)>) {
        ranges.clear();
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
        join(ranges);
    }
}

/// Sorts ranges and makes one of those that touch.
fn join(ranges: &mut Vec<(u64, u64)>) {
    // They come as a few sorted runs, which the stable sort finds.
    ranges.sort();
    ranges.dedup_by(|next, kept| {
        let touches = next.0 <= kept.1;
        if touches {
            kept.1 = kept.1.max(next.1);
        }
        touches
    });
}

/// The lowest aligned place for `item` between `taken` ranges, which are sorted by their start.
fn lowest_gap(taken: &[(u64, u64)], item: Item) -> Option<u64> {
    let mut floor = 0u64;
    for &(from, to) in taken {
        let at = floor.checked_next_multiple_of(item.alignment)?;
        if from >= at && from - at >= item.bytes {
            return Some(at);
        }
        floor = floor.max(to);
    }
    let at = floor.checked_next_multiple_of(item.alignment)?;
    at.checked_add(item.bytes).map(|_| at)
}

/// Placed rectangles by time: each stretch of cliques lists who is born in it, and who came from before.
struct Index {
    stretch: u32,
    born: Vec<Vec<(Item, u64)>>,
    crossing: Vec<Vec<(Item, u64)>>,
}

/// Enough stretches that a transient meets few strangers, few enough that a long life is cheap to list.
const STRETCHES: u32 = 256;

impl Index {
    fn new(part: &Part) -> Self {
        let stretch = part.cliques.div_ceil(STRETCHES).max(1);
        let count = part.cliques.div_ceil(stretch) as usize;
        Self { stretch, born: vec![Vec::new(); count], crossing: vec![Vec::new(); count] }
    }

    fn insert(&mut self, item: Item, at: u64) {
        let (first, last) = (item.start / self.stretch, (item.end - 1) / self.stretch);
        self.born[first as usize].push((item, at));
        for stretch in first + 1..=last {
            self.crossing[stretch as usize].push((item, at));
        }
    }

    /// The ranges of those that share a clique with `item`, in any order.
    fn overlapping(&self, item: Item, ranges: &mut Vec<(u64, u64)>) {
        ranges.clear();
        let (first, last) = (item.start / self.stretch, (item.end - 1) / self.stretch);
        let born = self.born[first as usize..=last as usize].iter().flatten();
        let met = self.crossing[first as usize].iter().chain(born).filter(|(other, _)| other.overlaps(item));
        ranges.extend(met.map(|&(other, at)| (at, at + other.bytes)));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        /// Few entries or many: what a stretch of cliques holds is what its entries hold.
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

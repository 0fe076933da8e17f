//! Items with a place of their own, placed one by one before a sweep flows around them.

use std::ops::Range;

use super::part::{Item, Part};
use super::sweep::Start;

/// Places given ahead of a sweep.
#[derive(Debug, Clone, Default)]
pub(crate) struct Reserved {
    /// By item; empty when nothing is reserved.
    places: Vec<Option<u64>>,
    /// `(start, from, to)`: ascending.
    by_start: Vec<(u32, u64, u64)>,
    /// `(end, from, to)`: ascending.
    by_end: Vec<(u32, u64, u64)>,
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
        reserved.by_start.sort_unstable();
        reserved.by_end.sort_unstable();
        Some(reserved)
    }

    pub fn is_empty(&self) -> bool {
        self.by_start.is_empty()
    }

    /// An item's place.
    pub fn of(&self, item: u32) -> Option<u64> {
        self.places.get(item as usize).copied().flatten()
    }

    /// Ranges of the items that start within `cliques`: ascending, disjoint.
    pub fn starting(&self, cliques: Range<u32>, ranges: &mut Vec<(u64, u64)>) {
        Self::between(&self.by_start, cliques, ranges);
    }

    /// Ranges of the items that end within `cliques`: ascending, disjoint.
    pub fn ending(&self, cliques: Range<u32>, ranges: &mut Vec<(u64, u64)>) {
        Self::between(&self.by_end, cliques, ranges);
    }

    fn between(sorted: &[(u32, u64, u64)], cliques: Range<u32>, ranges: &mut Vec<(u64, u64)>) {
        ranges.clear();
        if sorted.is_empty() {
            return;
        }
        let from = sorted.partition_point(|entry| entry.0 < cliques.start);
        let to = sorted.partition_point(|entry| entry.0 < cliques.end);
        if from >= to {
            return;
        }
        ranges.extend(sorted[from..to].iter().map(|entry| (entry.1, entry.2)));
        ranges.sort_unstable();
        ranges.dedup_by(|next, kept| {
            let touches = next.0 <= kept.1;
            if touches {
                kept.1 = kept.1.max(next.1);
            }
            touches
        });
    }

    fn put(&mut self, part: &Part, index: &mut Index, i: u32, at: u64) {
        let item = part.items[i as usize];
        self.places[i as usize] = Some(at);
        self.by_start.push((item.start, at, at + item.bytes));
        self.by_end.push((item.end, at, at + item.bytes));
        index.insert(item, at);
    }
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

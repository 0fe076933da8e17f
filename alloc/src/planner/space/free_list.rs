//! The free address ranges at one moment of a sweep, with the items that bound them.
//!
//! The items form a ring in the order of their addresses, closed by the edge of the arena. Free ranges lie between some
//! neighbours in the ring. So when an item dies, the free ranges next to its own are found at once.

use crate::planner::decompose::parts::Item;

/// The free range that an item takes, and the end of that range at which the item is placed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fit {
    /// The lowest place.
    Lowest,
    /// The highest place below the ceiling.
    Highest,
    /// The bottom of the smallest range that is large enough; of equally small ranges, the lowest one.
    Tightest,
    /// The top of the smallest range that is large enough; of equally small ranges, the highest one.
    TightestHigh,
}

/// A free range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Hole {
    pub from: u64,
    pub to: u64,
    /// The item that ends at `from`, or [`FreeList::edge`].
    pub below: u32,
    /// The item that begins at `to`, or [`FreeList::edge`].
    pub above: u32,
}

/// A place: the index of a free range, and an offset in it.
pub(crate) type Place = (usize, u64);

/// Offsets of the items, and the free ranges between those alive: disjoint, not touching, ascending.
pub(crate) struct FreeList<'s> {
    items: &'s [Item],
    /// The end of the arena.
    top: u64,
    /// Offset of each item, also of items that died.
    pub offsets: Vec<u64>,
    pub holes: Vec<Hole>,
    /// The ring upwards: the neighbour above each item. The last entry is for the edge of the arena.
    over: Vec<u32>,
    /// The ring downwards: the neighbour below each item. The last entry is for the edge of the arena.
    under: Vec<u32>,
}

impl<'s> FreeList<'s> {
    /// An empty arena of `top` bytes.
    pub fn new(items: &'s [Item], top: u64) -> Self {
        let edge = items.len() as u32;
        let ring = vec![edge; items.len() + 1];
        let holes = vec![Hole { from: 0, to: top, below: edge, above: edge }];
        Self { items, top, offsets: vec![0; items.len()], holes, over: ring.clone(), under: ring }
    }

    /// The number that stands for both ends of the arena in the ring.
    pub fn edge(&self) -> u32 {
        self.items.len() as u32
    }

    /// Returns the free range that holds `bytes` at the offset `at`, or `None` if not all of these bytes are free.
    pub fn at(&self, at: u64, bytes: u64) -> Option<Place> {
        let end = at.checked_add(bytes)?;
        let index = self.holes.partition_point(|hole| hole.to < end);
        self.holes.get(index).is_some_and(|hole| hole.from <= at).then_some((index, at))
    }

    /// Places an item.
    pub fn put(&mut self, i: u32, (index, at): Place) {
        let hole = self.holes[index];
        let end = at + self.items[i as usize].bytes;
        self.offsets[i as usize] = at;
        self.link(hole.below, i);
        self.link(i, hole.above);
        let (low, high) = (Hole { to: at, above: i, ..hole }, Hole { from: end, below: i, ..hole });
        match (hole.from == at, hole.to == end) {
            (true, true) => drop(self.holes.remove(index)),
            (true, false) => self.holes[index] = high,
            (false, true) => self.holes[index] = low,
            (false, false) => {
                self.holes[index] = high;
                self.holes.insert(index, low);
            }
        }
    }

    /// Frees an item's range and merges the range with the free ranges on both sides.
    pub fn free(&mut self, i: u32) {
        let (below, above) = (self.under[i as usize], self.over[i as usize]);
        self.link(below, above);
        let end = |other: u32| self.offsets[other as usize] + self.items[other as usize].bytes;
        let from = if below == self.edge() { 0 } else { end(below) };
        let to = if above == self.edge() { self.top } else { self.offsets[above as usize] };
        let first = self.holes.partition_point(|hole| hole.to <= from);
        let joined = self.holes[first..].iter().take_while(|hole| hole.from < to).count();
        let hole = Hole { from, to, below, above };
        match joined {
            0 => self.holes.insert(first, hole),
            _ => self.holes[first] = hole,
        }
        if joined > 1 {
            self.holes.remove(first + 1);
        }
    }

    fn link(&mut self, below: u32, above: u32) {
        self.over[below as usize] = above;
        self.under[above as usize] = below;
    }

    /// Returns the place for `bytes` that `fit` describes. If no range below the ceiling is large enough, returns the
    /// lowest place above it, or `None` if the arena has no room at all. The `blocked` ranges (ascending, disjoint) are
    /// not used.
    pub fn find(&self, bytes: u64, alignment: u64, fit: Fit, ceiling: u64, blocked: &[(u64, u64)]) -> Option<Place> {
        let wanted = Wanted { bytes, alignment, ceiling };
        if blocked.is_empty() {
            wanted.choose(fit, self.holes.iter().enumerate().map(|(index, hole)| (index, hole.from, hole.to)))
        } else {
            wanted.choose(fit, self.around(bytes, blocked).into_iter())
        }
    }

    /// The pieces of free ranges outside the `blocked` ones that hold `bytes`. Each comes with the index of its free
    /// range.
    fn around(&self, bytes: u64, blocked: &[(u64, u64)]) -> Vec<(usize, u64, u64)> {
        let mut open = Vec::new();
        let mut next = 0;
        for (index, &Hole { mut from, to, .. }) in self.holes.iter().enumerate() {
            while next < blocked.len() && blocked[next].1 <= from {
                next += 1;
            }
            for &(start, end) in blocked[next..].iter().take_while(|range| range.0 < to) {
                if start > from && start - from >= bytes {
                    open.push((index, from, start));
                }
                from = from.max(end);
            }
            if to > from && to - from >= bytes {
                open.push((index, from, to));
            }
        }
        open
    }
}

/// A request for a place.
#[derive(Debug, Clone, Copy)]
struct Wanted {
    bytes: u64,
    alignment: u64,
    ceiling: u64,
}

impl Wanted {
    /// Chooses from ranges `(index, from, to)`, which must ascend.
    fn choose(self, fit: Fit, mut ranges: impl DoubleEndedIterator<Item = (usize, u64, u64)> + Clone) -> Option<Place> {
        let found = match fit {
            Fit::Lowest => None,
            Fit::Highest => ranges.clone().rev().find_map(|(index, from, to)| Some((index, self.top(from, to)?))),
            Fit::Tightest => self.tightest(ranges.clone(), Self::bottom),
            Fit::TightestHigh => self.tightest(ranges.clone().rev(), Self::top),
        };
        let anywhere = Self { ceiling: u64::MAX, ..self };
        found.or_else(|| ranges.find_map(|(index, from, to)| Some((index, anywhere.bottom(from, to)?))))
    }

    /// Returns the place in the smallest range; of equally small ranges, the first in iteration order counts.
    fn tightest(
        self,
        ranges: impl Iterator<Item = (usize, u64, u64)>,
        place: impl Fn(Self, u64, u64) -> Option<u64>,
    ) -> Option<Place> {
        let (mut best, mut least) = (None, u64::MAX);
        for (index, from, to) in ranges {
            let room = to.min(self.ceiling).saturating_sub(from);
            if room >= self.bytes
                && room < least
                && let Some(at) = place(self, from, to)
            {
                (best, least) = (Some((index, at)), room);
            }
        }
        best
    }

    /// The lowest aligned offset in a range, or `None` if the bytes don't fit.
    fn bottom(self, from: u64, to: u64) -> Option<u64> {
        let at = if self.alignment == 1 { from } else { from.checked_next_multiple_of(self.alignment)? };
        let to = to.min(self.ceiling);
        (at <= to && to - at >= self.bytes).then_some(at)
    }

    /// The highest aligned offset in a range, or `None` if the bytes don't fit.
    fn top(self, from: u64, to: u64) -> Option<u64> {
        let at = to.min(self.ceiling).checked_sub(self.bytes)?;
        let at = if self.alignment == 1 { at } else { at - at % self.alignment };
        (at >= from).then_some(at)
    }
}

#[cfg(test)]
mod tests {
    use gapless_testing::prelude::*;

    use super::*;

    const FITS: [Fit; 4] = [Fit::Lowest, Fit::Highest, Fit::Tightest, Fit::TightestHigh];

    /// Every offset at which `bytes` are free, with the size of the free range (cut off at the ceiling) around it.
    fn free(taken: &[bool], bytes: usize, ceiling: usize) -> Vec<(usize, usize)> {
        let is_free = |at: usize| taken[at..at + bytes].iter().all(|taken| !taken);
        let room = |at: usize| {
            let from = taken[..at].iter().rposition(|&taken| taken).map_or(0, |below| below + 1);
            let to = taken[at..].iter().position(|&taken| taken).map_or(usize::MAX, |above| at + above);
            to.min(ceiling).saturating_sub(from)
        };
        (0..taken.len() - bytes).filter(|&at| is_free(at)).map(|at| (at, room(at))).collect()
    }

    generated! {
        /// Compared with an array of bytes, for births and deaths in any order.
        #[test]
        fn places_are_those_of_a_list_of_bytes(
            sizes in prop::collection::vec(1..9u64, 1..30),
            moves in prop::collection::vec((any::<prop::sample::Index>(), 0..4usize, 0..3u32), 1..90),
            blocked in prop::collection::vec((0..60u64, 1..6u64), 0..3),
            ceiling in 4..70u64,
        ) {
            let items: Vec<Item> =
                sizes.iter().map(|&bytes| Item { start: 0, end: 1, bytes, alignment: 1 }).collect();
            let mut space = FreeList::new(&items, u64::MAX);
            let mut alive = vec![false; items.len()];
            let mut blocked: Vec<(u64, u64)> = blocked.into_iter().map(|(from, bytes)| (from, from + bytes)).collect();
            blocked.sort_unstable();
            blocked.dedup_by(|next, kept| next.0 <= kept.1);
            for (which, fit, more) in moves {
                let i = which.index(items.len());
                alive[i] = !alive[i];
                if !alive[i] {
                    space.free(i as u32);
                    continue;
                }
                let mut taken = vec![false; 600];
                let live = (0..items.len()).filter(|&k| k != i && alive[k]).map(|k| (space.offsets[k], items[k].bytes));
                live.for_each(|(at, bytes)| taken[at as usize..(at + bytes) as usize].fill(true));
                if more > 0 {
                    blocked.iter().for_each(|range| taken[range.0 as usize..range.1 as usize].fill(true));
                }
                let (bytes, alignment) = (items[i].bytes, u64::from(more.max(1)));
                let all = free(&taken, bytes as usize, ceiling as usize);
                let all = || all.iter().map(|&(at, room)| (at as u64, room)).filter(|(at, _)| at % alignment == 0);
                let below = || all().filter(|(at, _)| at + bytes <= ceiling);
                let least = below().map(|(_, room)| room).min();
                let mut tight = below().filter(|(_, room)| Some(*room) == least).map(|(at, _)| at);
                let found = match FITS[fit] {
                    Fit::Lowest => all().next().map(|(at, _)| at),
                    Fit::Highest => below().map(|(at, _)| at).next_back(),
                    Fit::Tightest => tight.next(),
                    Fit::TightestHigh => tight.next_back(),
                };
                let expected = found.or_else(|| all().next().map(|(at, _)| at));
                let blocked = if more > 0 { &blocked[..] } else { &[] };
                let place = space.find(bytes, alignment, FITS[fit], ceiling, blocked).unwrap();
                prop_assert_eq!(Some(place.1), expected);
                prop_assert_eq!(space.at(place.1, bytes), Some(place));
                space.put(i as u32, place);
            }
            // The ring holds the items alive, in the order of addresses.
            let mut around = Vec::new();
            let mut i = space.over[items.len()];
            while i != space.edge() {
                around.push(i);
                i = space.over[i as usize];
            }
            prop_assert_eq!(around.len(), alive.iter().filter(|alive| **alive).count());
            let offsets: Vec<u64> = around.iter().map(|&i| space.offsets[i as usize]).collect();
            prop_assert!(offsets.is_sorted());
        }
    }
}

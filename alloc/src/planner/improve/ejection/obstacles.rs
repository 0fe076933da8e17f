//! The cheapest place of an item among its neighbours.
//!
//! In: the rectangles that share a clique with the item, and the price of ejecting each. Out: the cheapest place below
//! a ceiling. Never: a change of the plan.

use super::FIXED;
use crate::planner::decompose::parts::Item;
use crate::planner::mix::mix;
use crate::planner::space::by_time::Rectangle;
use crate::planner::space::{aligned, aligned_down};

/// Address ranges taken by an item's neighbours, with their prices. There are few distinct ranges, since most
/// neighbours of a long-lived item take turns in the same ones.
///
/// Sorting the ranges for each item would take most of the time of a search. So all ranges of the plan are sorted once
/// in a while, and the neighbours of an item mark theirs. The ranges that came up since then are sorted for each item.
#[derive(Debug, Default)]
pub(super) struct Obstacles {
    /// `(from, to, price)` of each range, ascending.
    pub ranges: Vec<(u64, u64, u64)>,
    /// Upper ends of the ranges as `(to, price)`, ascending.
    upper: Vec<(u64, u64)>,
    /// The ranges of the plan when they were sorted last, ascending.
    known: Vec<Known>,
    /// For each of them, the price of the neighbours in it; 0 if there are none.
    prices: Vec<u64>,
    /// Their upper ends as `(to, index)`, ascending.
    tops: Vec<(u64, u32)>,
    /// For each item, the index of its range in `known`, or [`LOOSE`].
    of: Vec<u32>,
    /// Number of ranges that were sorted since, because they are not known.
    sorted: usize,
    /// Marks of known ranges and of their upper ends.
    marks: Marks,
    top_marks: Marks,
    /// Ranges of neighbours that are not known.
    loose: Vec<(u64, u64, u64)>,
}

/// A range of the plan.
#[derive(Debug, Clone, Copy)]
struct Known {
    from: u64,
    to: u64,
    /// Place of its upper end among all upper ends.
    top: u32,
}

const LOOSE: u32 = u32::MAX;

/// A place for an item.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Choice {
    pub at: u64,
    /// Total price of the items that overlap with this place.
    pub price: u64,
}

impl Obstacles {
    /// Sorts the ranges of the plan if that costs no more than what was sorted since the last time.
    pub fn refresh(&mut self, items: &[Item], places: &[Option<u64>]) {
        if self.of.len() == items.len() && self.sorted <= items.len() {
            return;
        }
        let placed = (0..).zip(items).zip(places).filter_map(|((i, item), at)| Some(((*at)?, (*at)? + item.bytes, i)));
        let mut placed: Vec<(u64, u64, u32)> = placed.collect();
        placed.sort_unstable();
        self.sorted = 0;
        self.of.clear();
        self.of.resize(items.len(), LOOSE);
        self.known.clear();
        for (from, to, i) in placed {
            if self.known.last().is_none_or(|last| (last.from, last.to) != (from, to)) {
                self.known.push(Known { from, to, top: 0 });
            }
            self.of[i as usize] = self.known.len() as u32 - 1;
        }
        self.tops.clear();
        self.tops.extend(self.known.iter().zip(0..).map(|(range, k)| (range.to, k)));
        self.tops.sort_unstable();
        for (&(_, k), top) in self.tops.iter().zip(0..) {
            self.known[k as usize].top = top;
        }
        self.prices.resize(self.known.len(), 0);
        self.marks.resize(self.known.len());
        self.top_marks.resize(self.known.len());
    }

    /// Notes that an item has a new range.
    pub fn put(&mut self, i: u32, from: u64, to: u64) {
        if let Some(of) = self.of.get_mut(i as usize) {
            let known = self.known.binary_search_by_key(&(from, to), |range| (range.from, range.to));
            *of = known.map_or(LOOSE, |k| k as u32);
        }
    }

    /// Adds a neighbour.
    pub fn add(&mut self, other: &Rectangle, price: u64) {
        let k = self.of[other.item as usize] as usize;
        let Some(sum) = self.prices.get_mut(k) else {
            return self.loose.push((other.from, other.to, price));
        };
        *sum = sum.saturating_add(price);
        self.marks.set(k);
    }

    /// Collects the ranges of the neighbours that were added, and their edges.
    pub fn sort(&mut self) {
        let Self { ranges, upper, known, prices, tops, marks, top_marks, loose, sorted, .. } = self;
        *sorted += loose.len();
        loose.sort_unstable();
        loose.dedup_by(|next, kept| {
            let is_equal = (next.0, next.1) == (kept.0, kept.1);
            kept.2 = if is_equal { kept.2.saturating_add(next.2) } else { kept.2 };
            is_equal
        });
        ranges.clear();
        let mut others = loose.iter().copied().peekable();
        marks.take(|k| {
            let range = &known[k];
            top_marks.set(range.top as usize);
            while let Some(other) = others.next_if(|other| other.0 < range.from) {
                ranges.push(other);
            }
            ranges.push((range.from, range.to, prices[k]));
        });
        ranges.extend(others);
        upper.clear();
        loose.sort_unstable_by_key(|range| range.1);
        let mut others = loose.drain(..).map(|range| (range.1, range.2)).peekable();
        top_marks.take(|k| {
            let (to, range) = tops[k];
            while let Some(other) = others.next_if(|other| other.0 < to) {
                upper.push(other);
            }
            upper.push((to, std::mem::take(&mut prices[range as usize])));
        });
        upper.extend(others);
    }

    /// Returns the cheapest place below the ceiling, or `None` if pins leave no place. Of several free places, returns
    /// the place in the tightest hole. If no place is free, returns a random one of the cheapest places.
    ///
    /// The price changes only where an edge of the item meets an edge of a neighbour. So only two kinds of places need
    /// to be tried: right on top of a neighbour, and right below a neighbour.
    pub fn cheapest(&self, bytes: u64, alignment: u64, ceiling: u64, random: u64) -> Option<Choice> {
        let last = aligned_down(ceiling.checked_sub(bytes)?, alignment);
        let above = |to: u64| aligned(to, alignment).unwrap_or(u64::MAX);
        let below = |from: u64| aligned_down(from - bytes, alignment);
        let first = self.ranges.partition_point(|range| range.0 < bytes);
        let on_top = std::iter::once(0).chain(self.upper.iter().map(|edge| above(edge.0)));
        let under = self.ranges[first..].iter().map(|range| below(range.0)).take_while(|&at| at <= last);
        let mut best = (FIXED, 0, 0);
        // Random choices depend on a place's number among the places of both kinds.
        self.look(on_top.take_while(|&at| at <= last), (bytes, ceiling), &mut best, |at, number| {
            let under = self.ranges[first..].partition_point(|range| below(range.0) < at);
            mix(number + under as u64, random)
        });
        self.look(under.chain([last]), (bytes, ceiling), &mut best, |at, number| {
            let on_top = 1 + self.upper.partition_point(|edge| above(edge.0) <= at);
            mix(number + on_top as u64, random)
        });
        (best.0 < FIXED).then_some(Choice { at: best.2, price: best.0 })
    }

    /// Looks at ascending places for an item. Keeps the price, the tie-breaker and the offset of the best place: the
    /// size of the hole if the place is free, otherwise `chance` of the offset and the number of the place.
    fn look(
        &self,
        places: impl Iterator<Item = u64>,
        (bytes, ceiling): (u64, u64),
        best: &mut (u64, u64, u64),
        chance: impl Fn(u64, u64) -> u64,
    ) {
        let (mut below, mut above) = (0, 0);
        // Total price of the ranges that begin below the item's top, and of the ranges that end at or below the item's
        // bottom.
        let (mut begun, mut ended) = (0u128, 0u128);
        for (at, number) in places.zip(1..) {
            while let Some(range) = self.ranges.get(below).filter(|range| range.0 < at + bytes) {
                begun += u128::from(range.2);
                below += 1;
            }
            while let Some(edge) = self.upper.get(above).filter(|edge| edge.0 <= at) {
                ended += u128::from(edge.1);
                above += 1;
            }
            if begun - ended > u128::from(best.0) {
                continue;
            }
            let price = (begun - ended) as u64;
            let tie = if price == 0 {
                let floor = above.checked_sub(1).map_or(0, |k| self.upper[k].0);
                self.ranges.get(below).map_or(ceiling, |range| range.0.min(ceiling)) - floor
            } else {
                chance(at, number)
            };
            *best = (price, tie, at).min(*best);
        }
    }
}

/// A set of numbers that is read in order in a time that depends little on the largest number.
#[derive(Debug, Default)]
struct Marks {
    /// A bit for each number.
    bits: Vec<u64>,
    /// A bit for each word of `bits` that has a bit.
    words: Vec<u64>,
}

impl Marks {
    fn resize(&mut self, count: usize) {
        self.bits.resize(count.div_ceil(64), 0);
        self.words.resize(count.div_ceil(64 * 64), 0);
    }

    fn set(&mut self, k: usize) {
        self.bits[k / 64] |= 1 << (k % 64);
        self.words[k / (64 * 64)] |= 1 << (k / 64 % 64);
    }

    /// Calls `each` with every number, ascending, and removes the numbers.
    fn take(&mut self, mut each: impl FnMut(usize)) {
        let Self { bits, words } = self;
        for (block, word) in words.iter_mut().enumerate() {
            drain(word, 64 * block, |k| drain(&mut bits[k], 64 * k, &mut each));
        }
    }
}

/// Calls `each` with `first` plus the place of every bit of a word, ascending, and removes the bits.
fn drain(word: &mut u64, first: usize, mut each: impl FnMut(usize)) {
    let mut rest = std::mem::take(word);
    while rest != 0 {
        each(first + rest.trailing_zeros() as usize);
        rest &= rest - 1;
    }
}

#[cfg(test)]
mod tests {
    use gapless_testing::prelude::*;

    use super::*;

    /// The obstacles that items of these offsets and sizes are. Prices are sizes plus one. The first `known` items are
    /// placed before the ranges are sorted.
    fn obstacles(rows: &[(u64, u64)], known: usize) -> Obstacles {
        let item = |row: &(u64, u64)| Item { start: 0, end: 1, bytes: row.1, alignment: 1 };
        let place = |(k, row): (usize, &(u64, u64))| (k < known).then_some(row.0);
        let items: Vec<Item> = rows.iter().map(item).collect();
        let mut obstacles = Obstacles::default();
        obstacles.refresh(&items, &rows.iter().enumerate().map(place).collect::<Vec<_>>());
        for (i, &(from, bytes)) in (0..).zip(rows) {
            if i as usize >= known {
                obstacles.put(i, from, from + bytes);
            }
            obstacles.add(&Rectangle { from, to: from + bytes, start: 0, end: 1, item: i }, bytes + 1);
        }
        obstacles.sort();
        obstacles
    }

    generated! {
        /// Checked against every place below the ceiling.
        #[test]
        fn the_cheapest_place_is_found(
            rows in prop::collection::vec((0..40u64, 1..9u64), 0..12),
            known in 0..12usize,
            bytes in 1..12u64,
            ceiling in 8..50u64,
            random in any::<u64>(),
        ) {
            let obstacles = obstacles(&rows, known);
            let price = |at: u64| -> u64 {
                rows.iter().filter(|row| row.0 < at + bytes && at < row.0 + row.1).map(|row| row.1 + 1).sum()
            };
            let least = (0..=ceiling.saturating_sub(bytes)).filter(|at| at + bytes <= ceiling).map(price).min();
            let choice = obstacles.cheapest(bytes, 1, ceiling, random);
            prop_assert_eq!(choice.map(|choice| choice.price), least);
            if let Some(choice) = choice {
                prop_assert!(choice.at + bytes <= ceiling);
                prop_assert_eq!(price(choice.at), choice.price);
            }
            // Alignment is kept even if it costs more, and the price returned is the one paid.
            if let Some(choice) = obstacles.cheapest(bytes, 4, ceiling, random) {
                prop_assert!(choice.at % 4 == 0 && choice.at + bytes <= ceiling);
                prop_assert_eq!(price(choice.at), choice.price);
            }
        }
    }
}

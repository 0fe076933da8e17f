//! The cheapest place of an item among its neighbours.
//!
//! In: the rectangles that share a clique with the item, and the price of ejecting each. Out: the cheapest place below
//! a ceiling. Never: a change of the plan.

use super::FIXED;
use crate::planner::mix::mix;
use crate::planner::space::by_time::Rectangle;
use crate::planner::space::{aligned, aligned_down};

/// Address ranges taken by an item's neighbours, with their prices. There are few distinct ranges, since most
/// neighbours of a long-lived item take turns in the same ones.
#[derive(Debug, Default)]
pub(super) struct Obstacles {
    /// Lower ends of the ranges as `(from, price)`, ascending.
    pub lower: Vec<(u64, u64)>,
    /// Upper ends of the ranges as `(to, price)`, ascending.
    upper: Vec<(u64, u64)>,
    /// `(from, to, price)`, each range once.
    pub ranges: Vec<(u64, u64, u64)>,
    /// Hash table of the ranges. Each entry has the number of the `fill` or `gather` call that wrote it, and the index
    /// of its range.
    table: Vec<(u32, u32)>,
    filling: u32,
}

/// A place for an item.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Choice {
    pub at: u64,
    /// Total price of the items that overlap with this place.
    pub price: u64,
}

impl Obstacles {
    /// Collects the ranges, and their edges in ascending order.
    pub fn fill(&mut self, met: &[Rectangle], price: &[u64]) {
        self.gather(met, price);
        self.lower.clear();
        self.upper.clear();
        self.lower.extend(self.ranges.iter().map(|range| (range.0, range.2)));
        self.upper.extend(self.ranges.iter().map(|range| (range.1, range.2)));
        self.lower.sort_unstable();
        self.upper.sort_unstable();
    }

    /// Collects the ranges only, in the order in which they are met.
    pub fn gather(&mut self, met: &[Rectangle], price: &[u64]) {
        let size = (2 * met.len()).next_power_of_two();
        if self.table.len() < size || self.filling == u32::MAX {
            self.table = vec![(0, 0); size];
            self.filling = 0;
        }
        self.filling += 1;
        self.ranges.clear();
        let mut last = 0;
        for other in met {
            // Runs ascend by address, so many rectangles have the same range as the one before.
            if let Some(range) = self.ranges.get_mut(last).filter(|range| (range.0, range.1) == (other.from, other.to))
            {
                range.2 = range.2.saturating_add(price[other.item as usize]);
                continue;
            }
            let mut slot = (other.from ^ other.to.rotate_left(32)).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 20;
            loop {
                let entry = &mut self.table[slot as usize & (size - 1)];
                if entry.0 != self.filling {
                    *entry = (self.filling, self.ranges.len() as u32);
                    last = self.ranges.len();
                    self.ranges.push((other.from, other.to, price[other.item as usize]));
                    break;
                }
                let range = &mut self.ranges[entry.1 as usize];
                if (range.0, range.1) == (other.from, other.to) {
                    last = entry.1 as usize;
                    range.2 = range.2.saturating_add(price[other.item as usize]);
                    break;
                }
                slot += 1;
            }
        }
    }

    /// Returns the cheapest place below the ceiling, or `None` if pins leave no place. Of several free places, returns
    /// the place in the tightest hole. If no place is free, returns a random one of the cheapest places.
    ///
    /// The price changes only where an edge of the item meets an edge of a neighbour. So only two kinds of places need
    /// to be tried: right on top of a neighbour, and right below a neighbour.
    pub fn cheapest(&self, bytes: u64, alignment: u64, ceiling: u64, random: u64) -> Option<Choice> {
        let last = ceiling.checked_sub(bytes)?;
        let last = aligned_down(last, alignment);
        let on_top = std::iter::once(0).chain(self.upper.iter().map(|edge| edge.0));
        let mut on_top = on_top.filter_map(|to| aligned(to, alignment)).peekable();
        let under =
            self.lower.iter().filter_map(|edge| edge.0.checked_sub(bytes)).map(|at| aligned_down(at, alignment));
        let mut under = under.chain(std::iter::once(last)).peekable();
        let (mut below, mut above) = (0, 0);
        // Total price of the ranges that begin below the item's top, and of the ranges that end at or below the item's
        // bottom.
        let (mut begun, mut ended) = (0u128, 0u128);
        let mut best: Option<((u64, u64), Choice)> = None;
        let mut asked = 0u64;
        loop {
            let at = match (on_top.peek(), under.peek()) {
                (Some(a), Some(b)) if a <= b => on_top.next(),
                (_, Some(_)) => under.next(),
                (_, None) => None,
            };
            let Some(at) = at else { break };
            // Both lists ascend, so the loop ends with the last place of the second one.
            if at > last {
                continue;
            }
            while let Some(edge) = self.lower.get(below).filter(|edge| edge.0 < at + bytes) {
                begun += u128::from(edge.1);
                below += 1;
            }
            while let Some(edge) = self.upper.get(above).filter(|edge| edge.0 <= at) {
                ended += u128::from(edge.1);
                above += 1;
            }
            let price = u64::try_from(begun - ended).unwrap_or(FIXED).min(FIXED);
            asked += 1;
            let tie = if price == 0 {
                let floor = above.checked_sub(1).map_or(0, |k| self.upper[k].0);
                self.lower.get(below).map_or(ceiling, |edge| edge.0.min(ceiling)) - floor
            } else {
                mix(asked, random)
            };
            if price < FIXED && best.is_none_or(|(least, _)| (price, tie) < least) {
                best = Some(((price, tie), Choice { at, price }));
            }
        }
        best.map(|(_, choice)| choice)
    }
}

#[cfg(test)]
mod tests {
    use gapless_testing::prelude::*;

    use super::*;

    /// Rectangles at these places with their prices, which are their sizes plus one.
    fn neighbours(rows: &[(u64, u64)]) -> (Vec<Rectangle>, Vec<u64>) {
        let placed = |(i, &(from, bytes)): (usize, &(u64, u64))| Rectangle {
            from,
            to: from + bytes,
            start: 0,
            end: 1,
            item: i as u32,
        };
        (rows.iter().enumerate().map(placed).collect(), rows.iter().map(|row| row.1 + 1).collect())
    }

    generated! {
        /// Checked against every place below the ceiling.
        #[test]
        fn the_cheapest_place_is_found(
            rows in prop::collection::vec((0..40u64, 1..9u64), 0..12),
            bytes in 1..12u64,
            ceiling in 8..50u64,
            random in any::<u64>(),
        ) {
            let (met, prices) = neighbours(&rows);
            let mut obstacles = Obstacles::default();
            obstacles.fill(&met, &prices);
            let price = |at: u64| -> u64 {
                rows.iter().zip(&prices).filter(|(row, _)| row.0 < at + bytes && at < row.0 + row.1).map(|p| p.1).sum()
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

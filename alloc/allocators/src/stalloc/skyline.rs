//! Heights over time: what has been stacked in a range of offsets.

use std::collections::BTreeMap;

use gapless_alloc::Lifetime;

/// A piecewise constant height in bytes over all ticks.
#[derive(Debug, Clone)]
pub(super) struct Skyline {
    /// From each tick on, until the next.
    heights: BTreeMap<u64, u64>,
}

impl Skyline {
    /// Nothing yet.
    pub(super) fn flat() -> Self {
        Self { heights: BTreeMap::from([(0, 0)]) }
    }

    /// Puts `bytes` on top of all that is there during `lifetime`, if that stays within `limit`; returns the height below.
    pub(super) fn stack(&mut self, lifetime: &Lifetime, bytes: u64, limit: u64) -> Option<u64> {
        let room = limit.checked_sub(bytes)?;
        let mut top = self.at(lifetime.start);
        for (_, &height) in self.heights.range(lifetime.clone()) {
            if top > room {
                return None;
            }
            top = top.max(height);
        }
        if top > room {
            return None;
        }
        self.set(lifetime, top + bytes);
        Some(top)
    }

    /// Raises everything lower than `top` during `lifetime` to it.
    pub(super) fn raise(&mut self, lifetime: &Lifetime, top: u64) {
        let mut pieces = vec![(lifetime.start, self.at(lifetime.start))];
        pieces.extend(self.heights.range(lifetime.clone()).map(|(&tick, &height)| (tick, height)));
        pieces.dedup_by_key(|piece| piece.0);
        let ends: Vec<u64> = pieces[1..].iter().map(|piece| piece.0).chain([lifetime.end]).collect();
        for ((start, height), end) in pieces.into_iter().zip(ends) {
            self.set(&(start..end), height.max(top));
        }
    }

    fn at(&self, tick: u64) -> u64 {
        *self.heights.range(..=tick).next_back().expect("a skyline starts at tick 0").1
    }

    fn set(&mut self, lifetime: &Lifetime, height: u64) {
        let after = self.at(lifetime.end);
        let covered: Vec<u64> = self.heights.range(lifetime.clone()).map(|(&tick, _)| tick).collect();
        for tick in covered {
            self.heights.remove(&tick);
        }
        self.heights.insert(lifetime.start, height);
        self.heights.entry(lifetime.end).or_insert(after);
    }
}

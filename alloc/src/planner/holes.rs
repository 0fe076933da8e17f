//! The free address ranges at one moment of a sweep, sorted, with the open end above everything as the last.

/// Where in the address space a range is looked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fit {
    /// The lowest place.
    Lowest,
    /// The highest place below the ceiling.
    Highest,
    /// The bottom of the tightest hole, the lowest of equals.
    Tightest,
    /// The top of the tightest hole, the highest of equals.
    TightestHigh,
}

/// Free ranges below 2^64 - 1: disjoint, not touching, ascending.
#[derive(Debug, Clone)]
pub(crate) struct Holes {
    free: Vec<(u64, u64)>,
    /// Top-down placements stay below this where they can.
    ceiling: u64,
}

impl Holes {
    pub fn new(ceiling: u64) -> Self {
        Self { free: vec![(0, u64::MAX)], ceiling }
    }

    /// Makes free whatever `taken` ranges (ascending by their first byte) leave.
    pub fn refill(&mut self, taken: &[(u64, u64)]) {
        self.free.clear();
        let mut floor = 0;
        for &(from, to) in taken {
            if from > floor {
                self.free.push((floor, from));
            }
            floor = floor.max(to);
        }
        if floor < u64::MAX {
            self.free.push((floor, u64::MAX));
        }
    }

    /// Takes `bytes` where `fit` says; above the ceiling, the lowest place, if nothing below it is large enough.
    /// `None` when the address space ends.
    pub fn take(&mut self, bytes: u64, alignment: u64, fit: Fit) -> Option<u64> {
        let (index, at) = match fit {
            Fit::Lowest => self.lowest(bytes, alignment),
            Fit::Highest => self.highest(bytes, alignment),
            Fit::Tightest => self.tightest(bytes, alignment, false),
            Fit::TightestHigh => self.tightest(bytes, alignment, true),
        }
        .or_else(|| self.lowest(bytes, alignment))?;
        self.carve(index, at, at + bytes);
        Some(at)
    }

    /// Like [`take`](Self::take), where `blocked` ranges (ascending, disjoint) may not be touched either.
    pub fn take_around(&mut self, bytes: u64, alignment: u64, fit: Fit, blocked: &[(u64, u64)]) -> Option<u64> {
        if blocked.is_empty() {
            return self.take(bytes, alignment, fit);
        }
        let mut open = Vec::new();
        let mut next = 0;
        for &(from, to) in &self.free {
            let mut from = from;
            while next < blocked.len() && blocked[next].1 <= from {
                next += 1;
            }
            let mut ahead = next;
            while ahead < blocked.len() && blocked[ahead].0 < to {
                if blocked[ahead].0 > from && blocked[ahead].0 - from >= bytes {
                    open.push((from, blocked[ahead].0));
                }
                from = from.max(blocked[ahead].1);
                ahead += 1;
            }
            if to > from && to - from >= bytes {
                open.push((from, to));
            }
        }
        let at = Self { free: open, ceiling: self.ceiling }.take(bytes, alignment, fit)?;
        self.claim(at, at + bytes).then_some(at)
    }

    /// Takes exactly `[from, to)`; false when it isn't free.
    pub fn claim(&mut self, from: u64, to: u64) -> bool {
        let index = self.free.partition_point(|hole| hole.1 < to);
        let fits = self.free.get(index).is_some_and(|hole| hole.0 <= from);
        if fits {
            self.carve(index, from, to);
        }
        fits
    }

    /// Gives `[from, to)` back.
    pub fn free(&mut self, from: u64, to: u64) {
        let index = self.free.partition_point(|hole| hole.1 < from);
        let joins_below = self.free.get(index).is_some_and(|hole| hole.1 == from);
        let above = index + usize::from(joins_below);
        let joins_above = self.free.get(above).is_some_and(|hole| hole.0 == to);
        match (joins_below, joins_above) {
            (true, true) => {
                self.free[index].1 = self.free[above].1;
                self.free.remove(above);
            }
            (true, false) => self.free[index].1 = to,
            (false, true) => self.free[above].0 = from,
            (false, false) => self.free.insert(index, (from, to)),
        }
    }

    /// How many free ranges there are.
    pub fn len(&self) -> usize {
        self.free.len()
    }

    fn carve(&mut self, index: usize, from: u64, to: u64) {
        let hole = &mut self.free[index];
        match (hole.0 == from, hole.1 == to) {
            (true, true) => {
                self.free.remove(index);
            }
            (true, false) => hole.0 = to,
            (false, true) => hole.1 = from,
            (false, false) => {
                let below = (hole.0, from);
                hole.0 = to;
                self.free.insert(index, below);
            }
        }
    }

    fn lowest(&self, bytes: u64, alignment: u64) -> Option<(usize, u64)> {
        self.free.iter().enumerate().find_map(|(index, &hole)| Some((index, bottom(hole, bytes, alignment)?)))
    }

    fn highest(&self, bytes: u64, alignment: u64) -> Option<(usize, u64)> {
        self.free
            .iter()
            .enumerate()
            .rev()
            .find_map(|(index, &hole)| Some((index, top((hole.0, hole.1.min(self.ceiling)), bytes, alignment)?)))
    }

    fn tightest(&self, bytes: u64, alignment: u64, high: bool) -> Option<(usize, u64)> {
        let mut best = None;
        let mut least = u64::MAX;
        for (index, &(from, to)) in self.free.iter().enumerate() {
            let hole = (from, to.min(self.ceiling));
            let room = hole.1.saturating_sub(from);
            if room < bytes || room > least || (room == least && !high) {
                continue;
            }
            let at = if high { top(hole, bytes, alignment) } else { bottom(hole, bytes, alignment) };
            if let Some(at) = at {
                (best, least) = (Some((index, at)), room);
            }
        }
        best
    }
}

/// The lowest aligned place in a hole.
fn bottom(hole: (u64, u64), bytes: u64, alignment: u64) -> Option<u64> {
    let at = if alignment == 1 { hole.0 } else { hole.0.checked_next_multiple_of(alignment)? };
    (at <= hole.1 && hole.1 - at >= bytes).then_some(at)
}

/// The highest aligned place in a hole.
fn top(hole: (u64, u64), bytes: u64, alignment: u64) -> Option<u64> {
    let at = hole.1.checked_sub(bytes)?;
    let at = if alignment == 1 { at } else { at - at % alignment };
    (at >= hole.0).then_some(at)
}

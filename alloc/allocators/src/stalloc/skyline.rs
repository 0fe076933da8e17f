//! A skyline: the filled height of a range of offsets over time.

use std::ops::Range;

use gapless_alloc::Lifetime;

/// A piecewise constant height in bytes over all ticks.
#[derive(Debug, Clone)]
pub(super) struct Skyline {
    /// Ticks, ascending from 0, with the height from each tick on.
    steps: Vec<(u64, u64)>,
}

impl Skyline {
    /// A skyline with the same height at all ticks.
    pub(super) fn flat(height: u64) -> Self {
        Self { steps: vec![(0, height)] }
    }

    /// The greatest height during `lifetime`.
    pub(super) fn top(&self, lifetime: &Lifetime) -> u64 {
        self.steps[self.covered(lifetime)].iter().map(|step| step.1).max().expect("a skyline starts at tick 0")
    }

    /// Stacks `bytes` on the greatest height during `lifetime`, and raises the skyline to the new top for that time.
    /// Returns the offset of the new bytes, or `None` if the top would exceed `limit`.
    pub(super) fn stack(&mut self, lifetime: &Lifetime, bytes: u64, limit: u64) -> Option<u64> {
        let room = limit.checked_sub(bytes)?;
        let below = Some(self.top(lifetime)).filter(|&top| top <= room)?;
        self.replace(lifetime, [(lifetime.start, below + bytes)]);
        Some(below)
    }

    /// Raises the skyline to at least `top` during `lifetime`.
    pub(super) fn raise(&mut self, lifetime: &Lifetime, top: u64) {
        let covered = self.steps[self.covered(lifetime)].iter();
        let raised: Vec<(u64, u64)> = covered.map(|&(tick, h)| (tick.max(lifetime.start), h.max(top))).collect();
        self.replace(lifetime, raised);
    }

    /// Returns a copy with other heights in some ranges of ticks, which must ascend and not overlap.
    pub(super) fn with(&self, others: impl IntoIterator<Item = (Lifetime, u64)>) -> Self {
        let mut steps: Vec<(u64, u64)> = Vec::with_capacity(self.steps.len());
        // `next` is the next old step, and `height` is the old height before that step.
        let (mut next, mut height) = (0, 0);
        for (lifetime, other) in others {
            while next < self.steps.len() && self.steps[next].0 < lifetime.start {
                height = self.steps[next].1;
                push(&mut steps, self.steps[next]);
                next += 1;
            }
            push(&mut steps, (lifetime.start, other));
            while next < self.steps.len() && self.steps[next].0 <= lifetime.end {
                height = self.steps[next].1;
                next += 1;
            }
            push(&mut steps, (lifetime.end, height));
        }
        self.steps[next..].iter().for_each(|&step| push(&mut steps, step));
        Self { steps }
    }

    /// The longest ranges of ticks in which the height is at most `limit`, ascending.
    pub(super) fn valleys(&self, limit: u64) -> Vec<Lifetime> {
        let mut valleys: Vec<Lifetime> = Vec::new();
        let mut since = None;
        for &(tick, height) in &self.steps {
            if height <= limit {
                since = since.or(Some(tick));
            } else if let Some(start) = since.take() {
                valleys.push(start..tick);
            }
        }
        valleys.extend(since.map(|start| start..u64::MAX));
        valleys
    }

    /// True if the height is at most `limit` throughout `lifetime`.
    pub(super) fn is_low(&self, lifetime: &Lifetime, limit: u64) -> bool {
        let first = self.steps.partition_point(|step| step.0 <= lifetime.start) - 1;
        self.steps[first..].iter().take_while(|step| step.0 < lifetime.end).all(|step| step.1 <= limit)
    }

    /// Number of pieces of equal height.
    pub(super) fn pieces(&self) -> usize {
        self.steps.len()
    }

    /// The steps that overlap `lifetime`.
    fn covered(&self, lifetime: &Lifetime) -> Range<usize> {
        let first = self.steps.partition_point(|step| step.0 <= lifetime.start) - 1;
        let more = self.steps[first..].iter().take_while(|step| step.0 < lifetime.end).count();
        first..first + more
    }

    /// Replaces the heights during `lifetime`. The first entry of `heights` must be at the start of `lifetime`.
    fn replace(&mut self, lifetime: &Lifetime, heights: impl IntoIterator<Item = (u64, u64)>) {
        let covered = self.covered(lifetime);
        let (first, last) = (self.steps[covered.start], self.steps[covered.end - 1]);
        let before = (first.0 < lifetime.start).then_some(first);
        let after = self.steps.get(covered.end).is_none_or(|next| next.0 > lifetime.end);
        let fresh = before.into_iter().chain(heights).chain(after.then_some((lifetime.end, last.1)));
        self.steps.splice(covered, fresh);
    }
}

/// Adds a step. The step replaces one at the same tick, and is left out if it does not change the height.
fn push(steps: &mut Vec<(u64, u64)>, step: (u64, u64)) {
    if steps.last().is_some_and(|last| last.0 == step.0) {
        steps.pop();
    }
    if steps.last().is_none_or(|last| last.1 != step.1) {
        steps.push(step);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heights_are_those_of_an_array() {
        let mut heights = [3u64; 12];
        let mut skyline = Skyline::flat(3);
        for (lifetime, bytes, is_raised) in
            [(2..5, 4, false), (4..7, 2, false), (0..3, 8, true), (5..9, 9, true), (8..12, 3, false), (0..12, 1, false)]
        {
            let ticks = lifetime.start as usize..lifetime.end as usize;
            let below = heights[ticks.clone()].iter().copied().max().unwrap();
            if is_raised {
                skyline.raise(&lifetime, bytes);
                heights[ticks].iter_mut().for_each(|height| *height = bytes.max(*height));
            } else {
                assert_eq!(skyline.stack(&lifetime, bytes, 99), Some(below));
                heights[ticks].fill(below + bytes);
            }
            skyline = skyline.with([(1..3, 5), (3..4, 2), (10..12, 5)]);
            [1, 2, 3, 10, 11].into_iter().zip([5, 5, 2, 5, 5]).for_each(|(tick, height)| heights[tick] = height);
            for limit in 0..20 {
                let low = |tick: usize| skyline.valleys(limit).iter().any(|v| v.contains(&(tick as u64)));
                assert!((0..12).all(|tick| low(tick) == (heights[tick] <= limit)), "{skyline:?} {heights:?} {limit}");
            }
        }
        assert_eq!(skyline.stack(&(0..1), 2, 3), None);
        assert_eq!(skyline.stack(&(0..1), 4, 3), None);
    }
}

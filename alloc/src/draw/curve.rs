//! Live bytes over time, as a step function.

use std::ops::Range;

use crate::Problem;
use crate::bound::sweep;

/// A step function: the bytes alive from the tick of each entry until the tick of the next. The last entry lasts until
/// `end`.
pub(super) struct Curve {
    /// `(tick, live bytes)`, ticks ascending, from the first tick of the map.
    pub(super) steps: Vec<(u64, u64)>,
    end: u64,
}

impl Curve {
    pub(super) fn of(problem: &Problem, ticks: &Range<u64>) -> Self {
        let mut steps: Vec<(u64, u64)> = Vec::new();
        sweep(problem, |tick, live| {
            let live = u64::try_from(live).expect("Problem::new bounds the live bytes by u64");
            if ticks.contains(&tick) && steps.last().is_none_or(|s| s.1 != live) {
                steps.push((tick, live));
            }
        });
        Self { steps, end: ticks.end }
    }

    /// The pieces of constant live bytes that overlap `ticks`, clipped to `ticks`.
    pub(super) fn within(&self, ticks: Range<u64>) -> impl Iterator<Item = (Range<u64>, u64)> + '_ {
        let first = self.steps.partition_point(|s| s.0 <= ticks.start).saturating_sub(1);
        let next = self.steps.iter().skip(1).map(|s| s.0).chain([self.end]);
        let pieces = self.steps.iter().zip(next).skip(first);
        pieces
            .take_while(move |((tick, _), _)| *tick < ticks.end)
            .map(move |(&(tick, live), next)| (tick.max(ticks.start)..next.min(ticks.end), live))
            .filter(|(piece, _)| !piece.is_empty())
    }

    /// The most bytes alive at any of `ticks`; 0 if the range is empty.
    pub(super) fn most_within(&self, ticks: Range<u64>) -> u64 {
        self.within(ticks).map(|(_, live)| live).max().unwrap_or(0)
    }
}

/// Splits `ticks` into `parts` ranges, none of them empty. If there are fewer ticks than parts, several ranges share a
/// tick.
pub(super) fn split(ticks: &Range<u64>, parts: usize) -> impl Iterator<Item = Range<u64>> + use<> {
    let (start, length, parts) = (ticks.start, u128::from(ticks.end - ticks.start), parts as u128);
    let parts = if length == 0 { 0 } else { parts };
    (0..parts).map(move |i| {
        let (from, to) = (i * length / parts, ((i + 1) * length).div_ceil(parts));
        start + from as u64..start + to as u64
    })
}

//! Attempts at a height: sweeps outwards from a fullest clique that end at or below it, or not at all.
//!
//! Several run side by side, and the first by number that gets to the end has the word: the same on every machine.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use rayon::prelude::*;

use super::beam;
use super::meter::Meter;
use super::milestones;
use super::passes::within;
use super::portfolio::{Placed, Portfolio};
use super::retrace;
use super::sweep::Direction;

/// How attempts of one kind are made.
struct Waves {
    /// Attempts of the first wave: where they help, the first often does.
    first: u64,
    /// Waves grow up to this.
    most: u64,
    /// What an attempt should be able to spend for each item.
    work_per_item: u64,
    /// Their numbers; the last wave may go past the end.
    numbers: Range<u64>,
}

/// Stacks that are tried, cheaply, and how many of them before any is left open.
const STACKS: u64 = 40;
const FIRST_STACKS: u64 = 6;

/// Stacks that are left open, and the share of the work that these may spend: one in so many.
const OPEN_STACKS: u64 = 6;
const OPEN_SHARE: u64 = 8;

/// Cliques that are full to the last byte from which on a stack is left open before much is searched.
const OFTEN_FULL: usize = 8;

/// Attempts from all places to start from; where as many find nothing to pay for, no other will.
const ALL_STARTS: u64 = 8;

impl Portfolio<'_> {
    /// Sweeps that take back what led nowhere, until one ends at `ceiling` or below or the meter stops; whether one did.
    /// Small items are those of fewer bytes than `small_below`.
    pub fn retrace(&mut self, ceiling: u64, small_below: u64) -> bool {
        let Some((_, peaks)) = self.peaks(ceiling) else { return false };
        let waves = Waves { first: 2, most: 8, work_per_item: 100, numbers: 0..u64::MAX };
        self.attempt(&waves, |portfolio, number, purse| {
            retrace::Attempt::new(&portfolio.timeline, ceiling, &peaks, small_below, number).run(purse)
        })
    }

    /// Sweeps that keep several layouts and look ahead, likewise.
    pub fn look_ahead(&mut self, ceiling: u64) -> bool {
        let Some((live, peaks)) = self.peaks(ceiling) else { return false };
        let waves = Waves { first: 2, most: 4, work_per_item: 1_000, numbers: 0..u64::MAX };
        self.attempt(&waves, |portfolio, number, purse| {
            beam::Attempt::new(&portfolio.timeline, &live, ceiling, &peaks, number).run(purse)
        })
    }

    /// Sweeps that compare layouts where there is least to spare, likewise: from a few stacks, from open ones, from many
    /// more, then with patience.
    pub fn leap(&mut self, ceiling: u64) -> bool {
        let Some((live, peaks)) = self.peaks(ceiling) else { return false };
        let brief = |portfolio: &Self, number, purse: &mut Meter| {
            milestones::Attempt::new(&portfolio.timeline, &live, ceiling, &peaks, number).run(purse)
        };
        let first = Waves { first: 2, most: 8, work_per_item: 300, numbers: 0..FIRST_STACKS };
        let more = Waves { first: 8, most: 8, work_per_item: 300, numbers: FIRST_STACKS..STACKS };
        let patient = Waves { first: 2, most: 2, work_per_item: 1_000, numbers: 0..u64::MAX };
        let mut found = self.attempt(&first, brief);
        if !found && !self.is_open_over {
            within(self.meter.left() / OPEN_SHARE, self, |portfolio| found = portfolio.open(ceiling, &live, &peaks));
        }
        found
            || self.attempt(&more, brief)
            || self.attempt(&patient, |portfolio, number, purse| {
                milestones::Attempt::new(&portfolio.timeline, &live, ceiling, &peaks, number).patient().run(purse)
            })
    }

    /// Whether clique after clique is full up to `ceiling`. A search mostly spends its share there in vain.
    pub fn is_often_full(&self, ceiling: u64) -> bool {
        let peaks = self.peaks(ceiling);
        peaks.is_some_and(|(live, peaks)| peaks.len() >= OFTEN_FULL && live[peaks[0] as usize] == ceiling)
    }

    /// Sweeps from open stacks alone, likewise.
    pub fn open_once(&mut self, ceiling: u64) -> bool {
        let Some((live, peaks)) = self.peaks(ceiling) else { return false };
        self.open(ceiling, &live, &peaks)
    }

    fn open(&mut self, ceiling: u64, live: &[u64], peaks: &[u32]) -> bool {
        let waves = Waves { first: 2, most: 2, work_per_item: 300, numbers: 0..OPEN_STACKS };
        let is_cut_short = AtomicBool::new(false);
        let found = self.attempt(&waves, |portfolio, number, purse| {
            let offsets = milestones::Attempt::open(&portfolio.timeline, live, ceiling, peaks, number).run(purse);
            is_cut_short.fetch_or(purse.left() == 0, Ordering::Relaxed);
            offsets
        });
        // With less than that, the last ones may not have been made.
        let whole_way = self.timeline.part.items.len() as u64 * waves.work_per_item;
        self.is_open_over = !found && self.meter.left() >= whole_way && !is_cut_short.into_inner();
        found
    }

    /// Bytes alive in each clique, and the fullest cliques; `None` where a stack of items could not be swept outwards.
    fn peaks(&self, ceiling: u64) -> Option<(Vec<u64>, Vec<u32>)> {
        let part = self.timeline.part;
        let live = part.live();
        let fullest = live.iter().copied().max()?;
        if fullest > ceiling || !part.pins.is_empty() || part.items.iter().any(|item| item.alignment > 1) {
            return None;
        }
        let peaks = (0..part.cliques).filter(|&k| live[k as usize] == fullest).collect();
        Some((live, peaks))
    }

    fn attempt(&mut self, waves: &Waves, run: impl Fn(&Self, u64, &mut Meter) -> Option<Vec<u64>> + Sync) -> bool {
        let part = self.timeline.part;
        let whole_way = (part.items.len() as u64 * waves.work_per_item).max(1);
        let (mut number, mut wave, mut idle) = (waves.numbers.start, waves.first, 0);
        while self.meter.stopped().is_none() && number < waves.numbers.end {
            // Of attempts that can't go all the way, fewer are better.
            let here = wave.min(self.meter.left() / whole_way);
            if here == 0 {
                return false;
            }
            let share = self.meter.left() / here;
            let portfolio: &Self = self;
            let results: Vec<_> = (number..number + here)
                .into_par_iter()
                .map(|number| {
                    let mut purse = Meter { work: share, spent: 0, ..portfolio.meter };
                    (run(portfolio, number, &mut purse), purse.spent)
                })
                .collect();
            (number, wave) = (number + here, (2 * wave).min(waves.most));
            let spent = results.iter().map(|(_, spent)| spent).sum();
            idle = if spent == 0 { idle + here } else { 0 };
            self.meter.spend(spent);
            self.sweeps += here;
            if let Some(offsets) = results.into_iter().find_map(|(offsets, _)| offsets) {
                self.offer(Some(Placed { height: part.height(&offsets), offsets }));
                return true;
            }
            if idle >= ALL_STARTS {
                return false;
            }
        }
        false
    }
}

/// Which of the fullest cliques an attempt starts from, and which half of time it plans first: with all the others on
/// that side, or as many on both sides; from a single one, the longer way comes first.
pub(super) fn start(peaks: &[u32], cliques: u32, number: u64) -> (u32, Direction) {
    let (last, middle) = (peaks.len() - 1, peaks.len() / 2);
    let (which, first) = match number / 2 % 4 {
        _ if last == 0 && peaks[0] < cliques / 2 => (0, Direction::Forward),
        _ if last == 0 => (0, Direction::Backward),
        0 => (0, Direction::Forward),
        1 => (last, Direction::Backward),
        2 => (middle, Direction::Forward),
        _ => (middle, Direction::Backward),
    };
    (peaks[which], first)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::planner::part::{Item, Part, Whole};
    use crate::synthetic::{Order, Step};

    /// Whether open stacks meet the bound of an overlapped step for some work, and whether they were all tried in vain.
    fn tried((layers, stages, micro_batches): (u64, u64, u64), work: u64) -> (bool, bool) {
        let step = Step { order: Order::Overlapped, layers, stages, micro_batches, ..Step::default() };
        let whole = Whole::new(&step.problem().unwrap(), true);
        let [part] = whole.parts.as_slice() else { panic!("one part") };
        let mut portfolio = Portfolio::new(part, part.bound, Meter { work, ..Meter::default() });
        let found = portfolio.open_once(part.bound);
        assert_eq!(found, portfolio.best.is_some_and(|best| best.height == part.bound));
        (found, portfolio.is_open_over)
    }

    #[test]
    fn open_stacks_that_were_cut_short_may_be_tried_again() {
        assert_eq!(tried((4, 2, 8), 5_000_000), (true, false));
        assert_eq!(tried((6, 2, 8), 5_000_000), (false, true));
        assert_eq!(tried((6, 2, 8), 600_000), (false, false));
        assert_eq!(tried((6, 2, 8), 1_000), (false, false));
    }

    /// One that is there all the time beside many that come one after another: each full clique counts.
    #[test]
    fn a_part_is_often_full_from_some_cliques_on() {
        for full in [OFTEN_FULL - 1, OFTEN_FULL] {
            let cliques = full as u32;
            let item = |start, end, bytes| Item { start, end, bytes, alignment: 1 };
            let mut items = vec![item(0, cliques, 5)];
            items.extend((0..cliques).map(|start| item(start, start + 1, 3)));
            let part = Part { items, cliques, bound: 8, ..Part::default() };
            let portfolio = Portfolio::new(&part, 8, Meter::default());
            assert_eq!([8, 9].map(|ceiling| portfolio.is_often_full(ceiling)), [full == OFTEN_FULL, false]);
        }
    }
}

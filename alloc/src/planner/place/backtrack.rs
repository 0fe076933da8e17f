//! Sweeps that undo their last steps when an item finds no place below a ceiling.
//!
//! Near the bound, thousands of cliques may be almost full. One birth in the wrong free range leaves another range too
//! small, and a sweep without backtracking then ends above the ceiling. With backtracking, the sweep goes back a few
//! cliques instead, and tries again with random noise on its scores. The longer the sweep makes no progress, the
//! further it goes back. After many retreats the attempt ends, and another one starts with other weights.
//!
//! Neighbours that die together leave one large range. So the price of a place grows with the time between the deaths
//! of the item and its neighbour, and with the bytes of the free range that the item does not use.

use std::cmp::Reverse;
use std::ops::Range;

use rayon::prelude::*;

use super::sweep::{Rule, Start, Sweep};
use crate::order::sort_by_key;
use crate::planner::budget::Budget;
use crate::planner::decompose::parts::Item;
use crate::planner::decompose::timeline::Timeline;
use crate::planner::mix::mix;
use crate::planner::solve::Solver;
use crate::planner::space::free_list::{FreeList, Hole, Place};

/// Work per item that an attempt should be able to spend.
const WORK_PER_ITEM: u64 = 100;

/// Number of attempts that run in parallel: in the first wave, and at most in later waves. The first wave is small
/// because, on problems for which backtracking helps at all, the first attempts often succeed.
const WAVES: (u64, u64) = (2, 8);

/// Number of attempts at the second half of time, once the first half is planned.
const SECOND_TRIES: u64 = 64;

/// Retreats without progress after which an attempt ends.
const PATIENCE: u32 = 300;

/// Number of retreats after which the longest retreat grows by one clique.
const SHORT_WAYS: u32 = 8;

/// Longest retreat at first, in cliques.
const NEAR: u64 = 3;

/// All small items together have at most 1/`SMALL_SHARE` of the fullest clique's bytes. Some attempts keep small items
/// apart from large ones.
const SMALL_SHARE: u64 = 64;

/// Prices that add up to the score of a place.
#[derive(Debug, Clone, Copy)]
struct Weights {
    /// Price per sixteenth of a doubling of the time between an item's death and its neighbour's death.
    lifetime_mismatch: u64,
    /// Price of a place that does not fill its free range.
    remainder: u64,
    /// Price for each time that the item would also fit into the rest of the free range, up to four times.
    room: u64,
    /// Largest noise that is added to a price after a retreat.
    noise: u64,
    /// Percentage of places whose price gets noise.
    noisy_places: u64,
}

/// Weights that attempts use in turn. Each of the five is the best one on some problems.
const WEIGHTS: [Weights; 5] = [
    Weights { lifetime_mismatch: 13, remainder: 1000, room: 300, noise: 12_000, noisy_places: 100 },
    Weights { lifetime_mismatch: 13, remainder: 1000, room: 300, noise: 12_000, noisy_places: 40 },
    Weights { lifetime_mismatch: 26, remainder: 500, room: 150, noise: 24_000, noisy_places: 40 },
    Weights { lifetime_mismatch: 13, remainder: 250, room: 75, noise: 48_000, noisy_places: 40 },
    Weights { lifetime_mismatch: 9, remainder: 1000, room: 0, noise: 12_000, noisy_places: 20 },
];

/// Price of placing a small item next to a large one.
const UNLIKE: u64 = 4_000;

/// Work of a birth, in addition to the ranges that it looks at.
const WORK_PER_BIRTH: u64 = 4;

impl Solver<'_> {
    /// Runs attempts until one of them ends at or below `ceiling` or the budget is spent. Returns true if an attempt
    /// ended there.
    pub fn backtrack(&mut self, ceiling: u64, budget: &mut Budget) -> bool {
        let part = self.part;
        let peaks = part.fullest_cliques();
        if peaks.is_empty() || !part.is_free() || part.bound > ceiling {
            return false;
        }
        let small_below = self.small_below(peaks[0]);
        self.attempt(0..u64::MAX, WAVES, WORK_PER_ITEM, budget, |solver, number, budget| {
            Attempt::new(solver, ceiling, &peaks, small_below, number).run(budget)
        })
    }

    /// Runs attempts by number, in waves that run in parallel, until an attempt finds offsets. Also ends when the
    /// budget that is left for one more attempt is less than `work_per_item` for each item. Returns true if an attempt
    /// succeeded. If several attempts of a wave succeed, the attempt with the lowest number counts, so that the result
    /// is the same on every machine. The pair has the size of the first wave and the largest size; each wave is twice
    /// as large as the one before.
    pub(super) fn attempt(
        &mut self,
        numbers: Range<u64>,
        (mut wave, most): (u64, u64),
        work_per_item: u64,
        budget: &mut Budget,
        run: impl Fn(&Self, u64, &mut Budget) -> Option<Vec<u64>> + Sync,
    ) -> bool {
        let whole_way = self.part.items.len() as u64 * work_per_item;
        let mut number = numbers.start;
        while number < numbers.end {
            // If the budget doesn't suffice for the whole wave, fewer attempts run, so that each of them can finish.
            let here = wave.min(budget.left() / whole_way.max(1)).min(numbers.end - number);
            if here == 0 || budget.stopped().is_some() {
                return false;
            }
            let share = budget.share(budget.left() / here);
            let solver: &Self = self;
            let results: Vec<_> = (number..number + here)
                .into_par_iter()
                .map(|number| {
                    let mut share = share;
                    (run(solver, number, &mut share), share.spent)
                })
                .collect();
            budget.spend(results.iter().map(|(_, spent)| spent).sum());
            self.placements += here;
            if let Some(offsets) = results.into_iter().find_map(|(offsets, _)| offsets) {
                self.keep_if_lower(Some(self.part.placement(offsets)));
                return true;
            }
            (number, wave) = (number + here, (2 * wave).min(most));
        }
        false
    }

    /// The size below which items count as small: all smaller items together take 1/[`SMALL_SHARE`] of the bound at
    /// most.
    fn small_below(&self, clique: u32) -> u64 {
        let alive = self.forward.alive(clique);
        let mut sizes: Vec<u64> = alive.iter().map(|&i| self.part.items[i as usize].bytes).collect();
        sizes.sort_unstable();
        let mut sum = 0;
        let first = sizes.iter().find(|&&bytes| {
            sum += bytes;
            sum > self.part.bound / SMALL_SHARE
        });
        first.copied().unwrap_or(0)
    }
}

/// One attempt at a plan.
struct Attempt<'s> {
    solver: &'s Solver<'s>,
    /// No item may end above this.
    ceiling: u64,
    /// The clique whose items are stacked first.
    peak: u32,
    /// Whether the time before the peak is planned first. The stack's items are sorted by their deaths in that
    /// direction of time.
    is_backward: bool,
    /// Items of fewer bytes are kept together.
    small_below: u64,
    /// Seed of the random choices. Attempts with the same number are the same on every machine.
    number: u64,
}

impl<'s> Attempt<'s> {
    /// Creates attempt number `number`, which starts from one of the fullest cliques, `peaks`. This is the middle one,
    /// or the first or last one, so that all other fullest cliques lie on the side of time that is planned first. In
    /// four of eight attempts, small items are kept apart.
    fn new(solver: &'s Solver<'s>, ceiling: u64, peaks: &[u32], small_below: u64, number: u64) -> Self {
        let (which, is_backward) = match number % 4 {
            0 => (peaks.len() - 1, true),
            1 => (peaks.len() / 2, true),
            2 => (0, false),
            _ => (peaks.len() / 2, false),
        };
        let small_below = if number / 4 % 2 == 1 { small_below } else { 0 };
        Self { solver, ceiling, peak: peaks[which], is_backward, small_below, number }
    }

    /// Returns offsets that end at or below the ceiling, or `None` if the search finds none. The budget pays for the
    /// items and ranges looked at.
    fn run(&self, budget: &mut Budget) -> Option<Vec<u64>> {
        let Solver { part, forward, backward, .. } = self.solver;
        let sides = [(forward, self.peak), (backward, part.cliques - 1 - self.peak)];
        let [first, second] = if self.is_backward { [sides[1], sides[0]] } else { sides };
        let mut stack = forward.alive(self.peak);
        sort_by_key(&mut stack, |&i| {
            let item = first.0.item(i);
            (item.bytes >= self.small_below, item.end, item.bytes, i)
        });
        let mut offsets = self.walk(first, self.number, &stack, budget)?;
        let numbers = (0..SECOND_TRIES).map(|k| self.number + k);
        let others = numbers.filter_map(|number| self.walk(second, number, &stack, budget)).next()?;
        for (i, _) in second.0.items.iter().enumerate().filter(|(_, item)| item.start > second.1) {
            offsets[i] = others[i];
        }
        Some(offsets)
    }

    /// Sweeps from the stack at the given clique to one end of time. Returns the offsets, or `None` if the sweep
    /// doesn't get there.
    fn walk(
        &self,
        (timeline, clique): (&Timeline, u32),
        number: u64,
        stack: &[u32],
        budget: &mut Budget,
    ) -> Option<Vec<u64>> {
        let mut sweep = Sweep::new(timeline, Start::Stack(clique, stack), self.ceiling, true);
        let weights = WEIGHTS[(number % WEIGHTS.len() as u64) as usize];
        let small_below = self.small_below;
        let mut rule = Scored { timeline, small_below, weights, chance: Chance { seed: number, drawn: 0 }, noise: 0 };
        let (first, end) = (sweep.cliques.start, sweep.cliques.end);
        // Number of steps made before each clique, to which a retreat goes back.
        let mut marks = vec![0; sweep.cliques.len()];
        let (mut at, mut furthest, mut stuck) = (first, first, 0);
        let mut turns = 0u64;
        while at < end {
            turns += 1;
            if budget.left() == 0 || stuck > PATIENCE || (turns.is_multiple_of(256) && budget.is_late()) {
                return None;
            }
            marks[(at - first) as usize] = sweep.steps();
            if sweep.pass(at, &mut rule, budget) {
                at += 1;
                if at > furthest {
                    (furthest, stuck, rule.noise) = (at, 0, 0);
                }
                continue;
            }
            stuck += 1;
            let back = rule.chance.below(NEAR + u64::from(stuck / SHORT_WAYS)) as u32 + 1;
            at = at.saturating_sub(back).max(first);
            let mark = marks[(at - first) as usize];
            budget.spend((sweep.steps() - mark) as u64);
            sweep.take_back(mark);
            rule.noise = rule.chance.below(weights.noise);
            rule.noise = rule.chance.below(rule.noise + 1);
        }
        Some(sweep.space.offsets)
    }
}

/// A rule that takes the place with the lowest price.
struct Scored<'s> {
    timeline: &'s Timeline<'s>,
    small_below: u64,
    weights: Weights,
    chance: Chance,
    /// Largest noise that is currently added to prices.
    noise: u64,
}

impl Rule for Scored<'_> {
    /// Keeps the given order, with the longest-lived items first. After a retreat, sometimes puts the largest items
    /// first or uses a random order.
    fn order(&mut self, born: &mut [u32]) {
        match if self.noise > 0 { self.chance.below(3) } else { 0 } {
            0 => {}
            1 => sort_by_key(born, |&i| Reverse(self.timeline.item(i).bytes)),
            _ => (1..born.len()).for_each(|k| born.swap(k, self.chance.below(k as u64 + 1) as usize)),
        }
    }

    /// The range and the offset with the lowest price.
    fn choose(&mut self, i: u32, space: &FreeList, budget: &mut Budget) -> Option<Place> {
        budget.spend(WORK_PER_BIRTH + space.holes.len() as u64);
        let item = self.timeline.item(i);
        let mut best: Option<(u64, Place)> = None;
        for (index, &Hole { from, to, below, above }) in space.holes.iter().enumerate() {
            let Some(left) = (to - from).checked_sub(item.bytes) else { continue };
            let [below, above] =
                [below, above].map(|other| self.mismatch(item, self.timeline.items.get(other as usize)));
            let mut ask = |price: u64, at: u64| {
                let price = price + self.chance.noise(self.noise, self.weights.noisy_places);
                if best.is_none_or(|(least, _)| price < least) {
                    best = Some((price, (index, at)));
                }
            };
            if left == 0 {
                ask(below.min(above), from);
            } else {
                let quarters = (left / (item.bytes / 4).max(1)).min(16);
                let remainder = self.weights.remainder + self.weights.room * quarters / 4;
                ask(below + remainder, from);
                ask(above + remainder, to - item.bytes);
            }
        }
        best.map(|(_, place)| place)
    }
}

impl Scored<'_> {
    /// The price of a place next to `other`. `None` is an edge of the arena, which counts as an item that never dies.
    /// An edge also counts as small, so that small items gather there.
    fn mismatch(&self, item: Item, other: Option<&Item>) -> u64 {
        let is_small = |item: Item| item.bytes < self.small_below;
        let other_is_small = other.map_or(self.small_below > 0, |&other| is_small(other));
        let apart = other.map_or(self.timeline.cliques, |other| other.end.abs_diff(item.end));
        let unlike = if is_small(item) == other_is_small { 0 } else { UNLIKE };
        unlike + self.weights.lifetime_mismatch * sixteenths_of_doublings(apart)
    }
}

/// The base-2 logarithm of `n + 1` in sixteenths, interpolated linearly between powers of two. It is computed in
/// integers, so that rounding is the same on every machine.
pub(super) fn sixteenths_of_doublings(n: u32) -> u64 {
    let n = u64::from(n) + 1;
    let power = n.ilog2();
    u64::from(16 * power) + (((n << 4) >> power) - 16)
}

/// A generator of pseudo-random numbers.
struct Chance {
    seed: u64,
    drawn: u64,
}

impl Chance {
    /// A random number below `n`; 0 if `n` is 0.
    fn below(&mut self, n: u64) -> u64 {
        self.drawn += 1;
        // Multiplication scales a 64-bit fraction to `0..n`; the upper half of the product is the result.
        ((u128::from(mix(self.drawn, self.seed)) * u128::from(n)) >> 64) as u64
    }

    /// A random number below `most` in `percent` of all cases, otherwise 0.
    fn noise(&mut self, most: u64, percent: u64) -> u64 {
        if most > 0 && (percent == 100 || self.below(100) < percent) { self.below(most) } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use gapless_testing::prelude::*;

    use super::*;
    use crate::planner::decompose::parts::Whole;
    use crate::planner::solve::Goal;
    use crate::planner::tests::{is_plan, part};
    use crate::synthetic::{Order, SyntheticStep};

    generated! {
        /// Checked against every pair of items; a second run finds the same plan.
        #[test]
        fn what_is_found_is_a_plan_below_the_ceiling(
            rows in prop::collection::vec((0..12u32, 1..=12u32, 1..20u64), 1..40),
            room in 0..20u64,
            small_below in 0..10u64,
            number in 0..40u64,
        ) {
            let part = part(&rows, 12);
            let solver = Solver::new(&part, Goal::exactly(part.bound));
            let ceiling = part.bound + room;
            let attempt = Attempt::new(&solver, ceiling, &part.fullest_cliques(), small_below, number);
            let run = || attempt.run(&mut Budget { work: 50_000, ..Budget::default() });
            let found = run();
            prop_assert_eq!(&found, &run());
            if let Some(offsets) = found {
                let placement = part.placement(offsets);
                prop_assert!(placement.height <= ceiling && is_plan(&part, &placement));
            }
        }

        /// The free ranges are exactly the bytes that no item takes. Undoing all steps restores the free ranges from
        /// before the first step.
        #[test]
        fn steps_taken_back_leave_no_trace(
            rows in prop::collection::vec((0..12u32, 1..=12u32, 1..20u64), 1..40),
            number in 0..40u64,
            ways in prop::collection::vec(0..12u32, 1..6),
        ) {
            let part = part(&rows, 12);
            let timeline = Timeline::forward(&part);
            let (peak, top) = (part.fullest_cliques()[0], part.bound + 7);
            let stack = timeline.alive(peak);
            let mut sweep = Sweep::new(&timeline, Start::Stack(peak, &stack), top, true);
            let weights = WEIGHTS[number as usize % WEIGHTS.len()];
            let chance = Chance { seed: number, drawn: 0 };
            let mut rule = Scored { timeline: &timeline, small_below: 0, weights, chance, noise: 0 };
            let at_first = sweep.space.holes.clone();
            let mut budget = Budget { work: 1_000_000, ..Budget::default() };
            for way in ways {
                for clique in (peak + 1..12).take(way as usize) {
                    if !sweep.pass(clique, &mut rule, &mut budget) {
                        break;
                    }
                    let range = |&i: &u32| {
                        let at = sweep.space.offsets[i as usize];
                        (at, at + timeline.item(i).bytes)
                    };
                    let mut taken: Vec<(u64, u64)> = timeline.alive(clique).iter().map(range).collect();
                    taken.sort_unstable();
                    let ends = std::iter::once(0).chain(taken.iter().map(|range| range.1));
                    let starts = taken.iter().map(|range| range.0).chain([top]);
                    let free: Vec<(u64, u64)> = ends.zip(starts).filter(|(from, to)| from < to).collect();
                    let holes: Vec<(u64, u64)> = sweep.space.holes.iter().map(|hole| (hole.from, hole.to)).collect();
                    prop_assert_eq!(free, holes);
                }
                sweep.take_back(0);
                prop_assert_eq!(&sweep.space.holes, &at_first);
            }
        }
    }

    /// The cliques are nearly full from the first backward to the last.
    #[test]
    fn a_way_is_found_where_every_sweep_fails() {
        for (layers, stages, micro_batches) in [(1, 2, 6), (2, 1, 5), (4, 1, 8), (12, 1, 8)] {
            let step =
                SyntheticStep { order: Order::Overlapped, layers, stages, micro_batches, ..SyntheticStep::default() };
            let whole = Whole::new(&step.problem().unwrap(), true);
            let [part] = whole.parts.as_slice() else { panic!("one part") };
            let mut solver = Solver::new(part, Goal::exactly(part.bound));
            solver.sweep_once(&mut Budget { work: u64::MAX, ..Budget::default() });
            assert!(!solver.is_met(), "{step:?} is too easy");
            assert!(solver.backtrack(part.bound, &mut Budget { work: 5_000_000, ..Budget::default() }), "{step:?}");
            assert!(solver.is_met());
        }
    }

    #[test]
    fn doublings_are_counted_in_sixteenths() {
        let expected = [(0, 0), (1, 16), (2, 24), (3, 32), (7, 48), (11, 56), (u32::MAX, 512)];
        for (n, sixteenths) in expected {
            assert_eq!(sixteenths_of_doublings(n), sixteenths, "{n}");
        }
    }
}

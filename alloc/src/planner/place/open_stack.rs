//! Sweeps from a stack whose order is decided during the sweep.
//!
//! Where full cliques follow one another, the items born between two of them must fill exactly the space that was
//! freed. A layout in between hardly shows whether the items will do so. So this sweep moves outwards from a fullest
//! clique, from *milestone* to milestone: cliques with fewer bytes to spare than the cliques near them. The sweep
//! compares layouts at milestones only. The penalty of a layout grows with the number of milestones between the deaths
//! of neighbours. Neighbours that die between the same two milestones leave one range, which has room for items that
//! are born together.
//!
//! From each layout that is kept, a [`Leap`] searches for layouts of the next milestone. If no kept layout leads to the
//! next milestone, the sweep goes back two milestones and keeps twice as many layouts. Each further failure doubles
//! both numbers, until the sweep gives up.
//!
//! Any order of the items of the first clique is free of gaps, but the choice of this order matters more than the
//! effort spent on later items. So the order is decided later: the stack is one undecided range. Its [`Lots`], the
//! bytes of dead items, are given to new items.

use std::cmp::Reverse;
use std::collections::HashSet;

use super::leap::{Arrival, BIRTHS, Leap, PlacedItem};
use super::lots::{At, Lots, UNDECIDED};
use crate::order::sort_by_key;
use crate::planner::budget::Budget;
use crate::planner::decompose::timeline::Timeline;
use crate::planner::mix::mix;
use crate::planner::solve::Solver;

/// Number of attempts of one kind. Attempts of one kind differ in how many places a leap may try, and in the order of
/// equally good layouts.
const KIND: u64 = 6;

/// Number of all attempts. One kind starts from the first of the fullest cliques and one from the last. Then both kinds
/// run again with doubled limits on layouts and places.
const ATTEMPTS: u64 = 4 * KIND;

/// Number of attempts that run in parallel: in the first wave, and at most in later ones.
const WAVES: (u64, u64) = (2, 2);
/// Work per item that an attempt should be able to spend.
const WORK_PER_ITEM: u64 = 300;

/// Open stacks are tried if at least this many cliques have the most bytes alive.
const OFTEN_FULL: usize = 8;

/// Two distances in cliques. A milestone has the least bytes to spare of all cliques within the first distance. If
/// cliques within the second distance have equally few, only the first of these is a milestone.
const NEAR: (u32, u32) = (12, 4);

/// Most cliques between two milestones.
const FAR: u32 = 40;

/// Number of layouts from which a sweep goes on as long as nothing fails.
const WIDTH: usize = 2;

/// Two limits on the layouts that are kept at a milestone: per layout from which the sweep goes on, and in total.
const KEPT: (usize, usize) = (4, 256);
/// Most slabs of all layouts that are kept at a milestone.
const SLABS: usize = 65_536;

/// Most failures near one milestone that a sweep recovers from. Each unit of [`effort`](HalfSearch::effort) allows one
/// more.
const FAILURES: u32 = 2;

/// Failures are forgotten once the sweep is more than this many milestones past the furthest of them.
const FORGOTTEN: usize = 2;

/// Number of attempts at the second half of time, once the first half is planned.
const SECOND_TRIES: u64 = 4;

impl Solver<'_> {
    /// Runs sweeps from an open stack until one ends at the goal or the budget is spent. Does nothing unless the part
    /// is full at many cliques; for such parts, the exact search mostly fails.
    pub fn open_stacks(&mut self, budget: &mut Budget) {
        let (part, ceiling) = (self.part, self.goal.enough);
        let peaks = part.fullest_cliques();
        if peaks.len() < OFTEN_FULL || !part.is_free() || part.bound != ceiling {
            return;
        }
        let live = part.live();
        self.attempt(0..ATTEMPTS, WAVES, WORK_PER_ITEM, budget, |solver, number, budget| {
            attempt(solver, &live, ceiling, &peaks, number, budget)
        });
    }
}

/// Returns offsets that end at or below the ceiling, or `None` if the attempt finds none. The attempt starts from the
/// items of one of the fullest cliques, `peaks`. `live` has the bytes alive in each clique. If more items are born
/// between two milestones than a leap can place, the attempt returns at once and spends nothing.
fn attempt(
    solver: &Solver,
    live: &[u64],
    ceiling: u64,
    peaks: &[u32],
    number: u64,
    budget: &mut Budget,
) -> Option<Vec<u64>> {
    let is_backward = number / KIND % 2 == 1;
    let peak = if is_backward { peaks[peaks.len() - 1] } else { peaks[0] };
    let last = solver.part.cliques - 1;
    let forward = HalfSearch::new(&solver.forward, ceiling, peak, number, |k| live[k as usize]);
    let backward = HalfSearch::new(&solver.backward, ceiling, last - peak, number, |k| live[(last - k) as usize]);
    let (first, mut second) = if is_backward { (backward, forward) } else { (forward, backward) };
    if !first.is_passable() || !second.is_passable() {
        return None;
    }
    budget.spend(2 * solver.part.items.len() as u64);
    let mut stack = solver.forward.alive(peak);
    sort_by_key(&mut stack, |&i| (first.timeline.item(i).end, first.timeline.item(i).bytes, i));
    let mut offsets = vec![0; solver.part.items.len()];
    first.run(first.open(&stack), &mut offsets, budget).then_some(())?;
    sort_by_key(&mut stack, |&i| offsets[i as usize]);
    let is_found = (0..SECOND_TRIES).any(|k| {
        second.number = number + k;
        second.run(second.stacked(&stack, &offsets), &mut offsets, budget)
    });
    is_found.then_some(offsets)
}

/// One half of an attempt: from the peak to the last clique.
pub(super) struct HalfSearch<'s> {
    pub timeline: &'s Timeline<'s>,
    pub number: u64,
    pub ceiling: u64,
    /// Bytes of the largest item.
    pub largest: u64,
    peak: u32,
    /// The milestones, ascending; the last clique is always one.
    milestones: Vec<u32>,
    /// For each clique, the number of milestones before it.
    milestones_before: Vec<u32>,
}

/// The layouts that are kept at a milestone.
struct MilestoneLayouts {
    /// Milestones passed so far.
    passed: usize,
    layouts: Vec<Layout>,
    /// Length of the history when the milestone was reached.
    entries: usize,
}

/// A layout at a milestone: the slabs alive there, ascending by address, the lots, and the last history entry of the
/// layout.
struct Layout {
    live: Vec<PlacedItem>,
    lots: Lots,
    node: u32,
}

/// An entry of the history: the entry before it, an item, and where the item was put.
type Entry = (u32, u32, At);

/// Stands for the entry before the first.
const ROOT: u32 = u32::MAX;

impl<'s> HalfSearch<'s> {
    fn new(timeline: &'s Timeline<'s>, ceiling: u64, peak: u32, number: u64, live: impl Fn(u32) -> u64) -> Self {
        let milestones = milestones(peak, timeline.cliques, |clique| ceiling - live(clique));
        let milestones_before =
            (0..=timeline.cliques).map(|death| milestones.partition_point(|&k| k < death) as u32).collect();
        let largest = timeline.items.iter().map(|item| item.bytes).max().unwrap_or(1);
        Self { timeline, number, ceiling, largest, peak, milestones, milestones_before }
    }

    /// True if no leap has more births than [`BIRTHS`].
    fn is_passable(&self) -> bool {
        let mut births = vec![0; self.milestones.len()];
        for item in self.timeline.items.iter().filter(|item| item.start > self.peak) {
            births[self.milestones.partition_point(|&k| k < item.start)] += 1;
        }
        births.into_iter().all(|births| births <= BIRTHS)
    }

    /// Returns the number of milestones before a clique, which stands for the time of death of items that die before
    /// that clique. The result for the undecided range is [`UNDECIDED`].
    pub fn death_milestone(&self, death: u32) -> u32 {
        self.milestones_before.get(death as usize).copied().unwrap_or(UNDECIDED)
    }

    /// True if an item is at least half as large as the largest.
    pub fn is_largest(&self, bytes: u64) -> bool {
        bytes >= self.largest.div_ceil(2)
    }

    /// The number of times by which this attempt doubles the limits on layouts and places.
    pub fn effort(&self) -> u32 {
        (self.number / (2 * KIND)) as u32
    }

    /// The items born in a clique, the largest first.
    pub fn born(&self, clique: u32) -> Vec<u32> {
        let mut born = self.timeline.born(clique).to_vec();
        sort_by_key(&mut born, |&i| (Reverse(self.timeline.item(i).bytes), self.timeline.item(i).end, i));
        born
    }

    /// A layout in which the order of the stack is open.
    fn open(&self, stack: &[u32]) -> Layout {
        let lot = |&i: &u32| (i, self.timeline.item(i).bytes, self.timeline.item(i).end);
        let to = stack.iter().map(|&i| self.timeline.item(i).bytes).sum();
        Layout {
            live: vec![PlacedItem { from: 0, to, dies_before: UNDECIDED }],
            lots: Lots::new(stack.iter().map(lot)),
            node: ROOT,
        }
    }

    /// A layout with the items of the stack at their offsets. `stack` ascends by offset.
    fn stacked(&self, stack: &[u32], offsets: &[u64]) -> Layout {
        let slab = |&i: &u32| {
            let (item, from) = (self.timeline.item(i), offsets[i as usize]);
            PlacedItem { from, to: from + item.bytes, dies_before: item.end }
        };
        Layout { live: stack.iter().map(slab).collect(), lots: Lots::default(), node: ROOT }
    }

    /// Searches for layouts from `start` to the last milestone. On success, `offsets` has the offsets of the items
    /// placed and of the lots left undecided. Returns false, with `offsets` unchanged, if the search fails or the
    /// budget is spent.
    fn run(&self, start: Layout, offsets: &mut [u64], budget: &mut Budget) -> bool {
        let mut history: Vec<Entry> = Vec::new();
        let mut stations = vec![MilestoneLayouts { passed: 0, layouts: vec![start], entries: 0 }];
        let (mut failed, mut failed_at) = (0, 0);
        while let Some(here) = stations.last()
            && here.passed < self.milestones.len()
        {
            if budget.stopped().is_some() {
                return false;
            }
            let passed = here.passed;
            if passed > failed_at + FORGOTTEN {
                failed = 0;
            }
            let layouts = self.pass(here, failed, &mut history, budget);
            if !layouts.is_empty() {
                stations.push(MilestoneLayouts { passed: passed + 1, layouts, entries: history.len() });
                continue;
            }
            failed += 1;
            failed_at = failed_at.max(passed);
            if failed > FAILURES + self.effort() {
                return false;
            }
            let back = 2 << (failed - 1);
            while stations.len() > 1 && stations.last().is_some_and(|station| station.passed + back > passed) {
                stations.pop();
            }
            history.truncate(stations.last().map_or(0, |station| station.entries));
        }
        let Some(layout) = stations.last().and_then(|station| station.layouts.first()) else { return false };
        write(layout, &history, offsets);
        true
    }

    /// Leaps from a milestone to the next. Returns the layouts that are kept at the next milestone; the sweep goes on
    /// from the first of these layouts.
    fn pass(&self, here: &MilestoneLayouts, failed: u32, history: &mut Vec<Entry>, budget: &mut Budget) -> Vec<Layout> {
        let from = here.passed.checked_sub(1).map_or(self.peak, |k| self.milestones[k]);
        let width = WIDTH << (failed + self.effort());
        let mut leap = Leap::new(self, from..self.milestones[here.passed], failed / 2);
        let mut arrivals: Vec<(usize, Arrival)> = Vec::new();
        for (parent, layout) in here.layouts.iter().take(width).enumerate() {
            arrivals.extend(leap.from(&layout.live, &layout.lots, budget).into_iter().map(|arrival| (parent, arrival)));
        }
        sort_by_key(&mut arrivals, |(_, arrival)| (arrival.disorder, mix(arrival.hash, self.number)));
        let mut hashes = HashSet::new();
        arrivals.retain(|(_, arrival)| hashes.insert(arrival.hash));
        let most = SLABS / arrivals.first().map_or(1, |(_, arrival)| arrival.live.len().max(1));
        arrivals.truncate((KEPT.0 * width).min(KEPT.1).min(most).max(1));
        let layouts = arrivals.into_iter().map(|(parent, arrival)| {
            let mut node = here.layouts[parent].node;
            for (i, at) in arrival.places {
                history.push((node, i, at));
                node = history.len() as u32 - 1;
            }
            Layout { live: arrival.live, lots: arrival.lots, node }
        });
        layouts.collect()
    }
}

/// Writes the offsets of all items in a layout's history. The lots that are still undecided are stacked in any order.
fn write(layout: &Layout, history: &[Entry], offsets: &mut [u64]) {
    let mut floor = layout.live.iter().find(|slab| slab.dies_before == UNDECIDED).map_or(0, |slab| slab.from);
    for (i, bytes) in layout.lots.rest() {
        offsets[i as usize] = floor;
        floor += bytes;
    }
    let mut heirs: Vec<(u32, u32)> = Vec::new();
    let mut node = layout.node;
    while let Some(&(parent, i, at)) = history.get(node as usize) {
        match at {
            At::Offset(at) => offsets[i as usize] = at,
            At::Of(root) => heirs.push((i, root)),
        }
        node = parent;
    }
    heirs.into_iter().for_each(|(i, root)| offsets[i as usize] = offsets[root as usize]);
}

/// Returns the milestones after `peak`: cliques that have no more bytes to spare than any clique near them. Where two
/// of these cliques are more than [`FAR`] cliques apart, evenly spaced cliques in between are milestones too.
fn milestones(peak: u32, cliques: u32, slack: impl Fn(u32) -> u64) -> Vec<u32> {
    let is_narrow = |&k: &u32| {
        let mut near = k.saturating_sub(NEAR.0).max(peak + 1)..=(k + NEAR.0).min(cliques - 1);
        let is_first = |other: u32| k <= other || k - other > NEAR.1;
        k + 1 == cliques || near.all(|other| slack(k) < slack(other) || slack(k) == slack(other) && is_first(other))
    };
    let mut milestones = Vec::new();
    let mut last = peak;
    for k in (peak + 1..cliques).filter(is_narrow) {
        let strides = (k - last).div_ceil(FAR);
        milestones.extend((1..=strides).map(|stride| last + (k - last) * stride / strides));
        last = k;
    }
    milestones
}

#[cfg(test)]
mod tests {
    use gapless_testing::prelude::*;

    use super::*;
    use crate::planner::solve::Goal;
    use crate::planner::tests::{is_plan, part};

    generated! {
        /// Every pair of items is checked for overlaps; a second run finds the same plan.
        #[test]
        fn what_is_found_is_a_plan_below_the_ceiling(
            rows in prop::collection::vec((0..99u32, 1..=40u32, 1..20u64), 1..60),
            room in 0..9u64,
            number in 0..ATTEMPTS,
        ) {
            let part = part(&rows, 99);
            let solver = Solver::new(&part, Goal::exactly(part.bound));
            let (live, ceiling, peaks) = (part.live(), part.bound + room, part.fullest_cliques());
            let run = |work| attempt(&solver, &live, ceiling, &peaks, number, &mut Budget { work, ..Budget::default() });
            let found = run(200_000);
            prop_assert_eq!(&found, &run(200_000));
            prop_assert_eq!(run(0), None);
            if let Some(offsets) = found {
                let placement = part.placement(offsets);
                prop_assert!(placement.height <= ceiling && is_plan(&part, &placement));
            }
        }

        /// The last clique is always a milestone.
        #[test]
        fn milestones_are_never_far_apart(
            slack in prop::collection::vec(0..9u64, 2..200),
            peak in any::<prop::sample::Index>(),
        ) {
            let (cliques, peak) = (slack.len() as u32, peak.index(slack.len()) as u32);
            let found = milestones(peak, cliques, |k| slack[k as usize]);
            let all: Vec<u32> = std::iter::once(peak).chain(found).collect();
            prop_assert!(all.windows(2).all(|pair| pair[0] < pair[1] && pair[1] - pair[0] <= FAR));
            prop_assert_eq!(all.last(), Some(&(cliques - 1)));
        }
    }

    /// An attempt with such milestones returns at once and spends nothing.
    #[test]
    fn too_many_births_between_two_milestones_are_left_alone() {
        let bound = BIRTHS as u64 + 2;
        for (births, is_passable) in [(BIRTHS / 2, true), (BIRTHS + 1, false)] {
            let mut rows = vec![(0, 1, bound)];
            rows.resize(births + 1, (1, 1, 1));
            let part = part(&rows, 2);
            let solver = Solver::new(&part, Goal::exactly(bound));
            let mut budget = Budget { work: 1_000_000, ..Budget::default() };
            let found = attempt(&solver, &part.live(), bound, &[0], 0, &mut budget);
            assert_eq!((found.is_some(), budget.spent > 0), (is_passable, is_passable), "{births}");
        }
    }
}

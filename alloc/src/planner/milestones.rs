//! Sweeps that keep several layouts and compare them only where there is least to spare.
//!
//! Where full cliques follow one another, who is born between two of them must fill exactly what died, and a layout in
//! between says little of whether it will. So this sweep goes outwards from a fullest clique from *milestone* to
//! milestone, cliques with fewer bytes to spare than any near them. From each layout that is kept, a [`leap`](super::leap)
//! tries many ways to the next milestone; those that arrive are compared there, by how many milestones apart neighbours
//! leave. For who leaves between the same two milestones, as one range, makes room for who comes together.
//!
//! Layouts that differ in small items alone are many, and they fail for the same reason. So of those in which the large
//! ones lie in the same order, the best comes first, and the others only where there is room for them. Where no layout
//! arrives, the sweep goes two milestones back and keeps twice as many; failing again at the same place, twice as far back
//! and twice as many, until it gives up.
//!
//! Which stack it starts from decides more than any patience. So it may leave that [open](super::undecided).

use std::cmp::Reverse;
use std::collections::HashSet;

use super::attempts::start;
use super::eject::mix;
use super::leap::{Arrival, BIRTHS, Leap, Slab};
use super::meter::Meter;
use super::narrow::milestones;
use super::part::Item;
use super::sweep::{Direction, Timeline};
use super::undecided::{At, Lots, UNDECIDED};

/// One attempt at a plan.
pub(crate) struct Attempt<'s> {
    timeline: &'s Timeline<'s>,
    /// Bytes alive in each clique.
    live: &'s [u64],
    /// No item may end above this.
    ceiling: u64,
    /// The clique whose items are stacked first.
    peak: u32,
    /// Which half of time is planned first, in the order of whose ends the items are stacked.
    first: Direction,
    /// Attempts of one number are the same on every machine.
    number: u64,
    manner: Manner,
}

/// How an attempt starts, and when it ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Manner {
    /// From a stack in which chance plays a part; soon.
    Brief,
    /// From a stack in the order in which its items leave; late.
    Patient,
    /// From a stack whose order is found out on the way; soon.
    Open,
}

/// Layouts that go on where all goes well; fewer from an open stack, which is many at once.
const WIDTH: usize = 8;
const OPEN_WIDTH: usize = 2;

/// Layouts that are kept at one milestone, for each that goes on and at most.
const KEPT: (usize, usize) = (4, 256);

/// Slabs of all layouts that are kept at one milestone, at most.
const SLABS: usize = 65_536;

/// Failures at one place after which a sweep ends.
const fn failures(manner: Manner) -> u32 {
    match manner {
        Manner::Brief => 1,
        Manner::Open => 2,
        Manner::Patient => 5,
    }
}

/// Milestones past the place of a failure after which it is forgotten.
const FORGOTTEN: usize = 2;

/// Ways through the second half that are tried once the first is done.
const SECOND_TRIES: u64 = 4;

impl<'s> Attempt<'s> {
    /// Starts from one of the fullest cliques, `peaks`. Of 32 attempts, eight serve the longest-lived first of those born
    /// together, not the largest.
    pub fn new(timeline: &'s Timeline<'s>, live: &'s [u64], ceiling: u64, peaks: &[u32], number: u64) -> Self {
        let (peak, first) = start(peaks, timeline.part.cliques, number);
        Self { timeline, live, ceiling, peak, first, number, manner: Manner::Brief }
    }

    /// The same with patience. Every other attempt tries few places for small items, and from the third on chance plays
    /// a part.
    pub fn patient(self) -> Self {
        Self { manner: Manner::Patient, ..self }
    }

    /// From the first of the fullest cliques, with a stack whose order is found out on the way. Six attempts differ in how
    /// many places a leap may try, and in whether a large item may part what is free.
    pub fn open(timeline: &'s Timeline<'s>, live: &'s [u64], ceiling: u64, peaks: &[u32], number: u64) -> Self {
        Self { timeline, live, ceiling, peak: peaks[0], first: Direction::Forward, number, manner: Manner::Open }
    }

    /// Offsets that end below the ceiling, if there is a way to them; `purse` pays for what is looked at. It pays nothing where
    /// too many are born between two milestones for any attempt from this peak.
    pub fn run(&self, purse: &mut Meter) -> Option<Vec<u64>> {
        let first = Course::new(self, self.first, self.number);
        let mut other = match self.first {
            Direction::Forward => Course::new(self, Direction::Backward, self.number),
            Direction::Backward => Course::new(self, Direction::Forward, self.number),
        };
        if !first.is_passable() || !other.is_passable() {
            return None;
        }
        purse.spend(2 * first.items.len() as u64);
        let mut stack = self.timeline.alive(self.peak);
        stack.sort_by_key(|&i| {
            let item = first.items[i as usize];
            (self.turn(first.seen_by(item.end)), item.end, item.bytes, i)
        });
        let mut offsets = vec![0; first.items.len()];
        let mut top = 0;
        for &i in &stack {
            offsets[i as usize] = top;
            top += first.items[i as usize].bytes;
        }
        let start = if first.is_open() { first.undecided(&stack, top) } else { first.stacked(&stack, &offsets) };
        if !first.run(start, &mut offsets, purse) {
            return None;
        }
        stack.sort_by_key(|&i| offsets[i as usize]);
        let is_found = (0..SECOND_TRIES).any(|k| {
            other.number = self.number + k;
            other.run(other.stacked(&stack, &offsets), &mut offsets, purse)
        });
        is_found.then_some(offsets)
    }

    /// When those come in the stack who see so many milestones: in the order in which they leave with patience, and at
    /// first; else those who leave within one to four milestones come together, and chance shuffles these groups.
    fn turn(&self, seen: u32) -> u64 {
        if self.number == 0 || self.manner != Manner::Brief {
            return 0;
        }
        mix(u64::from(seen) / (1 + self.number % 4), self.number)
    }
}

/// From the peak to one end of time, which always looks like the last.
pub(super) struct Course<'s> {
    timeline: &'s Timeline<'s>,
    direction: Direction,
    pub number: u64,
    manner: Manner,
    /// The items as they look in this direction.
    pub items: Vec<Item>,
    pub ceiling: u64,
    /// Bytes of the largest item.
    pub largest: u64,
    peak: u32,
    /// Ascending; the last clique is one.
    milestones: Vec<u32>,
    /// How many milestones those see who die before a clique.
    seen: Vec<u32>,
}

/// Layouts at a milestone.
struct Station {
    /// Milestones passed.
    passed: usize,
    layouts: Vec<Layout>,
    /// Length of the history.
    entries: usize,
}

/// Who is where at a milestone, ascending, and which entry of the history led there.
struct Layout {
    live: Vec<Slab>,
    lots: Lots,
    node: u32,
}

/// Which entry came before, and which item was put where.
type Entry = (u32, u32, At);

/// Before any entry of the history.
const ROOT: u32 = u32::MAX;

impl<'s> Course<'s> {
    fn new(attempt: &Attempt<'s>, direction: Direction, number: u64) -> Self {
        let cliques = attempt.timeline.part.cliques;
        let items = attempt.timeline.part.items.iter().map(|&item| match direction {
            Direction::Forward => item,
            Direction::Backward => Item { start: cliques - item.end, end: cliques - item.start, ..item },
        });
        let items: Vec<Item> = items.collect();
        let clique = |k: u32| match direction {
            Direction::Forward => k,
            Direction::Backward => cliques - 1 - k,
        };
        let slack = |k: u32| attempt.ceiling - attempt.live[clique(k) as usize];
        let peak = clique(attempt.peak);
        let milestones = milestones(peak, cliques, slack);
        let seen = (0..=cliques).map(|death| milestones.partition_point(|&k| k < death) as u32).collect();
        let largest = items.iter().map(|item| item.bytes).max().unwrap_or(1);
        Self {
            timeline: attempt.timeline,
            direction,
            number,
            manner: attempt.manner,
            items,
            ceiling: attempt.ceiling,
            largest,
            peak,
            milestones,
            seen,
        }
    }

    /// Whether no leap has more births than one may have.
    fn is_passable(&self) -> bool {
        let mut births = vec![0; self.milestones.len()];
        for item in self.items.iter().filter(|item| item.start > self.peak) {
            births[self.milestones.partition_point(|&k| k < item.start)] += 1;
        }
        births.into_iter().all(|births| births <= BIRTHS)
    }

    /// How many milestones someone sees who dies before a clique; what is not decided sees no end.
    pub fn seen_by(&self, death: u32) -> u32 {
        self.seen.get(death as usize).copied().unwrap_or(UNDECIDED)
    }

    /// What the edges of the arena see: all of them. Above an open stack nobody knows who lies at the edges.
    pub fn seen_by_edges(&self) -> u32 {
        if self.is_open() { UNDECIDED } else { self.milestones.len() as u32 }
    }

    /// Whether the stack is found out on the way.
    pub fn is_open(&self) -> bool {
        self.manner == Manner::Open
    }

    /// Whether an item is at least half as large as the largest.
    pub fn is_largest(&self, bytes: u64) -> bool {
        bytes >= self.largest.div_ceil(2)
    }

    /// The part that chance plays.
    pub fn whim(&self) -> u64 {
        if self.manner == Manner::Patient { self.number / 2 } else { 0 }
    }

    /// Whether few places are tried for small items.
    pub fn is_brief(&self) -> bool {
        self.manner != Manner::Patient || self.number.is_multiple_of(2)
    }

    /// Who is born in a clique, in the order of service.
    pub fn born(&self, clique: u32) -> Vec<u32> {
        let mut born: Vec<u32> = match self.direction {
            Direction::Forward => self.timeline.starting_in(clique).collect(),
            Direction::Backward => self.timeline.ending_at(self.timeline.part.cliques - clique).collect(),
        };
        let item = |i: u32| self.items[i as usize];
        if self.number / 8 % 4 < 3 {
            born.sort_by_key(|&i| (Reverse(item(i).bytes), item(i).end, i));
        } else {
            born.sort_by_key(|&i| (Reverse(item(i).end), i));
        }
        born
    }

    /// Writes the offsets of what comes after a layout, and of what it leaves open; false where there is no way, or `purse`
    /// is empty.
    fn run(&self, start: Layout, offsets: &mut [u64], purse: &mut Meter) -> bool {
        let mut history: Vec<Entry> = Vec::new();
        let mut stations = vec![Station { passed: 0, layouts: vec![start], entries: 0 }];
        let (mut failed, mut failed_at) = (0, 0);
        while let Some(here) = stations.last()
            && here.passed < self.milestones.len()
        {
            if purse.left() == 0 || purse.late() {
                return false;
            }
            let passed = here.passed;
            if passed > failed_at + FORGOTTEN {
                failed = 0;
            }
            let layouts = self.pass(here, failed, &mut history, purse);
            if !layouts.is_empty() {
                stations.push(Station { passed: passed + 1, layouts, entries: history.len() });
                // No failure leads back further.
                stations.drain(..stations.len().saturating_sub(2 << failures(Manner::Patient)));
                continue;
            }
            failed += 1;
            failed_at = failed_at.max(passed);
            if failed > failures(self.manner) {
                return false;
            }
            let back = 2 << (failed - 1);
            while stations.len() > 1 && stations.last().is_some_and(|station| station.passed + back > passed) {
                stations.pop();
            }
            history.truncate(stations.last().map_or(0, |station| station.entries));
        }
        let Some(layout) = stations.last().and_then(|station| station.layouts.first()) else { return false };
        // What nobody has asked for lies in any order.
        let mut floor = layout.live.iter().find(|slab| slab.leaves == UNDECIDED).map_or(0, |slab| slab.from);
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
        true
    }

    /// A stack of so many bytes whose order is open.
    fn undecided(&self, stack: &[u32], top: u64) -> Layout {
        let item = |&i: &u32| (i, self.items[i as usize].bytes, self.items[i as usize].end);
        let live = vec![Slab { from: 0, to: top, leaves: UNDECIDED }];
        Layout { live, lots: Lots::new(stack.iter().map(item)), node: ROOT }
    }

    /// Items where they are, ascending.
    fn stacked(&self, stack: &[u32], offsets: &[u64]) -> Layout {
        let slab = |&i: &u32| {
            let (item, from) = (self.items[i as usize], offsets[i as usize]);
            Slab { from, to: from + item.bytes, leaves: item.end }
        };
        Layout { live: stack.iter().map(slab).collect(), lots: Lots::default(), node: ROOT }
    }

    /// From a milestone to the next: the layouts that are kept there, those that go on first.
    fn pass(&self, here: &Station, failed: u32, history: &mut Vec<Entry>, purse: &mut Meter) -> Vec<Layout> {
        let from = here.passed.checked_sub(1).map_or(self.peak, |k| self.milestones[k]);
        let width = if self.is_open() { OPEN_WIDTH } else { WIDTH } << failed;
        let mut leap = Leap::new(self, from..self.milestones[here.passed], failed / 2);
        let mut arrivals: Vec<(usize, Arrival)> = Vec::new();
        for (parent, layout) in here.layouts.iter().take(width).enumerate() {
            arrivals.extend(leap.from(&layout.live, &layout.lots, purse).into_iter().map(|arrival| (parent, arrival)));
        }
        arrivals.sort_by_key(|(_, arrival)| (arrival.disorder, mix(arrival.hash, self.number)));
        let (mut hashes, mut outlines) = (HashSet::new(), HashSet::new());
        arrivals.retain(|(_, arrival)| hashes.insert(arrival.hash));
        let (mut kept, others): (Vec<_>, Vec<_>) =
            arrivals.into_iter().partition(|(_, arrival)| outlines.insert(arrival.outline));
        kept.extend(others);
        let most = SLABS / kept.first().map_or(1, |(_, arrival)| arrival.live.len().max(1));
        kept.truncate((KEPT.0 * width).min(KEPT.1).min(most).max(1));
        let layouts = kept.into_iter().map(|(parent, arrival)| {
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

#[cfg(test)]
mod tests {
    use gapless_testing::prelude::*;

    use super::*;
    use crate::planner::judging::{judge_attempt, part, peaks};
    use crate::planner::part::{Part, Whole};
    use crate::planner::portfolio::Portfolio;
    use crate::synthetic::{Order, Step};

    generated! {
        #[test]
        fn what_is_found_is_a_plan_below_the_ceiling(
            rows in prop::collection::vec((0..99u32, 1..=40u32, 1..20u64), 1..60),
            room in 0..9u64,
            number in 0..40u64,
            manner in prop::sample::select(&[Manner::Brief, Manner::Patient, Manner::Open][..]),
        ) {
            let part = part(&rows, 99);
            let timeline = Timeline::new(&part);
            let (live, peaks, most) = peaks(&part);
            let ceiling = most + room;
            let attempt = match manner {
                Manner::Brief => Attempt::new(&timeline, &live, ceiling, &peaks, number),
                Manner::Patient => Attempt::new(&timeline, &live, ceiling, &peaks, number).patient(),
                Manner::Open => Attempt::open(&timeline, &live, ceiling, &peaks, number),
            };
            judge_attempt(&part, ceiling, 200_000, |purse| attempt.run(purse))?;
        }
    }

    /// Steps that are as full once per layer, for the same work.
    #[test]
    fn a_way_is_found_where_a_beam_gets_stuck() {
        for (layers, stages, micro_batches) in [(4, 2, 8), (4, 3, 8), (3, 3, 9)] {
            let step = Step { order: Order::Overlapped, layers, stages, micro_batches, ..Step::default() };
            let whole = Whole::new(&step.problem().unwrap(), true);
            let [part] = whole.parts.as_slice() else { panic!("one part") };
            let portfolio = || Portfolio::new(part, part.bound, Meter { work: 60_000_000, ..Meter::default() });
            assert!(!portfolio().look_ahead(part.bound), "{step:?} is too easy");
            let mut portfolio = portfolio();
            assert!(portfolio.leap(part.bound), "{step:?}");
            assert_eq!(portfolio.best.map(|best| best.height), Some(part.bound));
        }
    }

    /// Steps that are as full once per layer, where other stacks don't get through.
    #[test]
    fn a_stack_that_is_found_out_on_the_way_gets_further() {
        for (layers, micro_batches) in [(4, 12), (6, 12), (8, 12)] {
            let step = Step { order: Order::Overlapped, layers, stages: 4, micro_batches, ..Step::default() };
            let whole = Whole::new(&step.problem().unwrap(), true);
            let [part] = whole.parts.as_slice() else { panic!("one part") };
            let timeline = Timeline::new(part);
            let (live, peaks, most) = peaks(part);
            let is_found = |attempt: Attempt, work: u64| attempt.run(&mut Meter { work, ..Meter::default() }).is_some();
            let open = (0..6).map(|number| Attempt::open(&timeline, &live, most, &peaks, number));
            assert!(open.into_iter().any(|attempt| is_found(attempt, 4_000_000)), "{step:?}");
            let others = (0..6).map(|number| Attempt::new(&timeline, &live, most, &peaks, number));
            assert!(!others.into_iter().any(|attempt| is_found(attempt, 4_000_000)), "{step:?} is too easy");
        }
    }

    /// Nothing is paid for, so whoever makes attempts can tell.
    #[test]
    fn too_many_births_between_two_milestones_are_left_alone() {
        let item = |(start, end): (u32, u32), bytes| Item { start, end, bytes, alignment: 1 };
        let bound = BIRTHS as u64 + 2;
        let mut items = vec![item((0, 1), bound)];
        for (births, is_passable) in [(BIRTHS / 2, true), (BIRTHS + 1, false)] {
            items.resize(births + 1, item((1, 2), 1));
            let part = Part { items: items.clone(), cliques: 2, ..Part::default() };
            let (timeline, live) = (Timeline::new(&part), part.live());
            let mut purse = Meter { work: 1_000_000, ..Meter::default() };
            let found = Attempt::new(&timeline, &live, bound, &[0], 0).run(&mut purse);
            assert_eq!((found.is_some(), purse.spent > 0), (is_passable, is_passable), "{births}");
            let mut portfolio = Portfolio::new(&part, part.bound, Meter { work: 1_000_000, ..Meter::default() });
            assert_eq!(portfolio.leap(bound), is_passable, "{births}");
        }
    }

    #[test]
    fn an_empty_purse_buys_nothing() {
        let items = [(0, 2), (1, 3), (2, 4)].map(|(start, end)| Item { start, end, bytes: 3, alignment: 1 });
        let part = Part { items: items.to_vec(), cliques: 4, ..Part::default() };
        let timeline = Timeline::new(&part);
        let live = part.live();
        let attempt = Attempt::new(&timeline, &live, 6, &[1, 2], 0);
        assert_eq!(attempt.run(&mut Meter::default()), None);
        assert!(attempt.run(&mut Meter { work: 1_000, ..Meter::default() }).is_some());
    }
}

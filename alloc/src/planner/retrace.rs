//! Sweeps that take back their last steps where something finds no place below the ceiling.
//!
//! Near the bound, thousands of cliques may be all but full: one birth in the wrong hole leaves another one too small,
//! and a sweep without memory ends above the ceiling a little later. Here it goes back a few cliques and tries again with
//! prices that chance has changed, the further back the longer it has got nowhere. Where that doesn't help, what was
//! done long before is to blame: the attempt ends, and another one starts with another taste.
//!
//! What keeps the holes whole is whom an item lies beside. Those that leave together give back one large range, so that
//! a place costs by the difference in time between the item's end and its neighbour's, and by what it leaves of the hole.

use std::cmp::Reverse;

use super::eject::mix;
use super::layout::sixteenths_of_doublings;
use super::meter::Meter;
use super::part::Item;
use super::sweep::{Direction, Timeline};

/// One attempt at a plan.
pub(crate) struct Attempt<'s> {
    timeline: &'s Timeline<'s>,
    /// No item may end above this.
    ceiling: u64,
    /// The clique whose items are stacked first.
    peak: u32,
    /// Which half of time is planned first, in the order of whose ends the items are stacked.
    first: Direction,
    /// Items of fewer bytes lie among their like.
    small_below: u64,
    /// Attempts of one number are the same on every machine.
    number: u64,
}

/// Ways through the second half that are tried once the first is done.
const SECOND_TRIES: u64 = 64;

impl<'s> Attempt<'s> {
    /// Starts from one of the fullest cliques, `peaks`: with all the others on the side that is planned first, or as many
    /// on both sides. Every other four attempts keep small items apart.
    pub fn new(timeline: &'s Timeline<'s>, ceiling: u64, peaks: &[u32], small_below: u64, number: u64) -> Self {
        let (which, first) = match number % 4 {
            0 => (peaks.len() - 1, Direction::Backward),
            1 => (peaks.len() / 2, Direction::Backward),
            2 => (0, Direction::Forward),
            _ => (peaks.len() / 2, Direction::Forward),
        };
        let small_below = if number / 4 % 2 == 1 { small_below } else { 0 };
        Self { timeline, ceiling, peak: peaks[which], first, small_below, number }
    }

    /// Offsets that end below the ceiling, if there is a way to them; `purse` pays for the items and holes looked at.
    pub fn run(&self, purse: &mut Meter) -> Option<Vec<u64>> {
        let mut stack = self.timeline.alive(self.peak);
        let first = self.walk(self.first, self.number);
        stack.sort_by_key(|&i| (!first.is_small(i), first.leaves(i), first.item(i).bytes, i));
        let mut offsets = first.run(&stack, purse)?;
        let other = match self.first {
            Direction::Forward => Direction::Backward,
            Direction::Backward => Direction::Forward,
        };
        let tries = (0..SECOND_TRIES).map(|k| self.walk(other, self.number + k));
        let second = tries.filter_map(|walk| walk.run(&stack, purse)).next()?;
        let beyond = |item: &Item| match other {
            Direction::Forward => item.start > self.peak,
            Direction::Backward => item.end <= self.peak,
        };
        for (i, _) in self.timeline.part.items.iter().enumerate().filter(|(_, item)| beyond(item)) {
            offsets[i] = second[i];
        }
        Some(offsets)
    }

    fn walk(&self, direction: Direction, number: u64) -> Walk<'_> {
        let items = self.timeline.part.items.len();
        Walk {
            attempt: self,
            direction,
            taste: TASTES[(number % TASTES.len() as u64) as usize],
            chance: Chance { seed: number, drawn: 0 },
            whim: 0,
            offsets: vec![0; items],
            over: vec![0; items + 1],
            under: vec![0; items + 1],
            holes: Vec::new(),
            steps: Vec::new(),
        }
    }
}

/// What a place costs.
#[derive(Debug, Clone, Copy)]
struct Taste {
    /// Per sixteenth of a doubling of the time between an item's end and its neighbour's.
    stranger: u64,
    /// For a place that doesn't fill its hole.
    remainder: u64,
    /// For each time that the item would fit into what is left of the hole, up to four.
    room: u64,
    /// What chance may add after a retreat.
    whim: u64,
    /// In how many of a hundred places.
    whims: u64,
}

/// Each is the best somewhere.
const TASTES: [Taste; 5] = [
    Taste { stranger: 13, remainder: 1000, room: 300, whim: 12_000, whims: 100 },
    Taste { stranger: 13, remainder: 1000, room: 300, whim: 12_000, whims: 40 },
    Taste { stranger: 26, remainder: 500, room: 150, whim: 24_000, whims: 40 },
    Taste { stranger: 13, remainder: 250, room: 75, whim: 48_000, whims: 40 },
    Taste { stranger: 9, remainder: 1000, room: 0, whim: 12_000, whims: 20 },
];

/// Price of a small item's place beside a large one, and the other way round.
const UNLIKE: u64 = 4_000;

/// Retreats without getting further after which an attempt ends.
const PATIENCE: u32 = 300;

/// Retreats after which the next ones may lead one clique further back.
const SHORT_WAYS: u32 = 8;

/// Cliques that any retreat may lead back.
const NEAR: u64 = 3;

/// What a birth costs beside the holes that it looks at.
const WORK_PER_BIRTH: u64 = 4;

/// A free range with the items that bound it: [`Walk::edge`] at the bottom and the top of the arena.
#[derive(Debug, Clone, Copy)]
struct Hole {
    from: u64,
    to: u64,
    below: u32,
    above: u32,
}

/// What can be taken back.
#[derive(Debug, Clone, Copy)]
enum Step {
    Birth(u32),
    Death(u32),
}

/// The way from a stack to one end of time.
struct Walk<'s> {
    attempt: &'s Attempt<'s>,
    direction: Direction,
    taste: Taste,
    chance: Chance,
    /// What chance may add to prices now.
    whim: u64,
    offsets: Vec<u64>,
    /// Who lies above and below whom, through holes: a ring that the edge closes.
    over: Vec<u32>,
    under: Vec<u32>,
    /// Ascending.
    holes: Vec<Hole>,
    steps: Vec<Step>,
}

impl Walk<'_> {
    fn run(mut self, stack: &[u32], purse: &mut Meter) -> Option<Vec<u64>> {
        self.pile_up(stack);
        let cliques = self.attempt.timeline.part.cliques;
        let way: u32 = match self.direction {
            Direction::Forward => cliques - 1 - self.attempt.peak,
            Direction::Backward => self.attempt.peak,
        };
        // How many steps were made before each clique of the way.
        let mut marks = vec![0; way as usize];
        let (mut at, mut furthest, mut stuck) = (0, 0, 0);
        let mut turns = 0u64;
        while at < way {
            turns += 1;
            if purse.left() == 0 || stuck > PATIENCE || (turns.is_multiple_of(256) && purse.late()) {
                return None;
            }
            marks[at as usize] = self.steps.len();
            if self.pass(at, purse) {
                at += 1;
                if at > furthest {
                    (furthest, stuck, self.whim) = (at, 0, 0);
                }
                continue;
            }
            stuck += 1;
            let back = self.chance.below(NEAR + u64::from(stuck / SHORT_WAYS)) as u32 + 1;
            at = at.saturating_sub(back);
            purse.spend((self.steps.len() - marks[at as usize]) as u64);
            self.take_back(marks[at as usize]);
            self.whim = self.chance.below(self.taste.whim);
            self.whim = self.chance.below(self.whim + 1);
        }
        Some(self.offsets)
    }

    fn item(&self, i: u32) -> Item {
        self.attempt.timeline.part.items[i as usize]
    }

    /// The bottom and the top of the arena, as a neighbour.
    fn edge(&self) -> u32 {
        self.offsets.len() as u32
    }

    /// When an item dies, in cliques of this direction.
    fn leaves(&self, i: u32) -> u32 {
        match self.direction {
            Direction::Forward => self.item(i).end,
            Direction::Backward => self.attempt.timeline.part.cliques - self.item(i).start,
        }
    }

    fn pile_up(&mut self, stack: &[u32]) {
        let edge = self.edge();
        let (mut top, mut below) = (0, edge);
        for &i in stack {
            self.offsets[i as usize] = top;
            self.link(below, i);
            top += self.item(i).bytes;
            below = i;
        }
        self.link(below, edge);
        if top < self.attempt.ceiling {
            self.holes.push(Hole { from: top, to: self.attempt.ceiling, below, above: edge });
        }
    }

    fn link(&mut self, below: u32, above: u32) {
        self.over[below as usize] = above;
        self.under[above as usize] = below;
    }

    /// Deaths and births of a clique; whether all found places.
    fn pass(&mut self, at: u32, purse: &mut Meter) -> bool {
        let timeline = self.attempt.timeline;
        // `next` is the later of the two cliques between which the step is made.
        let (next, mut born): (u32, Vec<u32>) = match self.direction {
            Direction::Forward => {
                let next = self.attempt.peak + 1 + at;
                timeline.ending_at(next).for_each(|i| self.bury(i));
                (next, timeline.starting_in(next).collect())
            }
            Direction::Backward => {
                let next = self.attempt.peak - at;
                timeline.starting_in(next).for_each(|i| self.bury(i));
                (next, timeline.ending_at(next).collect())
            }
        };
        debug_assert!(next < timeline.part.cliques);
        self.line_up(&mut born);
        for i in born {
            purse.spend(WORK_PER_BIRTH + self.holes.len() as u64);
            let Some((hole, at)) = self.cheapest(i) else { return false };
            self.put(hole, i, at);
            self.steps.push(Step::Birth(i));
        }
        true
    }

    /// Who is served first: the longest-lived, and after a retreat sometimes the largest, or whoever comes.
    fn line_up(&mut self, born: &mut [u32]) {
        if born.len() < 2 {
            return;
        }
        match if self.whim > 0 { self.chance.below(3) } else { 0 } {
            0 => born.sort_by_key(|&i| Reverse(self.leaves(i))),
            1 => born.sort_by_key(|&i| Reverse(self.item(i).bytes)),
            _ => (1..born.len()).for_each(|k| born.swap(k, self.chance.below(k as u64 + 1) as usize)),
        }
    }

    /// The hole and the offset that cost least.
    fn cheapest(&mut self, i: u32) -> Option<(usize, u64)> {
        let bytes = self.item(i).bytes;
        let mut best: Option<(u64, (usize, u64))> = None;
        for index in 0..self.holes.len() {
            let Hole { from, to, below, above } = self.holes[index];
            let Some(left) = (to - from).checked_sub(bytes) else { continue };
            let [below, above] = [below, above].map(|other| self.stranger(i, other));
            let mut ask = |price: u64, at: u64| {
                let price = price + self.chance.whim(self.whim, self.taste.whims);
                if best.is_none_or(|(least, _)| price < least) {
                    best = Some((price, (index, at)));
                }
            };
            if left == 0 {
                ask(below.min(above), from);
            } else {
                let quarters = (left / (bytes / 4).max(1)).min(16);
                let remainder = self.taste.remainder + self.taste.room * quarters / 4;
                ask(below + remainder, from);
                ask(above + remainder, to - bytes);
            }
        }
        best.map(|(_, place)| place)
    }

    /// Price of lying beside `other` for `i`.
    fn stranger(&self, i: u32, other: u32) -> u64 {
        let unlike = if self.is_small(i) == self.is_small(other) { 0 } else { UNLIKE };
        let apart = if other == self.edge() {
            self.attempt.timeline.part.cliques
        } else {
            self.leaves(other).abs_diff(self.leaves(i))
        };
        unlike + self.taste.stranger * sixteenths_of_doublings(apart)
    }

    /// Whether an item should lie among small ones. They begin at the bottom of the arena.
    fn is_small(&self, i: u32) -> bool {
        self.attempt.small_below > 0 && (i == self.edge() || self.item(i).bytes < self.attempt.small_below)
    }

    fn put(&mut self, index: usize, i: u32, at: u64) {
        let hole = self.holes[index];
        let end = at + self.item(i).bytes;
        self.offsets[i as usize] = at;
        self.link(hole.below, i);
        self.link(i, hole.above);
        match (hole.from == at, hole.to == end) {
            (true, true) => drop(self.holes.remove(index)),
            (true, false) => self.holes[index] = Hole { from: end, below: i, ..hole },
            (false, true) => self.holes[index] = Hole { to: at, above: i, ..hole },
            (false, false) => {
                self.holes[index] = Hole { from: end, below: i, ..hole };
                self.holes.insert(index, Hole { to: at, above: i, ..hole });
            }
        }
    }

    fn bury(&mut self, i: u32) {
        self.free(i);
        self.steps.push(Step::Death(i));
    }

    /// Makes one hole of an item's range and of those beside it.
    fn free(&mut self, i: u32) {
        let (below, above) = (self.under[i as usize], self.over[i as usize]);
        self.link(below, above);
        let end = |other: u32| self.offsets[other as usize] + self.item(other).bytes;
        let from = if below == self.edge() { 0 } else { end(below) };
        let to = if above == self.edge() { self.attempt.ceiling } else { self.offsets[above as usize] };
        let first = self.holes.partition_point(|hole| hole.to <= from);
        let last = first + self.holes[first..].iter().take_while(|hole| hole.from < to).count();
        self.holes.splice(first..last, [Hole { from, to, below, above }]);
    }

    fn take_back(&mut self, mark: usize) {
        for step in self.steps.split_off(mark).into_iter().rev() {
            match step {
                Step::Birth(i) => self.free(i),
                Step::Death(i) => {
                    let at = self.offsets[i as usize];
                    let index = self.holes.partition_point(|hole| hole.to <= at);
                    self.put(index, i, at);
                }
            }
        }
    }
}

/// Numbers that look random.
struct Chance {
    seed: u64,
    drawn: u64,
}

impl Chance {
    /// Below `n`; 0 for `n` = 0.
    fn below(&mut self, n: u64) -> u64 {
        self.drawn += 1;
        // The upper half of the product of a 64-bit fraction.
        ((u128::from(mix(self.drawn, self.seed)) * u128::from(n)) >> 64) as u64
    }

    /// Less than `most`, in so many of a hundred cases; else 0.
    fn whim(&mut self, most: u64, percent: u64) -> u64 {
        if most > 0 && (percent == 100 || self.below(100) < percent) { self.below(most) } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use gapless_testing::prelude::*;

    use super::*;
    use crate::planner::judging::{judge_attempt, part, peaks};
    use crate::planner::part::Whole;
    use crate::planner::portfolio::Portfolio;
    use crate::synthetic::{self, Step as TrainingStep};

    generated! {
        #[test]
        fn what_is_found_is_a_plan_below_the_ceiling(
            rows in prop::collection::vec((0..12u32, 1..=12u32, 1..20u64), 1..40),
            room in 0..20u64,
            small_below in 0..10u64,
            number in 0..40u64,
        ) {
            let part = part(&rows, 12);
            let timeline = Timeline::new(&part);
            let (_, peaks, most) = peaks(&part);
            let attempt = Attempt::new(&timeline, most + room, &peaks, small_below, number);
            judge_attempt(&part, most + room, 50_000, |purse| attempt.run(purse))?;
        }

        /// Forwards and backwards again, the holes are what they were: all that nobody takes, and nothing else.
        #[test]
        fn steps_taken_back_leave_no_trace(
            rows in prop::collection::vec((0..12u32, 1..=12u32, 1..20u64), 1..40),
            number in 0..40u64,
            ways in prop::collection::vec(0..12u32, 1..6),
        ) {
            let part = part(&rows, 12);
            let timeline = Timeline::new(&part);
            let (_, peaks, most) = peaks(&part);
            let attempt = Attempt::new(&timeline, most + 7, &peaks, 0, number);
            let mut walk = attempt.walk(Direction::Forward, number);
            let stack = timeline.alive(attempt.peak);
            walk.pile_up(&stack);
            let ranges = |walk: &Walk| -> Vec<(u64, u64, u32, u32)> {
                walk.holes.iter().map(|hole| (hole.from, hole.to, hole.below, hole.above)).collect()
            };
            let at_first = ranges(&walk);
            let mut purse = Meter { work: 1_000_000, ..Meter::default() };
            for way in ways {
                for at in 0..way.min(11 - attempt.peak) {
                    let alive = walk.pass(at, &mut purse);
                    if !alive {
                        break;
                    }
                    let mut taken: Vec<(u64, u64)> = timeline
                        .alive(attempt.peak + 1 + at)
                        .iter()
                        .map(|&i| (walk.offsets[i as usize], walk.offsets[i as usize] + part.items[i as usize].bytes))
                        .collect();
                    taken.sort_unstable();
                    let ends = std::iter::once(0).chain(taken.iter().map(|range| range.1));
                    let starts = taken.iter().map(|range| range.0).chain([most + 7]);
                    let free: Vec<(u64, u64)> = ends.zip(starts).filter(|(from, to)| from < to).collect();
                    prop_assert_eq!(free, walk.holes.iter().map(|hole| (hole.from, hole.to)).collect::<Vec<_>>());
                }
                walk.take_back(0);
                prop_assert_eq!(ranges(&walk), at_first.clone());
            }
        }
    }

    /// Steps that are nearly full from the first backward to the last.
    #[test]
    fn a_way_is_found_where_every_sweep_fails() {
        for (layers, stages, micro_batches) in [(1, 2, 6), (2, 1, 5), (4, 1, 8), (12, 1, 8)] {
            let order = synthetic::Order::Overlapped;
            let step = TrainingStep { order, layers, stages, micro_batches, ..TrainingStep::default() };
            let whole = Whole::new(&step.problem().unwrap(), true);
            let [part] = whole.parts.as_slice() else { panic!("one part") };
            let mut portfolio = Portfolio::new(part, part.bound, Meter { work: u64::MAX, ..Meter::default() });
            portfolio.sweep_once();
            let height = |portfolio: &Portfolio| portfolio.best.as_ref().map_or(0, |best| best.height);
            assert!(height(&portfolio) > part.bound, "{step:?} is too easy");
            portfolio.meter.work = portfolio.meter.spent + 5_000_000;
            assert!(portfolio.retrace(part.bound, 0), "{step:?}");
            assert_eq!(height(&portfolio), part.bound);
        }
    }
}

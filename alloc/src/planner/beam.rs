//! Sweeps that keep several layouts and look ahead.
//!
//! Where cliques without a byte to spare follow one another, who is born between two of them must fill the second one
//! exactly, and a place that was taken long before decides whether that is possible. A sweep that knows one layout finds
//! that out too late. Here it goes outwards from a fullest clique with a *beam* of layouts below a ceiling: each birth is
//! tried in all the holes of all of them, and the best go on. The best are the orderly ones ([`layout`](super::layout)) in
//! which what is still to come until the next narrow clique finds room between those that stay.
//!
//! Where no layout is left, the sweep goes back to where it was some cliques ago and comes again with a broader beam; each
//! time that it fails at the same place, twice as far and twice as broad, until it gives up.

use std::cmp::Reverse;

use super::attempts::start;
use super::eject::mix;
use super::layout::{Arena, Layout, Place, Rect};
use super::meter::Meter;
use super::part::Item;
use super::sweep::{Direction, Timeline};

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
}

/// Layouts that go on where all goes well.
const WIDTH: usize = 8;

/// Layouts that may come from one.
const CHILDREN: usize = 4;

/// Places that are looked at more closely, for each layout that goes on.
const CLOSER: usize = 4;

/// Attempts that differ otherwise than by chance.
const KINDS: u64 = 8;

/// What chance may add to the rank of a place, once more after each [`KINDS`] attempts.
const WHIM: u64 = 32;

/// What any misfit adds to the rank of a place, and what as many bytes of them as the largest item has add to that.
const MISFIT: (u64, u64) = (1_000, 4_000);

/// A clique is narrow where it has fewer bytes to spare than the largest item, and than the cliques so near to it.
const NEAR: u32 = 4;

/// Cliques between two places to which a sweep may go back.
const STRIDE: u32 = 8;

/// Failures at one place after which an attempt ends.
const FAILURES: u32 = 5;

/// Ways through the second half that are tried once the first is done.
const SECOND_TRIES: u64 = 4;

impl<'s> Attempt<'s> {
    /// Starts from one of the fullest cliques, `peaks`. Every other attempt serves the largest first of those born
    /// together, and in later ones chance plays a part.
    pub fn new(timeline: &'s Timeline<'s>, live: &'s [u64], ceiling: u64, peaks: &[u32], number: u64) -> Self {
        let (peak, first) = start(peaks, timeline.part.cliques, number);
        Self { timeline, live, ceiling, peak, first, number }
    }

    /// Offsets that end below the ceiling, if there is a way to them; `purse` pays for what is looked at and copied.
    pub fn run(&self, purse: &mut Meter) -> Option<Vec<u64>> {
        let first = self.sweep(self.first, self.number);
        let mut stack = self.timeline.alive(self.peak);
        stack.sort_by_key(|&i| (first.leaves(i), first.item(i).bytes, i));
        let mut offsets = vec![0; self.timeline.part.items.len()];
        if !first.run(&stack, &mut offsets, purse) {
            return None;
        }
        let other = match self.first {
            Direction::Forward => Direction::Backward,
            Direction::Backward => Direction::Forward,
        };
        let mut tries = (0..SECOND_TRIES).map(|k| self.sweep(other, self.number + k));
        tries.any(|sweep| sweep.run(&stack, &mut offsets, purse)).then_some(offsets)
    }

    fn sweep(&self, direction: Direction, number: u64) -> Sweep<'_> {
        let cliques = self.timeline.part.cliques;
        let way = match direction {
            Direction::Forward => cliques - 1 - self.peak,
            Direction::Backward => self.peak,
        };
        let arena = Arena { ceiling: self.ceiling, cliques };
        let largest = self.timeline.part.items.iter().map(|item| item.bytes).max().unwrap_or(1);
        let mut sweep = Sweep { attempt: self, direction, number, way, arena, largest, narrow: Vec::new() };
        sweep.narrow = (1..=way).filter(|&at| sweep.is_narrow(at)).collect();
        sweep
    }
}

/// From the peak to one end of time. Cliques are counted from the peak, which is number 0.
struct Sweep<'s> {
    attempt: &'s Attempt<'s>,
    direction: Direction,
    number: u64,
    /// The last clique.
    way: u32,
    arena: Arena,
    /// Bytes of the largest item.
    largest: u64,
    /// Narrow cliques, ascending.
    narrow: Vec<u32>,
}

/// The items in front of a narrow clique.
struct Ahead {
    clique: u32,
    /// Those alive in it and still to come, the largest first.
    waiting: Vec<u32>,
    /// Their sizes.
    sizes: Vec<u64>,
}

/// A place for an item in one of the layouts.
#[derive(Debug, Clone, Copy)]
struct Candidate {
    rank: u64,
    chance: u64,
    parent: usize,
    place: Place,
}

/// Where a place in the history came from, and which item was put where.
type Entry = (u32, u32, u64);

/// Before any entry of the history.
const ROOT: u32 = u32::MAX;

impl Sweep<'_> {
    /// Writes the offsets of the stack and of what comes after it; false where there is no way, or `purse` is empty.
    fn run(&self, stack: &[u32], offsets: &mut [u64], purse: &mut Meter) -> bool {
        let mut history: Vec<Entry> = Vec::new();
        let mut beam = vec![self.pile_up(stack, &mut history)];
        // A clique on the way, the layouts there, and how long the history was.
        let mut stations: Vec<(u32, Vec<Layout>, usize)> = Vec::new();
        let (mut at, mut width, mut failures, mut failed_at) = (0, WIDTH, 0, 0);
        while at < self.way {
            if purse.left() == 0 || purse.late() {
                return false;
            }
            if failures > 0 && at > failed_at + STRIDE {
                (failures, width) = (0, WIDTH);
                beam.truncate(width);
            }
            if at.is_multiple_of(STRIDE) && stations.last().is_none_or(|station| station.0 < at) {
                let kept = &beam[..beam.len().min(CLOSER * WIDTH)];
                purse.spend(copied(kept));
                stations.push((at, kept.to_vec(), history.len()));
                // No failure leads back further.
                stations.drain(..stations.len().saturating_sub(2 << FAILURES));
            }
            if self.pass(at, width, &mut beam, &mut history, purse) {
                at += 1;
                continue;
            }
            failures += 1;
            failed_at = failed_at.max(at);
            if failures > FAILURES {
                return false;
            }
            width = WIDTH << failures;
            let back = STRIDE << (failures - 1);
            while stations.len() > 1 && stations.last().is_some_and(|station| station.0 + back > at) {
                stations.pop();
            }
            let Some((clique, layouts, entries)) = stations.last() else { return false };
            purse.spend(copied(layouts));
            history.truncate(*entries);
            (at, beam) = (*clique, layouts.clone());
        }
        let mut node = beam[0].node;
        while let Some(&(parent, i, place)) = history.get(node as usize) {
            offsets[i as usize] = place;
            node = parent;
        }
        true
    }

    fn item(&self, i: u32) -> Item {
        self.attempt.timeline.part.items[i as usize]
    }

    /// When an item dies, in cliques of this direction.
    fn leaves(&self, i: u32) -> u32 {
        match self.direction {
            Direction::Forward => self.item(i).end,
            Direction::Backward => self.arena.cliques - self.item(i).start,
        }
    }

    /// Whoever is born before a clique is alive in it if it leaves later than this.
    fn until(&self, at: u32) -> u32 {
        match self.direction {
            Direction::Forward => self.attempt.peak + at,
            Direction::Backward => self.arena.cliques - 1 - (self.attempt.peak - at),
        }
    }

    /// Whom the step from clique `at` to the next gives birth to.
    fn born(&self, at: u32) -> Vec<u32> {
        match self.direction {
            Direction::Forward => self.attempt.timeline.starting_in(self.attempt.peak + 1 + at).collect(),
            Direction::Backward => self.attempt.timeline.ending_at(self.attempt.peak - at).collect(),
        }
    }

    /// Who dies at that step, ascending.
    fn dead(&self, at: u32) -> Vec<u32> {
        let mut dead: Vec<u32> = match self.direction {
            Direction::Forward => self.attempt.timeline.ending_at(self.attempt.peak + 1 + at).collect(),
            Direction::Backward => self.attempt.timeline.starting_in(self.attempt.peak - at).collect(),
        };
        dead.sort_unstable();
        dead
    }

    /// Bytes to spare.
    fn slack(&self, at: u32) -> u64 {
        let clique = match self.direction {
            Direction::Forward => self.attempt.peak + at,
            Direction::Backward => self.attempt.peak - at,
        };
        self.arena.ceiling - self.attempt.live[clique as usize]
    }

    fn is_narrow(&self, at: u32) -> bool {
        let slack = self.slack(at);
        let mut near = at.saturating_sub(NEAR).max(1)..=at.saturating_add(NEAR).min(self.way);
        slack < self.largest && near.all(|other| (slack, at) <= (self.slack(other), other))
    }

    fn pile_up(&self, stack: &[u32], history: &mut Vec<Entry>) -> Layout {
        let (mut top, mut node) = (0, ROOT);
        let mut live = Vec::with_capacity(stack.len());
        for &i in stack {
            let (from, to) = (top, top + self.item(i).bytes);
            live.push(Rect { from, to, leaves: self.leaves(i), item: i });
            history.push((node, i, from));
            (top, node) = (to, history.len() as u32 - 1);
        }
        Layout::new(live, node, self.arena)
    }

    /// The step from clique `at` to the next; false where a birth finds no place in any layout.
    fn pass(&self, at: u32, width: usize, beam: &mut Vec<Layout>, history: &mut Vec<Entry>, purse: &mut Meter) -> bool {
        let dead = self.dead(at);
        if !dead.is_empty() {
            purse.spend(copied(beam));
            beam.iter_mut().for_each(|layout| layout.bury(&dead, self.arena));
        }
        let mut born = self.born(at);
        if self.number.is_multiple_of(2) {
            born.sort_by_key(|&i| Reverse(self.leaves(i)));
        } else {
            born.sort_by_key(|&i| Reverse(self.item(i).bytes));
        }
        if born.is_empty() {
            return true;
        }
        let mut ahead = self.ahead(at, purse);
        for i in born {
            if let Some(ahead) = &mut ahead
                && let Some(index) = ahead.waiting.iter().position(|&other| other == i)
            {
                ahead.waiting.remove(index);
                ahead.sizes.remove(index);
            }
            let kept = self.kept(i, width, beam, ahead.as_ref(), purse);
            if kept.is_empty() {
                return false;
            }
            *beam = self.grow(&kept, std::mem::take(beam), history, purse);
        }
        true
    }

    /// What the next narrow clique after `at` waits for.
    fn ahead(&self, at: u32, purse: &mut Meter) -> Option<Ahead> {
        let clique = *self.narrow.get(self.narrow.partition_point(|&clique| clique <= at))?;
        let until = self.until(clique);
        let mut waiting: Vec<u32> = (at..clique).flat_map(|step| self.born(step)).collect();
        purse.spend(u64::from(clique - at) + waiting.len() as u64);
        waiting.retain(|&i| self.leaves(i) > until);
        waiting.sort_by_key(|&i| Reverse(self.item(i).bytes));
        let sizes = waiting.iter().map(|&i| self.item(i).bytes).collect();
        Some(Ahead { clique, waiting, sizes })
    }

    /// The best places for an item.
    fn kept(&self, i: u32, width: usize, beam: &[Layout], ahead: Option<&Ahead>, purse: &mut Meter) -> Vec<Candidate> {
        let (bytes, leaves) = (self.item(i).bytes, self.leaves(i));
        let whim = WHIM * (self.number / KINDS);
        let mut candidates: Vec<Candidate> = Vec::new();
        for (parent, layout) in beam.iter().enumerate() {
            candidates.extend(layout.places(i, bytes, leaves).map(|place| {
                let chance = mix(place.hash, self.number);
                let more = if whim > 0 { mix(place.hash, !self.number) % whim } else { 0 };
                Candidate { rank: place.rank + more, chance, parent, place }
            }));
            purse.spend(4 + layout.holes.len() as u64);
        }
        let by_rank = |candidate: &Candidate| (candidate.rank, candidate.chance);
        candidates.sort_unstable_by_key(by_rank);
        if let Some(ahead) = ahead {
            candidates.truncate(CLOSER * width);
            self.look_ahead(ahead, beam, &mut candidates, purse);
            candidates.sort_unstable_by_key(by_rank);
        }
        let mut children = vec![0; beam.len()];
        let mut kept: Vec<Candidate> = Vec::with_capacity(width);
        for candidate in candidates {
            let is_known = || kept.iter().any(|other| other.place.hash == candidate.place.hash);
            if kept.len() == width {
                break;
            }
            if children[candidate.parent] < CHILDREN && !is_known() {
                children[candidate.parent] += 1;
                kept.push(candidate);
            }
        }
        kept
    }

    /// Adds to the ranks of places that leave what is to come without room.
    fn look_ahead(&self, ahead: &Ahead, beam: &[Layout], candidates: &mut [Candidate], purse: &mut Meter) {
        let until = self.until(ahead.clique);
        let mut room = Vec::new();
        // What a layout's misfits cost where the new item doesn't change them.
        let mut known = vec![None; beam.len()];
        for Candidate { rank, parent, place, .. } in candidates {
            let stays = place.rect.leaves > until;
            let cost = known[*parent].filter(|_| !stays).unwrap_or_else(|| {
                let layout = &beam[*parent];
                let misfits = layout.misfits(Some(place.rect), until, &ahead.sizes, self.arena, &mut room);
                purse.spend((layout.live.len() + room.len() * ahead.sizes.len()) as u64 / 8);
                let share = u128::from(MISFIT.1) * u128::from(misfits) / u128::from(self.largest);
                if misfits > 0 { MISFIT.0 + share as u64 } else { 0 }
            });
            if !stays {
                known[*parent] = Some(cost);
            }
            *rank += cost;
        }
    }

    /// The layouts that the chosen places lead to, best first.
    fn grow(&self, kept: &[Candidate], beam: Vec<Layout>, history: &mut Vec<Entry>, purse: &mut Meter) -> Vec<Layout> {
        let mut children = vec![0; beam.len()];
        kept.iter().for_each(|candidate| children[candidate.parent] += 1);
        let mut beam: Vec<Option<Layout>> = beam.into_iter().map(Some).collect();
        let grown = kept.iter().filter_map(|candidate| {
            let parent = &mut beam[candidate.parent];
            children[candidate.parent] -= 1;
            // The last child takes its parent's place.
            let mut layout = if children[candidate.parent] == 0 { parent.take() } else { parent.clone() }?;
            purse.spend(copied(std::slice::from_ref(&layout)));
            layout.put(&candidate.place);
            history.push((layout.node, candidate.place.rect.item, candidate.place.rect.from));
            layout.node = history.len() as u32 - 1;
            Some(layout)
        });
        grown.collect()
    }
}

/// What copying layouts costs.
fn copied(layouts: &[Layout]) -> u64 {
    layouts.iter().map(|layout| 1 + layout.live.len() as u64 / 16).sum()
}

#[cfg(test)]
mod tests {
    use gapless_testing::prelude::*;

    use super::*;
    use crate::planner::judging::{judge_attempt, part, peaks};
    use crate::planner::part::Whole;
    use crate::planner::portfolio::Portfolio;
    use crate::synthetic::{Order, Step};

    generated! {
        #[test]
        fn what_is_found_is_a_plan_below_the_ceiling(
            rows in prop::collection::vec((0..30u32, 1..=12u32, 1..20u64), 1..60),
            room in 0..9u64,
            number in 0..40u64,
        ) {
            let part = part(&rows, 30);
            let timeline = Timeline::new(&part);
            let (live, peaks, most) = peaks(&part);
            let attempt = Attempt::new(&timeline, &live, most + room, &peaks, number);
            judge_attempt(&part, most + room, 200_000, |purse| attempt.run(purse))?;
        }
    }

    /// Steps that are as full once per layer, with lengths that differ, for the same work.
    #[test]
    fn a_way_is_found_where_one_layout_gets_stuck() {
        for (stages, micro_batches) in [(2, 8), (2, 9), (3, 9)] {
            let tokens = &[384, 512, 640, 1024];
            let step = Step { order: Order::Overlapped, layers: 3, stages, micro_batches, tokens, ..Step::default() };
            let whole = Whole::new(&step.problem().unwrap(), true);
            let [part] = whole.parts.as_slice() else { panic!("one part") };
            let portfolio = || Portfolio::new(part, part.bound, Meter { work: 20_000_000, ..Meter::default() });
            assert!(!portfolio().retrace(part.bound, 0), "{step:?} is too easy");
            let mut portfolio = portfolio();
            assert!(portfolio.look_ahead(part.bound), "{step:?}");
            assert_eq!(portfolio.best.map(|best| best.height), Some(part.bound));
        }
    }

    #[test]
    fn an_empty_purse_buys_nothing() {
        let part = part(&[(0, 2, 3), (1, 2, 3), (2, 2, 3)], 30);
        let (live, peaks, _) = peaks(&part);
        let timeline = Timeline::new(&part);
        let attempt = Attempt::new(&timeline, &live, 6, &peaks, 0);
        assert_eq!(attempt.run(&mut Meter::default()), None);
        assert!(attempt.run(&mut Meter { work: 1_000, ..Meter::default() }).is_some());
    }
}

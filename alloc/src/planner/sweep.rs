//! One pass over time: whoever dies gives its range back, whoever is born takes a hole.
//!
//! Forward or backward in time, from the edge of the part or outwards from one clique whose items are stacked first.
//! What varies is which hole is taken, by whom, and in which order those are served that come together ([`Policy`]).
//! Items with a place of their own ([`Reserved`]) keep it, and the pass flows around them.

use std::cmp::Reverse;

use super::holes::{Fit, Holes};
use super::meter::Meter;
use super::part::{Part, offsets_of};
use super::reserved::Reserved;

/// How a sweep decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Policy {
    /// An item alive in at least this many cliques is long.
    pub long_from: u32,
    /// Where the long ones go.
    pub long: Fit,
    /// Where the others go.
    pub short: Fit,
    /// Who is served first of those born together.
    pub order: Order,
}

/// Who is served first of those born together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Order {
    /// Longest lifetime first.
    Longest,
    /// Most bytes first.
    Largest,
}

/// A direction of time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    Forward,
    Backward,
}

/// Where a sweep begins.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Start<'s> {
    /// Before the first clique or after the last one.
    Edge,
    /// In this clique, whose items lie on each other in this order, from 0 up.
    Stack(u32, &'s [u32]),
}

/// A part with its births and deaths by clique.
pub(crate) struct Timeline<'p> {
    pub part: &'p Part,
    /// Where each clique's births begin; items by start are the part's own order.
    starts: Vec<u32>,
    by_end: Vec<u32>,
    /// Where each clique's deaths begin in `by_end`: entry `k` is for those whose last clique is `k - 1`.
    ends: Vec<u32>,
}

impl<'p> Timeline<'p> {
    pub fn new(part: &'p Part) -> Self {
        let starts = offsets_of(part.cliques, part.items.iter().map(|item| item.start));
        let ends = offsets_of(part.cliques, part.items.iter().map(|item| item.end));
        let mut next = ends.clone();
        let mut by_end = vec![0; part.items.len()];
        for (index, item) in part.items.iter().enumerate() {
            let slot = &mut next[item.end as usize];
            by_end[*slot as usize] = index as u32;
            *slot += 1;
        }
        Self { part, starts, by_end, ends }
    }

    /// The items alive in a clique.
    pub fn alive(&self, clique: u32) -> Vec<u32> {
        (0..self.starts[clique as usize + 1]).filter(|&i| clique < self.part.items[i as usize].end).collect()
    }

    pub fn starting_in(&self, clique: u32) -> impl Iterator<Item = u32> + '_ {
        self.starts[clique as usize]..self.starts[clique as usize + 1]
    }

    pub fn ending_at(&self, clique: u32) -> impl Iterator<Item = u32> + '_ {
        let range = self.ends[clique as usize] as usize..self.ends[clique as usize + 1] as usize;
        self.by_end[range].iter().copied()
    }
}

/// One sweep.
pub(crate) struct Sweep<'s> {
    pub timeline: &'s Timeline<'s>,
    pub policy: Policy,
    pub direction: Direction,
    pub start: Start<'s>,
    pub reserved: &'s Reserved,
    /// The height aimed at.
    pub ceiling: u64,
    /// The sweep gives up once it ends above this.
    pub limit: u64,
}

impl Sweep<'_> {
    /// Writes the offsets of what it places and returns the height; `over` receives the items that end above the
    /// ceiling, `purse` pays for the items and ranges looked at. `None` when it is empty, or the height passes the limit
    /// or the address space.
    pub fn run(&self, offsets: &mut [u64], over: &mut Vec<u32>, purse: &mut Meter) -> Option<u64> {
        let items = &self.timeline.part.items;
        let mut holes = Holes::new(self.ceiling);
        let mut height = 0;
        over.clear();
        if let Start::Stack(_, stack) = self.start {
            for &i in stack {
                offsets[i as usize] = height;
                height += items[i as usize].bytes;
            }
            holes.claim(0, height);
        }
        let (mut born, mut blocked) = (Vec::new(), Vec::new());
        for clique in self.cliques() {
            if purse.left() == 0 {
                return None;
            }
            self.bury(clique, &mut holes, offsets);
            self.births(clique, &mut born);
            for &i in &born {
                let item = items[i as usize];
                let at = match self.reserved.of(i) {
                    Some(at) => holes.claim(at, at + item.bytes).then_some(at)?,
                    None => {
                        let fit =
                            if item.cliques() >= self.policy.long_from { self.policy.long } else { self.policy.short };
                        let looked = match self.direction {
                            Direction::Forward => self.reserved.starting(clique + 1..item.end, &mut blocked),
                            Direction::Backward => self.reserved.ending(item.start + 1..clique + 1, &mut blocked),
                        };
                        purse.spend(1 + looked + holes.len() as u64 / 4);
                        holes.take_around(item.bytes, item.alignment, fit, &blocked)?
                    }
                };
                offsets[i as usize] = at;
                if self.timeline.part.is_ghost(i) {
                    continue;
                }
                height = height.max(at + item.bytes);
                if height > self.limit {
                    return None;
                }
                if at + item.bytes > self.ceiling {
                    over.push(i);
                }
            }
        }
        Some(height)
    }

    fn cliques(&self) -> Box<dyn Iterator<Item = u32>> {
        let count = self.timeline.part.cliques;
        match (self.start, self.direction) {
            (Start::Edge, Direction::Forward) => Box::new(0..count),
            (Start::Edge, Direction::Backward) => Box::new((0..count).rev()),
            (Start::Stack(at, _), Direction::Forward) => Box::new(at + 1..count),
            (Start::Stack(at, _), Direction::Backward) => Box::new((0..at).rev()),
        }
    }

    /// Frees what does not live on into `clique`.
    fn bury(&self, clique: u32, holes: &mut Holes, offsets: &[u64]) {
        let free =
            |i: u32| holes.free(offsets[i as usize], offsets[i as usize] + self.timeline.part.items[i as usize].bytes);
        match self.direction {
            Direction::Forward => self.timeline.ending_at(clique).for_each(free),
            Direction::Backward if clique + 1 == self.timeline.part.cliques => {}
            Direction::Backward => self.timeline.starting_in(clique + 1).for_each(free),
        }
    }

    /// What comes to life in `clique`, in the order of service: reserved items first.
    fn births(&self, clique: u32, born: &mut Vec<u32>) {
        born.clear();
        match self.direction {
            Direction::Forward => born.extend(self.timeline.starting_in(clique)),
            Direction::Backward => born.extend(self.timeline.ending_at(clique + 1)),
        }
        if born.len() < 2 {
            return;
        }
        let item = |i: u32| self.timeline.part.items[i as usize];
        match (self.policy.order, self.direction) {
            // The part's own order.
            (Order::Longest, Direction::Forward) => {}
            (Order::Longest, Direction::Backward) => born.sort_by_key(|&i| item(i).start),
            (Order::Largest, _) => born.sort_by_key(|&i| Reverse(item(i).bytes)),
        }
        if !self.reserved.is_empty() {
            born.sort_by_key(|&i| self.reserved.of(i).is_none());
        }
    }
}

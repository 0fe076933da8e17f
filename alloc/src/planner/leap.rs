//! From one milestone to the next: many ways, tried one after another.
//!
//! Births between two [`milestones`](super::milestones) are placed in order of time, each at an end of a free range, or so
//! far from it that another one fits in between; first where neighbours leave at about the same time. A place is out of
//! the question if who is alive at the milestone and still to come then finds no room between those that stay. Where a
//! birth finds no place, the one before it tries its next.

use std::cmp::Reverse;
use std::collections::HashSet;
use std::ops::Range;

use super::eject::mix;
use super::layout::sixteenths_of_doublings;
use super::meter::Meter;
use super::milestones::Course;

/// An item in its place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Slab {
    pub from: u64,
    pub to: u64,
    /// The clique before which it dies.
    pub leaves: u32,
}

/// A layout at the next milestone.
pub(super) struct Arrival {
    /// Who is alive there, ascending.
    pub live: Vec<Slab>,
    /// Who was put where on the way, in order.
    pub places: Vec<(u32, u64)>,
    /// How far apart neighbours leave, and how many ranges are free.
    pub disorder: u64,
    /// Layouts that are alike have one hash.
    pub hash: u64,
    /// Layouts whose large items and free ranges come in the same order, from below or from above, have one outline.
    pub outline: u64,
}

/// Places that may be looked at on the way from one layout, and layouts that may come from it, for attempts that try few
/// places and for the others.
const MOST: [(u64, usize); 2] = [(200, 8), (400, 16)];

/// Births up to which a leap is made.
pub(super) const BIRTHS: usize = 200;

/// Slabs of all layouts on the way, at most.
const SLABS: usize = 1 << 22;

/// Places that are tried for an item that is gone before the milestone, and for a small one where few are tried.
const PLACES: (usize, usize) = (2, 3);

/// An item is large from this share of the largest on.
const LARGE: u64 = 3;

/// What a free range adds to the disorder.
const RANGE: u64 = 80;

/// What a place adds that leaves its range in one piece, and one that splits it.
const ASIDE: (u64, u64) = (10, 90);

/// What chance may add to the rank of a place, once more for every second patient attempt.
const WHIM: u64 = 8;

/// A birth on the way.
#[derive(Debug, Clone, Copy)]
struct Birth {
    clique: u32,
    item: u32,
    bytes: u64,
    /// The clique before which it dies.
    leaves: u32,
    /// Which of those it is that the milestone waits for.
    waits: Option<usize>,
}

/// The way between two milestones.
pub(super) struct Leap<'c> {
    course: &'c Course<'c>,
    to: u32,
    births: Vec<Birth>,
    /// Sizes of those that the milestone waits for, the largest first, and whether they are still to come.
    waiting: Vec<(u64, bool)>,
    /// Places and arrivals that each layout may have.
    most: (u64, usize),
    /// What is left of both.
    steps: u64,
    arrivals: Vec<Arrival>,
    /// Where each birth so far was put.
    path: Vec<(u32, u64)>,
    /// Hashes of layouts seen on the way.
    known: HashSet<u64>,
    room: Vec<u64>,
}

impl<'c> Leap<'c> {
    /// Over `cliques`, of which the last is the milestone and the one before the first was the last one; each step of
    /// `effort` doubles what may be tried.
    pub fn new(course: &'c Course<'c>, cliques: Range<u32>, effort: u32) -> Self {
        let to = cliques.end;
        let born =
            (cliques.start + 1..=to).flat_map(|clique| course.born(clique).into_iter().map(move |i| (clique, i)));
        let birth = |(clique, item): (u32, u32)| {
            let seen = course.items[item as usize];
            Birth { clique, item, bytes: seen.bytes, leaves: seen.end, waits: None }
        };
        let mut births: Vec<Birth> = born.map(birth).collect();
        let mut stay: Vec<usize> = (0..births.len()).filter(|&k| births[k].leaves > to).collect();
        stay.sort_by_key(|&k| Reverse(births[k].bytes));
        let waiting = stay.iter().map(|&k| (births[k].bytes, true)).collect();
        stay.iter().enumerate().for_each(|(rank, &k)| births[k].waits = Some(rank));
        let most = MOST[usize::from(!course.is_brief())];
        Self {
            course,
            to,
            births,
            waiting,
            most: (most.0 << effort, most.1 << effort),
            steps: 0,
            arrivals: Vec::new(),
            path: Vec::new(),
            known: HashSet::new(),
            room: Vec::new(),
        }
    }

    /// The layouts at the milestone that come from one.
    pub fn from(&mut self, live: &[Slab], purse: &mut Meter) -> Vec<Arrival> {
        let is_large = live.len().saturating_mul(self.births.len()) > SLABS;
        self.steps = if is_large || purse.late() { 0 } else { self.most.0 };
        self.known.clear();
        self.go(0, live.to_vec(), purse);
        std::mem::take(&mut self.arrivals)
    }

    fn is_over(&self, purse: &Meter) -> bool {
        self.steps == 0 || self.arrivals.len() == self.most.1 || purse.left() == 0
    }

    /// Places all births from the given one on.
    fn go(&mut self, next: usize, mut live: Vec<Slab>, purse: &mut Meter) {
        if self.is_over(purse) {
            return;
        }
        self.steps -= 1;
        purse.spend(4 + live.len() as u64 / 4);
        let Some(&birth) = self.births.get(next) else {
            live.retain(|slab| slab.leaves > self.to);
            return self.arrive(live);
        };
        if next == 0 || self.births[next - 1].clique < birth.clique {
            live.retain(|slab| slab.leaves > birth.clique);
            let hash = live.iter().fold(next as u64, |hash, slab| hash ^ slab.key(slab.leaves));
            if !self.known.insert(hash) {
                return;
            }
        }
        let is_last = next + 1 == self.births.len();
        if let Some(rank) = birth.waits {
            self.waiting[rank].1 = false;
        }
        let places = self.places(birth, &live);
        purse.spend(places.len() as u64 / 8);
        for from in places {
            let slab = Slab { from, to: from + birth.bytes, leaves: birth.leaves };
            purse.spend(2 + live.len() as u64 / 8);
            if birth.waits.is_some() && !is_last {
                let has_room = self.has_room(&live, slab);
                purse.spend(self.room.len() as u64 * self.waiting.len() as u64 / 64);
                if !has_room {
                    continue;
                }
            }
            let mut grown = Vec::with_capacity(live.len() + 1);
            let index = live.partition_point(|other| other.from < from);
            grown.extend_from_slice(&live[..index]);
            grown.push(slab);
            grown.extend_from_slice(&live[index..]);
            self.path.push((birth.item, from));
            self.go(next + 1, grown, purse);
            self.path.pop();
            if self.is_over(purse) {
                break;
            }
        }
        if let Some(rank) = birth.waits {
            self.waiting[rank].1 = true;
        }
    }

    /// Where a birth could go, the best first.
    fn places(&self, birth: Birth, live: &[Slab]) -> Vec<u64> {
        let (course, bytes) = (self.course, birth.bytes);
        let leaves = course.seen_by(birth.leaves);
        let mut places: Vec<(u64, u64)> = Vec::new();
        each_range(live, course.ceiling, |from, to, between| {
            if to - from < bytes {
                return;
            }
            let [below, above] = between.map(|slab| slab.map_or(course.seen_by_edges(), |s| course.seen_by(s.leaves)));
            let (low, high) = (apart(below, leaves), apart(leaves, above));
            if to - from == bytes {
                places.push(((low + high).saturating_sub(RANGE + apart(below, above)), from));
                return;
            }
            places.extend([(low + ASIDE.0, from), (high + ASIDE.0, to - bytes)]);
            let mut last = 0;
            for &(other, is_to_come) in self.waiting.iter().filter(|_| birth.waits.is_some()) {
                if is_to_come && other != last && to - from - bytes > other {
                    last = other;
                    places.extend([from + other, to - other - bytes].map(|at| (low + high + ASIDE.1, at)));
                }
            }
        });
        let whim = WHIM * course.whim();
        if whim > 0 {
            let chance = |at: u64| mix(at ^ (u64::from(birth.item) << 7), course.number) % whim;
            places.iter_mut().for_each(|(rank, at)| *rank += chance(*at));
        }
        places.sort_unstable();
        places.dedup_by_key(|place| place.1);
        if birth.waits.is_none() {
            places.truncate(PLACES.0);
        } else if bytes < course.largest / LARGE && course.is_brief() {
            places.truncate(PLACES.1);
        }
        places.into_iter().map(|place| place.1).collect()
    }

    /// Whether those that the milestone still waits for find room between those that stay, each in the tightest range.
    fn has_room(&mut self, live: &[Slab], new: Slab) -> bool {
        self.room.clear();
        let mut floor = 0;
        let mut pass = |slab: Slab| {
            if slab.from > floor {
                self.room.push(slab.from - floor);
            }
            floor = slab.to;
        };
        let mut new = Some(new);
        for &slab in live.iter().filter(|slab| slab.leaves > self.to) {
            new.take_if(|new| new.from < slab.from).into_iter().for_each(&mut pass);
            pass(slab);
        }
        new.into_iter().for_each(&mut pass);
        pass(Slab { from: self.course.ceiling, to: self.course.ceiling, leaves: 0 });
        self.waiting.iter().filter(|waiting| waiting.1).all(|&(bytes, _)| {
            let tightest = self.room.iter_mut().filter(|left| **left >= bytes).min();
            tightest.map(|left| *left -= bytes).is_some()
        })
    }

    fn arrive(&mut self, live: Vec<Slab>) {
        let course = self.course;
        let hash = live.iter().fold(0, |hash, slab| hash ^ slab.key(course.seen_by(slab.leaves)));
        if !self.known.insert(hash) {
            return;
        }
        // Large items by when they leave, and free ranges.
        let mut outline: Vec<(u64, u64)> = Vec::new();
        let mut disorder = 0;
        let mut floor = 0;
        let mut below = course.seen_by_edges();
        for slab in &live {
            let seen = course.seen_by(slab.leaves);
            if floor < slab.from {
                outline.push((0, slab.from - floor));
                disorder += RANGE;
            }
            if slab.to - slab.from >= course.largest / LARGE {
                outline.push((1 + u64::from(seen), slab.to - slab.from));
            }
            disorder += apart(below, seen);
            (below, floor) = (seen, slab.to);
        }
        disorder += apart(below, course.seen_by_edges());
        if floor < course.ceiling {
            outline.push((0, course.ceiling - floor));
            disorder += RANGE;
        }
        let chain = |hash: u64, &(seen, bytes): &(u64, u64)| mix(hash ^ seen, bytes);
        let outline = outline.iter().fold(1, chain).min(outline.iter().rev().fold(1, chain));
        self.arrivals.push(Arrival { live, places: self.path.clone(), disorder, hash, outline });
    }
}

impl Slab {
    /// Slabs in one place that leave at the same time have one key.
    fn key(self, leaves: u32) -> u64 {
        mix(self.from ^ (self.to - self.from).rotate_left(20), u64::from(leaves))
    }
}

/// Every free range below the ceiling, with who lies below and above it; nobody at the edges of the arena.
fn each_range(live: &[Slab], ceiling: u64, mut visit: impl FnMut(u64, u64, [Option<&Slab>; 2])) {
    let mut below: Option<&Slab> = None;
    for slab in live {
        let floor = below.map_or(0, |slab| slab.to);
        if floor < slab.from {
            visit(floor, slab.from, [below, Some(slab)]);
        }
        below = Some(slab);
    }
    let floor = below.map_or(0, |slab| slab.to);
    if floor < ceiling {
        visit(floor, ceiling, [below, None]);
    }
}

/// How much two neighbours that see so many milestones add to the disorder.
fn apart(a: u32, b: u32) -> u64 {
    sixteenths_of_doublings(a.abs_diff(b).saturating_mul(4))
}

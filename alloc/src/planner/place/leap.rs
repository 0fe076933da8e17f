//! From one milestone of a sweep with an [open stack](super::open_stack) to the next: many ways, tried one after another.
//!
//! Births between two milestones are placed in order of time, each at an end of a free range, or so
//! far from it that another one fits in between; first where neighbours leave at about the same time. A place is out of
//! the question if who is alive at the milestone and still to come then finds no room between those that stay. Where a
//! birth finds no place, the one before it tries its next. A birth
//! may also take over one of the [lots](super::lots) of the stack, or have one or two moved to where they make room.

use std::cmp::Reverse;
use std::collections::HashSet;
use std::ops::Range;

use super::backtrack::sixteenths_of_doublings;
use super::lots::{At, Lots, Place, UNDECIDED};
use super::open_stack::Course;
use crate::order::sort_by_key;
use crate::planner::budget::Budget;
use crate::planner::mix::mix;

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
    pub places: Vec<(u32, At)>,
    /// Of the stack, whose place is not decided yet.
    pub lots: Lots,
    /// How far apart neighbours leave, and how many ranges are free.
    pub disorder: u64,
    /// Layouts that are alike have one hash.
    pub hash: u64,
    /// Layouts whose large items and free ranges come in the same order, from below or from above, have one outline.
    pub outline: u64,
}

/// Places that may be looked at on the way from one layout for each birth: in attempts of a third each this many, twice and four
/// times as many. Where more are tried, less orderly layouts arrive too.
const PLACES_PER_BIRTH: u64 = 4;

/// Layouts that may come from one.
const ARRIVALS: usize = 8;

/// Births up to which a leap is made.
pub(super) const BIRTHS: usize = 200;

/// Slabs of all layouts on the way, at most.
const SLABS: usize = 1 << 22;

/// Places that are tried for an item that is gone before the milestone, and for a small one.
const PLACES: (usize, usize) = (2, 3);

/// An item is large from this share of the largest on.
const LARGE: u64 = 3;

/// What a free range adds to the disorder.
const RANGE: u64 = 80;

/// What a place adds that leaves its range in one piece, and one that splits it.
const ASIDE: (u64, u64) = (10, 90);

/// What it adds to take over a lot of the stack on the way, and to decide where one lay: only where nothing else is left.
const HEIR: u64 = 180;
const OPENING: u64 = 300;

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
    path: Vec<(u32, At)>,
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
            let seen = course.timeline.item(item);
            Birth { clique, item, bytes: seen.bytes, leaves: seen.end, waits: None }
        };
        let mut births: Vec<Birth> = born.map(birth).collect();
        let mut stay: Vec<usize> = (0..births.len()).filter(|&k| births[k].leaves > to).collect();
        sort_by_key(&mut stay, |&k| Reverse(births[k].bytes));
        let waiting = stay.iter().map(|&k| (births[k].bytes, true)).collect();
        stay.iter().enumerate().for_each(|(rank, &k)| births[k].waits = Some(rank));
        let most = (
            (1 + births.len() as u64) * (PLACES_PER_BIRTH << (course.number % 3 + u64::from(course.effort()))),
            ARRIVALS << course.effort(),
        );
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
    pub fn from(&mut self, live: &[Slab], lots: &Lots, budget: &mut Budget) -> Vec<Arrival> {
        let is_large = live.len().saturating_mul(self.births.len()) > SLABS;
        self.steps = if is_large || budget.is_late() { 0 } else { self.most.0 };
        self.known.clear();
        self.go(0, live.to_vec(), lots.clone(), budget);
        std::mem::take(&mut self.arrivals)
    }

    fn is_over(&self, budget: &Budget) -> bool {
        self.steps == 0 || self.arrivals.len() == self.most.1 || budget.left() == 0
    }

    /// Places all births from the given one on.
    fn go(&mut self, next: usize, mut live: Vec<Slab>, lots: Lots, budget: &mut Budget) {
        if self.is_over(budget) {
            return;
        }
        self.steps -= 1;
        budget.spend(4 + (live.len() + lots.len()) as u64 / 4);
        let Some(&birth) = self.births.get(next) else {
            live.retain(|slab| slab.leaves > self.to);
            return self.arrive(live, lots);
        };
        if next == 0 || self.births[next - 1].clique < birth.clique {
            live.retain(|slab| slab.leaves > birth.clique);
            let hash = live.iter().fold(next as u64, |hash, slab| hash ^ slab.key(slab.leaves));
            if !self.known.insert(hash ^ lots.key(birth.clique, |leaves| leaves)) {
                return;
            }
        }
        let (course, waits) = (self.course, birth.waits.is_some());
        let is_last = next + 1 == self.births.len();
        if let Some(rank) = birth.waits {
            self.waiting[rank].1 = false;
        }
        let places = self.places(birth, &live, &lots);
        budget.spend(places.len() as u64 / 8);
        for place in places {
            budget.spend(2 + live.len() as u64 / 8);
            let known = self.path.len();
            let (mut grown, mut left) = (live.clone(), lots.clone());
            left.take(&place, birth.leaves, &mut grown, &mut self.path);
            let at = match place.heir {
                Some(lot) => At::Of(left.root(lot)),
                None => {
                    let slab = Slab { from: place.from, to: place.from + birth.bytes, leaves: birth.leaves };
                    let index = grown.partition_point(|other| other.from < slab.from);
                    grown.insert(index, slab);
                    At::Offset(place.from)
                }
            };
            self.path.push((birth.item, at));
            let arrived = self.arrivals.len();
            let mut has_room = true;
            if waits && !is_last {
                has_room = self.has_room(&grown, &left);
                budget.spend(self.room.len() as u64 * self.waiting.len() as u64 / 64);
            }
            if has_room {
                self.go(next + 1, grown, left, budget);
            }
            self.path.truncate(known);
            // What is tried on the way from an open stack is where the largest go: one way for the others will do.
            let is_enough = self.arrivals.len() > arrived && !(waits && course.is_largest(birth.bytes));
            if has_room && self.is_over(budget) || is_enough {
                break;
            }
        }
        if let Some(rank) = birth.waits {
            self.waiting[rank].1 = true;
        }
    }

    /// Where a birth could go, the best first.
    fn places(&self, birth: Birth, live: &[Slab], lots: &Lots) -> Vec<Place> {
        let (course, bytes) = (self.course, birth.bytes);
        let leaves = course.seen_by(birth.leaves);
        let mut places: Vec<Place> = Vec::new();
        // Every other attempt would rather have a large item between two ranges than beside one.
        let parts = course.number % 2 == 1 && course.is_largest(bytes);
        let dead = lots.dead(birth.clique);
        let heir = dead.iter().find(|lot| lot.1 == bytes).map(|lot| lot.0);
        if heir.is_some() {
            let rank = if birth.waits.is_some() { 0 } else { HEIR };
            places.push(Place { rank, heir, ..Place::default() });
        }
        each_range(live, course.ceiling, |from, to, between| {
            let is_open = between.map(|slab| slab.is_some_and(|slab| slab.leaves == UNDECIDED));
            let [below, above] = between.map(|slab| slab.map_or(UNDECIDED, |s| course.seen_by(s.leaves)));
            let (low, high) = (apart(below, leaves), apart(leaves, above));
            if to - from < bytes {
                Lots::openings(&dead, (from, to), is_open, bytes, |from, to, opened| {
                    let opening = OPENING * opened.iter().flatten().count() as u64;
                    if to - from == bytes {
                        let rank = (low + high + opening).saturating_sub(RANGE + apart(below, above));
                        places.push(Place { rank, from, opened, ..Place::default() });
                    } else {
                        places.extend([(low, from), (high, to - bytes)].map(|(side, from)| Place {
                            rank: side + ASIDE.0 + opening,
                            from,
                            opened,
                            ..Place::default()
                        }));
                    }
                });
                return;
            }
            let mut push = |rank, from| places.push(Place { rank, from, ..Place::default() });
            if to - from == bytes {
                push((low + high).saturating_sub(RANGE + apart(below, above)), from);
                return;
            }
            push(low + ASIDE.0, from);
            push(high + ASIDE.0, to - bytes);
            let mut last = 0;
            for &(other, is_to_come) in self.waiting.iter().filter(|_| birth.waits.is_some()) {
                if is_to_come && other != last && to - from - bytes > other {
                    last = other;
                    let parts = parts && course.is_largest(other);
                    let aside = is_open.map(|is_open| if is_open && parts { 0 } else { ASIDE.1 });
                    push(low + high + aside[1], from + other);
                    push(low + high + aside[0], to - other - bytes);
                }
            }
        });
        places.sort_unstable();
        places.dedup_by_key(|place| Place { rank: 0, ..*place });
        if birth.waits.is_none() {
            places.truncate(PLACES.0);
        } else if bytes < course.largest / LARGE {
            places.truncate(PLACES.1);
        }
        places
    }

    /// Whether those that the milestone still waits for find room between those that stay, each in the tightest range.
    /// Beside what is not decided a range may grow by as many bytes as leave it.
    fn has_room(&mut self, live: &[Slab], lots: &Lots) -> bool {
        self.room.clear();
        let (mut floor, mut is_open) = (0, false);
        let mut open = 0;
        let top = Slab { from: self.course.ceiling, to: self.course.ceiling, leaves: 0 };
        for &slab in live.iter().filter(|slab| slab.leaves > self.to).chain([&top]) {
            let opens = slab.leaves == UNDECIDED;
            if is_open || opens {
                open += slab.from - floor;
            } else if slab.from > floor {
                self.room.push(slab.from - floor);
            }
            (floor, is_open) = (slab.to, opens);
        }
        open += lots.freed(self.to);
        self.waiting.iter().filter(|waiting| waiting.1).all(|&(bytes, _)| {
            let tightest = self.room.iter_mut().filter(|left| **left >= bytes).min();
            if let Some(left) = tightest {
                *left -= bytes;
                return true;
            }
            let fits = open >= bytes;
            open = open.saturating_sub(bytes);
            fits
        })
    }

    fn arrive(&mut self, live: Vec<Slab>, lots: Lots) {
        let course = self.course;
        let hash = live.iter().fold(0, |hash, slab| hash ^ slab.key(course.seen_by(slab.leaves)));
        let hash = hash ^ lots.key(self.to, |leaves| course.seen_by(leaves));
        if !self.known.insert(hash) {
            return;
        }
        // Large items by when they leave, and free ranges.
        let mut outline: Vec<(u64, u64)> = Vec::new();
        let mut disorder = 0;
        let mut floor = 0;
        let mut below = UNDECIDED;
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
        disorder += apart(below, UNDECIDED);
        if floor < course.ceiling {
            outline.push((0, course.ceiling - floor));
            disorder += RANGE;
        }
        let chain = |hash: u64, &(seen, bytes): &(u64, u64)| mix(hash ^ seen, bytes);
        let outline = outline.iter().fold(1, chain).min(outline.iter().rev().fold(1, chain));
        self.arrivals.push(Arrival { live, places: self.path.clone(), lots, disorder, hash, outline });
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
        if floor < slab.from || [below, Some(slab)].into_iter().flatten().any(|slab| slab.leaves == UNDECIDED) {
            visit(floor, slab.from, [below, Some(slab)]);
        }
        below = Some(slab);
    }
    let floor = below.map_or(0, |slab| slab.to);
    if floor < ceiling || below.is_some_and(|slab| slab.leaves == UNDECIDED) {
        visit(floor, ceiling, [below, None]);
    }
}

/// How much two neighbours that see so many milestones add to the disorder; nothing where one is not decided.
fn apart(a: u32, b: u32) -> u64 {
    if a == UNDECIDED || b == UNDECIDED {
        return 0;
    }
    sixteenths_of_doublings(a.abs_diff(b).saturating_mul(4))
}

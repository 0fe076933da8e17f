//! One leap of a sweep with an [open stack](super::open_stack): a depth-first search for layouts of the next milestone
//! that can be reached from a layout of this one.
//!
//! Births between the two milestones are placed in order of time. The candidate places of each birth are:
//!
//! - both ends of each free range;
//! - a dead [lot](super::lots) of the same size, which the birth takes over;
//! - free ranges that one or two dead lots extend.
//!
//! Places between neighbours that die at about the same time come first. A place is rejected if the items that are
//! still to come, and that live until the milestone, no longer fit between the items that stay. If a birth has no
//! candidate left, the search goes back to the birth before and tries that one's next candidate.

use std::cmp::Reverse;
use std::collections::HashSet;
use std::ops::Range;

use super::backtrack::sixteenths_of_doublings;
use super::lots::{At, Candidate, Lots, UNDECIDED};
use super::open_stack::HalfSearch;
use crate::order::sort_by_key;
use crate::planner::budget::Budget;
use crate::planner::mix::mix;

/// A slab: an item at its offset, or the undecided range of the stack.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PlacedItem {
    pub from: u64,
    pub to: u64,
    /// The clique before which the item dies; [`UNDECIDED`] for the undecided range.
    pub dies_before: u32,
}

/// A layout at the next milestone.
pub(super) struct Arrival {
    /// The slabs alive at the milestone, ascending by address.
    pub live: Vec<PlacedItem>,
    /// The items placed between the milestones and the lots whose offsets were decided, in order.
    pub places: Vec<(u32, At)>,
    /// The lots that are still undecided.
    pub lots: Lots,
    /// The penalty of the layout, for neighbours that die at different times and for each free range.
    pub disorder: u64,
    /// Hash of the layout. Layouts that leave the same choices have the same hash.
    pub hash: u64,
}

/// Number of places per birth that may be tried from one layout. Attempts use this number, twice this number and four
/// times this number in turn. The more places are tried, the less orderly are the layouts found last.
const PLACES_PER_BIRTH: u64 = 4;

/// Most layouts of the next milestone that are collected from one layout of this milestone.
const ARRIVALS: usize = 8;

/// Most births of a leap.
pub(super) const BIRTHS: usize = 200;

/// Most slabs in all intermediate layouts of one search.
const SLABS: usize = 1 << 22;

/// Most places that are tried for an item that dies before the milestone, and for a small item that lives longer.
const PLACES: (usize, usize) = (2, 3);

/// An item is large if it has at least 1/`LARGE` of the largest item's bytes.
const LARGE: u64 = 3;

/// Disorder that each free range adds.
const RANGE: u64 = 80;

/// Added to the rank of a place that does not fill its free range.
const ASIDE: u64 = 10;

/// Added to the rank of a lot that is taken over by an item which dies before the milestone.
const REUSE: u64 = 180;
/// Added to the rank of a place for each lot whose offset it decides. Such places are the last resort.
const DECISION: u64 = 300;

/// An item born between the two milestones.
#[derive(Debug, Clone, Copy)]
struct Birth {
    clique: u32,
    item: u32,
    bytes: u64,
    /// The clique before which the item dies.
    dies_before: u32,
    /// Index into [`Leap::survivors`], if the item is still alive at the milestone.
    survivor: Option<usize>,
}

/// The search between two milestones.
pub(super) struct Leap<'c> {
    course: &'c HalfSearch<'c>,
    to: u32,
    births: Vec<Birth>,
    /// The bytes of each birth that is still alive at the next milestone, and whether this birth is still to be placed;
    /// the largest first.
    survivors: Vec<(u64, bool)>,
    /// Most places tried, and most layouts collected, per layout from which the leap starts.
    most: (u64, usize),
    /// Places that may still be tried.
    steps: u64,
    arrivals: Vec<Arrival>,
    /// The place of each birth so far.
    path: Vec<(u32, At)>,
    /// Hashes of the layouts seen between the milestones.
    known: HashSet<u64>,
    room: Vec<u64>,
}

impl<'c> Leap<'c> {
    /// A leap from the milestone `cliques.start` to the milestone `cliques.end`. Each unit of `effort` doubles the
    /// limits on places and layouts.
    pub fn new(course: &'c HalfSearch<'c>, cliques: Range<u32>, effort: u32) -> Self {
        let to = cliques.end;
        let born =
            (cliques.start + 1..=to).flat_map(|clique| course.born(clique).into_iter().map(move |i| (clique, i)));
        let birth = |(clique, item): (u32, u32)| {
            let seen = course.timeline.item(item);
            Birth { clique, item, bytes: seen.bytes, dies_before: seen.end, survivor: None }
        };
        let mut births: Vec<Birth> = born.map(birth).collect();
        let mut stay: Vec<usize> = (0..births.len()).filter(|&k| births[k].dies_before > to).collect();
        sort_by_key(&mut stay, |&k| Reverse(births[k].bytes));
        let survivors = stay.iter().map(|&k| (births[k].bytes, true)).collect();
        stay.iter().enumerate().for_each(|(rank, &k)| births[k].survivor = Some(rank));
        let most = (
            (1 + births.len() as u64) * (PLACES_PER_BIRTH << (course.number % 3 + u64::from(course.effort()))),
            ARRIVALS << course.effort(),
        );
        Self {
            course,
            to,
            births,
            survivors,
            most: (most.0 << effort, most.1 << effort),
            steps: 0,
            arrivals: Vec::new(),
            path: Vec::new(),
            known: HashSet::new(),
            room: Vec::new(),
        }
    }

    /// Returns the layouts of the next milestone that are reached from one layout of this milestone.
    pub fn from(&mut self, live: &[PlacedItem], lots: &Lots, budget: &mut Budget) -> Vec<Arrival> {
        let is_large = live.len().saturating_mul(self.births.len()) > SLABS;
        self.steps = if is_large || budget.is_late() { 0 } else { self.most.0 };
        self.known.clear();
        self.go(0, live.to_vec(), lots.clone(), budget);
        std::mem::take(&mut self.arrivals)
    }

    fn is_over(&self, budget: &Budget) -> bool {
        self.steps == 0 || self.arrivals.len() == self.most.1 || budget.left() == 0
    }

    /// Places the births from number `next` on.
    fn go(&mut self, next: usize, mut live: Vec<PlacedItem>, lots: Lots, budget: &mut Budget) {
        if self.is_over(budget) {
            return;
        }
        self.steps -= 1;
        budget.spend(4 + (live.len() + lots.len()) as u64 / 4);
        let Some(&birth) = self.births.get(next) else {
            live.retain(|slab| slab.dies_before > self.to);
            return self.arrive(live, lots);
        };
        if next == 0 || self.births[next - 1].clique < birth.clique {
            live.retain(|slab| slab.dies_before > birth.clique);
            let hash = live.iter().fold(next as u64, |hash, slab| hash ^ slab.key(slab.dies_before));
            if !self.known.insert(hash ^ lots.key(birth.clique, |leaves| leaves)) {
                return;
            }
        }
        let (course, waits) = (self.course, birth.survivor.is_some());
        let is_last = next + 1 == self.births.len();
        if let Some(rank) = birth.survivor {
            self.survivors[rank].1 = false;
        }
        let places = self.places(birth, &live, &lots);
        budget.spend(places.len() as u64 / 8);
        for place in places {
            budget.spend(2 + live.len() as u64 / 8);
            let known = self.path.len();
            let (mut grown, mut left) = (live.clone(), lots.clone());
            left.take(&place, birth.dies_before, &mut grown, &mut self.path);
            let at = match place.reused_lot {
                Some(lot) => At::Of(left.root(lot)),
                None => {
                    let slab =
                        PlacedItem { from: place.from, to: place.from + birth.bytes, dies_before: birth.dies_before };
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
                budget.spend(self.room.len() as u64 * self.survivors.len() as u64 / 64);
            }
            if has_room {
                self.go(next + 1, grown, left, budget);
            }
            self.path.truncate(known);
            // The search should vary the places of the largest items only. For other items, one place that led to a
            // layout is enough.
            let is_enough = self.arrivals.len() > arrived && !(waits && course.is_largest(birth.bytes));
            if has_room && self.is_over(budget) || is_enough {
                break;
            }
        }
        if let Some(rank) = birth.survivor {
            self.survivors[rank].1 = true;
        }
    }

    /// Returns the candidate places of a birth, those with the lowest rank first.
    fn places(&self, birth: Birth, live: &[PlacedItem], lots: &Lots) -> Vec<Candidate> {
        let (course, bytes) = (self.course, birth.bytes);
        let leaves = course.death_milestone(birth.dies_before);
        let mut places: Vec<Candidate> = Vec::new();
        let dead = lots.dead(birth.clique);
        let reused_lot = dead.iter().find(|lot| lot.1 == bytes).map(|lot| lot.0);
        if reused_lot.is_some() {
            let rank = if birth.survivor.is_some() { 0 } else { REUSE };
            places.push(Candidate { rank, reused_lot, ..Candidate::default() });
        }
        each_range(live, course.ceiling, |from, to, between| {
            let is_open = between.map(|slab| slab.is_some_and(|slab| slab.dies_before == UNDECIDED));
            let [below, above] = between.map(|slab| slab.map_or(UNDECIDED, |s| course.death_milestone(s.dies_before)));
            let (low, high) = (apart(below, leaves), apart(leaves, above));
            let mut visit = |from: u64, to: u64, decided: [Option<(usize, u64)>; 2]| {
                let opening = DECISION * decided.iter().flatten().count() as u64;
                let mut push = |rank, from| places.push(Candidate { rank, from, decided, ..Candidate::default() });
                if to - from == bytes {
                    push((low + high + opening).saturating_sub(RANGE + apart(below, above)), from);
                } else {
                    push(low + ASIDE + opening, from);
                    push(high + ASIDE + opening, to - bytes);
                }
            };
            match to - from < bytes {
                true => Lots::extensions(&dead, (from, to), is_open, bytes, visit),
                false => visit(from, to, [None; 2]),
            }
        });
        places.sort_unstable();
        places.dedup_by_key(|place| Candidate { rank: 0, ..*place });
        if birth.survivor.is_none() {
            places.truncate(PLACES.0);
        } else if bytes < course.largest / LARGE {
            places.truncate(PLACES.1);
        }
        places
    }

    /// True if the births that are still to be placed, and alive at the milestone, find room between the slabs that
    /// stay until then. Each of these births takes the tightest range. Ranges next to the undecided range form a common
    /// pool, which also has the bytes of the lots that are dead by then.
    fn has_room(&mut self, live: &[PlacedItem], lots: &Lots) -> bool {
        self.room.clear();
        let (mut floor, mut is_open) = (0, false);
        let mut open = 0;
        let top = PlacedItem { from: self.course.ceiling, to: self.course.ceiling, dies_before: 0 };
        for &slab in live.iter().filter(|slab| slab.dies_before > self.to).chain([&top]) {
            let opens = slab.dies_before == UNDECIDED;
            if is_open || opens {
                open += slab.from - floor;
            } else if slab.from > floor {
                self.room.push(slab.from - floor);
            }
            (floor, is_open) = (slab.to, opens);
        }
        open += lots.freed(self.to);
        self.survivors.iter().filter(|waiting| waiting.1).all(|&(bytes, _)| {
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

    fn arrive(&mut self, live: Vec<PlacedItem>, lots: Lots) {
        let course = self.course;
        let hash = live.iter().fold(0, |hash, slab| hash ^ slab.key(course.death_milestone(slab.dies_before)));
        let hash = hash ^ lots.key(self.to, |leaves| course.death_milestone(leaves));
        if !self.known.insert(hash) {
            return;
        }
        let mut disorder = 0;
        let mut floor = 0;
        let mut below = UNDECIDED;
        for slab in &live {
            let seen = course.death_milestone(slab.dies_before);
            if floor < slab.from {
                disorder += RANGE;
            }
            disorder += apart(below, seen);
            (below, floor) = (seen, slab.to);
        }
        disorder += apart(below, UNDECIDED);
        if floor < course.ceiling {
            disorder += RANGE;
        }
        self.arrivals.push(Arrival { live, places: self.path.clone(), lots, disorder, hash });
    }
}

impl PlacedItem {
    /// A hash of the slab's addresses and of `leaves`.
    fn key(self, leaves: u32) -> u64 {
        mix(self.from ^ (self.to - self.from).rotate_left(20), u64::from(leaves))
    }
}

/// Visits every free range below the ceiling, with its neighbours below and above (`None` at an edge of the arena).
/// Next to the undecided range, empty ranges are visited too, since lots can extend them.
fn each_range(live: &[PlacedItem], ceiling: u64, mut visit: impl FnMut(u64, u64, [Option<&PlacedItem>; 2])) {
    let mut below: Option<&PlacedItem> = None;
    for slab in live {
        let floor = below.map_or(0, |slab| slab.to);
        if floor < slab.from || [below, Some(slab)].into_iter().flatten().any(|slab| slab.dies_before == UNDECIDED) {
            visit(floor, slab.from, [below, Some(slab)]);
        }
        below = Some(slab);
    }
    let floor = below.map_or(0, |slab| slab.to);
    if floor < ceiling || below.is_some_and(|slab| slab.dies_before == UNDECIDED) {
        visit(floor, ceiling, [below, None]);
    }
}

/// Returns the disorder of two neighbours. `a` and `b` are the numbers of milestones before the deaths of the two.
/// Returns 0 if one of the neighbours is the undecided range.
fn apart(a: u32, b: u32) -> u64 {
    if a == UNDECIDED || b == UNDECIDED {
        return 0;
    }
    sixteenths_of_doublings(a.abs_diff(b).saturating_mul(4))
}

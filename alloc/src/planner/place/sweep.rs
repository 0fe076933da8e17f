//! One pass over time: an item that dies frees its range, and an item that is born takes a free range.
//!
//! A sweep starts before the first clique, or outwards from one clique whose items are stacked first. A [`Rule`]
//! decides which place an item takes, and in which order items that are born together are placed. The rules of
//! [`portfolio`](super::portfolio) are simple. The rule of [`backtrack`](super::backtrack) scores places, and its
//! sweeps undo steps after a failure.

use std::ops::Range;

use crate::planner::budget::Budget;
use crate::planner::decompose::timeline::Timeline;
use crate::planner::space::free_list::{FreeList, Place};

/// The point of time at which a sweep begins.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Start<'s> {
    /// Before the first clique.
    Edge,
    /// At this clique, whose items are stacked in this order from offset 0 up.
    Stack(u32, &'s [u32]),
}

/// Decides the places of a sweep.
pub(crate) trait Rule {
    /// Sorts items that are born together into the order in which they are placed. On entry, the longest-lived come
    /// first.
    fn order(&mut self, born: &mut [u32]);

    /// Returns the place of an item, or `None` to stop the sweep.
    fn choose(&mut self, i: u32, space: &FreeList, budget: &mut Budget) -> Option<Place>;
}

/// A step that can be undone.
#[derive(Debug, Clone, Copy)]
enum Event {
    Birth(u32),
    Death(u32),
}

/// A sweep in progress.
pub(crate) struct Sweep<'s> {
    timeline: &'s Timeline<'s>,
    pub space: FreeList<'s>,
    /// The cliques to pass.
    pub cliques: Range<u32>,
    /// The steps so far; `None` if they can't be undone.
    trail: Option<Vec<Event>>,
    born: Vec<u32>,
}

impl<'s> Sweep<'s> {
    /// Starts a sweep in an arena of `top` bytes. If the sweep starts from a stack, its items are placed at once.
    pub fn new(timeline: &'s Timeline<'s>, start: Start, top: u64, can_go_back: bool) -> Self {
        let mut space = FreeList::new(&timeline.items, top);
        let mut first = 0;
        if let Start::Stack(clique, stack) = start {
            first = clique + 1;
            let mut at = 0;
            for &i in stack {
                space.put(i, (0, at));
                at += timeline.item(i).bytes;
            }
        }
        let trail = can_go_back.then(Vec::new);
        Self { timeline, space, cliques: first..timeline.cliques, trail, born: Vec::new() }
    }

    /// Passes all cliques. Returns false if the rule stops the sweep or the budget is spent.
    pub fn run(&mut self, rule: &mut impl Rule, budget: &mut Budget) -> bool {
        self.cliques.clone().all(|clique| budget.left() > 0 && self.pass(clique, rule, budget))
    }

    /// Frees the items that die before a clique, and places the items that are born in this clique. Returns false if
    /// the rule stops the sweep.
    pub fn pass(&mut self, clique: u32, rule: &mut impl Rule, budget: &mut Budget) -> bool {
        for &i in self.timeline.dying(clique) {
            self.space.free(i);
            if let Some(trail) = &mut self.trail {
                trail.push(Event::Death(i));
            }
        }
        let mut born = std::mem::take(&mut self.born);
        born.clear();
        born.extend(self.timeline.born(clique));
        if born.len() > 1 {
            rule.order(&mut born);
        }
        let all = born.iter().all(|&i| {
            let place = rule.choose(i, &self.space, budget);
            if let Some(place) = place {
                self.space.put(i, place);
                if let Some(trail) = &mut self.trail {
                    trail.push(Event::Birth(i));
                }
            }
            place.is_some()
        });
        self.born = born;
        all
    }

    /// Number of steps so far.
    pub fn steps(&self) -> usize {
        self.trail.as_ref().map_or(0, Vec::len)
    }

    /// Undoes all steps after the first `steps`.
    pub fn take_back(&mut self, steps: usize) {
        let Some(trail) = &mut self.trail else { return };
        for step in trail.split_off(steps).into_iter().rev() {
            match step {
                Event::Birth(i) => self.space.free(i),
                Event::Death(i) => {
                    let (at, bytes) = (self.space.offsets[i as usize], self.timeline.item(i).bytes);
                    let place = self.space.at(at, bytes).expect("what an item left is free again");
                    self.space.put(i, place);
                }
            }
        }
    }
}

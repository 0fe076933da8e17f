//! One pass over time: an item that dies gives its range back, an item that is born takes a free one.
//!
//! A sweep starts before the first clique, or outwards from one clique whose items are stacked first. Which place is taken, and
//! who is served first of those born together, is up to a [`Rule`]: [`portfolio`](super::portfolio) has simple ones,
//! [`backtrack`](super::backtrack) one that scores places and takes back what led nowhere.

use std::ops::Range;

use crate::planner::budget::Budget;
use crate::planner::decompose::timeline::Timeline;
use crate::planner::space::free_list::{FreeList, Place};

/// Where a sweep begins.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Start<'s> {
    /// Before the first clique.
    Edge,
    /// In this clique, whose items lie on each other in this order, from 0 up.
    Stack(u32, &'s [u32]),
}

/// How a sweep decides.
pub(crate) trait Rule {
    /// Puts those born together, the longest-lived first, into the order of service.
    fn order(&mut self, born: &mut [u32]);

    /// The place of an item; `None` where the sweep should not go on.
    fn choose(&mut self, i: u32, space: &FreeList, budget: &mut Budget) -> Option<Place>;
}

/// What can be taken back.
#[derive(Debug, Clone, Copy)]
enum Step {
    Birth(u32),
    Death(u32),
}

/// A sweep under way.
pub(crate) struct Sweep<'s> {
    timeline: &'s Timeline<'s>,
    pub space: FreeList<'s>,
    /// The cliques to pass.
    pub cliques: Range<u32>,
    /// What was done, if it may be taken back.
    trail: Option<Vec<Step>>,
    born: Vec<u32>,
}

impl<'s> Sweep<'s> {
    /// In an arena of so many bytes. A stack that begins the sweep is in its place already.
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

    /// Passes all cliques; false where the rule stops it, or the budget is spent.
    pub fn run(&mut self, rule: &mut impl Rule, budget: &mut Budget) -> bool {
        self.cliques.clone().all(|clique| budget.left() > 0 && self.pass(clique, rule, budget))
    }

    /// Deaths before a clique and births in it; whether all found places.
    pub fn pass(&mut self, clique: u32, rule: &mut impl Rule, budget: &mut Budget) -> bool {
        for &i in self.timeline.dead(clique) {
            self.space.free(i);
            if let Some(trail) = &mut self.trail {
                trail.push(Step::Death(i));
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
                    trail.push(Step::Birth(i));
                }
            }
            place.is_some()
        });
        self.born = born;
        all
    }

    /// Steps made so far.
    pub fn steps(&self) -> usize {
        self.trail.as_ref().map_or(0, Vec::len)
    }

    /// Takes back all steps but the first so many.
    pub fn take_back(&mut self, steps: usize) {
        let Some(trail) = &mut self.trail else { return };
        for step in trail.split_off(steps).into_iter().rev() {
            match step {
                Step::Birth(i) => self.space.free(i),
                Step::Death(i) => {
                    let (at, bytes) = (self.space.offsets[i as usize], self.timeline.item(i).bytes);
                    let place = self.space.at(at, bytes).expect("what an item left is free again");
                    self.space.put(i, place);
                }
            }
        }
    }
}

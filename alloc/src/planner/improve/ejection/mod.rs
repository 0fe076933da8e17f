//! Guided ejection search (Nagata and Bräysy, 2009, for vehicle routing): repairs a plan that ends above a ceiling.
//!
//! Items that end above the ceiling leave the plan and wait in a pool. Each step takes one item out of the pool and
//! puts it at the cheapest place below the ceiling: a free place if there is one, otherwise on top of the items with
//! the lowest total price. Those items are ejected: they go to the pool and are placed next.
//!
//! The price of an item is the item's weight times the number of times that the item had to eject others. So two items
//! cannot eject each other for ever. Larger and longer-lived items weigh more, since they are harder to place again.
//! The weight of the pool measures progress. After many steps without a lighter pool, the search goes back to the state
//! with the lightest pool, but keeps the current prices.

mod obstacles;

use std::cmp::Reverse;

use obstacles::Obstacles;

use super::descent::{Descent, Reached};
use crate::order::sort_by_key;
use crate::planner::budget::Budget;
use crate::planner::decompose::parts::{Item, Part, Placement};
use crate::planner::mix::mix;
use crate::planner::space::by_time::ByTime;
use crate::planner::space::lowest_gap;

/// Steps without a lighter pool after which the search goes back to the state with the lightest pool.
const PATIENCE: u32 = 300;

/// Price of an item that cannot be moved. It exceeds the prices of all other items together.
const FIXED: u64 = 1 << 60;

/// The heaviest weight. Multiplied by the most failures and by the number of neighbours of an item, it stays below
/// [`FIXED`].
const HEAVIEST: f64 = 1_000_000.0;

/// Failures beyond this number no longer raise a price.
const MAX_FAILURES: u64 = 1 << 16;

/// Steps between two checks of the deadline.
const STEPS_PER_LOOK: u64 = 256;

/// A large part's plan may be completed with 1/`COMPLETION` of the call's work, and with [`COMPLETION_PER_ITEM`] per item,
/// even if the work is spent.
const COMPLETION: u64 = 8;
const COMPLETION_PER_ITEM: u64 = 16;

/// Work of a step, in addition to the rectangles that it looks at.
const WORK_PER_STEP: u64 = 8;

/// A plan that is lowered step by step.
pub(crate) struct Ejection<'p> {
    part: &'p Part,
    /// The lowest plan so far.
    pub plan: Placement,
    descent: Descent,
    ceiling: u64,
    places: Vec<Option<u64>>,
    index: ByTime,
    /// Items without a place.
    pool: Vec<u32>,
    /// Weight of the pool.
    mass: u64,
    weight: Vec<u64>,
    /// Weight × number of failures, counted from 1; [`FIXED`] for pinned items.
    price: Vec<u64>,
    lightest: Lightest,
    /// Items whose place may differ from their place in the lightest state.
    moved: Vec<u32>,
    steps: u64,
    since_lightest: u32,
    /// Items that the current step ejects.
    ejected: Vec<u32>,
    obstacles: Obstacles,
}

/// The lightest pool so far, with the places of the other items.
#[derive(Debug)]
struct Lightest {
    mass: u64,
    pool: Vec<u32>,
    places: Vec<Option<u64>>,
}

impl<'p> Ejection<'p> {
    /// Starts with the items at `places`. Items without a place get the lowest free one, the longest-lived item first.
    /// Returns `None` if the address space is too small for that, or if a large part has too many such items.
    pub fn new(part: &'p Part, places: &[Option<u64>], goal: u64, budget: &mut Budget) -> Option<Self> {
        let items = &part.items;
        let area = |item: &Item| item.bytes as f64 * f64::from(item.cliques());
        let most = items.iter().map(area).fold(1.0, f64::max);
        // With the square root of the area as weight, a large item can be ejected for a few small ones.
        let weigh = |item: &Item| 1 + (HEAVIEST * (area(item) / most).sqrt()) as u64;
        let weight: Vec<u64> = items.iter().map(weigh).collect();
        let mut price = weight.clone();
        part.pins.iter().for_each(|pin| price[pin.0 as usize] = FIXED);
        let (index, work) = ByTime::of(part, places);
        budget.spend(work);
        let missing = (0..items.len() as u32).filter(|&i| places[i as usize].is_none()).collect();
        let mut ejection = Self {
            part,
            plan: Placement { height: u64::MAX, offsets: Vec::new() },
            descent: Descent::new(goal, part.grain, items.len()),
            ceiling: u64::MAX,
            places: places.to_vec(),
            index,
            pool: missing,
            mass: 0,
            weight,
            price,
            lightest: Lightest { mass: 0, pool: Vec::new(), places: Vec::new() },
            moved: Vec::new(),
            steps: 0,
            since_lightest: 0,
            ejected: Vec::new(),
            obstacles: Obstacles::default(),
        };
        ejection.fill_up(budget);
        let offsets: Option<Vec<u64>> = ejection.places.iter().copied().collect();
        ejection.plan = part.placement(offsets?);
        ejection.lightest.places.clone_from(&ejection.places);
        ejection.moved.clear();
        Some(ejection)
    }

    /// Lowers the plan towards the goal until the budget is spent. A further call continues where this one ended.
    pub fn descend(&mut self, budget: &mut Budget) {
        let mut descent = self.descent;
        descent.run(self.plan.height, budget, |ceiling, budget| {
            self.lower(ceiling, budget);
            Reached { height: self.plan.height, proven: 0 }
        });
        self.descent = descent;
    }

    /// Searches for a plan of at most `ceiling` bytes until the budget is spent. Returns true if the lowest plan so far
    /// is that low. Items that found no place below the ceiling are put above the others, which may still give a lower
    /// plan than before.
    pub fn lower(&mut self, ceiling: u64, budget: &mut Budget) -> bool {
        let is_too_large = |(price, item): (&u64, &Item)| item.bytes > ceiling && *price < FIXED;
        if self.price.iter().zip(&self.part.items).any(is_too_large) {
            budget.spend(1);
            return false;
        }
        self.aim(ceiling, budget);
        while !self.pool.is_empty() && budget.left() > 0 {
            if !self.step(budget) || (self.steps.is_multiple_of(STEPS_PER_LOOK) && budget.is_late()) {
                break;
            }
            if self.mass < self.lightest.mass {
                self.note();
            } else if self.since_lightest > PATIENCE {
                self.take_up(budget);
            }
        }
        self.finish(budget);
        self.plan.height <= ceiling
    }

    /// Sends items that end above a ceiling to the pool.
    fn aim(&mut self, ceiling: u64, budget: &mut Budget) {
        self.ceiling = ceiling;
        for (i, item) in (0..).zip(&self.part.items) {
            let ends_above = self.places[i as usize].is_some_and(|at| at + item.bytes > ceiling);
            if ends_above && self.price[i as usize] < FIXED {
                self.take_away(i, budget);
            }
        }
        self.lightest.mass = u64::MAX;
        self.note();
    }

    /// Places one item of the pool: the one ejected last, or a random item right after the pool got lighter. Returns
    /// false if pins leave the item no place.
    fn step(&mut self, budget: &mut Budget) -> bool {
        self.steps += 1;
        let last = self.pool.len() - 1;
        let chosen = if self.since_lightest == 0 { mix(self.steps, 0) as usize % self.pool.len() } else { last };
        self.since_lightest += 1;
        let i = self.pool[chosen];
        let item = self.part.items[i as usize];
        let (looked, met) = self.meet(item);
        // Thousands of ranges take more time for each, since they leave the processor's cache.
        let ranges = self.obstacles.ranges.len() as u64;
        let per_range = u64::from((ranges + 1).ilog2()).saturating_sub(10).max(2);
        budget.spend(WORK_PER_STEP + (looked + 2 * met) / 8 + per_range * ranges);
        let random = mix(self.steps, u64::MAX);
        let Some(choice) = self.obstacles.cheapest(item.bytes, item.alignment, self.ceiling, random) else {
            return false;
        };
        self.pool.swap_remove(chosen);
        self.mass -= self.weight[i as usize];
        if choice.price > 0 {
            let (price, weight) = (&mut self.price[i as usize], self.weight[i as usize]);
            *price = (*price + weight).min(weight * MAX_FAILURES);
            let (from, to) = (choice.at, choice.at + item.bytes);
            let mut ejected = std::mem::take(&mut self.ejected);
            self.index.beside(item, |other| {
                if other.from < to && from < other.to {
                    ejected.push(other.item);
                }
            });
            ejected.drain(..).for_each(|other| self.take_away(other, budget));
            self.ejected = ejected;
        }
        self.put(i, choice.at, budget);
        true
    }

    /// Collects the ranges of the items that share a clique with `item`. Returns the number of items looked at, and the
    /// number of those that share a clique.
    fn meet(&mut self, item: Item) -> (u64, u64) {
        let Self { part, places, index, obstacles, price, .. } = self;
        obstacles.refresh(&part.items, places);
        let mut met = 0;
        let looked = index.beside(item, |other| {
            met += 1;
            obstacles.add(other, price[other.item as usize]);
        });
        obstacles.sort();
        (looked, met)
    }

    fn put(&mut self, i: u32, at: u64, budget: &mut Budget) {
        self.change(i, Some(at), budget);
        self.moved.push(i);
    }

    /// Sends an item to the pool.
    fn take_away(&mut self, i: u32, budget: &mut Budget) {
        if let Some(at) = self.places[i as usize].take() {
            budget.spend(self.index.remove(i, self.part.items[i as usize], at));
            self.moved.push(i);
            self.pool.push(i);
            self.mass += self.weight[i as usize];
        }
    }

    /// Records the current state as the lightest.
    fn note(&mut self) {
        self.since_lightest = 0;
        self.lightest.mass = self.mass;
        self.lightest.pool.clone_from(&self.pool);
        for i in self.moved.drain(..) {
            self.lightest.places[i as usize] = self.places[i as usize];
        }
    }

    /// Goes back to the lightest state; the prices stay.
    fn take_up(&mut self, budget: &mut Budget) {
        self.since_lightest = 0;
        for i in std::mem::take(&mut self.moved) {
            self.change(i, self.lightest.places[i as usize], budget);
        }
        self.mass = self.lightest.mass;
        self.pool.clone_from(&self.lightest.pool);
    }

    /// Moves an item without sending it to the pool.
    fn change(&mut self, i: u32, place: Option<u64>, budget: &mut Budget) {
        if self.places[i as usize] == place {
            return;
        }
        let item = self.part.items[i as usize];
        if let Some(at) = self.places[i as usize] {
            budget.spend(self.index.remove(i, item, at));
        }
        if let Some(at) = place {
            budget.spend(self.index.insert(i, item, at));
            self.obstacles.put(i, at, at + item.bytes);
        }
        self.places[i as usize] = place;
    }

    /// Completes the lightest state to a plan, and continues from this plan or the one before, whichever is lower.
    fn finish(&mut self, budget: &mut Budget) {
        if !self.pool.is_empty() {
            self.take_up(budget);
            self.fill_up(budget);
        }
        if let Some(offsets) = self.places.iter().copied().collect::<Option<Vec<u64>>>() {
            let plan = self.part.placement(offsets);
            if plan.height < self.plan.height {
                self.plan = plan;
            }
        }
        for i in 0..self.part.items.len() {
            self.change(i as u32, Some(self.plan.offsets[i]), budget);
            self.lightest.places[i] = Some(self.plan.offsets[i]);
        }
        self.pool.clear();
        self.moved.clear();
        self.mass = 0;
    }

    /// Places the items of the pool at the lowest free offsets, the longest-lived first. In a large part, items may be
    /// left without a place, since looking at thousands of others for each of them would take most of the planning time.
    fn fill_up(&mut self, budget: &mut Budget) {
        let mut missing = std::mem::take(&mut self.pool);
        let items = &self.part.items;
        let most = match self.part.is_large() {
            true => (budget.work / COMPLETION).saturating_add(COMPLETION_PER_ITEM * items.len() as u64),
            false => u64::MAX,
        };
        sort_by_key(&mut missing, |&i| (Reverse((items[i as usize].cliques(), items[i as usize].bytes)), i));
        let mut sorted = 0;
        for i in missing {
            if sorted > most {
                return;
            }
            let item = items[i as usize];
            let (looked, _) = self.meet(item);
            budget.spend(looked / 4);
            // If there are many items, sorting them takes most of the time.
            sorted += looked / 4 * (1 + looked / 1024);
            let taken = self.obstacles.ranges.iter().map(|&(from, to, _)| (from, to));
            // An item finds no place only if it would leave the address space.
            if let Some(at) = lowest_gap(taken, item.bytes, item.alignment) {
                self.put(i, at, budget);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use gapless_testing::prelude::*;

    use super::*;
    use crate::check;
    use crate::planner::decompose::parts::Whole;
    use crate::planner::tests::is_plan;
    use crate::synthetic::{Order, SyntheticStep};

    fn items(rows: &[(u32, u32, u64, bool)]) -> Part {
        let item = |&(start, cliques, bytes, even): &(u32, u32, u64, bool)| Item {
            start,
            end: (start + cliques).min(12),
            bytes,
            alignment: if even { 2 } else { 1 },
        };
        let mut items: Vec<Item> = rows.iter().map(item).collect();
        sort_by_key(&mut items, |item| (item.start, Reverse(item.end)));
        Part::from_items(items, 12)
    }

    generated! {
        /// Starts without places and lowers the ceiling several times. The result is always a plan, and never a higher
        /// plan than before.
        #[test]
        fn plans_remain_plans(
            rows in prop::collection::vec((0..12u32, 1..12u32, 1..9u64, any::<bool>()), 1..30),
            ceilings in prop::collection::vec(0..40u64, 1..6),
        ) {
            let part = items(&rows);
            let mut ejection = start(&part, &vec![None; part.items.len()]);
            prop_assert!(is_plan(&part, &ejection.plan), "{:?} {:?}", part.items, ejection.plan);
            for above in ceilings {
                let (ceiling, before) = (part.bound + above, ejection.plan.height);
                let reached = ejection.lower(ceiling, &mut Budget { work: 20_000, ..Budget::default() });
                prop_assert_eq!(reached, ejection.plan.height <= ceiling);
                prop_assert!(ejection.plan.height <= before);
                prop_assert!(is_plan(&part, &ejection.plan), "{:?} {:?}", part.items, ejection.plan);
            }
        }
    }

    fn start<'p>(part: &'p Part, places: &[Option<u64>]) -> Ejection<'p> {
        Ejection::new(part, places, part.bound, &mut Budget::default()).unwrap()
    }

    /// Hundreds of items are alive with each item.
    #[test]
    fn only_small_parts_are_completed_without_limit() {
        let dense = |count: u32| {
            let item = |k: u32| Item { start: k, end: (k + 500).min(count), bytes: 1 + u64::from(k % 7), alignment: 1 };
            Part::from_items((0..count).map(item).collect(), count)
        };
        let is_completed = |part: &Part| {
            let budget = &mut Budget { work: 1_000_000, ..Budget::default() };
            Ejection::new(part, &vec![None; part.items.len()], part.bound, budget).is_some()
        };
        assert!(is_completed(&dense(600)));
        assert!(!is_completed(&dense(81_000)));
    }

    /// In the initial plan, two long items lie apart from each other, so that a third item ends above the bound.
    #[test]
    fn blocking_items_are_ejected() {
        let part = items(&[(0, 6, 4, false), (2, 4, 4, false), (4, 8, 8, false)]);
        let places = [Some(0), Some(8), Some(12)];
        let mut ejection = start(&part, &places);
        assert_eq!((ejection.plan.height, part.bound), (20, 16));
        assert!(ejection.lower(part.bound, &mut Budget { work: 50_000, ..Budget::default() }));
        assert!(is_plan(&part, &ejection.plan));
    }

    #[test]
    fn pins_stay() {
        let mut part = items(&[(0, 6, 4, false), (0, 6, 4, false), (0, 6, 4, false)]);
        part.pins = vec![(1, 4)];
        let mut ejection = start(&part, &[Some(8), Some(4), Some(12)]);
        let budget = Budget { work: 50_000, ..Budget::default() };
        assert!(ejection.lower(12, &mut budget.clone()));
        assert_eq!((ejection.plan.offsets[1], ejection.plan.height), (4, 12));
        // The other items fit neither below nor above the pin.
        assert!(!ejection.lower(11, &mut budget.clone()));
        assert_eq!(ejection.plan.height, 12);
    }

    /// Starts with all items on top of each other. The result is always a plan. More work never gives a higher plan,
    /// and the search exceeds its work by at most one step.
    #[test]
    fn a_tower_comes_down() {
        let step = SyntheticStep {
            order: Order::Interleaved,
            layers: 2,
            micro_batches: 5,
            tokens: &[512, 768],
            ..SyntheticStep::default()
        };
        let problem = step.problem().unwrap();
        let whole = Whole::new(&problem, true);
        let [part] = whole.parts.as_slice() else { panic!("one part") };
        let mut top = 0;
        let tower: Vec<Option<u64>> = part
            .items
            .iter()
            .map(|item| {
                top += item.bytes;
                Some(top - item.bytes)
            })
            .collect();
        let heights = [0, 500_000, 20_000_000].map(|work| {
            let mut budget = Budget { work, ..Budget::default() };
            let mut ejection = start(part, &tower);
            ejection.descend(&mut budget);
            let mut offsets = vec![0; problem.len()];
            part.sources.iter().zip(&ejection.plan.offsets).for_each(|(&i, &at)| offsets[i as usize] = at);
            check(&problem, &offsets, Some(ejection.plan.height)).unwrap();
            assert!(budget.spent <= work + 200_000, "{} spent of {work}", budget.spent);
            ejection.plan.height
        });
        assert_eq!(heights[0], top);
        assert!(heights[2] <= heights[1] && heights[1] < top, "{heights:?}");
        assert!(heights[2] < part.bound + part.bound / 10, "{heights:?}, bound {}", part.bound);
    }
}

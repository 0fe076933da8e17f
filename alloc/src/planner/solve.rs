//! The steps that are tried on a part, their order and their shares of the work.

use super::budget::Budget;
use super::decompose::parts::{Part, Placement};
use super::decompose::regions::regions;
use super::decompose::timeline::Timeline;
use super::improve::ejection::Ejection;
use super::place::strips::strips;
use super::prove::exact::{Exact, Verdict, search};
use crate::order::sort_by_key;

/// The heights at which the plan of a part aims.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Goal {
    /// The bound of the whole problem. A plan of this part below that height would not lower the plan of the whole
    /// problem.
    pub ceiling: u64,
    /// The height that suffices. Searches don't try to get lower.
    pub enough: u64,
}

impl Goal {
    /// The goal of reaching exactly this height.
    pub fn exactly(height: u64) -> Self {
        Self { ceiling: height, enough: height }
    }
}

/// A part, with the best plan and the best bound so far.
pub(crate) struct Solver<'p> {
    pub part: &'p Part,
    pub goal: Goal,
    pub forward: Timeline<'p>,
    pub backward: Timeline<'p>,
    pub best: Option<Placement>,
    /// Proven lower bound: no plan is lower than this.
    pub proven: u64,
    /// Number of placements that were tried, including placements of one half of time.
    pub placements: u64,
    /// Plans that are being repaired, the lowest first.
    repairs: Vec<Ejection<'p>>,
    /// The search for a plan of the goal's height, which each further share of the work resumes.
    goal_search: Option<Exact<'p>>,
}

/// A step that may lower the plan.
#[derive(Debug, Clone, Copy)]
enum Method {
    /// Sweeps with simple policies.
    Sweeps,
    /// Sweeps with the long-lived items first.
    LongFirst,
    /// Sweeps that learn from those before.
    Learning,
    /// Sweeps with backtracking.
    Backtracking,
    /// Sweeps from open stacks.
    OpenStacks,
    /// Repairs by guided ejection.
    Repair,
    /// A region of the arena for each size, followed by repairs.
    Regions,
    /// Strips of items of equal size, whose plan is then repaired.
    Strips,
    /// The exact search.
    Search,
}

/// The steps after plain sweeps. The first steps settle most parts; the later ones repeat them with more work. Each
/// number is a divisor: with 64, the step may spend a 64th of the remaining work.
const METHODS: [(u64, Method); 12] = [
    (64, Method::Repair),
    (22, Method::Backtracking),
    (32, Method::Learning),
    (8, Method::Regions),
    (16, Method::LongFirst),
    (8, Method::Strips),
    (8, Method::Repair),
    (8, Method::Backtracking),
    (8, Method::Learning),
    (4, Method::Repair),
    (4, Method::Backtracking),
    (1, Method::Repair),
];

/// The steps for a large part, in passes. Few long repairs find more here than many short ones, whose work does not
/// suffice for so many items.
const LARGE_PASSES: [&[(u64, Method)]; 2] = [
    &[
        (22, Method::Backtracking),
        (48, Method::Repair),
        (32, Method::Learning),
        (8, Method::Regions),
        (16, Method::LongFirst),
        (8, Method::Strips),
    ],
    &[(3, Method::Repair), (4, Method::Backtracking)],
];

/// The first steps for a small part.
const SMALL_STEPS: [(u64, Method); 3] = [(16, Method::LongFirst), (2, Method::OpenStacks), (8, Method::Search)];

/// The steps for a region that is planned alone.
const REGION_STEPS: [(u64, Method); 5] =
    [(1, Method::Sweeps), (2, Method::Search), (2, Method::Backtracking), (3, Method::LongFirst), (1, Method::Repair)];

/// Number of plans that are kept for repairs.
const REPAIRS: usize = 3;

/// Most items in all plans but the first that are kept for repairs. Each takes some 250 bytes of memory.
const MAX_REPAIRED: usize = 500_000;

/// Work per item without which a repair does not start: its index of the items alone costs about as much.
const WORK_PER_REPAIRED: u64 = 16;

/// Most heights between the goal and the best plan that sweeps with backtracking try.
const HEIGHTS: u32 = 6;

/// A part is small if it has at most this many items and cells (one item in one clique each). A search visits every
/// item at every step, so it is cheap for small parts only.
const SMALL: (usize, u64) = (3_000, 500_000);

/// For a small part, the steps after the first search get 1/`SMALL_SHARE` of the work. The rest is for further
/// searches.
const SMALL_SHARE: u64 = 8;

/// Work per item for one height in the first round of searches.
const WORK_PER_HEIGHT: u64 = 120_000;
/// The percentage of a height's work that the search gets; the repair gets the rest.
const SEARCH_PERCENT: u64 = 70;

/// The range of heights still to try is small if it is less than 1/`LITTLE_LEFT` of the whole range.
const LITTLE_LEFT: u64 = 4;

/// The result for a part.
#[derive(Debug)]
pub(crate) struct Outcome {
    /// The lowest plan; `None` if no plan within the address space was found.
    pub best: Option<Placement>,
    /// Proven lower bound: no plan is lower than this.
    pub proven: u64,
    pub placements: u64,
}

/// Plans every part and returns the outcomes in the order of the parts. First, each part gets a plan. Then the parts
/// that miss their goals share the work equally. A bound that is proven for one part raises the height that suffices
/// for the others.
///
/// `aim` and `enough` are heights of the whole problem. A plan below `aim` gains nothing, and searches don't try to get
/// below `enough`.
pub(crate) fn solve_parts(parts: &[Part], aim: u64, mut enough: u64, budget: &mut Budget) -> Vec<Outcome> {
    // Heights are multiples of the grain. If a ceiling lay between two multiples, a place right below it would not be
    // aligned.
    let goal = |part: &Part, enough: u64| {
        let down = |height: u64| height.saturating_sub(part.base) / part.grain * part.grain;
        Goal { ceiling: down(aim), enough: down(enough) }
    };
    let mut solvers: Vec<Solver> = parts.iter().map(|part| Solver::new(part, goal(part, enough))).collect();
    solvers.iter_mut().for_each(|solver| solver.sweep_once(budget));
    let mut open = solvers.iter().filter(|solver| !solver.is_met()).count() as u64;
    let mut outcomes = Vec::with_capacity(parts.len());
    for mut solver in solvers {
        solver.goal = goal(solver.part, enough);
        if !solver.is_met() {
            budget.within(budget.left() / open.max(1), |budget| solver.improve(budget));
            open = open.saturating_sub(1);
        }
        enough = enough.max(solver.part.base.saturating_add(solver.proven));
        outcomes.push(Outcome { best: solver.best, proven: solver.proven, placements: solver.placements });
    }
    outcomes
}

impl<'p> Solver<'p> {
    pub fn new(part: &'p Part, goal: Goal) -> Self {
        let (forward, backward) = (Timeline::forward(part), Timeline::backward(part));
        let (best, repairs, goal_search) = (None, Vec::new(), None);
        Self { part, goal, forward, backward, best, proven: part.bound, placements: 0, repairs, goal_search }
    }

    /// Keeps a plan if it is lower than the best so far.
    pub fn keep_if_lower(&mut self, plan: Option<Placement>) {
        if let Some(plan) = plan.filter(|plan| plan.height < self.height()) {
            self.best = Some(plan);
        }
    }

    /// Height of the lowest plan so far.
    fn height(&self) -> u64 {
        self.best.as_ref().map_or(u64::MAX, |best| best.height)
    }

    /// True if the lowest plan reaches the goal, or is proven lowest.
    pub fn is_met(&self) -> bool {
        self.best.as_ref().is_some_and(|best| best.height <= self.goal.enough.max(self.proven))
    }

    /// Runs steps until the goal is met or the budget is spent.
    fn run(&mut self, steps: &[(u64, Method)], budget: &mut Budget) {
        for &(share, step) in steps {
            if self.is_met() || budget.stopped().is_some() {
                return;
            }
            budget.within(budget.left() / share, |budget| self.make(step, budget));
        }
    }

    /// Runs the passes for a large part until one of them does not lower the plan. The last step is one more repair,
    /// since the repair of that pass may have had too little work.
    fn run_passes(&mut self, budget: &mut Budget) {
        for steps in LARGE_PASSES {
            let before = self.height();
            self.run(steps, budget);
            if self.height() == before {
                break;
            }
        }
        self.run(&[(3, Method::Repair)], budget);
    }

    fn make(&mut self, step: Method, budget: &mut Budget) {
        match step {
            Method::Sweeps => self.sweep_once(budget),
            Method::LongFirst => self.sweep_long_first(budget),
            Method::Learning => self.sweep_and_learn(budget),
            Method::Backtracking => self.backtrack_down(budget),
            Method::OpenStacks => self.open_stacks(budget),
            Method::Repair => self.repair(budget),
            Method::Regions => self.plan_regions(budget),
            Method::Strips => self.plan_strips(budget),
            Method::Search => self.search_goal(budget),
        }
    }

    /// Runs the steps after plain sweeps, the cheapest first, until the goal is met or the budget is spent.
    fn improve(&mut self, budget: &mut Budget) {
        if self.part.is_large() {
            return self.run_passes(budget);
        }
        if !self.is_small() {
            return self.run(&METHODS, budget);
        }
        self.run(&SMALL_STEPS, budget);
        // A small part keeps most of its work for searches.
        if self.proven <= self.goal.ceiling {
            budget.within(budget.left() / SMALL_SHARE, |budget| self.run(&METHODS, budget));
        }
        self.close_in(budget);
    }

    fn is_small(&self) -> bool {
        let items = &self.part.items;
        items.len() <= SMALL.0 && items.iter().map(|item| u64::from(item.cliques())).sum::<u64>() <= SMALL.1
    }

    /// Searches for a plan of the goal's height, or for a proof that there is none. Continues the search of the call
    /// before, unless the goal has changed.
    fn search_goal(&mut self, budget: &mut Budget) {
        if !self.is_small() || self.is_met() {
            return;
        }
        let goal = self.goal.enough.max(self.proven);
        if !self.part.forbidden.is_empty() {
            return self.search(goal, budget);
        }
        let earlier = self.goal_search.take().filter(|exact| exact.capacity == goal);
        let Some(mut exact) = earlier.or_else(|| Exact::new(self.part, goal, *budget)) else {
            return self.learn(Verdict::Impossible, goal);
        };
        self.learn(exact.run(budget), goal);
        self.goal_search = Some(exact);
    }

    /// Searches for a plan of at most `capacity` bytes.
    fn search(&mut self, capacity: u64, budget: &mut Budget) {
        self.learn(search(self.part, capacity, budget), capacity);
    }

    fn learn(&mut self, verdict: Verdict, capacity: u64) {
        match verdict {
            Verdict::Found(offsets) => self.keep_if_lower(Some(self.part.placement(offsets))),
            Verdict::Impossible => {
                let next = capacity.saturating_add(1).checked_next_multiple_of(self.part.grain);
                self.proven = self.proven.max(next.unwrap_or(u64::MAX));
            }
            Verdict::Unknown => {}
        }
    }

    /// Searches in rounds, each with twice the work per height of the one before. A round bisects the range between the
    /// proven bound and the best height, with a search and a repair at each height. If both fail, the bisection goes on
    /// in the part of the range above that height. At the end of a round, the search at the goal is resumed. If one
    /// or two heights would take all of the work, that search is resumed first, and each height gets less. With less
    /// work than that, one long search at the first height finds most.
    fn close_in(&mut self, budget: &mut Budget) {
        let Some(best) = &self.best else { return };
        let lowest = self.repairs.drain(..).next();
        let mut repair = lowest.or_else(|| self.start_repair(&best.offsets, budget));
        let grain = self.part.grain;
        let mut work = WORK_PER_HEIGHT * self.part.items.len() as u64;
        if (work / 2..2 * work).contains(&budget.left()) {
            budget.within(budget.left() / 4, |budget| self.search_goal(budget));
            work = budget.left() / 8;
        }
        while !self.is_met() && budget.stopped().is_none() {
            let (mut missed, before) = (0, budget.spent);
            while !self.is_met() && budget.stopped().is_none() {
                let goal = self.goal.enough.max(self.proven);
                let lowest = goal.max(missed);
                let range = self.height().saturating_sub(lowest);
                if range == 0 || range < (self.height() - goal) / LITTLE_LEFT {
                    break;
                }
                let ceiling = (lowest + range / 2) / grain * grain;
                let ceiling = ceiling.max(goal);
                budget.within(work / 100 * SEARCH_PERCENT, |budget| self.search(ceiling, budget));
                if let Some(repair) = repair.as_mut().filter(|_| self.height() > ceiling && self.proven <= ceiling) {
                    let share = work / 100 * (100 - SEARCH_PERCENT);
                    budget.within(share, |budget| repair.lower(ceiling, budget));
                    self.keep_if_lower(Some(repair.plan.clone()));
                }
                if self.height() > ceiling {
                    missed = ceiling.saturating_add(grain);
                }
            }
            work = work.saturating_mul(2);
            budget.within(work, |budget| self.search_goal(budget));
            // What is left is too little for any search.
            if budget.spent == before {
                return;
            }
        }
    }

    /// Sweeps with backtracking. The first ceiling is the goal itself. Each further ceiling lies halfway between the
    /// highest ceiling missed so far and the best plan. After the last ceiling, the rest of the budget goes to the
    /// goal. If the first two further ceilings are both missed, the rest of the budget is left to other steps.
    fn backtrack_down(&mut self, budget: &mut Budget) {
        let grain = self.part.grain;
        let (mut lowest, mut is_any_met) = (self.goal.enough, false);
        if budget.within(budget.left() / 3, |budget| self.backtrack(lowest, budget)) {
            return;
        }
        for tried in 1..=HEIGHTS {
            let step = self.height().saturating_sub(lowest) / 2;
            if step < grain || budget.stopped().is_some() {
                break;
            }
            let ceiling = lowest + step - step % grain;
            if budget.within(budget.left() / 8, |budget| self.backtrack(ceiling, budget)) {
                is_any_met = true;
            } else {
                lowest = ceiling;
            }
            if tried == 2 && !is_any_met {
                return;
            }
        }
        self.backtrack(self.goal.enough, budget);
    }

    /// Starts to repair a plan. Returns `None` if the budget is too small for that in a large part.
    fn start_repair(&self, offsets: &[u64], budget: &mut Budget) -> Option<Ejection<'p>> {
        if self.part.is_large() && budget.left() < WORK_PER_REPAIRED * self.part.items.len() as u64 {
            return None;
        }
        let places: Vec<Option<u64>> = offsets.iter().copied().map(Some).collect();
        Ejection::new(self.part, &places, self.goal.enough, budget)
    }

    /// Adds a plan to those that are repaired. The highest plans are dropped if there are too many.
    fn keep_repair(&mut self, repair: Option<Ejection<'p>>) {
        self.repairs.extend(repair);
        sort_by_key(&mut self.repairs, |repair| repair.plan.height);
        self.repairs.truncate(REPAIRS.min(1 + MAX_REPAIRED / self.part.items.len().max(1)));
    }

    /// Repairs the lowest plans. Half of the budget goes to the lowest plan, half of the rest to the next, and so on.
    fn repair(&mut self, budget: &mut Budget) {
        if self.repairs.iter().all(|repair| repair.plan.height > self.height()) {
            let best = self.best.as_ref().and_then(|best| self.start_repair(&best.offsets, budget));
            self.keep_repair(best);
        }
        self.keep_repair(None);
        let mut repairs = std::mem::take(&mut self.repairs);
        let count = repairs.len();
        for (done, repair) in repairs.iter_mut().enumerate() {
            let share = if done + 1 == count { budget.left() } else { budget.left() / 2 };
            budget.within(share, |budget| repair.descend(budget));
            self.keep_if_lower(Some(repair.plan.clone()));
            if self.is_met() {
                break;
            }
        }
        self.repairs = repairs;
    }

    /// Plans each size in a region of its own, with the regions stacked. All other items are then placed around the
    /// regions' items.
    fn plan_regions(&mut self, budget: &mut Budget) {
        let variants = if self.part.fullest_cliques().len() > 1 { &[true, false][..] } else { &[false] };
        for &whole in variants {
            let regions = regions(self.part, whole, budget);
            if regions.len() < 2 {
                continue;
            }
            let mut places = vec![None; self.part.items.len()];
            let mut base = 0;
            for region in &regions {
                let height = region.part.bound;
                let mut alone = Solver::new(&region.part, Goal::exactly(height));
                budget.within(budget.left() / 4, |budget| alone.run(&REGION_STEPS, budget));
                self.placements += alone.placements;
                let offsets = alone.best.map_or(Vec::new(), |best| best.offsets);
                for ((&i, item), at) in region.members.iter().zip(&region.part.items).zip(offsets) {
                    // An item that ends above the region gets its place later.
                    places[i as usize] = (at + item.bytes <= height).then_some(base + at);
                }
                base += height;
            }
            if let Some(mut repair) = Ejection::new(self.part, &places, self.goal.enough, budget) {
                budget.within(budget.left() / 2, |budget| repair.descend(budget));
                self.keep_if_lower(Some(repair.plan.clone()));
                self.keep_repair(Some(repair));
            }
            if self.is_met() {
                return;
            }
        }
    }

    /// Plans the part in strips and keeps the plan for repairs.
    fn plan_strips(&mut self, budget: &mut Budget) {
        if let Some(offsets) = strips(self.part, budget) {
            let repair = self.start_repair(&offsets, budget);
            self.keep_repair(repair);
            self.keep_if_lower(Some(self.part.placement(offsets)));
        }
    }
}

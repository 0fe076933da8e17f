//! Lowers a ceiling step by step towards a goal.

use crate::planner::budget::Budget;

/// Least work that an attempt may spend in the first round.
const FIRST_ATTEMPT: u64 = 500_000;
/// Work per item that an attempt may spend in the first round, if that is more than [`FIRST_ATTEMPT`].
const FIRST_ATTEMPT_PER_ITEM: u64 = 70;

/// Divisors of the distance to the goal. The quotient is the size of the next step down. Large steps come first;
/// smaller steps follow after large ones have failed.
const STEPS: [u64; 4] = [1, 4, 16, 64];

/// The progress of a descent.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Descent {
    goal: u64,
    /// Heights are multiples of this.
    grain: u64,
    /// Work that an attempt may spend.
    patience: u64,
    /// Index into [`STEPS`].
    step: usize,
}

/// The result of an attempt to get below a ceiling.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Reached {
    /// Height of the lowest plan so far.
    pub height: u64,
    /// Proven lower bound: no plan is lower than this.
    pub proven: u64,
}

impl Descent {
    /// A descent to `goal` for a plan of this many items.
    pub fn new(goal: u64, grain: u64, items: usize) -> Self {
        let patience = FIRST_ATTEMPT.max(FIRST_ATTEMPT_PER_ITEM * items as u64);
        Self { goal, grain, patience, step: 0 }
    }

    /// Calls `lower(ceiling, budget)` with lower and lower ceilings, starting below `height`, until the goal is met or
    /// the budget is spent. Each call gets a small budget of its own. Once steps of all sizes have failed, the budget
    /// of a call grows fourfold.
    pub fn run(&mut self, mut height: u64, budget: &mut Budget, mut lower: impl FnMut(u64, &mut Budget) -> Reached) {
        while height > self.goal && budget.stopped().is_none() {
            let way = height - self.goal;
            let step = (way / STEPS[self.step]).max(self.grain).min(way);
            let ceiling = ((height - step) / self.grain * self.grain).max(self.goal);
            let reached = budget.within(self.patience, |budget| lower(ceiling, budget));
            self.goal = self.goal.max(reached.proven);
            if reached.height < height {
                height = reached.height;
                self.step = self.step.min(1);
                continue;
            }
            self.step += 1;
            if self.step == STEPS.len() || step == self.grain {
                self.step = 1;
                self.patience = self.patience.saturating_mul(4);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the final height if no plan is lower than `least` and each attempt costs `cost`.
    fn descend(least: u64, cost: u64, proves: bool) -> u64 {
        let mut budget = Budget { work: 50_000_000, ..Budget::default() };
        let mut height = 1000;
        Descent::new(100, 10, 5).run(height, &mut budget, |ceiling, budget| {
            assert!(ceiling < height && ceiling % 10 == 0 && ceiling >= 100);
            budget.spend(cost.min(budget.left()));
            let is_found = ceiling >= least && budget.left() > 0;
            height = if is_found { ceiling } else { height };
            Reached { height, proven: if proves && ceiling < least { ceiling + 10 } else { 0 } }
        });
        assert!(budget.spent <= 50_000_000);
        height
    }

    #[test]
    fn a_descent_ends_as_low_as_plans_get() {
        assert_eq!([descend(100, 1, false), descend(100, 1_000_000, false)], [100, 100]);
        assert_eq!([descend(430, 1_000, true), descend(430, 1_000, false)], [430, 430]);
        assert_eq!(descend(100, 100_000_000, false), 1000);
    }
}

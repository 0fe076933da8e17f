//! What is tried on a part, in which order, and what is known in the end.

use super::exact::Verdict;
use super::meter::Meter;
use super::part::Part;
use super::passes::{Goal, PASSES, PLACEMENTS, QUICK_PASSES, mend, run, search, within};
use super::portfolio::{Placed, Portfolio};

/// A part's plan.
#[derive(Debug)]
pub(crate) struct Outcome {
    /// `None` when no plan within the address space was found.
    pub placed: Option<Placed>,
    /// No plan is lower than this.
    pub proven: u64,
    pub sweeps: u64,
}

/// Plans every part: each has a plan before the work goes to those that miss their goals, in equal shares. What one
/// part proves needs no other to be lower. Returns the outcomes in the order of the parts.
///
/// `aim` and `enough` are heights of the whole: nothing below the first helps, nothing below the second is asked for.
pub(crate) fn plan_parts(parts: &[Part], aim: u64, mut enough: u64, meter: &mut Meter) -> Vec<Outcome> {
    let goal = |part: &Part, enough: u64| Goal {
        ceiling: aim.saturating_sub(part.base),
        enough: enough.saturating_sub(part.base),
    };
    let mut portfolios: Vec<Portfolio> = Vec::with_capacity(parts.len());
    for part in parts {
        let mut portfolio = Portfolio::new(part, goal(part, enough).ceiling, *meter);
        portfolio.sweep_once();
        *meter = portfolio.meter;
        portfolios.push(portfolio);
    }
    let is_open = |(part, portfolio): (&Part, &Portfolio)| !goal(part, enough).is_met(portfolio);
    let mut open = parts.iter().zip(&portfolios).filter(|&pair| is_open(pair)).count() as u64;
    let mut outcomes = Vec::with_capacity(parts.len());
    for (part, mut portfolio) in parts.iter().zip(portfolios) {
        let mut proven = part.bound;
        let goal = goal(part, enough);
        if !goal.is_met(&portfolio) {
            let share = meter.left() / open.max(1);
            portfolio.meter = Meter { work: meter.spent + share, ..*meter };
            improve(part, goal, &mut portfolio, &mut proven);
            *meter = Meter { work: meter.work, ..portfolio.meter };
            open = open.saturating_sub(1);
        }
        enough = enough.max(part.base.saturating_add(proven));
        outcomes.push(Outcome { placed: portfolio.best, proven, sweeps: portfolio.sweeps });
    }
    outcomes
}

/// What is tried after sweeps on their own, cheapest first, until the goal is met or the meter stops.
fn improve(part: &Part, goal: Goal, portfolio: &mut Portfolio, proven: &mut u64) {
    let small = portfolio.is_small();
    if small {
        run(&PLACEMENTS, goal, portfolio);
        if !goal.is_met(portfolio) && portfolio.is_often_full(goal.enough) {
            let items = part.items.len() as u64;
            let work = (SEARCH_PER_ITEM * items).min(portfolio.meter.left() / 64);
            if attempt(part, goal.enough.max(*proven), work, portfolio, proven) == Verdict::Unknown {
                let work = (OPEN_PER_ITEM * items).min(portfolio.meter.left() / 4);
                within(work, portfolio, |portfolio| {
                    portfolio.open_once(goal.enough);
                });
            }
        }
        if !goal.is_met(portfolio) {
            let work = portfolio.meter.left() / 8;
            attempt(part, goal.enough.max(*proven), work, portfolio, proven);
        }
    }
    if *proven <= goal.ceiling {
        run(&QUICK_PASSES, goal, portfolio);
    }
    if !goal.is_met(portfolio) && *proven <= goal.ceiling {
        // A small part keeps most of its work for searches.
        let share = if small { portfolio.meter.left() / 8 } else { portfolio.meter.left() };
        within(share, portfolio, |portfolio| run(&PASSES, goal, portfolio));
    }
    if small && !goal.is_met(portfolio) {
        close_in(part, goal, portfolio, proven);
    }
}

/// Work for each item of a part that is often full: for a search that is brief, and for stacks that are left open before
/// it goes on. Where these help, less than half of it was enough.
const SEARCH_PER_ITEM: u64 = 2_000;
const OPEN_PER_ITEM: u64 = 6_000;

/// Searches below `capacity` and takes the verdict over.
fn attempt(part: &Part, capacity: u64, work: u64, portfolio: &mut Portfolio, proven: &mut u64) -> Verdict {
    let verdict = search(capacity, work, portfolio);
    if verdict == Verdict::Impossible {
        let next = capacity.saturating_add(1).checked_next_multiple_of(part.grain());
        *proven = (*proven).max(next.unwrap_or(u64::MAX));
    }
    verdict
}

/// Halves the range between what is proven and what is found, by searches and repairs in turns; once more if there is
/// work left in the end.
fn close_in(part: &Part, goal: Goal, portfolio: &mut Portfolio, proven: &mut u64) {
    let grain = part.grain();
    let mut from = *proven;
    while portfolio.meter.stopped().is_none() {
        let height = portfolio.best.as_ref().map_or(u64::MAX, |b| b.height);
        if height <= goal.enough.max(*proven) {
            return;
        }
        if from.max(*proven) >= height {
            from = *proven;
        }
        let lowest = from.max(*proven);
        let step = height - (height - lowest).div_ceil(2);
        let capacity = (step - step % grain).max(lowest).max(goal.enough.min(height - 1));
        // What is too little to be split is spent at once.
        let left = portfolio.meter.left();
        let work = if left < LEAST_ATTEMPT { left } else { (left / 4).max(LEAST_ATTEMPT) };
        if attempt(part, capacity, work, portfolio, proven) == Verdict::Unknown {
            let below = Goal { enough: capacity, ..goal };
            within(work / 4, portfolio, |portfolio| mend(below, portfolio));
            if !below.is_met(portfolio) {
                // Where both ran out, lower ones would too.
                from = capacity.saturating_add(grain);
            }
        }
        if work == 0 {
            return;
        }
    }
}

/// Work of an attempt to close in, at least.
const LEAST_ATTEMPT: u64 = 1_000_000;

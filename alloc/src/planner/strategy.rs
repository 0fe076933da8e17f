//! What is tried on a part, in which order, and what is known in the end.

use super::exact::{Verdict, search};
use super::meter::Meter;
use super::part::Part;
use super::portfolio::{Placed, Portfolio};

/// What a part should reach.
#[derive(Debug, Clone, Copy)]
struct Goal {
    /// Nothing lower helps: the bound of the whole problem.
    ceiling: u64,
    /// Nothing lower is asked for.
    enough: u64,
}

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
    let is_open = |(part, portfolio): (&Part, &Portfolio)| !meets(portfolio, goal(part, enough));
    let mut open = parts.iter().zip(&portfolios).filter(|&pair| is_open(pair)).count() as u64;
    let mut outcomes = Vec::with_capacity(parts.len());
    for (part, mut portfolio) in parts.iter().zip(portfolios) {
        let mut proven = part.bound;
        let goal = goal(part, enough);
        if !meets(&portfolio, goal) {
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
    let small = is_small(part);
    if small {
        let work = portfolio.meter.left() / 3;
        attempt(part, goal.enough.max(*proven), work, portfolio, proven);
    }
    if !meets(portfolio, goal) && *proven <= goal.ceiling {
        // A small part keeps the better half of its work for searches.
        let work = portfolio.meter.work;
        if small {
            portfolio.meter.work = portfolio.meter.spent + portfolio.meter.left() / 4;
        }
        portfolio.repair();
        portfolio.meter.work = work;
    }
    if small && !meets(portfolio, goal) {
        close_in(part, goal, portfolio, proven);
    }
}

/// Searches visit every item at every step: they are for parts where that is cheap.
fn is_small(part: &Part) -> bool {
    let cells: u64 = part.items.iter().map(|item| u64::from(item.cliques())).sum();
    part.items.len() <= 3_000 && cells <= 500_000
}

fn meets(portfolio: &Portfolio, goal: Goal) -> bool {
    portfolio.best.as_ref().is_some_and(|b| b.height <= goal.enough)
}

/// Searches below `capacity` and takes the verdict over.
fn attempt(part: &Part, capacity: u64, work: u64, portfolio: &mut Portfolio, proven: &mut u64) -> Verdict {
    let verdict = search(part, capacity, work, &mut portfolio.meter);
    match &verdict {
        Verdict::Found(offsets) => {
            let ends = part.items.iter().zip(offsets).enumerate();
            let ends = ends.filter(|(i, _)| !part.is_ghost(*i as u32)).map(|(_, (item, at))| at + item.bytes);
            let height = ends.max().unwrap_or(0);
            portfolio.offer(Some(Placed { height, offsets: offsets.clone() }));
        }
        Verdict::Impossible => {
            let next = capacity.saturating_add(1).checked_next_multiple_of(part.grain());
            *proven = (*proven).max(next.unwrap_or(u64::MAX));
        }
        Verdict::Unknown => {}
    }
    verdict
}

/// Narrows the range between what is proven and what is found. From above: easy successes first, then dearer ones.
fn close_in(part: &Part, goal: Goal, portfolio: &mut Portfolio, proven: &mut u64) {
    let grain = part.grain();
    let mut from = *proven;
    while portfolio.meter.stopped().is_none() {
        let height = portfolio.best.as_ref().map_or(u64::MAX, |b| b.height);
        let lowest = from.max(*proven);
        if height <= goal.enough.max(*proven) || lowest >= height {
            return;
        }
        let step = height - (height - lowest).div_ceil(4);
        let capacity = (step - step % grain).max(lowest).max(goal.enough.min(height - 1));
        let work = portfolio.meter.left() / 4;
        match attempt(part, capacity, work, portfolio, proven) {
            // Where a search ran out, lower ones would too.
            Verdict::Unknown => from = capacity.saturating_add(grain),
            Verdict::Found(_) | Verdict::Impossible => {}
        }
        if work == 0 {
            return;
        }
    }
}

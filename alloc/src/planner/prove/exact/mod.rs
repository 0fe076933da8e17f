//! Branch and bound for a plan of one part below a capacity.
//!
//! Any plan can be pushed down until every item rests on the floor or on another item. The search builds such plans
//! from below. Its state is one *floor* per clique. Everything below the floor is settled, and the bytes of the
//! remaining items must fit between the floor and the capacity. The bytes left over are the clique's *slack*.
//!
//! One step looks at one clique of a *valley*: neighbouring cliques of equal floor between cliques with higher floors.
//! It branches on what comes next in that clique:
//!
//! - one of the items that fit into the valley, at the floor;
//! - no item, which raises the clique's floor to the next height at which an item could come to rest, and costs slack.
//!
//! These cases exclude each other, and no other case exists.
//!
//! The tree stays small for four reasons:
//! - a floor rises at once to the lowest place that any remaining item could have there;
//! - the next step is taken where the fewest cases are open, and where searches failed before;
//! - where no remaining item crosses between two cliques, both sides are searched separately;
//! - of equal items only one is tried, and states that failed before (no-goods) are not entered again.

mod branch;
mod state;

use std::sync::atomic::{AtomicUsize, Ordering};

use branch::{Outcome, Rank, Search};

use crate::planner::budget::Budget;
use crate::planner::decompose::parts::Part;

/// The result of a search.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// A plan within the capacity.
    Found(Vec<u64>),
    /// No plan fits into the capacity.
    Impossible,
    /// The budget was spent.
    Unknown,
}

/// Searches for a plan of `part` within `capacity` until the budget is spent.
///
/// Three workers with different orders of candidates restart with growing limits. Each remembers the states that
/// failed. The result is taken from the earliest round in which a worker finishes. Of several such workers, the one
/// with the lowest number counts, so the result is the same on every machine.
pub(crate) fn search(part: &Part, capacity: u64, budget: &mut Budget) -> Verdict {
    let below;
    let part = if part.forbidden.is_empty() {
        part
    } else {
        below = part.below(capacity);
        // Live bytes and forbidden ranges together may exceed the capacity, and their sum may exceed 2^64 - 1.
        let forbidden: u64 = part.forbidden.iter().map(|&i| below.items[i as usize].bytes).sum();
        if part.live().iter().any(|&bytes| bytes > capacity.saturating_sub(forbidden)) {
            return Verdict::Impossible;
        }
        &below
    };
    let Some(first) = Search::new(part, capacity, *budget) else { return Verdict::Impossible };
    let mut workers = Rank::ALL.map(|rank| first.with_rank(rank));
    let mut limit = FIRST_LIMIT.max(part.items.len() as u64 * 50);
    for round in 0.. {
        let limit_here = limit.min(budget.left().saturating_mul(VISITS_PER_WORK) / workers.len() as u64);
        if limit_here < part.items.len() as u64 || budget.is_late() {
            break;
        }
        // Once a worker has decided, workers with higher numbers may stop, since their verdicts would not be used.
        let decided = AtomicUsize::new(usize::MAX);
        let outcomes = in_threads(&mut workers, |number, worker| {
            (worker.seed, worker.left, worker.depth) = (round, limit_here, 0);
            let outcome = worker.solve(0, part.cliques, &|| decided.load(Ordering::Relaxed) < number);
            if outcome != Outcome::Spent {
                decided.fetch_min(number, Ordering::Relaxed);
            }
            outcome
        });
        budget.spend(limit_here * workers.len() as u64 / VISITS_PER_WORK);
        for (worker, outcome) in workers.iter_mut().zip(outcomes) {
            match outcome {
                Outcome::Solved => return Verdict::Found(std::mem::take(&mut worker.state.offsets)),
                Outcome::Failed => return Verdict::Impossible,
                Outcome::Spent => worker.restart(),
            }
        }
        limit += limit / 5;
    }
    Verdict::Unknown
}

/// Number of visits (of one item in one clique each) that cost as much as one rectangle in a sweep.
const VISITS_PER_WORK: u64 = 24;

/// Least limit of a worker's visits in the first round.
const FIRST_LIMIT: u64 = 1_000_000;

/// Stack size of a worker, enough for [`DEPTH`](branch::DEPTH) steps.
const STACK_BYTES: usize = 64 << 20;

/// Runs the workers in parallel if the pool has more than one thread.
fn in_threads<'p>(workers: &mut [Search<'p>], run: impl Fn(usize, &mut Search<'p>) -> Outcome + Sync) -> Vec<Outcome> {
    let run = &run;
    let together = if rayon::current_num_threads() > 1 { workers.len() } else { 1 };
    let mut outcomes = Vec::new();
    for (wave, workers) in workers.chunks_mut(together).enumerate() {
        std::thread::scope(|scope| {
            let started: Vec<_> = workers
                .iter_mut()
                .enumerate()
                .map(|(k, worker)| {
                    let body = move || run(wave * together + k, worker);
                    std::thread::Builder::new().stack_size(STACK_BYTES).spawn_scoped(scope, body)
                })
                .collect();
            // A worker whose thread could not be started has decided nothing.
            let outcome = |thread: std::io::Result<std::thread::ScopedJoinHandle<Outcome>>| {
                thread.map_or(Outcome::Spent, |t| t.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            };
            outcomes.extend(started.into_iter().map(outcome));
        });
    }
    outcomes
}

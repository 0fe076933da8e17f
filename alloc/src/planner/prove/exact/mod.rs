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
mod spans;
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
    Exact::new(part, capacity, *budget).map_or(Verdict::Impossible, |mut exact| exact.run(budget))
}

/// A search that can be resumed.
///
/// Three workers with different orders of candidates restart with growing limits. Each remembers the states that
/// failed. The result is taken from the earliest round in which a worker finishes. Of several such workers, the one
/// with the lowest number counts, so the result is the same on every machine.
pub(crate) struct Exact<'p> {
    /// No plan may be higher than this.
    pub capacity: u64,
    workers: [Search<'p>; Rank::ALL.len()],
    /// Number of rounds so far.
    round: u64,
    /// Limit of a worker's visits in the next round.
    limit: u64,
}

impl<'p> Exact<'p> {
    /// A search for a plan of a part without forbidden ranges. Returns `None` if more bytes than the capacity are alive
    /// in some clique.
    pub fn new(part: &'p Part, capacity: u64, deadline: Budget) -> Option<Self> {
        let first = Search::new(part, capacity, deadline)?;
        let limit = FIRST_LIMIT.max(part.items.len() as u64 * 50);
        Some(Self { capacity, workers: Rank::ALL.map(|rank| first.with_rank(rank)), round: 0, limit })
    }

    /// Searches until the budget is spent. A further call continues with what the workers remember.
    pub fn run(&mut self, budget: &mut Budget) -> Verdict {
        let Part { items, cliques, .. } = self.workers[0].state.part;
        let count = self.workers.len() as u64;
        loop {
            let limit_here = self.limit.min(budget.left().saturating_mul(VISITS_PER_WORK) / count);
            if limit_here < items.len() as u64 || budget.is_late() {
                return Verdict::Unknown;
            }
            // Once a worker has decided, workers with higher numbers may stop, since their verdicts would not be used.
            let decided = AtomicUsize::new(usize::MAX);
            let round = self.round;
            let outcomes = in_threads(&mut self.workers, |number, worker| {
                (worker.seed, worker.left, worker.depth) = (round, limit_here, 0);
                let outcome = worker.solve(0, *cliques, &|| decided.load(Ordering::Relaxed) < number);
                if outcome != Outcome::Spent {
                    decided.fetch_min(number, Ordering::Relaxed);
                }
                outcome
            });
            budget.spend(limit_here * count / VISITS_PER_WORK);
            for (worker, outcome) in self.workers.iter_mut().zip(outcomes) {
                match outcome {
                    Outcome::Solved => return Verdict::Found(std::mem::take(&mut worker.state.offsets)),
                    Outcome::Failed => return Verdict::Impossible,
                    Outcome::Spent => worker.restart(),
                }
            }
            self.round += 1;
            self.limit += self.limit / 5;
        }
    }
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

#[cfg(test)]
mod tests {
    use gapless_testing::prelude::*;

    use super::*;
    use crate::planner::tests::{is_plan, part};

    generated! {
        /// A search that is cut short again and again reaches the verdict of a search that is not.
        #[test]
        fn a_resumed_search_decides_as_a_long_one(
            rows in prop::collection::vec((0..8u32, 1..=8u32, 1..9u64), 1..16),
            more in 0..3u64,
        ) {
            let part = part(&rows, 8);
            let capacity = part.bound + more;
            let with = |work: u64| Budget { work, ..Budget::default() };
            let mut exact = Exact::new(&part, capacity, Budget::default()).unwrap();
            let resumed = (0..200).map(|_| exact.run(&mut with(10_000))).find(|verdict| *verdict != Verdict::Unknown);
            let long = search(&part, capacity, &mut with(1_000_000));
            prop_assert_eq!(matches!(resumed, Some(Verdict::Found(_))), matches!(long, Verdict::Found(_)));
            prop_assert_eq!(resumed == Some(Verdict::Impossible), long == Verdict::Impossible);
            if let Some(Verdict::Found(offsets)) = resumed {
                let placement = part.placement(offsets);
                prop_assert!(placement.height <= capacity && is_plan(&part, &placement));
            }
        }
    }
}

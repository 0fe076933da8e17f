//! Warm start: a plan that keeps the addresses of an earlier plan, as far as that costs no height.
//!
//! The earlier offsets become pins, except for offsets that contradict each other or the problem. If a buffer then ends
//! above the target height, the buffers alive at the same time lose their pins, the shortest-lived first. This repeats
//! until the plan fits or the rounds are used up.

use std::collections::BTreeMap;

use crate::planner::Options;
use crate::planner::budget::Budget;
use crate::planner::run::Run;
use crate::{Buffer, BufferId, Problem};

/// Number of rounds after which the earlier plan is given up. Each round releases more pins.
const ROUNDS: u32 = 6;

/// Returns a plan of at most `target` bytes that keeps addresses of `earlier`, and the work spent. The plan is `None`
/// if no such plan was found within [`ROUNDS`] rounds and the deadline of the `budget`.
pub(in crate::planner) fn keep(
    problem: &Problem,
    earlier: &[Option<u64>],
    target: u64,
    budget: Budget,
) -> (Option<(u64, Vec<u64>)>, u64) {
    let mut kept = consistent(problem, earlier, target);
    let mut spent = 0;
    for round in 0..ROUNDS {
        let pinned = |id: BufferId| match kept[id.index()] {
            Some(at) => problem.buffer(id).clone().at(at),
            None => problem.buffer(id).clone(),
        };
        let Ok(with_pins) = problem.with_buffers(problem.ids().map(pinned).collect()) else { break };
        if budget.is_late() {
            break;
        }
        let work = 50 * problem.len() as u64 + 100_000;
        let options = Options { capacity: Some(target), ..Options::default() };
        let solution = Run::within(&with_pins, &options, Budget { work, spent: 0, ..budget }).plan();
        spent += solution.stats.work;
        if solution.offsets.len() == problem.len() && solution.height <= target {
            return (Some((solution.height, solution.offsets)), spent);
        }
        release(problem, &solution.offsets, target, round, &mut kept);
    }
    (None, spent)
}

/// Returns the earlier offsets that the problem allows and that don't contradict each other. If the offsets of two
/// buffers contradict each other, the larger buffer keeps its offset.
fn consistent(problem: &Problem, earlier: &[Option<u64>], target: u64) -> Vec<Option<u64>> {
    let grouped: Vec<BufferId> = problem.groups().iter().flat_map(|g| g.members.iter().copied()).collect();
    let allowed = |id: BufferId| {
        let (b, at) = (problem.buffer(id), earlier.get(id.index()).copied().flatten()?);
        let end = at.checked_add(b.bytes)?;
        let fenced = problem.forbidden().iter().any(|range| at < range.end && range.start < end);
        let fits = b.bytes > 0 && b.offset.is_none_or(|pin| pin == at) && at % b.alignment == 0 && end <= target;
        (fits && !fenced && !grouped.contains(&id)).then_some(at)
    };
    let mut kept: Vec<Option<u64>> = problem.ids().map(allowed).collect();
    // A buffer's own pin takes precedence over any earlier address.
    for id in problem.ids().filter(|&id| problem.buffer(id).bytes > 0) {
        kept[id.index()] = problem.buffer(id).offset.or(kept[id.index()]);
    }
    let mut events: Vec<(u64, bool, BufferId)> = Vec::new();
    for id in problem.ids().filter(|&id| kept[id.index()].is_some()) {
        let Buffer { lifetime, .. } = problem.buffer(id);
        events.extend([(lifetime.start, true, id), (lifetime.end, false, id)]);
    }
    events.sort_unstable();
    let rank = |id: BufferId| (problem.buffer(id).offset.is_some(), problem.buffer(id).bytes);
    let mut live: BTreeMap<u64, BufferId> = BTreeMap::new();
    for (_, is_birth, id) in events {
        let Some(at) = kept[id.index()] else { continue };
        if !is_birth {
            live.remove(&at);
            continue;
        }
        let end = at + problem.buffer(id).bytes;
        let below = live.range(..at).next_back().filter(|&(&a, &other)| a + problem.buffer(other).bytes > at);
        let met: Vec<BufferId> = below.into_iter().chain(live.range(at..end)).map(|(_, &other)| other).collect();
        if met.iter().any(|&other| rank(other) >= rank(id)) {
            kept[id.index()] = None;
            continue;
        }
        for other in met {
            if let Some(a) = kept[other.index()].take() {
                live.remove(&a);
            }
        }
        live.insert(at, id);
    }
    kept
}

/// Releases the pins of buffers that are alive at the same time as a buffer that ended too high. The first round
/// releases only buffers that live no longer than the too high buffer; each later round also releases longer-lived
/// buffers.
fn release(problem: &Problem, offsets: &[u64], target: u64, round: u32, kept: &mut [Option<u64>]) {
    let length = |b: &Buffer| b.lifetime.end - b.lifetime.start;
    let high: Vec<&Buffer> = problem
        .ids()
        .filter(|id| offsets.get(id.index()).is_none_or(|at| at + problem.buffer(*id).bytes > target))
        .map(|id| problem.buffer(id))
        .take(256)
        .collect();
    for id in problem.ids().filter(|&id| problem.buffer(id).offset.is_none()) {
        let b = problem.buffer(id);
        let beside = |v: &&Buffer| {
            let together = v.lifetime.start < b.lifetime.end && b.lifetime.start < v.lifetime.end;
            together && (round + 2 >= ROUNDS || length(b) >> (2 * round) <= length(v))
        };
        if high.iter().any(beside) {
            kept[id.index()] = None;
        }
    }
}

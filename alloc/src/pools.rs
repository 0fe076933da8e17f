//! Several pools of memory with capacities: the buffers that do not fit into one pool spill to the next.
//!
//! In: a problem, the capacities of the pools in the order of spilling and, optionally, the order in which buffers
//! spill. Out: a pool and an offset for every buffer that fits somewhere. Never: a buffer that is split between pools.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use crate::order::sort_by_key;
use crate::{Buffer, BufferId, Fit, Group, Options, Problem, lower_bound, plan};

/// The pools and offsets of buffers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolPlan {
    /// Pool of each buffer, indexed by [`BufferId`]; `None` if no pool has room for it.
    pub pools: Vec<Option<usize>>,
    /// Offset in bytes of each buffer in its pool; 0 for buffers without a pool.
    pub offsets: Vec<u64>,
    /// One past the highest byte in use of each pool.
    pub heights: Vec<u64>,
    /// Whether all buffers have a pool. [`Fit::Impossible`] is a proof that no assignment of buffers to pools fits.
    pub fit: Fit,
}

/// Plans `problem` in pools of these capacities, in bytes. Every pool is filled with as much as a plan of its capacity
/// holds, and the other buffers spill to the next pool.
///
/// At a tick at which too many bytes are alive, the buffer of the least rank in `ranks` (one per buffer; empty if all
/// are equal) spills, and of several, the one that dies last. Groups spill as a whole, with the least rank of their
/// members. Pinned buffers never spill, and forbidden ranges concern the first pool only. The work and the deadline of
/// `options` are those of each pool; its capacity and earlier offsets are not used.
pub fn plan_pools(problem: &Problem, capacities: &[u64], ranks: &[u32], options: &Options) -> PoolPlan {
    let units = Unit::all(problem, ranks);
    let mut result = PoolPlan {
        pools: vec![None; problem.len()],
        offsets: vec![0; problem.len()],
        heights: vec![0; capacities.len()],
        fit: Fit::Unknown,
    };
    let mut left: Vec<&Unit> = units.iter().collect();
    let mut is_complete = true;
    let mut is_proven = is_impossible(problem, &units, capacities);
    for (pool, &capacity) in capacities.iter().enumerate() {
        let (mut here, mut spilled) = spill(&left, capacity);
        let Some(part) = part(problem, &here, pool == 0) else { break };
        let options = Options { capacity: Some(capacity), warm_start: None, ..options.clone() };
        let solution = plan(&part, &options);
        is_proven |= solution.fit == Fit::Impossible && capacities.len() == 1 && spilled.is_empty();
        // Without the buffers that end too high, the others can stay where they are.
        let end = |id: &BufferId| solution.offsets.get(id.index()).map(|at| at + part.buffer(*id).bytes);
        here.retain(|unit| {
            let fits = unit.members.iter().all(|id| {
                let is_empty = part.buffer(*id).bytes == 0 && !solution.offsets.is_empty();
                is_empty || end(id).is_some_and(|end| end <= capacity)
            });
            if !fits {
                spilled.push(*unit);
            }
            fits
        });
        for id in here.iter().flat_map(|unit| &unit.members) {
            result.pools[id.index()] = Some(pool);
            result.offsets[id.index()] = solution.offsets[id.index()];
            let end = if part.buffer(*id).bytes == 0 { 0 } else { end(id).unwrap_or(0) };
            result.heights[pool] = result.heights[pool].max(end);
        }
        is_complete &= !spilled.iter().any(|unit| unit.is_pinned);
        spilled.retain(|unit| !unit.is_pinned);
        left = spilled;
    }
    result.fit = match (is_complete && left.is_empty(), is_proven) {
        (true, _) => Fit::Fits,
        (false, true) => Fit::Impossible,
        (false, false) => Fit::Unknown,
    };
    result
}

/// Buffers that spill together: a group, or a single buffer.
struct Unit {
    members: Vec<BufferId>,
    /// Ticks of the members, from the first birth to the last death.
    start: u64,
    end: u64,
    /// Bytes that the unit needs in its pool at most.
    bytes: u64,
    rank: u32,
    is_pinned: bool,
}

impl Unit {
    fn all(problem: &Problem, ranks: &[u32]) -> Vec<Self> {
        let mut grouped = vec![false; problem.len()];
        problem.groups().iter().flat_map(|g| &g.members).for_each(|id| grouped[id.index()] = true);
        let rank = |id: &BufferId| ranks.get(id.index()).copied().unwrap_or(0);
        let group = |group: &Group| Self {
            members: group.members.clone(),
            start: group.lifetime.start,
            end: group.lifetime.end,
            bytes: group.bytes,
            rank: group.members.iter().map(rank).min().unwrap_or(0),
            is_pinned: group.offset.is_some(),
        };
        let alone = problem.ids().filter(|id| !grouped[id.index()]).map(|id| {
            let Buffer { lifetime, bytes, offset, .. } = problem.buffer(id).clone();
            let (start, end) = (lifetime.start, lifetime.end);
            Self { members: vec![id], start, end, bytes, rank: rank(&id), is_pinned: offset.is_some() }
        });
        problem.groups().iter().map(group).chain(alone).collect()
    }
}

/// True if no assignment of units to pools can fit: more bytes are alive at one tick than all pools have, or a unit is
/// larger than every pool that it may be in, or a pin ends above the first pool.
fn is_impossible(problem: &Problem, units: &[Unit], capacities: &[u64]) -> bool {
    let all: u128 = capacities.iter().map(|&capacity| u128::from(capacity)).sum();
    let first = capacities.first().copied().unwrap_or(0);
    let most = capacities.iter().copied().max().unwrap_or(0);
    let too_high = |b: &Buffer| b.bytes > 0 && b.offset.is_some_and(|at| at + b.bytes > first);
    u128::from(lower_bound(problem)) > all
        || problem.buffers().iter().any(|b| b.bytes > most || too_high(b))
        || units.iter().any(|unit| {
            let members = || unit.members.iter().map(|id| problem.buffer(*id)).filter(|b| b.bytes > 0);
            // The bytes between the members of a group may be left over, but not those of its highest member.
            unit.is_pinned && members().any(|b| b.bytes > first)
        })
}

/// Divides the units into those that stay in a pool and those that spill, so that at every tick, at most `capacity`
/// bytes of the units that stay are alive. Pinned units stay, even if they alone have more.
fn spill<'u>(units: &[&'u Unit], capacity: u64) -> (Vec<&'u Unit>, Vec<&'u Unit>) {
    let mut order: Vec<usize> = (0..units.len()).collect();
    sort_by_key(&mut order, |&k| units[k].start);
    let mut is_spilled = vec![false; units.len()];
    // The units alive, in the order in which they spill, and in the order of their deaths.
    let (mut alive, mut deaths) =
        (BTreeSet::<(bool, u32, Reverse<u64>, usize)>::new(), BTreeSet::<(u64, usize)>::new());
    let mut live = 0u128;
    for k in order {
        let unit = units[k];
        while let Some(&(end, dead)) = deaths.first().filter(|&&(end, _)| end <= unit.start) {
            deaths.remove(&(end, dead));
            alive.remove(&(units[dead].is_pinned, units[dead].rank, Reverse(end), dead));
            live -= u128::from(units[dead].bytes);
        }
        alive.insert((unit.is_pinned, unit.rank, Reverse(unit.end), k));
        deaths.insert((unit.end, k));
        live += u128::from(unit.bytes);
        while live > capacity.into()
            && let Some(&first) = alive.first().filter(|unit| !unit.0)
        {
            let (_, _, Reverse(end), spilled) = first;
            alive.remove(&first);
            deaths.remove(&(end, spilled));
            live -= u128::from(units[spilled].bytes);
            is_spilled[spilled] = true;
        }
    }
    let divided = |spilled: bool| (0..units.len()).filter(|&k| is_spilled[k] == spilled).map(|k| units[k]).collect();
    (divided(false), divided(true))
}

/// Returns the problem in which only the buffers of `units` have bytes, pins and alignments. Returns `None` if there is
/// no such problem.
fn part(problem: &Problem, units: &[&Unit], is_first: bool) -> Option<Problem> {
    let mut is_here = vec![false; problem.len()];
    units.iter().flat_map(|unit| &unit.members).for_each(|id| is_here[id.index()] = true);
    let buffer = |id: BufferId| match is_here[id.index()] {
        true if is_first => problem.buffer(id).clone(),
        true => Buffer { offset: None, ..problem.buffer(id).clone() },
        false => Buffer::new(problem.buffer(id).lifetime.clone(), 0),
    };
    let buffers = problem.ids().map(buffer).collect();
    if is_first { problem.clone() } else { problem.without_forbidden() }.with_buffers(buffers).ok()
}

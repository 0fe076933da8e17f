//! Lower bounds that take pins and alignments into account.

use std::collections::BTreeMap;

use super::decompose::parts::Part;
use crate::order::sort_by_key;
use crate::{BufferId, Problem};

/// A lower bound on the height of every plan, and buffers that are topmost in a plan of this height.
#[derive(Debug, Default)]
pub(crate) struct Aligned {
    /// The bound in bytes; 0 if alignments force nothing.
    pub bound: u64,
    /// Buffers with their offsets. At every tick at which the most bytes are alive, one of them is alive.
    pub top: Vec<(BufferId, u64)>,
}

/// Most alignments for which [`aligned_bound`] is computed: those of the most buffers.
const MAX_ALIGNMENTS: usize = 32;

/// Returns the highest bound that alignments force. For each alignment, it looks at the buffers whose alignments are
/// multiples of it, with their sizes rounded up to multiples of it. One pass takes O(n log n) for n buffers.
pub(crate) fn aligned_bound(problem: &Problem) -> Aligned {
    let mut counts: BTreeMap<u64, usize> = BTreeMap::new();
    for b in problem.buffers().iter().filter(|b| b.bytes > 0 && b.alignment > 1) {
        *counts.entry(b.alignment).or_default() += 1;
    }
    let mut alignments: Vec<(usize, u64)> = counts.into_iter().map(|(alignment, count)| (count, alignment)).collect();
    sort_by_key(&mut alignments, |&(count, alignment)| (std::cmp::Reverse(count), alignment));
    let bounds = alignments.into_iter().take(MAX_ALIGNMENTS).filter_map(|(_, unit)| in_units(problem, unit));
    bounds.fold(Aligned::default(), |best, next| if next.bound > best.bound { next } else { best })
}

/// Returns the bound of the buffers whose alignments are multiples of `unit`, or `None` if rounding their sizes up to
/// multiples of `unit` adds nothing.
///
/// Let `most` be the most rounded bytes alive at one tick. In a plan whose rounded buffers end at `most`, one buffer ends
/// there at each of the fullest ticks, and no two of these topmost buffers are alive together. So the plan is at least
/// as high as the end of the topmost buffer with the least padding. The bound is the lowest such height over all chains
/// of topmost buffers. If there is no chain, every plan is at least one unit higher.
fn in_units(problem: &Problem, unit: u64) -> Option<Aligned> {
    let buffer = |id: BufferId| problem.buffer(id);
    let mut ids: Vec<BufferId> =
        problem.ids().filter(|&id| buffer(id).bytes > 0 && buffer(id).alignment.is_multiple_of(unit)).collect();
    if ids.iter().all(|&id| buffer(id).bytes.is_multiple_of(unit)) {
        return None;
    }
    let rounded = |id: BufferId| u128::from(buffer(id).bytes).next_multiple_of(unit.into());
    let padding = |id: BufferId| (rounded(id) - u128::from(buffer(id).bytes)) as u64;
    sort_by_key(&mut ids, |&id| (buffer(id).lifetime.start, id));
    // The bytes alive from each tick on at which a buffer is born or dies.
    let mut change: BTreeMap<u64, i128> = BTreeMap::new();
    for &id in &ids {
        *change.entry(buffer(id).lifetime.start).or_default() += rounded(id) as i128;
        *change.entry(buffer(id).lifetime.end).or_default() -= rounded(id) as i128;
    }
    let mut live = 0;
    let live: Vec<(u64, i128)> = change
        .into_iter()
        .map(|(tick, change)| {
            live += change;
            (tick, live)
        })
        .collect();
    let most = live.iter().map(|&(_, live)| live).max()? as u128;
    let full: Vec<u64> = live.iter().filter(|tick| tick.1 as u128 == most).map(|tick| tick.0).collect();
    let mut paddings: Vec<u64> = ids.iter().map(|&id| padding(id)).collect();
    paddings.sort_unstable();
    paddings.dedup();
    // The larger the padding that is asked for, the fewer buffers remain, so the largest one that has a chain is found
    // by bisection.
    let chain_at = |padded: u64| {
        let allowed = ids.iter().copied().filter(|&id| padding(id) >= padded);
        chain(problem, &full, allowed)
    };
    let possible = paddings.partition_point(|&padded| chain_at(padded).is_some());
    let (height, top) = match possible.checked_sub(1) {
        Some(last) => (most - u128::from(paddings[last]), chain_at(paddings[last])?),
        None => (most + u128::from(unit) - u128::from(*paddings.last()?), Vec::new()),
    };
    let top = top.into_iter().map(|id| Some((id, u64::try_from(most - rounded(id)).ok()?))).collect::<Option<_>>()?;
    Some(Aligned { bound: u64::try_from(height).ok()?, top })
}

/// Returns buffers of which exactly one is alive at each of the ticks `full`, and no two are alive together. `allowed`
/// has the buffers to choose from, in order of their births. Returns `None` if there are no such buffers.
fn chain(problem: &Problem, full: &[u64], allowed: impl Iterator<Item = BufferId>) -> Option<Vec<BufferId>> {
    // For each number of ticks, the chain that has a buffer at these first ticks and ends first: its end, its last
    // buffer, and the number of ticks before that buffer.
    let mut chains: Vec<Option<(u64, BufferId, usize)>> = vec![None; full.len() + 1];
    for id in allowed {
        let lifetime = &problem.buffer(id).lifetime;
        let [first, after] = [lifetime.start, lifetime.end].map(|tick| full.partition_point(|&t| t < tick));
        let follows = first == 0 || chains[first].is_some_and(|chain| chain.0 <= lifetime.start);
        if first < after && follows && chains[after].is_none_or(|chain| lifetime.end < chain.0) {
            chains[after] = Some((lifetime.end, id, first));
        }
    }
    let mut links = Vec::new();
    let mut ticks = full.len();
    while ticks > 0 {
        let (_, id, before) = chains[ticks]?;
        links.push(id);
        ticks = before;
    }
    Some(links)
}

/// Returns a lower bound on the height: the maximum, over all cliques, of the least height at which the space between
/// the pins holds all other live items. The bound assumes that items can be cut into pieces (water filling), so it
/// holds for whole items too. One pass over time takes O((pins + cliques) log pins).
pub(crate) fn fractional_bound(part: &Part, live: &[u64]) -> u64 {
    let mut pins: Vec<(u64, u32)> = part.pins.iter().map(|&(i, at)| (at, i)).collect();
    pins.sort_unstable();
    let item = |rank: u32| part.items[pins[rank as usize].1 as usize];
    let mut births: Vec<u32> = (0..pins.len() as u32).collect();
    let mut deaths = births.clone();
    sort_by_key(&mut births, |&rank| item(rank).start);
    sort_by_key(&mut deaths, |&rank| item(rank).end);
    let (mut births, mut deaths) = (births.into_iter().peekable(), deaths.into_iter().peekable());
    let mut standing = Standing::new(pins.iter().map(|pin| pin.0).collect());
    // Live bytes of the pinned items, without forbidden ranges, which are pinned too.
    let mut counted = 0;
    let mut most = 0;
    for (clique, &live) in (0..).zip(live) {
        while let Some(rank) = deaths.next_if(|&rank| item(rank).end <= clique) {
            standing.set(rank as usize, 0);
            counted -= if part.is_forbidden(pins[rank as usize].1) { 0 } else { item(rank).bytes };
        }
        while let Some(rank) = births.next_if(|&rank| item(rank).start <= clique) {
            standing.set(rank as usize, item(rank).bytes);
            counted += if part.is_forbidden(pins[rank as usize].1) { 0 } else { item(rank).bytes };
        }
        if live > counted {
            most = most.max(standing.level(live - counted));
        }
    }
    most
}

/// The pins alive at one moment, in a binary tree whose leaves are all pins in order of address.
struct Standing {
    leaves: usize,
    /// Address of each leaf's pin.
    at: Vec<u64>,
    /// For each node, the total bytes of the live pins below the node, and the lowest address of these pins; `None` if
    /// there are none.
    nodes: Vec<(u64, Option<u64>)>,
}

impl Standing {
    fn new(at: Vec<u64>) -> Self {
        let leaves = at.len().next_power_of_two();
        Self { leaves, at, nodes: vec![(0, None); 2 * leaves] }
    }

    fn set(&mut self, rank: usize, bytes: u64) {
        let mut node = self.leaves + rank;
        self.nodes[node] = (bytes, (bytes > 0).then_some(self.at[rank]));
        while node > 1 {
            node /= 2;
            let (low, high) = (self.nodes[2 * node], self.nodes[2 * node + 1]);
            self.nodes[node] = (low.0 + high.0, low.1.or(high.1));
        }
    }

    /// Returns the height that is reached if `bytes` fill the space between the pins from the bottom.
    fn level(&self, bytes: u64) -> u64 {
        // The free space below a pin grows with the pin's address, so the pins below the surface come first.
        let mut below = 0u64;
        let sinks = |at: Option<u64>, below: u64| at.is_some_and(|at| at < bytes.saturating_add(below));
        let mut node = 1;
        if !sinks(self.nodes[1].1, 0) {
            return bytes;
        }
        while node < self.leaves {
            let (low, high) = (self.nodes[2 * node], self.nodes[2 * node + 1]);
            node = if sinks(high.1, below + low.0) {
                below += low.0;
                2 * node + 1
            } else {
                2 * node
            };
        }
        bytes.saturating_add(below + self.nodes[node].0)
    }
}

#[cfg(test)]
mod tests {
    use gapless_testing::prelude::*;

    use super::*;
    use crate::{Buffer, Problem};

    generated! {
        /// Compared with filling byte by byte, tick by tick.
        #[test]
        fn as_if_filled_byte_by_byte(
            rows in prop::collection::vec((0..8u64, 1..6u64, 1..9u64, prop::option::of(0..40u64)), 1..14),
            fence in prop::option::of((0..30u64, 1..9u64)),
        ) {
            // A pin that contradicts an earlier one is left out.
            let mut buffers: Vec<Buffer> = Vec::new();
            for (start, ticks, bytes, at) in rows {
                let buffer = Buffer { offset: at, ..Buffer::new(start..start + ticks, bytes) };
                buffers.push(buffer);
                if Problem::new(buffers.clone()).is_err() {
                    buffers.pop();
                }
            }
            let problem = Problem::new(buffers.clone()).unwrap();
            let fence = fence.map_or(0..0, |(start, bytes)| start..start + bytes);
            let Ok(problem) = problem.forbid(fence.clone()) else { return Ok(()) };
            let slow = (0..14).map(|tick| {
                let alive = || buffers.iter().filter(|b| b.lifetime.contains(&tick));
                let loose: u64 = alive().filter(|b| b.offset.is_none()).map(|b| b.bytes).sum();
                let taken = |byte: u64| {
                    let pins = alive().filter_map(|b| Some(b.offset?..b.offset? + b.bytes));
                    pins.chain([fence.clone()]).any(|range| range.contains(&byte))
                };
                (0..).filter(|&byte| !taken(byte)).take(loose as usize).last().map_or(0, |byte| byte + 1)
            });
            let whole = crate::planner::decompose::parts::Whole::new(&problem, false);
            let fast = whole.parts.iter().map(|part| fractional_bound(part, &part.live()) + part.base).max().unwrap_or(0);
            // Without pins, buffers that live throughout a part may have been moved to its bottom.
            let stripped = whole.bottom.len();
            prop_assert!(stripped > 0 || fast == slow.max().unwrap_or(0), "{:?} {} {:?}", problem, fast, whole.parts);
        }
    }
}

//! A lower bound that takes the pins into account.

use super::decompose::parts::Part;
use crate::order::sort_by_key;

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

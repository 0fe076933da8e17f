//! The smallest part of a problem that does not fit by itself.
//!
//! If more bytes are alive at one tick than the capacity holds, a part is a set of buffers alive there, the largest
//! first. Otherwise, buffers are left out one by one as long as the rest is proven not to fit.

use std::cmp::Reverse;

use super::remedy::{Change, RemedySearch, apply};
use crate::order::sort_by_key;
use crate::{BufferId, Fit, Options, Problem, plan};

/// Most buffers of a problem whose parts are planned.
const MOST_PLANNED: usize = 64;

/// Work of planning a part.
const PART_WORK: u64 = 1_000_000;

impl RemedySearch<'_> {
    /// Returns the fewest buffers found that do not fit the capacity, even without all other buffers. Returns an empty
    /// list if no part is proven not to fit.
    pub fn smallest_part(&self) -> Vec<BufferId> {
        let crowd = self.fewest_alive();
        if !crowd.is_empty() || !self.is_impossible() || self.problem.len() > MOST_PLANNED {
            return crowd;
        }
        let has_bytes = |id: &BufferId| self.problem.buffer(*id).bytes > 0;
        let mut part: Vec<BufferId> = self.problem.ids().filter(has_bytes).collect();
        let mut k = 0;
        while k < part.len() && !self.deadline.has_passed() {
            let left_out = self.problem.ids().filter(|id| !part.contains(id) || *id == part[k]);
            let changes: Vec<Change> = left_out.map(Change::LeaveOut).collect();
            if apply(self.problem, &changes).is_some_and(|rest| self.is_proven_too_large(&rest)) {
                part.remove(k);
            } else {
                k += 1;
            }
        }
        part
    }

    fn is_proven_too_large(&self, problem: &Problem) -> bool {
        let (deadline, threads) = (self.deadline.left(), self.threads);
        let capacity = Some(self.capacity);
        let options = Options { capacity, work: PART_WORK, deadline, threads, warm_start: None };
        plan(problem, &options).fit == Fit::Impossible
    }

    /// Returns the fewest buffers alive at one tick whose bytes exceed the capacity; empty if there is no such tick.
    fn fewest_alive(&self) -> Vec<BufferId> {
        let (unit, room) = (self.unit(), self.room());
        let rounded = |id: BufferId| u128::from(self.problem.buffer(id).bytes).next_multiple_of(unit.into());
        let mut ids: Vec<BufferId> = self.problem.ids().filter(|&id| self.problem.buffer(id).bytes > 0).collect();
        sort_by_key(&mut ids, |&id| (Reverse(rounded(id)), id));
        let mut events: Vec<(u64, bool, usize)> = Vec::with_capacity(2 * ids.len());
        for (rank, &id) in ids.iter().enumerate() {
            let lifetime = &self.problem.buffer(id).lifetime;
            events.extend([(lifetime.start, true, rank), (lifetime.end, false, rank)]);
        }
        events.sort_unstable();
        let mut alive = Alive::new(ids.len());
        let (mut live, mut fewest) = (0u128, None);
        for (tick, is_birth, rank) in events {
            let bytes = rounded(ids[rank]);
            alive.set(rank, if is_birth { bytes } else { 0 });
            live = if is_birth { live + bytes } else { live - bytes };
            if is_birth && live > room {
                let count = alive.first_within(room) + 1;
                if fewest.is_none_or(|(least, _)| count < least) {
                    fewest = Some((count, tick));
                }
            }
        }
        let Some((count, tick)) = fewest else { return Vec::new() };
        let there = ids.into_iter().filter(|&id| self.problem.buffer(id).lifetime.contains(&tick));
        there.take(count).collect()
    }
}

/// The buffers alive, in a binary tree whose leaves are all buffers, the largest first.
struct Alive {
    leaves: usize,
    /// Number and bytes of the live buffers below each node.
    nodes: Vec<(usize, u128)>,
}

impl Alive {
    fn new(count: usize) -> Self {
        let leaves = count.next_power_of_two();
        Self { leaves, nodes: vec![(0, 0); 2 * leaves] }
    }

    fn set(&mut self, rank: usize, bytes: u128) {
        let mut node = self.leaves + rank;
        self.nodes[node] = (usize::from(bytes > 0), bytes);
        while node > 1 {
            node /= 2;
            let (low, high) = (self.nodes[2 * node], self.nodes[2 * node + 1]);
            self.nodes[node] = (low.0 + high.0, low.1 + high.1);
        }
    }

    /// Returns how many of the largest live buffers have at most `room` bytes together.
    fn first_within(&self, room: u128) -> usize {
        let (mut node, mut count, mut bytes) = (1, 0, 0);
        while node < self.leaves {
            let low = self.nodes[2 * node];
            node = if bytes + low.1 <= room {
                count += low.0;
                bytes += low.1;
                2 * node + 1
            } else {
                2 * node
            };
        }
        count + if bytes + self.nodes[node].1 <= room { self.nodes[node].0 } else { 0 }
    }
}

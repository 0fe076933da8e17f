//! The identity of a plan: same problem, same offsets, same hash.

use std::fmt;

use crate::{Arrangement, Problem};

/// The first 128 bits of a BLAKE3 hash over a problem and the offsets of its buffers.
///
/// The input of the hash is fixed, so that other programs can compute it. It is the ASCII text `gapless plan 2`,
/// followed by these numbers as 64-bit little-endian integers:
///
/// 1. The number of buffers. Then for each buffer: the first tick, the tick after the last, the bytes, the alignment,
///    the offset in the plan, then 1 and the pinned offset, or 0 and 0 if the buffer has no pin.
/// 2. The number of groups. Then for each group: 0 if the members are stacked in the given order, 1 if the planner
///    chooses the order, 2 if the distances are given; the number of members, and the members; then, if the distances
///    are given, the distances.
/// 3. The number of forbidden ranges, merged and ascending. Then for each range: the first byte and the byte after the
///    last.
/// 4. If there are pairs to keep apart: their number, and the two buffers of each pair.
///
/// If the input ever changes, the number in the text changes too.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PlanHash([u8; 16]);

impl fmt::Display for PlanHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Hashes a problem without its placement: the plan hash with all offsets 0.
pub fn table_hash(problem: &Problem) -> PlanHash {
    plan_hash(problem, &vec![0; problem.len()])
}

/// Hashes a placed problem.
pub fn plan_hash(problem: &Problem, offsets: &[u64]) -> PlanHash {
    let mut hasher = blake3::Hasher::new();
    hasher.update(b"gapless plan 2");
    let mut words = |words: &[u64]| {
        for word in words {
            hasher.update(&word.to_le_bytes());
        }
    };
    words(&[problem.len() as u64]);
    for (b, &offset) in problem.buffers().iter().zip(offsets) {
        let pin = [b.offset.is_some().into(), b.offset.unwrap_or(0)];
        words(&[b.lifetime.start, b.lifetime.end, b.bytes, b.alignment, offset, pin[0], pin[1]]);
    }
    words(&[problem.groups().len() as u64]);
    for group in problem.groups() {
        let arrangement = match group.arrangement {
            Arrangement::Stacked => 0,
            Arrangement::AnyOrder => 1,
            Arrangement::Given => 2,
        };
        words(&[arrangement, group.members.len() as u64]);
        group.members.iter().for_each(|id| words(&[id.0.into()]));
        if group.arrangement == Arrangement::Given {
            words(&group.distances);
        }
    }
    words(&[problem.forbidden().len() as u64]);
    problem.forbidden().iter().for_each(|range| words(&[range.start, range.end]));
    if !problem.pairs_apart().is_empty() {
        words(&[problem.pairs_apart().len() as u64]);
        problem.pairs_apart().iter().for_each(|pair| words(&[pair.0.0.into(), pair.1.0.into()]));
    }
    let mut short = [0; 16];
    short.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
    PlanHash(short)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Buffer, BufferId};

    /// Any difference between two placed problems changes the hash. The hash of the first problem must never change.
    #[test]
    fn every_part_of_a_problem_counts() {
        let problem = |first: Buffer| Problem::new(vec![first, Buffer::new(0..2, 8)]).unwrap();
        let plain = || problem(Buffer::new(0..2, 8));
        let pair = || vec![BufferId(0), BufferId(1)];
        let placed = [
            (plain(), [0, 8]),
            (plain(), [8, 0]),
            (problem(Buffer::new(0..1, 8)), [0, 8]),
            (problem(Buffer::new(1..2, 8)), [0, 8]),
            (problem(Buffer::new(0..2, 4)), [0, 8]),
            (problem(Buffer::new(0..2, 8).aligned(4)), [0, 8]),
            (problem(Buffer::new(0..2, 8).at(0)), [0, 8]),
            (plain().contiguous(pair()).unwrap(), [0, 8]),
            (plain().adjacent(pair()).unwrap(), [0, 8]),
            (plain().together(vec![(BufferId(0), 0), (BufferId(1), 8)]).unwrap(), [0, 8]),
            (plain().together(vec![(BufferId(0), 0), (BufferId(1), 16)]).unwrap(), [0, 8]),
            (plain().apart(BufferId(0), BufferId(1)).unwrap(), [0, 8]),
            (plain().forbid(32..40).unwrap(), [0, 8]),
            (plain().forbid(32..48).unwrap(), [0, 8]),
        ];
        let hashes: Vec<PlanHash> = placed.iter().map(|(problem, offsets)| plan_hash(problem, offsets)).collect();
        for (k, hash) in hashes.iter().enumerate() {
            assert_eq!(hashes.iter().position(|other| other == hash), Some(k), "{:?}", placed[k]);
        }
        insta::assert_snapshot!(hashes[0], @"f922e1359cf2510ac24b38049b6c7f74");
    }
}

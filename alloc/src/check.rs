//! Checks a plan from any planner. The check is a sweep over time, with the live address ranges in an ordered map.

use std::collections::BTreeMap;
use std::fmt;

use crate::order::sort_by_key;
use crate::{Arrangement, BufferId, Problem};

/// A violation found in a plan.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs, reason = "the messages name the fields")]
pub enum Violation {
    Count { offsets: usize, buffers: usize },
    Misaligned { buffer: BufferId, offset: u64, alignment: u64 },
    Moved { buffer: BufferId, pinned: u64, offset: u64 },
    OutOfRange { buffer: BufferId, end: u128, limit: u64 },
    Forbidden { buffer: BufferId, start: u64, end: u64 },
    Apart { group: usize, below: BufferId, buffer: BufferId },
    Displaced { group: usize, first: BufferId, buffer: BufferId },
    Shared { first: BufferId, second: BufferId },
    Overlap { first: BufferId, second: BufferId, tick: u64 },
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Count { offsets, buffers } => write!(f, "{offsets} offsets for {buffers} buffers"),
            Self::Misaligned { buffer, offset, alignment } => {
                write!(f, "buffer {}: offset {offset} is not a multiple of {alignment}", buffer.0)
            }
            Self::Moved { buffer, pinned, offset } => {
                write!(f, "buffer {}: moved from its pinned offset {pinned} to {offset}", buffer.0)
            }
            Self::OutOfRange { buffer, end, limit } => {
                write!(f, "buffer {}: ends at byte {end}, past {limit}", buffer.0)
            }
            Self::Forbidden { buffer, start, end } => {
                write!(f, "buffer {}: touches the forbidden range [{start}, {end})", buffer.0)
            }
            Self::Apart { group, below, buffer } => {
                write!(f, "group {group}: buffer {} does not start where buffer {} ends", buffer.0, below.0)
            }
            Self::Displaced { group, first, buffer } => {
                write!(f, "group {group}: buffer {} is not at its distance from buffer {}", buffer.0, first.0)
            }
            Self::Shared { first, second } => {
                write!(f, "buffers {} and {} share bytes, but are to be kept apart", first.0, second.0)
            }
            Self::Overlap { first, second, tick } => {
                write!(f, "buffers {} and {} share bytes at tick {tick}", first.0, second.0)
            }
        }
    }
}

impl std::error::Error for Violation {}

/// Checks `offsets` against the problem and, if given, against a `capacity` in bytes.
///
/// # Errors
/// Returns all violations that the sweep meets. If several buffers overlap at one place, at least one pair of them is
/// named.
pub fn check(problem: &Problem, offsets: &[u64], capacity: Option<u64>) -> Result<(), Vec<Violation>> {
    if offsets.len() != problem.len() {
        return Err(vec![Violation::Count { offsets: offsets.len(), buffers: problem.len() }]);
    }
    let mut violations = Vec::new();
    let limit = capacity.unwrap_or(u64::MAX);
    for id in problem.ids() {
        let (b, offset) = (problem.buffer(id), offsets[id.index()]);
        if offset % b.alignment != 0 {
            violations.push(Violation::Misaligned { buffer: id, offset, alignment: b.alignment });
        }
        if let Some(pinned) = b.offset
            && pinned != offset
        {
            violations.push(Violation::Moved { buffer: id, pinned, offset });
        }
        let end = u128::from(offset) + u128::from(b.bytes);
        // A buffer of zero bytes takes no space, wherever it is.
        if b.bytes > 0 && end > u128::from(limit) {
            violations.push(Violation::OutOfRange { buffer: id, end, limit });
        }
    }
    constraints(problem, offsets, &mut violations);
    overlaps(problem, offsets, &mut violations);
    if violations.is_empty() { Ok(()) } else { Err(violations) }
}

fn constraints(problem: &Problem, offsets: &[u64], violations: &mut Vec<Violation>) {
    let end_of = |id: BufferId| u128::from(offsets[id.index()]) + u128::from(problem.buffer(id).bytes);
    for id in problem.ids().filter(|&id| problem.buffer(id).bytes > 0) {
        for range in problem.forbidden() {
            if offsets[id.index()] < range.end && u128::from(range.start) < end_of(id) {
                violations.push(Violation::Forbidden { buffer: id, start: range.start, end: range.end });
            }
        }
    }
    for (group, g) in problem.groups().iter().enumerate() {
        if g.arrangement == Arrangement::Given {
            let base = |k: usize| i128::from(offsets[g.members[k].index()]) - i128::from(g.distances[k]);
            let moved = (1..g.members.len()).filter(|&k| base(k) != base(0));
            violations.extend(moved.map(|k| Violation::Displaced { group, first: g.members[0], buffer: g.members[k] }));
            continue;
        }
        let mut members = g.members.clone();
        if g.arrangement == Arrangement::AnyOrder {
            sort_by_key(&mut members, |&id| (offsets[id.index()], problem.buffer(id).bytes));
        }
        for pair in members.windows(2) {
            if end_of(pair[0]) != u128::from(offsets[pair[1].index()]) {
                violations.push(Violation::Apart { group, below: pair[0], buffer: pair[1] });
            }
        }
    }
    for &(first, second) in problem.pairs_apart() {
        let start = u128::from(offsets[first.index()].max(offsets[second.index()]));
        if start < end_of(first).min(end_of(second)) {
            violations.push(Violation::Shared { first, second });
        }
    }
}

fn overlaps(problem: &Problem, offsets: &[u64], violations: &mut Vec<Violation>) {
    let mut events: Vec<(u64, bool, BufferId)> = Vec::with_capacity(2 * problem.len());
    for id in problem.ids().filter(|&id| problem.buffer(id).bytes > 0) {
        let lifetime = &problem.buffer(id).lifetime;
        events.push((lifetime.start, true, id));
        events.push((lifetime.end, false, id));
    }
    events.sort_unstable();
    let end_of = |id: BufferId| u128::from(offsets[id.index()]) + u128::from(problem.buffer(id).bytes);
    // Live ranges by first byte. A buffer that collides is reported and stays out, so that the map remains disjoint.
    let mut live: BTreeMap<u64, BufferId> = BTreeMap::new();
    for (tick, is_birth, id) in events {
        let offset = offsets[id.index()];
        if !is_birth {
            if live.get(&offset) == Some(&id) {
                live.remove(&offset);
            }
            continue;
        }
        let below = live.range(..=offset).next_back().filter(|&(_, &other)| end_of(other) > u128::from(offset));
        let above = live.range(offset..).next().filter(|&(&start, _)| u128::from(start) < end_of(id));
        match below.or(above) {
            Some((_, &first)) => violations.push(Violation::Overlap { first, second: id, tick }),
            None => {
                live.insert(offset, id);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Buffer;

    fn violations(buffers: Vec<Buffer>, offsets: &[u64], capacity: Option<u64>) -> usize {
        check(&Problem::new(buffers).unwrap(), offsets, capacity).map_or_else(|v| v.len(), |()| 0)
    }

    #[test]
    fn names_every_kind_of_violation() {
        let two = || vec![Buffer::new(0..2, 10), Buffer::new(1..3, 10)];
        assert_eq!(violations(two(), &[0, 10], None), 0);
        assert_eq!(violations(two(), &[0, 9], None), 1);
        assert_eq!(violations(two(), &[9, 0], None), 1);
        assert_eq!(violations(two(), &[0, 10], Some(19)), 1);
        assert_eq!(violations(two(), &[0], None), 1);
        assert_eq!(violations(vec![Buffer::new(0..1, 10), Buffer::new(1..2, 10)], &[0, 0], None), 0);
        assert_eq!(violations(vec![Buffer::new(0..1, 4).aligned(4)], &[2], None), 1);
        assert_eq!(violations(vec![Buffer::new(0..1, 4).at(4)], &[8], None), 1);
        assert_eq!(violations(vec![Buffer::new(0..1, u64::MAX)], &[1], None), 1);
        assert_eq!(violations(vec![Buffer::new(0..9, 0), Buffer::new(0..9, 5)], &[2, 0], None), 0);
        let grouped = Problem::new(two()).unwrap().contiguous(vec![BufferId(1), BufferId(0)]).unwrap();
        assert_eq!(check(&grouped, &[10, 0], None), Ok(()));
        assert_eq!(check(&grouped, &[0, 10], None).unwrap_err().len(), 1);
        let adjacent = Problem::new(two()).unwrap().adjacent(vec![BufferId(1), BufferId(0)]).unwrap();
        assert_eq!(check(&adjacent, &[10, 0], None), Ok(()));
        assert_eq!(check(&adjacent, &[0, 10], None), Ok(()));
        assert_eq!(check(&adjacent, &[0, 11], None).unwrap_err().len(), 1);
        let together = Problem::new(two()).unwrap().together(vec![(BufferId(0), 4), (BufferId(1), 20)]).unwrap();
        assert_eq!(check(&together, &[0, 16], None), Ok(()));
        assert_eq!(check(&together, &[0, 20], None).unwrap_err().len(), 1);
        let apart = vec![Buffer::new(0..1, 10), Buffer::new(1..2, 10)];
        let apart = Problem::new(apart).unwrap().apart(BufferId(0), BufferId(1)).unwrap();
        assert_eq!(check(&apart, &[10, 0], None), Ok(()));
        assert_eq!(check(&apart, &[9, 0], None).unwrap_err().len(), 1);
        let fenced = Problem::new(two()).unwrap().forbid(5..10).unwrap();
        assert_eq!(check(&fenced, &[10, 20], None), Ok(()));
        assert_eq!(check(&fenced, &[0, 10], None).unwrap_err().len(), 1);
    }
}

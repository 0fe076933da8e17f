//! The least height of tiny problems, found by trying everything. Other results are checked against it.

use gapless_alloc::{Group, Problem};

/// Returns the least height of any plan. For one height after another, it tries every offset of every buffer.
pub fn exhausted(problem: &Problem) -> u64 {
    (0..).find(|&height| fits(problem, height)).expect("tall enough, everything fits")
}

/// True if some plan ends at or below `height`.
pub fn fits(problem: &Problem, height: u64) -> bool {
    place(problem, height, &mut Vec::new())
}

fn place(problem: &Problem, height: u64, offsets: &mut Vec<u64>) -> bool {
    let Some(b) = problem.buffers().get(offsets.len()) else {
        return problem.groups().iter().all(|group| lies_together(problem, group, offsets));
    };
    let candidates = b.offset.map_or(0..=height, |at| at..=at);
    // A buffer of zero bytes fits at any offset.
    for at in candidates.filter(|at| (b.bytes == 0 || at + b.bytes <= height) && at % b.alignment == 0) {
        let clear = problem.forbidden().iter().all(|r| b.bytes == 0 || at >= r.end || at + b.bytes <= r.start);
        let apart = problem.buffers().iter().zip(offsets.iter()).all(|(other, &other_at)| {
            let together = other.lifetime.start < b.lifetime.end && b.lifetime.start < other.lifetime.end;
            let shares = other_at < at + b.bytes && at < other_at + other.bytes;
            !(together && shares) || b.bytes == 0 || other.bytes == 0
        });
        if clear && apart {
            offsets.push(at);
            if place(problem, height, offsets) {
                return true;
            }
            offsets.pop();
        }
    }
    false
}

fn lies_together(problem: &Problem, group: &Group, offsets: &[u64]) -> bool {
    let mut ranges: Vec<(u64, u64)> =
        group.members.iter().map(|&id| (offsets[id.index()], offsets[id.index()] + problem.buffer(id).bytes)).collect();
    if group.any_order {
        ranges.sort_unstable();
    }
    ranges.windows(2).all(|pair| pair[0].1 == pair[1].0)
}

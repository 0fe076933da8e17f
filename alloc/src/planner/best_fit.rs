//! One ordering after another: each buffer goes into the tightest gap left by those placed before it.

use std::cmp::Reverse;

use crate::{BufferId, Problem};

/// The orderings tried, in turn: pinned buffers always first.
pub(super) fn orders(problem: &Problem) -> impl Iterator<Item = Vec<BufferId>> + '_ {
    let length = |id: BufferId| problem.buffer(id).lifetime.end - problem.buffer(id).lifetime.start;
    let keys: [Box<dyn Fn(BufferId) -> (u128, u128)>; 4] = [
        Box::new(move |id| (u128::from(problem.buffer(id).bytes), u128::from(length(id)))),
        Box::new(move |id| (u128::from(length(id)), u128::from(problem.buffer(id).bytes))),
        Box::new(move |id| (u128::from(length(id)) * u128::from(problem.buffer(id).bytes), 0)),
        Box::new(move |id| (u128::from(u64::MAX - problem.buffer(id).lifetime.start), u128::from(length(id)))),
    ];
    keys.into_iter().map(move |key| {
        let mut order: Vec<BufferId> = problem.ids().collect();
        order.sort_by_key(|&id| (problem.buffer(id).offset.is_none(), Reverse(key(id)), id));
        order
    })
}

/// Places every buffer in `order`; returns the height and the offsets.
pub(super) fn place(problem: &Problem, order: &[BufferId]) -> (u64, Vec<u64>) {
    let mut offsets = vec![0; problem.len()];
    let mut height = 0;
    let mut placed: Vec<BufferId> = Vec::with_capacity(order.len());
    let mut taken: Vec<(u64, u64)> = Vec::new();
    for &id in order {
        let b = problem.buffer(id);
        let offset = b.offset.unwrap_or_else(|| {
            taken.clear();
            taken.extend(placed.iter().filter_map(|&other| {
                let o = problem.buffer(other);
                let overlaps = o.lifetime.start < b.lifetime.end && b.lifetime.start < o.lifetime.end && o.bytes > 0;
                overlaps.then(|| (offsets[other.index()], offsets[other.index()] + o.bytes))
            }));
            taken.sort_unstable();
            best_gap(&taken, b.bytes, b.alignment)
        });
        offsets[id.index()] = offset;
        height = height.max(offset + b.bytes);
        placed.push(id);
    }
    (height, offsets)
}

/// The start of the tightest gap between `taken` ranges (sorted) that holds `bytes`; above them all if none does.
fn best_gap(taken: &[(u64, u64)], bytes: u64, alignment: u64) -> u64 {
    let (mut floor, mut best) = (0u64, None::<(u64, u64)>);
    for &(start, end) in taken {
        let at = floor.next_multiple_of(alignment);
        if at + bytes <= start && best.is_none_or(|(waste, _)| start - floor - bytes < waste) {
            best = Some((start - floor - bytes, at));
        }
        floor = floor.max(end);
    }
    best.map_or(floor.next_multiple_of(alignment), |(_, at)| at)
}

//! A rehearsal of a step's requests and releases, without running the step.
//!
//! In: an arena and the sizes. Out: the offset that every request got. No kernel runs.

use super::{Arena, Overflow, RequestId, Served};

/// The result of a rehearsal.
#[derive(Debug, Clone, Default)]
pub struct Rehearsal {
    /// The requests that were served, in order.
    pub served: Vec<Served>,
    /// The requests that could not be served.
    pub overflows: Vec<Overflow>,
}

/// Resets the arena, then makes all requests of a step in their order, each with the size that `bytes` returns. Each
/// request is released at the end of its lifetime; at one tick, releases come before requests. Requests that overflow
/// are listed in the result and skipped.
pub fn rehearse(arena: &mut Arena, mut bytes: impl FnMut(RequestId) -> u64) -> Rehearsal {
    arena.reset();
    let ticks = |arena: &Arena, id: RequestId| arena.plan().request(id).ticks.clone();
    let mut ends: Vec<(u64, RequestId)> = arena.plan().ids().map(|id| (ticks(arena, id).end, id)).collect();
    ends.sort_unstable();
    let mut ends = ends.into_iter().peekable();
    let mut rehearsal = Rehearsal::default();
    let mut is_live = vec![false; arena.plan().requests().len()];
    for request in arena.plan().ids() {
        let now = ticks(arena, request).start;
        while let Some((_, ended)) = ends.next_if(|&(end, _)| end <= now) {
            if is_live[ended.index()] {
                arena.release(ended);
            }
        }
        let bytes = bytes(request);
        match arena.request(request, bytes) {
            Ok(offset) => {
                is_live[request.index()] = true;
                rehearsal.served.push(Served { request, offset, bytes });
            }
            Err(overflow) => rehearsal.overflows.push(overflow),
        }
    }
    ends.filter(|(_, id)| is_live[id.index()]).for_each(|(_, id)| arena.release(id));
    rehearsal
}

//! The lower bound that no plan can beat: the most bytes alive at any one tick.

use crate::{BufferId, Problem};

/// The max-live lower bound in bytes. Alignment is not counted, so a plan with coarse alignments may be unable to reach it.
pub fn lower_bound(problem: &Problem) -> u64 {
    u64::try_from(max_live(problem)).expect("Problem::new bounds the live bytes by u64")
}

/// The first tick at which the most bytes are alive; `None` for an empty problem.
pub fn peak_tick(problem: &Problem) -> Option<u64> {
    let mut best = None;
    let mut most = None;
    sweep(problem, |tick, live| {
        if most.is_none_or(|m| live > m) {
            (most, best) = (Some(live), Some(tick));
        }
    });
    best
}

/// The buffers alive at `tick`, in id order.
pub fn live_at(problem: &Problem, tick: u64) -> impl Iterator<Item = BufferId> + '_ {
    problem.ids().filter(move |&id| problem.buffer(id).lifetime.contains(&tick))
}

/// The bound before it is known to fit in a `u64`.
pub(crate) fn max_live(problem: &Problem) -> u128 {
    let mut most = 0;
    sweep(problem, |_, live| most = most.max(live));
    most
}

/// Calls `visit(tick, live bytes)` wherever the live bytes may change, in tick order.
pub(crate) fn sweep(problem: &Problem, mut visit: impl FnMut(u64, u128)) {
    let mut events: Vec<(u64, bool, u64)> = Vec::with_capacity(2 * problem.len());
    for b in problem.buffers() {
        events.push((b.lifetime.start, true, b.bytes));
        events.push((b.lifetime.end, false, b.bytes));
    }
    events.sort_unstable();
    let mut live = 0u128;
    let mut next = events.iter().peekable();
    while let Some(&(tick, is_birth, bytes)) = next.next() {
        // `false < true`: at one tick, deaths come before births, as half-open lifetimes want it.
        live = if is_birth { live + u128::from(bytes) } else { live - u128::from(bytes) };
        if next.peek().is_none_or(|e| e.0 != tick) {
            visit(tick, live);
        }
    }
}

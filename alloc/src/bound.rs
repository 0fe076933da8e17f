//! The lower bound on every plan's height: the most bytes alive at any one tick.

use crate::{BufferId, Problem};

/// Returns the max-live lower bound in bytes. The bound ignores alignments, so coarse alignments may force every plan
/// above the bound.
pub fn lower_bound(problem: &Problem) -> u64 {
    let most = most_live(problem).map_or(0, |(_, bytes)| bytes);
    u64::try_from(most).expect("Problem::new bounds the live bytes by u64")
}

/// Returns the first tick at which the most bytes are alive, or `None` for an empty problem.
pub fn peak_tick(problem: &Problem) -> Option<u64> {
    most_live(problem).map(|(tick, _)| tick)
}

/// Returns the buffers alive at `tick`, in id order.
pub fn live_at(problem: &Problem, tick: u64) -> impl Iterator<Item = BufferId> + '_ {
    problem.ids().filter(move |&id| problem.buffer(id).lifetime.contains(&tick))
}

/// Returns the first tick at which the most bytes are alive, and the number of these bytes. That number may still
/// exceed a `u64`, since the problem is not checked yet. Returns `None` for an empty problem.
pub(crate) fn most_live(problem: &Problem) -> Option<(u64, u128)> {
    let first = problem.buffers().iter().map(|b| b.lifetime.start).min()?;
    let mut most: Option<(u64, u128)> = None;
    sweep(problem, |tick, live| {
        if tick >= first && most.is_none_or(|(_, bytes)| live > bytes) {
            most = Some((tick, live));
        }
    });
    most
}

/// Calls `visit(tick, live bytes)` wherever the live bytes may change, in tick order.
pub(crate) fn sweep(problem: &Problem, mut visit: impl FnMut(u64, u128)) {
    if problem.end() <= 4 * problem.len() as u64 {
        // There are few enough ticks to count through them. Differences may wrap around; the running sums undo the
        // wrapping.
        let mut change = vec![0u128; problem.end() as usize + 1];
        for b in problem.buffers() {
            change[b.lifetime.start as usize] = change[b.lifetime.start as usize].wrapping_add(b.bytes.into());
            change[b.lifetime.end as usize] = change[b.lifetime.end as usize].wrapping_sub(b.bytes.into());
        }
        let mut live = 0u128;
        for (tick, change) in (0..).zip(change) {
            live = live.wrapping_add(change);
            visit(tick, live);
        }
        return;
    }
    let mut events: Vec<(u64, bool, u64)> = Vec::with_capacity(2 * problem.len());
    for b in problem.buffers() {
        events.push((b.lifetime.start, true, b.bytes));
        events.push((b.lifetime.end, false, b.bytes));
    }
    events.sort_unstable();
    let mut live = 0u128;
    let mut next = events.iter().peekable();
    while let Some(&(tick, is_birth, bytes)) = next.next() {
        // `false < true`: at one tick, deaths come before births, as half-open lifetimes require.
        live = if is_birth { live + u128::from(bytes) } else { live - u128::from(bytes) };
        if next.peek().is_none_or(|e| e.0 != tick) {
            visit(tick, live);
        }
    }
}

#[cfg(test)]
mod tests {
    use gapless_testing::prelude::*;

    use super::*;
    use crate::Buffer;

    generated! {
        /// Stretching time changes which of the two sweeps runs, but not the bound.
        #[test]
        fn stretched_time_changes_nothing(
            rows in prop::collection::vec((0..30u64, 1..30u64, 0..99u64), 0..40),
        ) {
            let stretched = |by: u64| {
                let buffers = rows.iter().map(|&(start, length, bytes)| {
                    Buffer::new(by * start..by * (start + length), bytes)
                });
                Problem::new(buffers.collect()).unwrap()
            };
            let (near, far) = (stretched(1), stretched(1_000_003));
            prop_assert_eq!(lower_bound(&near), lower_bound(&far));
            let most = (0..60).map(|t| live_at(&near, t).map(|id| near.buffer(id).bytes).sum::<u64>()).max().unwrap_or(0);
            prop_assert_eq!(lower_bound(&near), most);
            if !rows.is_empty() {
                prop_assert_eq!(peak_tick(&near).map(|t| t * 1_000_003), peak_tick(&far));
            }
        }
    }
}

//! Generated problems of every family, for checks of their plans.

use gapless_alloc::Buffer;
use gapless_alloc::synthetic::{Order, SyntheticStep};
use gapless_testing::prelude::*;

pub fn lifetimes(ticks: u64) -> impl Strategy<Value = (u64, u64)> {
    (0..ticks, 1..=ticks).prop_map(move |(start, length)| (start, start.saturating_add(length).min(ticks)))
}

pub fn buffers(count: usize, ticks: u64, bytes: impl Strategy<Value = u64>) -> impl Strategy<Value = Vec<Buffer>> {
    prop::collection::vec((lifetimes(ticks), bytes), 0..count)
        .prop_map(|list| list.into_iter().map(|((start, end), bytes)| Buffer::new(start..end, bytes)).collect())
}

/// Sizes that are zero as often as they are not.
pub fn often_none(bytes: impl Strategy<Value = u64>) -> impl Strategy<Value = u64> {
    prop_oneof![Just(0), bytes]
}

/// One event of a call stack: a call that allocates this many bytes, or a return.
type Call = Option<u64>;

fn calls(count: usize) -> impl Strategy<Value = Vec<Call>> {
    prop::collection::vec(prop::option::weighted(0.6, often_none(1..1000u64)), 1..count)
}

/// Returns the lifetimes of the calls of a call stack, which are nested or one after another. `calls` has the events
/// with their ticks. Calls that have not returned by `end` return then.
fn stack(calls: &[(u64, Call)], end: u64) -> Vec<Buffer> {
    let (mut open, mut list) = (Vec::new(), Vec::new());
    for &(tick, call) in calls {
        match call {
            Some(bytes) => open.push((tick, bytes)),
            None => list.extend(open.pop().map(|(start, bytes)| Buffer::new(start..tick, bytes))),
        }
    }
    list.extend(open.into_iter().map(|(start, bytes)| Buffer::new(start..end, bytes)));
    list
}

/// Lifetimes of which any two are nested or disjoint.
pub fn nested() -> impl Strategy<Value = Vec<Buffer>> {
    calls(100).prop_map(|calls| {
        let calls: Vec<(u64, Call)> = (0..).zip(calls).collect();
        stack(&calls, calls.len() as u64)
    })
}

/// Several call stacks at the same time. Calls of one stack happen while calls of another are open.
pub fn several_stacks() -> impl Strategy<Value = Vec<Buffer>> {
    prop::collection::vec((0..4u64, prop::option::weighted(0.6, often_none(1..1000u64))), 1..120).prop_map(|calls| {
        let end = calls.len() as u64;
        let calls_of = |number: u64| -> Vec<(u64, Call)> {
            let all = (0..).zip(&calls).filter(|(_, (stack, _))| *stack == number);
            all.map(|(tick, (_, call))| (tick, *call)).collect()
        };
        (0..4).flat_map(|number| stack(&calls_of(number), end)).collect()
    })
}

/// Sizes that are a power of two, or one byte more or less, up to the last byte of the address space.
pub fn near_powers(most: u32) -> impl Strategy<Value = u64> {
    (0..=most, 0..3u64).prop_map(|(power, off)| {
        let bytes = (1u128 << power) + u128::from(off) - 1;
        u64::try_from(bytes).unwrap_or(u64::MAX)
    })
}

/// Sizes just off a multiple of each other, with alignments that don't divide each other.
pub fn adversarial() -> impl Strategy<Value = Vec<Buffer>> {
    let bytes = prop_oneof![3 => prop::sample::select(vec![63u64, 64, 65, 127, 128, 129]), 2 => near_powers(20)];
    let alignments = prop_oneof![Just(1u64), Just(2), Just(48), Just(64), Just(96)];
    prop::collection::vec((lifetimes(12), bytes, alignments), 1..40)
        .prop_map(|list| list.into_iter().map(|((s, e), bytes, a)| Buffer::new(s..e, bytes).aligned(a)).collect())
}

pub fn step() -> impl Strategy<Value = SyntheticStep> {
    let order = prop_oneof![
        Just(Order::Accumulation),
        Just(Order::OneForwardOneBackward),
        Just(Order::Interleaved),
        Just(Order::Overlapped)
    ];
    let tokens = prop_oneof![Just(&[512u64][..]), Just(&[384, 512, 640, 1024][..])];
    (order, 1..5u64, 1..9u64, 1..5u64, tokens, any::<bool>()).prop_map(
        |(order, layers, micro_batches, stages, tokens, persistent)| SyntheticStep {
            order,
            layers,
            micro_batches,
            stages,
            tokens,
            persistent,
        },
    )
}

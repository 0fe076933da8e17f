//! The searches of the zero-bubble authors. For any input, the orders found can be used for training and keep to the
//! given limit.

use gapless_parallel::{
    Action, Costs, Error, Kind, Saved, Schedule, SearchedZb, SearchedZbv, Sends, Shape, Timeline, check, simulate,
};
use gapless_testing::prelude::*;

/// The slow count: adds up what every action keeps or frees, one after the other, and returns the maximum.
fn peak(row: &[Action], saved: Saved) -> u64 {
    let (input, weight) = (u64::from(saved.for_input), u64::from(saved.for_weight));
    let (mut live, mut peak) = (0, 0);
    for action in row {
        match action.kind {
            Kind::Forward => live += input + weight,
            Kind::BackwardInput => live -= input,
            Kind::BackwardWeight => live -= weight,
            Kind::Backward => panic!("a searched order has no whole backwards, but {action}"),
        }
        peak = peak.max(live);
    }
    peak
}

fn costs(forward: u64, backward_input: u64, backward_weight: u64, transfer: u64) -> Costs {
    let overlapped = forward + backward_input + backward_weight;
    Costs { forward, backward_input, backward_weight, overlapped, transfer }
}

/// Costs that are equal for all stages, or different for each.
fn stages() -> impl Strategy<Value = Vec<Costs>> {
    let ticks = (0_u64..30, 0_u64..30, 0_u64..30, 0_u64..12).prop_map(|(f, i, w, c)| costs(f, i, w, c));
    prop_oneof![prop::collection::vec(ticks.clone(), 1), prop::collection::vec(ticks, 1..12)]
}

fn saved() -> impl Strategy<Value = Saved> {
    let parts = (0_u32..4, 0_u32..4).prop_map(|(for_input, for_weight)| Saved { for_input, for_weight });
    prop_oneof![Just(Saved::default()), Just(Saved::WEIGHT), parts]
}

generated! {
    #![cases(400)]

    /// With one chunk per rank, a limit of a single forward is enough.
    #[test]
    fn one_chunk_trains_within_any_limit(
        (ranks, micro_batches) in (1_u32..=8, 1_u32..=20), costs in stages(), limit in 1_u32..20, saved in saved(),
    ) {
        let schedule = SearchedZb { costs, peak: Some(limit), saved };
        let rows = schedule.actions(&Shape { ranks, chunks: 1, micro_batches }).unwrap();
        prop_assert_eq!(check(&rows, ranks, micro_batches, Sends::Buffered), []);
        for row in &rows {
            prop_assert!(peak(row, saved) <= u64::from(limit) * u64::from(saved.for_input + saved.for_weight));
        }
    }

    /// For the V, 1F1B's peak is enough. With a lower limit, the search returns an order within the limit or an error
    /// that there is none.
    #[test]
    fn two_chunks_train_within_the_limit(
        (ranks, micro_batches) in (1_u32..=8, 1_u32..=20), costs in stages(), limit in 0_u32..30, saved in saved(),
    ) {
        let schedule = SearchedZbv { costs, peak: Some(limit), saved };
        match schedule.actions(&Shape { ranks, chunks: 2, micro_batches }) {
            Ok(rows) => {
                prop_assert_eq!(check(&rows, 2 * ranks, micro_batches, Sends::Buffered), []);
                for row in &rows {
                    prop_assert!(peak(row, saved) <= u64::from(limit) * u64::from(saved.for_input + saved.for_weight));
                }
            }
            Err(error) => {
                prop_assert!(limit < 2 * ranks, "{}", error);
                prop_assert_eq!(error, Error::Room { schedule: "zbv-searched", needed: 2 * ranks, peak: limit });
            }
        }
    }
}

/// Without room for a single forward, there is no order.
#[test]
fn no_room_is_refused() {
    let shape = Shape { ranks: 3, chunks: 1, micro_batches: 2 };
    let error = SearchedZb { peak: Some(0), ..SearchedZb::default() }.actions(&shape).unwrap_err();
    assert_eq!(error, Error::Room { schedule: "zb-searched", needed: 1, peak: 0 });
}

/// Returns the longest time from a rank's first action to the end of its last.
fn span(timeline: &Timeline) -> u64 {
    timeline.ranks.iter().map(|spans| spans.last().unwrap().end - spans[0].start).max().unwrap()
}

/// The purpose of the searches: if F, I and W take the same time, no rank waits after its first action.
#[test]
fn zero_bubble() {
    for (ranks, micro_batches) in [(2, 4), (2, 9), (4, 8), (4, 16), (6, 20), (8, 16), (8, 32)] {
        let one = SearchedZb { peak: Some(2 * ranks), ..SearchedZb::default() };
        let two = SearchedZbv::default();
        for (schedule, chunks) in [(&one as &dyn Schedule, 1), (&two, 2)] {
            let table = schedule.table(&Shape { ranks, chunks, micro_batches }).unwrap();
            let found = span(&simulate(&table, &Costs::default()).unwrap());
            let work = u64::from(3 * chunks * micro_batches);
            assert_eq!(found, work, "{}: {ranks} ranks, {micro_batches} micro-batches", schedule.name());
        }
    }
}

/// The search takes the memory freed by each gradient into account: a forward may use memory that an input gradient
/// frees, without waiting for the weight gradient.
#[test]
fn room_is_what_the_gradients_give_back() {
    let ticks = costs(10, 11, 7, 1);
    for (ranks, micro_batches, limit) in [(2, 8, 3), (4, 16, 5), (6, 12, 9)] {
        let span_with = |saved| {
            let schedule = SearchedZb { costs: vec![ticks], peak: Some(limit), saved };
            let table = schedule.table(&Shape { ranks, chunks: 1, micro_batches }).unwrap();
            span(&simulate(&table, &ticks).unwrap())
        };
        let (early, late) = (span_with(Saved::default()), span_with(Saved::WEIGHT));
        assert!(early < late, "{early} against {late} on {ranks} ranks");
    }
}

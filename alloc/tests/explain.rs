//! Explanations. On small problems, the remedies are compared with the fewest changes found by exhaustion. On larger
//! steps, there is no such comparison.

mod exhaustion;

use std::time::Duration;

use exhaustion::{exhausted, fits};
use gapless_alloc::synthetic::{Order, SyntheticStep};
use gapless_alloc::{Buffer, BufferId, Change, Explanation, Options, Problem, Remedy, check, explain, plan};
use gapless_testing::prelude::*;

fn within(capacity: u64) -> Options {
    Options { capacity: Some(capacity), ..Options::default() }
}

/// Returns the least size of a set of changes that makes the problem fit, or `None` if no set does. `offers` returns
/// the possible changes of each buffer with their sizes. The first entry is to change nothing.
fn least(problem: &Problem, capacity: u64, offers: impl Fn(BufferId) -> Vec<(u64, Option<Change>)>) -> Option<u64> {
    let offers: Vec<_> = problem.ids().map(offers).collect();
    let mut sets: Vec<(u64, Vec<Change>)> = vec![(0, Vec::new())];
    for offers in offers {
        let with = |(size, set): &(u64, Vec<Change>)| -> Vec<(u64, Vec<Change>)> {
            offers.iter().map(|(more, change)| (size + more, set.iter().chain(change).cloned().collect())).collect()
        };
        sets = sets.iter().flat_map(with).collect();
    }
    sets.sort_by_key(|set| set.0);
    let suffices = |changes: &[Change]| {
        let remedy = Remedy { changes: changes.to_vec(), size: 0, at_least: 0 };
        Explanation::apply(problem, &remedy).is_some_and(|changed| fits(&changed, capacity))
    };
    sets.iter().find(|(_, changes)| suffices(changes)).map(|(size, _)| *size)
}

generated! {
    #![cases(128)]

    #[test]
    fn remedies_suffice_and_bounds_hold(
        list in prop::collection::vec((0..4u64, 1..5u64, 1..4u64, prop_oneof![3 => Just(1u64), 1 => Just(2)]), 1..6),
        grouped in any::<bool>(),
        fence in prop::option::of((0..6u64, 1..3u64)),
        below in 1..5u64,
    ) {
        let list: Vec<Buffer> = list.iter().map(|&(s, n, b, a)| Buffer::new(s..s + n, b).aligned(a)).collect();
        let problem = Problem::new(list).unwrap();
        let problem = match fence {
            Some((start, bytes)) => problem.forbid(start..start + bytes).unwrap(),
            None => problem,
        };
        let problem = match grouped && problem.len() > 2 {
            true => problem.clone().adjacent(vec![BufferId(0), BufferId(2)]).unwrap_or(problem),
            false => problem,
        };
        let capacity = exhausted(&problem).saturating_sub(below);
        let solution = plan(&problem, &Options { work: 1_000_000, ..Options::default() });
        let explanation = explain(&problem, &[], &solution, &within(capacity));
        prop_assert_eq!(explanation.is_some(), solution.height > capacity);
        let Some(explanation) = explanation else { return Ok(()) };
        for remedy in explanation.remedies() {
            let changed = Explanation::apply(&problem, remedy);
            prop_assert!(changed.is_some_and(|changed| fits(&changed, capacity)), "{:?} {:?}", problem, remedy);
            prop_assert!(remedy.at_least <= remedy.size);
        }
        // The part that is named does not fit by itself. If one is proven not to fit, it is named.
        let others = problem.ids().filter(|id| !explanation.part.contains(id)).map(Change::LeaveOut).collect();
        let part = Explanation::apply(&problem, &Remedy { changes: others, size: 0, at_least: 0 });
        prop_assert!(explanation.part.is_empty() || part.is_none_or(|part| !fits(&part, capacity)), "{:?}", explanation);
        prop_assert_eq!(explanation.part.is_empty(), solution.bound() <= capacity, "{:?}", explanation);
        let least_left_out =
            least(&problem, capacity, |id| vec![(0, None), (1, Some(Change::LeaveOut(id)))]).unwrap();
        prop_assert!(explanation.leave_out.at_least <= least_left_out);
        prop_assert!(least_left_out <= explanation.leave_out.size);
        let sizes = |id: BufferId| -> Vec<(u64, Option<Change>)> {
            (0..=problem.buffer(id).bytes).map(|by| (by, (by > 0).then_some(Change::Shrink(id, by)))).collect()
        };
        let least_bytes = least(&problem, capacity, sizes).unwrap();
        prop_assert!(explanation.shrink.at_least <= least_bytes);
        prop_assert!(least_bytes <= explanation.shrink.size);
        let grouped = problem.groups().iter().flat_map(|g| g.members.clone()).collect::<Vec<_>>();
        let pauses = |id: BufferId| -> Vec<(u64, Option<Change>)> {
            let ticks = &problem.buffer(id).lifetime;
            let inside = ticks.start + 1..ticks.end - 1;
            let pause = (!inside.is_empty() && !grouped.contains(&id)).then_some((1, Some(Change::Free(id, inside))));
            [(0, None)].into_iter().chain(pause).collect()
        };
        let least_freed = least(&problem, capacity, pauses);
        if let Some(free) = &explanation.free {
            // `pauses` offers the longest range that a change can free: the lifetime without its first and last tick.
            prop_assert!(least_freed.is_some_and(|least| free.at_least <= least && least <= free.size));
        }
    }
}

/// If a step exceeds its capacity by little, few changes suffice, and the explanation proves that fewer changes don't.
#[test]
fn remedies_of_steps_are_proven_smallest() {
    let base = SyntheticStep { layers: 2, persistent: true, ..SyntheticStep::default() };
    for (step, percent) in [
        (SyntheticStep { order: Order::Accumulation, ..base }, 98),
        (base, 98),
        (SyntheticStep { order: Order::Interleaved, ..base }, 98),
        (SyntheticStep { persistent: false, micro_batches: 3, ..base }, 90),
    ] {
        let problem = step.problem().unwrap();
        let solution = plan(&problem, &Options::default());
        // The capacity is a multiple of the alignment, since buffers shrink in whole units.
        let capacity = (solution.height / 100 * percent).next_multiple_of(64);
        let explanation = explain(&problem, &[], &solution, &within(capacity)).unwrap();
        assert!(explanation.leave_out.is_smallest(), "{step:?}: {:?}", explanation.leave_out);
        assert!(explanation.shrink.is_smallest(), "{step:?}: {:?}", explanation.shrink);
        assert!(explanation.free.as_ref().is_some_and(Remedy::is_smallest), "{step:?}: {:?}", explanation.free);
        suffice(&problem, &explanation);
    }
}

/// The planner finds no plan from which an explanation could start.
#[test]
fn what_no_address_space_holds_is_explained() {
    let problem = Problem::new(vec![Buffer::new(0..2, u64::MAX - 26).aligned(27)]).unwrap().forbid(27..37).unwrap();
    let solution = plan(&problem, &Options::default());
    assert!(solution.offsets.is_empty());
    suffice(&problem, &explain(&problem, &[], &solution, &within(1 << 24)).unwrap());
}

/// The excess of two buffers of the largest possible size exceeds a `u64`.
#[test]
fn the_largest_changes_are_counted() {
    let problem = Problem::new(vec![Buffer::new(0..2, u64::MAX), Buffer::new(3..5, u64::MAX)]).unwrap();
    let explanation = explain(&problem, &[], &plan(&problem, &Options::default()), &within(8)).unwrap();
    assert_eq!((explanation.shrink.size, explanation.shrink.at_least), (u64::MAX, u64::MAX));
    suffice(&problem, &explanation);
}

/// Even for very small capacities, the remedies suffice, and they are not much larger than the lower bound.
#[test]
fn remedies_of_tight_capacities_suffice() {
    let problem = SyntheticStep::default().problem().unwrap();
    let solution = plan(&problem, &Options::default());
    for percent in [95, 80, 50] {
        let capacity = solution.height / 100 * percent;
        let explanation = explain(&problem, &[], &solution, &within(capacity)).unwrap();
        suffice(&problem, &explanation);
        let Remedy { size, at_least, .. } = explanation.leave_out;
        assert!(size <= 2 * at_least, "{size} instead of at least {at_least} buffers left out at {percent} %");
    }
}

/// Once the deadline has passed, no more plans are made. The remedies found by then suffice, and the text says that
/// there may be smaller ones.
#[test]
fn a_deadline_holds_for_explanations() {
    let step = SyntheticStep { layers: 2, persistent: true, ..SyntheticStep::default() };
    let problem = step.problem().unwrap();
    let solution = plan(&problem, &Options::default());
    let capacity = (solution.height / 100 * 98).next_multiple_of(64);
    let late = Options { deadline: Some(Duration::ZERO), ..within(capacity) };
    let late = explain(&problem, &[], &solution, &late).unwrap();
    suffice(&problem, &late);
    assert!(late.cut_short && late.to_string().contains("the deadline passed"), "{late}");
    let above = problem.ids().filter(|&id| solution.offsets[id.index()] + problem.buffer(id).bytes > capacity);
    let mut left_out: Vec<BufferId> = late.leave_out.changes.iter().map(Change::buffer).collect();
    left_out.sort_unstable();
    assert_eq!(left_out, above.collect::<Vec<_>>());
    assert_eq!((late.free, late.shrink.at_least), (None, solution.height - capacity));
    // A deadline beyond what any clock can represent counts as no deadline.
    let patient = Options { deadline: Some(Duration::MAX), ..within(capacity) };
    let patient = explain(&problem, &[], &solution, &patient).unwrap();
    assert!(!patient.cut_short && !patient.to_string().contains("the deadline passed"), "{patient}");
}

fn suffice(problem: &Problem, explanation: &Explanation) {
    for remedy in explanation.remedies() {
        assert!(remedy.at_least <= remedy.size);
        let changed = Explanation::apply(problem, remedy).unwrap();
        let plan = plan(&changed, &Options { capacity: Some(explanation.capacity), ..Options::default() });
        check(&changed, &plan.offsets, Some(explanation.capacity)).unwrap_or_else(|v| panic!("{v:?} {remedy:?}"));
    }
}

//! The planner on generated problems of every family, compared with the checker, and on tiny problems compared with
//! exhaustion.

mod exhaustion;
mod families;

use std::ops::Range;
use std::time::Duration;

use exhaustion::exhausted;
use families::{adversarial, buffers, lifetimes, near_powers, nested, often_none, several_stacks, step};
use gapless_alloc::synthetic::{Order, SyntheticStep};
use gapless_alloc::{Buffer, BufferId, Error, Fit, Options, Problem, Proof, Solution, StopReason, check, plan};
use gapless_testing::prelude::*;

/// Options with so little work that hundreds of problems are planned in seconds.
fn options() -> Options {
    Options { work: 300_000, ..Options::default() }
}

/// Plans a problem and checks every claim of the solution.
fn planned(problem: &Problem, options: &Options) -> Solution {
    let solution = plan(problem, options);
    if let Err(violations) = check(problem, &solution.offsets, None) {
        panic!("{violations:?} {problem:?} {solution:?}");
    }
    let ends = problem.buffers().iter().zip(&solution.offsets).filter(|(b, _)| b.bytes > 0).map(|(b, at)| at + b.bytes);
    assert_eq!(solution.height, ends.max().unwrap_or(0));
    assert!(solution.lower_bound <= solution.height);
    match solution.proof {
        Proof::MaxLive => assert_eq!(solution.height, solution.lower_bound),
        Proof::Constraints { bound } => assert_eq!(solution.height, bound),
        Proof::Exhausted => assert!(solution.height > solution.lower_bound),
        Proof::None { bound } => assert!(bound < solution.height && solution.lower_bound <= bound),
    }
    if let Some(capacity) = options.capacity {
        assert_eq!(solution.fit == Fit::Fits, solution.height <= capacity);
    }
    solution
}

generated! {
    #![cases(64)]

    #[test]
    fn random_problems_pass_the_checker(list in buffers(80, 40, often_none(0..500u64))) {
        planned(&Problem::new(list).unwrap(), &options());
    }

    /// If a buffer ends when it starts, or before, the problem is refused with an error that names this buffer. No
    /// other problem is refused.
    #[test]
    fn empty_lifetimes_are_refused(
        list in prop::collection::vec((0..20u64, 0..6u64, prop::bool::weighted(0.02), often_none(1..99u64)), 0..30),
    ) {
        let ticks = |&(start, length, is_backwards, _): &(u64, u64, bool, u64)| match is_backwards {
            true => start + length..start,
            // Few lifetimes are empty, so that many problems have no empty lifetime.
            false => start..start + if length == 0 && start % 7 != 0 { 1 } else { length },
        };
        let list: Vec<Buffer> = list.iter().map(|row| Buffer::new(ticks(row), row.3)).collect();
        let first = list.iter().position(|b| b.lifetime.start >= b.lifetime.end);
        match (Problem::new(list.clone()), first) {
            (Ok(problem), None) => { planned(&problem, &options()); }
            (Err(error), Some(buffer)) => {
                let Range { start, end } = list[buffer].lifetime;
                let expected = format!("buffer {buffer}: lifetime [{start}, {end}) is empty; a buffer must end after it starts");
                prop_assert_eq!(error.to_string(), expected);
            }
            (result, first) => prop_assert!(false, "{:?} where the first empty one is {:?}", result, first),
        }
    }

    #[test]
    fn several_stacks_pass_the_checker(list in several_stacks()) {
        planned(&Problem::new(list).unwrap(), &options());
    }

    #[test]
    fn nested_problems_meet_the_bound(list in nested()) {
        let solution = planned(&Problem::new(list).unwrap(), &options());
        prop_assert_eq!(solution.proof, Proof::MaxLive);
    }

    #[test]
    fn adversarial_problems_pass_the_checker(list in adversarial()) {
        planned(&Problem::new(list).unwrap(), &options());
    }

    #[test]
    fn training_steps_of_one_length_meet_the_bound(step in step()) {
        let solution = planned(&step.problem().unwrap(), &Options { work: 10_000_000, ..Options::default() });
        let may_miss = step.tokens.len() > 1 || step.order == Order::Overlapped;
        prop_assert!(may_miss || solution.proof == Proof::MaxLive, "{:?}", solution.proof);
    }

    /// Every part gets a plan, however small the budget is, and however many parts come after the part on which the
    /// budget was spent.
    #[test]
    fn any_budget_gives_a_plan(
        list in prop_oneof![
            buffers(80, 40, 0..500u64),
            nested(),
            several_stacks(),
            adversarial(),
            step().prop_map(|step| step.problem().unwrap().buffers().to_vec()),
        ],
        copies in 1..4u64,
        work in prop::sample::select(vec![0u64, 1, 100, 10_000]),
    ) {
        let ticks = list.iter().map(|b| b.lifetime.end).max().unwrap_or(0);
        let later = |b: &Buffer, by: u64| Buffer { lifetime: b.lifetime.start + by..b.lifetime.end + by, ..b.clone() };
        let list = (0..copies).flat_map(|copy| list.iter().map(move |b| later(b, copy * ticks))).collect();
        planned(&Problem::new(list).unwrap(), &Options { work, ..Options::default() });
    }

    /// Near the end of the address space there may be no plan. A wrong plan or an arithmetic overflow must not occur.
    #[test]
    fn huge_sizes_are_planned_or_refused(
        list in prop_oneof![buffers(12, 6, (u64::MAX / 4)..=u64::MAX), buffers(12, 6, near_powers(64))],
        small in buffers(12, 6, 0..9u64),
        fences in prop::collection::vec((0..u64::MAX / 2, prop_oneof![1..99u64, 1..u64::MAX / 4]), 0..3),
        capacity in prop::option::of(any::<u64>()),
    ) {
        let list = list.into_iter().chain(small).collect();
        if let Some(problem) = constrained(list, &[], &fences) {
            let options = Options { capacity, ..options() };
            let solution = plan(&problem, &options);
            if solution.offsets.is_empty() && !problem.is_empty() {
                prop_assert_ne!(solution.fit, Fit::Fits);
            } else {
                planned(&problem, &options);
            }
        }
    }

    /// If more bytes are alive than there are addresses, the problem is refused with a tick at which this happens.
    #[test]
    fn too_much_is_refused_where_it_is_alive(list in buffers(6, 6, near_powers(64))) {
        let alive = |tick: u64| -> u128 {
            list.iter().filter(|b| b.lifetime.contains(&tick)).map(|b| u128::from(b.bytes)).sum()
        };
        let most = (0..6).map(alive).max().unwrap_or(0);
        match Problem::new(list.clone()) {
            Ok(_) => prop_assert!(most <= u128::from(u64::MAX)),
            Err(Error::TooLarge { bytes, tick }) => {
                prop_assert!(bytes > u128::from(u64::MAX));
                prop_assert_eq!((bytes, alive(tick)), (most, most));
            }
            Err(error) => prop_assert!(false, "{}", error),
        }
    }

    #[test]
    fn times_of_any_size_are_planned(list in buffers(20, u64::MAX, 1..9u64)) {
        planned(&Problem::new(list).unwrap(), &options());
    }

    #[test]
    fn the_plan_does_not_depend_on_threads_or_runs(list in buffers(60, 30, 1..99u64)) {
        let problem = Problem::new(list).unwrap();
        let one = plan(&problem, &Options { threads: Some(1), ..options() });
        let two = plan(&problem, &Options { threads: Some(2), ..options() });
        prop_assert_eq!(one.offsets, two.offsets);
        prop_assert_eq!((one.height, one.proof, one.stats), (two.height, two.proof, two.stats));
    }

    #[test]
    fn constraints_are_kept(
        list in buffers(40, 20, prop_oneof![1 => Just(0), 3 => 1..60u64]),
        pins in prop::collection::vec((any::<prop::sample::Index>(), 0..40u64), 0..4),
        fences in prop::collection::vec((0..300u64, 1..40u64), 0..3),
        groups in prop::collection::vec(
            (prop::sample::subsequence((0..40u32).collect::<Vec<_>>(), 0..5), any::<bool>()), 0..4),
    ) {
        if let Some(problem) = constrained(list, &pins, &fences).and_then(|problem| with_groups(problem, &groups)) {
            let solution = plan(&problem, &options());
            // The pins and forbidden ranges may rule out every place of a group. Then there is no plan, and no offsets
            // are returned.
            if !solution.offsets.is_empty() {
                planned(&problem, &options());
            }
        }
    }

    /// Every claim is compared with the height that exhaustion finds.
    #[test]
    fn tiny_problems_are_solved(
        list in prop::collection::vec(
            (lifetimes(4), prop_oneof![1 => Just(0), 3 => 1..5u64], prop_oneof![4 => Just(1u64), 1 => Just(2), 1 => Just(3)]),
            1..7),
        pins in prop::collection::vec((any::<prop::sample::Index>(), 0..3u64), 0..2),
        fences in prop::collection::vec((0..8u64, 1..3u64), 0..2),
        capacity in 1..16u64,
    ) {
        let list = list.into_iter().map(|((s, e), bytes, a)| Buffer::new(s..e, bytes).aligned(a)).collect();
        if let Some(problem) = constrained(list, &pins, &fences) {
            let least = exhausted(&problem);
            let solution = planned(&problem, &Options { work: 50_000_000, ..Options::default() });
            prop_assert_eq!(solution.height, least, "{:?} {:?}", solution.proof, problem);
            let solution = planned(&problem, &Options { capacity: Some(capacity), ..options() });
            prop_assert!(solution.fit != Fit::Impossible || capacity < least);
            prop_assert_eq!(solution.height <= capacity, least <= capacity);
        }
    }

    /// Problems with ragged groups are compared with the height that exhaustion finds. No claim may be wrong, and the
    /// lowest plan must be found.
    #[test]
    fn tiny_groups_are_solved(
        list in prop::collection::vec((lifetimes(4), prop_oneof![1 => Just(0), 3 => 1..4u64]), 2..6),
        fences in prop::collection::vec((0..8u64, 1..3u64), 0..2),
        groups in prop::sample::subsequence((0..6u32).collect::<Vec<_>>(), 2..=4),
        other in prop::sample::subsequence((0..6u32).collect::<Vec<_>>(), 0..=3),
        any_order in (any::<bool>(), any::<bool>()),
        capacity in 1..16u64,
    ) {
        let list = list.into_iter().map(|((s, e), bytes)| Buffer::new(s..e, bytes)).collect();
        let other = other.into_iter().filter(|i| !groups.contains(i)).collect();
        let groups = [(groups, any_order.0), (other, any_order.1)];
        if let Some(problem) = constrained(list, &[], &fences).and_then(|problem| with_groups(problem, &groups)) {
            let least = exhausted(&problem);
            let solution = planned(&problem, &Options { work: 1_000_000, ..Options::default() });
            let wrong = matches!(solution.proof, Proof::None { bound } if bound > least);
            prop_assert!(!wrong, "{:?}", solution.proof);
            prop_assert_eq!(solution.height, least, "{:?} {:?}", solution.proof, problem);
            let solution = planned(&problem, &Options { capacity: Some(capacity), ..options() });
            prop_assert!(solution.fit != Fit::Impossible || capacity < least);
        }
    }

    /// Except for the sweeps that give every problem a plan, no step spends more than its share.
    #[test]
    fn the_work_is_a_limit(list in dense(), step in step(), work in 0..60_000u64) {
        for problem in [Problem::new(list).unwrap(), step.problem().unwrap()] {
            let spent = planned(&problem, &Options { work, ..Options::default() }).stats.work;
            let limit = work + work / 4 + 60 * problem.len() as u64;
            prop_assert!(spent <= limit, "{spent} of {work} for {} buffers", problem.len());
        }
    }
}

/// Creates a problem with these constraints. Returns `None` if the constraints contradict each other directly.
fn constrained(mut list: Vec<Buffer>, pins: &[(prop::sample::Index, u64)], fences: &[(u64, u64)]) -> Option<Problem> {
    for &(index, at) in if list.is_empty() { &[] } else { pins } {
        let b = index.get(&list).clone();
        let at = at * b.alignment;
        *index.get_mut(&mut list) = b.at(at);
    }
    let problem = Problem::new(list).ok()?;
    fences.iter().try_fold(problem, |problem, &(start, bytes)| problem.forbid(start..start + bytes).ok())
}

/// Two steps whose planning uses random choices. The plan of one step meets its bound; so far, planning the other step
/// spends all its work.
#[test]
fn chance_does_not_depend_on_threads() {
    for stages in [1, 2] {
        let step =
            SyntheticStep { order: Order::Overlapped, layers: 4, stages, micro_batches: 8, ..SyntheticStep::default() };
        let problem = step.problem().unwrap();
        let solve = |threads| planned(&problem, &Options { threads: Some(threads), work: 10_000_000, ..options() });
        let [one, two, three] = [1, 2, 3].map(solve);
        assert!(stages > 1 || one.proof == Proof::MaxLive, "{:?}", one.proof);
        assert_eq!((&one.offsets, one.stats), (&two.offsets, two.stats));
        assert_eq!((&one.offsets, one.stats), (&three.offsets, three.stats));
    }
}

/// These steps are full to the byte once per layer, with a forward and a backward in turns. Only a search that tries
/// many layouts between one full tick and the next finds a plan.
#[test]
fn a_step_that_is_full_once_per_layer_meets_the_bound() {
    for (layers, stages, micro_batches) in [(3, 2, 8), (4, 2, 8), (6, 2, 8), (4, 3, 8), (4, 4, 12), (8, 4, 12)] {
        let step =
            SyntheticStep { order: Order::Overlapped, layers, stages, micro_batches, ..SyntheticStep::default() };
        let solution = planned(&step.problem().unwrap(), &Options::default());
        assert_eq!(solution.proof, Proof::MaxLive, "{layers} layers, {stages} stages: gap {}", solution.gap());
    }
}

/// Plans of small steps meet the bound before a search has spent much work in vain.
#[test]
fn a_small_step_that_is_full_once_per_layer_costs_little() {
    for (layers, stages, micro_batches) in [(4, 2, 8), (5, 2, 8), (4, 3, 8), (4, 4, 12), (8, 4, 12)] {
        let step =
            SyntheticStep { order: Order::Overlapped, layers, stages, micro_batches, ..SyntheticStep::default() };
        let solution = planned(&step.problem().unwrap(), &Options { work: 20_000_000, ..Options::default() });
        assert_eq!(solution.proof, Proof::MaxLive, "{layers} layers, {stages} stages: gap {}", solution.gap());
    }
}

/// Buffers of many sizes, of which dozens are alive at once.
fn dense() -> impl Strategy<Value = Vec<Buffer>> {
    let buffer = (0..300u64, 1..60u64, 1..1_000u64, prop::sample::select(vec![1u64, 1, 1, 16]));
    let buffer = buffer.prop_map(|(start, ticks, bytes, a)| Buffer::new(start..start + ticks, bytes).aligned(a));
    prop::collection::vec(buffer, 100..400)
}

#[test]
fn a_capacity_gets_a_verdict() {
    let problem = Problem::new(vec![Buffer::new(0..2, 10), Buffer::new(1..3, 10), Buffer::new(2..4, 5)]).unwrap();
    let at = |capacity| plan(&problem, &Options { capacity: Some(capacity), ..Options::default() });
    assert_eq!((at(20).fit, at(20).stop_reason), (Fit::Fits, StopReason::Proven));
    assert_eq!(at(19).fit, Fit::Impossible);
    // The pin rules out a height of 20 bytes, although at most 20 bytes are alive at any tick.
    let pinned = Problem::new(vec![Buffer::new(0..2, 10).at(5), Buffer::new(1..3, 10)]).unwrap();
    let solution = plan(&pinned, &Options { capacity: Some(20), ..Options::default() });
    assert_eq!((solution.fit, solution.height, solution.lower_bound), (Fit::Impossible, 25, 20));
}

/// An unchanged problem keeps every address. An additional buffer moves few of the others and costs no height.
#[test]
fn a_warm_start_keeps_addresses() {
    let problem = SyntheticStep { micro_batches: 6, ..SyntheticStep::default() }.problem().unwrap();
    let cold = plan(&problem, &Options::default());
    let warm = |earlier: &[u64], problem: &Problem| {
        let earlier = problem.ids().map(|id| earlier.get(id.index()).copied()).collect();
        planned(problem, &Options { warm_start: Some(earlier), ..Options::default() })
    };
    let same = warm(&cold.offsets, &problem);
    assert_eq!((same.offsets, same.stats.kept), (cold.offsets.clone(), problem.len()));
    let mut list = problem.buffers().to_vec();
    list.push(Buffer::new(100..140, 1 << 20).aligned(64));
    let changed = Problem::new(list).unwrap();
    let solution = warm(&cold.offsets, &changed);
    assert_eq!(solution.height, plan(&changed, &Options::default()).height);
    assert!(solution.stats.kept > problem.len() / 2, "kept {} of {}", solution.stats.kept, problem.len());
}

/// Planning with earlier addresses keeps to the deadline, too.
#[test]
fn a_warm_start_keeps_the_deadline() {
    let problem = SyntheticStep { micro_batches: 6, ..SyntheticStep::default() }.problem().unwrap();
    let earlier = Some(problem.ids().map(|id| Some(64 * u64::from(id.0))).collect());
    let late = Options { deadline: Some(Duration::ZERO), ..Options::default() };
    let cold = planned(&problem, &late);
    let warm = planned(&problem, &Options { warm_start: earlier.clone(), ..late });
    let patient = planned(&problem, &Options { warm_start: earlier, ..Options::default() });
    assert_eq!((warm.stats.work, warm.stop_reason), (cold.stats.work, cold.stop_reason));
    assert!(patient.stats.work > 2 * warm.stats.work, "{} and {}", patient.stats.work, warm.stats.work);
}

/// The members of a group, and whether the planner chooses their order.
type Grouped = (Vec<u32>, bool);

fn with_groups(problem: Problem, groups: &[Grouped]) -> Option<Problem> {
    let count = problem.len() as u32;
    groups.iter().try_fold(problem, |problem, (members, any_order)| {
        let members = members.iter().filter(|&&i| i < count).map(|&i| BufferId(i)).collect();
        if *any_order { problem.adjacent(members).ok() } else { problem.contiguous(members).ok() }
    })
}

#[test]
fn groups_lie_together() {
    let list: Vec<Buffer> = (0..6).map(|k| Buffer::new(k..k + 4, 64 * (k + 1)).aligned(64)).collect();
    for any_order in [false, true] {
        let problem = with_groups(Problem::new(list.clone()).unwrap(), &[(vec![4, 1, 3], any_order)]).unwrap();
        planned(&problem, &Options::default());
    }
}

/// The middle one of three members is short-lived. A later buffer takes the bytes that this member leaves.
#[test]
fn short_lived_members_leave_their_bytes_to_others() {
    let list = vec![Buffer::new(0..4, 8), Buffer::new(0..2, 8), Buffer::new(0..4, 8), Buffer::new(2..4, 8)];
    for any_order in [false, true] {
        let problem = with_groups(Problem::new(list.clone()).unwrap(), &[(vec![0, 1, 2], any_order)]).unwrap();
        assert_eq!(planned(&problem, &Options::default()).proof, Proof::MaxLive, "any order: {any_order}");
    }
}

/// In the given order, the group must start at 4, so that its second member is aligned. Another order starts at 0.
#[test]
fn an_order_is_chosen_that_alignments_allow() {
    let list = vec![Buffer::new(0..2, 4), Buffer::new(0..2, 8).aligned(8), Buffer::new(0..2, 4)];
    for (any_order, height) in [(false, 20), (true, 16)] {
        let problem = with_groups(Problem::new(list.clone()).unwrap(), &[(vec![0, 1, 2], any_order)]).unwrap();
        let solution = planned(&problem, &Options::default());
        assert_eq!((solution.height, solution.bound()), (height, height), "{:?}", solution.proof);
    }
    let impossible = vec![Buffer::new(0..2, 4).aligned(8), Buffer::new(0..2, 4).aligned(8)];
    let error = Problem::new(impossible).unwrap().adjacent(vec![BufferId(0), BufferId(1)]).unwrap_err();
    assert!(error.to_string().contains("misses its alignment"), "{error}");
}

/// The proofs hold for every order of a group, not only for the order in which its members are stacked first.
#[test]
fn no_order_is_ruled_out_without_proof() {
    let pinned = vec![Buffer::new(0..1, 1).at(2), Buffer::new(0..1, 1)];
    let problem = with_groups(Problem::new(pinned).unwrap(), &[(vec![0, 1], true)]).unwrap();
    let solution = planned(&problem, &Options { capacity: Some(3), ..Options::default() });
    assert_eq!((solution.fit, &solution.offsets[..]), (Fit::Fits, &[2, 1][..]));
    let aligned = vec![Buffer::new(0..1, 4), Buffer::new(0..1, 8).aligned(8)];
    let problem = Problem::new(aligned).unwrap().forbid(0..4).unwrap();
    let solution = planned(&with_groups(problem, &[(vec![0, 1], true)]).unwrap(), &Options::default());
    assert_eq!((solution.height, &solution.offsets[..]), (16, &[4, 8][..]));
}

/// A buffer of zero bytes, too, stays at its pin and in its place in a group.
#[test]
fn empty_buffers_stay_at_their_pins() {
    let list =
        vec![Buffer::new(0..2, 0).at(126), Buffer::new(0..3, 8), Buffer::new(1..2, 0), Buffer::new(0..2, 0).at(4)];
    planned(&Problem::new(list.clone()).unwrap(), &Options::default());
    for members in [vec![0, 2], vec![1, 2]] {
        planned(&with_groups(Problem::new(list.clone()).unwrap(), &[(members, true)]).unwrap(), &Options::default());
    }
}

/// Groups keep their addresses from an earlier plan if that costs no height.
#[test]
fn a_warm_start_keeps_groups() {
    let list: Vec<Buffer> = (0..30).map(|k| Buffer::new(k..k + 4 + k % 3, 64 * (k % 5 + 1)).aligned(64)).collect();
    let problem =
        with_groups(Problem::new(list).unwrap(), &[(vec![4, 6, 5], false), (vec![14, 15, 17], true)]).unwrap();
    let cold = planned(&problem, &Options::default());
    let earlier = cold.offsets.iter().map(|&at| Some(at)).collect();
    let warm = planned(&problem, &Options { warm_start: Some(earlier), ..Options::default() });
    assert_eq!((warm.height, warm.stats.kept), (cold.height, problem.len()));
}

/// The pin would put the group's other member onto a forbidden range. So there is no plan, and no offsets are returned.
#[test]
fn pins_that_contradict_each_other_give_no_plan() {
    let list = vec![Buffer::new(0..1, 52).at(18), Buffer::new(0..1, 20), Buffer::new(0..1, 1)];
    let problem = Problem::new(list).unwrap().forbid(70..71).unwrap();
    let problem = problem.contiguous(vec![BufferId(0), BufferId(1)]).unwrap();
    let solution = plan(&problem, &options());
    assert!(solution.offsets.is_empty() && solution.fit == Fit::Unknown, "{solution:?}");
}

//! Tiny problems with constraints of every kind. Each claim of the planner is compared with an exhaustive search.

mod exhaustion;

use exhaustion::{fits, least};
use gapless_alloc::{
    Arrangement, Buffer, BufferId, Change, Explanation, Fit, Gap, Group, Options, Pieces, Problem, Proof, Remedy,
    check, explain, plan, plan_pools,
};
use gapless_testing::prelude::*;

/// Offsets that the exhaustive search may try for one problem.
const STEPS: u64 = 100_000;

/// The highest plan that the exhaustive search looks for.
const MOST: u64 = 40;

/// A buffer: first tick, ticks, bytes, alignment and, perhaps, a pin in units of the alignment.
type Row = (u64, u64, u64, u64, Option<u64>);

fn rows() -> impl Strategy<Value = Vec<Row>> {
    let alignments = prop_oneof![4 => Just(1u64), 1 => Just(2), 1 => Just(3), 1 => Just(4), 1 => Just(6)];
    let bytes = prop_oneof![1 => Just(0), 5 => 1..5u64];
    prop::collection::vec((0..4u64, 1..4u64, bytes, alignments, prop::option::weighted(0.15, 0..4u64)), 1..7)
}

/// A group: its kind and its members with their distances. A pair to keep apart is a group of the last kind.
type Together = (u8, Vec<(prop::sample::Index, u64)>);

fn groups() -> impl Strategy<Value = Vec<Together>> {
    let distances = prop_oneof![6 => 0..4u64, 1 => 4..20u64];
    let members = prop::collection::vec((any::<prop::sample::Index>(), distances), 2..5);
    prop::collection::vec((0..4u8, members), 0..3)
}

/// A gap: its buffer, its first tick after the birth, its ticks and, perhaps, the bytes that are needed.
type GapRow = (prop::sample::Index, u64, u64, Option<(u64, u64)>);

fn gaps() -> impl Strategy<Value = Vec<GapRow>> {
    let window = prop::option::of((0..3u64, 0..3u64));
    prop::collection::vec((any::<prop::sample::Index>(), 0..3u64, 1..3u64, window), 0..3)
}

/// Creates the problem. Constraints that contradict the others directly are left out.
fn problem(rows: &[Row], groups: &[Together], fences: &[(u64, u64)]) -> Problem {
    let mut list: Vec<Buffer> = Vec::new();
    for &(start, ticks, bytes, alignment, pin) in rows {
        let buffer = Buffer::new(start..start + ticks, bytes).aligned(alignment);
        list.push(Buffer { offset: pin.map(|pin| pin * alignment), ..buffer.clone() });
        if Problem::new(list.clone()).is_err() {
            list.pop();
            list.push(buffer);
        }
    }
    let mut problem = Problem::new(list).unwrap();
    for &(start, bytes) in fences {
        problem = problem.clone().forbid(start..start + bytes).unwrap_or(problem);
    }
    for (kind, members) in groups {
        let ids: Vec<BufferId> = members.iter().map(|(index, _)| BufferId(index.index(rows.len()) as u32)).collect();
        let distances = members.iter().map(|member| member.1);
        let next = match kind {
            0 => problem.clone().contiguous(ids),
            1 => problem.clone().adjacent(ids),
            2 => problem.clone().together(ids.into_iter().zip(distances).collect()),
            _ => problem.clone().apart(ids[0], ids[1]),
        };
        problem = next.unwrap_or(problem);
    }
    problem
}

/// Returns the gaps that the problem allows.
fn allowed(problem: &Problem, rows: &[GapRow]) -> Vec<Gap> {
    let mut gaps: Vec<Gap> = Vec::new();
    for (index, after, ticks, window) in rows {
        let buffer = BufferId(index.index(problem.len()) as u32);
        let start = problem.buffer(buffer).lifetime.start + after;
        let window = window.map(|(start, bytes)| start..start + bytes);
        let at = gaps.partition_point(|gap| (gap.buffer, gap.ticks.start) < (buffer, start));
        gaps.insert(at, Gap { buffer, ticks: start..start + ticks, window });
        if Pieces::new(problem, &gaps).is_err() {
            gaps.remove(at);
        }
    }
    gaps
}

/// Returns the problem with its groups and pairs, but without pins and forbidden ranges.
fn without_pins(problem: &Problem) -> Problem {
    let buffers = problem.buffers().iter().map(|b| Buffer { offset: None, ..b.clone() }).collect();
    let grouped = problem.groups().iter().fold(Problem::new(buffers).unwrap(), |problem, group| {
        let members = group.members.clone();
        let next = match group.arrangement {
            Arrangement::Stacked => problem.contiguous(members),
            Arrangement::AnyOrder => problem.adjacent(members),
            Arrangement::Given => problem.together(members.into_iter().zip(group.distances.clone()).collect()),
        };
        next.unwrap()
    });
    problem.pairs_apart().iter().fold(grouped, |problem, &(a, b)| problem.apart(a, b).unwrap())
}

generated! {
    #![cases(2000)]

    #[test]
    fn every_claim_holds(
        rows in rows(),
        groups in groups(),
        gaps in gaps(),
        fences in prop::collection::vec((0..8u64, 1..3u64), 0..2),
        earlier in prop::collection::vec(prop::option::of(0..9u64), 7),
        capacity in 1..16u64,
    ) {
        let problem = problem(&rows, &groups, &fences);
        let gaps = allowed(&problem, &gaps);
        let pieces = Pieces::new(&problem, &gaps).unwrap();
        let Some(least) = least(&problem, &gaps, MOST, STEPS) else { return Ok(()) };
        let told = || format!("{problem:?} {gaps:?}");
        let options = Options { work: 60_000, ..Options::default() };
        let solution = plan(&pieces.problem, &options);
        if solution.offsets.is_empty() {
            prop_assert_ne!(solution.fit, Fit::Fits);
            prop_assert!(least > MOST, "{} {}", least, told());
            return Ok(());
        }
        prop_assert_eq!(check(&pieces.problem, &solution.offsets, Some(solution.height)), Ok(()), "{}", told());
        prop_assert!(solution.height >= least && solution.bound() <= least, "{:?} {} {}", solution, least, told());
        let is_proven = !matches!(solution.proof, Proof::None { .. });
        prop_assert_eq!(is_proven && solution.height > least, false, "{:?} {} {}", solution, least, told());
        let limited = plan(&pieces.problem, &Options { capacity: Some(capacity), ..options.clone() });
        prop_assert!(limited.fit != Fit::Impossible || capacity < least, "{} {:?} {} {}", capacity, limited, least, told());
        prop_assert!(limited.fit != Fit::Fits || limited.height <= capacity, "{} {:?} {}", capacity, limited, told());
        // Few problems are explained, since an explanation makes many plans.
        let asked = Options { capacity: Some(capacity).filter(|&capacity| capacity == 8), ..options.clone() };
        if let Some(why) = explain(&pieces.problem, &[], &limited, &asked) {
            for remedy in why.remedies() {
                let changed = Explanation::apply(&pieces.problem, remedy);
                prop_assert!(changed.is_some() && remedy.at_least <= remedy.size, "{:?} {}", remedy, told());
            }
        }
        let warm_start = pieces.spread(&earlier[..problem.len()], |at, distance| Some((*at)? + distance));
        let kept = plan(&pieces.problem, &Options { warm_start: Some(warm_start), ..options });
        prop_assert!(kept.height <= solution.height, "{:?} {:?} {:?} {}", kept, solution, earlier, told());
        prop_assert_eq!(check(&pieces.problem, &kept.offsets, None), Ok(()), "{}", told());
    }

    /// A plan in pools is compared with all ways to assign the buffers to pools.
    #[test]
    fn every_pool_holds_its_buffers(
        rows in rows(),
        groups in groups(),
        fences in prop::collection::vec((0..8u64, 1..3u64), 0..2),
        capacities in prop::collection::vec(0..8u64, 1..4),
        ranks in prop::collection::vec(0..3u32, 7),
    ) {
        let problem = problem(&rows[..rows.len().min(4)], &groups, &fences);
        let planned = plan_pools(&problem, &capacities, &ranks, &Options { work: 100_000, ..Options::default() });
        let told = || format!("{planned:?} {capacities:?} {problem:?}");
        let loose = without_pins(&problem);
        // A buffer in another pool is as good as none.
        let part = |pools: &[Option<usize>], pool: usize| {
            let others = problem.ids().filter(|id| pools[id.index()] != Some(pool)).map(Change::LeaveOut).collect();
            let whole = if pool == 0 { &problem } else { &loose };
            Explanation::apply(whole, &Remedy { changes: others, size: 0, at_least: 0 }).unwrap()
        };
        // Groups are whole, and pins are in the first pool.
        let is_allowed = |pools: &[Option<usize>]| {
            let pool = |id: &BufferId| pools[id.index()];
            let is_first = |id: &BufferId| problem.buffer(*id).offset.is_none() || pool(id).is_none_or(|pool| pool == 0);
            let is_whole = |group: &Group| group.members.iter().all(|id| pool(id) == pool(&group.members[0]));
            problem.groups().iter().all(is_whole) && problem.ids().all(|id| is_first(&id))
        };
        prop_assert!(is_allowed(&planned.pools), "{}", told());
        for (pool, &capacity) in capacities.iter().enumerate() {
            let offset = |id: BufferId| match planned.pools[id.index()] == Some(pool) {
                true => planned.offsets[id.index()],
                false => 0,
            };
            let alone = part(&planned.pools, pool);
            let mut offsets: Vec<u64> = problem.ids().map(offset).collect();
            // Groups in other pools lie anywhere.
            for group in alone.groups().iter().filter(|g| planned.pools[g.members[0].index()] != Some(pool)) {
                let members = group.members.iter().zip(&group.distances);
                members.for_each(|(id, distance)| offsets[id.index()] = group.phase + distance);
            }
            prop_assert_eq!(check(&alone, &offsets, Some(capacity)), Ok(()), "{:?} {}", alone, told());
            prop_assert!(planned.heights[pool] <= capacity, "{}", told());
        }
        prop_assert_eq!(planned.fit == Fit::Fits, planned.pools.iter().all(Option::is_some), "{}", told());
        let ways = (0..capacities.len().pow(problem.len() as u32)).map(|way| -> Vec<Option<usize>> {
            let digit = |k: u32| way / capacities.len().pow(k) % capacities.len();
            (0..problem.len() as u32).map(|k| Some(digit(k))).collect()
        });
        let holds = |pools: &Vec<Option<usize>>| {
            is_allowed(pools) && (0..capacities.len()).all(|pool| fits(&part(pools, pool), capacities[pool]))
        };
        prop_assert!(planned.fit != Fit::Impossible || !ways.clone().any(|pools| holds(&pools)), "{}", told());
    }
}

/// A member without bytes keeps its distance, but takes no space: the group is no larger, wherever that member lies.
#[test]
fn a_member_without_bytes_makes_no_group_larger() {
    let (a, empty, b) = (BufferId(0), BufferId(1), BufferId(2));
    let buffers = vec![Buffer::new(0..2, 10), Buffer::new(0..2, 0), Buffer::new(1..3, 20)];
    let problem = Problem::new(buffers.clone()).unwrap().together(vec![(a, 0), (empty, 100)]).unwrap();
    assert_eq!(problem.groups()[0].bytes, 10);
    let solution = plan(&problem, &Options { capacity: Some(30), ..Options::default() });
    assert_eq!((solution.height, solution.bound(), solution.fit), (30, 30, Fit::Fits));
    assert_eq!(solution.offsets[empty.index()], solution.offsets[a.index()] + 100);
    assert_eq!(check(&problem, &solution.offsets, Some(30)), Ok(()));
    assert_eq!(solution.offsets[b.index()] % 10, 0);
    // The distance of such a member still has to be an address.
    let far = Problem::new(buffers).unwrap().together(vec![(empty, u64::MAX), (a, 0)]).unwrap();
    let solution = plan(&far, &Options::default());
    assert_eq!((solution.height, solution.offsets[a.index()]), (30, 0));
}

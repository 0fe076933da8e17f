//! Tiny problems with constraints of every kind. Each claim of the planner is compared with an exhaustive search.

mod exhaustion;

use exhaustion::Search;
use gapless_alloc::{Buffer, BufferId, Fit, Gap, Options, Pieces, Problem, Proof, check, plan};
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
    let members = prop::collection::vec((any::<prop::sample::Index>(), 0..4u64), 2..5);
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
        let Some(least) = Search::new(&problem, &gaps, STEPS).least(MOST) else { return Ok(()) };
        let told = || format!("{problem:?} {gaps:?}");
        let options = Options { work: 300_000, ..Options::default() };
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
        let warm_start = pieces.spread(&earlier[..problem.len()], |at, distance| Some((*at)? + distance));
        let kept = plan(&pieces.problem, &Options { warm_start: Some(warm_start), ..options });
        prop_assert!(kept.height <= solution.height, "{:?} {:?} {:?} {}", kept, solution, earlier, told());
        prop_assert_eq!(check(&pieces.problem, &kept.offsets, None), Ok(()), "{}", told());
    }
}

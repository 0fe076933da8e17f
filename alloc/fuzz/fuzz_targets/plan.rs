//! For any accepted problem, the planner returns a plan that passes the checker, or returns no offsets and does not
//! report that the problem fits.
#![no_main]

use std::time::Duration;

use arbitrary::Arbitrary;
use gapless_alloc::{Buffer, BufferId, Fit, Options, Problem, check, explain, plan, plan_hash};
use libfuzzer_sys::fuzz_target;

#[derive(Debug, Arbitrary)]
struct Input {
    buffers: Vec<Row>,
    forbidden: Vec<(u16, u8)>,
    groups: Vec<(Vec<u8>, bool)>,
    capacity: Option<u32>,
    /// The offsets of an earlier plan, indexed by buffer, from which the planner starts. A buffer has no earlier offset
    /// if its entry is `None`, or if the list is too short to have an entry for it.
    earlier: Option<Vec<Option<u16>>>,
    threads: Option<bool>,
    deadline_micros: Option<u16>,
}

#[derive(Debug, Arbitrary)]
struct Row {
    start: u8,
    length: u8,
    bytes: Bytes,
    alignment: u8,
    offset: Option<u16>,
}

#[derive(Debug, Arbitrary)]
enum Bytes {
    Small(u8),
    Any(u64),
}

fuzz_target!(|input: Input| {
    let rows = input.buffers.iter().take(200).map(|row| {
        let bytes = match row.bytes {
            Bytes::Small(bytes) => bytes.into(),
            Bytes::Any(bytes) => bytes,
        };
        let start = u64::from(row.start);
        let buffer = Buffer::new(start..start + u64::from(row.length), bytes).aligned(row.alignment.into());
        row.offset.map_or(buffer.clone(), |offset| buffer.at(offset.into()))
    });
    let Ok(mut problem) = Problem::new(rows.collect()) else { return };
    for &(start, bytes) in &input.forbidden {
        let Ok(next) = problem.forbid(start.into()..u64::from(start) + u64::from(bytes)) else { return };
        problem = next;
    }
    for (members, any_order) in &input.groups {
        let members = members.iter().map(|&i| BufferId(i.into())).collect();
        let next = if *any_order { problem.adjacent(members) } else { problem.contiguous(members) };
        let Ok(next) = next else { return };
        problem = next;
    }
    let options = Options {
        capacity: input.capacity.map(u64::from),
        work: 100_000,
        deadline: input.deadline_micros.map(|micros| Duration::from_micros(micros.into())),
        threads: input.threads.map(|two| if two { 2 } else { 1 }),
        warm_start: input.earlier.map(|earlier| {
            let at = |id: BufferId| earlier.get(id.index()).copied().flatten().map(u64::from);
            problem.ids().map(at).collect()
        }),
    };
    let solution = plan(&problem, &options);
    if solution.offsets.len() == problem.len() {
        check(&problem, &solution.offsets, None).expect("a plan");
        assert!(options.capacity.is_none_or(|c| (solution.height <= c) == (solution.fit == Fit::Fits)));
    } else {
        assert_ne!(solution.fit, Fit::Fits);
    }
    // Without a deadline, the same plan is found again with any number of threads.
    if options.deadline.is_none() {
        let again = plan(&problem, &Options { threads: Some(3), ..options.clone() });
        assert_eq!((&solution.offsets, solution.proof, solution.stats), (&again.offsets, again.proof, again.stats));
    }
    plan_hash(&problem, &solution.offsets);
    // An explanation makes many plans, so only small problems are explained.
    let explanation = if problem.len() <= 8 { explain(&problem, &[], &solution, &options) } else { None };
    for remedy in explanation.iter().flat_map(|explanation| explanation.remedies()) {
        assert!(remedy.at_least <= remedy.size);
    }
});

//! The online arena on recorded routing. It never reserves more bytes than the best of the usual allocators.

mod beside;
mod recorded_moe;

use std::collections::BTreeMap;

use beside::{Case, Row};
use gapless_alloc::arena::{Arena, ArenaOptions, ArenaPlan, Reserve, check_run, rehearse};
use gapless_alloc::{Fit, Options, Problem, lower_bound, plan};
use recorded_moe::Recorded;

/// Makes a static plan at most 0.2 % above the bound. Such a plan is found at once, while the last bytes would take
/// seconds.
fn planned(fixed: &Problem) -> Vec<u64> {
    let bound = lower_bound(fixed);
    let solution = plan(fixed, &Options { capacity: Some(bound + bound / 500), ..Options::default() });
    assert_eq!(solution.fit, Fit::Fits);
    solution.offsets
}

#[test]
fn reserves_at_most_what_the_best_of_the_others_does() {
    let folder = gapless_testing::evidence("pytorch");
    Row::print_header();
    recorded_moe::each(&folder, |recorded| {
        let Recorded { name, whole, dynamic, fixed, requests } = &recorded;
        let bytes: Vec<u64> = (0..requests.len()).map(|index| recorded.bytes(index)).collect();
        let offsets = planned(fixed);
        let iterations = if name.ends_with("full") { 1 } else { 3 };
        let case = Case {
            name: name.replace(".iter", "").replace(".full", ", set-up and 16 steps"),
            whole,
            dynamic,
            fixed,
            offsets: &offsets,
            requests,
            bytes: &bytes,
            phases: &[],
            iterations,
        };
        let row = case.row();
        row.print();
        gapless_testing::assert_on_page("docs/arena.md", &row.markdown());
        assert!(row.arena.reserved <= row.best(|r| r.reserved), "{name}");
        assert!(row.arena.smallest <= row.best(|r| r.smallest), "{name}");
        if iterations == 3 {
            promises(&recorded, &offsets, &bytes);
        }
    });
}

/// Checks the bytes that each policy reserves for this step, and that the policy keeps its promises.
fn promises(recorded: &Recorded, offsets: &[u64], bytes: &[u64]) {
    for reserve in [Reserve::Balanced { factor: 1.0 }, Reserve::Balanced { factor: 1.25 }, Reserve::Worst] {
        let options = ArenaOptions::with_reserve(reserve);
        let plan = ArenaPlan::new(&recorded.fixed, offsets, recorded.requests.clone(), &options).unwrap();
        let mut arena = Arena::new(plan);
        let recorded_run = rehearse(&mut arena, |id| bytes[id.index()]);
        let limit = arena.plan().height();
        check_run(&recorded.fixed, offsets, &recorded.requests, &recorded_run.served, limit).unwrap();
        println!("    {reserve:?}: {} reserved in all, {} overflows", limit, recorded_run.overflows.len());
        let plan = arena.plan().clone();
        let at_its_limit = rehearse(&mut arena, |id| plan.promised(id).expect("both promise"));
        check_run(&recorded.fixed, offsets, &recorded.requests, &at_its_limit.served, limit).unwrap();
        assert_eq!(at_its_limit.overflows, []);
        assert!(reserve != Reserve::Worst || recorded_run.overflows.is_empty());
    }
}

/// The recordings don't mark dynamic buffers; `recorded_moe` infers them. If sixteen steps of one run are available,
/// the run itself must confirm the result: static sizes occur in every step, and dynamic ones do not. (An expert
/// without rows in a step needs fewer workspaces, so a size need not occur exactly sixteen times as often as in one
/// step.)
#[test]
fn static_sizes_occur_in_every_step() {
    let folder = gapless_testing::evidence("pytorch");
    let mut tables: BTreeMap<String, Recorded> = BTreeMap::new();
    recorded_moe::each(&folder, |recorded| _ = tables.insert(recorded.name.clone(), recorded));
    let sizes = |problem: &Problem| {
        let mut count: BTreeMap<u64, usize> = BTreeMap::new();
        problem.buffers().iter().for_each(|b| *count.entry(b.bytes).or_default() += 1);
        count
    };
    for (name, step) in &tables {
        let Some(run) = tables.get(&name.replace(".iter", ".full")).filter(|_| name.ends_with(".iter")) else {
            continue;
        };
        const STEPS: usize = 16;
        let (whole_run, end) = (sizes(&run.whole), step.whole.end());
        let passing = step.fixed.buffers().iter().filter(|b| b.lifetime != (0..end)).cloned();
        for (bytes, count) in sizes(&Problem::new(passing.collect()).unwrap()) {
            assert!(whole_run[&bytes] >= (STEPS - 1) * count, "{name}: static {bytes}, {count} a step");
        }
        let mut dynamic: BTreeMap<u64, usize> = BTreeMap::new();
        (0..step.requests.len()).for_each(|index| *dynamic.entry(step.bytes(index)).or_default() += 1);
        for (bytes, count) in &dynamic {
            let found = whole_run.get(bytes).copied().unwrap_or(0);
            assert!(found < STEPS / 2 * count, "{name}: dynamic {bytes}, {count} a step, {found} in all");
        }
        println!("{name}: {} sizes that the data decides, in {} buffers", dynamic.len(), step.requests.len());
    }
}

//! The online arena under routings that nobody recorded: what it reserves beside others, and what its policies do.

mod beside;

use beside::{Case, Row};
use gapless_alloc::arena::synthetic::{BuiltStep, MoeStep, Routing};
use gapless_alloc::arena::{Arena, ArenaOptions, ArenaPlan, RequestId, Reserve, check_run, rehearse};
use gapless_alloc::{Buffer, BufferId, Options, Problem, plan};

fn steps() -> [(&'static str, MoeStep); 3] {
    let deep = MoeStep { layers: 3, ahead: 8, micro_batches: 24, vocabulary: 0, ..MoeStep::qwen() };
    [("mixtral, 1F1B of 4", MoeStep::mixtral()), ("qwen, accumulation", MoeStep::qwen()), ("qwen, 1F1B of 8", deep)]
}

fn planned(step: MoeStep) -> (BuiltStep, Vec<u64>) {
    let built = step.build().unwrap();
    let solution = plan(&built.fixed, &Options::default());
    assert_eq!(solution.height, solution.lower_bound);
    (built, solution.offsets)
}

/// No placement of blocks as they come avoids every gap. Over all routings, what the arena needs above the best of the
/// others, which cut static buffers too as they come, is less than one block; mostly it needs less than they do.
#[test]
fn reserves_less_than_a_block_more_than_the_best_of_the_others() {
    Row::print_header();
    for (name, step) in steps() {
        let (built, offsets) = planned(step);
        for routing in Routing::ALL {
            let bytes = built.bytes(routing, 0);
            let mut buffers: Vec<Buffer> = built.fixed.buffers().to_vec();
            let first = buffers.len() as u32;
            let sized =
                built.requests.iter().zip(&bytes).map(|(r, &bytes)| Buffer::new(r.ticks.clone(), bytes).aligned(512));
            buffers.extend(sized);
            let dynamic: Vec<BufferId> = (first..buffers.len() as u32).map(BufferId).collect();
            let row = Case {
                name: format!("{name}, {routing:?}"),
                whole: &Problem::new(buffers).unwrap(),
                dynamic: &dynamic,
                fixed: &built.fixed,
                offsets: &offsets,
                requests: &built.requests,
                bytes: &bytes,
                phases: &built.phases,
                iterations: 3,
            }
            .row();
            row.print();
            let block = bytes.iter().max().unwrap();
            assert!(row.arena.smallest < row.best(|r| r.smallest) + block, "{}", row.name);
            assert!(row.arena.reserved < row.best(|r| r.reserved) + block, "{}", row.name);
        }
    }
}

#[test]
fn policies_do_what_they_say() {
    for (name, step) in steps() {
        let (built, offsets) = planned(step);
        for reserve in [1.0, 1.25, 2.0].map(|factor| Reserve::Balanced { factor }).into_iter().chain([Reserve::Worst]) {
            let options = ArenaOptions::with_reserve(reserve);
            let plan = ArenaPlan::new(&built.fixed, &offsets, built.requests.clone(), &options).unwrap();
            let gib = |bytes: u64| bytes as f64 / (1u64 << 30) as f64;
            print!(
                "{name}, {reserve:?}: {:.2} GiB on {:.2};",
                gib(plan.height() - plan.static_height()),
                gib(plan.static_height())
            );
            let mut arena = Arena::new(plan);
            for routing in Routing::ALL {
                let mut overflows = 0;
                for round in 0..3 {
                    let bytes = built.bytes(routing, round);
                    let run = rehearse(&mut arena, |id| bytes[id.index()]);
                    let limit = arena.plan().height();
                    check_run(&built.fixed, &offsets, &built.requests, &run.served, limit).unwrap();
                    overflows += run.overflows.len();
                    let keeps = |id| Some(bytes[id as usize]) <= arena.plan().promised(RequestId(id));
                    if (0..built.requests.len() as u32).all(keeps) {
                        assert_eq!(run.overflows, [], "{name}, {routing:?}");
                    }
                }
                print!(" {routing:?} {overflows}");
                assert!(reserve != Reserve::Worst || overflows == 0);
            }
            println!(" overflows");
        }
    }
}

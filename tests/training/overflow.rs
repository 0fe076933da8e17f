//! Steps whose routed rows exceed the reserve. The results are bit-identical to those of a run with enough room.

use gapless::alloc::arena::ArenaReport;
use gapless::communicator;
use gapless::engine::compile::Error as CompileError;
use gapless::engine::runtime::Error as RuntimeError;
use gapless::models::Moe;
use gapless::parallel::Axes;
use gapless::{
    MemoryOptions, Mesh, Overflow, Pipeline, Recompute, Reserve, StepOptions, TrainError, TrainOptions, Trainer,
    parallel,
};

use gapless_testing::{every_other, few};

use crate::uneven::{Case, LAYERS, Pattern, SEQUENCE, STEPS, batch, cases, config, experts, options};

/// The results of a rank.
#[derive(Debug)]
struct Seen {
    /// Loss and gradient norm of every step.
    steps: Vec<(f32, f32)>,
    evaluated: f32,
    /// Parameters and optimizer states after the last step.
    tensors: Vec<Vec<f32>>,
    /// The arena's report after every step.
    reports: Vec<ArenaReport>,
    /// Size of the arena before the first step and after the last.
    arena_bytes: [u64; 2],
}

/// Runs every rank. Also checks the addresses of each step.
fn run(case: &Case, options: &TrainOptions) -> Vec<Seen> {
    let ranks = communicator::on_threads(options.step.mesh.ranks().unwrap(), |world| {
        let mut trainer =
            Trainer::builder(|vb| Moe::new(&case.config, vb), options.clone()).distributed(world).build()?;
        let before = trainer.report().arena_bytes;
        let (mut steps, mut reports) = (Vec::new(), Vec::new());
        for step in 0..STEPS {
            (case.pattern)(step).steer(&mut trainer);
            let (tokens, targets) = batch(step);
            let report = trainer.step(&tokens, &targets)?;
            // A rank of a pipeline may have no experts.
            assert!(trainer.check_run()? > 0 || trainer.routing().is_none());
            steps.push((report.loss, report.gradient_norm));
            reports.push(trainer.routing().unwrap_or_default());
        }
        let some = trainer.options().step.evaluation_batch() * SEQUENCE;
        let (tokens, targets) = batch(STEPS);
        let evaluated = trainer.evaluate(&tokens[..some], &targets[..some])?;
        trainer.check_run()?;
        let arena_bytes = [before, trainer.report().arena_bytes];
        let names: Vec<String> = trainer.parameter_names().map(Into::into).collect();
        let states = names.iter().map(|name| format!("exp_avg/{name}"));
        let all: Vec<String> = names.iter().cloned().chain(states).collect();
        // Parameters with an update rule of their own do not have these states.
        let tensors = all.iter().filter_map(|name| trainer.tensor(name).ok());
        let tensors = tensors.map(|tensor| tensor.flatten_all().unwrap().to_vec1().unwrap()).collect();
        Ok(Seen { steps, evaluated, tensors, reports, arena_bytes })
    });
    ranks.unwrap()
}

fn same_bits(seen: &[Seen], expected: &[Seen], what: &str) {
    let bits =
        |seen: &Seen| -> Vec<_> { seen.steps.iter().map(|(loss, norm)| (loss.to_bits(), norm.to_bits())).collect() };
    for (rank, (seen, expected)) in seen.iter().zip(expected).enumerate() {
        assert_eq!(bits(seen), bits(expected), "{what}, rank {rank}");
        assert_eq!(seen.evaluated.to_bits(), expected.evaluated.to_bits(), "{what}, rank {rank}");
        assert!(seen.tensors == expected.tensors, "{what}, rank {rank}: parameters or states differ");
    }
}

/// Meshes with expert ranks alone, with pipeline stages, with data ranks, with tensor ranks, with context ranks, and with
/// experts that are folded over tensor and data ranks, and over context ranks.
fn meshes() -> [Mesh; 8] {
    let experts_on = |data, pipeline, tensor| Mesh { data, pipeline, tensor, ..experts(2) };
    [
        experts(2),
        experts(4),
        experts_on(1, 2, 1),
        experts_on(2, 1, 1),
        experts_on(1, 1, 2),
        Mesh { context: 2, ..experts(2) },
        Mesh { data: 2, tensor: 2, fold: Axes::DATA | Axes::TENSOR, ..Mesh::default() },
        Mesh { context: 2, fold: Axes::CONTEXT, ..experts(2) },
    ]
}

/// Returns options for this mesh, with `micro_batches` as in [`options`].
fn on(mesh: Mesh, routing: Reserve, overflow: Overflow) -> TrainOptions {
    TrainOptions {
        step: StepOptions {
            micro_batches: 4 / (mesh.expert * mesh.data),
            sequence_parallel: mesh.tensor > 1,
            memory: MemoryOptions { overflow, ..options(mesh, routing).step.memory },
            ..options(mesh, routing).step
        },
        ..options(mesh, routing)
    }
}

/// Returns cases that need more rows than even routing.
fn uneven_cases() -> impl Iterator<Item = Case> {
    let cases = cases().into_iter().filter(|case| case.config.router.capacity.is_none());
    cases.filter(|case| (case.pattern)(0) != Pattern::Alike)
}

/// If a step overflows on a rank, the rank's arena grows after the step. Each arena grows at most once, and then has
/// room for the rows of that step. Other ranks' arenas do not grow.
#[test]
fn growing_changes_no_bit_and_lasts() {
    let balanced = |factor| Reserve::Balanced { factor };
    let [two, four, pipeline, copies, tensor, context, folded, folded_context] = meshes();
    let all = [
        (folded, balanced(0.7)),
        (context, balanced(0.7)),
        (folded_context, balanced(0.7)),
        (tensor, balanced(0.7)),
        (two, Reserve::Bytes(0)),
        (pipeline, balanced(0.7)),
        (four, balanced(1.0)),
        (copies, balanced(0.7)),
        (two, balanced(0.7)),
    ];
    let cases: Vec<Case> = uneven_cases().collect();
    for (turn, case) in few(&cases, 4).iter().enumerate() {
        for (mesh, routing) in every_other(&all, turn) {
            let what = format!("{} on {mesh:?}, {routing:?}", case.name);
            let worst = run(case, &on(mesh, Reserve::Worst, Overflow::Error));
            let grown = run(case, &on(mesh, routing, Overflow::Grow));
            same_bits(&grown, &worst, &what);
            for (rank, seen) in grown.iter().enumerate() {
                grows_as_it_must(case, seen, &format!("{what}, rank {rank}"));
            }
            assert!(grown.iter().any(|seen| seen.reports[0].growths > 0), "{what}: nobody overflows");
        }
    }
}

fn grows_as_it_must(case: &Case, seen: &Seen, what: &str) {
    let mut before = ArenaReport::default();
    for (step, report) in seen.reports.iter().enumerate() {
        let what = format!("{what}, step {step}: {report}");
        let overflows = report.overflows - before.overflows;
        assert_eq!(report.growths - before.growths, u64::from(overflows > 0), "{what}: once, if at all");
        assert_eq!(report.outside_bytes > before.outside_bytes, overflows > 0, "{what}");
        // If all tokens choose the same experts as in the step before, no arena can overflow.
        let to = (case.pattern)(step as u64);
        let is_repeated = step > 0 && matches!(to, Pattern::One(_)) && to == (case.pattern)(step as u64 - 1);
        assert!(!is_repeated || overflows == 0, "{what}");
        before = *report;
    }
    let last = seen.reports.last().unwrap();
    assert_eq!(last.outside_bytes, last.refused_bytes, "{what}: all that was refused has found room");
    assert_eq!(last.asked_bytes, last.reused_bytes + last.reserve_served_bytes + last.outside_bytes, "{what}");
    assert_eq!(last.most_outside_bytes > 0, last.overflows > 0, "{what}");
    let [before, after] = seen.arena_bytes;
    assert_eq!(after - before, last.reserve_bytes - last.first_reserve_bytes, "{what}: {before} to {after} bytes");
    assert_eq!(after > before, last.growths > 0, "{what}: {before} to {after} bytes");
}

/// Rows that don't fit are evicted, and later re-exchanged and recomputed with the same bits. This also works together
/// with other recomputation, in pipelines, and with data ranks. No arena ever overflows.
#[test]
fn evicted_rows_are_recomputed_with_the_same_bits() {
    let [two, four, pipeline, copies, tensor, context, folded, folded_context] = meshes();
    let all = [
        (folded, 0.5, "none"),
        (context, 0.5, "layers"),
        (folded_context, 0.5, "none"),
        (tensor, 0.5, "none"),
        (two, 1.0, "layers"),
        (pipeline, 0.5, "none"),
        (copies, 1.0, "ops:grouped_linear"),
        (four, 0.0, "ops:routed_swiglu"),
        (four, 1.0, "none"),
        (two, 0.5, "none"),
    ];
    let cases: Vec<Case> = uneven_cases().collect();
    for (turn, case) in few(&cases, 4).iter().enumerate() {
        for (mesh, factor, recompute) in every_other(&all, turn) {
            let what = format!("{} on {mesh:?}, {factor}, {recompute}", case.name);
            let recompute: Recompute = recompute.parse().unwrap();
            let with = |routing, overflow| TrainOptions {
                step: StepOptions {
                    memory: MemoryOptions { recompute: recompute.clone(), ..on(mesh, routing, overflow).step.memory },
                    ..on(mesh, routing, overflow).step
                },
                ..on(mesh, routing, overflow)
            };
            let worst = run(case, &with(Reserve::Worst, Overflow::Error));
            let again = run(case, &with(Reserve::Balanced { factor }, Overflow::Recompute));
            same_bits(&again, &worst, &what);
            let last = |seen: &Seen| *seen.reports.last().unwrap();
            let micro_batches = (4 / (mesh.expert * mesh.data)) as u64;
            let all = STEPS * micro_batches * (LAYERS / mesh.pipeline) as u64;
            for (rank, seen) in again.iter().enumerate() {
                let report = last(seen);
                let what = format!("{what}, rank {rank}: {report}");
                assert_eq!((report.overflows, report.growths), (0, 0), "{what}");
                assert_eq!(seen.arena_bytes[0], seen.arena_bytes[1], "{what}");
                // All ranks that share the experts of a layer evict the same rows.
                let group = |rank| mesh.color(mesh.coordinate(rank), mesh.experts());
                let first = (0..rank).find(|&other| group(other) == group(rank)).unwrap_or(rank);
                assert_eq!(report.evicted, last(&again[first]).evicted, "{what}");
                assert!(report.evicted <= all, "{what}");
            }
            assert!(again.iter().any(|seen| last(seen).evicted > 0), "{what}: all was kept");
        }
    }
}

/// Eviction works with every schedule that splits backwards, with offloading, and with budgets.
#[test]
fn letting_go_goes_with_all_that_moves_the_backward() {
    let mut case = uneven_cases().find(|case| case.name == "oscillating").unwrap();
    case.config.llama.layers = 4;
    let check = |options: TrainOptions, what: &str| {
        let with = |routing, overflow| TrainOptions {
            step: StepOptions {
                memory: MemoryOptions { routing, overflow, ..options.step.memory.clone() },
                ..options.step.clone()
            },
            ..options.clone()
        };
        let worst = run(&case, &with(Reserve::Worst, Overflow::Error));
        let again = run(&case, &with(Reserve::Balanced { factor: 0.5 }, Overflow::Recompute));
        same_bits(&again, &worst, what);
        assert!(again.iter().any(|seen| seen.reports.last().unwrap().evicted > 0), "{what}: all was kept");
        again
    };
    for (turn, &(name, chunks)) in few(&[("zbv", 2), ("zb-h1", 1), ("interleaved", 2)], 1).iter().enumerate() {
        let mesh = Mesh { pipeline: 2, ..experts(2) };
        let pipeline = Pipeline { schedule: parallel::by_name(name).unwrap().into(), chunks, ..Pipeline::default() };
        for policy in every_other(&["none", "layers"], turn) {
            let recompute = policy.parse().unwrap();
            let options = on(mesh, Reserve::Worst, Overflow::Error);
            check(
                TrainOptions {
                    step: StepOptions {
                        pipeline: pipeline.clone(),
                        memory: MemoryOptions { recompute, ..options.step.memory },
                        ..options.step
                    },
                    ..options
                },
                &format!("{name}, {policy}"),
            );
        }
    }
    let plain = on(experts(2), Reserve::Worst, Overflow::Error);
    let ops = ["linear", "rms_norm", "add", "route"].map(str::to_owned).to_vec();
    let offload = ops;
    check(
        TrainOptions {
            step: StepOptions { memory: MemoryOptions { offload, ..plain.step.memory.clone() }, ..plain.step.clone() },
            ..plain.clone()
        },
        "a file",
    );

    let of_one = TrainOptions {
        step: StepOptions {
            memory: MemoryOptions {
                routing: Reserve::Balanced { factor: 0.5 },
                overflow: Overflow::Recompute,
                budget: Some(1),
                ..plain.step.memory.clone()
            },
            ..plain.step.clone()
        },
        ..plain.clone()
    };
    let smallest = |rank| match gapless::plan::step(|vb| Moe::new(&case.config, vb), &of_one, rank) {
        Err(TrainError::Compile(CompileError::OverBudget { smallest, .. })) => smallest,
        other => panic!("a byte is too small a budget: {other:?}"),
    };
    let least = smallest(0).max(smallest(1));
    let budget = Some(least);
    let options = TrainOptions {
        step: StepOptions {
            memory: MemoryOptions {
                routing: of_one.step.memory.routing,
                overflow: of_one.step.memory.overflow,
                budget,
                ..plain.step.memory.clone()
            },
            ..plain.step.clone()
        },
        ..plain.clone()
    };
    let worst = run(&case, &plain);
    let again = run(&case, &options);
    same_bits(&again, &worst, "a budget");
    assert!(again.iter().all(|seen| seen.arena_bytes[1] <= least && seen.reports.last().unwrap().evicted > 0));
}

/// If there is room for all rows of a step, none are evicted. There is always room for even routing.
#[test]
fn rows_are_kept_while_there_is_room() {
    let case = uneven_cases().find(|case| case.name == "Zipf").unwrap();
    for (routing, keeps) in
        [(Reserve::Worst, true), (Reserve::Balanced { factor: 4.0 }, true), (Reserve::Balanced { factor: 1.0 }, false)]
    {
        for (rank, seen) in run(&case, &on(experts(4), routing, Overflow::Recompute)).iter().enumerate() {
            assert_eq!(seen.reports.last().unwrap().evicted == 0, keeps, "{routing:?}, rank {rank}: {seen:?}");
        }
    }
}

/// Without eviction, the reserve must cover the worst case of many layers. With eviction, it must cover the worst
/// case of one layer and the usual case of the others, which is less.
#[test]
fn letting_go_needs_less_than_the_worst_case() {
    let mut config = config(2);
    config.llama.layers = 12;
    let arena = |routing, overflow| {
        let options = TrainOptions {
            step: StepOptions { micro_batches: 1, ..on(experts(4), routing, overflow).step },
            ..on(experts(4), routing, overflow)
        };
        gapless::plan::step(|vb| Moe::new(&config, vb), &options, 0).unwrap().routing().unwrap().height()
    };
    let [worst, again] =
        [arena(Reserve::Worst, Overflow::Error), arena(Reserve::Balanced { factor: 1.25 }, Overflow::Recompute)];
    println!("{again} bytes, {worst} for the worst case");
    assert!(3 * again < 2 * worst, "{again} of {worst}");
}

#[test]
fn rows_that_cannot_be_recomputed_are_refused() {
    let plan = |options: TrainOptions| {
        gapless::plan::step(|vb| Moe::new(&config(2), vb), &options, 0).unwrap_err().to_string()
    };
    let bytes = on(experts(2), Reserve::Bytes(1 << 20), Overflow::Recompute);
    assert!(plan(bytes).contains("promises no room for recomputed rows"));
    let compress = vec!["rms_norm".into()];
    let rounded = TrainOptions {
        step: StepOptions {
            memory: MemoryOptions {
                compress,
                ..on(experts(2), Reserve::Balanced { factor: 1.0 }, Overflow::Recompute).step.memory
            },
            ..on(experts(2), Reserve::Balanced { factor: 1.0 }, Overflow::Recompute).step
        },
        ..on(experts(2), Reserve::Balanced { factor: 1.0 }, Overflow::Recompute)
    };
    assert!(plan(rounded).contains("differ from the forward's"));
}

/// If growing would exceed the budget, the step returns an error, and the model is unchanged.
#[test]
fn growing_keeps_to_the_budget() {
    let (mesh, config) = (experts(2), config(1));
    let plain = |budget| {
        let mut options = on(mesh, Reserve::Balanced { factor: 1.0 }, Overflow::Grow);
        options.step.memory.budget = budget;
        options
    };
    let arena = |rank| gapless::plan::step(|vb| Moe::new(&config, vb), &plain(None), rank).unwrap().arena_bytes();
    let bytes = arena(0).max(arena(1));
    let outcomes = communicator::on_threads(2, |world| {
        let mut trainer =
            Trainer::builder(|vb| Moe::new(&config, vb), plain(Some(bytes))).distributed(world).build()?;
        Pattern::One(0).steer(&mut trainer);
        let before = trainer.report().arena_bytes;
        let weights =
            |trainer: &Trainer| trainer.tensor("model.embed_tokens.weight").unwrap().to_vec2::<f32>().unwrap();
        let untouched = weights(&trainer);
        let (tokens, targets) = batch(0);
        let outcome = trainer.step(&tokens, &targets);
        assert!(weights(&trainer) == untouched && trainer.report().arena_bytes == before);
        Ok(outcome)
    });
    let [first, second]: [_; 2] = outcomes.unwrap().try_into().unwrap();
    match first.expect_err("all rows come to rank 0") {
        error @ TrainError::Runtime(RuntimeError::Growth { needed, .. }) => {
            assert!(
                needed > bytes
                    && error.to_string().contains(&format!("grow to {needed} bytes, which is above its limit")),
                "{error}"
            );
        }
        error => panic!("{error}"),
    }
    assert!(matches!(second, Err(TrainError::Runtime(RuntimeError::Communicator { .. }))), "{second:?}");
}

/// Scores that are not finite send all tokens to the first experts, whose rows exceed the reserve. The error names
/// the router rather than the overflow.
#[test]
fn a_router_of_no_numbers_is_named_instead_of_what_it_leads_to() {
    for overflow in [Overflow::Error, Overflow::Grow] {
        let config = config(1);
        let outcomes = communicator::on_threads(2, |world| {
            let options = on(experts(2), Reserve::Balanced { factor: 1.0 }, overflow);
            let mut trainer = Trainer::builder(|vb| Moe::new(&config, vb), options).distributed(world).build()?;
            let name = "model.layers.0.mlp.gate.weight";
            let weight = trainer.tensor(name)?.affine(f64::NAN, 0.0)?;
            trainer.set_tensor(name, &weight)?;
            let (tokens, targets) = batch(0);
            let outcome = trainer.step(&tokens, &targets);
            Ok((outcome, trainer.routing().unwrap()))
        });
        let outcomes = outcomes.unwrap();
        let named = |outcome: &Result<_, TrainError>| matches!(outcome, Err(TrainError::NonFinite { culprit, .. }) if culprit.contains("model.layers.0.mlp.gate"));
        assert!(outcomes.iter().any(|(outcome, _)| named(outcome)), "{overflow:?}: {outcomes:?}");
        assert!(outcomes.iter().all(|(_, report)| report.growths == 0), "{overflow:?}: {outcomes:?}");
        assert!(outcomes.iter().any(|(_, report)| report.overflows > 0), "{overflow:?}: {outcomes:?}");
    }
}

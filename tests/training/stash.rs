//! Activations that are compressed to eight bits or offloaded to a file: bits, bytes, ranks and learning.

use std::sync::Arc;

use gapless::TrainError;
use gapless::engine::compile::Error as CompileError;
use gapless::parallel::{self, Rates, Schedule};
use gapless::{Layers, Mesh, Pipeline, Precision, Recompute, StepOptions, TrainOptions};
use gapless_testing::in_turn;

use crate::common::{Kind, TinyRun, on_cpu};
use crate::learning::learn;

type Change = fn(&mut TrainOptions);

fn names(names: &[&str]) -> Vec<String> {
    names.iter().map(|&name| name.to_owned()).collect()
}

/// Returns the operations whose results take most of the memory that a layer keeps. They include the residual stream.
fn most(kind: Kind) -> Vec<String> {
    match kind {
        Kind::Gpt => names(&["linear", "gelu", "layer_norm", "attention", "add", "dropout"]),
        Kind::Llama | Kind::Sinks => names(&["linear", "swiglu", "rms_norm", "attention", "add", "rope"]),
        Kind::Moe(_) | Kind::Latent => {
            names(&["linear", "routed_swiglu", "rms_norm", "attention", "add", "grouped_linear"])
        }
    }
}

fn put_on_pipeline(options: &mut TrainOptions, schedule: &str, ranks: usize, chunks: usize) {
    let schedule: Arc<dyn Schedule + Send + Sync> = parallel::by_name(schedule).unwrap().into();
    options.step.mesh = Mesh::pipeline(ranks);
    options.step.pipeline = Pipeline { schedule, chunks, ..Pipeline::default() };
}

/// Runs with dropout (GPT) and NaN in all dead memory, both with offloading alone and together with recomputation.
#[test]
fn a_file_gives_the_bits_of_none() {
    for kind in [Kind::Gpt, Kind::Llama, Kind::MOE[1]] {
        for micro_batches in [1, 4] {
            let mut run = TinyRun { kind, ..TinyRun::default() };
            run.options.step.micro_batches = micro_batches;
            let plain = run.steps(3);
            let all = run.trainer().report().arena_bytes;
            run.options.poison = true;
            for (turn, ops) in [names(&["add"]), names(&["linear", "attention"]), most(kind)].into_iter().enumerate() {
                run.options.step.memory.offload = ops.clone();
                let report = run.trainer().report();
                assert!(report.host_bytes > 0 && report.arena_bytes < all, "{ops:?}: {} of {all}", report.arena_bytes);
                let policies = [
                    Recompute::None,
                    Recompute::Layers(Layers::First(1)),
                    Recompute::Layers(Layers::All),
                    Recompute::Cycle(vec![Recompute::None, Recompute::Ops(names(&["attention"]))]),
                ];
                for recompute in in_turn(&policies, turn + micro_batches) {
                    run.options.step.memory.recompute = recompute.clone();
                    assert_eq!(plain, run.steps(3), "{kind:?}, {micro_batches} micro-batches, {ops:?}, {recompute:?}");
                }
                run.options.step.memory.recompute = Recompute::None;
            }
        }
    }
}

#[test]
fn a_file_per_rank_gives_the_bits_of_one_rank() {
    for (schedule, ranks, chunks) in [("1f1b", 2, 1), ("interleaved-zb", 2, 1), ("zbv", 2, 2), ("gpipe", 4, 1)] {
        let mut run = TinyRun::default();
        run.options.step.micro_batches = 8;
        run.options.threads = 1;
        let plain = run.steps(2);
        run.options.step.memory.offload = most(Kind::Gpt);
        run.options.poison = true;
        put_on_pipeline(&mut run.options, schedule, ranks, chunks);
        assert_eq!(plain, run.steps_on_ranks(2), "{:?}", run.options.step.pipeline);
    }
}

/// The smallest sufficient budget.
fn smallest(run: &TinyRun) -> u64 {
    let mut run = run.clone();
    run.options.step.memory.budget = Some(1);
    match run.try_trainer() {
        Err(TrainError::Compile(CompileError::OverBudget { smallest, .. })) => smallest,
        other => panic!("one byte is enough: {other:?}"),
    }
}

/// Offloaded values need not be recomputed. So the same budget costs less time, and a smaller budget becomes
/// possible.
#[test]
fn a_budget_counts_what_is_in_the_file() {
    let mut run = TinyRun::default();
    run.options.step.micro_batches = 2;
    let plain = run.steps(2);
    let least = smallest(&run);
    let rates = Rates { flops: 1e9, bytes: 1e30 };
    run.options.step.memory.budget = Some(least);
    run.options.step.memory.rates = rates;
    let flops = run.trainer().report().flops_per_step;
    run.options.step.memory.offload = names(&["add", "linear"]);
    assert!(smallest(&run) < least);
    let report = run.trainer().report();
    assert!(report.arena_bytes <= least && report.flops_per_step < flops);
    assert_eq!(plain, run.steps(2));
}

/// The space in the file is reused. After values have been read, later values are written to their place.
#[test]
fn the_file_is_planned() {
    let mut run = TinyRun::default();
    run.options.step.micro_batches = 4;
    run.options.step.memory.offload = most(Kind::Gpt);
    let trainer = run.trainer();
    let one = trainer.report().host_bytes;
    run.options.step.micro_batches = 1;
    // Micro-batches run one after another, so a quarter of the batch takes a quarter of the file, rounded up to pages.
    let all = run.trainer().report().host_bytes;
    assert!(one < all / 4 + all / 8, "{one} of {all}");
}

/// The forward uses exact values, so the first loss is exact. All results only depend on the seed and the data.
#[test]
fn eight_bits_are_the_same_bits_however_they_are_run() {
    for kind in [Kind::Gpt, Kind::Llama] {
        let mut run = TinyRun { kind, ..TinyRun::default() };
        let exact = run.steps(3);
        let all = run.trainer().report().arena_bytes;
        run.options.step.memory.compress = most(kind);
        let plain = run.steps(3);
        let packed = run.trainer().report().arena_bytes;
        assert!(packed < all, "{packed} of {all}");
        assert_eq!(plain.losses[0], exact.losses[0]);
        assert_ne!(plain.losses[2], exact.losses[2], "nothing was rounded");
        let changes: [Change; 3] =
            [|options| options.threads = 1, |options| options.step.micro_batches = 4, |options| options.poison = true];
        for (index, change) in changes.into_iter().enumerate() {
            let mut run = run.clone();
            change(&mut run.options);
            assert_eq!(plain, run.steps(3), "{kind:?}, change {index}");
        }
        // Values that are sent to another stage are not rounded, so the reference must not round these values either.
        run.options.step.memory.compress.retain(|name| name != "add");
        let plain = run.steps(3);
        for (schedule, chunks) in [("1f1b", 1), ("interleaved-zb", 1), ("zbv", 2)] {
            (run.options.step.micro_batches, run.options.threads, run.options.poison) = (4, 1, true);
            put_on_pipeline(&mut run.options, schedule, 2, chunks);
            assert_eq!(plain, run.steps_on_ranks(3), "{kind:?}, {schedule}");
        }
    }
}

/// Under a budget, values that are not compressed are recomputed or kept. If a value is recomputed from compressed
/// values, the rounded values are used.
#[test]
fn eight_bits_and_a_budget_go_together() {
    let mut run = TinyRun::default();
    run.options.step.micro_batches = 2;
    let exact = run.steps(1);
    run.options.step.memory.compress = names(&["linear", "gelu"]);
    let all = run.trainer().report().arena_bytes;
    let budget = (smallest(&run) + all) / 2;
    run.options.step.memory.budget = Some(budget);
    run.options.poison = true;
    assert!(run.trainer().report().arena_bytes <= budget);
    assert_eq!(run.steps(1).losses, exact.losses);
}

/// Returns the distance of gradients from those of exact activations, relative to the norm of the latter. An element is
/// rounded by at most 1/510 of its group's range, in either direction. The average is about 1/880 of the range. A range
/// is about five times the standard deviation. So the error of an activation is 0.6 % of its standard deviation, and
/// each operand of a gradient's products has about the same relative error. A few of these errors add up like a random
/// walk.
#[test]
fn gradients_stay_near_those_of_exact_activations() {
    const TOLERANCE: f64 = 0.03;
    for kind in [Kind::Gpt, Kind::Llama] {
        let mut run = TinyRun { kind, ..TinyRun::default() };
        run.options.step.keep_gradients = true;
        let gradients = |run: &TinyRun| -> Vec<(String, Vec<f32>)> {
            let mut trainer = run.trainer();
            run.step(&mut trainer);
            let gradient = |name: &str| trainer.gradient(name).unwrap().flatten_all().unwrap().to_vec1().unwrap();
            trainer.parameter_names().map(|name| (name.to_owned(), gradient(name))).collect()
        };
        let exact = gradients(&run);
        run.options.step.memory.compress = most(kind);
        let mut worst: f64 = 0.0;
        for ((name, rounded), (_, exact)) in gradients(&run).into_iter().zip(exact) {
            let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
            let apart = norm(&mut rounded.iter().zip(&exact).map(|(&a, &b)| f64::from(a) - f64::from(b)));
            let apart = apart / norm(&mut exact.iter().map(|&x| f64::from(x)));
            worst = worst.max(apart);
            assert!(apart <= TOLERANCE, "{kind:?}: the gradient of {name} is off by {apart} of its norm");
        }
        println!("{kind:?}: at most {worst:.4} of a gradient's norm");
        assert!(worst > 1e-6, "nothing was rounded");
    }
}

#[test]
fn eight_bits_learn_as_much() {
    let learn = |compress: Vec<String>| {
        let mut run = TinyRun::default();
        run.options.step.memory.compress = compress;
        learn(run)
    };
    let [start, exact] = learn(Vec::new());
    let [_, rounded] = learn(most(Kind::Gpt));
    println!("from {start}: {exact} with exact activations, {rounded} with eight bits");
    assert!(exact < 0.4 * start);
    // The error of gradients is about a percent in either direction. Its effect is less than the difference between
    // batches.
    assert!((rounded - exact).abs() < 0.01 * exact, "{rounded} instead of {exact}");
}

#[test]
fn invalid_compress_and_offload_are_refused() {
    let cases: [(Change, [&str; 2]); 5] = [
        (|options| options.step.memory.compress = names(&["gelo"]), ["gelo", "gelu"]),
        (|options| options.step.memory.offload = names(&["gelo"]), ["gelo", "gelu"]),
        // The backward does not read the result of this operation.
        (|options| options.step.memory.compress = names(&["linear_cross_entropy"]), ["linear_cross_entropy", "gelu"]),
        (
            |options| {
                (options.step.memory.compress, options.step.memory.offload) = (names(&["gelu"]), names(&["gelu"]))
            },
            ["gelu", "in one of the two"],
        ),
        (
            |options| {
                (options.step.memory.offload, options.step.memory.offload_to) =
                    (names(&["gelu"]), Some("no/such/folder".into()))
            },
            ["no/such/folder", "another folder"],
        ),
    ];
    for (change, words) in cases {
        let mut run = TinyRun::default();
        change(&mut run.options);
        let error = run.try_trainer().expect_err("it cannot be").to_string();
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
    }
}

/// In a plan for a GPU, an element of 2 bytes is stored in 1 byte plus its share of the group's range.
#[test]
fn a_step_in_bf16_is_planned_with_fewer_bytes() {
    let config = gapless::models::GptConfig { layers: 4, ..Default::default() };
    let mut options = TrainOptions {
        step: StepOptions { batch: 4, sequence: 1024, precision: Precision::Bf16, ..on_cpu().step },
        ..on_cpu()
    };
    let plan = |options: &TrainOptions| {
        let plan = gapless::plan::step(|vb| gapless::models::Gpt::new(&config, vb), options, 0).unwrap();
        (plan.arena_bytes(), plan.host_bytes())
    };
    let (all, _) = plan(&options);
    options.step.memory.compress = names(&["linear", "gelu", "layer_norm", "attention", "add"]);
    let (packed, none) = plan(&options);
    options.step.memory.offload = std::mem::take(&mut options.step.memory.compress);
    let (left, file) = plan(&options);
    println!("{all} bytes with everything as it is, {packed} in 8 bits, {left} with {file} in a file");
    assert_eq!(none, 0);
    assert!(packed < all && left < packed && all <= left + file);
}

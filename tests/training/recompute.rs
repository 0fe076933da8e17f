//! Recomputed values are bit-identical to kept ones. The arena shrinks by the values that are not kept.

use std::sync::Arc;

use gapless::TrainError;
use gapless::engine::Spec;
use gapless::engine::compile::Error as CompileError;
use gapless::engine::graph::Node;
use gapless::engine::optim::AdamW;
use gapless::engine::recompute::CustomPolicy;
use gapless::models::MoeStyle;
use gapless::parallel::{self, Rates, Schedule};
use gapless::{Layers, Mesh, Pipeline, Recompute, RecomputePolicy};

use gapless_testing::few;

use crate::common::{Kind, TinyRun};

fn ops(names: &[&str]) -> Recompute {
    Recompute::Ops(names.iter().map(|&name| name.to_owned()).collect())
}

/// A user's policy that recomputes values of more than this many bytes.
#[derive(Debug)]
struct Larger(u64);

impl RecomputePolicy for Larger {
    fn drops(&self, value: &Spec, _maker: &Node) -> bool {
        value.bytes() > self.0
    }
}

/// Returns the policies that apply to a model, the most different ones first.
fn policies(kind: Kind) -> Vec<Recompute> {
    let (layer, selective) = match kind {
        Kind::Gpt => ("h.1", ops(&["layer_norm", "gelu"])),
        Kind::Llama | Kind::Sinks => ("model.layers.1", ops(&["rms_norm", "swiglu"])),
        Kind::Moe(_) | Kind::Latent => ("model.layers.1", ops(&["rms_norm", "dispatch", "routed_swiglu"])),
    };
    let mut policies = vec![
        Recompute::Layers(Layers::All),
        Recompute::Cycle(vec![Recompute::None, Recompute::Layers(Layers::All), selective.clone()]),
        Recompute::Custom(CustomPolicy(Arc::new(Larger(4096)))),
        ops(&["linear", "add"]),
        ops(&["attention"]),
        selective,
        Recompute::Layers(Layers::First(1)),
        Recompute::Layers(Layers::Named(vec![layer.to_owned()])),
    ];
    // The choice of the routers, and the noise with which it was made.
    let choice = match kind {
        Kind::Gpt | Kind::Llama | Kind::Sinks | Kind::Latent => None,
        Kind::Moe(MoeStyle::Switch) => Some(ops(&["jitter", "softmax_last_dim", "top_k", "route"])),
        Kind::Moe(MoeStyle::DeepSeek) => Some(ops(&["div", "top_k", "route", "grouped_linear"])),
        Kind::Moe(MoeStyle::ExpertChoice) => Some(ops(&["softmax_last_dim", "route", "dispatch"])),
        Kind::Moe(MoeStyle::Mixtral | MoeStyle::Qwen) => Some(ops(&["top_k", "routed_swiglu"])),
    };
    policies.splice(0..0, choice);
    policies
}

/// Tests every policy with dropout (GPT), several micro-batches, and NaN in all dead memory.
#[test]
fn every_policy_gives_the_bits_of_none() {
    for kind in Kind::all() {
        let cuts: &[usize] = if Kind::MOE.contains(&kind) { &[4] } else { &[1, 4] };
        for &micro_batches in cuts {
            let mut run = TinyRun { kind, ..TinyRun::default() };
            run.options.step.micro_batches = micro_batches;
            let plain = run.steps(3);
            run.options.poison = true;
            for policy in few(&policies(kind), 5) {
                run.options.step.memory.recompute = policy.clone();
                assert_eq!(plain, run.steps(3), "{kind:?}, {micro_batches} micro-batches, {policy:?}");
            }
        }
    }
}

fn put_on_pipeline(run: &mut TinyRun, schedule: &str, ranks: usize, chunks: usize) {
    let schedule: Arc<dyn Schedule + Send + Sync> = parallel::by_name(schedule).unwrap().into();
    run.options.step.mesh = Mesh::pipeline(ranks);
    run.options.step.pipeline = Pipeline { schedule, chunks, ..Pipeline::default() };
}

#[test]
fn every_policy_gives_the_bits_of_none_on_ranks() {
    let all = [
        (Kind::Gpt, "zbv", 2, 2),
        (Kind::Llama, "zb-h2", 2, 1),
        (Kind::Moe(MoeStyle::DeepSeek), "1f1b", 2, 1),
        (Kind::Moe(MoeStyle::DeepSeek), "zb-h1", 2, 1),
        (Kind::Gpt, "1f1b", 2, 1),
        (Kind::Gpt, "interleaved-zb", 2, 1),
        (Kind::Gpt, "gpipe", 2, 1),
    ];
    for &(kind, schedule, ranks, chunks) in few(&all, 3) {
        let mut run = TinyRun { kind, ..TinyRun::default() };
        run.options.step.micro_batches = 8;
        run.options.threads = 1;
        let plain = run.steps(2);
        put_on_pipeline(&mut run, schedule, ranks, chunks);
        run.options.poison = true;
        for policy in few(&policies(kind), 5) {
            run.options.step.memory.recompute = policy.clone();
            assert_eq!(plain, run.steps_on_ranks(2), "{kind:?}, {:?} {policy:?}", run.options.step.pipeline);
        }
    }
}

/// If the backward is split, only the smaller of two equivalent sets of values is kept until W: for SwiGLU, the result
/// rather than both inputs. Alternatively, neither set is kept, and W recomputes the values a second time.
#[test]
fn split_backwards_wait_with_no_more_than_they_must() {
    for (schedule, chunks) in [("zb-h1", 1), ("zb-h2", 1), ("zbv", 2)] {
        let mut run = TinyRun { kind: Kind::Llama, ..TinyRun::default() };
        run.options.step.micro_batches = 8;
        run.options.threads = 1;
        put_on_pipeline(&mut run, schedule, 2, chunks);
        let plain = run.steps_on_ranks(2);
        let arenas = |run: &TinyRun| run.on_ranks(|trainer| trainer.report().arena_bytes);
        let kept = arenas(&run);
        run.options.poison = true;
        for (policy, at_most) in [(ops(&["rms_norm", "swiglu"]), 100), (Recompute::Layers(Layers::All), 95)] {
            run.options.step.memory.recompute = policy;
            let again = arenas(&run);
            println!("{schedule}: {kept:?} kept, {again:?} computed again");
            let is_less = |(again, kept): (&u64, &u64)| again * 100 <= kept * at_most;
            assert!(again.iter().zip(&kept).all(is_less), "{schedule}: {again:?}, {kept:?}");
            assert_eq!(plain, run.steps_on_ranks(2), "{schedule}");
        }
    }
}

/// Each rank of a pipeline stays within its own budget.
#[test]
fn every_rank_keeps_to_its_budget() {
    for (schedule, ranks, chunks) in [("1f1b", 4, 1), ("zb-h2", 2, 1), ("zbv", 2, 2), ("interleaved", 2, 2)] {
        let mut run = TinyRun::default();
        run.options.step.micro_batches = 8;
        run.options.threads = 1;
        let plain = run.steps(2);
        put_on_pipeline(&mut run, schedule, ranks, chunks);
        let arenas = |run: &TinyRun| run.on_ranks(|trainer| trainer.report().arena_bytes);
        let most = arenas(&run).into_iter().max().unwrap();
        run.options.step.memory.recompute = Recompute::Layers(Layers::All);
        let least = arenas(&run).into_iter().max().unwrap();
        assert!(least < most);
        run.options.step.memory.recompute = Recompute::None;
        for part in 1..4 {
            let budget = least + (most - least) * part / 4;
            run.options.step.memory.budget = Some(budget);
            let fitted = arenas(&run);
            println!("{:?}: {budget} between {least} and {most}, {fitted:?}", run.options.step.pipeline);
            assert!(fitted.iter().all(|&arena| arena <= budget), "{budget}: {fitted:?}");
            assert_eq!(plain, run.steps_on_ranks(2), "{:?}, {budget} bytes", run.options.step.pipeline);
        }
    }
}

#[test]
fn names_that_do_not_exist_are_refused() {
    for (policy, words) in [
        (ops(&["gelo"]), ["gelo", "gelu"]),
        (Recompute::Layers(Layers::Named(vec!["h.9".into()])), ["h.9", "h.0, h.1"]),
        (Recompute::Cycle(Vec::new()), ["recompute", "cycle"]),
        (Recompute::Cycle(vec![Recompute::Cycle(vec![Recompute::None])]), ["recompute", "cycle"]),
    ] {
        let mut run = TinyRun::default();
        run.options.step.memory.recompute = policy;
        let error = run.try_trainer().expect_err("it names what is not there").to_string();
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
    }
}

/// Tests several budgets from the smallest to the largest. Each plan fits its budget, and a larger budget never costs
/// more time.
#[test]
fn a_budget_is_kept_and_more_bytes_never_cost_more_time() {
    let models = [
        (Kind::Gpt, 4),
        (Kind::Llama, 2),
        (Kind::Moe(MoeStyle::DeepSeek), 2),
        (Kind::Gpt, 1),
        (Kind::Moe(MoeStyle::Switch), 1),
    ];
    for &(kind, micro_batches) in few(&models, 3) {
        let mut run = TinyRun { kind, ..TinyRun::default() };
        run.options.step.micro_batches = micro_batches;
        run.options.threads = 1;
        let plain = run.steps(2);
        let (all, all_flops) = (run.trainer().report().arena_bytes, run.trainer().report().flops_per_step);
        run.options.step.memory.budget = Some(1);
        let smallest = match run.try_trainer() {
            Err(TrainError::Compile(CompileError::OverBudget { budget: 1, smallest, .. })) => smallest,
            other => panic!("one byte is enough: {other:?}"),
        };
        assert!(smallest < all, "{smallest} of {all}");
        let mut flops = u64::MAX;
        let mut parts = few(&[0, 2, 5, 8, 1, 3, 4, 6, 7], 4).to_vec();
        parts.sort_unstable();
        for eighths in parts {
            let budget = smallest + (all - smallest) * eighths / 8;
            // On this device, only arithmetic takes time.
            run.options.step.memory.budget = Some(budget);
            run.options.step.memory.rates = Rates { flops: 1e9, bytes: 1e30 };
            run.options.poison = true;
            let trainer = run.trainer();
            let report = trainer.report();
            println!(
                "{kind:?} {micro_batches}: {budget} bytes, {} planned, {} FLOP",
                report.arena_bytes, report.flops_per_step
            );
            assert!(report.arena_bytes <= budget, "{} bytes of {budget}", report.arena_bytes);
            assert!(report.flops_per_step <= flops);
            assert!(budget < all || report.flops_per_step == all_flops, "what fits is not computed again");
            flops = report.flops_per_step;
            assert_eq!(plain, run.steps(2), "{budget} bytes");
        }
    }
}

/// With one micro-batch and released gradients, the gradients of all parameters are never alive at the same time. The
/// results are unchanged.
#[test]
fn gradients_that_are_let_go_of_give_the_same_bits_in_less_memory() {
    for (kind, micro_batches, ranks) in [
        (Kind::Gpt, 1, 1),
        (Kind::Llama, 1, 1),
        (Kind::Gpt, 4, 1),
        (Kind::Gpt, 4, 2),
        (Kind::Moe(MoeStyle::DeepSeek), 1, 1),
        (Kind::Moe(MoeStyle::DeepSeek), 4, 2),
    ] {
        let mut run = TinyRun { kind, ..TinyRun::default() };
        run.options.step.micro_batches = micro_batches;
        // With few tokens, gradients are most of the bytes that are not persistent.
        (run.options.step.batch, run.options.step.sequence) = (4, 4);
        run.options.step.mesh = Mesh::pipeline(ranks);
        run.options.step.optimizer = AdamW { max_norm: f64::INFINITY, ..AdamW::default() }.into();
        run.options.step.memory.recompute = Recompute::Layers(Layers::All);
        let plain = run.steps_on_ranks(3);
        let arenas = |run: &TinyRun| run.on_ranks(|trainer| trainer.report().arena_bytes);
        let kept = arenas(&run);
        run.options.step.memory.release_gradients = true;
        run.options.poison = true;
        assert_eq!(plain, run.steps_on_ranks(3), "{kind:?}, {micro_batches} micro-batches, {ranks} ranks");
        let released = arenas(&run);
        println!("{kind:?}, {micro_batches} micro-batches: {released:?} bytes instead of {kept:?}");
        // With several micro-batches, gradients are alive from the first micro-batch to the last.
        assert!(micro_batches > 1 || released[0] < kept[0] / 20 * 19);
    }
    let mut run = TinyRun::default();
    run.options.step.memory.release_gradients = true;
    let error = run.try_trainer().expect_err("gradients are clipped").to_string();
    assert!(error.contains("max_norm"), "{error}");
}

//! Layers of experts in training: the load-balancing bias, watched values, and what is refused.

use gapless::engine::checkpoint::Checkpoint;
use gapless::engine::compile::Error as CompileError;
use gapless::engine::nn::{Capacity, Choice, RouterConfig};
use gapless::engine::ops::{DropPolicy, ExpertGroups};
use gapless::engine::optim::AdamW;
use gapless::models::{LlamaConfig, Moe, MoeConfig, MoeStyle};
use gapless::{Mesh, TrainError, Trainer};

use crate::common::{Kind, TinyRun, moe, parameters};

const DEEP_SEEK: Kind = Kind::Moe(MoeStyle::DeepSeek);

/// Layer 0 of [`DEEP_SEEK`] is dense, so this is the first router.
const GATE: &str = "model.layers.1.mlp.gate";
const BIAS: &str = "model.layers.1.mlp.gate.e_score_correction_bias";

fn values(tensor: Result<candle_core::Tensor, gapless::TrainError>) -> Vec<f32> {
    tensor.unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

fn set(trainer: &mut Trainer, name: &str, change: impl Fn(usize, f32) -> f32) {
    let tensor = trainer.tensor(name).unwrap();
    let changed: Vec<f32> = values(Ok(tensor.clone())).into_iter().enumerate().map(|(i, x)| change(i, x)).collect();
    let changed = candle_core::Tensor::from_vec(changed, tensor.shape(), tensor.device()).unwrap();
    trainer.set_tensor(name, &changed).unwrap();
}

#[test]
fn the_bias_of_an_overloaded_expert_falls_by_the_rate_and_that_of_an_idle_one_rises() {
    let rate = moe(MoeStyle::DeepSeek).router.bias_rate as f32;
    let mut run = TinyRun { kind: DEEP_SEEK, ..TinyRun::default() };
    run.options.step.micro_batches = 2;
    // Neither the learning rate nor weight decay applies to the bias.
    run.options.learning_rate.peak = 0.1;
    run.options.step.optimizer = AdamW { weight_decay: 0.9, ..AdamW::default() }.into();
    let mut trainer = run.trainer();
    set(&mut trainer, BIAS, |expert, _| match expert {
        2 => 1.0,
        5 => -1.0,
        _ => 0.0,
    });
    let tokens = (run.options.step.batch * run.options.step.sequence) as f32;
    for step in 0..3 {
        let before = values(trainer.tensor(BIAS));
        run.step(&mut trainer);
        let (after, load) = (values(trainer.tensor(BIAS)), values(trainer.watched(&format!("{GATE}.load"))));
        assert_eq!((load[2], load[5]), (tokens, 0.0), "all tokens choose what they are pushed to, step {step}");
        let mean = load.iter().sum::<f32>() / load.len() as f32;
        for (expert, ((before, after), load)) in before.iter().zip(&after).zip(&load).enumerate() {
            let expected = match load.total_cmp(&mean) {
                std::cmp::Ordering::Less => before + rate,
                std::cmp::Ordering::Equal => *before,
                std::cmp::Ordering::Greater => before - rate,
            };
            assert_eq!(*after, expected, "expert {expert} with {load} of {mean}, step {step}");
        }
    }
}

#[test]
fn the_bias_has_no_part_in_the_norm_and_no_state() {
    let mut run = TinyRun { kind: DEEP_SEEK, ..TinyRun::default() };
    run.options.step.keep_gradients = true;
    let mut trainer = run.trainer();
    let report = run.step(&mut trainer);
    assert_eq!(values(trainer.gradient(BIAS)), values(trainer.watched(&format!("{GATE}.load"))));
    let squares = trainer.parameter_names().filter(|name| *name != BIAS).map(|name| {
        let gradient = values(trainer.gradient(name));
        gradient.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>()
    });
    let norm = squares.sum::<f64>().sqrt();
    // The reported norm is the root of an f32 sum of about 10⁵ squares, which is computed block by block.
    assert!((f64::from(report.gradient_norm) / norm - 1.0).abs() < 1e-6, "{} of {norm}", report.gradient_norm);
    assert!(trainer.tensor("exp_avg/model.layers.1.mlp.gate.weight").is_ok());
    for state in ["exp_avg", "exp_avg_sq"] {
        assert!(matches!(
            trainer.tensor(&format!("{state}/{BIAS}")),
            Err(TrainError::Compile(CompileError::UnknownTensor { .. }))
        ));
    }
    assert_eq!(trainer.report().parameters, moe(MoeStyle::DeepSeek).parameters(), "the bias is not trained");
}

#[test]
fn a_step_that_is_not_finite_moves_no_bias() {
    let run = TinyRun { kind: DEEP_SEEK, ..TinyRun::default() };
    let mut trainer = run.trainer();
    run.step(&mut trainer);
    set(&mut trainer, "lm_head.weight", |_, _| f32::INFINITY);
    let before = parameters(&trainer);
    assert!(values(trainer.tensor(BIAS)).iter().any(|&x| x != 0.0));
    let (tokens, targets) = run.batch(1);
    let error = trainer.step(&tokens, &targets).unwrap_err();
    assert!(matches!(error, TrainError::NonFinite { step: 2, .. }), "{error}");
    assert_eq!(parameters(&trainer), before);
}

/// If a router's scores are not finite, the step returns an error that names the router, and no parameter changes.
#[test]
fn routers_that_are_not_finite_are_named() {
    for kind in Kind::MOE {
        for value in [f32::NAN, f32::INFINITY, -f32::INFINITY] {
            let run = TinyRun { kind, ..TinyRun::default() };
            let mut trainer = run.trainer();
            set(&mut trainer, &format!("{GATE}.weight"), |i, x| if i % 7 == 0 { value } else { x });
            let before = parameters(&trainer);
            let (tokens, targets) = run.batch(0);
            let error = trainer.step(&tokens, &targets).unwrap_err();
            let TrainError::NonFinite { culprit, .. } = &error else { panic!("{kind:?}, {value}: {error}") };
            assert!(culprit.contains(GATE), "{kind:?}, {value}: {culprit}");
            assert_eq!(parameters(&trainer), before, "{kind:?}, {value}");
        }
    }
}

/// The load-balancing bias is restored from a checkpoint, from one rank to several and back.
#[test]
fn a_bias_goes_on_from_a_checkpoint_on_any_mesh() {
    let on = |mesh: Mesh| {
        let mut run = TinyRun { kind: DEEP_SEEK, ..TinyRun::default() };
        run.options.threads = 1;
        run.options.step.micro_batches = 4 / mesh.data;
        run.options.step.mesh = mesh;
        run
    };
    let biases = |outcome: crate::common::Outcome| -> Vec<(String, u64)> {
        outcome.parameters.into_iter().filter(|(name, _)| name == BIAS).collect()
    };
    let one = on(Mesh::default());
    let expected = biases(one.steps(4));
    assert_ne!(expected, biases(one.steps(2)));
    let (data, pipeline) = (Mesh { data: 2, ..Mesh::default() }, Mesh::pipeline(2));
    for (from, to) in [(Mesh::default(), data), (data, pipeline), (pipeline, Mesh::default())] {
        let dir = tempfile::tempdir().unwrap();
        on(from).save_on_ranks(2, dir.path());
        assert!(Checkpoint::latest(dir.path()).unwrap().is_some());
        assert_eq!(biases(on(to).resume_on_ranks(dir.path(), 2)), expected, "{from:?} to {to:?}");
    }
}

/// Returns all watched values of the last step.
fn watched(trainer: &Trainer) -> Vec<(String, Vec<f32>)> {
    trainer.watched_names().map(|name| (name.to_owned(), values(trainer.watched(name)))).collect()
}

#[test]
fn loads_and_drops_are_those_of_the_whole_batch_on_any_ranks_and_micro_batches() {
    for kind in Kind::MOE {
        let Kind::Moe(style) = kind else { unreachable!("all are mixtures") };
        let config = moe(style).router;
        let mut run = TinyRun { kind, ..TinyRun::default() };
        run.options.threads = 1;
        let seen = |run: &TinyRun| {
            run.on_ranks(|mut trainer| {
                run.step(&mut trainer);
                run.step(&mut trainer);
                watched(&trainer)
            })
        };
        let whole = seen(&run).remove(0);
        let slots = run.options.step.batch * run.options.step.sequence * config.top_k;
        let layers = 2 - moe(style).dense_layers.len();
        let parameters_named = |what: &str| whole.iter().filter(|(name, _)| name.ends_with(what)).collect::<Vec<_>>();
        let loads = parameters_named(".load");
        assert_eq!(loads.len(), if config.choice == Choice::Tokens { layers } else { 0 }, "{kind:?}");
        for (name, load) in loads {
            assert_eq!(load.len(), config.experts, "{name}");
            assert_eq!(load.iter().sum::<f32>(), slots as f32, "{name} of {kind:?}");
        }
        assert_eq!(parameters_named(".dropped").len(), if config.capacity.is_some() { layers } else { 0 }, "{kind:?}");
        run.options.poison = true;
        for (data, pipeline, micro_batches) in [(1, 1, 4), (2, 1, 2), (2, 2, 2)] {
            run.options.step.mesh = Mesh { data, pipeline, ..Mesh::default() };
            run.options.step.micro_batches = micro_batches;
            for rank in seen(&run) {
                assert_eq!(rank, whole, "{kind:?} on {:?} in {micro_batches} micro-batches", run.options.step.mesh);
            }
        }
    }
}

#[test]
fn what_an_expert_has_no_room_for_is_dropped_and_counted() {
    let mut run = TinyRun { kind: Kind::Moe(MoeStyle::Switch), ..TinyRun::default() };
    let (sequence, config) = (run.options.step.sequence, moe(MoeStyle::Switch).router);
    run.options.step.batch = 1;
    let room = (config.capacity.unwrap().factor * (sequence * config.top_k) as f64 / config.experts as f64).ceil();
    let mut trainer = run.trainer();
    for step in 0..3 {
        run.step(&mut trainer);
        for layer in 0..2 {
            let see = |what: &str| values(trainer.watched(&format!("model.layers.{layer}.mlp.gate.{what}")));
            let over: f32 = see("load").iter().map(|load| (load - room as f32).max(0.0)).sum();
            assert_eq!(see("dropped"), [over], "layer {layer}, step {step}");
            assert!(over > 0.0);
        }
    }
}

#[test]
fn a_router_that_makes_no_sense_is_refused() {
    let base = moe(MoeStyle::Mixtral);
    let refused = |config: MoeConfig, words: &[&str]| {
        let made = Trainer::new(|vb| Moe::new(&config, vb), TinyRun::default().options);
        let message = made.expect_err("must be refused").to_string();
        assert!(words.iter().all(|word| message.contains(word)), "{message:?} does not speak of {words:?}");
    };
    let router = |change: &dyn Fn(&mut RouterConfig)| {
        let mut config = base.clone();
        change(&mut config.router);
        config
    };
    refused(router(&|router| router.top_k = 0), &["top_k"]);
    refused(router(&|router| router.top_k = 9), &["top_k", "experts"]);
    refused(router(&|router| router.experts = 0), &["top_k"]);
    refused(router(&|router| router.experts = 1025), &["1024"]);
    refused(router(&|router| router.jitter = 1.0), &["jitter"]);
    refused(router(&|router| router.balance_loss = f64::NAN), &["router", "finite"]);
    refused(router(&|router| router.bias_rate = -1.0), &["router"]);
    refused(router(&|router| router.capacity = Some(Capacity { factor: 0.0, drop: DropPolicy::Last })), &["capacity"]);
    refused(router(&|router| router.choice = Choice::Experts), &["capacity"]);
    for (count, limit) in [(3, 1), (4, 0), (4, 5), (0, 0)] {
        refused(router(&|router| router.groups = Some(ExpertGroups { count, limit })), &["of 8"]);
    }
    refused(router(&|router| router.groups = Some(ExpertGroups { count: 8, limit: 1 })), &["2 of 1 experts"]);
    refused(MoeConfig { dense_layers: vec![2], ..base.clone() }, &["the dense layer 2 is not one of its"]);
    refused(MoeConfig { expert_hidden: 0, ..base.clone() }, &["gate_proj"]);
    refused(MoeConfig { llama: LlamaConfig { heads: 5, ..base.llama.clone() }, ..base }, &["5 heads"]);
}

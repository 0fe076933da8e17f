//! Training a part of a model. Tests the gradients of that part, the unchanged bits of the rest, and the activations
//! that are kept for the part's gradients.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use candle_core::{Device, Tensor as Data};
use gapless::alloc::Role;
use gapless::alloc::draw::Bytes;
use gapless::engine::checkpoint::Checkpoint;
use gapless::engine::graph::{Graph, Node, Spec, ValueId, lock};
use gapless::models::{Llama, LlamaConfig, MoeStyle};
use gapless::nn::VarBuilder;
use gapless::{
    DType, Layers, Lora, Mesh, Model, Precision, Recompute, StepOptions, Tensor, TrainOptions, Trainable, Trainer,
};
use serde_json::Value;

use crate::common::{Kind, TinyRun, on_cpu, parameters};

fn lora(targets: &[&str]) -> Trainable {
    let targets = targets.iter().map(|&target| target.to_owned()).collect();
    Trainable::Lora(Lora { rank: 3, alpha: 6.0, targets, ..Lora::default() })
}

fn only(patterns: &[&str]) -> Trainable {
    Trainable::Only(patterns.iter().map(|&pattern| pattern.to_owned()).collect())
}

fn run(kind: Kind, trainable: Trainable) -> TinyRun {
    let mut run = TinyRun { kind, ..TinyRun::default() };
    run.options.step.trainable = trainable;
    run
}

/// Runs that train parts of models of every kind.
fn parts() -> Vec<TinyRun> {
    vec![
        run(Kind::Gpt, only(&["h.1", "ln_f.bias"])),
        run(Kind::Gpt, only(&["wte"])),
        run(Kind::Gpt, lora(&["c_attn", "mlp.c_proj"])),
        run(Kind::Llama, only(&["lm_head"])),
        run(Kind::Llama, only(&["*norm*", "model.layers.0.mlp.up_proj"])),
        run(Kind::Llama, lora(&["q_proj", "v_proj", "down_proj"])),
        run(Kind::Llama, lora(&["lm_head"])),
        run(Kind::Moe(MoeStyle::Mixtral), lora(&["q_proj", "o_proj"])),
        run(Kind::Moe(MoeStyle::Qwen), lora(&["shared_expert.up_proj"])),
        run(Kind::Moe(MoeStyle::DeepSeek), only(&["model.layers.1.mlp.experts.down_proj", "*.gate.weight"])),
        run(Kind::Moe(MoeStyle::ExpertChoice), only(&["model.layers.0"])),
    ]
}

fn bits(tensor: &Data) -> Vec<u32> {
    tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap().into_iter().map(f32::to_bits).collect()
}

/// The gradients after one step, by name.
fn gradients(run: &TinyRun) -> BTreeMap<String, Vec<u32>> {
    let mut run = run.clone();
    run.options.step.keep_gradients = true;
    let mut trainer = run.trainer();
    run.step(&mut trainer);
    let names: Vec<String> = trainer.parameter_names().map(str::to_owned).collect();
    names.into_iter().filter_map(|name| Some((name.clone(), bits(&trainer.gradient(&name).ok()?)))).collect()
}

#[test]
fn the_trained_part_has_the_gradients_of_the_whole() {
    for run in parts().into_iter().filter(|run| matches!(run.options.step.trainable, Trainable::Only(_))) {
        let whole = gradients(&TinyRun {
            options: TrainOptions {
                step: StepOptions { trainable: Trainable::All, ..run.options.step.clone() },
                ..run.options.clone()
            },
            ..run
        });
        let part = gradients(&run);
        let trained = |name: &&String| run.options.step.trainable.trains(name);
        assert!(part.keys().eq(whole.keys().filter(trained)), "{:?}: {:?}", run.options.step.trainable, part.keys());
        assert!(!part.is_empty());
        for (name, gradient) in &part {
            assert!(*gradient == whole[name], "{:?}: {name}", run.options.step.trainable);
        }
    }
}

/// If the merged model has the weight W' = W + s·B·A, the adapter's gradients are dA = s·Bᵀ·dW' and dB = s·dW'·Aᵀ.
#[test]
fn an_adapter_has_the_gradients_that_follow_from_the_merged_weight() {
    for (kind, targets) in [
        (Kind::Llama, ["q_proj", "down_proj", "lm_head"].as_slice()),
        (Kind::Moe(MoeStyle::Qwen), &["k_proj", "shared_expert.gate_proj"]),
    ] {
        let mut run = run(kind, lora(targets));
        run.options.step.keep_gradients = true;
        let mut adapted = run.trainer();
        let mut whole = TinyRun {
            options: TrainOptions {
                step: StepOptions { trainable: Trainable::All, ..run.options.step.clone() },
                ..run.options.clone()
            },
            ..run
        }
        .trainer();
        let names: Vec<String> = adapted.parameter_names().map(str::to_owned).collect();
        let layers: Vec<&str> = names.iter().filter_map(|name| name.strip_suffix(".lora_A.weight")).collect();
        assert!(layers.len() > targets.len());
        for layer in &layers {
            let [a, b] = Lora::parameters(layer);
            let (of_a, of_b) =
                (adapted.tensor(&a).unwrap().copy().unwrap(), adapted.tensor(&b).unwrap().copy().unwrap());
            let random = |i: usize| ((i * 7919 % 1009) as f32 / 1009.0 - 0.5) * 0.2;
            let of_b =
                Data::from_vec((0..of_b.elem_count()).map(random).collect(), of_b.shape(), &Device::Cpu).unwrap();
            adapted.set_tensor(&b, &of_b).unwrap();
            let weight = format!("{layer}.weight");
            let merged = (whole.tensor(&weight).unwrap().copy().unwrap()
                + (of_b.matmul(&of_a).unwrap() * 2.0).unwrap())
            .unwrap();
            whole.set_tensor(&weight, &merged).unwrap();
        }
        let before: BTreeMap<String, Data> =
            names.iter().map(|n| (n.clone(), adapted.tensor(n).unwrap().copy().unwrap())).collect();
        let losses = [run.step(&mut adapted).loss, run.step(&mut whole).loss];
        // The losses may differ by f32 rounding, because the same sums are in another order.
        assert!((losses[0] - losses[1]).abs() <= 1e-5, "{losses:?}");
        for layer in &layers {
            let [a, b] = Lora::parameters(layer);
            let d_weight = whole.gradient(&format!("{layer}.weight")).unwrap().copy().unwrap();
            let d_a = (before[&b].t().unwrap().matmul(&d_weight).unwrap() * 2.0).unwrap();
            let d_b = (d_weight.matmul(&before[&a].t().unwrap()).unwrap() * 2.0).unwrap();
            for (name, expected) in [(&a, d_a), (&b, d_b)] {
                let found = adapted.gradient(name).unwrap().copy().unwrap();
                let most = |t: &Data| t.abs().unwrap().max_all().unwrap().to_scalar::<f32>().unwrap();
                let off = most(&(&found - &expected).unwrap()) / most(&expected);
                assert!(off <= 1e-4, "{name}: {off}");
            }
        }
    }
}

#[test]
fn what_is_frozen_keeps_its_bits_and_has_no_state() {
    for run in parts() {
        let trainable = &run.options.step.trainable;
        let mut trainer = run.trainer();
        let before = parameters(&trainer);
        run.go_on(&mut trainer, 2);
        for ((name, before), (_, after)) in before.iter().zip(parameters(&trainer)) {
            // At first B is zero, so the gradient of A is zero. A changes nevertheless, because of weight decay.
            assert_eq!(*before != after, trainable.trains(name), "{trainable:?}: {name}");
            assert_eq!(trainer.tensor(&format!("exp_avg/{name}")).is_ok(), trainable.trains(name), "{name}");
        }
        let elements = |name: &str| trainer.tensor(name).unwrap().elem_count() as u64;
        let trained = || trainer.parameter_names().filter(|name| trainable.trains(name)).map(elements);
        assert_eq!(trainer.report().parameters, trained().sum::<u64>(), "{trainable:?}");
        let (roles, own) = (trainer.report().summary.roles, trained().sum::<u64>() * 8);
        let states = roles.iter().find(|bytes| bytes.role == Role::OptimizerState).map_or(0, |bytes| bytes.bytes);
        // Each parameter has two moments, each padded to the alignment of a buffer.
        let padding = 2 * 64 * trained().count() as u64;
        assert!((own..=own + padding).contains(&states), "{trainable:?}: {states} bytes of states for {own}");
    }
}

#[test]
fn micro_batches_recomputation_and_pipelines_change_no_bit() {
    for plain in parts() {
        let expected = plain.steps(2);
        let what = format!("{:?} {:?}", plain.kind, plain.options.step.trainable);
        let mut other = plain.clone();
        (other.options.step.micro_batches, other.options.poison) = (4, true);
        // Mixtures are excluded, because the statistics of their routers are per micro-batch.
        if !matches!(plain.kind, Kind::Moe(_)) {
            assert_eq!(other.steps(2), expected, "{what} in micro-batches");
        }
        let mut other = plain.clone();
        (other.options.step.memory.recompute, other.options.poison) = (Recompute::Layers(Layers::All), true);
        assert_eq!(other.steps(2), expected, "{what}, recomputed");
        let mut other = plain.clone();
        other.options.step.mesh = Mesh::pipeline(2);
        other.options.threads = 1;
        assert_eq!(other.steps_on_ranks(2), expected, "{what} on two stages");
    }
}

#[test]
fn data_ranks_agree_with_one() {
    // Mixtures are excluded, because a router only counts the tokens of a rank's own micro-batch.
    for plain in parts().into_iter().filter(|run| !matches!(run.kind, Kind::Moe(_))) {
        let expected = plain.steps(2);
        let mut other = plain.clone();
        other.options.step.mesh = Mesh { data: 2, ..Mesh::default() };
        other.options.threads = 1;
        let outcome = other.steps_on_ranks(2);
        for (a, b) in outcome.losses.iter().zip(&expected.losses) {
            let (a, b) = (f32::from_bits(*a), f32::from_bits(*b));
            // This tolerance is the one that docs/architecture.md allows for rounding.
            assert!((a - b).abs() <= 1e-5 * b, "{:?}: {a} {b}", plain.options.step.trainable);
        }
    }
}

#[test]
fn a_resumed_run_goes_on_with_the_same_bits() {
    let mut runs = parts();
    if let Trainable::Lora(lora) = &mut runs[2].options.step.trainable {
        lora.dropout = 0.25;
    }
    for run in runs {
        let dir = tempfile::tempdir().unwrap();
        let mut straight = run.trainer();
        run.go_on(&mut straight, 2);
        straight.save(dir.path(), Value::Null).unwrap();
        let expected = run.go_on(&mut straight, 2);
        let mut other = run.clone();
        other.options.seed = 99; // frozen weights are the checkpoint's, too
        let mut resumed = other.trainer();
        resumed.resume(&Checkpoint::latest(dir.path()).unwrap().unwrap()).unwrap();
        assert_eq!(run.go_on(&mut resumed, 2), expected, "{:?}", run.options.step.trainable);
    }
}

#[test]
fn an_adapter_drops_its_input_while_it_is_trained_only() {
    let mut plain = run(Kind::Llama, lora(&["q_proj", "v_proj"]));
    let with = |dropout: f64, run: &mut TinyRun| {
        if let Trainable::Lora(lora) = &mut run.options.step.trainable {
            lora.dropout = dropout;
        }
        let mut trainer = run.trainer();
        run.go_on(&mut trainer, 2);
        trainer
    };
    let (mut without, mut dropped) = (with(0.0, &mut plain), with(0.5, &mut plain));
    assert_ne!(parameters(&without), parameters(&dropped));
    for name in without.parameter_names().map(str::to_owned).collect::<Vec<_>>() {
        let value = without.tensor(&name).unwrap().copy().unwrap();
        dropped.set_tensor(&name, &value).unwrap();
    }
    let (tokens, targets) = plain.batch(9);
    assert_eq!(without.evaluate(&tokens, &targets).unwrap(), dropped.evaluate(&tokens, &targets).unwrap());
}

#[test]
fn patterns_that_match_nothing_are_named() {
    for (kind, trainable, expected) in [
        (Kind::Gpt, only(&["h.0", "h.7"]), "h.7"),
        (Kind::Gpt, lora(&["lm_head"]), "lm_head"),
        (Kind::Gpt, lora(&["wte"]), "wte"),
        (Kind::Llama, lora(&["q_proj", "qq_proj"]), "qq_proj"),
        (Kind::Llama, lora(&["embed_tokens"]), "embed_tokens"),
        (Kind::Moe(MoeStyle::Mixtral), lora(&["down_proj"]), "mlp.experts.down_proj"),
        (Kind::Moe(MoeStyle::Mixtral), lora(&["gate"]), "mlp.gate"),
        (Kind::Llama, Trainable::Lora(Lora { rank: 0, ..Lora::default() }), "rank is 0"),
        (Kind::Llama, Trainable::Lora(Lora { dropout: 1.0, ..Lora::default() }), "dropout"),
        (Kind::Llama, lora(&[]), "no targets"),
    ] {
        let error = run(kind, trainable.clone()).try_trainer().unwrap_err().to_string();
        assert!(error.contains(expected), "{trainable:?}: {error}");
    }
}

const SMALL: usize = 64;

fn small() -> LlamaConfig {
    let base =
        LlamaConfig { vocabulary: 128, layers: 3, heads: 4, kv_heads: 2, width: SMALL, ..LlamaConfig::default() };
    LlamaConfig { hidden: 128, ..base }
}

/// Returns the bytes that a backward needs from the forward. A slow reference implementation, which derives them from
/// the operands of each operation's gradient.
fn needed(config: &LlamaConfig, options: &TrainOptions) -> u64 {
    let trainable = &options.step.trainable;
    let graph = Arc::new(Mutex::new(Graph::default()));
    let model =
        Llama::new(config, VarBuilder::new(&graph, options.step.precision.dtype()).with_trainable(trainable)).unwrap();
    let ids = |name: &str| {
        let spec = Spec { shape: (options.step.batch, options.step.sequence).into(), dtype: DType::U32 };
        let id = lock(&graph).add_input(name, spec).unwrap();
        Tensor::of(&graph, id)
    };
    model.loss(&ids("tokens"), &ids("targets"), true).unwrap();
    let graph = lock(&graph);
    let names: BTreeMap<ValueId, &str> = graph.persistent().collect();
    // True if a trained parameter is among the ancestors of a value. The search is repeated for each value.
    let made = graph.nodes().iter().flat_map(|node| node.outputs.iter().map(move |&output| (output, node)));
    let makers: BTreeMap<ValueId, &Node> = made.collect();
    let trains = |value: ValueId| {
        let (mut open, mut seen) = (vec![value], BTreeSet::new());
        while let Some(value) = open.pop() {
            seen.insert(value);
            if names.get(&value).is_some_and(|name| trainable.trains(name)) {
                return true;
            }
            open.extend(
                makers.get(&value).into_iter().flat_map(|node| &node.inputs).filter(|input| !seen.contains(input)),
            );
        }
        false
    };
    let mut kept = BTreeSet::new();
    let mut bytes = 0;
    for node in graph.nodes() {
        let (input, makes) = (|index: usize| node.inputs[index], &node.outputs);
        let any = node.inputs.iter().any(|&input| trains(input));
        match node.op.name() {
            "linear" if trains(input(1)) => kept.extend([input(0)]),
            "rms_norm" if any => kept.extend([input(0), makes[1]]),
            "attention" if any => kept.extend(node.inputs.iter().chain(makes)),
            "swiglu" if any => kept.extend(&node.inputs),
            // The gradients of this operation are computed in the forward; the gradient of x is kept.
            "linear_cross_entropy" if any => bytes += graph.value(input(0)).spec.bytes(),
            "linear" | "rms_norm" | "attention" | "swiglu" | "linear_cross_entropy" => {}
            // The gradients of these operations only need the output's gradient.
            "embedding" | "rope" | "add" | "affine" | "reshape" | "transpose" | "scaled_sum" | "contiguous" => {}
            other => panic!("what does the gradient of {other} need?"),
        }
    }
    let roots: BTreeSet<ValueId> = kept.into_iter().map(|value| graph.value(value).root).collect();
    let made = roots.iter().filter(|&&root| makers.contains_key(&root));
    bytes + made.map(|&root| graph.value(root).spec.bytes()).sum::<u64>()
}

/// Returns the bytes that a step keeps between forward and backward, after comparing them with the slow reference.
fn kept(config: &LlamaConfig, options: &TrainOptions) -> u64 {
    let program = gapless::plan::program(|vb| Llama::new(config, vb), options, 0).unwrap();
    let kept = program.kept().iter().map(|kept| kept.bytes).sum();
    assert_eq!(kept, needed(config, options), "{:?}", options.step.trainable);
    kept
}

/// All linear layers of a block.
const LINEAR: [&str; 7] = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];

#[test]
fn the_forward_keeps_what_the_trained_part_needs() {
    let planned = |trainable: Trainable| {
        kept(
            &small(),
            &TrainOptions { step: StepOptions { batch: 2, sequence: 32, trainable, ..on_cpu().step }, ..on_cpu() },
        )
    };
    let [few, many] = [planned(lora(&["q_proj", "v_proj"])), planned(lora(&LINEAR))];
    assert!(few < many);
    assert!(planned(only(&["model.layers.2.mlp.down_proj"])) < few);
    assert!(planned(only(&["model.norm"])) < planned(only(&["model.layers.2.mlp.down_proj"])));
}

/// docs/hugging_face.md has the table that `cargo test --test training llama_of_1b -- --nocapture` prints.
#[test]
fn a_llama_of_1b_is_planned_in_part() {
    let extents =
        LlamaConfig { layers: 16, heads: 32, kv_heads: 8, width: 2048, hidden: 8192, ..LlamaConfig::default() };
    let config = LlamaConfig { head_size: Some(64), tied: true, ..extents };
    let part = |targets: &[&str]| match lora(targets) {
        Trainable::Lora(lora) => Trainable::Lora(Lora { rank: 16, alpha: 32.0, ..lora }),
        other => other,
    };
    let mut arenas = Vec::new();
    for (name, trainable) in [
        ("everything", Trainable::All),
        ("LoRA of rank 16 on q, v", part(&["q_proj", "v_proj"])),
        ("LoRA of rank 16 on all linear layers", part(&LINEAR)),
        ("the last block", only(&["model.layers.15", "model.norm"])),
    ] {
        let options = TrainOptions {
            step: StepOptions { batch: 4, sequence: 1024, precision: Precision::Bf16, trainable, ..on_cpu().step },
            threads: 16,
            ..on_cpu()
        };
        let plan = Trainer::builder(|vb| Llama::new(&config, vb), options.clone()).plan(0).unwrap();
        let at_peak = |role: Role| {
            let roles = plan.summary.roles.iter().find(|found| found.role == role);
            Bytes(roles.map_or(0, |found| found.bytes))
        };
        let [gradients, kept] = match options.step.trainable {
            Trainable::All => [Role::Gradient, Role::Activation].map(|role| format!("{} at the peak", at_peak(role))),
            _ => [String::new(), Bytes(kept(&config, &options)).to_string()],
        };
        let (parameters, states) = (at_peak(Role::Parameter), at_peak(Role::OptimizerState));
        let line = format!("| {name} | {parameters} | {gradients} | {states} | {kept} | {} |", Bytes(plan.arena_bytes))
            .replace("|  |", "| |");
        println!("{line}");
        gapless_testing::assert_on_page("docs/hugging_face.md", &line);
        assert!(plan.gap < 1.001);
        arenas.push(plan.arena_bytes);
    }
    let [everything, few, many, last] = arenas[..] else { unreachable!("four plans") };
    assert!(last < few && few < many && 2 * many < everything);
}

//! Experts that ranks divide along other axes than the rest of the model give the results of one rank.

use gapless::alloc::Role;
use gapless::alloc::draw::Bytes;
use gapless::engine::compile::{Buffer, InstrKind, compile};
use gapless::engine::ops::Collective;
use gapless::models::{LlamaConfig, Moe, MoeConfig};
use gapless::nn::RouterConfig;
use gapless::parallel::{Axes, Axis};
use gapless::{Mesh, Precision, StepOptions, TrainOptions, Trainer};
use gapless_testing::{every_other, few};

use crate::common::{Kind, TinyRun, on_cpu};
use crate::tensor_ranks::{case as case_on, checkpoints_go_around, close, run};

const STEPS: u64 = 3;

fn case(kind: Kind, mesh: Mesh, sequence_parallel: bool) -> TinyRun {
    let mut run = case_on(kind, mesh, sequence_parallel);
    run.options.step.keep_gradients = false;
    run
}

/// Four ranks hold two of eight experts each. Attention is divided by two tensor ranks, and two ranks share the batch.
fn tensor_and_data() -> Mesh {
    Mesh { data: 2, tensor: 2, fold: Axes::of(&[Axis::Data, Axis::Tensor]), ..Mesh::default() }
}

/// Meshes whose experts are folded, with sequence parallelism or without.
fn meshes() -> [(Mesh, bool); 8] {
    let one = Mesh::default();
    let tensor = Mesh { tensor: 2, fold: Axes::TENSOR, ..one };
    let context = Mesh { context: 2, fold: Axes::CONTEXT, ..one };
    [
        (tensor_and_data(), true),
        (tensor_and_data(), false),
        (tensor, false),
        (context, false),
        (Mesh { expert: 2, ..tensor }, true),
        (Mesh { tensor: 2, fold: Axes::CONTEXT | Axes::TENSOR, ..context }, true),
        (Mesh { pipeline: 2, ..tensor }, true),
        (Mesh { shard: 2, fold: Axes::SHARD | Axes::TENSOR, ..tensor }, true),
    ]
}

/// Losses, norms, loads and the gradient of each expert are those of one rank, with every kind of routing, and with packed
/// documents, whose targets have unequal weights on each rank.
#[test]
fn folded_experts_train_as_on_one_rank() {
    for (turn, kind) in Kind::MOE.into_iter().enumerate() {
        for (index, (mesh, sequence_parallel)) in every_other(&meshes(), turn).into_iter().enumerate() {
            let documents = (turn + index).is_multiple_of(2);
            let on = |mesh: Mesh, sequence_parallel| {
                let mut case = case(kind, mesh, sequence_parallel);
                case.options.step.documents = documents;
                run(&case, STEPS)
            };
            let what = format!("{kind:?} on {mesh:?}, sequence parallel: {sequence_parallel}, documents: {documents}");
            let folded = on(mesh, sequence_parallel);
            assert!(folded.split.iter().any(|name| name.contains(".experts.")), "{what}");
            close(&folded, &on(Mesh::default(), false), &what);
        }
    }
}

/// An evaluation of folded experts has the loss of one rank, and steps with all layers recomputed have the bits of steps
/// without.
#[test]
fn folded_experts_are_evaluated_and_recomputed() {
    for (turn, &(mesh, sequence_parallel)) in few(&meshes(), 3).iter().enumerate() {
        let kind = Kind::MOE[turn % Kind::MOE.len()];
        let parts = case(kind, mesh, sequence_parallel).options.step.parts();
        let on = |mesh: Mesh, sequence_parallel, recompute: &str| {
            let mut case = case(kind, mesh, sequence_parallel);
            // All evaluate as many sequences.
            case.options.step.micro_batches = parts / (mesh.data * mesh.shard * mesh.expert);
            case.options.step.memory.recompute = recompute.parse().unwrap();
            case.options.poison = true;
            let each = |mut trainer: Trainer| {
                let loss = case.step(&mut trainer).loss;
                trainer.check_run().unwrap();
                let size = trainer.options().step.evaluation_batch() * trainer.options().step.sequence;
                let (tokens, targets) = case.batch(3);
                [loss, case.step(&mut trainer).loss, trainer.evaluate(&tokens[..size], &targets[..size]).unwrap()]
            };
            if mesh.ranks().unwrap() == 1 { vec![each(case.trainer())] } else { case.on_ranks(each) }
        };
        let folded = on(mesh, sequence_parallel, "none");
        assert_eq!(on(mesh, sequence_parallel, "layers"), folded, "{kind:?} on {mesh:?}");
        let alone = on(Mesh::default(), false, "none").swap_remove(0);
        for values in folded {
            for (a, b) in values.into_iter().zip(alone) {
                assert!((a - b).abs() <= 1e-5 * b.abs(), "{kind:?} on {mesh:?}: {a} instead of {b}");
            }
        }
    }
}

/// Each rank holds whole experts: no rank has a part of the width of one.
#[test]
fn folded_ranks_hold_whole_experts() {
    let Some(kind) = Kind::MOE.first().copied() else { unreachable!("there are kinds of mixtures") };
    let windows = case(kind, tensor_and_data(), true).on_ranks(|trainer| {
        let experts = trainer.parameter_names().filter(|name| name.contains(".experts."));
        experts.map(|name| trainer.window(name).unwrap()).collect::<Vec<_>>()
    });
    for (rank, windows) in windows.iter().enumerate() {
        assert!(!windows.is_empty());
        for window in windows {
            assert_eq!(window.held()[0].iter().cloned().flatten().collect::<Vec<_>>(), [2 * rank, 2 * rank + 1]);
            assert_eq!(window.dims()[1..], window.whole_dims()[1..]);
        }
    }
}

#[test]
fn checkpoints_go_from_and_to_folded_ranks() {
    let all = meshes();
    let meshes = [(Mesh::default(), false), all[0], all[3], all[4], (Mesh { tensor: 2, ..Mesh::default() }, true)];
    checkpoints_go_around(meshes.len(), |model, mesh| {
        let (mesh, sequence_parallel) = meshes[mesh];
        case(Kind::MOE[model % Kind::MOE.len()], mesh, sequence_parallel)
    });
}

/// Prints the table of docs/ranks.md.
#[test]
fn experts_keep_and_send_what_the_formulas_say() {
    const EXPERTS: usize = 8;
    const WIDTH: usize = 256;
    const HIDDEN: usize = 512;
    const LAYERS: usize = 4;
    const TOP_K: usize = 2;
    let llama = LlamaConfig {
        vocabulary: 4096,
        layers: LAYERS,
        heads: 8,
        kv_heads: 4,
        width: WIDTH,
        hidden: HIDDEN,
        ..LlamaConfig::default()
    };
    let router = RouterConfig { experts: EXPERTS, top_k: TOP_K, ..RouterConfig::default() };
    let config = MoeConfig { llama, router, expert_hidden: HIDDEN, ..MoeConfig::default() };
    let one = Mesh::default();
    let meshes = [
        ("`expert = 4`", Mesh { expert: 4, ..one }),
        ("`expert = 2`, `tensor = 2`", Mesh { expert: 2, tensor: 2, ..one }),
        ("`data = 2`, `tensor = 2`, `fold = [\"data\", \"tensor\"]`", tensor_and_data()),
        ("`expert = 2`, `tensor = 2`, `fold = [\"tensor\"]`", Mesh { expert: 2, tensor: 2, fold: Axes::TENSOR, ..one }),
        ("`context = 4`, `fold = [\"context\"]`", Mesh { context: 4, fold: Axes::CONTEXT, ..one }),
        ("`context = 2`, `expert = 2`", Mesh { context: 2, expert: 2, ..one }),
    ];
    let (batch, sequence) = (16, 256);
    let mut lines = Vec::new();
    for (name, mesh) in meshes {
        let micro_batches = 4 / (mesh.data * mesh.expert);
        let step = StepOptions {
            batch,
            sequence,
            micro_batches,
            mesh,
            sequence_parallel: mesh.tensor > 1,
            precision: Precision::Bf16,
            ..on_cpu().step
        };
        let options = TrainOptions { threads: 1, step, ..on_cpu() };
        let program = gapless::plan::program(|vb| Moe::new(&config, vb), &options, 0).unwrap();
        let is_kept = |buffer: &&Buffer| {
            matches!(buffer.label.role, Role::Parameter | Role::OptimizerState)
                && buffer.label.tensor.contains(".experts.")
        };
        let kept: u64 = program.buffers.iter().filter(is_kept).map(|buffer| buffer.bytes).sum();
        // Routed evenly, each rank receives as many rows as it sends.
        let sent = program.instrs.iter().map(|instr| {
            let InstrKind::Collective(collective @ Collective::AllToAllRows { .. }, _) = instr.kind else { return 0 };
            let output = &instr.outputs[0];
            let all = (output.layout.shape().elem_count() * output.dtype.size_in_bytes()) as u64;
            let rows = program.buffers[output.buffer.index()].dynamic_rows.map_or(all, |counted| counted.balanced);
            let ranks = mesh.size(collective.axes()) as u64;
            rows / ranks * (ranks - 1)
        });
        let sent: u64 = sent.sum();
        let holders = mesh.size(mesh.experts()) as f64;
        let widths = if mesh.fold == Axes::NONE { mesh.tensor as f64 } else { 1.0 };
        // Parameters of 2 bytes, and f32 masters and moments.
        let kept_by_formula = (14 * LAYERS * 3 * EXPERTS * HIDDEN * WIDTH) as f64 / (holders * widths);
        // Rows, their weights and results, and the gradients of these, in bf16. Tensor ranks that do not hold whole experts
        // send the same rows.
        let ranks_with_other_rows = (mesh.data * mesh.expert * mesh.context) as f64 * mesh.tensor as f64 / widths;
        let rows = (batch * sequence * TOP_K) as f64 / ranks_with_other_rows;
        let sent_by_formula = LAYERS as f64 * rows * (4 * WIDTH + 2) as f64 * 2.0 * (holders - 1.0) / holders;
        for (what, found, formula) in [("kept", kept, kept_by_formula), ("sent", sent, sent_by_formula)] {
            assert!((found as f64 / formula - 1.0).abs() < 0.01, "{name}: {found} bytes {what}, {formula} by formula");
        }
        let peak = compile(&[program], &options.step.planning()).unwrap().solution().height;
        let [kept_by_formula, sent_by_formula] = [kept_by_formula, sent_by_formula].map(|bytes| Bytes(bytes as u64));
        let line = format!(
            "| {name} | {kept_by_formula} | {} | {} | {sent_by_formula} | {} |",
            Bytes(kept),
            Bytes(peak),
            Bytes(sent)
        );
        println!("{line}");
        lines.push(line);
    }
    lines.iter().for_each(|line| gapless_testing::assert_on_page("docs/ranks.md", line));
}

#[test]
fn meshes_that_cannot_be_folded_are_refused() {
    let refused = |mesh| case(Kind::MOE[0], mesh, false).options.step.check().unwrap_err().to_string();
    let error = refused(Mesh { pipeline: 2, fold: Axes::PIPELINE, ..Mesh::default() });
    assert!(error.contains("mesh.fold") && error.contains("different layers"), "{error}");
}

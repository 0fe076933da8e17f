//! Experts that ranks divide along other axes than the rest of the model give the results of one rank.

use gapless::parallel::{Axes, Axis};
use gapless::{Checkpoint, Mesh, Trainer};
use gapless_testing::{every_other, in_turn};

use crate::common::{Kind, TinyRun};
use crate::tensor_ranks::{case as case_on, close, run, run_after};

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
    for (turn, (mesh, sequence_parallel)) in meshes().into_iter().enumerate() {
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
            assert_eq!(window.held()[0], [2 * rank..2 * rank + 2]);
            assert_eq!(window.dims()[1..], window.whole_dims()[1..]);
        }
    }
}

/// A checkpoint of any of these meshes is resumed on any other, with the same bits of parameters and moments.
#[test]
fn checkpoints_go_from_and_to_folded_ranks() {
    let all = meshes();
    let meshes = [(Mesh::default(), false), all[0], all[3], all[4], (Mesh { tensor: 2, ..Mesh::default() }, true)];
    for (turn, (from, sequence_parallel)) in meshes.into_iter().enumerate() {
        let kind = Kind::MOE[turn % Kind::MOE.len()];
        let dir = tempfile::tempdir().unwrap();
        let save = |trainer: &mut Trainer| _ = trainer.save(dir.path(), serde_json::Value::Null).unwrap();
        let resume = |trainer: &mut Trainer| {
            trainer.resume(&Checkpoint::latest(dir.path()).unwrap().unwrap()).unwrap();
        };
        let saved = run_after(&case(kind, from, sequence_parallel), 2, |_| {}, save);
        let next = run_after(&case(kind, from, sequence_parallel), 1, resume, |_| {});
        for &(to, sequence_parallel) in in_turn(&meshes, turn) {
            let what = format!("{kind:?} from {from:?} to {to:?}");
            let resumed = run_after(&case(kind, to, sequence_parallel), 0, resume, |_| {});
            assert!(resumed.tensors == saved.tensors, "{what}");
            close(&run_after(&case(kind, to, sequence_parallel), 1, resume, |_| {}), &next, &what);
        }
    }
}

#[test]
fn meshes_that_cannot_be_folded_are_refused() {
    let refused = |mesh| case(Kind::MOE[0], mesh, false).options.step.check().unwrap_err().to_string();
    let error = refused(Mesh { pipeline: 2, fold: Axes::PIPELINE, ..Mesh::default() });
    assert!(error.contains("mesh.fold") && error.contains("different layers"), "{error}");
}

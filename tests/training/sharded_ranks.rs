//! Ranks that divide gradients, optimizer states and parameters (ZeRO stages 2 and 3, hybrid sharding) give the results of
//! one rank.

use gapless::models::MoeStyle;
use gapless::{Checkpoint, Layers, Lora, Mesh, Precision, Recompute, Trainable, Trainer};
use gapless_testing::in_turn;

use crate::common::{Kind, TinyRun};
use crate::tensor_ranks::{Outcome, STEPS, close, run, run_after};

/// Number of parts of a batch: micro-batches of all ranks together.
const PARTS: usize = 8;

fn mesh(data: usize, shard: usize, tensor: usize) -> Mesh {
    Mesh { data, shard, tensor, ..Mesh::default() }
}

fn case(kind: Kind, mesh: Mesh) -> TinyRun {
    let mut run = TinyRun { kind, ..TinyRun::default() };
    run.options.threads = 1;
    run.options.step.micro_batches = PARTS / (mesh.data * mesh.shard * mesh.expert);
    run.options.step.mesh = mesh;
    run
}

/// Compares the first moments after one step, which are gradients times a number that is equal for all.
fn same_gradients(outcome: &Outcome, expected: &Outcome, what: &str) {
    for (name, a) in outcome.tensors.iter().filter(|(name, _)| name.starts_with("exp_avg/")) {
        let b = &expected.tensors[name];
        let distance = a.iter().zip(b).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>().sqrt();
        let norm = b.iter().map(|&b| f64::from(b).powi(2)).sum::<f64>().sqrt();
        assert!(distance <= 1e-5 * norm.max(1e-3), "{what}: {name} is off by {distance} of {norm}");
    }
}

/// Bits of everything that a run computes.
fn bits(outcome: &Outcome) -> Vec<(&str, Vec<u32>)> {
    let of = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect();
    let tensors = outcome.tensors.iter().map(|(name, values)| (name.as_str(), of(values)));
    [("losses", of(&outcome.losses)), ("norms", of(&outcome.norms))].into_iter().chain(tensors).collect()
}

#[test]
fn shard_ranks_train_as_one_rank_does() {
    let meshes = [mesh(1, 2, 1), mesh(1, 4, 1), mesh(2, 2, 1), mesh(1, 2, 2)];
    for (turn, kind) in [Kind::Gpt, Kind::Llama, Kind::Moe(MoeStyle::Qwen)].into_iter().enumerate() {
        let one = case(kind, Mesh::default());
        let (first, all) = (run(&one, 1), run(&one, STEPS));
        for &mesh in in_turn(&meshes, turn) {
            let what = format!("{kind:?} on {mesh:?}");
            let sharded = case(kind, mesh);
            same_gradients(&run(&sharded, 1), &first, &what);
            let outcome = run(&sharded, STEPS);
            assert!(!outcome.split.is_empty(), "{what}");
            close(&outcome, &all, &what);
        }
    }
}

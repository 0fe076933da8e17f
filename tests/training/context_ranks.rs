//! Sequences whose tokens are divided among ranks give the results of one rank.

use gapless::Mesh;
use gapless::models::MoeStyle;
use gapless_testing::in_turn;

use crate::common::{Kind, TinyRun};
use crate::tensor_ranks::{case as case_on, close, run};

const STEPS: u64 = 3;

fn mesh(context: usize) -> Mesh {
    Mesh { context, ..Mesh::default() }
}

fn case(kind: Kind, mesh: Mesh, sequence_parallel: bool) -> TinyRun {
    let mut run = case_on(kind, mesh, sequence_parallel);
    // Each rank's gradients are summands of the whole ones. The first moments show the sums.
    run.options.step.keep_gradients = false;
    run
}

#[test]
fn context_ranks_train_as_one_rank_does() {
    for (turn, kind) in [Kind::Gpt, Kind::Llama, Kind::Latent, Kind::Moe(MoeStyle::Qwen)].into_iter().enumerate() {
        let alone = run(&case(kind, mesh(1), false), STEPS);
        let and = |mesh: Mesh, context| Mesh { context, ..mesh };
        let one = Mesh::default();
        let cases = [
            (mesh(2), false),
            (mesh(4), false),
            (and(Mesh { tensor: 2, ..one }, 2), true),
            (and(Mesh { tensor: 2, ..one }, 2), false),
            (and(Mesh { data: 2, ..one }, 2), false),
            (and(Mesh { pipeline: 2, ..one }, 2), false),
            (and(Mesh { shard: 2, ..one }, 2), false),
        ];
        for &(mesh, sequence_parallel) in in_turn(&cases, turn) {
            let what = format!("{kind:?} on {mesh:?}, sequence parallel: {sequence_parallel}");
            close(&run(&case(kind, mesh, sequence_parallel), STEPS), &alone, &what);
        }
    }
}

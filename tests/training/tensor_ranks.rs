//! Tensors that are divided among ranks give the results of one rank.

use std::collections::BTreeMap;

use gapless::models::MoeStyle;
use gapless::{AdamW, Checkpoint, DType, Mesh, Trainer, Window};
use gapless_testing::in_turn;

use crate::common::{Kind, TinyRun};

fn mesh(tensor: usize) -> Mesh {
    Mesh { tensor, ..Mesh::default() }
}

pub const STEPS: u64 = 3;

/// The results of a run.
#[derive(Debug)]
pub struct Outcome {
    pub losses: Vec<f32>,
    pub norms: Vec<f32>,
    /// The gathered parameters, optimizer states and gradients, by name.
    pub tensors: BTreeMap<String, Vec<f32>>,
    /// Names of parameters of which no rank holds all.
    pub split: Vec<String>,
}

/// The tensors that a rank has, with the parts of them that these are.
type Parts = Vec<(String, Window, Vec<f32>)>;

fn parts(trainer: &Trainer) -> Parts {
    let names: Vec<String> = trainer.parameter_names().map(str::to_owned).collect();
    let read = |tensor: candle_core::Tensor| {
        tensor.flatten_all().unwrap().to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap()
    };
    let mut parts = Parts::new();
    for name in names {
        let window = trainer.window(&name).unwrap();
        if let Ok(gradient) = trainer.gradient(&name) {
            parts.push((format!("gradient of {name}"), window, read(gradient)));
        }
        for name in ["", "exp_avg/", "exp_avg_sq/", "master/", "average/"].map(|state| format!("{state}{name}")) {
            if let Ok(tensor) = trainer.tensor(&name) {
                parts.push((name.clone(), trainer.window(&name).unwrap(), read(tensor)));
            }
        }
    }
    parts
}

/// Puts the parts of all ranks together. Elements that several ranks have must be equal.
fn gather(ranks: Vec<Parts>) -> (BTreeMap<String, Vec<f32>>, Vec<String>) {
    let mut tensors: BTreeMap<String, (Vec<f32>, Vec<bool>)> = BTreeMap::new();
    let mut split = Vec::new();
    for (name, window, values) in ranks.into_iter().flatten() {
        let all = window.whole_dims().iter().product();
        if !window.is_whole() && !split.contains(&name) {
            split.push(name.clone());
        }
        let (gathered, seen) = tensors.entry(name.clone()).or_insert_with(|| (vec![0.0; all], vec![false; all]));
        assert_eq!(window.elements(), values.len(), "{name}");
        for (index, value) in window.runs().flatten().zip(values) {
            assert!(!seen[index] || gathered[index] == value, "copies of element {index} of {name} differ");
            (gathered[index], seen[index]) = (value, true);
        }
    }
    let all = tensors.into_iter().map(|(name, (gathered, seen))| {
        assert!(seen.into_iter().all(|seen| seen), "the ranks hold all of {name}");
        (name, gathered)
    });
    (all.collect(), split)
}

/// Does some steps on all ranks, after `before`.
pub fn run_after(
    run: &TinyRun,
    steps: u64,
    before: impl Fn(&mut Trainer) + Sync,
    after: impl Fn(&mut Trainer) + Sync,
) -> Outcome {
    let each = |mut trainer: Trainer| {
        let (mut losses, mut norms) = (Vec::new(), Vec::new());
        before(&mut trainer);
        for _ in 0..steps {
            let (tokens, targets) = run.batch(trainer.steps());
            let report = trainer.step(&tokens, &targets).unwrap();
            losses.push(report.loss);
            norms.push(report.gradient_norm);
        }
        after(&mut trainer);
        (losses, norms, parts(&trainer))
    };
    let ranks = match run.options.step.mesh.ranks().unwrap() {
        1 => vec![each(run.trainer())],
        _ => run.on_ranks(each),
    };
    let (losses, norms) = (ranks[0].0.clone(), ranks[0].1.clone());
    for (rank, (own_losses, own_norms, _)) in ranks.iter().enumerate() {
        assert_eq!((own_losses, own_norms), (&losses, &norms), "rank {rank} reports the same");
    }
    let (tensors, split) = gather(ranks.into_iter().map(|(_, _, parts)| parts).collect());
    Outcome { losses, norms, tensors, split }
}

pub fn run(run: &TinyRun, steps: u64) -> Outcome {
    run_after(run, steps, |_| {}, |_| {})
}

/// Compares results that only differ in the order of summation. AdamW divides gradients by their size, so where a
/// gradient is rounding alone (the biases of keys, to which a softmax is blind), the steps of a parameter are, too.
pub fn close(outcome: &Outcome, expected: &Outcome, what: &str) {
    let pairs = outcome.losses.iter().zip(&expected.losses).chain(outcome.norms.iter().zip(&expected.norms));
    for (a, b) in pairs {
        assert!((a - b).abs() <= 1e-5 * b.abs(), "{what}: {a} instead of {b}");
    }
    assert!(outcome.tensors.keys().eq(expected.tensors.keys()), "{what}");
    for ((name, a), b) in outcome.tensors.iter().zip(expected.tensors.values()) {
        assert_eq!(a.len(), b.len(), "{what}: {name}");
        let distance = a.iter().zip(b).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>().sqrt();
        let norm = b.iter().map(|&b| f64::from(b).powi(2)).sum::<f64>().sqrt();
        let most = if name.starts_with("gradient") { 1e-5 } else { 1e-3 };
        assert!(distance <= most * norm.max(1e-3), "{what}: {name} is off by {distance} of {norm}");
    }
}

fn case(kind: Kind, mesh: Mesh, sequence_parallel: bool) -> TinyRun {
    let mut run = TinyRun { kind, ..TinyRun::default() };
    run.options.threads = 1;
    run.options.step.mesh = mesh;
    run.options.step.sequence_parallel = sequence_parallel;
    run.options.step.keep_gradients = mesh.data * mesh.pipeline == 1;
    run.options.step.micro_batches = 4 / mesh.data;
    run
}

#[test]
fn tensor_ranks_train_as_one_rank_does() {
    for (turn, kind) in [Kind::Gpt, Kind::Llama, Kind::Latent, Kind::Moe(MoeStyle::Qwen)].into_iter().enumerate() {
        let alone = run(&case(kind, mesh(1), false), STEPS);
        for &(ranks, sequence_parallel) in
            in_turn(&[(2, false), (2, true), (3, false), (4, true), (4, false), (8, true)], turn)
        {
            let what = format!("{kind:?} on {ranks} ranks, sequence parallel: {sequence_parallel}");
            let ranks = run(&case(kind, mesh(ranks), sequence_parallel), STEPS);
            assert!(!ranks.split.is_empty(), "{what}");
            close(&ranks, &alone, &what);
        }
    }
}

/// The meshes of the tests of checkpoints, with sequence parallelism or without.
fn meshes() -> [(Mesh, bool); 8] {
    let mesh = |data, pipeline, tensor| Mesh { data, pipeline, tensor, ..Mesh::default() };
    [
        (mesh(1, 1, 1), false),
        (mesh(1, 1, 2), false),
        (mesh(1, 1, 3), true),
        (mesh(1, 1, 4), true),
        (mesh(2, 1, 1), false),
        (mesh(2, 1, 2), true),
        (mesh(1, 2, 2), false),
        (mesh(2, 2, 2), false),
    ]
}

/// A checkpoint of any mesh is resumed on any other, with the same bits of parameters and moments.
#[test]
fn checkpoints_go_from_any_mesh_to_any_other() {
    for (turn, &(from, sequence_parallel)) in meshes().iter().enumerate() {
        let kind = [Kind::Gpt, Kind::Llama][turn % 2];
        let dir = tempfile::tempdir().unwrap();
        let save = |trainer: &mut Trainer| drop(trainer.save(dir.path(), serde_json::Value::Null).unwrap());
        let saved = run_after(&case(kind, from, sequence_parallel), 2, |_| {}, save);
        let resume = |trainer: &mut Trainer| {
            trainer.resume(&Checkpoint::latest(dir.path()).unwrap().unwrap()).unwrap();
        };
        let next = run_after(&case(kind, from, sequence_parallel), 1, resume, |_| {});
        for &(to, sequence_parallel) in in_turn(&meshes(), turn) {
            let case = case(kind, to, sequence_parallel);
            let what = format!("{kind:?} from {from:?} to {to:?}");
            let resumed = run_after(&case, 0, resume, |_| {});
            for (name, tensor) in &resumed.tensors {
                if !name.starts_with("gradient") {
                    assert!(saved.tensors[name] == *tensor, "{what}: {name}");
                }
            }
            let went_on = run_after(&case, 1, resume, |_| {});
            assert!((went_on.losses[0] - next.losses[0]).abs() <= 1e-5 * next.losses[0].abs(), "{what}");
        }
    }
}

/// Initial values and dropout masks are those of one rank, and clipped steps keep copies equal.
#[test]
fn twenty_clipped_steps_keep_copies_equal() {
    for (kind, mesh, sequence_parallel) in [
        (Kind::Gpt, Mesh { tensor: 2, ..Mesh::default() }, true),
        (Kind::Llama, Mesh { tensor: 4, ..Mesh::default() }, false),
    ] {
        let start = run(&case(kind, mesh, sequence_parallel), 0);
        let alone = run(&case(kind, Mesh::default(), false), 0);
        assert!(start.tensors.iter().all(|(name, values)| alone.tensors[name] == *values), "{kind:?}: initial values");
        let mut clipped = case(kind, mesh, sequence_parallel);
        clipped.options.step.optimizer = AdamW { max_norm: 0.1, ..AdamW::default() }.into();
        let mut whole = case(kind, Mesh::default(), false);
        whole.options.step.optimizer = clipped.options.step.optimizer.clone();
        let (clipped, whole) = (run(&clipped, 20), run(&whole, 20));
        for (a, b) in clipped.losses.iter().zip(&whole.losses).chain(clipped.norms.iter().zip(&whole.norms)) {
            assert!((a - b).abs() <= 1e-4 * b.abs(), "{kind:?}: {a} instead of {b}");
        }
    }
}

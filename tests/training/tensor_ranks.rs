//! Tensors that are divided among ranks give the results of one rank.

use std::collections::BTreeMap;

use gapless::models::MoeStyle;
use gapless::{Mesh, Trainer, Window, communicator};
use gapless_testing::in_turn;

use crate::common::{Kind, TinyRun};

fn mesh(tensor: usize) -> Mesh {
    Mesh { tensor, ..Mesh::default() }
}

/// The results of a run.
#[derive(Debug)]
struct Outcome {
    losses: Vec<f32>,
    norms: Vec<f32>,
    /// The gathered parameters and gradients, by name.
    tensors: BTreeMap<String, Vec<f32>>,
    /// Names of parameters of which no rank holds all.
    split: Vec<String>,
}

fn run(run: &TinyRun, steps: u64) -> Outcome {
    let each = |trainer: &mut Trainer| {
        let (mut losses, mut norms) = (Vec::new(), Vec::new());
        for _ in 0..steps {
            let (tokens, targets) = run.batch(trainer.steps());
            let report = trainer.step(&tokens, &targets).unwrap();
            losses.push(report.loss);
            norms.push(report.gradient_norm);
        }
        let names: Vec<String> = trainer.parameter_names().map(str::to_owned).collect();
        let read = |tensor: candle_core::Tensor| tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let mut tensors: Vec<(String, Window, Vec<f32>)> = Vec::new();
        for name in names {
            let window = trainer.window(&name).unwrap();
            if let Ok(gradient) = trainer.gradient(&name) {
                tensors.push((format!("gradient of {name}"), window.clone(), read(gradient)));
            }
            tensors.push((name.clone(), window, read(trainer.tensor(&name).unwrap())));
        }
        (losses, norms, tensors)
    };
    let mesh = run.options.step.mesh;
    let ranks = match mesh.ranks().unwrap() {
        1 => vec![each(&mut run.trainer())],
        count => communicator::on_threads(count, |world| Ok(each(&mut run.rank(Some(world))))).unwrap(),
    };
    let mut outcome =
        Outcome { losses: ranks[0].0.clone(), norms: ranks[0].1.clone(), tensors: BTreeMap::new(), split: Vec::new() };
    let mut seen: BTreeMap<String, Vec<bool>> = BTreeMap::new();
    for (rank, (losses, norms, tensors)) in ranks.into_iter().enumerate() {
        assert_eq!((&losses, &norms), (&outcome.losses, &outcome.norms), "rank {rank} reports the same");
        for (name, window, values) in tensors {
            let all = window.whole_dims().iter().product();
            if !window.is_whole() && rank == 0 {
                outcome.split.push(name.clone());
            }
            let gathered = outcome.tensors.entry(name.clone()).or_insert_with(|| vec![0.0; all]);
            let seen = seen.entry(name.clone()).or_insert_with(|| vec![false; all]);
            assert_eq!(window.elements(), values.len(), "{name}");
            for (index, value) in window.runs().flatten().zip(values) {
                assert!(!seen[index] || gathered[index] == value, "copies of element {index} of {name} differ");
                (gathered[index], seen[index]) = (value, true);
            }
        }
    }
    for (name, seen) in seen {
        assert!(seen.into_iter().all(|seen| seen), "the ranks hold all of {name}");
    }
    outcome
}

/// Compares results that only differ in the order of summation.
fn close(outcome: &Outcome, expected: &Outcome, what: &str) {
    let pairs = outcome.losses.iter().zip(&expected.losses).chain(outcome.norms.iter().zip(&expected.norms));
    for (a, b) in pairs {
        assert!((a - b).abs() <= 1e-5 * b.abs(), "{what}: {a} instead of {b}");
    }
    assert!(outcome.tensors.keys().eq(expected.tensors.keys()), "{what}");
    for ((name, a), b) in outcome.tensors.iter().zip(expected.tensors.values()) {
        assert_eq!(a.len(), b.len(), "{what}: {name}");
        let distance = a.iter().zip(b).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>().sqrt();
        let norm = b.iter().map(|&b| f64::from(b).powi(2)).sum::<f64>().sqrt();
        assert!(distance <= 1e-5 * norm.max(1e-3), "{what}: {name} is off by {distance} of {norm}");
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
        let alone = run(&case(kind, mesh(1), false), 3);
        for &(ranks, sequence_parallel) in
            in_turn(&[(2, false), (2, true), (3, false), (4, true), (4, false), (8, true)], turn)
        {
            let ranks = run(&case(kind, mesh(ranks), sequence_parallel), 3);
            let what = format!("{kind:?} on {} ranks, sequence parallel: {sequence_parallel}", ranks.losses.len());
            assert!(!ranks.split.is_empty(), "{what}");
            close(&ranks, &alone, &what);
        }
    }
}

//! Padding after the examples of a sequence does not affect a mixture's routers.

use gapless::engine::nn::{Capacity, Choice, RouterConfig, Score};
use gapless::engine::ops::{DropPolicy, ExpertGroups};
use gapless::models::{Moe, MoeConfig, MoeStyle};
use gapless::parallel;
use gapless::{
    Batch, DType, IGNORED, Layers, MemoryOptions, Mesh, Pipeline, Precision, Recompute, StepOptions, StepReport,
    TrainOptions, Trainer, communicator,
};

use crate::common::{PLANNING, VOCABULARY, moe, on_cpu};

/// Number of prompt tokens in an example. The targets of these tokens do not count.
const PROMPT: usize = 9;
const STEPS: usize = 3;

/// Routers of every kind, with their names.
fn routers() -> Vec<(&'static str, RouterConfig)> {
    let capacity = |drop| Some(Capacity { factor: 0.6, drop });
    let base = RouterConfig { experts: 8, balance_loss: 0.5, ..RouterConfig::default() };
    let plain = RouterConfig { balance_loss: 0.0, ..base.clone() };
    vec![
        ("balance", base.clone()),
        ("z", RouterConfig { z_loss: 0.3, ..plain.clone() }),
        ("last dropped", RouterConfig { capacity: capacity(DropPolicy::Last), ..base.clone() }),
        ("lightest dropped", RouterConfig { capacity: capacity(DropPolicy::Lightest), ..base.clone() }),
        (
            "experts choose",
            RouterConfig { choice: Choice::Experts, capacity: capacity(DropPolicy::Lightest), z_loss: 0.1, ..plain },
        ),
        (
            "bias",
            RouterConfig {
                score: Score::Sigmoid,
                groups: Some(ExpertGroups { count: 4, limit: 2 }),
                bias_rate: 0.01,
                ..base
            },
        ),
    ]
}

fn config(router: &RouterConfig) -> MoeConfig {
    MoeConfig { router: router.clone(), ..moe(MoeStyle::DeepSeek) }
}

fn options(batch: usize, sequence: usize) -> TrainOptions {
    TrainOptions {
        step: StepOptions {
            batch,
            sequence,
            documents: true,
            memory: MemoryOptions { planning: PLANNING, ..on_cpu().step.memory },
            ..on_cpu().step
        },
        threads: 1,
        poison: true,
        seed: 3,
        ..on_cpu()
    }
}

/// Sequences with examples of the given lengths, followed by padding.
struct Rows {
    tokens: Vec<u32>,
    targets: Vec<u32>,
    starts: Vec<u32>,
}

impl Rows {
    fn new(rows: &[&[usize]], sequence: usize, padding: u32) -> Self {
        let (mut tokens, mut targets, mut starts) = (Vec::new(), Vec::new(), Vec::new());
        for (row, lengths) in rows.iter().enumerate() {
            for &length in *lengths {
                let first = (tokens.len() - row * sequence) as u32;
                let id = |at: usize| ((at * at * 7 + at / 3 + 11 * length) % VOCABULARY as usize) as u32;
                tokens.extend((0..length).map(id));
                targets.extend((1..=length).map(|at| if at < PROMPT { IGNORED } else { id(at) }));
                starts.extend(vec![first; length]);
            }
            let end = (row + 1) * sequence;
            let first = (tokens.len() - row * sequence) as u32;
            tokens.resize(end, padding);
            targets.resize(end, IGNORED);
            starts.resize(end, first);
        }
        Self { tokens, targets, starts }
    }

    fn batch(&self) -> Batch<'_> {
        Batch { tokens: &self.tokens, targets: &self.targets, starts: &self.starts }
    }
}

/// The results of some steps.
#[derive(Debug, PartialEq)]
struct Seen {
    reports: Vec<StepReport>,
    /// Loads and dropped choices of all routers in all steps, and the routers' final biases.
    statistics: Vec<(String, Vec<f32>)>,
}

fn run(trainer: &mut Trainer, batch: &Batch<'_>) -> Seen {
    let numbers = |tensor: candle_core::Tensor| {
        tensor.flatten_all().unwrap().to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap()
    };
    let (mut reports, mut statistics) = (Vec::new(), Vec::new());
    for _ in 0..STEPS {
        reports.push(trainer.step_batch(batch).unwrap());
        let watched = trainer.watched_names().map(|name| (name.to_owned(), numbers(trainer.watched(name).unwrap())));
        statistics.extend(watched);
    }
    let biases = trainer.parameter_names().filter(|name| name.ends_with("bias"));
    statistics.extend(biases.map(|name| (name.to_owned(), numbers(trainer.tensor(name).unwrap()))));
    Seen { reports, statistics }
}

fn steps(router: &RouterConfig, options: TrainOptions, batch: &Batch<'_>) -> Seen {
    run(&mut Trainer::new(|vb| Moe::new(&config(router), vb), options).unwrap(), batch)
}

/// Compares results within a tolerance. The results differ because sums of some hundreds of f32 values are taken in
/// another order, and because such sums affect a step of Adam.
fn expect_close(what: &str, seen: &Seen, expected: &Seen) {
    assert_eq!(seen.statistics, expected.statistics, "{what}");
    for (a, b) in seen.reports.iter().zip(&expected.reports) {
        let part =
            |parts: fn(gapless::LossParts) -> Option<f32>, report: &StepReport| report.loss_parts.and_then(parts);
        let balance = [a, b].map(|report| part(|parts| parts.balance, report).unwrap_or_default());
        let router_z = [a, b].map(|report| part(|parts| parts.router_z, report).unwrap_or_default());
        for [a, b] in [[a.loss, b.loss], [a.gradient_norm, b.gradient_norm], balance, router_z] {
            assert!((a - b).abs() <= 3e-5 * b.abs(), "{what}: {a} is not {b}");
        }
    }
}

#[test]
fn an_example_is_the_same_whatever_pads_its_sequence() {
    for (name, router) in routers() {
        let alone = Rows::new(&[&[33]], 33, 0);
        let expected = steps(&router, options(1, 33), &alone.batch());
        for sequence in [64, 256] {
            let padded = Rows::new(&[&[33]], sequence, 0);
            let seen = steps(&router, options(1, sequence), &padded.batch());
            expect_close(&format!("{name} in {sequence}"), &seen, &expected);
            // A batch without document starts.
            let bare = Batch { starts: &[], ..padded.batch() };
            assert_eq!(steps(&router, options(1, sequence), &bare), seen, "{name} in {sequence}");
            let other = Rows::new(&[&[33]], sequence, 5);
            assert_eq!(steps(&router, options(1, sequence), &other.batch()), seen, "{name} in {sequence}");
        }
    }
}

/// Without padding, the results equal those of a trainer without documents: prompts are routed, and count as load.
#[test]
fn a_sequence_without_padding_is_what_it_is_without_documents() {
    for (name, router) in routers() {
        let mut rows = Rows::new(&[&[33], &[33]], 33, 0);
        rows.targets = rows.targets.iter().map(|&target| if target == IGNORED { 1 } else { target }).collect();
        let expected = steps(
            &router,
            TrainOptions { step: StepOptions { documents: false, ..options(2, 33).step }, ..options(2, 33) },
            &Batch { starts: &[], ..rows.batch() },
        );
        expect_close(name, &steps(&router, options(2, 33), &rows.batch()), &expected);
    }
}

/// The capacity is per sequence, and the documents of a sequence share it. Everything else is per document, or over
/// all tokens.
#[test]
fn examples_in_one_sequence_are_those_of_sequences_of_their_own() {
    for (name, router) in routers().into_iter().filter(|(_, router)| router.capacity.is_none()) {
        let apart = Rows::new(&[&[33], &[20]], 40, 0);
        let expected = steps(&router, options(2, 40), &apart.batch());
        let together = Rows::new(&[&[33, 20]], 64, 0);
        expect_close(name, &steps(&router, options(1, 64), &together.batch()), &expected);
        // The second case has another sequence that consists of padding only.
        let beside = Rows::new(&[&[], &[20, 33]], 64, 0);
        expect_close(name, &steps(&router, options(2, 64), &beside.batch()), &expected);
    }
}

#[test]
fn padding_counts_nowhere_however_a_step_is_done() {
    let rows = Rows::new(&[&[33], &[20, 15], &[], &[9, 10, 11]], 40, 0);
    let on = |router: &RouterConfig, options: &TrainOptions| -> Vec<Seen> {
        let step = |world| {
            Ok(run(
                &mut Trainer::builder(|vb| Moe::new(&config(router), vb), options.clone())
                    .distributed(world)
                    .build()?,
                &rows.batch(),
            ))
        };
        communicator::on_threads(options.step.mesh.ranks().unwrap(), step).unwrap()
    };
    for (name, router) in routers() {
        let expected = &on(&router, &options(4, 40))[0];
        let parts = TrainOptions { step: StepOptions { micro_batches: 4, ..options(4, 40).step }, ..options(4, 40) };
        let recomputed = TrainOptions {
            step: StepOptions {
                memory: MemoryOptions { recompute: Recompute::Layers(Layers::All), ..parts.step.memory.clone() },
                ..parts.step.clone()
            },
            ..parts.clone()
        };
        let schedule = parallel::by_name("zb-h1").unwrap();
        let pipeline = Pipeline { schedule: schedule.into(), ..Pipeline::default() };
        let piped = TrainOptions {
            step: StepOptions { mesh: Mesh::pipeline(2), pipeline, ..recomputed.step.clone() },
            ..recomputed.clone()
        };
        for options in [parts, recomputed, piped] {
            for seen in on(&router, &options) {
                assert_eq!(seen.reports.len(), expected.reports.len());
                let bits = |seen: &Seen| seen.reports.iter().map(|r| (r.loss, r.gradient_norm)).collect::<Vec<_>>();
                assert_eq!(bits(&seen), bits(expected), "{name}, {:?}", options.step.mesh);
                expect_close(name, &Seen { statistics: expected.statistics.clone(), ..seen }, expected);
            }
        }
        for mesh in [Mesh { data: 2, ..Mesh::default() }, Mesh { expert: 2, ..Mesh::default() }] {
            for seen in on(
                &router,
                &TrainOptions { step: StepOptions { mesh, micro_batches: 2, ..options(4, 40).step }, ..options(4, 40) },
            ) {
                expect_close(&format!("{name}, {mesh:?}"), &seen, expected);
            }
        }
        let half = on(
            &router,
            &TrainOptions { step: StepOptions { precision: Precision::Bf16, ..options(4, 40).step }, ..options(4, 40) },
        );
        let (a, b) = (half[0].reports[0].loss, expected.reports[0].loss);
        assert!((a - b).abs() <= 2e-2 * b, "{name} in bf16: {a} is not {b}");
    }
}

//! Experts that are divided among ranks give the results of one rank, for any routing.

use std::collections::BTreeMap;

use gapless::communicator;
use gapless::engine::checkpoint::Checkpoint;
use gapless::engine::compile::Error as CompileError;
use gapless::engine::ops::{DropPolicy, ExpertGroups};
use gapless::models::{LlamaConfig, Moe, MoeConfig};
use gapless::nn::{
    Capacity, Choice, Embedding, ExpertRanks, Experts, LimitedActivation, Module, Router, RouterConfig, Score,
    VarBuilder, embedding,
};
use gapless::parallel;
use gapless::{
    MemoryOptions, Mesh, Model, Pipeline, Recompute, StepOptions, Tensor, TrainError, TrainOptions, Trainer,
};

use gapless_testing::{every_other, in_turn};

use crate::common::{PLANNING, on_cpu};

const VOCABULARY: usize = 50;
const BATCH: usize = 8;
const SEQUENCE: usize = 24;

fn mesh(data: usize, pipeline: usize, expert: usize) -> Mesh {
    Mesh { data, pipeline, expert, ..Mesh::default() }
}

/// Small models with every kind of routing.
fn styles() -> [(&'static str, MoeConfig); 6] {
    let llama = LlamaConfig {
        vocabulary: VOCABULARY,
        layers: 2,
        heads: 4,
        kv_heads: 2,
        width: 32,
        hidden: 48,
        ..LlamaConfig::default()
    };
    let router = RouterConfig { experts: 8, top_k: 2, balance_loss: 0.1, z_loss: 0.01, ..RouterConfig::default() };
    let base = MoeConfig { llama, router: router.clone(), expert_hidden: 40, ..MoeConfig::default() };
    let with = |router| MoeConfig { router, ..base.clone() };
    let capacity = |factor, drop| Some(Capacity { factor, drop });
    let sigmoid = RouterConfig {
        score: Score::Sigmoid,
        groups: Some(ExpertGroups { count: 4, limit: 2 }),
        bias_rate: 0.01,
        scale: 2.5,
        ..router.clone()
    };
    [
        ("dropless", with(router.clone())),
        ("capacity", with(RouterConfig { capacity: capacity(0.75, DropPolicy::Lightest), ..router.clone() })),
        ("sigmoid", MoeConfig { shared_hidden: 24, shared_gate: true, dense_layers: vec![0], ..with(sigmoid) }),
        (
            "biases",
            MoeConfig {
                limited: Some(LimitedActivation { alpha: 1.7, limit: 0.1 }),
                ..with(RouterConfig { logit_bias: true, ..router.clone() })
            },
        ),
        (
            "scaled inputs",
            MoeConfig { scales_inputs: true, ..with(RouterConfig { renormalise: false, ..router.clone() }) },
        ),
        (
            "experts choose",
            with(RouterConfig {
                choice: Choice::Experts,
                capacity: capacity(1.0, DropPolicy::Lightest),
                balance_loss: 0.0,
                ..router
            }),
        ),
    ]
}

fn options(mesh: Mesh) -> TrainOptions {
    let micro_batches = 4 / (mesh.data * mesh.expert);
    TrainOptions {
        step: StepOptions {
            batch: BATCH,
            sequence: SEQUENCE,
            micro_batches,
            mesh,
            memory: MemoryOptions { planning: PLANNING, ..on_cpu().step.memory },
            ..on_cpu().step
        },
        threads: 1,
        seed: 5,
        ..on_cpu()
    }
}

fn batch(step: u64) -> (Vec<u32>, Vec<u32>) {
    let id = |i: u64| ((step * 7919 + i) * (step * 7919 + i) % 1009) as u32 % VOCABULARY as u32;
    let count = (BATCH * SEQUENCE) as u64;
    ((0..count).map(id).collect(), (1..=count).map(id).collect())
}

/// The results of a run.
struct Outcome {
    losses: Vec<f32>,
    norms: Vec<f32>,
    /// Parameters by name, with the shares of all ranks joined.
    parameters: BTreeMap<String, Vec<f32>>,
    watched: Vec<(String, Vec<f32>)>,
}

fn outcome(trainer: &mut Trainer, steps: u64) -> Outcome {
    let (mut losses, mut norms) = (Vec::new(), Vec::new());
    for _ in 0..steps {
        let (tokens, targets) = batch(trainer.steps());
        let report = trainer.step(&tokens, &targets).unwrap();
        // Checks both planned addresses and those that were assigned during the run.
        let served = trainer.check_run().unwrap();
        let has_experts = trainer.parameter_names().any(|name| name.contains(".experts."));
        let StepOptions { mesh, memory: MemoryOptions { offload, compress, .. }, .. } = &trainer.options().step;
        let receives = has_experts && mesh.expert > 1;
        // If a buffer is compressed or offloaded, it is planned with its maximum number of rows.
        let waits = !offload.is_empty() || !compress.is_empty();
        assert!(served > 0 || !receives || waits, "rows that are received are counted");
        assert!(served == 0 || receives, "nothing else is");
        losses.push(report.loss);
        norms.push(report.gradient_norm);
    }
    let read = |tensor: candle_core::Tensor| tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    let parameters = trainer.parameter_names().map(|name| (name.to_owned(), read(trainer.tensor(name).unwrap())));
    let watched = trainer.watched_names().map(|name| (name.to_owned(), read(trainer.watched(name).unwrap())));
    Outcome { losses, norms, parameters: parameters.collect(), watched: watched.collect() }
}

/// Combines the outcomes of all ranks. Checks that common results are equal, and joins the parameters that are
/// divided.
fn merge(outcomes: Vec<Outcome>, mesh: Mesh) -> Outcome {
    let mut parameters: BTreeMap<String, Vec<f32>> = BTreeMap::new();
    for (rank, outcome) in outcomes.iter().enumerate() {
        assert_eq!(outcome.losses, outcomes[0].losses, "all ranks see the same losses");
        assert_eq!(outcome.norms, outcomes[0].norms, "all ranks see the same norms");
        assert_eq!(outcome.watched, outcomes[0].watched, "all ranks watch the same");
        let at = mesh.coordinate(rank);
        for (name, values) in &outcome.parameters {
            let shared = name.contains(".experts.");
            match parameters.get_mut(name) {
                Some(all) if shared && at.data == 0 => all.extend(values),
                Some(all) if shared => {
                    let share = values.len();
                    assert_eq!(&all[at.expert * share..][..share], &values[..], "replicas of {name} differ");
                }
                Some(all) => assert_eq!(all, values, "copies of {name} differ"),
                None => drop(parameters.insert(name.clone(), values.clone())),
            }
        }
    }
    let first = outcomes.into_iter().next().unwrap();
    Outcome { parameters, ..first }
}

fn run(config: &MoeConfig, options: TrainOptions, steps: u64) -> Outcome {
    let mesh = options.step.mesh;
    let ranks = communicator::on_threads(mesh.ranks().unwrap(), |world| {
        let mut trainer = Trainer::builder(|vb| Moe::new(config, vb), options.clone()).distributed(world).build()?;
        Ok(outcome(&mut trainer, steps))
    });
    merge(ranks.unwrap(), mesh)
}

/// Compares results that only differ in the order of summation. f32 rounds at 6e-8. Each rank first sums losses and
/// gradients of its share of the batch, while a single rank sums over the batch in order. Sums of a few thousand terms
/// of mixed signs then differ by some hundred roundings. AdamW divides by the root of squared gradients. So after two
/// steps, parameters differ by the relative error of the gradients times the learning rate.
fn close(outcome: &Outcome, expected: &Outcome, what: &str) {
    let pairs = outcome.losses.iter().zip(&expected.losses).chain(outcome.norms.iter().zip(&expected.norms));
    for (a, b) in pairs {
        assert!((a - b).abs() <= 2e-5 * b.abs(), "{what}: {a} instead of {b}");
    }
    assert!(outcome.parameters.keys().eq(expected.parameters.keys()), "{what}");
    for ((name, a), b) in outcome.parameters.iter().zip(expected.parameters.values()) {
        assert_eq!(a.len(), b.len(), "{what}: {name}");
        let distance = a.iter().zip(b).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>().sqrt();
        let norm = b.iter().map(|&b| f64::from(b).powi(2)).sum::<f64>().sqrt();
        assert!(distance <= 1e-4 * norm.max(1e-3), "{what}: {name} is off by {distance} of {norm}");
    }
    assert_eq!(outcome.watched.len(), expected.watched.len());
    for ((name, a), (_, b)) in outcome.watched.iter().zip(&expected.watched) {
        assert_eq!(a, b, "{what}: {name}");
    }
}

#[test]
fn expert_ranks_train_as_one_rank_does() {
    for (turn, (style, config)) in styles().into_iter().enumerate() {
        let alone = run(&config, options(Mesh::default()), 3);
        for mesh in every_other(&[mesh(1, 1, 2), mesh(1, 1, 4), mesh(2, 1, 2), mesh(1, 2, 2)], turn) {
            for &poison in in_turn(&[true, false], turn) {
                let ranks = run(&config, TrainOptions { poison, ..options(mesh) }, 3);
                close(&ranks, &alone, &format!("{style} on {mesh:?}, poisoned: {poison}"));
            }
        }
    }
}

/// Pipeline stages and recomputation change no bit of the results of expert ranks.
#[test]
fn pipelines_and_recomputation_change_no_bit() {
    let (_, config) = &styles()[0];
    let reference = run(
        config,
        TrainOptions {
            step: StepOptions { micro_batches: 2, ..options(mesh(1, 1, 2)).step },
            ..options(mesh(1, 1, 2))
        },
        2,
    );
    let same = |options: TrainOptions, what: &str| {
        let outcome = run(config, TrainOptions { poison: true, ..options }, 2);
        assert_eq!(outcome.losses, reference.losses, "{what}");
        assert_eq!(outcome.norms, reference.norms, "{what}");
        assert!(outcome.parameters == reference.parameters, "{what}");
    };
    for policy in ["layers", "ops:routed_swiglu", "ops:grouped_linear,route"] {
        let recompute: Recompute = policy.parse().unwrap();
        same(
            TrainOptions {
                step: StepOptions {
                    micro_batches: 2,
                    memory: MemoryOptions { recompute, ..options(mesh(1, 1, 2)).step.memory },
                    ..options(mesh(1, 1, 2)).step
                },
                ..options(mesh(1, 1, 2))
            },
            policy,
        );
    }
    for (name, chunks) in [("1f1b", 1), ("zbv", 2)] {
        let pipeline = Pipeline { schedule: parallel::by_name(name).unwrap().into(), chunks, ..Pipeline::default() };
        for policy in ["none", "layers"] {
            let recompute: Recompute = policy.parse().unwrap();
            let options = TrainOptions {
                step: StepOptions { micro_batches: 2, pipeline: pipeline.clone(), ..options(mesh(1, 2, 2)).step },
                ..options(mesh(1, 2, 2))
            };
            same(
                TrainOptions {
                    step: StepOptions { memory: MemoryOptions { recompute, ..options.step.memory }, ..options.step },
                    ..options
                },
                &format!("{name}, {policy}"),
            );
        }
    }
}

/// Offloaded activations are read back unchanged, including routes. With 8-bit activations, the first loss is exact,
/// and the second differs by the effect of rounding on one step. Routes are kept even if everything else is
/// recomputed. Routes that were recomputed from rounded values could differ, and the ranks would not agree on the
/// number of exchanged rows.
#[test]
fn experts_read_what_waited_in_a_file_or_in_eight_bits() {
    let names = |names: &[&str]| -> Vec<String> { names.iter().map(|&name| name.to_owned()).collect() };
    for (turn, (style, config)) in styles().into_iter().enumerate() {
        // The backward of experts with biases reads the sums with the biases instead of the products.
        let products = if config.limited.is_none() { &["grouped_linear"][..] } else { &[] };
        let floats = names(&[&["linear", "rms_norm", "attention", "add", "routed_swiglu"], products].concat());
        let offload = [&floats[..], &names(&["route"])].concat();
        for &mesh in in_turn(&[mesh(1, 1, 1), mesh(1, 1, 2), mesh(1, 2, 2)], turn) {
            // Every mesh and every style meets every policy, but not every pair of them does.
            let policy = ["none", "layers", "ops:rms_norm"][(turn + mesh.pipeline + mesh.expert) % 3];
            let options = TrainOptions {
                step: StepOptions {
                    memory: MemoryOptions { recompute: policy.parse().unwrap(), ..options(mesh).step.memory },
                    ..options(mesh).step
                },
                poison: true,
                ..options(mesh)
            };
            let what = format!("{style} on {mesh:?}, {policy}");
            let plain = run(&config, options.clone(), 2);
            let file = run(
                &config,
                TrainOptions {
                    step: StepOptions {
                        memory: MemoryOptions { offload: offload.clone(), ..options.step.memory.clone() },
                        ..options.step.clone()
                    },
                    ..options.clone()
                },
                2,
            );
            assert_eq!((&file.losses, &file.norms), (&plain.losses, &plain.norms), "{what}");
            assert!(file.parameters == plain.parameters, "{what}");
            let rounded = run(
                &config,
                TrainOptions {
                    step: StepOptions {
                        memory: MemoryOptions { compress: floats.clone(), ..options.step.memory },
                        ..options.step
                    },
                    ..options
                },
                2,
            );
            assert_eq!(rounded.losses[0], plain.losses[0], "{what}");
            let step = plain.losses[0] - plain.losses[1];
            let apart = (rounded.losses[1] - plain.losses[1]).abs();
            assert!(apart < 0.05 * step, "{what}: off by {apart} after a step of {step}");
        }
    }
}

#[test]
fn a_checkpoint_of_one_layout_of_experts_resumes_on_another() {
    let (_, config) = &styles()[2];
    for (from, to) in [
        (mesh(1, 1, 2), mesh(1, 1, 1)),
        (mesh(1, 1, 1), mesh(1, 1, 4)),
        (mesh(1, 1, 4), mesh(2, 1, 2)),
        (mesh(2, 1, 2), mesh(1, 2, 2)),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let straight = communicator::on_threads(from.ranks().unwrap(), |world| {
            let mut trainer = Trainer::builder(|vb| Moe::new(config, vb), options(from)).distributed(world).build()?;
            outcome(&mut trainer, 2);
            trainer.save(dir.path(), serde_json::Value::Null).unwrap();
            Ok(outcome(&mut trainer, 2))
        });
        let resumed = communicator::on_threads(to.ranks().unwrap(), |world| {
            let mut trainer = Trainer::builder(|vb| Moe::new(config, vb), options(to)).distributed(world).build()?;
            trainer.resume(&Checkpoint::latest(dir.path()).unwrap().unwrap()).unwrap();
            Ok(outcome(&mut trainer, 2))
        });
        close(&merge(resumed.unwrap(), to), &merge(straight.unwrap(), from), &format!("{from:?} to {to:?}"));
    }
}

/// For every rank, the plan and the reserve together fit the rank's budget.
#[test]
fn budgets_count_the_rows_that_ranks_receive() {
    let (_, config) = &styles()[0];
    let on = |options: TrainOptions| {
        let ranks = communicator::on_threads(2, |world| {
            let mut trainer =
                Trainer::builder(|vb| Moe::new(config, vb), options.clone()).distributed(world).build()?;
            let report = trainer.report();
            Ok((report.arena_bytes, report.reserve_bytes, outcome(&mut trainer, 2)))
        });
        let ranks = ranks.unwrap();
        let most = ranks.iter().map(|rank| rank.0).max().unwrap();
        assert!(ranks.iter().all(|rank| rank.1 > 0), "all have received rows");
        (most, merge(ranks.into_iter().map(|rank| rank.2).collect(), options.step.mesh))
    };
    let plain = TrainOptions {
        step: StepOptions { micro_batches: 2, ..options(mesh(1, 1, 2)).step },
        poison: true,
        ..options(mesh(1, 1, 2))
    };
    let (all, expected) = on(plain.clone());
    let of_one = TrainOptions {
        step: StepOptions {
            memory: MemoryOptions { budget: Some(1), ..plain.step.memory.clone() },
            ..plain.step.clone()
        },
        ..plain.clone()
    };
    let smallest = |rank| match gapless::plan::step(|vb| Moe::new(config, vb), &of_one, rank) {
        Err(TrainError::Compile(CompileError::OverBudget { smallest, .. })) => smallest,
        other => panic!("a byte is too small a budget: {other:?}"),
    };
    let least = smallest(0).max(smallest(1));
    assert!(least < all, "{least} of {all}");
    for budget in [least + (all - least) / 4, least + (all - least) * 3 / 4] {
        let (arena, outcome) = on(TrainOptions {
            step: StepOptions {
                memory: MemoryOptions { budget: Some(budget), ..plain.step.memory.clone() },
                ..plain.step.clone()
            },
            ..plain.clone()
        });
        assert!(arena <= budget, "{arena} of {budget}");
        assert_eq!((&outcome.losses, &outcome.norms), (&expected.losses, &expected.norms), "{budget} of {all}");
        assert!(outcome.parameters == expected.parameters, "{budget} of {all}");
    }
}

/// A model that passes mismatched inputs to its layers, on two expert ranks.
struct Mismatched {
    embed: Embedding,
    gate: Router,
    experts: Experts,
    ranks: usize,
}

impl Model for Mismatched {
    fn forward(&self, tokens: &Tensor, train: bool) -> gapless::Result<Tensor> {
        let x = self.embed.forward(tokens)?;
        let routing = self.gate.forward(&x, train)?;
        let exchange = routing.exchange(ExpertRanks { ranks: self.ranks, ..ExpertRanks::default() })?;
        let echo = routing.combine(&exchange.send_back(&exchange.receive(&routing.dispatch(&x)?)?)?)?;
        self.experts.forward(&x, &routing)?.add(&echo)?.linear(self.embed.embeddings(), None)
    }
}

#[test]
fn layers_that_do_not_go_together_are_refused() {
    let refused = |routed: usize, there: usize, ranks: usize| {
        let build = |vb: VarBuilder| {
            let router = RouterConfig { experts: routed, ..RouterConfig::default() };
            Ok(Mismatched {
                embed: embedding(VOCABULARY, 16, vb.pp("embed"))?,
                gate: Router::new(&router, 16, vb.pp("gate"))?,
                experts: Experts::new(there, 16, 8, vb.pp("experts"))?,
                ranks,
            })
        };
        let errors = communicator::on_threads(2, |world| {
            let (tokens, targets) = batch(0);
            let trainer = Trainer::builder(build, options(mesh(1, 1, 2))).distributed(world).build();
            Ok(trainer.and_then(|mut trainer| trainer.step(&tokens, &targets)).err().map(|error| error.to_string()))
        });
        errors.unwrap().swap_remove(0)
    };
    assert_eq!(refused(8, 8, 2), None);
    assert!(refused(8, 4, 2).unwrap().contains("there are 4 experts, but the router chooses among 8"));
    assert!(refused(8, 8, 3).unwrap().contains("3 ranks cannot share 8 experts"));
    assert!(refused(8, 8, 4).unwrap().contains("another number of ranks than the mesh has"));
    assert!(refused(8, 8, 0).unwrap().contains("0 ranks cannot share"));
}

#[test]
fn experts_that_ranks_cannot_share_are_refused() {
    let (_, config) = &styles()[0];
    let refused = communicator::on_threads(3, |world| {
        let options =
            TrainOptions { step: StepOptions { batch: 12, ..options(mesh(1, 1, 3)).step }, ..options(mesh(1, 1, 3)) };
        let trainer = Trainer::builder(
            |vb| Moe::new(config, vb),
            TrainOptions { step: StepOptions { micro_batches: 1, ..options.step }, ..options },
        )
        .distributed(world)
        .build();
        Ok(trainer.err().map(|error| error.to_string()))
    });
    for error in refused.unwrap() {
        assert!(error.unwrap().contains("3 expert ranks cannot share"), "the ranks do not divide the experts");
    }
}

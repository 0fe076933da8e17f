//! Routing as uneven as it gets, over expert ranks: no row is lost, no byte is used twice, and the reserve keeps what it
//! promises.

use std::sync::Barrier;

use candle_core::{Device, Tensor};
use gapless::alloc::arena::ArenaReport;
use gapless::communicator::{self, CommunicatorError};
use gapless::engine::ops::Drop;
use gapless::models::{LlamaConfig, Moe, MoeConfig};
use gapless::nn::{Capacity, RouterConfig, Score};
use gapless::{Error, Mesh, Reserve, TrainOptions, Trainer};

const EXPERTS: usize = 8;
const LAYERS: usize = 2;
const WIDTH: usize = 32;
const VOCABULARY: usize = 50;
const BATCH: usize = 8;
const SEQUENCE: usize = 24;
const STEPS: u64 = 4;

/// Where the tokens of a step go.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Pattern {
    /// To one expert, by its bias.
    One(usize),
    /// To the first expert, as all scores are alike.
    Alike,
    /// To the second half of the experts: nobody chooses the first.
    NotTheFirstHalf,
    /// To each expert fewer than to the one before.
    Zipf,
}

impl Pattern {
    /// Sets all routers of this rank.
    fn steer(self, trainer: &mut Trainer) {
        let routers: Vec<String> =
            trainer.parameter_names().filter(|name| name.contains(".gate.")).map(Into::into).collect();
        for name in routers {
            let value = match name.ends_with(".weight") {
                true => Tensor::from_vec(self.weight(), (EXPERTS, WIDTH), &Device::Cpu),
                false => Tensor::from_vec(self.bias(), EXPERTS, &Device::Cpu),
            };
            trainer.set_tensor(&name, &value.unwrap()).unwrap();
        }
    }

    /// Logits of a token are spread by 1 or so, unless all are 0.
    fn weight(self) -> Vec<f32> {
        let spread = if self == Self::Alike { 0.0 } else { 0.3 };
        let mixed = |i: usize| (i as u32).wrapping_mul(2_654_435_761) >> 16;
        (0..EXPERTS * WIDTH).map(|i| spread * (mixed(i + 1) as f32 / 32_768.0 - 1.0)).collect()
    }

    /// Scores are between 0 and 1.
    fn bias(self) -> Vec<f32> {
        let bias = |expert: usize| match self {
            Self::One(chosen) => f32::from(u8::from(expert == chosen)) * 10.0,
            Self::Alike => 0.0,
            Self::NotTheFirstHalf => f32::from(u8::from(expert >= EXPERTS / 2)) * 10.0,
            Self::Zipf => -0.3 * (expert as f32 + 1.0).ln(),
        };
        (0..EXPERTS).map(bias).collect()
    }

    /// Whether tokens went there: how many chose each expert.
    fn judge(self, load: &[f32], what: &str) {
        let all: f32 = load.iter().sum();
        let fits = match self {
            Self::One(expert) => load[expert] == all,
            Self::Alike => load[0] == all,
            Self::NotTheFirstHalf => load[..EXPERTS / 2].iter().all(|&tokens| tokens == 0.0),
            Self::Zipf => load[0] > 2.0 * all / EXPERTS as f32 && load[EXPERTS - 1] < 0.5 * all / EXPERTS as f32,
        };
        assert!(fits, "{what}: {self:?} is not what was chosen: {load:?}");
    }
}

/// A model, and where its tokens go at each step.
struct Case {
    name: &'static str,
    config: MoeConfig,
    pattern: fn(u64) -> Pattern,
}

fn config(top_k: usize) -> MoeConfig {
    let llama = LlamaConfig {
        vocabulary: VOCABULARY,
        layers: LAYERS,
        heads: 4,
        kv_heads: 2,
        width: WIDTH,
        hidden: 48,
        ..LlamaConfig::default()
    };
    let router = RouterConfig {
        experts: EXPERTS,
        top_k,
        score: Score::Sigmoid,
        renormalise: false,
        bias_rate: 0.001,
        balance_loss: 0.1,
        z_loss: 0.01,
        ..RouterConfig::default()
    };
    MoeConfig { llama, router, expert_hidden: 64, ..MoeConfig::default() }
}

fn cases() -> [Case; 6] {
    let with = |top_k, change: fn(&mut RouterConfig)| {
        let mut config = config(top_k);
        change(&mut config.router);
        config
    };
    let alike = |router: &mut RouterConfig| (router.score, router.bias_rate) = (Score::Softmax, 0.0);
    let tight = |router: &mut RouterConfig| router.capacity = Some(Capacity { factor: 1.5, drop: Drop::Lightest });
    [
        Case { name: "all to the last expert", config: config(1), pattern: |_| Pattern::One(EXPERTS - 1) },
        Case { name: "all scores alike", config: with(1, alike), pattern: |_| Pattern::Alike },
        Case { name: "none to the first half", config: config(2), pattern: |_| Pattern::NotTheFirstHalf },
        Case { name: "Zipf", config: config(2), pattern: |_| Pattern::Zipf },
        Case {
            name: "oscillating",
            config: config(1),
            pattern: |step| [Pattern::One(0), Pattern::One(EXPERTS - 1), Pattern::Zipf][step as usize % 3],
        },
        Case { name: "all to one with a capacity", config: with(1, tight), pattern: |_| Pattern::One(0) },
    ]
}

fn options(mesh: Mesh, routing: Reserve) -> TrainOptions {
    TrainOptions {
        batch: BATCH,
        sequence: SEQUENCE,
        threads: 1,
        seed: 5,
        micro_batches: 4 / mesh.expert,
        mesh,
        routing,
        poison: true,
        ..TrainOptions::default()
    }
}

fn experts(ranks: usize) -> Mesh {
    Mesh { expert: ranks, ..Mesh::default() }
}

fn batch(step: u64) -> (Vec<u32>, Vec<u32>) {
    let id = |i: u64| ((step * 7919 + i) * (step * 7919 + i) % 1009) as u32 % VOCABULARY as u32;
    let count = (BATCH * SEQUENCE) as u64;
    ((0..count).map(id).collect(), (1..=count).map(id).collect())
}

/// What a rank sees of a step.
#[derive(Debug)]
struct Seen {
    loss: f32,
    norm: f32,
    /// Loads and numbers of dropped choices by name.
    watched: Vec<(String, Vec<f32>)>,
    /// Bytes that its arena was asked for.
    asked: u64,
}

impl Seen {
    /// The sum of what is watched under names that end so.
    fn total(&self, end: &str) -> f32 {
        self.watched.iter().filter(|(name, _)| name.ends_with(end)).flat_map(|(_, values)| values).sum()
    }
}

/// Every step as every rank sees it, and what its arena did. Judged on the way: the addresses of each step, and where its
/// tokens went.
fn run(case: &Case, options: &TrainOptions) -> Vec<(Vec<Seen>, Option<ArenaReport>)> {
    let ranks = communicator::on_threads(options.mesh.ranks().unwrap(), |world| {
        let rank = world.rank();
        let requests = requests(case, options, rank).len();
        let mut trainer = Trainer::on(world, |vb| Moe::new(&case.config, vb), options.clone())?;
        let (mut seen, mut asked) = (Vec::new(), 0);
        for step in 0..STEPS {
            let what = format!("{}, rank {rank}, step {step}", case.name);
            let pattern = (case.pattern)(step);
            pattern.steer(&mut trainer);
            let (tokens, targets) = batch(step);
            let report = trainer.step(&tokens, &targets)?;
            assert_eq!(trainer.check_run().unwrap(), requests, "{what}");
            let read = |name: &str| trainer.watched(name).unwrap().flatten_all().unwrap().to_vec1().unwrap();
            let watched: Vec<_> = trainer.watched_names().map(|name| (name.to_owned(), read(name))).collect();
            watched.iter().filter(|(name, _)| name.ends_with(".load")).for_each(|(_, load)| pattern.judge(load, &what));
            let before = asked;
            asked = trainer.routing().map_or(0, |report| report.asked_bytes);
            seen.push(Seen { loss: report.loss, norm: report.gradient_norm, watched, asked: asked - before });
        }
        Ok((seen, trainer.routing()))
    });
    ranks.unwrap()
}

/// What a rank's step asks its arena for: bytes of a row, by request.
fn requests(case: &Case, options: &TrainOptions, rank: usize) -> Vec<u64> {
    let plan = Trainer::plan_rank(|vb| Moe::new(&case.config, vb), options, rank).unwrap().routing;
    plan.iter().flat_map(|plan| plan.requests()).map(|request| request.bytes_per_row).collect()
}

/// With room for the worst case: what one rank computes, to rounding. f32 rounds at 6e-8, and ranks sum losses and gradients
/// of their shares of the batch first; sums of a few thousand terms of mixed signs differ by some hundred roundings.
///
/// That no row is lost, counts say too: a row is asked for on the rank of its expert, once by each of a layer's buffers. So all
/// ranks together ask for the bytes of all choices that were not dropped, whoever they went to.
#[test]
fn no_row_is_lost() {
    for case in &cases() {
        let alone = run(case, &options(Mesh::default(), Reserve::Worst)).remove(0).0;
        for mesh in [experts(2), experts(4), Mesh { pipeline: 2, ..experts(2) }] {
            let options = options(mesh, Reserve::Worst);
            let ranks = run(case, &options);
            let row_bytes: u64 = (0..ranks.len()).flat_map(|rank| requests(case, &options, rank)).sum();
            let layers = (mesh.expert * options.micro_batches * LAYERS) as u64;
            assert!(row_bytes > 0 && row_bytes.is_multiple_of(layers));
            for (step, alone) in alone.iter().enumerate() {
                let what = format!("{} on {mesh:?}, step {step}", case.name);
                for seen in ranks.iter().map(|(seen, _)| &seen[step]) {
                    for (a, b) in [(seen.loss, alone.loss), (seen.norm, alone.norm)] {
                        assert!((a - b).abs() <= 2e-5 * b.abs(), "{what}: {a} instead of {b}");
                    }
                    assert_eq!(seen.watched, alone.watched, "{what}");
                }
                let kept = alone.total(".load") - alone.total(".dropped");
                let asked: u64 = ranks.iter().map(|(seen, _)| seen[step].asked).sum();
                assert_eq!(asked, kept as u64 * (row_bytes / layers), "{what}: bytes of {kept} choices");
            }
            for (rank, (_, report)) in ranks.iter().enumerate() {
                keeps_its_promise(report.as_ref().unwrap(), requests(case, &options, rank).len(), case.name);
            }
        }
        let choices = (STEPS as usize * LAYERS * BATCH * SEQUENCE * case.config.router.top_k) as f32;
        let dropped = |seen: &[Seen]| seen.iter().map(|step| step.total(".dropped")).sum::<f32>();
        assert_eq!(alone.iter().map(|step| step.total(".load")).sum::<f32>(), choices, "{}", case.name);
        assert_eq!(dropped(&alone) > 0.0, case.config.router.capacity.is_some(), "{}", case.name);
    }
}

/// A report of all steps, none of which overflowed.
fn keeps_its_promise(report: &ArenaReport, requests: usize, what: &str) {
    assert_eq!(report.requests, STEPS * requests as u64, "{what}");
    assert_eq!((report.overflows, report.refused_bytes), (0, 0), "{what}");
    assert_eq!(report.reused_bytes + report.reserve_served_bytes, report.asked_bytes, "{what}");
    assert!(report.high_water_bytes <= report.reserve_bytes, "{what}: {report}");
    assert!(report.most_live_bytes <= report.high_water_bytes, "{what}: {report}");
}

/// A reserve says where rows lie, not what becomes of them: the bits are those of the worst case's.
#[test]
fn a_generous_factor_serves_uneven_routing() {
    let (mut reused, mut smaller) = (0, 0);
    for case in cases().iter().filter(|case| (case.pattern)(0) == Pattern::Zipf) {
        for ranks in [2, 4] {
            let worst = run(case, &options(experts(ranks), Reserve::Worst));
            let factor = options(experts(ranks), Reserve::Balanced { factor: 3.0 });
            for (rank, ((seen, report), (expected, most))) in run(case, &factor).iter().zip(&worst).enumerate() {
                let what = format!("{} on rank {rank} of {ranks}", case.name);
                let bits = |seen: &[Seen]| -> Vec<_> {
                    seen.iter().map(|seen| (seen.loss.to_bits(), seen.norm.to_bits(), seen.asked)).collect()
                };
                assert_eq!(bits(seen), bits(expected), "{what}");
                let (report, most) = (report.as_ref().unwrap(), most.as_ref().unwrap());
                keeps_its_promise(report, requests(case, &factor, rank).len(), &what);
                assert_eq!(report.reuse_share() > 0.0, report.reused_bytes > 0, "{what}: {report}");
                assert!(report.reserve_bytes <= most.reserve_bytes, "{what}: {report}instead of {most}");
                reused += report.reused_bytes;
                smaller += u64::from(report.reserve_bytes < most.reserve_bytes);
            }
        }
    }
    assert!(reused > 0, "nothing was served in what the plan leaves idle");
    assert!(smaller > 0, "three times the balanced sizes are as large as the worst case everywhere");
}

/// The rank of the expert that all tokens choose says what it lacks; no other rank waits for it, although it stays where it is;
/// and the model is as it was.
#[test]
fn an_overflow_ends_the_step_on_all_ranks() {
    for (mesh, expert) in [
        (experts(2), 0),
        (experts(2), EXPERTS - 1),
        (experts(4), 0),
        (experts(4), EXPERTS - 1),
        (Mesh { pipeline: 2, ..experts(2) }, 0),
    ] {
        let what = format!("all to expert {expert} on {mesh:?}");
        let config = config(1);
        let ranks = mesh.ranks().unwrap();
        let together = Barrier::new(ranks);
        let outcomes = communicator::on_threads(ranks, |world| {
            let options = options(mesh, Reserve::Balanced { factor: 1.0 });
            let mut trainer = Trainer::on(world, |vb| Moe::new(&config, vb), options)?;
            Pattern::One(expert).steer(&mut trainer);
            let before = parameters(&trainer);
            let (tokens, targets) = batch(0);
            let outcome = trainer.step(&tokens, &targets);
            let checked = trainer.check_run();
            let unchanged = parameters(&trainer) == before;
            // Nobody goes before all have ended: an error that came of that would be no answer.
            together.wait();
            let again = trainer.step(&tokens, &targets);
            together.wait();
            Ok((outcome, again, checked, unchanged, trainer.routing()))
        });
        let mut overflown = Vec::new();
        for (rank, (outcome, again, checked, unchanged, report)) in outcomes.unwrap().into_iter().enumerate() {
            let what = format!("{what}, rank {rank}");
            assert!(unchanged, "{what}: the model has changed");
            checked.unwrap_or_else(|error| panic!("{what}: what was served before: {error}"));
            assert!(matches!(again, Err(Error::Communicator { .. })), "{what}, once more: {again:?}");
            let overflows = match outcome.expect_err(&what) {
                error @ Error::Routing { .. } => {
                    says_what_helps(&error);
                    overflown.push(mesh.coordinate(rank).expert);
                    1
                }
                // Not `Timeout`: nobody waited for nothing.
                Error::Communicator { source: CommunicatorError::PeerGone { .. }, .. } => 0,
                error => panic!("{what}: {error}"),
            };
            assert_eq!(report.unwrap().overflows, overflows, "{what}");
        }
        let owner = expert / (EXPERTS / mesh.expert);
        assert!(!overflown.is_empty() && overflown.iter().all(|&rank| rank == owner), "{what}: {overflown:?}");
    }
}

/// Scores that are not numbers are alike: all tokens go to the first experts, which there is room for, and the step says what
/// was not finite. Nothing changes, and the trainers go on.
#[test]
fn a_step_that_is_not_finite_changes_nothing_on_any_rank() {
    let config = config(2);
    let outcomes = communicator::on_threads(4, |world| {
        let mut trainer = Trainer::on(world, |vb| Moe::new(&config, vb), options(experts(4), Reserve::Worst))?;
        let (tokens, targets) = batch(0);
        let name = "model.layers.1.mlp.gate.weight";
        let weight = trainer.tensor(name)?.copy()?;
        trainer.set_tensor(name, &weight.affine(f64::NAN, 0.0)?)?;
        let error = trainer.step(&tokens, &targets).unwrap_err();
        trainer.set_tensor(name, &weight)?;
        let after = parameters(&trainer);
        let fresh = trainer.step(&tokens, &targets)?;
        Ok((error.to_string(), matches!(error, Error::NonFinite { .. }), after, fresh.loss))
    });
    let untouched = communicator::on_threads(4, |world| {
        let mut trainer = Trainer::on(world, |vb| Moe::new(&config, vb), options(experts(4), Reserve::Worst))?;
        let (before, (tokens, targets)) = (parameters(&trainer), batch(0));
        Ok((before, trainer.step(&tokens, &targets)?.loss))
    });
    for (rank, (one, other)) in outcomes.unwrap().into_iter().zip(untouched.unwrap()).enumerate() {
        let (error, is_non_finite, after, loss) = one;
        assert!(is_non_finite && error.contains("model.layers.1.mlp.gate"), "rank {rank}: {error}");
        assert!((after, loss) == other, "rank {rank} has changed");
    }
}

/// A row's products do not depend on which rows stand beside it, and all ranks evaluate the same: the bits of one rank.
#[test]
fn evaluation_and_logits_have_the_bits_of_one_rank() {
    for case in &cases() {
        let of = |mesh: Mesh| {
            let options = options(mesh, Reserve::Worst);
            let ranks = communicator::on_threads(mesh.ranks().unwrap(), |world| {
                let mut trainer = Trainer::on(world, |vb| Moe::new(&case.config, vb), options.clone())?;
                (case.pattern)(0).steer(&mut trainer);
                let (tokens, targets) = batch(0);
                let some = trainer.options().evaluation_batch() * SEQUENCE;
                let loss = trainer.evaluate(&tokens[..some], &targets[..some])?;
                let served = trainer.check_run()?;
                let logits = trainer.logits(&tokens[..SEQUENCE])?.flatten_all()?.to_vec1::<f32>()?;
                assert_eq!(served > 0, mesh.expert > 1, "{} on {mesh:?}", case.name);
                assert_eq!(trainer.check_run()?, served, "{} on {mesh:?}", case.name);
                Ok((loss, logits))
            });
            ranks.unwrap()
        };
        let alone = of(Mesh::default()).remove(0);
        for mesh in [experts(2), experts(4)] {
            for (rank, seen) in of(mesh).into_iter().enumerate() {
                assert!(seen == alone, "{} on rank {rank} of {mesh:?}: {} instead of {}", case.name, seen.0, alone.0);
            }
        }
    }
}

/// Layer, rows, bytes and remedies.
fn says_what_helps(error: &Error) {
    let Error::Routing { source, .. } = error else { unreachable!("matched by the caller") };
    let message = error.to_string();
    let rows = source.bytes / source.bytes_per_row;
    for part in [
        format!("of layer {}:", source.label.layer),
        format!("{} bytes ({rows} rows of {} bytes)", source.bytes, source.bytes_per_row),
        format!("with a reserve of {} bytes", source.reserve),
        "use Reserve::Worst, Reserve::Balanced with a factor of at least".into(),
        "a capacity factor".into(),
    ] {
        assert!(message.contains(&part), "{part:?} is not in: {message}");
    }
    assert!(source.label.layer.starts_with("model.layers."), "{message}");
    assert!(source.bytes > source.balanced && source.bytes <= source.most, "{message}");
}

fn parameters(trainer: &Trainer) -> Vec<Vec<f32>> {
    let read = |name: &str| trainer.tensor(name).unwrap().flatten_all().unwrap().to_vec1().unwrap();
    trainer.parameter_names().map(read).collect()
}

//! Extremely uneven routing over expert ranks. No row is lost, no byte is used twice, and the reserve suffices for
//! the cases that it promises to cover.

use std::sync::Barrier;

use gapless::alloc::arena::ArenaReport;
use gapless::communicator::{self, CommunicatorError};
use gapless::engine::runtime::Error as RuntimeError;
use gapless::models::Moe;
use gapless::{Mesh, Reserve, TrainError, TrainOptions, Trainer};
use gapless_testing::few;

use crate::uneven::{BATCH, Case, EXPERTS, LAYERS, Pattern, SEQUENCE, STEPS, batch, cases, config, experts, options};

/// The results of a step on a rank.
#[derive(Debug)]
struct Seen {
    loss: f32,
    norm: f32,
    /// Loads of experts and numbers of dropped choices, by name.
    watched: Vec<(String, Vec<f32>)>,
    /// Bytes that were requested from the rank's arena.
    asked: u64,
}

impl Seen {
    /// Returns the sum of the watched values whose names have this ending.
    fn total(&self, end: &str) -> f32 {
        self.watched.iter().filter(|(name, _)| name.ends_with(end)).flat_map(|(_, values)| values).sum()
    }
}

/// Runs every rank, and returns the rank's steps and the report of its arena. Also checks the addresses of each step,
/// and that its tokens were routed as intended.
fn run(case: &Case, options: &TrainOptions) -> Vec<(Vec<Seen>, Option<ArenaReport>)> {
    let ranks = communicator::on_threads(options.step.mesh.ranks().unwrap(), |world| {
        let rank = world.rank();
        let requests = requests(case, options, rank).len();
        let mut trainer =
            Trainer::builder(|vb| Moe::new(&case.config, vb), options.clone()).distributed(world).build()?;
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
            watched.iter().filter(|(name, _)| name.ends_with(".load")).for_each(|(_, load)| pattern.check(load, &what));
            let before = asked;
            asked = trainer.routing().map_or(0, |report| report.asked_bytes);
            seen.push(Seen { loss: report.loss, norm: report.gradient_norm, watched, asked: asked - before });
        }
        Ok((seen, trainer.routing()))
    });
    ranks.unwrap()
}

/// Returns the bytes per row of each request that a rank's step makes to its arena.
fn requests(case: &Case, options: &TrainOptions, rank: usize) -> Vec<u64> {
    let plan = gapless::plan::step(|vb| Moe::new(&case.config, vb), options, rank).unwrap();
    plan.routing().iter().flat_map(|plan| plan.requests()).map(|request| request.bytes_per_row).collect()
}

/// With room for the worst case, the results equal those of one rank up to rounding. f32 rounds at 6e-8, and each
/// rank first sums losses and gradients of its share of the batch. Sums of a few thousand terms of mixed signs then
/// differ by some hundred roundings.
///
/// The requested bytes also show that no row is lost. A row is requested on the rank of its expert, once for each
/// buffer of a layer. So all ranks together request the bytes of all choices that were not dropped.
#[test]
fn no_row_is_lost() {
    let cases = cases();
    for (turn, case) in few(&cases, 3).iter().enumerate() {
        let alone = run(case, &options(Mesh::default(), Reserve::Worst)).remove(0).0;
        let meshes = [experts(2), experts(4), Mesh { pipeline: 2, ..experts(2) }];
        for mesh in gapless_testing::every_other(&meshes, turn) {
            let options = options(mesh, Reserve::Worst);
            let ranks = run(case, &options);
            let row_bytes: u64 = (0..ranks.len()).flat_map(|rank| requests(case, &options, rank)).sum();
            let layers = (mesh.expert * options.step.micro_batches * LAYERS) as u64;
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

/// Checks the report of all steps, none of which overflowed.
fn keeps_its_promise(report: &ArenaReport, requests: usize, what: &str) {
    assert_eq!(report.requests, STEPS * requests as u64, "{what}");
    assert_eq!((report.overflows, report.refused_bytes), (0, 0), "{what}");
    assert_eq!(report.reused_bytes + report.reserve_served_bytes, report.asked_bytes, "{what}");
    assert!(report.high_water_bytes <= report.reserve_bytes, "{what}: {report}");
    assert!(report.most_live_bytes <= report.high_water_bytes, "{what}: {report}");
}

/// A reserve affects only the addresses of rows: the results are bit-identical to those with the worst-case reserve.
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

/// All tokens choose one expert. The rank that holds it reports the overflow. The other ranks also fail instead of
/// hanging, although the overflowing rank has not exited. The model is unchanged.
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
            let mut trainer = Trainer::builder(|vb| Moe::new(&config, vb), options).distributed(world).build()?;
            Pattern::One(expert).steer(&mut trainer);
            let before = parameters(&trainer);
            let (tokens, targets) = batch(0);
            let outcome = trainer.step(&tokens, &targets);
            let checked = trainer.check_run();
            let unchanged = parameters(&trainer) == before;
            // No rank leaves before all ranks have failed. If a rank left earlier, the other ranks would report that
            // this rank has gone, rather than that it has failed.
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
            assert!(
                matches!(again, Err(TrainError::Ranks(_) | TrainError::Runtime(RuntimeError::Communicator { .. }))),
                "{what}, once more: {again:?}"
            );
            let overflows = match outcome.expect_err(&what) {
                error @ TrainError::Runtime(RuntimeError::Routing { .. }) => {
                    says_what_helps(&error);
                    overflown.push(mesh.coordinate(rank).expert);
                    1
                }
                // The error is not `Timeout`, so no rank has waited in vain.
                TrainError::Runtime(RuntimeError::Communicator {
                    source: CommunicatorError::PeerGone { .. }, ..
                }) => 0,
                error => panic!("{what}: {error}"),
            };
            assert_eq!(report.unwrap().overflows, overflows, "{what}");
        }
        let owner = expert / (EXPERTS / mesh.expert);
        assert!(!overflown.is_empty() && overflown.iter().all(|&rank| rank == owner), "{what}: {overflown:?}");
    }
}

/// Scores that are not finite count as equal, so all tokens go to the first experts, which have room for them. The step
/// reports which value was not finite and changes no parameter, and the trainers can continue.
#[test]
fn a_step_that_is_not_finite_changes_nothing_on_any_rank() {
    let config = config(2);
    let outcomes = communicator::on_threads(4, |world| {
        let mut trainer = Trainer::builder(|vb| Moe::new(&config, vb), options(experts(4), Reserve::Worst))
            .distributed(world)
            .build()?;
        let (tokens, targets) = batch(0);
        let name = "model.layers.1.mlp.gate.weight";
        let weight = trainer.tensor(name)?.copy()?;
        trainer.set_tensor(name, &weight.affine(f64::NAN, 0.0)?)?;
        let error = trainer.step(&tokens, &targets).unwrap_err();
        trainer.set_tensor(name, &weight)?;
        let after = parameters(&trainer);
        let fresh = trainer.step(&tokens, &targets)?;
        Ok((error.to_string(), matches!(error, TrainError::NonFinite { .. }), after, fresh.loss))
    });
    let untouched = communicator::on_threads(4, |world| {
        let mut trainer = Trainer::builder(|vb| Moe::new(&config, vb), options(experts(4), Reserve::Worst))
            .distributed(world)
            .build()?;
        let (before, (tokens, targets)) = (parameters(&trainer), batch(0));
        Ok((before, trainer.step(&tokens, &targets)?.loss))
    });
    for (rank, (one, other)) in outcomes.unwrap().into_iter().zip(untouched.unwrap()).enumerate() {
        let (error, is_non_finite, after, loss) = one;
        assert!(is_non_finite && error.contains("model.layers.1.mlp.gate"), "rank {rank}: {error}");
        assert!((after, loss) == other, "rank {rank} has changed");
    }
}

/// The product of a row does not depend on the other rows, and all ranks evaluate the same tokens. So the bits equal
/// those of one rank.
#[test]
fn evaluation_and_logits_have_the_bits_of_one_rank() {
    for case in &cases() {
        let losses_on = |mesh: Mesh| {
            let options = options(mesh, Reserve::Worst);
            let ranks = communicator::on_threads(mesh.ranks().unwrap(), |world| {
                let mut trainer =
                    Trainer::builder(|vb| Moe::new(&case.config, vb), options.clone()).distributed(world).build()?;
                (case.pattern)(0).steer(&mut trainer);
                let (tokens, targets) = batch(0);
                let some = trainer.options().step.evaluation_batch() * SEQUENCE;
                let loss = trainer.evaluate(&tokens[..some], &targets[..some])?;
                let served = trainer.check_run()?;
                let logits = trainer.logits(&tokens[..SEQUENCE])?.flatten_all()?.to_vec1::<f32>()?;
                assert_eq!(served > 0, mesh.expert > 1, "{} on {mesh:?}", case.name);
                assert_eq!(trainer.check_run()?, served, "{} on {mesh:?}", case.name);
                Ok((loss, logits))
            });
            ranks.unwrap()
        };
        let alone = losses_on(Mesh::default()).remove(0);
        for mesh in [experts(2), experts(4)] {
            for (rank, seen) in losses_on(mesh).into_iter().enumerate() {
                assert!(seen == alone, "{} on rank {rank} of {mesh:?}: {} instead of {}", case.name, seen.0, alone.0);
            }
        }
    }
}

/// Checks that the error contains the layer, the rows, the bytes and the remedies.
fn says_what_helps(error: &TrainError) {
    let TrainError::Runtime(RuntimeError::Routing { source, .. }) = error else {
        unreachable!("matched by the caller")
    };
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

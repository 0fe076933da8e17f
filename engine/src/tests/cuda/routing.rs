//! Expert ranks on simulated devices. Dynamic rows are placed once they are counted. If rows find no room, they are
//! handled as the options say, with the same results as on CPUs.

use gapless_alloc::arena::{ArenaReport, Reserve};
use gapless_parallel::Mesh;

use gapless_testing::few;

use super::mixture::{Mixture, mixtures};
use super::processor::device;
use super::small::SEQUENCE;
use super::trainer::{batch, expect_near, options, step};
use super::{gpu, host};
use crate::communicator::{Communicator, on_threads};
use crate::compile;
use crate::nn::RouterConfig;
use crate::runtime::Error as RuntimeError;
use crate::{DeviceChoice, MemoryOptions, Overflow, StepOptions, TrainError, TrainOptions, Trainer};

const STEPS: u64 = 3;

/// The results of one rank in a run.
#[derive(Debug)]
struct Seen {
    /// The loss and norm of each step, and then a validation loss.
    losses: Vec<f32>,
    /// The arena's report after each step.
    reports: Vec<ArenaReport>,
    /// Bytes of the arena before the first step and after the last one.
    arena_bytes: [u64; 2],
}

/// A router that chooses two of four experts per token.
fn config() -> RouterConfig {
    RouterConfig { experts: 4, balance_loss: 0.1, ..RouterConfig::default() }
}

fn on(mesh: Mesh, routing: Reserve, overflow: Overflow) -> TrainOptions {
    TrainOptions {
        step: StepOptions {
            mesh,
            micro_batches: 2 / mesh.data,
            memory: MemoryOptions { routing, overflow, planning: 1 << 20, ..options().step.memory },
            ..options().step
        },
        ..options()
    }
}

fn experts(mesh: Mesh) -> Mesh {
    Mesh { expert: 2, ..mesh }
}

/// A function that builds a rank's trainer, on the CPU or on a device.
type Makes<'m> = &'m (dyn Fn(Box<dyn Communicator>, TrainOptions) -> Result<Trainer, TrainError> + Sync);

fn on_cpu(
    config: &RouterConfig,
    is_shared: bool,
) -> impl Fn(Box<dyn Communicator>, TrainOptions) -> Result<Trainer, TrainError> {
    move |world, options| Trainer::builder(|vb| Mixture::new(config, is_shared, vb), options).distributed(world).build()
}

fn on_device(
    config: &RouterConfig,
    is_shared: bool,
) -> impl Fn(Box<dyn Communicator>, TrainOptions) -> Result<Trainer, TrainError> {
    move |world, options| {
        Trainer::builder(|vb| Mixture::new(config, is_shared, vb), options)
            .distributed(world)
            .on_device(device())
            .build()
    }
}

/// Runs all ranks, and checks the addresses of each step.
fn run(make: Makes<'_>, options: &TrainOptions) -> Vec<Seen> {
    let ranks = options.step.mesh.ranks().unwrap();
    let run = |world| {
        let mut trainer = make(world, options.clone())?;
        let before = trainer.report().arena_bytes;
        let (mut losses, mut reports) = (Vec::new(), Vec::new());
        for _ in 0..STEPS {
            losses.extend(step(&mut trainer)?);
            // A rank of a pipeline may have no experts.
            assert!(trainer.check_run()? > 0 || trainer.routing().is_none());
            reports.push(trainer.routing().unwrap_or_default());
        }
        let [tokens, targets] = batch(9);
        let part = trainer.options().step.evaluation_batch() * SEQUENCE;
        losses.push(trainer.evaluate(&tokens[..part], &targets[..part])?);
        trainer.check_run()?;
        Ok(Seen { losses, reports, arena_bytes: [before, trainer.report().arena_bytes] })
    };
    on_threads(ranks, run).unwrap()
}

fn expect_alike(what: &str, seen: &[Seen], expected: &[Seen]) {
    let allowed = gpu::allowed(2e-5, 2e-4) as f32;
    for (rank, (seen, expected)) in seen.iter().zip(expected).enumerate() {
        let losses = seen.losses.iter().zip(&expected.losses);
        losses.for_each(|(&loss, &expected)| expect_near(&format!("{what}, rank {rank}"), loss, expected, allowed));
    }
}

/// Mixtures of every kind on two expert ranks have the same losses as on CPUs, and request the same number of bytes.
#[test]
fn every_mixture_has_expert_ranks() {
    if !host::is_there() {
        return;
    }
    for (name, is_shared, config) in few(&mixtures(), 2) {
        let options = on(experts(Mesh::default()), Reserve::Balanced { factor: 2.0 }, Overflow::Error);
        let cpu = run(&on_cpu(config, *is_shared), &options);
        let gpu = run(&on_device(config, *is_shared), &options);
        expect_alike(name, &gpu, &cpu);
        for (gpu, cpu) in gpu.iter().zip(&cpu) {
            let asked = |seen: &Seen| seen.reports.iter().map(|r| (r.requests, r.asked_bytes)).collect::<Vec<_>>();
            assert_eq!(asked(gpu), asked(cpu), "{name}");
            assert!(gpu.reports[0].asked_bytes > 0, "{name}");
        }
    }
}

/// No overflow policy changes a bit of the results, in pipelines and with recomputation. Each policy takes effect in
/// some run.
#[test]
fn policies_change_no_bit() {
    if !host::is_there() {
        return;
    }
    let (config, alone) = (config(), Mesh::default());
    let meshes = [alone, Mesh { pipeline: 2, ..alone }, Mesh { data: 2, ..alone }].map(experts);
    for &mesh in few(&meshes, 1) {
        let make = on_device(&config, false);
        let worst = run(&make, &on(mesh, Reserve::Worst, Overflow::Error));
        expect_alike(
            "the worst case",
            &worst,
            &run(&on_cpu(&config, false), &on(mesh, Reserve::Worst, Overflow::Error)),
        );
        for (routing, overflow, recompute) in [
            (Reserve::Bytes(0), Overflow::Grow, "none"),
            (Reserve::Balanced { factor: 0.5 }, Overflow::Grow, "ops:grouped_linear"),
            (Reserve::Balanced { factor: 0.0 }, Overflow::Recompute, "none"),
            (Reserve::Balanced { factor: 0.9 }, Overflow::Recompute, "ops:routed_swiglu"),
        ] {
            let what = format!("{routing:?}, {overflow:?}, {recompute} on {mesh:?}");
            let recompute: crate::recompute::Recompute = recompute.parse().unwrap();
            let seen = run(
                &make,
                &TrainOptions {
                    step: StepOptions {
                        memory: MemoryOptions { recompute, ..on(mesh, routing, overflow).step.memory },
                        ..on(mesh, routing, overflow).step
                    },
                    ..on(mesh, routing, overflow)
                },
            );
            expect_alike(&what, &seen, &worst);
            for (seen, worst) in seen.iter().zip(&worst) {
                // On a GPU, an operation may be rounded differently when it is recomputed without the fusion of the
                // original.
                assert!(gpu::is_asked_for() || seen.losses == worst.losses, "{what}: {seen:?}, not {worst:?}");
            }
            let last = |seen: &Seen| *seen.reports.last().unwrap();
            for report in seen.iter().map(last) {
                assert_eq!(report.refused_bytes, report.outside_bytes, "{what}: {report}");
            }
            match overflow {
                Overflow::Recompute => assert!(seen.iter().any(|seen| last(seen).evicted > 0), "{what}"),
                _ => seen.iter().for_each(|seen| {
                    let [before, after] = seen.arena_bytes;
                    let report = last(seen);
                    assert_eq!(after > before, report.growths > 0, "{what}: {before} to {after} bytes, {report}");
                    assert!(report.growths <= STEPS, "{what}: {report}");
                }),
            }
            assert!(overflow == Overflow::Recompute || seen.iter().any(|seen| last(seen).growths > 0), "{what}");
        }
    }
}

/// All tokens are routed to experts of the first rank, so the second rank has no rows. At first, the rows lie in
/// memory after the arena, and later in the enlarged arena.
#[test]
fn a_rank_may_have_all_rows() {
    if !host::is_there() {
        return;
    }
    let config = config();
    let options = on(experts(Mesh::default()), Reserve::Balanced { factor: 1.0 }, Overflow::Grow);
    let run = |make: Makes<'_>| {
        let run = |world| {
            let mut trainer = make(world, options.clone())?;
            let mut seen = Vec::new();
            for _ in 0..STEPS {
                // With equal scores, the first experts are chosen.
                let name = trainer.parameter_names().find(|name| name.contains("router")).unwrap().to_owned();
                let zeros = trainer.tensor(&name)?.zeros_like()?;
                trainer.set_tensor(&name, &zeros)?;
                let [loss, norm] = step(&mut trainer)?;
                trainer.check_run()?;
                let ArenaReport { growths, asked_bytes, .. } = trainer.routing().unwrap();
                seen.push((loss, norm, growths, asked_bytes));
            }
            Ok(seen)
        };
        on_threads(2, run).unwrap()
    };
    let (cpu, gpu) = (run(&on_cpu(&config, false)), run(&on_device(&config, false)));
    for (rank, (cpu, gpu)) in cpu.iter().zip(&gpu).enumerate() {
        for (cpu, gpu) in cpu.iter().zip(gpu) {
            let allowed = gpu::allowed(2e-5, 2e-4) as f32;
            expect_near("loss", gpu.0, cpu.0, allowed);
            expect_near("norm", gpu.1, cpu.1, allowed);
            assert_eq!(((gpu.2, gpu.3), gpu.3 > 0), ((u64::from(rank == 0), cpu.3), rank == 0), "rank {rank}");
        }
    }
}

/// The error names the buffer that found no room, or the operation whose non-finite scores caused it. The other rank
/// also gets an error.
#[test]
fn rows_without_room_are_an_error_on_both_ranks() {
    if !host::is_there() {
        return;
    }
    let config = config();
    let outcomes = |is_finite: bool| {
        let options = on(experts(Mesh::default()), Reserve::Bytes(0), Overflow::Error);
        let run = |world| {
            let mut trainer = on_device(&config, false)(world, options.clone())?;
            if !is_finite {
                let name = trainer.parameter_names().find(|name| name.contains("router")).unwrap().to_owned();
                let broken = trainer.tensor(&name)?.affine(f64::NAN, 0.0)?;
                trainer.set_tensor(&name, &broken)?;
            }
            let outcome = step(&mut trainer);
            Ok((outcome, trainer.routing().unwrap().overflows))
        };
        on_threads(2, run).unwrap()
    };
    for (outcome, overflows) in outcomes(true) {
        let error = outcome.unwrap_err();
        let is_own = matches!(error, TrainError::Runtime(RuntimeError::Routing { .. }));
        assert_eq!(overflows, u64::from(is_own), "{error}");
        assert!(is_own || matches!(error, TrainError::Runtime(RuntimeError::Communicator { .. })), "{error}");
        assert!(error.to_string().contains("experts"), "{error}");
    }
    let named =
        |error: &TrainError| matches!(error, TrainError::NonFinite { culprit, .. } if culprit.contains("router"));
    let outcomes = outcomes(false);
    assert!(outcomes.iter().any(|(outcome, _)| outcome.as_ref().is_err_and(named)), "{outcomes:?}");
}

/// The budget covers the arena and the memory outside of it together.
#[test]
fn growing_keeps_to_the_budget() {
    if !host::is_there() {
        return;
    }
    let config = config();
    let with = |budget| {
        let mut options = on(experts(Mesh::default()), Reserve::Bytes(0), Overflow::Grow);
        options.step.memory.budget = budget;
        options
    };
    let make = on_device(&config, false);
    let bytes = on_threads(2, |world| Ok(make(world, with(None))?.report().arena_bytes)).unwrap();
    let budget = bytes[0].max(bytes[1]);
    let errors = on_threads(2, |world| Ok(step(&mut make(world, with(Some(budget)))?).unwrap_err())).unwrap();
    let is_growth = |error: &TrainError| matches!(error, TrainError::Runtime(RuntimeError::Growth { needed, .. }) if *needed > budget);
    assert!(errors.iter().any(is_growth), "{errors:?}");
}

/// The profile of expert ranks covers all arithmetic of a step. Dynamic rows are placed as in other steps.
#[test]
fn a_profile_of_expert_ranks_is_their_step() {
    if !host::is_there() {
        return;
    }
    let (config, [tokens, targets]) = (config(), batch(0));
    let options = on(experts(Mesh::default()), Reserve::Worst, Overflow::Recompute);
    let profiles = on_threads(2, |world| {
        let mut trainer = on_device(&config, false)(world, options.clone())?;
        let profile = trainer.profile(&tokens, &targets)?;
        assert!(trainer.check_run()? > 0);
        Ok(profile)
    });
    for (rank, profile) in profiles.unwrap().iter().enumerate() {
        let options = TrainOptions { device: DeviceChoice::Cuda(0), ..options.clone() };
        let plan =
            compile::step::plan(|vb| Mixture::new(&config, false, vb), &options.step, rank, options.target()).unwrap();
        assert_eq!(profile.iter().map(|timed| timed.flops).sum::<u64>(), plan.flops()[0], "rank {rank}");
    }
}

/// A step that is not finite is repeated instruction by instruction. Dynamic rows are placed as in the first run.
#[test]
fn a_broken_step_of_expert_ranks_is_named() {
    if !host::is_there() {
        return;
    }
    for (routing, overflow) in
        [(Reserve::Worst, Overflow::Error), (Reserve::Balanced { factor: 0.0 }, Overflow::Recompute)]
    {
        let options = on(experts(Mesh::default()), routing, overflow);
        let config = config();
        let errors = on_threads(2, |world| {
            let mut trainer = on_device(&config, false)(world, options.clone())?;
            let name = trainer.parameter_names().find(|name| name.contains("experts.down")).unwrap().to_owned();
            let broken = (trainer.tensor(&name)?.ones_like()? * f64::INFINITY)?;
            trainer.set_tensor(&name, &broken)?;
            let error = step(&mut trainer).unwrap_err();
            trainer.check_run()?;
            Ok(error.to_string())
        })
        .unwrap();
        assert!(errors.iter().any(|error| error.contains("grouped_linear in experts")), "{errors:?}");
    }
}

//! The results are the same on any number of ranks, and for any order of the schedule's actions.

use std::sync::Arc;

use gapless::engine::compile::{InstrKind, StagePartition};
use gapless::models::MoeStyle;
use gapless::nn::{Embedding, Init, Linear, Module, VarBuilder, embedding, linear};
use gapless::parallel::{self, Schedule};
use gapless::{Mesh, Model, Pipeline, Tensor, Trainer, communicator};

use crate::common::{Kind, Outcome, TinyRun, VOCABULARY};

const MICRO_BATCHES: usize = 8;

fn schedule(name: &str) -> Arc<dyn Schedule + Send + Sync> {
    parallel::by_name(name).unwrap().into()
}

fn run(kind: Kind, mesh: Mesh, chunks: usize, name: &str) -> TinyRun {
    let mut run = TinyRun { kind, ..TinyRun::default() };
    run.options.threads = 1;
    run.options.step.micro_batches = MICRO_BATCHES / mesh.data;
    run.options.step.mesh = mesh;
    run.options.step.pipeline = Pipeline { schedule: schedule(name), chunks, ..Pipeline::default() };
    run
}

/// Returns the outcome on one rank, with the whole batch as one micro-batch.
fn plain(kind: Kind) -> Outcome {
    TinyRun { kind, ..TinyRun::default() }.steps(2)
}

/// Returns the combinations of 1, 2 or 4 ranks with 1, 2 or 4 chunks for which a schedule exists.
fn shapes(name: &str) -> Vec<(usize, usize)> {
    let exists = |&(ranks, chunks): &(usize, usize)| {
        let shape = parallel::Shape { ranks: ranks as u32, chunks: chunks as u32, micro_batches: MICRO_BATCHES as u32 };
        schedule(name).actions(&shape).is_ok()
    };
    let all = [1, 2, 4].into_iter().flat_map(|ranks| [1, 2, 4].map(|chunks| (ranks, chunks)));
    let shapes: Vec<_> = all.filter(exists).collect();
    assert!(!shapes.is_empty(), "{name} exists for none of the shapes");
    shapes
}

/// Schedules whose backwards process the micro-batches in reverse order, so that gradients are summed in another
/// order.
const REVERSED: [&str; 3] = ["looped-bfs", "layered-accumulation", "modular-pipeline"];

fn names() -> impl Iterator<Item = &'static str> {
    parallel::all().into_iter().map(|schedule| schedule.name()).chain(["zb-searched", "zbv-searched"])
}

#[test]
fn every_schedule_on_any_number_of_stages_gives_the_same_bits() {
    for (offset, kind) in [Kind::Gpt, Kind::Llama].into_iter().enumerate() {
        let plain = plain(kind);
        for (turn, name) in names().filter(|name| !REVERSED.contains(name)).enumerate() {
            for &(ranks, chunks) in gapless_testing::in_turn(&shapes(name), turn + offset) {
                let outcome = run(kind, Mesh::pipeline(ranks), chunks, name).steps_on_ranks(2);
                assert_eq!(outcome, plain, "{kind:?}, {name} on {ranks} ranks of {chunks} chunks");
            }
        }
    }
}

#[test]
fn mixtures_of_experts_on_two_ranks_give_the_same_bits() {
    for (style, name, chunks) in [
        (MoeStyle::Mixtral, "1f1b", 1),
        (MoeStyle::Switch, "zbv", 2),
        (MoeStyle::Qwen, "interleaved-zb", 2),
        (MoeStyle::DeepSeek, "1f1b", 1),
        (MoeStyle::DeepSeek, "zbv", 2),
        (MoeStyle::ExpertChoice, "zbv", 2),
    ] {
        let kind = Kind::Moe(style);
        let mut run = run(kind, Mesh::pipeline(2), chunks, name);
        run.options.poison = true;
        assert_eq!(run.steps_on_ranks(2), plain(kind), "{kind:?}, {name} of {chunks} chunks");
    }
}

/// The first loss has the same bits, because no gradients have been summed yet. The second loss differs by the
/// rounding of f32 sums.
#[test]
fn reversed_micro_batches_differ_by_rounding_alone() {
    let plain = plain(Kind::Gpt);
    for name in REVERSED {
        for (ranks, chunks) in shapes(name) {
            let outcome = run(Kind::Gpt, Mesh::pipeline(ranks), chunks, name).steps_on_ranks(2);
            assert_eq!(outcome.losses[0], plain.losses[0], "{name} on {ranks} ranks of {chunks} chunks");
            close(&outcome, &plain, name);
        }
    }
}

/// Data ranks sum the gradients of their shares of the batch in another order than one rank sums micro-batches.
#[test]
fn data_ranks_differ_by_rounding_alone() {
    for kind in Kind::all() {
        let plain = plain(kind);
        for (data, pipeline) in [(2, 1), (4, 1), (2, 2)] {
            let mesh = Mesh { data, pipeline, ..Mesh::default() };
            let outcome = run(kind, mesh, 1, "1f1b").steps_on_ranks(2);
            close(&outcome, &plain, &format!("{kind:?} on {mesh:?}"));
            // The biases depend on loads, which are integers, so their sum is exact in any order.
            for (name, bias) in plain.parameters.iter().filter(|(name, _)| name.ends_with("e_score_correction_bias")) {
                let (_, on_ranks) = outcome.parameters.iter().find(|(other, _)| other == name).expect("someone has it");
                assert_eq!(on_ranks, bias, "{name} of {kind:?} on {mesh:?}");
            }
        }
    }
}

/// f32 rounds at 6e-8; sums of a few thousand terms of mixed signs lose one or two digits more.
fn close(outcome: &Outcome, expected: &Outcome, what: &str) {
    let pairs = outcome.losses.iter().zip(&expected.losses);
    for (&a, &b) in pairs.chain(outcome.gradient_norms.iter().zip(&expected.gradient_norms)) {
        let (a, b) = (f32::from_bits(a), f32::from_bits(b));
        assert!((a - b).abs() <= 1e-5 * b.abs(), "{what}: {a} instead of {b}");
    }
}

/// Checks the tests above with NaN in every dead range. Buffers that are being transferred must not be overwritten,
/// and dead bytes must not be read.
#[test]
fn nan_in_every_dead_range_changes_nothing() {
    let plain = plain(Kind::Gpt);
    for (name, chunks) in [("1f1b", 1), ("zbv", 2)] {
        let mut run = run(Kind::Gpt, Mesh::pipeline(2), chunks, name);
        run.options.poison = true;
        assert_eq!(run.steps_on_ranks(2), plain, "{name}");
    }
    let mesh = Mesh { data: 2, pipeline: 2, ..Mesh::default() };
    let clean = run(Kind::Gpt, mesh, 1, "1f1b").steps_on_ranks(2);
    let mut run = run(Kind::Gpt, mesh, 1, "1f1b");
    run.options.poison = true;
    assert_eq!(run.steps_on_ranks(2), clean);
}

/// A checkpoint that was saved on one mesh can be resumed on another.
#[test]
fn a_checkpoint_of_one_mesh_resumes_on_another() {
    let mesh = |data, pipeline| Mesh { data, pipeline, ..Mesh::default() };
    let on = |mesh: Mesh, chunks| run(Kind::Gpt, mesh, chunks, if chunks > 1 { "interleaved" } else { "1f1b" });
    for (from, to) in [
        (on(mesh(1, 2), 1), on(mesh(1, 4), 1)),
        (on(mesh(1, 4), 1), on(mesh(1, 1), 1)),
        (on(mesh(1, 1), 1), on(mesh(1, 2), 2)),
        (on(mesh(1, 1), 1), on(mesh(2, 1), 1)),
        (on(mesh(2, 2), 1), on(mesh(1, 2), 1)),
        (on(mesh(2, 1), 1), on(mesh(4, 1), 1)),
        (on(mesh(2, 2), 1), on(mesh(2, 2), 1)),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let what = format!("{:?} to {:?}", from.options.step.mesh, to.options.step.mesh);
        from.save_on_ranks(2, dir.path());
        let resumed = to.resume_on_ranks(dir.path(), 2);
        // Does the same steps without interruption on the second mesh. Their results are bit-identical unless data
        // ranks sum gradients.
        let straight = to.steps_on_ranks(4);
        assert_eq!(resumed.losses.len(), 2);
        if from.options.step.mesh.data == 1 && to.options.step.mesh.data == 1
            || from.options.step.mesh == to.options.step.mesh
        {
            assert_eq!(resumed.losses, straight.losses[2..], "{what}");
            assert_eq!(resumed.parameters, straight.parameters, "{what}");
        } else {
            let last = Outcome {
                losses: straight.losses[2..].to_vec(),
                gradient_norms: straight.gradient_norms[2..].to_vec(),
                parameters: Vec::new(),
            };
            close(&resumed, &last, &what);
        }
    }
}

/// A model with properties that textbook models lack:
/// - one scale that all stages use through a view,
/// - two biases with the same gradient,
/// - a skip connection from the first stage to the last,
/// - a table that is looked up and used again as the head,
/// - a stage without parameters.
struct Odd {
    embed: Embedding,
    scale: Tensor,
    biases: [Tensor; 2],
    layers: Vec<Linear>,
}

impl Odd {
    const WIDTH: usize = 24;

    fn new(vb: VarBuilder) -> gapless::Result<Self> {
        let width = Self::WIDTH;
        Ok(Self {
            embed: embedding(VOCABULARY as usize, width, vb.pp("embed"))?,
            scale: vb.get_with_hints(width, "scale", Init::Const(0.5))?,
            biases: [vb.get(width, "b_ih")?, vb.get(width, "b_hh")?],
            layers: (0..4).map(|i| linear(width, width, vb.pp("layers").pp(i))).collect::<gapless::Result<_>>()?,
        })
    }
}

impl Model for Odd {
    fn forward(&self, tokens: &Tensor, _train: bool) -> gapless::Result<Tensor> {
        let first = self.embed.forward(tokens)?;
        let mut x = first.clone();
        for layer in &self.layers {
            let y = layer.forward(&x)?.gelu()?.broadcast_mul(&self.scale)?;
            x = x.add(&y)?.broadcast_add(&self.biases[0].add(&self.biases[1])?)?;
        }
        let x = x.add(&first)?.gelu()?;
        x.linear(self.embed.embeddings(), None)
    }
}

fn odd_losses(mesh: Mesh, chunks: usize, name: &str) -> Vec<(f32, f32)> {
    let mut run = run(Kind::Gpt, mesh, chunks, name);
    run.options.poison = true;
    let steps = |mut trainer: Trainer| -> Result<Vec<(f32, f32)>, gapless::TrainError> {
        let reports = (0..3).map(|_| run.step(&mut trainer));
        Ok(reports.map(|report| (report.loss, report.gradient_norm)).collect())
    };
    let options = run.options.clone();
    let ranks = communicator::on_threads(mesh.ranks().unwrap(), |world| {
        steps(Trainer::builder(Odd::new, options.clone()).distributed(world).build()?)
    });
    let ranks = ranks.unwrap();
    assert!(ranks.iter().all(|losses| *losses == ranks[0]), "all ranks see the same");
    ranks.into_iter().next().unwrap()
}

#[test]
fn odd_models_give_the_same_bits_too() {
    let alone = odd_losses(Mesh::default(), 1, "1f1b");
    for (name, ranks, chunks) in
        [("1f1b", 4, 1), ("zb-h1", 2, 1), ("zb-h2", 4, 1), ("zbv", 4, 2), ("interleaved-zb", 2, 4), ("v-min", 4, 2)]
    {
        assert_eq!(odd_losses(Mesh::pipeline(ranks), chunks, name), alone, "{name} on {ranks} ranks");
    }
    for (data, pipeline) in [(2, 1), (4, 2)] {
        let mesh = Mesh { data, pipeline, ..Mesh::default() };
        for (a, b) in odd_losses(mesh, 1, "1f1b").iter().zip(&alone) {
            assert!((a.0 - b.0).abs() <= 1e-5 * b.0 && (a.1 - b.1).abs() <= 1e-5 * b.1, "{mesh:?}: {a:?}, not {b:?}");
        }
    }
}

#[test]
fn inconsistent_options_are_refused_on_every_rank() {
    let error = |mesh: Mesh, change: fn(&mut TinyRun)| {
        let mut run = run(Kind::Gpt, mesh, 1, "1f1b");
        change(&mut run);
        let build = |vb| Odd::new(vb);
        let made = communicator::on_threads(2, |world| {
            Trainer::builder(build, run.options.clone()).distributed(world).build().map(drop)
        });
        made.unwrap_err().to_string()
    };
    for (mesh, change, word) in [
        (Mesh::pipeline(4), (|_| {}) as fn(&mut TinyRun), "4 ranks, but 2"),
        (Mesh::pipeline(2), |run| run.options.step.micro_batches = 3, "8 sequences"),
        (Mesh::pipeline(2), |run| run.options.step.pipeline.chunks = 0, "chunks"),
        (Mesh::pipeline(2), |run| run.options.step.pipeline.chunks = 3, "1f1b runs 1 chunk"),
        (
            Mesh::pipeline(2),
            |run| run.options.step.pipeline.cut = StagePartition::Before(vec!["nowhere".into()]),
            "nowhere",
        ),
        (
            Mesh::pipeline(2),
            |run| run.options.step.pipeline.cut = StagePartition::Before(Vec::new()),
            "1 stages, not 2",
        ),
        (Mesh { data: 2, ..Mesh::default() }, |run| run.options.step.keep_gradients = true, "keep_gradients"),
    ] {
        let error = error(mesh, change);
        assert!(error.contains(word), "{error:?} instead of something about {word:?}");
    }
}

/// The sums over data ranks start before the last backward ends, and end after it.
#[test]
fn gradients_are_summed_while_the_backward_goes_on() {
    let mesh = Mesh { data: 2, ..Mesh::default() };
    let program = gapless::plan::program(Odd::new, &run(Kind::Gpt, mesh, 1, "1f1b").options, 0).unwrap();
    let backward = program.parts.iter().rfind(|part| part.action.is_some()).expect("there are actions");
    let positions = |which: fn(&InstrKind) -> bool| -> Vec<usize> {
        (0..program.instrs.len()).filter(|&index| which(&program.instrs[index].kind)).collect()
    };
    let begun = positions(|work| matches!(work, InstrKind::Collective(..)));
    let finished = positions(|work| matches!(work, InstrKind::Finish(_)))[0];
    let inside = begun.iter().find(|begun| backward.instrs.contains(begun)).expect("a sum begins in the backward");
    assert!(inside + 10 < backward.instrs.end, "{inside} in {:?}", backward.instrs);
    assert!(begun[0] < backward.instrs.start, "the losses are known before it");
    assert!(finished >= backward.instrs.end, "{finished} after {:?}", backward.instrs);
}

//! Ranks that were started with different options, or are given different data. They stop at once, with an error that
//! names the rank and the difference.

use gapless::communicator;
use gapless::engine::learning_rate::LearningRate;
use gapless::engine::optim::AdamW;
use gapless::{Mesh, Recompute, Trainer};

use crate::common::{Kind, TinyRun};

type Change = dyn Fn(&mut TinyRun) + Sync;

/// Returns the errors of the two ranks of a run. The second rank has changed options, and trains on the batch of
/// another step.
fn answers(change: &Change, batch_of: u64) -> Vec<String> {
    let answer = |rank: usize, world| {
        let mut run = TinyRun::default();
        (run.options.threads, run.options.step.mesh) = (1, Mesh { data: 2, ..Mesh::default() });
        if rank == 1 {
            change(&mut run);
        }
        let step = |mut trainer: Trainer| {
            let (tokens, targets) = run.batch(if rank == 1 { batch_of } else { 0 });
            trainer.step(&tokens, &targets)
        };
        run.try_rank(Some(world)).and_then(step).map_or_else(|error| error.to_string(), |_| "trained".into())
    };
    communicator::on_threads(2, |world| Ok(answer(world.rank(), world))).expect("no rank fails otherwise")
}

#[test]
fn ranks_that_differ_are_stopped_by_name() {
    let changes: [(&str, &Change); 8] = [
        ("seed", &|run| run.options.seed += 1),
        ("batch size", &|run| run.options.step.batch *= 2),
        ("number of micro-batches", &|run| run.options.step.micro_batches = 2),
        ("mesh", &|run| run.options.step.mesh = Mesh { pipeline: 2, ..Mesh::default() }),
        ("optimizer", &|run| run.options.step.optimizer = AdamW { beta2: 0.9, ..AdamW::default() }.into()),
        ("learning rate", &|run| run.options.learning_rate = LearningRate { peak: 1.0, ..run.options.learning_rate }),
        ("recompute policy", &|run| run.options.step.memory.recompute = Recompute::Ops(vec!["gelu".into()])),
        ("model", &|run| run.kind = Kind::Llama),
    ];
    for (what, change) in changes {
        for answer in answers(change, 0) {
            assert!(answer.contains(&format!("rank 1 has another {what} than rank 0")), "{what}: {answer}");
        }
    }
    for answer in answers(&|_| {}, 1) {
        assert!(answer.contains("rank 1 has another batch"), "{answer}");
    }
    assert_eq!(answers(&|_| {}, 0), ["trained", "trained"]);
}

/// If a bit differs between the copies of a parameter on two data ranks, saving returns an error.
#[test]
fn copies_of_a_parameter_are_compared_when_they_are_saved() {
    let place = tempfile::tempdir().unwrap();
    let mut run = TinyRun::default();
    (run.options.threads, run.options.step.mesh) = (1, Mesh { data: 2, ..Mesh::default() });
    let answers = communicator::on_threads(2, |world| {
        let rank = world.rank();
        let mut trainer = run.try_rank(Some(world))?;
        let (tokens, targets) = run.batch(0);
        trainer.step(&tokens, &targets)?;
        let sound = trainer.save(place.path(), serde_json::Value::Null).map(drop);
        let name = trainer.parameter_names().nth(3).unwrap().to_owned();
        if rank == 1 {
            let values = trainer.tensor(&name)?;
            trainer.set_tensor(&name, &values.affine(1.0, 1e-6)?)?;
        }
        let answer = trainer.save(place.path(), serde_json::Value::Null).unwrap_err().to_string();
        Ok((sound, name, answer))
    });
    for (sound, name, answer) in answers.unwrap() {
        sound.unwrap();
        assert!(answer.contains(&format!("{name} is not the same on ranks 0 and 1")), "{answer}");
    }
}

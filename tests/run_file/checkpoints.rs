//! Checks which checkpoints a run keeps, when it ends, and which changes allow it to be resumed.

use gapless::Checkpoint;
use gapless::run::{Console, Ended, RunConfig, RunError, Start, TrainedRun, train};

use crate::{Place, TINY, losses, rows};

/// Some keys may change when a run is resumed. If another key has changed, the run is refused and nothing is written.
#[test]
fn resuming_refuses_changed_keys() {
    let place = Place::new();
    let file = place.file(TINY);
    let out = place.path().join("run");
    let read = |assignment: &str| RunConfig::read(&file, &[assignment.to_owned()]).unwrap();
    let go = |config: &RunConfig| train(config, &out, &Start::Resume, &mut Console::default(), |_| {});
    assert!(matches!(go(&read("steps=2")), Err(RunError::NothingToResume { .. })));
    assert!(!out.exists());
    train(&read("steps=2"), &out, &Start::Anew, &mut Console::default(), |_| {}).unwrap();
    let held_out = format!("evaluation.path={}", place.path().join("text.txt").display());
    for (assignment, said) in [
        (&*held_out, "data.validation_every was 8 and is 0 (0 if evaluation.path is set)"),
        ("model.gpt.layers=2", "model.gpt.layers was 1 and is 2"),
        ("step.batch=8", "step.batch was 4 and is 8"),
        ("seed=4", "seed was 3 and is 4"),
        ("data.validation_every=4", "data.validation_every was 8 and is 4"),
        ("optimizer.beta1=0.8", "optimizer.beta1 was 0.9 and is 0.8"),
    ] {
        let error = go(&read(assignment)).unwrap_err().to_string();
        assert!(error.contains(said), "{assignment}: {error}");
    }
    let text = place.path().join("text.txt");
    std::fs::write(&text, "another text, which has other tokens\n".repeat(200)).unwrap();
    let error = go(&read("steps=3")).unwrap_err().to_string();
    assert!(error.contains("data_hash was"), "{error}");
}

/// Held-out data may be moved. Whether there are any may not change, because this decides the training data.
#[test]
fn resuming_follows_held_out_data_that_were_moved() {
    let place = Place::new();
    let path = |name: &str| place.path().join(name);
    let go = |settings: &[String], start: Start| {
        let config = RunConfig::read(&place.file(TINY), settings).unwrap();
        train(&config, &path("run"), &start, &mut Console::default(), |_| {}).map(|summary| summary.steps)
    };
    let held_out = |name: &str| format!("evaluation.path={}", path(name).display());
    std::fs::copy(path("text.txt"), path("held.txt")).unwrap();
    go(&["steps=2".to_owned(), held_out("held.txt")], Start::Anew).unwrap();
    std::fs::rename(path("held.txt"), path("moved.txt")).unwrap();
    let error = go(&[], Start::Resume).unwrap_err().to_string();
    assert!(error.contains("data.validation_every was 0 and is 8") && !error.contains("data_hash"), "{error}");
    let moved = [held_out("moved.txt"), "data.validation_every=4".to_owned()];
    assert_eq!(go(&moved, Start::Resume).unwrap(), 4);
}

/// A fork continues from another run's checkpoint in its own folder, with the same or with another configuration.
#[test]
fn a_fork_goes_on_from_another_run() {
    let place = Place::new();
    let out = |name: &str| place.path().join(name);
    let constant = ["learning_rate.shape=constant", "learning_rate.warmup_steps=0"];
    let go = |name: &str, settings: &[&str], from: &str| {
        let settings: Vec<String> = constant.iter().chain(settings).map(|&setting| setting.to_owned()).collect();
        let config = RunConfig::read(&place.file(TINY), &settings).unwrap();
        let start = if from.is_empty() { Start::Anew } else { Start::Fork(out(from)) };
        train(&config, &out(name), &start, &mut Console::default(), |_| {})
            .map(|_| losses(&out(name).join("metrics.jsonl")))
    };
    let first = go("first", &[], "").unwrap();
    let middle = "first/checkpoints/step-00000002";
    assert_eq!(go("same", &[], middle).unwrap(), first[2..]);
    let other = go("other", &["learning_rate.peak=1e-2"], middle).unwrap();
    assert!(other[0] == first[2] && other[1] != first[3], "{other:?}, {first:?}");
    assert_eq!(go("longer", &["steps=6"], "first").unwrap().len(), 2);
    let error = go("none", &[], "first").unwrap_err();
    assert!(matches!(error, RunError::NothingLeft { done: 4, steps: 4, .. }), "{error}");
    assert!(!out("none").exists());
}

/// If a run is forked into the folder of its own checkpoint, the fork is a new run. The files of the earlier run are
/// moved to a folder of their own.
#[test]
fn a_fork_into_its_own_folder_sets_the_earlier_run_aside() {
    let place = Place::new();
    let out = place.path().join("run");
    let go = |settings: &[&str], start: &Start| {
        let settings: Vec<String> = settings.iter().map(|&setting| setting.to_owned()).collect();
        let config = RunConfig::read(&place.file(TINY), &settings).unwrap();
        train(&config, &out, start, &mut Console::default(), |_| {}).unwrap();
        losses(&out.join("metrics.jsonl"))
    };
    let first = go(&["steps=6"], &Start::Anew);
    let middle = out.join("checkpoints/step-00000002");
    std::fs::rename(out.join("checkpoints/step-00000004"), &middle).unwrap();
    let forked = Start::Fork(middle);
    let other = go(&["steps=5", "checkpoints.keep_last=1", "learning_rate.peak=1e-2"], &forked);
    assert_eq!(other.len(), 1);
    let steps = |out: &std::path::Path| {
        let all = Checkpoint::list(&out.join("checkpoints")).unwrap();
        all.iter().map(|listed| listed.step).collect::<Vec<_>>()
    };
    assert_eq!((steps(&out), steps(&out.join("earlier.1"))), (vec![5], vec![6, 4]));
    assert_eq!(losses(&out.join("earlier.1/metrics.jsonl")), first);
    for folder in [&out, &out.join("earlier.1")] {
        let run = TrainedRun::open(folder).unwrap();
        assert_eq!(run.checkpoint.step(), run.config.steps);
    }
    go(&["steps=7", "learning_rate.peak=1e-2"], &Start::Resume);
    assert_eq!(steps(&out), [7, 6]);
}

/// Checks when a run ends before its last step, and which checkpoints it keeps. The expected results are derived from
/// the rows of the run's metrics.
#[test]
fn evaluations_and_time_end_a_run_and_choose_its_checkpoints() {
    let place = Place::new();
    let go = |name: &str, settings: &[&str]| {
        let settings: Vec<String> = settings.iter().map(|&setting| setting.to_owned()).collect();
        let config = RunConfig::read(&place.file(TINY), &settings).unwrap();
        let out = place.path().join(name);
        let start = if out.exists() { Start::Resume } else { Start::Anew };
        let summary = train(&config, &out, &start, &mut Console::default(), |_| {}).unwrap();
        let saved = Checkpoint::list(&out.join("checkpoints")).unwrap();
        (summary, saved.iter().rev().map(|saved| saved.step).collect::<Vec<_>>())
    };
    // The run learns at first, and then diverges because the learning rate is too large.
    let unstable =
        ["steps=40", "learning_rate.peak=0.3", "learning_rate.shape=constant", "learning_rate.warmup_steps=10"];
    let keep = ["checkpoints.keep_last=1", "checkpoints.keep_best=1"];
    let (summary, saved) = go("best", &[&unstable[..], &keep].concat());
    assert_eq!((summary.steps, summary.ended), (40, Ended::Complete));
    let rows = rows(&place.path().join("best/metrics.jsonl"));
    let evaluations = rows.iter().filter_map(|row| Some((row.get("val_loss")?.as_f64()?, row["step"].as_u64()?)));
    let best = evaluations.min_by(|a, b| a.0.total_cmp(&b.0)).unwrap().1;
    assert!(best < 40, "the last is the best: the test shows nothing");
    assert_eq!(saved, [best, 40]);

    // The run ends three evaluations after the best one. If it is resumed, it takes no further step.
    let patient = [&unstable[..], &["evaluation.patience=3"]].concat();
    let (summary, _) = go("patient", &patient);
    assert_eq!((summary.steps, summary.ended), (best + 3 * 2, Ended::NoImprovement));
    let (summary, _) = go("patient", &patient);
    assert_eq!((summary.steps, summary.ended), (best + 3 * 2, Ended::NoImprovement));

    let (_, saved) = go("often", &["checkpoints.every=0", "checkpoints.minutes=1e-9", "checkpoints.keep_last=9"]);
    assert_eq!(saved, [1, 2, 3, 4]);
    let file = place.file(TINY).display().to_string();
    let limited = ["train", &file, "--out", "limited", "--set", "max_minutes=1e-9"];
    let output = place.gapless(&limited);
    assert_eq!(output.status.code(), Some(3), "{output:?}");
    assert_eq!(place.gapless(&["train", &file, "--out", "limited", "--resume"]).status.code(), Some(0));
}

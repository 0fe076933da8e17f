//! The length of a run: steps or epochs, how steps are counted, and the answer to a signal.

use gapless::StepOptions;
use gapless::run::{Console, Progress, RunConfig, Start, train};

use crate::{Place, TINY, rows};

/// Epochs are converted to steps when the data is read. A longer run resumes by more epochs, and run.toml has the steps.
#[test]
fn epochs_are_steps() {
    let place = Place::new();
    let out = place.path().join("run");
    let config = |epochs: &str| RunConfig::read(&place.file(&TINY.replace("steps = 4", epochs)), &[]).unwrap();
    let half = config("epochs = 0.05");
    let windows = half.dataset().unwrap().training(16, 4, 3).unwrap().per_epoch();
    let steps = |epochs: f64| (epochs * windows as f64 / 4.0).ceil() as u64;
    let mut lengths = Vec::new();
    let summary =
        train(&half, &out, &Start::Anew, &mut Console::default(), |Progress { steps, .. }| lengths.push(steps))
            .unwrap();
    assert_eq!((summary.steps, lengths.first()), (steps(0.05), Some(&steps(0.05))));
    let written = std::fs::read_to_string(out.join("run.toml")).unwrap();
    assert!(written.contains(&format!("steps = {}\n", steps(0.05))) && !written.contains("epochs"), "{written}");
    let more = config("epochs = 0.1");
    let summary = train(&more, &out, &Start::Resume, &mut Console::default(), |_| {}).unwrap();
    assert_eq!(summary.steps, steps(0.1));

    // The number of steps has a maximum, which epochs may exceed.
    let error = train(&config("epochs = 1e300"), &out, &Start::Anew, &mut Console::default(), |_| {}).unwrap_err();
    assert!(error.to_string().contains("epochs") && error.to_string().contains("9007199254740992 steps"), "{error}");
    // The time that is left is that of more tokens than a u64 holds.
    let long = config(&format!("steps = {}", 1_u64 << 53));
    let step = StepOptions { batch: 256, ..long.step.clone() };
    let cut = RunConfig { max_minutes: Some(0.01), step, ..long };
    let mut left = Vec::new();
    let progress = |progress: Progress| left.push(progress.left);
    train(&cut, &place.path().join("long"), &Start::Anew, &mut Console::default(), progress).unwrap();
    assert!(left.iter().all(|left| !left.is_zero()) && !left.is_empty(), "{left:?}");

    // An assignment replaces the length that the file gives.
    let assigned = |assignment: &str, file: &str| {
        let file = place.file(&TINY.replace("steps = 4", file));
        let run = RunConfig::read(&file, &[assignment.to_owned()]).unwrap();
        (run.steps, run.epochs)
    };
    assert_eq!(assigned("epochs=2", "steps = 4").1, Some(2.0));
    assert_eq!(assigned("steps=7", "epochs = 2"), (7, None));
}

/// Steps are counted when they are done: in messages, metrics, samples and checkpoints.
#[test]
fn steps_are_counted_in_one_way() {
    let place = Place::new();
    let file = place.file(TINY).display().to_string();
    let output = place.gapless(&["train", &file, "--out", "run"]);
    let [said, told] = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
    assert!(told.contains("step 4 of 4 loss ") && !told.contains(" left"), "{told}");
    assert!(said.contains("step     2 validation loss ") && said.contains("step     4 validation loss "), "{said}");
    assert!(said.contains(" parameters, "), "{said}");
    let counted = |key: &str| -> Vec<u64> {
        let rows = rows(&place.path().join("run/metrics.jsonl")).into_iter().filter(|row| row.get(key).is_some());
        rows.map(|row| row["step"].as_u64().unwrap()).collect()
    };
    assert_eq!((counted("loss"), counted("val_loss")), (vec![1, 2, 3, 4], vec![2, 4]));
    assert!(place.path().join("run/checkpoints/step-00000004").is_dir());
}

/// The first signal is answered before the run ends, and the run saves a checkpoint.
#[cfg(unix)]
#[test]
fn a_signal_is_answered() {
    use std::io::{BufRead, BufReader};
    use std::process::{Command, Stdio};

    let place = Place::new();
    let file = place.file(TINY).display().to_string();
    let mut command = Command::new(env!("CARGO_BIN_EXE_gapless"));
    command.args(["train", &file, "--out", "run", "--set", "steps=1000000000"]).current_dir(place.path());
    let mut run = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut told = BufReader::new(run.stderr.take().unwrap()).lines().map(Result::unwrap);
    let first = told.find(|line| line.starts_with("step ")).unwrap();
    assert!(first.starts_with("step 10 of 1000000000 loss ") && first.ends_with(" left"), "{first}");
    let sent = Command::new("kill").args(["-s", "TERM", &run.id().to_string()]).status().unwrap();
    assert!(sent.success());
    let rest: Vec<String> = told.collect();
    assert_eq!(run.wait().unwrap().code(), Some(128 + 15), "{rest:?}");
    assert!(rest.iter().any(|line| line == "saving; once more ends without saving"), "{rest:?}");
    assert!(rest.last().unwrap().contains("--resume continues from here"), "{rest:?}");
    assert!(std::fs::read_dir(place.path().join("run/checkpoints")).unwrap().count() > 0);
}

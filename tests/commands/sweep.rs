//! Tests of `gapless sweep`, run as a user would: exit codes and progress.

use std::fs;
use std::process::{Command, Output};

const STEP: &str =
    "model = \"gpt:vocabulary=64,layers=4,heads=2,width=32\"\n[mesh]\npipeline = 2\n[step]\nsequence = 16\n";

fn sweep(spec: &str) -> Output {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("sweep.toml"), format!("{STEP}{spec}")).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_gapless"));
    command.args(["sweep", "sweep.toml", "--out", "out", "--threads", "1"]).current_dir(folder.path());
    command.output().unwrap()
}

/// A sweep of which nothing fits does not succeed, and names the usual reason.
#[test]
fn a_sweep_without_a_step_that_fits_fails() {
    for (spec, code, words) in [
        ("batch = 4\nmicro_batches = 2\n[vary]\nschedule = [\"1f1b\", \"gpipe\"]\n", 0, ""),
        (
            "batch = 4\n[vary]\nmicro_batches = [3, 5, 7]\n",
            3,
            "no configuration fits; the reason of 1 of 3: step.micro_batches: ",
        ),
        (
            "batch = 4\nmicro_batches = 2\n[memory]\nbudget = \"1KiB\"\n[vary]\nschedule = [\"1f1b\", \"gpipe\"]\n",
            3,
            "no configuration fits; the reason of 2 of 2: rank 0: no recomputation fits the budget",
        ),
        (
            "batch = 4\n[vary]\nmicro_batches = [1, 2]\n[sweep]\ncapacity = \"1KiB\"\n",
            3,
            "no configuration fits; give the step more ranks",
        ),
    ] {
        let output = sweep(spec);
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{spec}: {error}");
        assert!(error.contains(words), "{spec}: {error}");
    }
}

/// Progress is reported from the first row, and each configuration counts once.
#[test]
fn progress_begins_with_the_first_row() {
    let output = sweep("batch = 4\n[vary]\nmicro_batches = [1, 2]\nschedule = [\"1f1b\", \"gpipe\"]\n");
    let text = String::from_utf8(output.stderr).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines[0], "1 of 4 configurations are estimated, 0 are finished", "{text}");
    assert_eq!(lines.last(), Some(&"4 of 4 configurations are estimated, 4 are finished"), "{text}");
}

//! Limits of the operating system, and a run's folder that disappears. Each is reported, and the exit code is 1.

use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Command, Output, Stdio};

use crate::{Place, TINY};

/// Runs the command in a shell with limits. Under a memory limit, large thread stacks limit the number of threads.
fn limited(place: &Place, limits: &str, stack: u64, arguments: &[&str]) -> Output {
    let mut command = Command::new("sh");
    command.args(["-c", &format!("{limits} exec \"$0\" \"$@\""), env!("CARGO_BIN_EXE_gapless")]).args(arguments);
    command.current_dir(place.path()).env("RUST_MIN_STACK", stack.to_string()).env("RAYON_NUM_THREADS", "2");
    command.output().unwrap()
}

const MIB: u64 = 1 << 20;

/// A memory limit and a stack size that leave room for about eight threads and their work.
const FEW_THREADS: (&str, u64) = ("ulimit -v 9175040;", 1024 * MIB);

#[test]
fn threads_that_cannot_be_started_are_told() {
    let place = Place::new();
    let run = |limits: (&str, u64), name: &str, keys: &str, code: i32, words: &str| {
        let file = place.path().join(format!("{name}.toml"));
        let text = TINY.replace("DIR", &place.path().display().to_string()).replace("threads = 1", keys);
        fs::write(&file, text.replace("batch = 4\nmicro_batches = 2", "batch = 32")).unwrap();
        let output = limited(&place, limits.0, limits.1, &["train", file.to_str().unwrap(), "--out", name]);
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{name}: {error}");
        assert!(error.contains(words), "{name}: {error}");
    };
    run(("", MIB << 30), "none", "threads = 1", 1, "cannot start a thread for this process; raise the limit");
    run(FEW_THREADS, "workers", "threads = 64", 1, "cannot start worker threads: ");
    run(FEW_THREADS, "ranks", "threads = 1\nmesh.data = 32", 1, "cannot start a thread for rank ");
    run(FEW_THREADS, "few", "threads = 1", 0, "");
}

#[test]
fn a_sweep_takes_the_threads_that_there_are() {
    let place = Place::new();
    let values: Vec<String> = (1..=40).map(|n| (8 * n).to_string()).collect();
    let spec = format!(
        "[step]\nmodel = \"gpt:vocabulary=64,layers=1,heads=1,width=8\"\nbatch = 1\n[vary]\nsequence = [{}]\n",
        values.join(",")
    );
    fs::write(place.path().join("sweep.toml"), spec).unwrap();
    let arguments = ["sweep", "sweep.toml", "--out", "results", "--threads", "64"];
    let output = limited(&place, FEW_THREADS.0, FEW_THREADS.1, &arguments);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(String::from_utf8_lossy(&output.stdout).starts_with("40 configurations (0 from an earlier run)"));
}

#[test]
fn files_that_may_not_grow_are_told() {
    let place = Place::new();
    let file = place.file(TINY).display().to_string();
    let trained = place.gapless(&["train", &file, "--out", "before"]);
    assert!(trained.status.success());
    let largest = fs::metadata(place.path().join("before/memory.html")).unwrap().len();
    for (blocks, name) in [(1, "memory.html"), (largest / 512 + 1, "")] {
        let limits = format!("ulimit -f {blocks};");
        let output = limited(&place, &limits, 2 * MIB, &["train", &file, "--out", "limited"]);
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{blocks} blocks: {} {error}", output.status);
        assert!(error.contains(name) && error.contains("File too large"), "{blocks} blocks: {error}");
    }
}

#[test]
fn a_trace_that_cannot_be_written_is_told() {
    let place = Place::new();
    let file = place.file(TINY).display().to_string();
    let output = place.gapless(&["train", &file, "--out", "out", "--trace", "/dev/full"]);
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.contains("the trace /dev/full is incomplete: No space left"), "{error}");
    let output = place.gapless(&["train", &file, "--out", "traced", "--trace", "trace.json"]);
    assert!(output.status.success());
    let trace = fs::read(place.path().join("trace.json")).unwrap();
    let spans: Vec<serde_json::Value> = serde_json::from_slice(&trace).unwrap();
    assert_eq!(spans.iter().filter(|span| span["name"] == "save").count(), 2);
}

/// The folder is deleted, moved, or replaced by another folder.
#[test]
fn a_folder_that_goes_away_ends_its_run() {
    let place = Place::new();
    let file = place.file(TINY).display().to_string();
    for name in ["deleted", "moved", "replaced"] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_gapless"));
        command.current_dir(place.path()).args(["train", &file, "--out", name, "--set", "steps=1000000000"]);
        command.args(["--set", "checkpoints.every=0", "--set", "evaluation.every=0"]);
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
        lines.find(|line| line.starts_with("step ")).unwrap();
        let (out, aside) = (place.path().join(name), place.path().join(format!("{name}.aside")));
        fs::rename(&out, &aside).unwrap();
        match name {
            "deleted" => fs::remove_dir_all(&aside).unwrap(),
            "replaced" => fs::create_dir(&out).unwrap(),
            _ => {}
        }
        let last = lines.last().unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(1), "{name}: {last}");
        assert!(last.contains(&format!("{name} was deleted, moved or replaced")), "{name}: {last}");
    }
}

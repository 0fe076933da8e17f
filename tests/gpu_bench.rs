//! The bench of GPUs as far as a machine without one goes: what it computes by itself, and that it says so where it can do no more.

#[path = "../benches/gpu/main.rs"]
mod bench;

use bench::{Options, Outcome, run};
use clap::Parser;

/// What a command ends with, and what it writes.
fn ran(arguments: &[&str]) -> (anyhow::Result<Outcome>, serde_json::Value) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("figures.json");
    let options = Options::try_parse_from([&["gpu"], arguments, &["--json", path.to_str().unwrap()]].concat()).unwrap();
    let outcome = run(&options);
    let json = std::fs::read(path).map(|bytes| serde_json::from_slice(&bytes).unwrap()).unwrap_or_default();
    (outcome, json)
}

#[test]
fn the_largest_micro_batch_is_found_without_a_gpu() {
    let line = ["plan", "--model", "small", "--sequence", "32", "--budget", "4000000", "--require-gpu"];
    let (outcome, json) = ran(&line);
    assert_eq!(outcome.unwrap(), Outcome::Done);
    assert!(json["arena_bytes"].as_u64().unwrap() <= 4_000_000 && json["micro_batch"].as_u64().unwrap() > 1, "{json}");
    let refused = ran(&["plan", "--model", "small", "--budget", "1000"]).0.unwrap_err().to_string();
    assert!(refused.contains("the budget is 1000"), "{refused}");
}

/// No machine has a thousand GPUs, so this is the same on all.
#[test]
fn what_needs_a_gpu_is_skipped_with_the_reason_and_fails_where_one_is_required() {
    for command in [
        &["device"][..],
        &["parity", "--model", "small"],
        &["memory", "--model", "small"],
        &["speed", "--model", "small", "--budget", "100000000"],
        &["kernels", "--model", "small"],
    ] {
        let line = [command, &["--device", "cuda:1000"]].concat();
        let (outcome, json) = ran(&line);
        assert_eq!(outcome.unwrap(), Outcome::Skipped, "{line:?}");
        assert!(json["skipped"].as_str().is_some_and(|why| !why.is_empty()), "{json}");
        let refused = ran(&[&line[..], &["--require-gpu"]].concat()).0.unwrap_err().to_string();
        assert!(refused.starts_with("a GPU is required; skipped: "), "{refused}");
    }
}

#[test]
fn devices_that_are_no_gpus_are_refused() {
    for (device, words) in [("cpu", "is no GPU"), ("auto", "is no GPU"), ("cuda:x", "no number of a GPU")] {
        let refused = Options::try_parse_from(["gpu", "device", "--device", device]).unwrap_err().to_string();
        assert!(refused.contains(words), "{refused}");
    }
}

//! The GPU benchmark on a machine without a GPU: the commands that need no GPU, and the messages of those that do.

#[path = "../benches/gpu/main.rs"]
mod bench;

use std::io::Write;
use std::sync::{Arc, Mutex};

use bench::{Options, Outcome, run};
use clap::Parser;

/// Runs a command. Returns its outcome, and the JSON that it writes.
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

/// A budget below the bytes of a micro-batch requires recomputation. The plan lists what is recomputed.
#[test]
fn a_given_micro_batch_is_planned_within_a_budget() {
    for model in ["small", "small-mixture"] {
        let line = ["plan", "--model", model, "--sequence", "128", "--micro-batch", "8"];
        let whole = ran(&line).1["arena_bytes"].as_u64().unwrap();
        let budget = whole * 9 / 10;
        let (outcome, json) = ran(&[&line[..], &["--budget", &budget.to_string()]].concat());
        assert_eq!(outcome.unwrap(), Outcome::Done);
        assert!(json["arena_bytes"].as_u64().unwrap() <= budget && json["micro_batch"] == 8, "{json}");
        assert!(json["recomputed"].as_f64().unwrap() > 0.0 && json["layers"][0]["ops"][0].is_string(), "{json}");
        let refused = ran(&[&line[..], &["--budget", "1000"]].concat()).0.unwrap_err();
        assert!(format!("{refused:#}").contains("1000"), "{refused:#}");
    }
}

/// The losses of the CPU can be computed on a machine without a GPU.
#[test]
fn the_reference_of_parity_needs_no_gpu() {
    let (outcome, json) = ran(&["parity", "--model", "small", "--steps", "2", "--cpu-only", "--require-gpu"]);
    assert_eq!(outcome.unwrap(), Outcome::Done);
    assert_eq!(json["cpu_bf16_losses"].as_array().unwrap().len(), 2, "{json}");
}

/// The test asks for device 1000, which no machine has, so the result is the same everywhere.
#[test]
fn what_needs_a_gpu_is_skipped_with_the_reason_and_fails_where_one_is_required() {
    for command in [
        &["device"][..],
        &["parity", "--model", "small", "--reference", "read after the GPU is found"],
        &["memory", "--model", "small"],
        &["speed", "--model", "small", "--budget", "100000000"],
        &["speed", "--model", "small", "--micro-batch", "2", "--budget", "100000000"],
        &["kernels", "--model", "small"],
    ] {
        let line = [command, &["--device", "cuda:1000"]].concat();
        let (outcome, json) = ran(&line);
        assert_eq!(outcome.unwrap(), Outcome::Skipped, "{line:?}");
        assert!(json["skipped"].as_str().is_some_and(|why| !why.is_empty()), "{json}");
        let refused = ran(&[&line[..], &["--require-gpu"]].concat()).0.unwrap_err().to_string();
        assert!(refused.starts_with("a GPU is required (--require-gpu); skipped: "), "{refused}");
    }
}

#[test]
fn lines_that_mean_nothing_are_refused() {
    for (line, words) in [
        (&["device", "--device", "cpu"][..], "is not a GPU"),
        (&["device", "--device", "auto"], "is not a GPU"),
        (&["device", "--device", "cuda:x"], "not the number of a GPU"),
        (&["speed"], "--micro-batch"),
        (&["plan"], "--micro-batch"),
        (&["parity", "--cpu-only", "--reference", "a.json"], "cannot be used with"),
        (&["compile", "--architectures", "sm_90,compute_90"], "unknown architecture"),
    ] {
        let refused = Options::try_parse_from([&["gpu"], line].concat()).unwrap_err().to_string();
        assert!(refused.contains(words), "{refused}");
    }
}

/// The program shows warnings of the engine, and no messages of lower levels.
#[test]
fn warnings_are_shown() {
    struct Lines(Arc<Mutex<Vec<u8>>>);
    impl Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let shown = Arc::new(Mutex::new(Vec::new()));
    let lines = shown.clone();
    tracing::subscriber::with_default(bench::warnings(move || Lines(lines.clone())), || {
        tracing::info!("a GPU");
        tracing::warn!(product = "linear in h.0.mlp", "no algorithm with an epilogue; two launches");
    });
    let shown = String::from_utf8(shown.lock().unwrap().clone()).unwrap();
    assert_eq!(shown.lines().count(), 1, "{shown}");
    assert!(
        shown.contains("WARN") && shown.contains("no algorithm with an epilogue; two launches product="),
        "{shown}"
    );
}

/// Uses the NVRTC that is found, and the architectures in GAPLESS_TEST_ARCHITECTURES. .ci/kernels sets both.
#[test]
fn every_kernel_compiles_and_none_spills() {
    let architectures = std::env::var("GAPLESS_TEST_ARCHITECTURES").unwrap_or_else(|_| "sm_90".into());
    let (outcome, json) = ran(&["compile", "--architectures", &architectures]);
    if let Some(why) = json["skipped"].as_str() {
        // If a library or architectures are named, NVRTC must be available.
        for variable in ["GAPLESS_NVRTC_LIBRARY", "GAPLESS_TEST_ARCHITECTURES"] {
            assert!(std::env::var_os(variable).is_none(), "{why}");
        }
        return gapless_testing::not_checked(why);
    }
    assert_eq!(outcome.unwrap(), Outcome::Done);
    let kernels = json["kernels"].as_array().unwrap();
    for architecture in architectures.split(',') {
        let of_it = kernels.iter().filter(|row| row["architecture"] == architecture);
        let names: Vec<&str> = of_it.map(|row| row["kernel"].as_str().unwrap()).collect();
        for name in ["attention_tc_grad_kv_64", "rope_table", "adamw_bf16", "grouped_linear_bf16"] {
            assert!(names.contains(&name), "{name} for {architecture}: {names:?}");
        }
        assert!(names.iter().filter(|name| name.starts_with("fused_")).count() > 10, "{names:?}");
    }
    assert!(kernels.iter().all(|row| row["registers"].as_u64().unwrap() > 0), "{json}");
}

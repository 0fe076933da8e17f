//! `gapless plan` as its users see it: exit codes, JSON, the table it writes.

use std::fs;
use std::process::{Command, Output};

use gapless_alloc::{check, csv};

fn gapless(folder: &tempfile::TempDir, table: &str, arguments: &[&str]) -> Output {
    fs::write(folder.path().join("table.csv"), table).unwrap();
    Command::new(env!("CARGO_BIN_EXE_gapless"))
        .args(["plan", "table.csv"])
        .args(arguments)
        .current_dir(folder.path())
        .output()
        .unwrap()
}

const TABLE: &str = "id,lower,upper,size\na,0,4,1024\nb,0,2,512\nc,2,4,512\n";

#[test]
fn exit_codes_tell_what_happened() {
    let folder = tempfile::tempdir().unwrap();
    let check = |table: &str, arguments: &[&str], code: i32, words: &str| {
        let output = gapless(&folder, table, arguments);
        let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{text}");
        assert!(text.contains(words), "{text}");
    };
    check(TABLE, &[], 0, "3 buffers in 1536 bytes");
    check(TABLE, &["--capacity", "1536"], 0, "proof: max-live");
    check(TABLE, &["--capacity", "1535"], 3, "no plan can");
    check("id,lower,upper,size\na,4,4,1\n", &[], 2, "line 2: lower 4 is not below upper 4");
    check(TABLE, &["--deadline=-1"], 2, "not a time to wait");
    check(TABLE, &["--capacity", "much"], 2, "invalid digit");
}

#[test]
fn prints_json() {
    let folder = tempfile::tempdir().unwrap();
    let output = gapless(&folder, TABLE, &["--json"]);
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let keys: Vec<&String> = json.as_object().unwrap().keys().collect();
    assert_eq!(keys, ["buffers", "gap", "height", "lower_bound", "plan_ms", "proof"]);
    assert_eq!((&json["buffers"], &json["height"], &json["gap"]), (&3.into(), &1536.into(), &1.0.into()));
}

#[test]
fn writes_a_plan_that_the_checker_accepts() {
    let folder = tempfile::tempdir().unwrap();
    gapless(&folder, TABLE, &["--out", "out.csv"]);
    let table = csv::read(&fs::read(folder.path().join("out.csv")).unwrap()[..]).unwrap();
    check(&table.problem, &table.offsets.unwrap(), Some(1536)).unwrap();
}

fn plan_model(arguments: &[&str]) -> Output {
    let step = ["plan", "--model", "small", "--batch", "4", "--sequence", "128", "--dtype", "bf16"];
    Command::new(env!("CARGO_BIN_EXE_gapless")).args(step).args(arguments).output().unwrap()
}

#[test]
fn a_step_is_planned_within_its_budget_or_refused() {
    let json = |arguments: &[&str]| -> serde_json::Value {
        let output = plan_model(&[arguments, &["--json"]].concat());
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    };
    let plain = json(&[]);
    let all = plain["arena_bytes"].as_u64().unwrap();
    // Another device's kernels need other scratch.
    assert_ne!(json(&["--kernels", "cuda"])["arena_bytes"], plain["arena_bytes"]);
    let error = String::from_utf8(plan_model(&["--kernels", "tpu"]).stderr).unwrap();
    assert!(error.contains("there are auto, cpu, cuda"), "{error}");
    assert_eq!((&plain["overhead"], &plain["gap"]), (&0.0.into(), &1.0.into()));
    let budget = all / 100 * 95;
    let fitted = json(&["--budget", &budget.to_string(), "--curve", "3"]);
    assert!(fitted["arena_bytes"].as_u64().unwrap() <= budget);
    assert!(fitted["overhead"].as_f64().unwrap() > 0.0);
    let points = fitted["curve"]["points"].as_array().unwrap();
    assert_eq!(points.len(), 3);
    assert_eq!(points[2]["overhead"], 0.0);
    assert_eq!(json(&["--recompute", "ops:gelu"])["layers"][0]["ops"], serde_json::json!(["gelu"]));
    for (arguments, code, words) in [
        (&["--budget", "1MiB"][..], 3, "the smallest step found"),
        (&["--budget", "4 parsecs"], 2, "is no unit of bytes"),
        (&["--recompute", "ops:gelo"], 2, "gelo"),
        (&["--recompute", "sometimes"], 2, "is no policy"),
    ] {
        let output = plan_model(arguments);
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{text}");
        assert!(text.contains(words), "{text}");
    }
}

/// Mixtral on two expert ranks: the rows that come are beside the plan, as many as even routing has or as there can be.
#[test]
fn an_expert_rank_is_planned_with_its_reserve() {
    let plan = |routing: &[&str]| -> serde_json::Value {
        let step = ["plan", "--model", "mixtral8x7b", "--batch", "4", "--micro-batches", "2", "--sequence", "256"];
        let arguments = [&step[..], &["--dtype", "bf16", "--expert-ranks", "2", "--json"], routing].concat();
        let output = Command::new(env!("CARGO_BIN_EXE_gapless")).args(arguments).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    };
    let (worst, even) = (plan(&[]), plan(&["--routing", "1"]));
    let number = |of: &serde_json::Value, name: &str| of[name].as_u64().unwrap();
    for step in [&worst, &even] {
        let plan = number(step, "arena_bytes") - number(step, "reserve_bytes");
        assert_eq!(plan, number(step, "lower_bound_bytes"), "the plan is at its bound");
    }
    assert!(number(&even, "reserve_bytes") < number(&worst, "reserve_bytes"));
    // Half of the experts' weights, not all.
    assert!(number(&worst, "arena_bytes") < 240 << 30, "{worst}");
}

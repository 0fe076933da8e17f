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

//! Tests of `gapless schedule`, run as a user would: exit codes, tables, pictures, JSON.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

fn gapless(folder: &Path, arguments: &str) -> Output {
    Command::new(env!("CARGO_BIN_EXE_gapless"))
        .arg("schedule")
        .args(arguments.split_whitespace())
        .current_dir(folder)
        .output()
        .unwrap()
}

/// Runs a command that must succeed, and returns its standard output.
fn printed(folder: &Path, arguments: &str) -> String {
    let output = gapless(folder, arguments);
    assert!(output.status.success(), "{arguments}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn exit_codes_tell_what_happened() {
    let folder = tempfile::tempdir().unwrap();
    for (name, table) in [
        ("good.csv", "0F0,0F1,,0B0,,0B1\n1F0,1B0,1F1,1B1\n\n"),
        ("wrong.csv", "0F0,0B0,0F1\n1F1,1B1,1F0,1B0\n"),
        (
            "crossed.csv",
            "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n",
        ),
        ("garbled.csv", "0F0,0B0\n1F0,zero\n"),
        ("slip.csv", "0F0,0B0,0F4294967295,4294967295B1\n"),
        ("empty.csv", "\n"),
    ] {
        fs::write(folder.path().join(name), table).unwrap();
    }
    // One table has a stage on each of 100,000 ranks. In the other, two ranks wait for each other in each micro-batch,
    // with 50,000 idle ranks between them.
    let wide: String = (0..100_000).map(|stage| format!("{stage}F0,{stage}B0\n")).collect();
    let row = |stage| (0..1000).map(|m| format!("{stage}F{m},{stage}B{m},")).collect::<String>();
    fs::write(folder.path().join("wide.csv"), wide).unwrap();
    fs::write(folder.path().join("idle.csv"), row(0) + &"\n".repeat(50_000) + &row(1)).unwrap();
    for (arguments, code, words) in [
        ("1f1b --ranks 2 --micro-batches 2", 0, "makespan 9 ticks"),
        ("2f2b --ranks 2 --micro-batches 2", 2, "unknown schedule \"2f2b\"; choose one of gpipe, 1f1b"),
        ("zbv --ranks 2 --chunks 1 --micro-batches 2", 2, "zbv runs 2 chunk(s) per rank, not 1"),
        ("dualpipev --ranks 4 --micro-batches 2", 2, "dualpipev needs at least 8 micro-batches, not 2"),
        ("interleaved --ranks 4 --micro-batches 9", 2, "do not split into 2 equal rounds"),
        ("gpipe --ranks 0 --micro-batches 1", 2, "ranks must be at least 1"),
        ("gpipe --ranks 4000000000 --micro-batches 4000000000", 2, "are too many to show"),
        ("zbv --ranks 10000 --micro-batches 1", 2, "are too many to show"),
        ("v-min --ranks 8 --micro-batches 50000", 2, "is at most 131072; use fewer"),
        ("v-min --ranks 8 --micro-batches 8000 --csv", 0, "0F0,"),
        ("automatic --ranks 8 --micro-batches 2000", 2, "is at most 16384; use fewer of them"),
        ("1f1b --ranks 8 --batch 100000 --micro-batches 100000 --model small", 2, "above the maximum of 65536"),
        ("gpipe --ranks 2", 2, "--micro-batches"),
        ("", 2, "--table"),
        ("gpipe --table good.csv --ranks 1 --micro-batches 1", 2, "cannot be used with"),
        ("gpipe --ranks 2 --micro-batches 2 --micro-batch-group 2", 2, "--micro-batch-group has no effect on gpipe"),
        ("gpipe --ranks 2 --micro-batches 2 --peak 2", 2, "leave it out, or use automatic"),
        ("automatic --ranks 2 --micro-batches 2 --peak 1", 2, "keeps at least 2 activations alive"),
        ("automatic --ranks 2 --micro-batches 2 --forward 1,2", 2, "--forward has 2 numbers for 4 stages"),
        ("automatic --ranks 2 --micro-batches 2 --backward-weight 3", 0, "automatic: 2 rank(s), 4 stage(s)"),
        ("zb-searched --ranks 2 --micro-batches 2 --peak 0", 2, "finds no order with a peak of 0 activations; use 1,"),
        ("zbv-searched --ranks 3 --micro-batches 2 --peak 1", 2, "finds no order with a peak of 1 activations; use 6,"),
        (
            "zb-searched --ranks 2 --micro-batches 2 --peak 4 --forward 1,2 --saved 0,1",
            0,
            "zb-searched: 2 rank(s), 2 stage",
        ),
        ("zb-searched --ranks 2 --micro-batches 2 --saved 1", 2, "two numbers separated by a comma"),
        ("automatic --ranks 2 --micro-batches 2 --saved 1,1", 2, "--saved has no effect on automatic"),
        ("gpipe --ranks 2 --micro-batches 2 --forward 1,2,3", 2, "--forward has 3 numbers for 2 stages"),
        ("gpipe --ranks 2 --micro-batches 2 --forward -1", 2, "unexpected argument"),
        ("gpipe --ranks 2 --micro-batches 2 --svg none/such.svg", 2, "cannot write none/such.svg"),
        ("--table good.csv", 0, "good.csv: 2 rank(s), 2 stage(s), 2 micro-batch(es)"),
        ("--table none.csv", 2, "none.csv: "),
        ("--table garbled.csv", 2, "garbled.csv: row 2, cell 2: \"zero\" is not stage, kind and micro-batch"),
        ("--table slip.csv", 2, "4 actions cannot reach stage"),
        ("--table empty.csv", 2, "the table has no actions"),
        ("--table wrong.csv", 3, "stage 0 of micro-batch 1 has no backward"),
        ("--table wrong.csv", 3, "rank 1 waits forever at 1F1"),
        ("--table wide.csv", 2, "100000 ranks, 100000 stages and 1 micro-batches are too many to show"),
        ("--table idle.csv --csv", 0, "1F999,1B999"),
        ("--table crossed.csv", 0, "this table needs buffered sends"),
    ] {
        let output = gapless(folder.path(), arguments);
        let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{arguments}: {text}");
        assert!(text.contains(words), "{arguments}: {text}");
    }
}

#[test]
fn the_text_form() {
    let folder = tempfile::tempdir().unwrap();
    let expected = "\
1f1b: 2 rank(s), 2 stage(s), 2 micro-batch(es)

rank 0 │ 0F0 0F1 ·   ·   0B0     ·   0B1
rank 1 │ ·   1F0 1B0     1F1 1B1     ·   ·

makespan 9 ticks, bubble 33.3 %

 rank  busy ticks  idle ticks  peak activations
    0           6           3                 2
    1           6           3                 1

An activation is what one stage keeps of one micro-batch.
";
    assert_eq!(printed(folder.path(), "1f1b --ranks 2 --micro-batches 2"), expected);
}

#[test]
fn long_pictures_fold() {
    let folder = tempfile::tempdir().unwrap();
    let text = printed(folder.path(), "zb-h1 --ranks 12 --micro-batches 64 --width 100 --forward 1000 --transfer 20");
    assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
    assert!(text.lines().filter(|line| line.starts_with("from tick ")).count() > 1, "{text}");
    let endless = printed(folder.path(), "zb-h1 --ranks 12 --micro-batches 64 --width 0");
    assert_eq!(endless.lines().filter(|line| line.starts_with("rank ")).count(), 12, "{endless}");
}

#[test]
fn tables_come_back() {
    let folder = tempfile::tempdir().unwrap();
    for (schedule, expected) in [
        ("zb-h1 --ranks 2 --micro-batches 2", "0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1F1,1I1,1W0,1W1\n"),
        ("zb-h1 --ranks 1 --micro-batches 2 --merge-backwards", "0F0,0B0,0F1,0B1\n"),
        (
            "interleaved --ranks 2 --chunks 2 --micro-batches 4 --micro-batch-group 4",
            "0F0,0F1,0F2,0F3,2F0,2F1,2F2,2B0,2F3,2B1,2B2,2B3,0B0,0B1,0B2,0B3\n\
             1F0,1F1,1F2,1F3,3F0,3B0,3F1,3B1,3F2,3B2,3F3,3B3,1B0,1B1,1B2,1B3\n",
        ),
        (
            "gpipe --ranks 2 --micro-batches 1 --comm --reduce-gradients --update-weights --fetch-weights 1",
            "0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0WAIT_SEND_F0,0REDUCE_GRAD,0WAIT_REDUCE_GRAD,0UPDATE,0RESHARD\n\
             1UNSHARD,1RECV_F0,1F0,1B0,1SEND_B0,1REDUCE_GRAD,1WAIT_REDUCE_GRAD,1UPDATE,1RESHARD,1WAIT_SEND_B0\n",
        ),
    ] {
        let table = printed(folder.path(), &format!("{schedule} --csv"));
        assert_eq!(table, expected);
        fs::write(folder.path().join("own.csv"), &table).unwrap();
        assert_eq!(printed(folder.path(), "--table own.csv --csv"), expected);
    }
}

#[test]
fn prints_json_and_draws() {
    let folder = tempfile::tempdir().unwrap();
    let read = |text: &str| serde_json::from_str::<serde_json::Value>(text).unwrap();
    let json = read(&printed(
        folder.path(),
        "1f1b --ranks 2 --micro-batches 2 --forward 3,4 --transfer 1 --json --svg a.svg --trace a.json",
    ));
    assert_eq!(json["table"][1], serde_json::json!(["1F0", "1B0", "1F1", "1B1"]));
    // 0F0 takes 3 and its message 1. After that, 1F0 takes 4, 1B0 takes 2, 1F1 takes 4, 1B1 takes 2, a message 1, and
    // 0B1 takes 2.
    assert_eq!((&json["spans"][1][0]["start"], &json["spans"][1][0]["end"]), (&4.into(), &8.into()));
    assert_eq!((&json["makespan"], &json["peak"]), (&19.into(), &serde_json::json!([2, 1])));
    assert_eq!(json["bubble"], serde_json::json!([9, 7]));
    let svg = fs::read_to_string(folder.path().join("a.svg")).unwrap();
    assert_eq!((svg.matches("<g>").count(), svg.matches("<title>0F0 [0, 3)</title>").count()), (8, 1));
    let trace = read(&fs::read_to_string(folder.path().join("a.json")).unwrap());
    let events = trace["traceEvents"].as_array().unwrap();
    let complete: Vec<_> = events.iter().filter(|event| event["ph"] == "X").collect();
    assert_eq!(complete.len(), 8);
    assert_eq!((&complete[0]["name"], &complete[0]["ts"], &complete[0]["dur"]), (&"0F0".into(), &0.into(), &3.into()));
}

/// A table of one's own is the schedule of a model's step, in every command.
#[test]
fn a_table_orders_the_step_of_a_model() {
    let folder = tempfile::tempdir().unwrap();
    let gapless = |arguments: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_gapless"));
        command.args(arguments.split_whitespace()).current_dir(folder.path()).output().unwrap()
    };
    let json = |arguments: &str| -> serde_json::Value {
        let output = gapless(arguments);
        assert!(output.status.success(), "{arguments}: {}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    };
    let order = printed(folder.path(), "zbv --ranks 2 --chunks 2 --micro-batches 4 --csv");
    fs::write(folder.path().join("order.csv"), order).unwrap();
    let step = "--model small --batch 4 --micro-batches 4 --sequence 32 --pipeline-ranks 2";
    let makespan = |schedule: &str| json(&format!("schedule {step} --json {schedule}"))["makespan"].clone();
    assert_eq!(makespan("--table order.csv"), makespan("--schedule zbv"));
    assert_ne!(makespan("--table order.csv"), makespan("--schedule gpipe"));
    for command in ["plan --planning 1000", "compare --planning 1000 --allocators gapless"] {
        let hash = |schedule: &str| json(&format!("{command} {step} --json {schedule}"))["plan_hash"].clone();
        assert_eq!(hash("--table order.csv"), hash("--schedule zbv"), "{command}");
    }
    fs::write(folder.path().join("run.toml"), "model = \"small\"").unwrap();
    let keys = "--batch 4 --micro-batches 4 --sequence 32 --pipeline-ranks 2";
    let of_file = json(&format!("schedule run.toml {keys} --json --table order.csv"));
    assert_eq!(of_file["makespan"], makespan("--table order.csv"));
    let spec = "model = \"gpt:vocabulary=64,layers=4,heads=2,width=32\"\nmesh.pipeline = 2\n[step]\nbatch = 4\nmicro_batches = 4\n\
                sequence = 16\n[vary]\nschedule = [\"zbv\", \"order.csv\"]\n[sweep]\nplan = \"all\"\n";
    fs::write(folder.path().join("sweep.toml"), spec).unwrap();
    assert!(gapless("sweep sweep.toml --out out --threads 1").status.success());
    let rows = fs::read_to_string(folder.path().join("out/results.jsonl")).unwrap();
    let rows: Vec<serde_json::Value> = rows.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!((&rows[0]["plans"], &rows[0]["nanoseconds"]), (&rows[1]["plans"], &rows[1]["nanoseconds"]));
    assert_ne!((&rows[0]["key"], &rows[0]["step"]), (&rows[1]["key"], &rows[1]["step"]));
    for (arguments, words) in [
        (
            "plan --model small --batch 4 --micro-batches 2 --pipeline-ranks 2 --schedule order.csv",
            "4 micro-batch(es), not for ",
        ),
        ("schedule --table order.csv --model small --schedule zbv", "--table is the schedule"),
        ("plan --model small --schedule nothing.csv", "nothing.csv: "),
        ("plan --model small --table order.txt", "its name must end in .csv"),
        ("sweep sweep.toml --out out --table order.csv", "vary.schedule (line 8): has a list in the file"),
    ] {
        let output = gapless(arguments);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(2) && error.contains(words), "{arguments}: {error}");
    }
}

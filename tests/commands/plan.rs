//! Tests of `gapless plan`, run as a user would: exit codes, JSON, and the table that it writes.

use std::fs;
use std::io::Write;
use std::process::{Command, Output};

use flate2::Compression;
use flate2::write::GzEncoder;
use gapless::StepOptions;
use gapless_alloc::draw::Bytes;
use gapless_alloc::{check, csv};
use gapless_testing::{assert_on_page, few};

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
    check(TABLE, &["--capacity", "1535"], 3, "no plan does");
    check("id,lower,upper,size\na,4,4,1\n", &[], 2, "line 2: lower 4 is not below upper 4");
    check("id,lower,upper,size,size\na,4,4,1,1\n", &[], 2, "line 1: column \"size\" appears twice");
    check("id,lower,upper,size\na,0,4,1,1\n", &[], 2, "line 2: 5 fields, but the header has 4 columns");
    check("id,start,end,size\na,0,4,18446744073709551615\nb,4,4,1\n", &[], 2, "are alive at tick 4");
    check(TABLE, &["--deadline", "-1"], 2, "a number of seconds cannot be negative");
    check(TABLE, &["--deadline", "soon"], 2, "not a number of seconds");
    check(TABLE, &["--deadline", "1e19"], 0, "proof: max-live");
    check(TABLE, &["--capacity", "-3"], 2, "a number of bytes cannot be negative");
    check(TABLE, &["--capacity", "1.5KB"], 3, "no plan does");
    check(TABLE, &["--capacity", "1.5KiB"], 0, "proof: max-live");
    check(TABLE, &["--capacity", "much"], 2, "not a number of bytes");
    check(TABLE, &["--draw", "map.png"], 2, ".html, .svg, .txt");
}

/// Returns a table with so many buffers that the first plan is not proven optimal.
fn hard_table() -> String {
    let mut state = 1u64;
    let mut below = |most: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % most
    };
    let row = |k: u32| {
        let lower = below(40);
        format!("{k},{lower},{},{}\n", lower + 1 + below(20), 1 + below(97))
    };
    format!("id,lower,upper,size\n{}", (0..200).map(row).collect::<String>())
}

#[test]
fn a_deadline_is_for_the_explanation_too_and_both_say_so() {
    let folder = tempfile::tempdir().unwrap();
    let table = hard_table();
    let check = |arguments: &[&str], stdout: &str, stderr: &[&str]| {
        let output = gapless(&folder, &table, &[&["--capacity", "2900", "--deadline", "0"], arguments].concat());
        assert_eq!(output.status.code(), Some(3));
        let [out, err] = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
        assert!(out.contains(stdout), "{out}{err}");
        assert!(stderr.iter().all(|words| err.contains(words)), "{out}{err}");
        out
    };
    check(&[], "ms, stopped by the deadline", &["so more time may help", "the deadline passed; with more time"]);
    let json = check(&["--json"], "\"stop_reason\":\"deadline\"", &["the deadline passed; with more time"]);
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["fit"], "unknown");
    let json = |arguments: &[&str]| -> serde_json::Value {
        let output = gapless(&folder, TABLE, &[arguments, &["--json"]].concat());
        serde_json::from_slice(&output.stdout).unwrap()
    };
    let words =
        |json: &serde_json::Value| [&json["stop_reason"], &json["fit"]].map(|word| word.as_str().unwrap().to_owned());
    assert_eq!(words(&json(&["--capacity", "1536"])), ["proven", "fits"]);
    assert_eq!(words(&json(&["--capacity", "1535"])), ["proven", "impossible"]);
}

/// The offsets of a table are pinned, as in minimalloc, or kept where this does not increase the height, or ignored.
#[test]
fn an_offset_is_what_the_user_says() {
    let folder = tempfile::tempdir().unwrap();
    let pinned = "buffer,start,end,size,offset\na,0,3,1024,512\nb,0,1,512,\nc,2,3,512,2048\n";
    let offsets = |table: &str, arguments: &[&str], note: &str| {
        let output = gapless(&folder, table, &[arguments, &["--out", "out.csv"]].concat());
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && text.contains(note), "{text}");
        let text = fs::read_to_string(folder.path().join("out.csv")).unwrap();
        let table = csv::read(text.as_bytes()).unwrap();
        check(&table.problem, &table.plan().unwrap(), None).unwrap();
        (table.plan().unwrap(), text)
    };
    let (first, text) = offsets(pinned, &[], "2 of 3 buffers are pinned by their offset");
    assert_eq!(first, [512, 0, 2048]);
    // The written table is planned again in three ways: unchanged, with its offsets ignored, and with an additional
    // buffer.
    assert_eq!(offsets(&text, &[], "3 of 3 buffers are pinned").0, first);
    let (low, text) = offsets(&text, &["--offsets", "ignore"], "");
    assert_eq!(low.iter().zip([1024, 512, 512]).map(|(at, bytes)| at + bytes).max(), Some(1536));
    let (kept, _) = offsets(&(text.clone() + "d,4,5,1536,0\n"), &["--offsets", "keep"], "");
    assert_eq!(kept[..3], low);
    let output = gapless(&folder, &(text + "\nd,1,5,64,0\n"), &[]);
    assert_eq!(output.status.code(), Some(2));
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(text.contains("line 6: the offset puts \"d\" onto "), "{text}");
    // A hint is kept where possible.
    assert_eq!(offsets("id,lower,upper,size,hint\na,0,3,8,4\nb,0,3,4,-1\n", &[], "").0, [4, 0]);
}

/// Other buffers get the bytes that a gap leaves, and what is proven takes gaps into account.
#[test]
fn gaps_are_put_to_use() {
    let folder = tempfile::tempdir().unwrap();
    let json = |gaps: &str, code: i32, text: &str| -> serde_json::Value {
        let table = format!("id,lower,upper,size,gaps\na,0,9,8,{gaps}\nb,3,5,4,\n");
        let output = gapless(&folder, &table, &["--json", "--capacity", "10", "--out", "out.csv", "--draw", "map.txt"]);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{stderr}");
        assert!(stderr.contains(text), "{stderr}");
        serde_json::from_slice(&output.stdout).unwrap()
    };
    let closed = json("1-2 3-4@0:2", 3, "a in ticks 4 to 9");
    assert_eq!(
        (&closed["proof"], &closed["fit"], &closed["height"]),
        (&"max-live".into(), &"impossible".into(), &12.into())
    );
    let open = json("3-5", 0, "");
    assert_eq!((&open["lower_bound"], &open["height"], &open["buffers"]), (&8.into(), &8.into(), &2.into()));
    // The written plan is accepted as it is.
    let written = fs::read_to_string(folder.path().join("out.csv")).unwrap();
    assert_eq!(gapless(&folder, &written, &["--capacity", "8"]).status.code(), Some(0), "{written}");
    let output = gapless(&folder, "id,lower,upper,size,gaps,offset\na,0,9,8,3-4,0\nb,3,5,4,,0\n", &[]);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("onto \"b\" of line 3, which is alive at the same time"));
}

/// The gap to the best proven bound is shown beside the gap to the most alive bytes if the two bounds differ.
#[test]
fn the_best_proven_bound_is_shown() {
    let folder = tempfile::tempdir().unwrap();
    let table = "id,lower,upper,size,alignment\na,0,2,10,64\nb,1,3,20,64\n";
    let text = String::from_utf8(gapless(&folder, table, &[]).stdout).unwrap();
    let expected = "2 buffers in 74 bytes, 1.0000 × the best proven bound (74), 2.4667 × the most alive (30)\n";
    assert!(text.starts_with(expected), "{text}");
}

#[test]
fn a_gzipped_table_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let mut file = GzEncoder::new(fs::File::create(folder.path().join("table.csv.gz")).unwrap(), Compression::fast());
    file.write_all(TABLE.as_bytes()).unwrap();
    file.finish().unwrap();
    let output = gapless(&folder, TABLE, &[]).stdout;
    let mut command = Command::new(env!("CARGO_BIN_EXE_gapless"));
    let gzipped = command.args(["plan", "table.csv.gz"]).current_dir(folder.path()).output().unwrap().stdout;
    assert_eq!(output[..30], gzipped[..30]);
}

/// Keeping the last offset would raise the plan from 7 to 8 bytes.
#[test]
fn kept_offsets_cost_no_height() {
    let folder = tempfile::tempdir().unwrap();
    let table = "id,lower,upper,size,alignment,offset\na,1,2,2,6,\nb,1,3,1,3,\nc,0,2,2,3,0\n";
    for offsets in ["keep", "ignore"] {
        let output = gapless(&folder, table, &["--json", "--offsets", offsets]).stdout;
        assert_eq!(serde_json::from_slice::<serde_json::Value>(&output).unwrap()["height"], 7, "{offsets}");
    }
}

#[test]
fn the_work_is_limited() {
    let folder = tempfile::tempdir().unwrap();
    let json = |work: &str| -> serde_json::Value {
        let output = gapless(&folder, &hard_table(), &["--json", "--work", work]);
        serde_json::from_slice(&output.stdout).unwrap()
    };
    let [little, more] = ["0", "1000000"].map(json);
    assert_eq!((&little["stop_reason"], &more["stop_reason"]), (&"work".into(), &"proven".into()));
    let work = |json: &serde_json::Value| json["work"].as_u64().unwrap();
    assert!(work(&little) < 10_000 && work(&more) < 2_000_000, "{little} {more}");
    let refused = plan_model(&["--work", "7"]);
    assert!(String::from_utf8_lossy(&refused.stderr).contains("--work apply to tables only"));
}

/// If the reader closes the pipe, the command does not panic, and its exit code stays the same.
#[test]
fn a_closed_pipe_is_no_error() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("table.csv"), TABLE).unwrap();
    fs::write(folder.path().join("no.csv"), "id\n").unwrap();
    let closed = || std::io::pipe().unwrap().1;
    for (arguments, code) in [
        ("plan table.csv", 0),
        ("plan table.csv --json", 0),
        ("plan table.csv --capacity 1000", 3),
        ("plan no.csv", 2),
        ("plan --model small --batch 1 --sequence 64", 0),
        ("plan --model small --batch 1 --sequence 64 --json", 0),
        ("plan --help", 0),
        ("schedule 1f1b --ranks 4 --micro-batches 8", 0),
        ("schedule 1f1b --ranks 4 --micro-batches 8 --json", 0),
        ("schedule nonesuch --ranks 4 --micro-batches 8", 2),
        ("compare --trace table.csv", 0),
        ("compare --trace table.csv --json", 0),
        ("compare --trace no.csv", 2),
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_gapless"));
        command.args(arguments.split(' ')).current_dir(folder.path()).stdout(closed());
        let output = command.stderr(std::process::Stdio::piped()).spawn().unwrap().wait_with_output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{arguments}: {text}");
        assert!(!text.contains("panicked"), "{arguments}: {text}");
        assert_eq!(command.stderr(closed()).status().unwrap().code(), Some(code), "{arguments}");
    }
}

#[test]
fn prints_json() {
    let folder = tempfile::tempdir().unwrap();
    let output = gapless(&folder, TABLE, &["--json"]);
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let keys: Vec<&String> = json.as_object().unwrap().keys().collect();
    let expected = ["bound", "bound_gap", "buffers", "commit", "gap", "height", "lower_bound", "plan_hash", "plan_ms"];
    assert_eq!(keys, [&expected[..], &["proof", "stop_reason", "version", "work"]].concat());
    assert_eq!((&json["buffers"], &json["height"], &json["gap"]), (&3.into(), &1536.into(), &1.0.into()));
}

#[test]
fn writes_a_plan_that_the_checker_accepts() {
    let folder = tempfile::tempdir().unwrap();
    gapless(&folder, TABLE, &["--out", "out.csv"]);
    let table = csv::read(&fs::read(folder.path().join("out.csv")).unwrap()[..]).unwrap();
    check(&table.problem, &table.plan().unwrap(), Some(1536)).unwrap();
}

fn plan_model(arguments: &[&str]) -> Output {
    let step = ["plan", "--model", "small", "--batch", "4", "--sequence", "128", "--dtype", "bf16"];
    Command::new(env!("CARGO_BIN_EXE_gapless")).args(step).args(arguments).output().unwrap()
}

#[test]
#[cfg(feature = "cuda")]
fn a_roofline_lists_what_a_step_launches() {
    let plan_mixed = |arguments: &[&str]| {
        let step = ["plan", "--model", "small", "--batch", "4", "--sequence", "128", "--dtype", "mixed", "--roofline"];
        Command::new(env!("CARGO_BIN_EXE_gapless")).args(step).args(arguments).output().unwrap()
    };
    let roofline = |card: &str| -> serde_json::Value {
        let output = plan_mixed(&["--kernels", "cuda", "--card", card, "--json"]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice::<serde_json::Value>(&output.stdout).unwrap()["roofline"].take()
    };
    let [a100, b200] = ["a100-80", "b200"].map(roofline);
    assert_eq!((&a100["launches"], &a100["bytes"]), (&b200["launches"], &b200["bytes"]));
    assert!(a100["milliseconds"].as_f64() > b200["milliseconds"].as_f64());
    let shown = String::from_utf8(plan_mixed(&["--kernels", "cuda"]).stdout).unwrap();
    assert!(shown.contains("on h100, estimated: ") && shown.contains("attention: attention_tc_64"), "{shown}");
    let refused = plan_mixed(&[]);
    assert_eq!(refused.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("--roofline needs kernels for GPUs: give --device cuda"));
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
    // The kernels of another device need other scratch.
    assert_ne!(json(&["--kernels", "cuda"])["arena_bytes"], plain["arena_bytes"]);
    let error = String::from_utf8(plan_model(&["--kernels", "tpu"]).stderr).unwrap();
    assert!(error.contains("use auto, cpu, cuda"), "{error}");
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
        // The message contains the tick of the peak, the bytes alive at this tick by role, and the names of the keys
        // that would have to change.
        (&["--budget", "1MiB"], 3, "buffers alive at tick "),
        (&["--budget", "1MiB"], 3, ", in train 0B0"),
        (&["--budget", "1MiB"], 3, " × optimizer state"),
        (&["--budget", "1MiB"], 3, "wte.weight (parameter)"),
        (&["--budget", "1MiB"], 3, "it would fit without "),
        (&["--budget", "4 parsecs"], 2, "is not a unit of bytes"),
        (&["--budget", "-5GiB"], 2, "a number of bytes cannot be negative"),
        (&["--tflops", "-5"], 2, "are not valid rates"),
        (&["--recompute", "ops:gelo"], 2, "gelo"),
        (&["--recompute", "sometimes"], 2, "is not a policy"),
    ] {
        let output = plan_model(arguments);
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{text}");
        assert!(text.contains(words), "{text}");
    }
}

/// Each overhead has a source. That of a profile of one's own is the profile, even if it has the name of a built-in one.
#[test]
fn overheads_name_their_sources() {
    let source = |profile: &str| {
        let (_, out, err) = ask(&format!("--batch 4 --planning 1000 --json --profile {profile}"));
        let json: serde_json::Value = serde_json::from_str(&out).unwrap_or_else(|_| panic!("{out}{err}"));
        json["fits"]["limit"]["overheads"]["sources"]["context"].as_str().unwrap().to_owned()
    };
    assert_eq!(source("h200"), "measured on an H200, scaled by multiprocessors");
    assert_eq!(source("context.toml"), "from the profile mine");
    assert_eq!(source("renamed.toml"), "from the profile h200");
}

/// A device with little memory, so that small steps do not fit.
const CARD: &str = "name = 'mine'\nmemory = 335544320\nreserve = 20971520\nf32_flops = 1e12\nbf16_flops = 1e13\nproducts = 0.8\n\
    attention = 0.6\nbytes = 1e11\nlaunch = 2e-6\nlink = 1e10\nlatency = 1e-5\noverlap = 0.5\n";

/// Plans the small model, by default with the kernels of a GPU. Returns the exit code, the standard output and the standard error.
fn ask(arguments: &str) -> (Option<i32>, String, String) {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("card.toml"), CARD).unwrap();
    let context = format!("{CARD}context = 7340032\nneighbor = 3145728\n");
    fs::write(folder.path().join("renamed.toml"), context.replace("mine", "h200")).unwrap();
    fs::write(folder.path().join("context.toml"), context).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_gapless"));
    command.args(["plan", "--model", "small"]).args(arguments.split(' ')).current_dir(folder.path());
    for (flag, value) in [("--sequence", "128"), ("--precision", "bf16"), ("--device", "cuda")] {
        if !arguments.contains(flag) {
            command.args([flag, value]);
        }
    }
    let output = command.output().unwrap();
    let [out, err] = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
    (output.status.code(), out, err)
}

#[test]
fn a_device_or_a_budget_is_a_question() {
    for (arguments, code, answer, told) in [
        ("--batch 4 --profile t4", 0, "fits: yes, ", "t4 has compute capability 7.5"),
        ("--batch 4 --profile card.toml", 0, " of the 300 MiB of mine (320 MiB less 20 MiB outside the arena)", ""),
        ("--batch 4 --profile card.toml", 0, "\noutside the arena: reserve 20 MiB (from the profile mine)\n", ""),
        (
            "--batch 4 --profile h200",
            0,
            "\noutside the arena: CUDA context 529 MiB (measured on an H200, scaled by multiprocessors); kernels 6 MiB",
            "",
        ),
        (
            "--batch 4 --profile context.toml --pipeline-ranks 2",
            0,
            "CUDA context 7 MiB (from the profile mine); cuBLASLt nothing (its workspace is planned \
             as a part of the arena); NCCL 3 MiB (from the profile mine); reserve 20 MiB",
            "",
        ),
        ("--batch 4 --profile h200 --pipeline-ranks 2", 0, "; NCCL 384 MiB (reported for H100s", ""),
        ("--batch 4 --budget 1GiB", 0, " of the 1 GiB of the budget", ""),
        ("--batch 4 --device cpu --profile h100", 0, "fits: yes, ", "--device cuda plans with those of h100"),
        ("--batch 64 --profile card.toml", 3, "fits: no: the step needs ", "what helps: bf16 without f32 masters"),
        ("--batch 64 --profile card.toml --device cpu", 3, "fits: no: the ", "what helps: bf16 without f32 masters"),
        ("--batch 64 --profile card.toml", 3, "more than the 300 MiB of mine", "recomputation it "),
        ("--batch 4 --pipeline-ranks 2 --budget 1MiB", 3, "fits: no: rank ", "what helps: "),
        (
            "--batch 64 --recompute layers --profile card.toml --sequence 512",
            3,
            "fits: no",
            "more recomputation (memory",
        ),
        ("--batch 4 --rank 0", 0, "4 sequences of 128 tokens in 1 micro-batch,", ""),
    ] {
        let (found, out, err) = ask(arguments);
        assert_eq!(found, Some(code), "{arguments}\n{out}{err}");
        assert!(out.contains(answer) && err.contains(told), "{arguments}\n{out}{err}");
        assert_eq!(out.contains("fits: "), !arguments.ends_with("--rank 0"), "{out}");
    }
    let (_, out, _) = ask("--batch 64 --profile card.toml --json");
    let fits = &serde_json::from_str::<serde_json::Value>(&out).unwrap()["fits"];
    assert_eq!((&fits["fits"], &fits["limit"]["bytes"]), (&false.into(), &(300 << 20).into()));
    let (_, out, _) = ask("--batch 4 --budget 1MiB --json");
    let fits = &serde_json::from_str::<serde_json::Value>(&out).unwrap()["fits"];
    assert_eq!((&fits["fits"], &fits["limit"]["device"]), (&false.into(), &serde_json::Value::Null));
}

/// A step is not told to do what it does already, or what hardly matters to it.
#[test]
fn remedies_fit_the_step() {
    let (_, _, plain) = ask("--batch 4 --budget 1MiB --precision f32 --device cpu");
    let bf16 = "what helps: bf16 (step.precision), if activations take most of the memory; bf16 without f32 masters";
    assert!(plain.contains(bf16) && plain.contains("an optimizer with smaller states"), "{plain}");
    // With one sequence, the masters take more than the halved activations save.
    let (_, _, large) = ask("--batch 64 --profile card.toml --precision f32");
    assert!(large.contains("what helps: bf16 (step.precision); bf16 without f32 masters"), "{large}");
    let (_, _, states) = ask("--batch 1 --sequence 8 --profile card.toml --precision f32 --set model=gpt2");
    assert!(states.contains("what helps: bf16 without f32 masters"), "{states}");
    assert!(plain.contains("adapters (trainable.lora)") && plain.contains("more micro-batches"), "{plain}");
    let (_, _, adapted) = ask("--batch 1 --budget 1MiB --lora 4:8 --lora-targets c_proj");
    assert!(adapted.contains("what helps: more pipeline ranks (mesh.pipeline)"), "{adapted}");
    assert!(adapted.contains("shorter sequences") && !adapted.contains("adamw8bit"), "{adapted}");
    assert!(adapted.contains("needs ") && adapted.contains(" MiB of ") && !adapted.contains("bytes of "), "{adapted}");
}

#[test]
fn remedies_fit_the_step_and_the_mesh() {
    use gapless::{MemoryOptions, Mesh, Precision};
    let even =
        MemoryOptions { routing: gapless_alloc::arena::Reserve::Balanced { factor: 1.25 }, ..Default::default() };
    let step = |mesh, memory| StepOptions { precision: Precision::Bf16, mesh, memory, ..StepOptions::default() };
    let experts = Mesh { expert: 2, ..Mesh::default() };
    let named = |step: StepOptions| step.remedies().join("; ");
    let worst = MemoryOptions { routing: gapless_alloc::arena::Reserve::Worst, ..Default::default() };
    assert!(named(step(experts, worst.clone())).contains("(memory.routing = 1.25)"));
    for (mesh, memory) in [(experts, even), (Mesh::default(), worst)] {
        let remedies = named(step(mesh, memory));
        assert!(!remedies.contains("memory.routing") && remedies.contains("pure_bf16"), "{remedies}");
        assert!(remedies.contains("adamw8bit"), "{remedies}");
    }
}

#[test]
fn the_largest_batch_fits_and_the_next_does_not() {
    let (code, out, err) = ask("--largest-batch --micro-batches 2 --profile card.toml --json");
    assert_eq!(code, Some(0), "{err}");
    let json: serde_json::Value = serde_json::from_str(&out).unwrap();
    let [batch, next] = ["batch", "next"].map(|key| json["largest_batch"][key].as_u64().unwrap());
    assert!(next == batch + 2 && batch > 2 && json["fits"]["fits"] == true, "{out}");
    let (code, out, err) = ask(&format!("--batch {next} --micro-batches 2 --profile card.toml"));
    assert!(code == Some(3) && out.starts_with("fits: no"), "{out}{err}");
    let (code, _, err) = ask("--largest-batch");
    assert!(code == Some(2) && err.contains("--largest-batch needs a limit; name a device with --profile"), "{err}");
    let (code, out, err) = ask("--largest-batch --micro-batches 2 --budget 1MiB");
    assert!(code == Some(3) && out.starts_with("fits: no"), "{out}{err}");
}

#[test]
fn a_number_of_ranks_is_made_a_mesh() {
    let (code, out, err) = ask("--planning 100000 --ranks 4 --batch 8 --micro-batches 2 --profile card.toml");
    assert_eq!(code, Some(0), "{out}{err}");
    assert!(out.contains("<- chosen") && out.contains(", 4 ranks, schedule "), "{out}");
    // One line for each way to write 4 as tensor ranks × pipeline ranks × data ranks, and for shard ranks in place of data
    // ranks in two stages.
    let (_, out, _) = ask("--planning 100000 --ranks 4 --batch 8 --micro-batches 2 --json");
    let json: serde_json::Value = serde_json::from_str(&out).unwrap();
    let compared = json["meshes"]["compared"].as_array().unwrap();
    assert_eq!(compared.len(), 6 + 2 * 3, "{out}");
    assert_eq!(json["meshes"]["chosen"], 0, "{out}");
    let times: Vec<f64> = compared.iter().filter_map(|option| option["step_ms"].as_f64()).collect();
    assert!(times[1..].is_sorted(), "{out}");
    let (code, out, err) = ask("--planning 100000 --ranks 3 --batch 4 --micro-batches 2");
    assert!(code == Some(0) && out.contains(" batch not divisible\n"), "{out}{err}");
    assert!(out.contains("--micro-batches 2: pipelines of more ranks than micro-batches are mostly idle"), "{out}");
    let (code, _, err) = ask("--ranks 4 --pipeline-ranks 2");
    assert!(code == Some(2) && err.contains("--ranks chooses the mesh; leave --pipeline-ranks out"), "{err}");
}

/// The flags that the search prints plan the step that it chose.
#[test]
fn gpus_of_a_memory_are_searched() {
    let (code, out, err) = ask("--gpus 4 --memory 4GiB --batch 8 --planning 100000");
    assert_eq!(code, Some(0), "{out}{err}");
    let flags = out.lines().find_map(|line| line.strip_prefix("the fastest that fits: ")).unwrap().to_owned();
    let (_, out, _) = ask("--gpus 4 --memory 4GiB --batch 8 --planning 100000 --json");
    let arena = |out: &str| {
        let json: serde_json::Value = serde_json::from_str(out).unwrap();
        json["arena_bytes"].as_u64().unwrap()
    };
    let (_, same, err) = ask(&format!("{flags} --batch 8 --planning 100000 --json"));
    assert_eq!(arena(&out), arena(&same), "{err}");
    let (code, _, err) = ask("--gpus 4 --memory 1GiB --micro-batches 2");
    assert!(code == Some(2) && err.contains("leave --micro-batches out"), "{err}");
    let (code, _, err) = ask("--gpus 2 --memory 600MiB --batch 8");
    assert!(code == Some(2) && err.contains("no step of this batch fits 2 GPUs"), "{err}");
}

/// If no mesh fits as it is, meshes are compared with recomputation. If none fits at all, more ranks are no remedy,
/// because their number is given.
#[test]
fn a_mesh_may_fit_only_with_recomputation() {
    let step = "--planning 100000 --ranks 2 --batch 80 --micro-batches 2 --rank 1 --profile card.toml";
    let (code, out, err) = ask(step);
    assert_eq!(code, Some(0), "{out}{err}");
    assert!(out.contains("no mesh fits without recomputation; planned ones have --budget 300MiB"), "{out}{err}");
    assert!(out.contains("  fits  <- chosen") && out.contains("fits: yes"), "{out}{err}");
    let (code, out, err) = ask("--planning 100000 --ranks 2 --batch 2 --budget 1MiB");
    assert_eq!(code, Some(3), "{out}{err}");
    assert!(err.contains("what helps: ") && !err.contains("mesh."), "{out}{err}");
}

/// The time of a step of several ranks is the same in the comparison of meshes and in the last lines. It is not the time
/// that one rank computes.
#[test]
fn a_step_of_several_ranks_takes_longer_than_a_rank_computes() {
    let (_, out, err) = ask("--ranks 2 --batch 8 --micro-batches 2 --json");
    let json: serde_json::Value = serde_json::from_str(&out).unwrap_or_else(|_| panic!("{out}{err}"));
    let compared = &json["meshes"]["compared"][json["meshes"]["chosen"].as_u64().unwrap() as usize];
    assert_eq!(compared["step_ms"], json["step_ms"]);
    let (_, out, err) = ask("--pipeline-ranks 2 --batch 8 --micro-batches 2");
    assert!(out.contains("; a step takes ") && out.contains(" ms of which this rank is busy, "), "{out}{err}");
    let (_, out, err) = ask("--batch 8");
    assert!(out.contains("; a step takes ") && !out.contains("this rank"), "{out}{err}");
}

/// `plan` and `schedule` have one time for a step. A rank is busy for a part of it.
#[test]
fn a_step_has_one_time() {
    for step in ["", " --pipeline-ranks 2 --schedule zbv", " --pipeline-ranks 2 --offload gelu --recompute layers"] {
        let step = format!("--batch 8 --micro-batches 4{step}");
        let (_, out, err) = ask(&format!("{step} --planning 100000 --rank all --json"));
        let json: serde_json::Value = serde_json::from_str(&out).unwrap_or_else(|_| panic!("{out}{err}"));
        let ranks = json.as_array().map_or(std::slice::from_ref(&json), Vec::as_slice);
        let mut command = Command::new(env!("CARGO_BIN_EXE_gapless"));
        command.args(["schedule", "--model", "small", "--sequence", "128", "--precision", "bf16", "--device", "cuda"]);
        let output = command.args(step.split(' ')).arg("--json").output().unwrap();
        let timeline: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        for (rank, planned) in ranks.iter().enumerate() {
            assert_eq!(planned["step_ms"], timeline["makespan"].as_u64().unwrap() as f64 / 1e6, "{step}");
            let busy = timeline["makespan"].as_u64().unwrap() - timeline["bubble"][rank].as_u64().unwrap();
            assert_eq!(planned["rank_ms"], busy as f64 / 1e6, "{step}");
        }
    }
}

/// Copies of offloaded activations count in the time of a step, at the rates of the profile.
#[test]
fn offloading_takes_time() {
    let planned = |arguments: &str| -> serde_json::Value {
        let (_, out, err) = ask(&format!("--batch 8 --planning 100000 --json{arguments}"));
        serde_json::from_str(&out).unwrap_or_else(|_| panic!("{out}{err}"))
    };
    let (plain, offloaded) = (planned(""), planned(" --offload gelu"));
    let ms = |json: &serde_json::Value, key: &str| json[key].as_f64().unwrap();
    assert_eq!(ms(&plain, "offload_ms"), 0.0);
    assert!((ms(&offloaded, "step_ms") - ms(&plain, "step_ms") - ms(&offloaded, "offload_ms")).abs() < 1e-3);
    // Every activation is written once and read once, over PCIe 5.0 with 16 lanes and, with a folder, to a disk with 4 lanes
    // of PCIe 4.0. A part of that time is hidden behind computation.
    let bytes = 2.0 * offloaded["host_bytes"].as_f64().unwrap();
    let (link, disk) = (1e3 * bytes / (0.8 * 64e9), 1e3 * bytes / (0.8 * 8e9));
    let in_file = ms(&planned(" --offload gelu --set memory.offload_to=\"a\""), "offload_ms");
    let in_memory = ms(&offloaded, "offload_ms");
    assert!(0.0 < in_memory && in_memory < link, "{in_memory} {link}");
    assert!(disk - link < in_file && in_file < link + disk, "{in_file} {link} {disk}");
    // The share is that of the rank's time, and that of recomputation is relative to the other time.
    let (_, out, _) = ask("--batch 8 --planning 100000 --offload gelu");
    let share = 100.0 * ms(&offloaded, "offload_ms") / ms(&offloaded, "rank_ms");
    let words = format!("({share:.2} % of the rank's time), because of its copies");
    assert!(out.contains(&words), "{words}: {out}");
    assert!(out.contains("recomputed: 0.00 % on top of the other time"), "{out}");
    let (_, out, _) = ask("--batch 8 --planning 100000 --curve 2");
    let head = out.lines().find(|line| line.split_whitespace().eq(["budget", "arena", "busy", "overhead"]));
    assert!(head.is_some(), "{out}");
}

/// Stages are cut equally, or at layers, in every command.
#[test]
fn stages_are_cut_as_the_user_says() {
    let planned = |cut: &str| -> serde_json::Value {
        let (_, out, err) =
            ask(&format!("--batch 4 --micro-batches 2 --pipeline-ranks 2 --planning 100000 --rank all --json{cut}"));
        serde_json::from_str(&out).unwrap_or_else(|_| panic!("{out}{err}"))
    };
    let hashes = |cut: &str| [0, 1].map(|rank| planned(cut)[rank]["plan_hash"].clone());
    let equal = hashes(" --cut equal");
    assert_eq!(equal, hashes(" --cut h.3"));
    assert_ne!(equal, hashes(" --cut h.4"));
    assert_eq!(hashes(""), hashes(" --cut balanced"));
    let (code, _, err) = ask("--batch 8 --micro-batches 8 --pipeline-ranks 8 --cut equal");
    assert!(code == Some(2) && err.contains("the model has 6 layers for 8"), "{err}");
    let (code, _, err) = ask("--batch 4 --micro-batches 2 --pipeline-ranks 2 --cut h.9");
    assert!(code == Some(2) && err.contains("no layer \"h.9\""), "{err}");
}

/// The planner's work applies to the tables of eager frameworks too.
#[test]
fn planning_applies_to_eager_tables() {
    let (_, out, _) = ask("--batch 4 --lowering eager --planning 1 --json");
    let json: serde_json::Value = serde_json::from_str(&out).unwrap();
    let (_, out, _) = ask("--batch 4 --lowering eager --json");
    let all: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_ne!(json["stop_reason"], all["stop_reason"], "{json} {all}");
    assert!(json["height"].as_u64() >= all["height"].as_u64());
}

#[test]
fn a_gpu_has_kernels_for_all_that_saves_memory() {
    let runs = [
        "--optimizer adamw8bit",
        "--precision pure_bf16",
        "--set memory.compress=[\"linear\"]",
        "--set memory.offload=[\"gelu\"]",
    ];
    for runs in runs {
        let (_, out, err) = ask(&format!("--batch 4 {runs} --json"));
        assert!(out.starts_with('{') && !out.contains("does_not_run"), "{runs}: {out}{err}");
    }
}

/// All instructions of the first backward may be fused into others or moved out of it. Then the drawing has no such phase.
#[test]
fn a_part_without_instructions_is_left_out() {
    let folder = tempfile::tempdir().unwrap();
    let step = "plan --model gpt2 --batch 4 --sequence 1024 --device cuda --draw map.txt";
    let mut command = Command::new(env!("CARGO_BIN_EXE_gapless"));
    command.args(step.split(' ')).current_dir(folder.path());
    command.args(["--set", "memory.release_gradients=true", "--set", "optimizer.max_norm=inf"]);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn galore_in_bf16_is_refused() {
    let (code, _, err) = ask("--batch 4 --optimizer galore --device cpu");
    assert!(code == Some(2) && err.contains("galore needs step.precision = \"f32\""), "{err}");
    let (code, _, err) = ask("--batch 4 --optimizer galore --device cpu --precision f32");
    assert_eq!(code, Some(0), "{err}");
}

#[test]
fn the_help_lists_the_memory_of_devices() {
    let output = Command::new(env!("CARGO_BIN_EXE_gapless")).args(["plan", "--help"]).output().unwrap();
    let help = String::from_utf8(output.stdout).unwrap().split_whitespace().collect::<Vec<_>>().join(" ");
    for device in ["t4 (16 GB)", "v100-16 (16 GB)", "l4 (24 GB)", "a100-40 (40 GB)", "h100 (80 GB)", "h200 (141 GB)"] {
        assert!(help.contains(device), "{device}: {help}");
    }
}

/// The command writes a table for every rank. The other commands can read the table, which contains the plan that
/// they use.
#[test]
fn every_rank_of_a_step_writes_its_plan() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(
        folder.path().join("step.toml"),
        "model = \"small\"\nstep.batch = 4\nmesh.pipeline = 2\npipeline.schedule = \"zbv\"\n",
    )
    .unwrap();
    let run = |command: &str| {
        let mut program = Command::new(env!("CARGO_BIN_EXE_gapless"));
        let output = program.args(command.split(' ')).current_dir(folder.path()).output().unwrap();
        (
            output.status.code(),
            String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr),
        )
    };
    // The batch comes from the file, the other sizes from flags.
    let step = "step.toml --micro-batches 2 --sequence 64 --rank all --json";
    let (code, text) = run(&format!("plan {step} --out plan.csv"));
    assert_eq!(code, Some(0), "{text}");
    let planned: serde_json::Value = serde_json::from_str(&text).unwrap();
    let (_, compared) = run(&format!("compare {step} --allocators gapless"));
    let compared: serde_json::Value = serde_json::from_str(&compared).unwrap();
    for rank in 0..2 {
        let table = csv::read(&fs::read(folder.path().join(format!("plan.{rank}.csv"))).unwrap()[..]).unwrap();
        let arena = planned[rank]["arena_bytes"].as_u64().unwrap();
        check(&table.problem, &table.plan().unwrap(), Some(arena)).unwrap();
        assert_eq!(compared[rank]["allocators"][0]["peak_reserved"], arena);
        let (code, text) = run(&format!("plan plan.{rank}.csv"));
        assert!(code == Some(0) && text.contains(&format!("in {arena} bytes")), "{text}");
    }
    fs::write(folder.path().join("sweep.toml"), "[vary]\nmodel = [\"small\"]\nschedule = [\"2f2b\"]\n").unwrap();
    for (command, words) in [
        ("plan none.toml", "cannot read none.toml"),
        ("plan --model small --rank 1", "estimate.rank: \"1\" is not a rank of a pipeline of 1; use numbers"),
        ("plan --model small --dtype f16", "step.precision=f16: unknown variant `f16`"),
        ("plan", "give the file of a run, a table, or --model"),
        ("plan plan.0.csv --model small", "keys of a run have no effect on a table"),
        ("compare --trace plan.0.csv --model small", "keys of a run have no effect on --trace"),
        ("schedule zbv --model small --ranks 2 --forward 2", "cannot be used with"),
        ("sweep sweep.toml --out results", "vary.schedule (line 3): unknown schedule \"2f2b\""),
    ] {
        let (code, text) = run(command);
        assert!(code == Some(2) && text.contains(words), "{command}: {code:?} {text}");
    }
}

/// Mixtral on two expert ranks. The reserve for received rows is added to the plan, either for even routing or for
/// the worst case.
#[test]
fn an_expert_rank_is_planned_with_its_reserve() {
    let plan = |routing: &[&str]| -> serde_json::Value {
        let step = ["plan", "--model", "mixtral8x7b", "--batch", "2", "--sequence", "256"];
        let arguments = [&step[..], &["--precision", "pure_bf16", "--expert-ranks", "2", "--json"], routing].concat();
        let output = Command::new(env!("CARGO_BIN_EXE_gapless")).args(arguments).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    };
    let (worst, even) = (plan(&[]), plan(&["--routing", "1"]));
    let number = |object: &serde_json::Value, name: &str| object[name].as_u64().unwrap();
    for step in [&worst, &even] {
        let plan = number(step, "arena_bytes") - number(step, "reserve_bytes");
        assert_eq!(plan, number(step, "lower_bound_bytes"), "the plan is at its bound");
    }
    assert!(number(&even, "reserve_bytes") < number(&worst, "reserve_bytes"));
    // Half of the experts' weights, not all.
    assert!(number(&worst, "arena_bytes") < 240 << 30, "{worst}");
}

/// The work of the fullest context rank is printed: it is the mean without documents, and at most 1.1 times the mean on
/// documents of mixed lengths.
#[test]
fn the_balance_of_context_ranks_is_printed() {
    let folder = tempfile::tempdir().unwrap();
    // Documents of 32 to 2,000 bytes, each of which is a token.
    let document = |i: usize| format!("{{\"text\": \"{}\"}}\n", "abc ".repeat(8 + i * i * 37 % 493));
    fs::write(folder.path().join("mixed.jsonl"), (0..200).map(document).collect::<String>()).unwrap();
    let plan = |more: &[&str]| {
        let step = ["plan", "--model", "small", "--batch", "4", "--sequence", "4096", "--context-ranks", "4", "--json"];
        let mut command = Command::new(env!("CARGO_BIN_EXE_gapless"));
        let output = command.args(step).args(more).current_dir(folder.path()).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let planned: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let balance = &planned["context_balance"];
        (balance["one_text"].as_f64().unwrap(), balance["documents"].as_f64())
    };
    assert_eq!(plan(&[]), (1.0, None));
    let documents = "data = { path = \"mixed.jsonl\", isolate_documents = true, vocabulary = 256 }";
    let (one_text, documents) = plan(&["--set", documents]);
    let documents = documents.unwrap();
    assert!(one_text >= 1.0 && (1.0..1.1).contains(&documents), "{one_text} {documents}");
}

#[test]
fn a_folder_of_weights_plans_as_a_trainer_of_it_does() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/evidence/hf/models/mixtral_bf16/checkpoint");
    let step = ["--batch", "2", "--sequence", "16", "--json"];
    let plan = |model: &str| {
        Command::new(env!("CARGO_BIN_EXE_gapless")).args(["plan", "--model", model]).args(step).output().unwrap()
    };
    let config = gapless::models::hf::Config::read(folder).unwrap();
    let options = gapless::TrainOptions {
        step: StepOptions { batch: 2, sequence: 16, ..StepOptions::default() },
        device: gapless::DeviceChoice::Cpu,
        ..Default::default()
    };
    let expected = gapless::plan::step(|vb| config.model(vb), &options, 0).unwrap().arena_bytes();
    // Weights are not needed.
    let alone = tempfile::tempdir().unwrap();
    let alone = alone.path().join("mine.json");
    fs::copy(format!("{folder}/config.json"), &alone).unwrap();
    for model in [folder, alone.to_str().unwrap()] {
        let output = plan(model);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(json["arena_bytes"], expected);
    }
    fs::write(&alone, r#"{"model_type": "bloom"}"#).unwrap();
    for (model, words) in [(alone.to_str().unwrap(), "bloom"), ("nothing", "mixtral8x7b")] {
        let output = plan(model);
        assert_eq!(output.status.code(), Some(2));
        assert!(String::from_utf8_lossy(&output.stderr).contains(words));
    }
}

/// For every rank of a run, the planned memory, including evaluation and generation, equals the memory that the
/// trainer reserves.
#[test]
fn what_is_planned_of_a_folder_is_what_a_run_takes() {
    use std::panic;

    use gapless::{DeviceChoice, Lora, Mesh, TrainOptions, Trainable, Trainer, communicator};
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/evidence/hf/models/mixtral_bf16/checkpoint");
    let config = gapless::models::hf::Config::read(folder).unwrap();
    let plain = TrainOptions {
        step: StepOptions { batch: 4, sequence: 16, ..StepOptions::default() },
        device: DeviceChoice::Cpu,
        ..Default::default()
    };
    let lora = Trainable::Lora(Lora {
        rank: 4,
        alpha: 8.0,
        targets: vec!["q_proj".into(), "o_proj".into()],
        ..Lora::default()
    });
    let adapted = TrainOptions { step: StepOptions { trainable: lora, ..plain.step.clone() }, ..plain.clone() };
    let stages = TrainOptions {
        step: StepOptions { mesh: Mesh::pipeline(2), micro_batches: 2, ..adapted.step.clone() },
        ..adapted.clone()
    };
    let only = TrainOptions {
        step: StepOptions { trainable: Trainable::Only(vec!["lm_head".into(), "*norm*".into()]), ..plain.step.clone() },
        ..plain.clone()
    };
    let targets = ["--lora", "4:8", "--lora-targets", "q_proj,o_proj"];
    let mut arenas = Vec::new();
    for (options, arguments) in [
        (plain, vec![]),
        (adapted, targets.to_vec()),
        (stages, [&targets[..], &["--pipeline-ranks", "2", "--micro-batches", "2"]].concat()),
        (only, vec!["--train", "lm_head,*norm*"]),
    ] {
        let taken = match options.step.mesh.ranks().unwrap() {
            1 => vec![Trainer::new(|vb| config.model(vb), options.clone()).unwrap().report().arena_bytes],
            ranks => communicator::on_threads(ranks, |world| {
                Ok(Trainer::builder(|vb| config.model(vb), options.clone())
                    .distributed(world)
                    .build()
                    .unwrap()
                    .report()
                    .arena_bytes)
            })
            .unwrap(),
        };
        let step = ["plan", "--model", folder, "--batch", "4", "--sequence", "16", "--json"];
        let output = Command::new(env!("CARGO_BIN_EXE_gapless")).args(step).args(&arguments).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let planned = json["ranks"].as_array().unwrap().iter().map(|rank| rank["arena_bytes"].as_u64().unwrap());
        assert_eq!(planned.collect::<Vec<_>>(), taken, "{arguments:?}");
        let most = *taken.iter().max().unwrap();
        gapless::plan::assert_fits(&config, &options, most);
        let too_small = panic::catch_unwind(panic::AssertUnwindSafe(|| {
            gapless::plan::assert_fits(&config, &options, most - 1);
        }));
        assert!(too_small.unwrap_err().downcast_ref::<String>().unwrap().contains("optimizer state"));
        arenas.push(most);
    }
    assert!(arenas[1] < arenas[0], "{arenas:?}");
}

/// docs/recompute.md has the plans of steps with compressed and offloaded activations.
#[test]
fn compressed_steps_are_those_of_the_page() {
    const ALL: &str = "linear,gelu,layer_norm,attention,add";
    let (small, large) = ("--model gpt2 --batch 64", "--model gpt2-xl --batch 16");
    let rows = [
        ("| GPT-2 124M | nothing | nothing |", small.to_owned()),
        ("| | | all in 8 bits |", format!("{small} --compress {ALL}")),
        ("| | | all in a file |", format!("{small} --offload {ALL}")),
        ("| GPT-2 1.5B | nothing | nothing |", large.to_owned()),
        ("| | | all in 8 bits |", format!("{large} --compress {ALL}")),
        (
            "| | layer_norm, gelu | linear, attention, add in 8 bits |",
            format!("{large} --recompute ops:layer_norm,gelu --compress linear,attention,add"),
        ),
        ("| | all layers | add in a file |", format!("{large} --recompute layers --offload add")),
    ];
    for (cells, arguments) in few(&rows, 1) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_gapless"));
        command.args("plan --micro-batches 4 --sequence 1024 --precision pure_bf16 --json".split(' '));
        let output = command.args(arguments.split(' ')).output().unwrap();
        let plan: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let number = |name: &str| plan[name].as_u64().unwrap();
        let roles = plan["summary"]["roles"].as_array().unwrap();
        let of_role = |name: &str| roles.iter().find(|role| role["role"] == name).unwrap()["bytes"].as_u64().unwrap();
        // Sums of gradients are alive during the whole step, like parameters.
        let above = number("arena_bytes") - 2 * of_role("parameter") - of_role("optimizer_state");
        let file = match number("host_bytes") {
            0 => String::new(),
            bytes => format!("{} ", Bytes(bytes)),
        };
        let line = format!("{cells} {} | {} | {file}|", Bytes(number("arena_bytes")), Bytes(above));
        assert_on_page("docs/recompute.md", &line);
    }
}

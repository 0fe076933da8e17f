//! Tests of `gapless compare`, run as a user would.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

fn compare(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_gapless")).arg("compare").args(arguments).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Writes a file with this content to a temporary folder, and returns the file's path.
fn file(folder: &tempfile::TempDir, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
    let path = folder.path().join(name);
    fs::write(&path, content).unwrap();
    path
}

const STEP: &str = "id,lower,upper,size\nw,0,9,3000000\na,1,4,5000000\nb,2,6,40000000\nc,4,8,5000000\nd,6,8,30000000\n";

#[test]
fn json_has_every_allocator_by_reserved_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let trace = file(&folder, "step.csv", STEP);
    let output = compare(&["--trace", trace.to_str().unwrap(), "--iterations", "3", "--json"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let object: Value = serde_json::from_slice(&output.stdout).unwrap();
    let allocators = object["allocators"].as_array().unwrap();
    let mut names: Vec<&str> = allocators.iter().map(|a| a["allocator"].as_str().unwrap()).collect();
    let reserved: Vec<u64> = allocators.iter().map(|a| a["peak_reserved"].as_u64().unwrap()).collect();
    assert!(reserved.is_sorted());
    names.sort_unstable();
    let known =
        ["bfc", "gapless", "gmlake", "ideal", "malloc", "pytorch", "pytorch-expandable", "stalloc", "stalloc-strips"];
    assert_eq!(names, known);
    for allocator in allocators {
        let [allocated, reserved] = ["peak_allocated", "peak_reserved"].map(|key| allocator[key].as_u64().unwrap());
        assert_eq!(allocator["fragmentation"].as_f64().unwrap(), 1.0 - allocated as f64 / reserved as f64);
        assert!(allocator["segments"].is_u64() && allocator["device_calls"].is_u64());
        match allocator["allocator"].as_str().unwrap() {
            // At ticks 2 and 3, w, a and b are alive. After that, c reuses the place of a.
            "ideal" | "gapless" => assert_eq!((allocated, reserved), (48_000_000, 48_000_000)),
            // PyTorch has two segments of 20 MiB, and one of 40 MB, rounded up to a multiple of 2 MiB.
            "pytorch" => assert_eq!(reserved, (20 + 40) << 20),
            _ => {}
        }
    }
}

#[test]
fn the_page_needs_nothing_but_itself() {
    let folder = tempfile::tempdir().unwrap();
    let (trace, report) = (file(&folder, "a<b.csv", STEP), folder.path().join("report.html"));
    let arguments =
        ["--trace", trace.to_str().unwrap(), "--html", report.to_str().unwrap(), "--allocators", "bfc,ideal"];
    let output = compare(&arguments);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(text(&output.stdout).starts_with("allocator"));
    let page = fs::read_to_string(report).unwrap();
    assert_eq!(page.matches("<canvas").count(), 2);
    assert!(page.contains("a&lt;b.csv") && !page.contains("a<b.csv"));
    assert!(!page.contains("http") && !page.contains("src="));
}

/// The first steps of a run contain the start: the states appear in the first update, so the first step has a lower peak.
#[test]
fn runs_have_a_start() {
    let step = ["--model", "gpt:vocabulary=512,layers=2,heads=2,width=64", "--batch", "4", "--sequence", "16"];
    let first = |more: &[&str]| compare(&[&step[..], &["--first-steps", "2"], more].concat());
    let output = first(&["--lowering", "eager", "--json"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let object: Value = serde_json::from_slice(&output.stdout).unwrap();
    let number = |value: &Value| value.as_u64().unwrap();
    let [before, states] = ["before_bytes", "states_bytes"].map(|name| number(&object["start_up"][name]));
    // Two moments in f32 for each f32 parameter, and a step for each of 28 parameters; the rotary tables are none here.
    assert_eq!(states, 2 * before + 4 * 28, "{object}");
    let peaks: Vec<u64> = object["step_peaks"].as_array().unwrap().iter().map(number).collect();
    assert!(peaks.len() == 2 && peaks[0] < peaks[1] && peaks[1] == number(&object["peak_live"]), "{object}");
    let printed = text(&first(&["--lowering", "eager"]).stdout);
    assert!(printed.contains("start of the run: ") && printed.contains("\nstep 2: at most "), "{printed}");
    let refused = first(&[]);
    assert!(text(&refused.stderr).contains("--first-steps is for eager frameworks"), "{}", text(&refused.stderr));
    assert_eq!(refused.status.code(), Some(2));
}

#[test]
fn steps_of_an_eager_framework_take_more() {
    let peak = |lowering: &str| {
        let step = ["--model", "gpt:vocabulary=512,layers=2,heads=2,width=64", "--batch", "4", "--sequence", "128"];
        let output = compare(&[&step[..], &["--dtype", "mixed", "--json", "--lowering", lowering]].concat());
        assert!(output.status.success(), "{}", text(&output.stderr));
        let object: Value = serde_json::from_slice(&output.stdout).unwrap();
        object["allocators"][0]["peak_reserved"].as_u64().unwrap()
    };
    let [ours, eager, autocast] = ["gapless", "eager", "eager-amp"].map(peak);
    assert!(ours < eager && ours < autocast, "{ours} {eager} {autocast}");
}

#[test]
fn snapshots_are_read() {
    let snapshot = Path::new(env!("CARGO_MANIFEST_DIR")).join("alloc/allocators/tests/snapshots/step.pickle");
    let output = compare(&["--snapshot", snapshot.to_str().unwrap(), "--json", "--allocators", "gapless"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let object: Value = serde_json::from_slice(&output.stdout).unwrap();
    // The buffers have 3 MiB, 5 MiB, 200 bytes and 1000 bytes.
    assert_eq!(object["allocators"][0]["peak_reserved"], (8 << 20) + 1200);
}

#[test]
fn bad_input_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let check = |content: &str, expected: &str| {
        let trace = file(&folder, "bad.csv", content);
        let output = compare(&["--trace", trace.to_str().unwrap()]);
        let error = text(&output.stderr);
        assert!(
            !output.status.success() && error.contains("bad.csv") && error.contains(expected),
            "{content:?}: {error}"
        );
    };
    check("", "line 1: empty file");
    check("id,lower,upper,size\n", "no buffers");
    check("id,lower,upper\n", "line 1: no column \"size\"");
    check("id,lower,upper,size\na,0,2,4\nb,5,3,4\n", "line 3: lower 5 is not below upper 3");
    check("id,lower,upper,size\na,0,2,-4\n", "line 2: size \"-4\"");
    check("id,lower,upper,size\na,0,2,4\na,2,3,4\n", "line 3: id \"a\" appears twice");
    check("\u{1f}\u{8b}", "line 1");
    let snapshots = Path::new(env!("CARGO_MANIFEST_DIR")).join("alloc/allocators/tests/snapshots");
    let call = compare(&["--snapshot", snapshots.join("call.pickle").to_str().unwrap()]);
    assert!(!call.status.success() && text(&call.stderr).contains("only plain data"));
    let unknown = compare(&["--trace", "x.csv", "--allocators", "jemalloc"]);
    assert!(
        !unknown.status.success()
            && text(&unknown.stderr).contains("unknown allocator \"jemalloc\"; choose one of ideal")
    );
    assert!(!compare(&[]).status.success());
    assert!(!compare(&["--trace", "a", "--snapshot", "b"]).status.success());
}

/// If a program ran out of memory, the output for its snapshot shows the failed request, with the result of each
/// allocator.
#[test]
fn the_request_that_was_refused_is_named() {
    let snapshot = concat!(env!("CARGO_MANIFEST_DIR"), "/alloc/allocators/tests/snapshots/step.pickle");
    let told = |more: &[&str]| {
        let output = compare(&[&["--snapshot", snapshot, "--allocators", "pytorch,ideal"], more].concat());
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let text = told(&[]);
    assert!(text.contains("out of memory at event 9, which requests 1024.00 GiB (1099511627776 bytes)"), "{text}");
    assert!(text.contains("on a device of 22.0 MiB (23068672 bytes), so no allocator can serve it"), "{text}");
    assert!(!told(&["--capacity", "4TiB"]).contains("no allocator"));
    let json: Value = serde_json::from_str(&told(&["--json", "--capacity", "4TiB"])).unwrap();
    assert_eq!((&json["refused"]["event"], &json["refused"]["device_free"]), (&9.into(), &0.into()));
    let served = json["refused"]["allocators"].as_array().unwrap();
    assert!(served.iter().all(|one| one["peak_reserved"].as_u64() >= Some(1 << 40)), "{json}");
}

/// Every allocator, gapless included, gets the rows of the load. gapless's reserve has a column of its own.
#[test]
fn mixtures_are_compared_on_the_same_rows() {
    let model = "moe:llama.vocabulary=64,llama.layers=2,llama.heads=2,llama.kv_heads=2,llama.width=64,router.experts=8,router.top_k=2,\
                 expert_hidden=64";
    let step = ["--model", model, "--batch", "4", "--micro-batches", "2", "--sequence", "64", "--expert-ranks", "2"];
    let run = |more: &[&str]| {
        let output = compare(&[&step[..], &["--routing", "1.5"], more].concat());
        assert!(output.status.success(), "{}", text(&output.stderr));
        text(&output.stdout)
    };
    let json = |more: &[&str]| -> Value { serde_json::from_str(&run(&[&["--json"], more].concat())).unwrap() };
    let loads = ["even", "skewed:1", "worst"].map(|load| json(&["--expert-load", load]));
    for object in &loads {
        let allocators = object["allocators"].as_array().unwrap();
        let named = |name: &str| allocators.iter().find(|entry| entry["allocator"] == name).unwrap();
        let [gapless, ideal, malloc] = ["gapless", "ideal", "malloc"].map(named);
        // The live bytes are the same for all.
        assert_eq!(object["peak_live"], ideal["peak_reserved"]);
        assert_eq!(gapless["peak_allocated"], ideal["peak_reserved"]);
        assert!(gapless["peak_reserved"].as_u64() >= object["peak_live"].as_u64());
        assert!(malloc["peak_allocated"].as_u64() >= object["peak_live"].as_u64());
        let with_reserve = allocators.iter().filter(|entry| entry.get("unused_reserve").is_some());
        assert_eq!(with_reserve.map(|entry| &entry["allocator"]).collect::<Vec<_>>(), ["gapless"]);
    }
    // With even rows, the arena wastes little, and half as much again is reserved for other rows.
    let gapless =
        loads[0]["allocators"].as_array().unwrap().iter().find(|entry| entry["allocator"] == "gapless").unwrap();
    let [reserved, unused] = ["peak_reserved", "unused_reserve"].map(|key| gapless[key].as_u64().unwrap());
    assert!(10 * reserved <= 11 * loads[0]["peak_live"].as_u64().unwrap() && unused > 0, "{gapless}");
    let live = loads.each_ref().map(|object| object["peak_live"].as_u64().unwrap());
    assert!(live.is_sorted() && live[0] < live[2], "{live:?}");
    // Even rows fit the reserve. The most rows that are possible do not, so the reserve is shown larger.
    assert!(loads[0].get("reserve_grown_to").is_none() && loads[0]["expert_load"] == "even", "{}", loads[0]);
    assert_eq!(loads[2]["reserve_grown_to"], 2.0);
    let told = run(&["--expert-load", "worst", "--allocators", "gapless,pytorch"]);
    assert!(told.contains("unused reserve GiB") && told.contains("--expert-load worst"), "{told}");
    assert!(told.contains("with a reserve of 2.00 × balanced rows"), "{told}");
    // In the worst case, all tokens choose the same two experts of a rank. A recording can say so as well.
    let folder = tempfile::tempdir().unwrap();
    let lines = "step,layer,expert,tokens\n1,first,0,9\n1,first,1,9\n1,second,0,9\n1,second,1,9\n";
    let recorded = format!("recorded:{}", file(&folder, "load.csv", lines).display());
    let replayed = json(&["--expert-load", &recorded, "--allocators", "ideal"]);
    assert_eq!(replayed["table_hash"], loads[2]["table_hash"]);
    // An eager framework gets the same rows.
    let eager = ["even", "worst", &recorded].map(|load| {
        json(&["--lowering", "eager", "--expert-load", load, "--allocators", "ideal"])["peak_live"].as_u64()
    });
    assert!(eager[0] < eager[1] && eager[1] == eager[2], "{eager:?}");
    let wrong = compare(&[&step[..], &["--expert-load", "all"]].concat());
    assert!(text(&wrong.stderr).contains("skewed:A"), "{wrong:?}");
}

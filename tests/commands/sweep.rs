//! Tests of `gapless sweep`, run as a user would: exit codes and progress.

use std::collections::BTreeSet;
use std::fs;
use std::process::{Command, Output};

use serde_json::Value;

const STEP: &str =
    "model = \"gpt:vocabulary=64,layers=4,heads=2,width=32\"\n[mesh]\npipeline = 2\n[step]\nsequence = 16\n";

/// A mixture of experts.
const MIXTURE: &str = "moe:llama.vocabulary=64,llama.layers=2,llama.heads=2,llama.kv_heads=2,llama.width=64,router.experts=8,router.top_k=2,expert_hidden=64";

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

/// The printed lines say that the plans and the allocators of an eager sweep are for two programs.
#[test]
fn lines_say_what_they_compare() {
    let folder = tempfile::tempdir().unwrap();
    let run = |lowering: &str| {
        let spec = format!("{STEP}batch = 4\n[estimate]\nlowering = \"{lowering}\"\n[vary]\nmicro_batches = [1, 2]\n");
        fs::write(folder.path().join("sweep.toml"), spec).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_gapless"));
        command.args(["sweep", "sweep.toml", "--out", "out", "--threads", "1"]).current_dir(folder.path());
        let output = command.output().unwrap();
        [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap())
    };
    for (lowering, is_eager) in [("gapless", false), ("eager", true)] {
        let [text, told] = run(lowering);
        let line = text.lines().find(|line| line.starts_with("pytorch: fragmentation")).unwrap();
        assert_eq!(line.contains("plans of gapless's own step, the allocator on the eager one"), is_eager, "{line}");
        assert!(text.contains("budgets where only plans fit, 0 where only the allocator fits"), "{text}");
        assert!(!told.contains("of other commits"), "{told}");
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

/// Returns the names of all fields of a value. Names in maps, which are data, are left out.
fn fields(value: &Value, found: &mut BTreeSet<String>) {
    match value {
        Value::Array(values) => values.iter().for_each(|value| fields(value, found)),
        Value::Object(values) => {
            for (name, value) in values {
                found.insert(name.clone());
                let is_map =
                    ["configuration", "reserved"].contains(&name.as_str()) || name == "roles" && value.is_object();
                if !is_map {
                    fields(value, found);
                }
            }
        }
        _ => {}
    }
}

/// Returns the part of a page from one text until before another, each of which is there once.
fn between<'p>(page: &'p str, from: &str, until: &str) -> &'p str {
    let start = page.find(from).unwrap_or_else(|| panic!("docs/sweep.md has no {from:?}"));
    let length = page[start..].find(until).unwrap_or_else(|| panic!("docs/sweep.md has no {until:?} after {from:?}"));
    &page[start..start + length]
}

/// Returns a column of the table of `results.jsonl` and `results.csv`, without the names of the other column.
fn column(table: &str, number: usize) -> String {
    let rows = table.lines().filter(|line| line.starts_with('|')).map(|line| line.split('|').collect::<Vec<_>>());
    rows.map(|cells| if cells[number].trim() == "the same" { cells[1] } else { cells[number] }).collect()
}

/// Every field of JSON and CSV is in its table in the documentation, and each names the version, the commit and the
/// step.
#[test]
fn the_documentation_names_every_field() {
    let page = include_str!("../../docs/sweep.md");
    let of_all = between(page, "## Fields", "`results.jsonl` has an object");
    let check = |documented: &str, name: &str, place: &str| {
        let name = format!("`{name}`");
        assert!(documented.contains(&name) || of_all.contains(&name), "{place}: docs/sweep.md does not have {name}");
    };
    let folder = tempfile::tempdir().unwrap();
    let gapless = |arguments: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_gapless"));
        let output = command.args(arguments.split(' ')).current_dir(folder.path()).output().unwrap();
        assert!(output.status.success(), "{arguments}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let dense = "--model small --batch 4 --micro-batches 2 --sequence 32 --pipeline-ranks 2";
    let mixture =
        format!("--model {MIXTURE} --batch 4 --micro-batches 2 --sequence 64 --expert-ranks 2 --routing 1.25");
    let plan = between(page, "`plan --json` prints", "`compare --json` prints");
    let compare = between(page, "`compare --json` prints", "`schedule --json` prints");
    let schedule = between(page, "`schedule --json` prints", "\n## Time");
    for (documented, arguments) in [
        (plan, format!("plan {dense} --profile h100 --offload gelu --recompute layers --planning 1000 --json")),
        (plan, format!("plan {mixture} --budget 1GiB --curve 2 --json")),
        (plan, "plan --model small --batch 4 --sequence 32 --ranks 2 --json".to_owned()),
        (plan, "plan --model small --batch 4 --sequence 32 --budget 1GiB --largest-batch --json".to_owned()),
        (compare, format!("compare {dense} --allocators gapless,pytorch --planning 1000 --json")),
        (compare, format!("compare {mixture} --expert-load worst --smallest-device --json")),
        (compare, format!("compare {dense} --allocators pytorch --capacity 1MiB --json")),
        (compare, format!("compare {dense} --allocators pytorch --lowering eager --first-steps 2 --json")),
        (schedule, format!("schedule {dense} --json")),
    ] {
        let json: Value = serde_json::from_str(&gapless(&arguments)).unwrap();
        assert!(["version", "commit", "step"].iter().all(|field| json.get(field).is_some()), "{arguments}");
        let mut found = BTreeSet::new();
        fields(&json, &mut found);
        found.iter().for_each(|name| check(documented, name, &arguments));
    }
    let results = between(page, "`results.jsonl` has an object", "`throughput.csv` has a line");
    let spec = format!(
        "model = \"{MIXTURE}\"\n[mesh]\nexpert = 2\n[memory]\nrouting = 1.25\n[step]\nsequence = 32\nbatch = 8\n\
         micro_batches = 2\n[vary]\nexpert_load = [\"even\", \"worst\"]\n[sweep]\nplan = \"all\"\n"
    );
    fs::write(folder.path().join("sweep.toml"), spec).unwrap();
    gapless("sweep sweep.toml --out out --threads 1");
    let rows = fs::read_to_string(folder.path().join("out/results.jsonl")).unwrap();
    let mut found = BTreeSet::new();
    rows.lines().for_each(|row| fields(&serde_json::from_str(row).unwrap(), &mut found));
    assert!(found.contains("reserve_grown_to") && found.contains("served_bytes"), "{found:?}");
    found.iter().for_each(|name| check(&column(results, 1), name, "results.jsonl"));
    let allocators = ["pytorch", "pytorch-expandable", "gmlake", "stalloc"];
    for (file, documented) in [
        ("results.csv", column(results, 2)),
        ("throughput.csv", between(page, "`throughput.csv` has a line", "`plan --json` prints").to_owned()),
    ] {
        let text = fs::read_to_string(folder.path().join("out").join(file)).unwrap();
        let (head, first) = text.split_once('\n').unwrap();
        for name in head.split(',').filter(|name| *name != "expert_load" && !allocators.contains(name)) {
            let allocator = allocators.iter().find_map(|kind| name.strip_prefix(kind)?.strip_prefix('_'));
            check(&documented, &allocator.map_or(name.to_owned(), |rest| format!("X_{rest}")), file);
        }
        assert!(first.contains(env!("CARGO_PKG_VERSION")), "{file}: {first}");
    }
    let csv = fs::read_to_string(folder.path().join("out/results.csv")).unwrap();
    let at = csv.lines().next().unwrap().split(',').position(|name| name == "reserve_grown_to").unwrap();
    let grown: Vec<&str> = csv.lines().skip(1).map(|line| line.split(',').nth(at).unwrap()).collect();
    assert_eq!(grown, ["", "2"]);
}

//! Runs benches/gpu/run with stand-ins for the programs that it calls. Checks which results are kept, which parts are
//! repeated, and what is printed.
#![cfg(unix)]

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

/// A stand-in that writes figures for its command and records the call. If CUT names the command, the stand-in kills
/// its caller and fails.
const GPU: &str = r#"#!/bin/sh
echo "$@" >>"$CALLED"
command=$1
while [ $# -gt 1 ]; do
    [ "$1" = --json ] && json=$2
    shift
done
[ "$command" = "$CUT" ] && kill -9 $PPID && exit 1
echo "figures of $command"
case $command in
    device)
        if [ -n "$NO_GPU" ]; then
            echo '{"skipped": "there is no NVIDIA driver"}' >"$json"
            echo "skipped: there is no NVIDIA driver"
        else
            echo '{"device": "GPU 0 (NVIDIA H200, 00000000:1B:00.0)", "card": "NVIDIA H200", "architecture": "sm_90"}' >"$json"
        fi
        ;;
    compile) mkdir -p "$GAPLESS_CACHE/kernels" && echo code >"$GAPLESS_CACHE/kernels/a.cubin" && echo '{}' >"$json" ;;
    speed)
        echo '{"tokens_per_second": 5e5, "micro_batch": 16, "memory": {"arena": 7000}, "flops_per_token": 1e9, "peak_flops": 1e15}' >"$json"
        ;;
    *) echo '{"losses": [1]}' >"$json" ;;
esac
"#;

const TESTS: &str =
    "#!/bin/sh\necho \"engine-tests $*\" >>\"$CALLED\"\necho 'test result: ok. 3 passed; 0 failed; 0 ignored'\n";

const SANITIZER: &str = "#!/bin/sh\necho \"sanitizer $*\" >>\"$CALLED\"\necho '========= ERROR SUMMARY: 0 errors'\n";

/// A folder with the stand-ins and the record of their calls.
struct Machine {
    folder: tempfile::TempDir,
}

impl Machine {
    fn new() -> Self {
        let machine = Self { folder: tempfile::tempdir().unwrap() };
        machine.program("binaries/gpu", GPU);
        machine.program("binaries/engine-tests", TESTS);
        machine.program("bin/compute-sanitizer", SANITIZER);
        machine.program("bin/nvidia-smi", "#!/bin/sh\n[ -z \"$NO_GPU\" ] && echo 'NVIDIA H200, 580.1, 143771 MiB'\n");
        machine.file("binaries/commit", "0123abc\n");
        // This file makes the import of PyTorch fail, so that the result does not depend on whether this machine has
        // PyTorch and a GPU.
        machine.file("python/torch.py", "raise ImportError('not in this test')\n");
        machine
    }

    fn at(&self, path: &str) -> PathBuf {
        self.folder.path().join(path)
    }

    fn file(&self, path: &str, text: &str) {
        fs::create_dir_all(self.at(path).parent().unwrap()).unwrap();
        fs::write(self.at(path), text).unwrap();
    }

    fn program(&self, path: &str, text: &str) {
        self.file(path, text);
        fs::set_permissions(self.at(path), fs::Permissions::from_mode(0o755)).unwrap();
    }

    /// Runs benches/gpu/run with the output folder `out`, further arguments and environment variables.
    fn run(&self, out: &str, arguments: &str, variables: &[(&str, &str)]) -> Output {
        let path = format!("{}:{}", self.at("bin").display(), std::env::var("PATH").unwrap());
        Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/gpu/run"))
            .args(["--out", self.at(out).to_str().unwrap()])
            .args(arguments.split_whitespace())
            .envs([("PATH", path.as_str()), ("CUT", ""), ("NO_GPU", "")])
            .envs([("GAPLESS_BINARIES", self.at("binaries")), ("CALLED", self.at("called"))])
            .env("PYTHONPATH", self.at("python"))
            .envs(variables.iter().copied())
            .output()
            .unwrap()
    }

    /// Returns the calls since the last time, and clears the record.
    fn called(&self) -> Vec<String> {
        let called = fs::read_to_string(self.at("called")).unwrap_or_default();
        let _ = fs::remove_file(self.at("called"));
        called.lines().map(str::to_owned).collect()
    }

    /// Returns the entries of found.json, by part.
    fn found(&self, out: &str) -> BTreeMap<String, Value> {
        let text = fs::read(self.at(out).join("found.json")).unwrap();
        let mut found: Value = serde_json::from_slice(&text).unwrap();
        let parts = found["parts"].as_array_mut().unwrap();
        parts.drain(..).map(|entry| (entry["part"].as_str().unwrap().to_owned(), entry)).collect()
    }
}

/// True if bash and python3 are installed. If not, reports that the test was skipped.
fn is_there() -> bool {
    let runs = |name: &str| Command::new(name).arg("--version").output().is_ok_and(|output| output.status.success());
    let is_there = runs("bash") && runs("python3");
    if !is_there {
        gapless_testing::not_checked("bash or python3 is not installed");
    }
    is_there
}

fn said(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

#[test]
fn what_was_found_is_kept_with_its_date_card_driver_and_commit() {
    if !is_there() {
        return;
    }
    let machine = Machine::new();
    let output = machine.run("out", "--seconds 10000", &[]);
    assert!(output.status.success(), "{}", said(&output));
    let found = machine.found("out");
    for (part, entry) in &found {
        assert_eq!((&entry["card"], &entry["commit"]), (&"NVIDIA H200".into(), &"0123abc".into()), "{part}");
        assert_eq!(entry["driver"], "NVIDIA H200, 580.1, 143771 MiB", "{part}");
        assert!(entry["date"].as_str().unwrap().starts_with("20"), "{part}");
        let (is_of_pytorch, needs_it) = (part.contains("PyTorch") || part == "rates", part.ends_with("in 0.7"));
        assert_eq!(entry["state"], if is_of_pytorch || needs_it { "skipped" } else { "ok" }, "{entry}");
    }
    assert_eq!(found["speed"]["figures"]["tokens_per_second"], 5e5);
    assert_eq!(found["judge: norm"]["figures"]["passed"], 3);
    assert_eq!(found["sanitizer: initcheck"]["figures"]["sanitizer"], "ERROR SUMMARY: 0 errors");
    assert!(found["gpt2: gapless in 0.7"]["why"].as_str().unwrap().contains("not in this test"), "{found:?}");
    // Parts run in the order of their importance, and each gets the arguments that it needs.
    let called = machine.called();
    let at = |words: &str| called.iter().position(|line| line.contains(words)).expect(words);
    let order = ["device", "parity --model small", "speed --micro-batch 16", "kernels --micro-batch 16"];
    let more = [
        "::norm::",
        "memory",
        "parity --model gpt2 --steps 200",
        "parity --model mixture",
        "sanitizer --tool memcheck",
    ];
    let order = order.iter().chain(&more);
    let order: Vec<usize> = order.map(|words| at(words)).collect();
    assert!(order.is_sorted(), "{called:#?}");
    assert!(called[at("compile")].contains("--architectures sm_90 --require-gpu"), "{called:#?}");
    assert!(called[at("sanitizer")].contains("--kernel-name regex=^(adafactor|adamw|"), "{called:#?}");
    assert!(machine.at("out/cache.tgz").is_file() && machine.at("out/log").is_file());
    // The script only looks up the GPU again, and repeats no other part.
    machine.run("out", "--seconds 10000", &[]);
    assert_eq!(machine.called().len(), 1);
}

#[test]
fn a_machine_without_a_gpu_says_so() {
    if !is_there() {
        return;
    }
    let machine = Machine::new();
    let output = machine.run("out", "", &[("NO_GPU", "1")]);
    assert!(output.status.success(), "{}", said(&output));
    assert_eq!(machine.called().len(), 1, "nothing is asked of it");
    let found = machine.found("out");
    let skipped = found.values().filter(|entry| entry["why"] == "there is no NVIDIA driver").count();
    assert!(skipped == found.len() && skipped > 30, "{found:?}");
    // Once there is a GPU, the parts run.
    machine.run("out", "--seconds 10000 --parts speed", &[]);
    assert_eq!(machine.found("out")["speed"]["card"], "NVIDIA H200");
}

/// If a call is cut off, only the part that was running is lost. After two such calls, that part is skipped.
#[test]
fn a_call_that_is_cut_off_leaves_what_was_finished() {
    if !is_there() {
        return;
    }
    let machine = Machine::new();
    let output = machine.run("out", "--seconds 10000", &[("CUT", "kernels")]);
    assert!(!output.status.success());
    let found = machine.found("out");
    for (part, state) in [("compile", "ok"), ("parity, small", "ok"), ("speed", "ok"), ("kernels", "begun")] {
        assert_eq!(found[part]["state"], state, "{found:?}");
    }
    assert!(!found.contains_key("judge: norm"));
    // The results and kernels are carried to another machine together with the binaries.
    for name in ["found.json", "cache.tgz"] {
        fs::copy(machine.at("out").join(name), machine.at("binaries").join(name)).unwrap();
    }
    machine.called();
    machine.run("elsewhere", "--seconds 10000", &[("CUT", "kernels")]);
    let called = machine.called();
    assert!(called.len() == 2 && called[1].starts_with("kernels"), "{called:?}");
    let output = machine.run("elsewhere", "--seconds 10000", &[("CUT", "kernels")]);
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    let found = machine.found("elsewhere");
    assert_eq!((&found["kernels"]["state"], &found["memory"]["state"]), (&"failed".into(), &"ok".into()));
    assert!(said(&output).contains("two calls were cut off in it"));
    // For another commit nothing has been measured yet.
    machine.file("binaries/commit", "4567def\n");
    machine.called();
    machine.run("elsewhere", "--seconds 10000 --parts speed", &[]);
    assert_eq!(machine.called().len(), 3);
}

/// A part only starts if enough time for its limit is left. Every part fits into a call of nine minutes.
#[test]
fn a_slice_has_what_fits() {
    if !is_there() {
        return;
    }
    let machine = Machine::new();
    let list = String::from_utf8(machine.run("out", "--list", &[]).stdout).unwrap();
    let limit = |line: &str| line.split_whitespace().next().unwrap().parse::<u64>().unwrap();
    assert!(list.lines().count() > 30 && list.lines().all(|line| limit(line) <= 530), "{list}");
    let output = machine.run("out", "--seconds 200", &[]);
    assert!(output.status.success());
    let found = machine.found("out");
    assert!(found.contains_key("compile") && !found.contains_key("parity"), "{found:?}");
    assert!(said(&output).contains("parts are left for the next call: parity, "), "{}", said(&output));
    machine.run("out", "--seconds 10000", &[]);
    assert_eq!(machine.found("out")["parity"]["state"], "ok");
}

/// Runs Python code in the folder of the scripts.
fn python(code: &str) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/gpu");
    let output = Command::new("python3").args(["-B", "-c", code]).env("PYTHONPATH", folder).output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
}

/// A program that never ends is killed at its limit, together with the processes that it has started.
#[test]
fn a_part_is_ended_at_its_limit() {
    if is_there() {
        python(
            "import os, slices\n\
             call = object.__new__(slices.Call)\n\
             call.say = print\n\
             line = ['sh', '-c', 'echo begun; sleep 1000 & sleep 1000']\n\
             assert call.execute(line, os.environ, 0.2) == (None, ['begun\\n'])\n\
             assert call.execute(['sh', '-c', 'exit 3'], os.environ, 60) == (3, [])\n\
             assert call.execute(['/nowhere'], os.environ, 60)[0] == 127\n",
        );
    }
}

/// A micro-batch that runs out of memory is reported if that is expected. Otherwise, it has an exit code of its own.
#[test]
fn running_out_of_memory_can_be_expected() {
    if is_there() {
        python(
            "import sys, types\n\
             torch = types.ModuleType('torch')\n\
             torch.__version__ = '2'\n\
             torch.cuda = types.SimpleNamespace(OutOfMemoryError=MemoryError, is_available=lambda: True, get_device_name=str)\n\
             sys.modules['torch'] = torch\n\
             import pytorch\n\
             def train(options, micro_batch): raise RuntimeError('CUDA out of memory')\n\
             written = []\n\
             pytorch.train, pytorch.write = train, lambda _, found: written.append(found)\n\
             sys.argv = ['pytorch.py', 'train', '--micro-batch', '16', '--budget', '1000']\n\
             assert pytorch.main() == pytorch.OUT_OF_MEMORY and not written\n\
             sys.argv += ['--expect-out-of-memory']\n\
             assert pytorch.main() == 0 and written[0]['does_not_fit'] == 16 and written[0]['budget_bytes'] == 1000\n\
             pytorch.train = lambda *_: {'losses': []}\n\
             assert pytorch.main() == 1\n",
        );
    }
}

/// The search for PyTorch's largest micro-batch returns a size within a sixteenth of the maximum. If the needed bytes
/// are known, it takes few attempts.
#[test]
fn the_largest_micro_batch_is_found_in_few_tries() {
    if is_there() {
        python(
            "from pytorch import Search\n\
             for fixed, each, start, is_told in [(f, e, s, t) for f in [0, 30, 900, 999] for e in [1, 2, 7, 300] for s in [1, 16, 64] for t in [True, False]]:\n\
             \x20   search, tries = Search(start, 1000, 16), 0\n\
             \x20   while not search.is_over():\n\
             \x20       size = search.next()\n\
             \x20       taken = fixed + size * each\n\
             \x20       search.tried(size, ({'reserved_bytes': taken} if is_told else {}) if taken <= 1000 else None)\n\
             \x20       tries += 1\n\
             \x20   most = (1000 - fixed) // each\n\
             \x20   assert search.fitting <= most < search.too_large, (fixed, each, start)\n\
             \x20   assert search.too_large - search.fitting <= max(1, search.fitting // 16) or most == 0\n\
             \x20   assert tries <= (8 if is_told else 16), (fixed, each, start, is_told, tries)\n",
        );
    }
}

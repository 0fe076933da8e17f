//! A long run on four ranks that is killed repeatedly.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::Draw;

/// A run that saves after every step and evaluates now and then, on two pipeline stages of two data ranks each.
const RUN: &str = r#"
steps = 1000000000
device = "cpu"
threads = 1
[model.gpt]
layers = 2
heads = 2
width = 16
dropout = 0.1
[data]
path = "DIR/text.txt"
vocabulary = 256
cache = "DIR/cache"
[step]
batch = 8
micro_batches = 2
sequence = 16
[mesh]
data = 2
pipeline = 2
[pipeline]
schedule = "zb-h1"
[learning_rate]
shape = "constant"
warmup_steps = 0
[evaluation]
every = 50
[checkpoints]
every = 1
"#;

/// Returns the losses and validation losses in a run's metrics, by step. Rows that a kill has cut off are skipped. A
/// repeated step has two rows, which must be equal.
fn rows(folder: &Path) -> BTreeMap<(u64, &'static str), String> {
    let text = std::fs::read_to_string(folder.join("metrics.jsonl")).unwrap_or_default();
    let mut rows = BTreeMap::new();
    for row in text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok()) {
        let step = row["step"].as_u64().expect("a row names its step");
        for key in ["loss", "gradient_norm", "val_loss"] {
            let Some(value) = row.get(key).map(Value::to_string) else { continue };
            let before = rows.insert((step, key), value.clone());
            assert!(
                before.as_ref().is_none_or(|before| *before == value),
                "step {step}, done again: {row}, not {before:?}"
            );
        }
    }
    rows
}

/// Returns the peak memory of a process in KiB, or 0 if the system does not report it.
fn most_memory(process: &Child) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", process.id())).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap_or("0 kB");
    line.trim().trim_end_matches(" kB").parse().unwrap_or(0)
}

pub fn a_run_that_is_killed_again_and_again_is_the_same_run() {
    let minutes = std::env::var("GAPLESS_SOAK").ok().and_then(|minutes| minutes.parse::<f64>().ok());
    // By default, there are a few kills at random moments within a second. If minutes are given, there is one kill
    // per minute.
    let (kills, longest) =
        minutes.map_or((3, Duration::from_secs(1)), |it| (it.ceil() as usize, Duration::from_mins(1)));
    let place = tempfile::tempdir().unwrap();
    let text = place.path().join("text.txt");
    std::fs::write(&text, "to be or not to be, that is the question\n".repeat(500)).unwrap();
    let file = place.path().join("run.toml");
    std::fs::write(&file, RUN.replace("DIR", &place.path().display().to_string())).unwrap();
    let out = |name: &str| -> PathBuf { place.path().join(name) };
    let start = |name: &str, arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_gapless"));
        command.arg("train").arg(&file).arg("--out").arg(out(name)).args(arguments);
        command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
    };

    let (mut draw, mut memory) = (Draw::new(), Vec::new());
    for kill in 0..kills {
        let is_begun = out("killed/checkpoints").exists();
        let mut run = start("killed", if is_begun { &["--resume"] } else { &[] });
        let begun = Instant::now();
        // The first kill waits until there is a checkpoint to resume from.
        while (kill == 0 && !out("killed/checkpoints/step-00000002").exists())
            && begun.elapsed() < Duration::from_secs(60)
        {
            std::thread::sleep(Duration::from_millis(5));
        }
        let wait = if minutes.is_some() { longest } else { Duration::from_millis(draw.below(1000) as u64) };
        std::thread::sleep(wait.saturating_sub(begun.elapsed()));
        memory.push(most_memory(&run));
        assert_eq!(run.try_wait().unwrap(), None, "it has ended by itself: {:?}", run.wait_with_output());
        run.kill().unwrap();
        run.wait().unwrap();
    }
    let killed = rows(&out("killed"));
    let done = killed.keys().map(|&(step, _)| step).max().expect("some steps were done") + 1;
    let straight = start("straight", &["--set", &format!("steps={done}"), "--set", "checkpoints.every=0"]);
    let output = straight.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let straight = rows(&out("straight"));
    for (at, value) in &killed {
        assert_eq!(straight.get(at), Some(value), "{at:?}");
    }
    let missing = straight.keys().filter(|at| !killed.contains_key(at)).count();
    println!("{kills} kills, {done} steps, {missing} rows lost with a kill; most memory of each part, KiB: {memory:?}");
}

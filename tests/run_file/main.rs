//! Run files: which run files are refused, which files a run's folder contains, and that a run from a file gives the
//! same results as the library.

mod checkpoints;
mod data;
mod evaluation;
mod guard;
mod length;
#[cfg(target_os = "linux")]
mod limits;
mod plan;
mod portable;
mod ranks;
mod reference;
mod weights;
mod wrong;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use gapless::models::{Gpt, GptConfig};
use gapless::run::{Console, ModelConfig, RunConfig, Start, train};
use gapless::{DataOptions, Dataset, Source, Trainer, VocabularyChoice};
use serde_json::Value;

/// A tiny run on bytes. The text is in the test's folder.
const TINY: &str = r#"threads = 1
steps = 4
seed = 3
device = "cpu"
[model.gpt]
layers = 1
heads = 2
width = 16

[data]
path = "DIR/text.txt"
vocabulary = 256
validation_every = 8
cache = "DIR/cache"

[step]
batch = 4
micro_batches = 2
sequence = 16
precision = "f32"
# of all ranks

[evaluation]
every = 2

[checkpoints]
every = 2

[sample]
prompt = "to be"
tokens = 4
"#;

struct Place {
    folder: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("text.txt"), "to be or not to be, that is the question\n".repeat(200))
            .unwrap();
        let lines = "{\"prompt\": \"to be or not\", \"completion\": \" to be\"}\n{\"prompt\": \"that is\"}\n";
        std::fs::write(folder.path().join("lines.jsonl"), lines).unwrap();
        std::fs::write(folder.path().join("documents.jsonl"), "{\"text\": \"to be or not to be\"}\n".repeat(400))
            .unwrap();
        Self { folder }
    }

    fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Writes a run file with this text.
    fn file(&self, text: &str) -> PathBuf {
        let path = self.path().join("run.toml");
        std::fs::write(&path, text.replace("DIR", &self.path().display().to_string())).unwrap();
        path
    }

    fn gapless(&self, arguments: &[&str]) -> Output {
        Command::new(env!("CARGO_BIN_EXE_gapless")).current_dir(self.path()).args(arguments).output().unwrap()
    }
}

/// The rows of a run's metrics.
fn rows(metrics: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(metrics).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Returns the bits of each step's loss.
fn losses(metrics: &Path) -> Vec<(u64, u32)> {
    let loss = |row: Value| Some((row["step"].as_u64()?, (row.get("loss")?.as_f64()? as f32).to_bits()));
    rows(metrics).into_iter().filter_map(loss).collect()
}

/// Creates a tokenizer whose vocabulary has the size of that of the model in the repository.
fn tokenizer(place: &Place) -> PathBuf {
    let vocabulary = VocabularyChoice::Bpe { size: 300 };
    let options = DataOptions { vocabulary, cache: place.path().join("bpe"), ..DataOptions::default() };
    let prepared = Dataset::prepare(&Source::Path(place.path().join("text.txt")), &options).unwrap();
    prepared.folder().unwrap().join("tokenizer.json")
}

/// Three runs give the same bits: a run from a file, the same run interrupted and resumed, and the same run with the
/// library alone.
#[test]
fn a_file_is_a_run_of_the_library() {
    let place = Place::new();
    let file = place.file(TINY);
    let config = RunConfig::read(&file, &[]).unwrap();
    let whole = train(&config, &place.path().join("whole"), &Start::Anew, &mut Console::default(), |_| {}).unwrap();
    assert_eq!((whole.steps, whole.signal), (4, None));
    let expected = losses(&place.path().join("whole/metrics.jsonl"));
    assert_eq!(expected.len(), 4);

    // The same run with the library alone.
    let dataset = config.dataset().unwrap();
    let ModelConfig::Gpt(gpt) = config.model(dataset.vocabulary().size()) else { panic!("{config:?}") };
    assert_eq!(
        gpt,
        GptConfig { vocabulary: 256, sequence: 16, layers: 1, heads: 2, width: 16, ..GptConfig::default() }
    );
    let mut trainer = Trainer::new(|vb| Gpt::new(&gpt, vb), config.options()).unwrap();
    let training = dataset.training(16, 4, 3).unwrap();
    let (mut tokens, mut targets) = (vec![0; 64], vec![0; 64]);
    for &(step, bits) in &expected {
        training.fill(step - 1, 0, &mut tokens, &mut targets).unwrap();
        assert_eq!(trainer.step(&tokens, &targets).unwrap().loss.to_bits(), bits, "step {step}");
    }

    // The run takes two steps, and then two more after resuming, with the learning rates of a run of four steps.
    let file = file.display().to_string();
    let name = |name: &str| place.path().join(name).display().to_string();
    let half = place.gapless(&["train", &file, "--out", &name("half"), "--set", "learning_rate.shape=constant"]);
    assert!(half.status.success(), "{half:?}");
    let constant = ["--set", "learning_rate.shape=constant", "--set", "learning_rate.warmup_steps=0"];
    let go = |out: &str, more: &[&str]| {
        place.gapless(&[&["train", &file, "--out", &name(out)], &constant[..], more].concat())
    };
    assert!(go("cut", &["--set", "steps=2"]).status.success());
    let resumed = go("cut", &["--resume"]);
    let said = String::from_utf8_lossy(&resumed.stdout).into_owned();
    assert!(
        resumed.status.success() && said.contains("steps was 2 and is 4") && said.contains("resumed after 2 steps"),
        "{resumed:?}"
    );
    assert!(go("uncut", &[]).status.success());
    assert_eq!(losses(&place.path().join("cut/metrics.jsonl")), losses(&place.path().join("uncut/metrics.jsonl")));
}

/// Checks the contents of a run's folder, and that its run.toml can be run again.
#[test]
fn a_folder_holds_all_of_a_run() {
    let place = Place::new();
    let config = RunConfig::read(&place.file(TINY), &["checkpoints.keep_last=1".to_owned()]).unwrap();
    let out = place.path().join("run");
    train(&config, &out, &Start::Anew, &mut Console::default(), |_| {}).unwrap();
    let again = RunConfig::read(&out.join("run.toml"), &[]).unwrap();
    assert_eq!(again.model(256), config.model(256));
    assert_eq!(RunConfig { model: config.model.clone(), ..again }, config);
    let samples = std::fs::read_to_string(out.join("samples.txt")).unwrap();
    assert!(samples.starts_with("=== step 2\nto be") && samples.contains("=== step 4\nto be"), "{samples}");
    let summary: Value = serde_json::from_slice(&std::fs::read(out.join("summary.json")).unwrap()).unwrap();
    assert_eq!(summary["steps"], 4);
    assert!(summary["val_loss"].is_f64());
    assert!(std::fs::read_to_string(out.join("memory.html")).unwrap().contains("<html"));
    // If the run is resumed after its last step, it reports that no step is left, and keeps its summary.
    train(&config, &out, &Start::Resume, &mut Console::default(), |_| {}).unwrap();
    let after: Value = serde_json::from_slice(&std::fs::read(out.join("summary.json")).unwrap()).unwrap();
    assert_eq!(after, summary);
    assert!(std::fs::read_to_string(out.join("log.txt")).unwrap().contains("all 4 steps were done before"));
    // The log has the printed lines, and the planner's command can read the plan.
    let log = std::fs::read_to_string(out.join("log.txt")).unwrap();
    assert!(log.contains("training tokens") && log.contains("step     4 validation loss"), "{log}");
    let output = place.gapless(&["plan", "run/plan.csv", "--json"]);
    let planned: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(planned["lower_bound"], summary["lower_bound_bytes"], "{planned}");
    let names: Vec<_> =
        std::fs::read_dir(out.join("checkpoints")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["step-00000004"]);
}

/// The metrics of a mixture contain its routing. The busiest expert has at least the mean load and at most the whole
/// load. Dropped choices are counted.
#[test]
fn rows_of_a_mixture_say_where_tokens_go() {
    let place = Place::new();
    let moe = "[model.moe.llama]\nlayers = 3\nheads = 2\nkv_heads = 1\nwidth = 16\nhidden = 32\n[model.moe.router]\nexperts = 4\n\
        top_k = 2\ncapacity = { factor = 0.5, drop = \"last\" }\n[model.moe]\nexpert_hidden = 8";
    let text = TINY.replace("[model.gpt]\nlayers = 1\nheads = 2\nwidth = 16", moe);
    let config = RunConfig::read(&place.file(&text), &[]).unwrap();
    train(&config, &place.path().join("run"), &Start::Anew, &mut Console::default(), |_| {}).unwrap();
    let mut steps = rows(&place.path().join("run/metrics.jsonl"));
    steps.retain(|row| row.get("loss").is_some());
    assert_eq!(steps.len(), 4);
    for row in steps {
        let layers =
            |key: &str| -> Vec<f64> { row[key].as_array().unwrap().iter().filter_map(|x| x.as_f64()).collect() };
        let (load, dropped) = (layers("expert_load"), layers("expert_dropped"));
        assert!(load.len() == 3 && load.iter().all(|most| (1.0..=2.0).contains(most)), "{row}");
        // 64 tokens choose two experts each, and the experts have room for half of these choices.
        let part = |key: &str| row[key].as_f64().unwrap();
        let (loss, likelihood, balance) = (part("loss"), part("loss_likelihood"), part("loss_balance"));
        // The balance loss is at least 0.02 in each of three layers, up to f32 rounding.
        assert!(balance >= 0.06 - 1e-6 && (likelihood + balance - loss).abs() < 1e-5, "{row}");
        assert!(dropped.len() == 3 && dropped.iter().all(|&choices| (64.0..128.0).contains(&choices)), "{row}");
    }
}

/// The run files that `init` prints can be run once their paths are set.
#[test]
fn printed_files_are_runs() {
    let place = Place::new();
    for name in ["tiny", "small-gpt", "llama", "moe", "budget", "pipeline", "lora", "sft", "dpo"] {
        let text = String::from_utf8(place.gapless(&["init", name]).stdout).unwrap();
        let text = text.replace("path = \"text\"", "path = \"DIR/text.txt\"").replace("conversations", "DIR/lines");
        let text = text.replace("preferences.jsonl", "DIR/lines.jsonl");
        let config = RunConfig::read(&place.file(&text), &[]).unwrap();
        let _ = config.options();
    }
    let budget = RunConfig::read(&place.file(TINY), &["memory.budget=1000000".to_owned()]).unwrap().options();
    assert_eq!(budget.step.memory.budget, Some(1_000_000));
}

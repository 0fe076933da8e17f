//! Runs that are files: what is refused, what a run's folder holds, and that a file's run is the library's.

mod reference;
mod wrong;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use gapless::models::hf::{Adapter, Folder};
use gapless::models::{Gpt, GptConfig};
use gapless::run::{Console, Ended, ModelConfig, RateConfig, RateShape, RunConfig, RunError, Start, train};
use gapless::{Checkpoint, DataOptions, Dataset, Recompute, Source, Trainer, VocabularyChoice};

/// A tiny run on bytes; the folder is where its text is.
const TINY: &str = r#"
steps = 4
seed = 3

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
device = "cpu"
threads = 1

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
        Self { folder }
    }

    fn path(&self) -> &Path {
        self.folder.path()
    }

    /// A file of a run, by its text.
    fn file(&self, text: &str) -> std::path::PathBuf {
        let path = self.path().join("run.toml");
        std::fs::write(&path, text.replace("DIR", &self.path().display().to_string())).unwrap();
        path
    }

    fn gapless(&self, arguments: &[&str]) -> Output {
        Command::new(env!("CARGO_BIN_EXE_gapless")).current_dir(self.path()).args(arguments).output().unwrap()
    }
}

fn losses(metrics: &Path) -> Vec<(u64, u32)> {
    let text = std::fs::read_to_string(metrics).unwrap();
    let rows = text.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    let loss = |row: serde_json::Value| Some((row["step"].as_u64()?, (row.get("loss")?.as_f64()? as f32).to_bits()));
    rows.filter_map(loss).collect()
}

/// By file, broken off and resumed, and by the library alone: the same bits.
#[test]
fn a_file_is_a_run_of_the_library() {
    let place = Place::new();
    let file = place.file(TINY);
    let config = RunConfig::read(&file, &[]).unwrap();
    let whole = train(&config, &place.path().join("whole"), &Start::Anew, &mut Console::default(), |_| {}).unwrap();
    assert_eq!((whole.steps, whole.signal), (4, None));
    let expected = losses(&place.path().join("whole/metrics.jsonl"));
    assert_eq!(expected.len(), 4);

    // The same, with what the library has.
    let dataset = config.dataset().unwrap();
    let ModelConfig::Gpt(gpt) = config.model(dataset.vocabulary().size()) else { panic!("{config:?}") };
    assert_eq!(
        gpt,
        GptConfig { vocabulary: 256, sequence: 16, layers: 1, heads: 2, width: 16, ..GptConfig::default() }
    );
    let mut trainer = Trainer::new(|vb| Gpt::new(&gpt, vb), config.options().unwrap()).unwrap();
    let training = dataset.training(16, 4, 3).unwrap();
    let (mut tokens, mut targets) = (vec![0; 64], vec![0; 64]);
    for &(step, bits) in &expected {
        training.fill(step, 0, &mut tokens, &mut targets).unwrap();
        assert_eq!(trainer.step(&tokens, &targets).unwrap().loss.to_bits(), bits, "step {step}");
    }

    // Two steps, and two more. The learning rate is that of four steps all along.
    let file = file.display().to_string();
    let name = |name: &str| place.path().join(name).display().to_string();
    let half = place.gapless(&["train", &file, "--out", &name("half"), "--set", "learning_rate.shape=constant"]);
    assert!(half.status.success(), "{half:?}");
    let short = [
        "train",
        &file,
        "--out",
        &name("cut"),
        "--set",
        "learning_rate.shape=constant",
        "--set",
        "learning_rate.warmup_steps=0",
    ];
    let whole = [
        "train",
        &file,
        "--out",
        &name("uncut"),
        "--set",
        "learning_rate.shape=constant",
        "--set",
        "learning_rate.warmup_steps=0",
    ];
    assert!(place.gapless(&[&short[..], &["--set", "steps=2"]].concat()).status.success());
    let resumed = place.gapless(&[&short[..], &["--resume"]].concat());
    let said = String::from_utf8_lossy(&resumed.stdout).into_owned();
    assert!(
        resumed.status.success() && said.contains("steps was 2 and is 4") && said.contains("resumed after 2 steps"),
        "{resumed:?}"
    );
    assert!(place.gapless(&whole).status.success());
    assert_eq!(losses(&place.path().join("cut/metrics.jsonl")), losses(&place.path().join("uncut/metrics.jsonl")));
}

/// Answers to prompts, and documents that do not see each other: they are learned, a file's run is the library's, and it resumes.
#[test]
fn answers_and_isolated_documents_are_learned() {
    let place = Place::new();
    let questions = ["to be", "or not", "that is", "the"].map(|word| {
        format!("{{\"prompt\": \"{word}?\", \"completion\": \" {}\"}}\n", word.chars().rev().collect::<String>())
    });
    std::fs::write(place.path().join("lines.jsonl"), questions.concat().repeat(8)).unwrap();
    for (from, to) in [
        ("text.txt\"", "lines.jsonl\"\nformat = \"prompt\""),
        ("vocabulary = 256", "vocabulary = 256\nisolate_documents = true"),
    ] {
        let file = place.file(&TINY.replacen(from, to, 1));
        let settings = ["steps=60", "learning_rate.peak=1e-2", "sample.temperature=0.0"].map(str::to_owned);
        let config = RunConfig::read(&file, &settings).unwrap();
        let out = place.path().join(if config.data.has_documents() && to.contains("format") {
            "answers"
        } else {
            "isolated"
        });
        let whole = train(&config, &out, &Start::Anew, &mut Console::default(), |_| {}).unwrap();
        let rows = losses(&out.join("metrics.jsonl"));
        let (first, last) = (f32::from_bits(rows[0].1), whole.final_loss.unwrap());
        assert!(last < 0.6 * first, "{to}: {first} became {last}");
        assert!(whole.val_loss.is_some_and(|loss| loss < 0.7 * first), "{to}: {whole:?}");
        // The same in two halves.
        let cut = place.path().join("cut");
        let half = RunConfig { steps: 30, ..config.clone() };
        let constant = |config: &RunConfig| RunConfig {
            learning_rate: RateConfig { shape: RateShape::Constant, warmup_steps: 0, ..config.learning_rate },
            ..config.clone()
        };
        train(&constant(&half), &cut, &Start::Anew, &mut Console::default(), |_| {}).unwrap();
        train(&constant(&config), &cut, &Start::Resume, &mut Console::default(), |_| {}).unwrap();
        let uncut = place.path().join("uncut");
        train(&constant(&config), &uncut, &Start::Anew, &mut Console::default(), |_| {}).unwrap();
        assert_eq!(losses(&cut.join("metrics.jsonl")), losses(&uncut.join("metrics.jsonl")), "{to}");
        [cut, uncut].iter().for_each(|folder| std::fs::remove_dir_all(folder).unwrap());
    }
}

/// What a run's folder holds, and that its own file is a run again.
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
    let summary: serde_json::Value = serde_json::from_slice(&std::fs::read(out.join("summary.json")).unwrap()).unwrap();
    assert_eq!(summary["steps"], 4);
    assert!(summary["val_loss"].is_f64());
    assert!(std::fs::read_to_string(out.join("memory.html")).unwrap().contains("<html"));
    // Resumed behind its last step, it says so and leaves its figures alone.
    train(&config, &out, &Start::Resume, &mut Console::default(), |_| {}).unwrap();
    let after: serde_json::Value = serde_json::from_slice(&std::fs::read(out.join("summary.json")).unwrap()).unwrap();
    assert_eq!(after, summary);
    assert!(std::fs::read_to_string(out.join("log.txt")).unwrap().contains("all of its 4 steps were done before"));
    // The log has what was said, and the plan is one for the planner's own command.
    let log = std::fs::read_to_string(out.join("log.txt")).unwrap();
    assert!(log.contains("training tokens") && log.contains("step     3 validation loss"), "{log}");
    let output = place.gapless(&["plan", "run/plan.csv", "--json"]);
    let planned: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(planned["lower_bound"], summary["lower_bound_bytes"], "{planned}");
    let names: Vec<_> =
        std::fs::read_dir(out.join("checkpoints")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["step-00000004"]);
}

/// Rows of a mixture say where its tokens went: at least the mean to the busiest expert, at most all; and what found no room.
#[test]
fn rows_of_a_mixture_say_where_tokens_go() {
    let place = Place::new();
    let moe = "[model.moe.llama]\nlayers = 3\nheads = 2\nkv_heads = 1\nwidth = 16\nhidden = 32\n[model.moe.router]\nexperts = 4\n\
        top_k = 2\ncapacity = { factor = 0.5, drop = \"last\" }\n[model.moe]\nexpert_hidden = 8";
    let text = TINY.replace("[model.gpt]\nlayers = 1\nheads = 2\nwidth = 16", moe);
    let config = RunConfig::read(&place.file(&text), &[]).unwrap();
    train(&config, &place.path().join("run"), &Start::Anew, &mut Console::default(), |_| {}).unwrap();
    let rows = std::fs::read_to_string(place.path().join("run/metrics.jsonl")).unwrap();
    let rows = rows.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    let steps: Vec<_> = rows.filter(|row| row.get("loss").is_some()).collect();
    assert_eq!(steps.len(), 4);
    for row in steps {
        let layers =
            |key: &str| -> Vec<f64> { row[key].as_array().unwrap().iter().filter_map(|x| x.as_f64()).collect() };
        let (load, dropped) = (layers("expert_load"), layers("expert_dropped"));
        assert!(load.len() == 3 && load.iter().all(|most| (1.0..=2.0).contains(most)), "{row}");
        // 64 tokens choose two, and there is room for half.
        assert!(dropped.len() == 3 && dropped.iter().all(|&choices| (64.0..128.0).contains(&choices)), "{row}");
    }
}

/// A tokenizer of as many tokens as the model in the repository knows.
fn tokenizer(place: &Place) -> PathBuf {
    let vocabulary = VocabularyChoice::Bpe { size: 300 };
    let options = DataOptions { vocabulary, cache: place.path().join("bpe"), ..DataOptions::default() };
    let prepared = Dataset::prepare(&Source::Path(place.path().join("text.txt")), &options).unwrap();
    prepared.folder().unwrap().join("tokenizer.json")
}

/// A folder in; the same folder with other weights out, or an adapter.
#[test]
fn trained_weights_leave_in_the_form_that_they_came_in() {
    let place = Place::new();
    let base = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/evidence/hf/models/mixtral_bf16/checkpoint");
    let model = format!("[model]\nfolder = {base:?}");
    let text = TINY.replace("[model.gpt]\nlayers = 1\nheads = 2\nwidth = 16", &model);
    let text = text.replace("vocabulary = 256", &format!("tokenizer = {:?}", tokenizer(&place)));
    let go = |text: &str, out: &str| {
        let out = place.path().join(out);
        let config = RunConfig::read(&place.file(text), &[]).unwrap();
        train(&config, &out, &Start::Anew, &mut Console::default(), |_| {}).unwrap();
        (Trainer::new(|vb| Folder::open(&base).unwrap().model(vb), config.options().unwrap()).unwrap(), out)
    };
    let (mut trainer, out) = go(&text, "whole");
    let name = trainer.parameter_names().find(|name| name.contains("q_proj")).unwrap().to_owned();
    let mut weights = |folder: &Path| {
        Folder::open(folder).unwrap().load(&mut trainer).unwrap();
        trainer.tensor(&name).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap()
    };
    let before = weights(&base);
    assert_ne!(weights(&out.join("model")), before);

    let lora = "[trainable.lora]\nrank = 2\ntargets = [\"q_proj\"]\n[data]";
    let (mut trainer, out) = go(&text.replace("[data]", lora), "adapter");
    let (folder, adapter) = (Folder::open(&base).unwrap(), Adapter::open(out.join("adapter")).unwrap());
    folder.load(&mut trainer).unwrap();
    adapter.load(&folder, &mut trainer).unwrap();
    assert!(!out.join("model").exists());
}

/// The command, given a run's folder or a checkpoint, writes what the run did when it was there: of a model of one rank and of a
/// pipeline, in bf16, of bytes and of trained tokens, and of adapters.
#[test]
fn what_was_trained_continues_texts() {
    let place = Place::new();
    let base = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/evidence/hf/models/mixtral_bf16/checkpoint");
    let tokenizer = format!("tokenizer = {:?}", tokenizer(&place));
    let model = format!("[model]\nfolder = {base:?}\n[trainable.lora]\nrank = 2\ntargets = [\"q_proj\"]");
    let adapter = TINY.replace("[model.gpt]\nlayers = 1\nheads = 2\nwidth = 16", &model);
    let ranks = "threads = 1\npipeline_ranks = 2\ndtype = \"bf16\"";
    let pipeline = TINY.replace("layers = 1", "layers = 2").replace("threads = 1", ranks);
    for (name, text) in [
        ("bytes", TINY.to_owned()),
        ("pipeline", pipeline.replace("vocabulary = 256", "vocabulary = 280")),
        ("adapter", adapter.replace("vocabulary = 256", &tokenizer)),
    ] {
        let assignments = ["learning_rate.peak=0.03".to_owned(), "checkpoints.keep_last=2".to_owned()];
        let config = RunConfig::read(&place.file(&text), &assignments).unwrap();
        train(&config, &place.path().join(name), &Start::Anew, &mut Console::default(), |_| {}).unwrap();
        let samples = std::fs::read_to_string(place.path().join(name).join("samples.txt")).unwrap();
        let (second, last) = samples.strip_prefix("=== step 2\n").unwrap().split_once("=== step 4\n").unwrap();
        for (of, expected) in [(name.to_owned(), last), (format!("{name}/checkpoints/step-00000002"), second)] {
            let asked = ["sample", &of, "--prompt", "to be", "--tokens", "4", "--seed", "3", "--ignore-eos"];
            let output = place.gapless(&asked);
            // What is written as it comes leaves out a letter that has only begun.
            let expected = expected.trim_end_matches(['\u{fffd}', '\n']);
            assert_eq!(String::from_utf8_lossy(&output.stdout).trim_end_matches('\n'), expected, "{of}: {output:?}");
        }
    }
    let output = place.gapless(&["sample", "bytes", "--prompt", "to be", "--chat"]);
    assert!(output.status.code() == Some(2) && String::from_utf8_lossy(&output.stderr).contains("chat template"));
}

/// Groups, averages, cut gradients, terms of the loss and a guard: resumed, the same steps are left out, to the same bits.
#[test]
fn steps_far_above_the_others_are_left_out() {
    let place = Place::new();
    let more = r#"
[loss]
label_smoothing = 0.1
z_loss = 1e-4

[guard]
norm = 1.1
loss = 0.2
window = 4
patience = 30

[optimizer]
average = 0.9
max_value = 1.0

[[optimizer.groups]]
names = ["wte", "*.bias"]
weight_decay = 0.0

[[optimizer.groups]]
names = ["h.0"]
name = "lion"
learning_rate = 0.3

[sample]"#;
    let file = place.file(&TINY.replace("[sample]", more));
    // It learns at first, and then takes steps that are too long.
    let assignments = [
        "steps=30",
        "learning_rate.peak=0.1",
        "learning_rate.shape=constant",
        "learning_rate.warmup_steps=4",
        "checkpoints.every=0",
    ];
    let read = |last: &str| {
        let assignments = assignments.iter().chain([&last]).map(|&text| text.to_owned()).collect::<Vec<_>>();
        RunConfig::read(&file, &assignments).unwrap()
    };
    let out = |name: &str| place.path().join(name);
    let run =
        |config: &RunConfig, name: &str, start| train(config, &out(name), &start, &mut Console::default(), |_| {});
    let go = |last: &str, name: &str, start| run(&read(last), name, start);
    go("seed=3", "whole", Start::Anew).unwrap();
    go("steps=17", "parts", Start::Anew).unwrap();
    go("seed=3", "parts", Start::Resume).unwrap();
    let rows = |name: &str| std::fs::read_to_string(out(name).join("metrics.jsonl")).unwrap();
    let skipped = |rows: String| -> Vec<u64> {
        let rows = rows.lines().map(|row| serde_json::from_str::<serde_json::Value>(row).unwrap()).collect::<Vec<_>>();
        let skipped = rows.iter().filter(|row| row["skipped"] == true);
        skipped.map(|row| row["step"].as_u64().unwrap()).collect()
    };
    assert!(skipped(rows("whole")).len() > 2, "{}", rows("whole"));
    assert_eq!(skipped(rows("whole")), skipped(rows("parts")));
    assert_eq!(losses(&out("whole").join("metrics.jsonl")), losses(&out("parts").join("metrics.jsonl")));
    // The averages are another model than the weights.
    let sampled = |more: &[&str]| {
        let asked = [&["sample", "whole", "--prompt", "to", "--tokens", "20", "--temperature", "0"], more].concat();
        let output = place.gapless(&asked);
        assert!(output.status.success(), "{output:?}");
        output.stdout
    };
    assert_ne!(sampled(&["--average"]), sampled(&[]));
    // Too many in a row end it; what there is of it can be used.
    let error = go("guard.patience=1", "ended", Start::Anew).unwrap_err();
    assert!(matches!(error, RunError::Spikes { skipped: 1, .. }), "{error}");

    // Or take it back to the checkpoint from before them, and on with other data, twice; gone on with, it goes the same way again.
    let mut back = read("checkpoints.every=5");
    (back.guard.patience, back.guard.rollbacks) = (2, 2);
    let rows_of = |start| {
        let error = run(&back, "back", start).unwrap_err();
        assert!(matches!(error, RunError::Spikes { skipped: 2, .. }), "{error}");
        losses(&out("back").join("metrics.jsonl"))
    };
    let rows = rows_of(Start::Anew);
    let returns: Vec<_> = rows.windows(2).filter(|pair| pair[1].0 <= pair[0].0).map(|pair| pair[1]).collect();
    assert!(matches!(*returns, [(5, one), (5, two)] if one != two && ![one, two].contains(&rows[5].1)), "{rows:?}");
    assert_eq!(rows_of(Start::Resume), [&rows[..], &rows[5..]].concat());
    let plain = place.file(TINY);
    train(&RunConfig::read(&plain, &[]).unwrap(), &out("plain"), &Start::Anew, &mut Console::default(), |_| {})
        .unwrap();
    let output = place.gapless(&["sample", "plain", "--prompt", "to", "--average"]);
    assert!(
        output.status.code() == Some(2) && String::from_utf8_lossy(&output.stderr).contains("average/"),
        "{output:?}"
    );
}

/// Sources of a mixture have the windows that their weights say, with one vocabulary that is trained on all of them, and a run goes on in
/// the same windows.
#[test]
fn sources_are_mixed_by_weight() {
    let place = Place::new();
    let folder = place.path();
    std::fs::write(folder.join("letters.txt"), "XYZZY YXZ ZZZY XY\n".repeat(300)).unwrap();
    let mix = "vocabulary = 280\nmix = [{ path = \"DIR/letters.txt\", weight = 0.25 }]";
    let file = place.file(&TINY.replace("vocabulary = 256", mix));
    let read = |steps: &str| RunConfig::read(&file, &[steps.to_owned()]).unwrap();
    let dataset = read("steps=4").dataset().unwrap();
    assert_eq!(dataset.vocabulary().size(), 280);
    let windows = dataset.training(16, 8, 3).unwrap();
    let (mut tokens, mut targets) = (vec![0; 128], vec![0; 128]);
    let mut of_letters = 0;
    for step in 0..512 {
        windows.fill(step, 0, &mut tokens, &mut targets).unwrap();
        let is_of_letters = |ids: &&[u32]| dataset.vocabulary().decode(ids).unwrap().contains('Z');
        of_letters += tokens.chunks(16).filter(is_of_letters).count();
    }
    assert_eq!(of_letters, 1024, "a quarter of 4096");
    let validation = dataset.validation(16, 32).unwrap().unwrap();
    assert!((8..=32).contains(&validation.count()));
    let go =
        |steps, name: &str, start| train(&read(steps), &folder.join(name), &start, &mut Console::default(), |_| {});
    go("steps=4", "whole", Start::Anew).unwrap();
    go("steps=2", "parts", Start::Anew).unwrap();
    go("steps=4", "parts", Start::Resume).unwrap();
    let rows = |name: &str| losses(&folder.join(name).join("metrics.jsonl"));
    assert_eq!(rows("whole")[..2], rows("parts")[..2]);
}

/// A run that is gone on with differently: some keys may change, others not, and then nothing is touched.
#[test]
fn what_has_been_done_cannot_change() {
    let place = Place::new();
    let file = place.file(TINY);
    let out = place.path().join("run");
    let read = |assignment: &str| RunConfig::read(&file, &[assignment.to_owned()]).unwrap();
    let go = |config: &RunConfig| train(config, &out, &Start::Resume, &mut Console::default(), |_| {});
    assert!(matches!(go(&read("steps=2")), Err(RunError::NothingToResume { .. })));
    assert!(!out.exists());
    train(&read("steps=2"), &out, &Start::Anew, &mut Console::default(), |_| {}).unwrap();
    for (assignment, said) in [
        ("model.gpt.layers=2", "model.gpt.layers was 1 and is 2"),
        ("step.batch=8", "step.batch was 4 and is 8"),
        ("seed=4", "seed was 3 and is 4"),
        ("data.validation_every=4", "data.validation_every was 8 and is 4"),
        ("optimizer.beta1=0.8", "optimizer.beta1 was 0.9 and is 0.8"),
    ] {
        let error = go(&read(assignment)).unwrap_err().to_string();
        assert!(error.contains(said), "{assignment}: {error}");
    }
    let text = place.path().join("text.txt");
    std::fs::write(&text, "another text, which has other tokens\n".repeat(200)).unwrap();
    let error = go(&read("steps=3")).unwrap_err().to_string();
    assert!(error.contains("data_hash was"), "{error}");
}

/// Ranks of a file: stages train to the bits of one rank, copies to its rounding, and a run goes on with other ranks. Weights that came
/// in as a folder leave as one, though no rank has all of them.
#[test]
fn ranks_of_a_file_train_as_one() {
    let place = Place::new();
    let go = |out: &str, settings: &[&str], start: &Start| {
        let settings: Vec<String> = settings.iter().map(|&setting| setting.to_owned()).collect();
        let config = RunConfig::read(&place.file(TINY), &settings).unwrap();
        let out = place.path().join(out);
        let (mut shown, mut console) = (Vec::new(), Console::default());
        let summary = train(&config, &out, start, &mut console, |progress| shown.push(progress.done)).unwrap();
        assert_eq!(summary.steps, config.steps);
        assert_eq!(shown, (config.steps + 1 - shown.len() as u64..=config.steps).collect::<Vec<_>>());
        losses(&out.join("metrics.jsonl"))
    };
    let two_layers = "model.gpt.layers=2";
    let one = go("one", &[two_layers], &Start::Anew);
    let stages = [two_layers, "step.pipeline_ranks=2", "step.schedule=zb-h1"];
    assert_eq!(go("stages", &stages, &Start::Anew), one);
    let samples = |out: &str| std::fs::read_to_string(place.path().join(out).join("samples.txt")).unwrap();
    assert_eq!(samples("stages"), samples("one"));
    // Where the time of a step went, and of an evaluation: parts of the whole, and ranks alone wait for each other.
    for (out, parts) in [("one", 3), ("stages", 4)] {
        let rows = std::fs::read_to_string(place.path().join(out).join("metrics.jsonl")).unwrap();
        for row in rows.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap()) {
            let seconds = row["seconds"].as_object().unwrap();
            let known =
                |part: &&str| seconds.get(*part).and_then(serde_json::Value::as_f64).is_some_and(|time| time > 0.0);
            let there: Vec<&str> =
                ["forward", "backward", "update", "communication"].into_iter().filter(known).collect();
            assert_eq!(there.len(), if row.get("loss").is_some() { parts } else { 0 }, "{row}");
            let sum: f64 = there.iter().map(|part| seconds[*part].as_f64().unwrap()).sum();
            assert!(row.get("loss").is_none() || sum <= 1.0001 * seconds["step"].as_f64().unwrap(), "{row}");
            assert_eq!(known(&"evaluation"), row.get("val_loss").is_some(), "{row}");
        }
    }
    let copies = go("copies", &[two_layers, "step.data_ranks=2"], &Start::Anew);
    for (&(step, copies), &(_, one)) in copies.iter().zip(&one) {
        let (copies, one) = (f32::from_bits(copies), f32::from_bits(one));
        assert!((copies - one).abs() < 1e-4 * one, "step {step}: {copies}, not {one}");
    }
    // Two steps on one rank, and two on two.
    let constant = ["learning_rate.shape=constant", "learning_rate.warmup_steps=0"];
    let whole = go("whole", &[&constant[..], &[two_layers]].concat(), &Start::Anew);
    go("moved", &[&constant[..], &[two_layers, "steps=2"]].concat(), &Start::Anew);
    assert_eq!(go("moved", &[&constant[..], &stages].concat(), &Start::Resume), whole);

    let base = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/evidence/hf/models/mixtral_bf16/checkpoint");
    let text = TINY.replace("[model.gpt]\nlayers = 1\nheads = 2\nwidth = 16", &format!("[model]\nfolder = {base:?}"));
    let text = text.replace("vocabulary = 256", &format!("tokenizer = {:?}", tokenizer(&place)));
    for (out, ranks) in [("one folder", "pipeline_ranks = 1"), ("two stages", "pipeline_ranks = 2")] {
        let text = text.replace("micro_batches = 2", &format!("micro_batches = 2\n{ranks}"));
        let config = RunConfig::read(&place.file(&text), &[]).unwrap();
        train(&config, &place.path().join(out), &Start::Anew, &mut Console::default(), |_| {}).unwrap();
    }
    let weights = |out: &str| std::fs::read(place.path().join(out).join("model/model.safetensors")).unwrap();
    assert!(weights("one folder") == weights("two stages"));
}

/// From a checkpoint of another run, in a folder of its own: as that run went on, or otherwise.
#[test]
fn a_fork_goes_on_from_another_run() {
    let place = Place::new();
    let out = |name: &str| place.path().join(name);
    let constant = ["learning_rate.shape=constant", "learning_rate.warmup_steps=0"];
    let go = |name: &str, settings: &[&str], from: &str| {
        let settings: Vec<String> = constant.iter().chain(settings).map(|&setting| setting.to_owned()).collect();
        let config = RunConfig::read(&place.file(TINY), &settings).unwrap();
        let start = if from.is_empty() { Start::Anew } else { Start::Fork(out(from)) };
        train(&config, &out(name), &start, &mut Console::default(), |_| {})
            .map(|_| losses(&out(name).join("metrics.jsonl")))
    };
    let first = go("first", &[], "").unwrap();
    let middle = "first/checkpoints/step-00000002";
    assert_eq!(go("same", &[], middle).unwrap(), first[2..]);
    let other = go("other", &["learning_rate.peak=1e-2"], middle).unwrap();
    assert!(other[0] == first[2] && other[1] != first[3], "{other:?}, {first:?}");
    assert_eq!(go("longer", &["steps=6"], "first").unwrap().len(), 2);
    let error = go("none", &[], "first").unwrap_err();
    assert!(matches!(error, RunError::NothingLeft { done: 4, steps: 4, .. }), "{error}");
    assert!(!out("none").exists());
}

/// When a run ends before its last step, and which checkpoints are left, by what the rows say of it.
#[test]
fn evaluations_and_time_end_a_run_and_choose_its_checkpoints() {
    let place = Place::new();
    let go = |name: &str, settings: &[&str]| {
        let settings: Vec<String> = settings.iter().map(|&setting| setting.to_owned()).collect();
        let config = RunConfig::read(&place.file(TINY), &settings).unwrap();
        let out = place.path().join(name);
        let start = if out.exists() { Start::Resume } else { Start::Anew };
        let summary = train(&config, &out, &start, &mut Console::default(), |_| {}).unwrap();
        let saved = Checkpoint::list(&out.join("checkpoints")).unwrap();
        (summary, saved.iter().rev().map(|saved| saved.step).collect::<Vec<_>>())
    };
    // It learns at first, and then takes steps that are too long.
    let unstable =
        ["steps=40", "learning_rate.peak=0.3", "learning_rate.shape=constant", "learning_rate.warmup_steps=10"];
    let keep = ["checkpoints.keep_last=1", "checkpoints.keep_best=1"];
    let (summary, saved) = go("best", &[&unstable[..], &keep].concat());
    assert_eq!((summary.steps, summary.ended), (40, Ended::Complete));
    let rows = std::fs::read_to_string(place.path().join("best/metrics.jsonl")).unwrap();
    let rows = rows.lines().map(|row| serde_json::from_str::<serde_json::Value>(row).unwrap());
    let evaluations = rows.filter_map(|row| Some((row.get("val_loss")?.as_f64()?, row["step"].as_u64()? + 1)));
    let best = evaluations.min_by(|a, b| a.0.total_cmp(&b.0)).unwrap().1;
    assert!(best < 40, "the last is the best: the test shows nothing");
    assert_eq!(saved, [best, 40]);

    // Three evaluations later than the best, and not a step more when it is resumed.
    let patient = [&unstable[..], &["evaluation.patience=3"]].concat();
    let (summary, _) = go("patient", &patient);
    assert_eq!((summary.steps, summary.ended), (best + 3 * 2, Ended::NoImprovement));
    let (summary, _) = go("patient", &patient);
    assert_eq!((summary.steps, summary.ended), (best + 3 * 2, Ended::NoImprovement));

    let (_, saved) = go("often", &["checkpoints.every=0", "checkpoints.minutes=1e-9", "checkpoints.keep_last=9"]);
    assert_eq!(saved, [1, 2, 3, 4]);
    let file = place.file(TINY).display().to_string();
    let limited = ["train", &file, "--out", "limited", "--set", "max_minutes=1e-9"];
    let output = place.gapless(&limited);
    assert_eq!(output.status.code(), Some(3), "{output:?}");
    assert_eq!(place.gapless(&["train", &file, "--out", "limited", "--resume"]).status.code(), Some(0));
}

/// The printed files are runs, but for their paths.
#[test]
fn printed_files_are_runs() {
    let place = Place::new();
    for name in ["small-gpt", "llama", "moe", "budget", "pipeline", "lora", "sft"] {
        let text = String::from_utf8(place.gapless(&["init", name]).stdout).unwrap();
        let text = text.replace("path = \"text\"", "path = \"DIR/text.txt\"").replace("conversations", "DIR/lines");
        let config = RunConfig::read(&place.file(&text), &[]).unwrap();
        config.options().unwrap();
    }
    let budget = RunConfig::read(&place.file(TINY), &["memory.budget=1000000".to_owned()]).unwrap().options().unwrap();
    assert_eq!(budget.recompute.capacity(), Recompute::budget(1_000_000).capacity());
}

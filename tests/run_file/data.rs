//! Training data: answers to prompts, isolated documents, and mixtures of sources.

use gapless::run::{Console, RateConfig, RateShape, RunConfig, Start, train};
use gapless::{DataOptions, Dataset, Source, VocabularyChoice};

use crate::{Place, TINY, losses};

/// Answers to prompts and isolated documents are learned. A run from a file gives the same results as the library.
/// The run can be resumed.
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
        // The same run, interrupted and resumed in the middle.
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

/// A run on preferences learns which answer is better, reports rewards, and continues with the reference of its start.
#[test]
fn pairs_of_answers_are_learned() {
    let place = Place::new();
    let pair = |index: usize| {
        let word = ["to", "be", "or", "not"][index % 4];
        format!("{{\"prompt\": \"{word}{}?\", \"chosen\": \" yes\", \"rejected\": \" no\"}}\n", index % 7)
    };
    std::fs::write(place.path().join("lines.jsonl"), (0..32).map(pair).collect::<String>()).unwrap();
    let file = place.file(&TINY.replacen("text.txt\"", "lines.jsonl\"\nformat = \"preference\"", 1));
    let go = |steps: u64, out: &str, start: Start, more: &[&str]| {
        let fixed = ["learning_rate.peak=1e-2", "learning_rate.shape=\"constant\"", "learning_rate.warmup_steps=0"];
        let settings: Vec<String> = fixed.iter().chain(more).map(|&text| text.to_owned()).collect();
        let config = RunConfig { steps, ..RunConfig::read(&file, &settings).unwrap() };
        train(&config, &place.path().join(out), &start, &mut Console::default(), |_| {})
    };
    go(20, "whole", Start::Anew, &[]).unwrap();
    let rows = crate::rows(&place.path().join("whole/metrics.jsonl"));
    let of = |key: &str| rows.iter().filter(|row| row.get(key).is_some()).cloned().collect::<Vec<_>>();
    let (steps, evaluations) = (of("rewards"), of("val_rewards"));
    assert_eq!((steps.len(), evaluations.len()), (20, 10));
    assert_eq!(steps[0]["rewards"]["chosen"], 0.0);
    assert!((steps[0]["loss"].as_f64().unwrap() - std::f64::consts::LN_2).abs() < 1e-6, "{}", steps[0]);
    let last = evaluations.last().unwrap();
    assert!(last["val_loss"].as_f64().unwrap() < 0.5 && last["val_rewards"]["accuracy"] == 1.0, "{last}");
    // Interrupted, and resumed with the reference of the start.
    go(10, "cut", Start::Anew, &[]).unwrap();
    go(20, "cut", Start::Resume, &[]).unwrap();
    let losses = |name: &str| losses(&place.path().join(name).join("metrics.jsonl"));
    assert_eq!(losses("cut"), losses("whole"));
    let error = go(22, "cut", Start::Resume, &["evaluation.windows=2"]).unwrap_err().to_string();
    assert!(error.contains("evaluation.windows as"), "{error}");
    // Without a reference, nothing is measured.
    go(1, "orpo", Start::Anew, &["preference.loss=\"orpo\""]).unwrap();
    assert!(place.path().join("whole/reference.json").exists() && !place.path().join("orpo/reference.json").exists());
    let settings = |more: &[&str]| more.iter().map(|&text| text.to_owned()).collect::<Vec<String>>();
    for (more, expected) in [
        (settings(&["data.format=\"prompt\"", "preference.beta=0.2"]), "set data.format to \"preference\""),
        (settings(&["step.micro_batches=4"]), "2 × step.micro_batches"),
        (settings(&["preference.beta=-1"]), "preference.beta"),
    ] {
        let error = RunConfig::read(&file, &more).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

/// Each source of a mixture gets the share of windows that its weight states. All sources share one vocabulary, which
/// is trained on all of them. A resumed run continues with the same windows.
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

/// Data that consists of ids needs no tokenizer, and the vocabulary may be small. If an id is outside of a model
/// folder's vocabulary, the data is refused before anything is written.
#[test]
fn ids_are_trained_on_as_the_model_knows_them() {
    let place = Place::new();
    let ids = |name: &str, vocabulary: u16| {
        let bytes: Vec<u8> =
            (0..4000u32).flat_map(|i| ((i * i % u32::from(vocabulary)) as u16).to_le_bytes()).collect();
        std::fs::write(place.path().join(name), bytes).unwrap();
    };
    ids("few.bin", 65);
    ids("many.bin", 500);
    let silent = TINY.replace("\"to be\"", "\"\"");
    let few = silent.replace("text.txt", "few.bin").replace("vocabulary = 256", "vocabulary = 65");
    let go = |text: &str, out: &str| {
        let config = RunConfig::read(&place.file(text), &[]).map_err(|error| error.to_string())?;
        train(&config, &place.path().join(out), &Start::Anew, &mut Console::default(), |_| {})
            .map_err(|error| error.to_string())
    };
    go(&few, "few").unwrap();
    assert!(go(&silent.replace("= 256", "= 65"), "text").unwrap_err().contains("are fewer than the 256 bytes"));

    // A model folder without a tokenizer.
    let base =
        std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/evidence/hf/models/mixtral_bf16/checkpoint");
    assert!(!base.join("tokenizer.json").exists());
    let model = format!("[model]\nfolder = {base:?}");
    let folder =
        silent.replace("[model.gpt]\nlayers = 1\nheads = 2\nwidth = 16", &model).replace("vocabulary = 256\n", "");
    let known = gapless::models::hf::Config::read(&base).unwrap().vocabulary();
    assert!((65..500).contains(&known));
    go(&folder.replace("text.txt", "few.bin"), "folder").unwrap();
    let opened = gapless::run::TrainedRun::open(&place.path().join("folder")).unwrap();
    assert_eq!(opened.vocabulary.size(), known);
    assert!(go(&folder, "text").unwrap_err().contains("there is no tokenizer"));
    assert!(go(&folder.replace("text.txt", "many.bin"), "many").unwrap_err().contains("is outside the vocabulary of"));
    // The tokenizer has more tokens than the model, and the data contains one of the additional tokens.
    let larger = VocabularyChoice::Bpe { size: 700 };
    let text: String = (0..800).map(|i| format!("{} and {}\n", i * i, (i * 7919) % 1000)).collect();
    std::fs::write(place.path().join("numbers.txt"), text).unwrap();
    let options = DataOptions { vocabulary: larger, cache: place.path().join("larger"), ..DataOptions::default() };
    let prepared = Dataset::prepare(&Source::Path(place.path().join("numbers.txt")), &options).unwrap();
    assert!(prepared.largest_token() as usize >= known);
    let tokenizer = format!("text.txt\"\ntokenizer = {:?}", prepared.folder().unwrap().join("tokenizer.json"));
    let error = go(&folder.replace("text.txt\"", &tokenizer.replace("text.txt", "numbers.txt")), "larger").unwrap_err();
    assert!(error.contains(&format!("has {known} tokens")), "{error}");
    assert!(!place.path().join("larger/run.toml").exists() && !place.path().join("many").exists());
}

/// Checks the table in docs/runs.md of the ids for a text under several options.
#[test]
fn the_ids_in_the_docs_are_those_of_the_options() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let tokenizer = root.join("tests/evidence/hf/tokenizers/sentencepiece_llama2/tokenizer.json");
    let place = Place::new();
    std::fs::write(place.path().join("text.txt"), "hi</s>").unwrap();
    let docs = std::fs::read_to_string(root.join("docs/runs.md")).unwrap();
    let section = docs.split("| options | ids |\n|---|---|\n").nth(1).unwrap();
    let rows: Vec<_> = section.lines().take_while(|line| line.starts_with('|')).collect();
    assert_eq!(rows.len(), 4);
    for row in rows {
        let cells: Vec<&str> = row.split('|').map(|cell| cell.trim().trim_matches('`')).collect();
        let options = if cells[1] == "none" { "" } else { cells[1] };
        let data = format!("tokenizer = {tokenizer:?}\n{options}");
        let text = TINY.replace("vocabulary = 256", &data).replace("validation_every = 8", "validation_every = 0");
        let dataset = RunConfig::read(&place.file(&text), &[]).unwrap().dataset().unwrap();
        let length = dataset.training_tokens() as usize - 1;
        let (mut inputs, mut targets) = (vec![0; length], vec![0; length]);
        dataset.training(length, 1, 0).unwrap().fill(0, 0, &mut inputs, &mut targets).unwrap();
        inputs.extend(targets.last());
        let ids: Vec<String> = inputs.iter().map(u32::to_string).collect();
        assert_eq!(ids.join(" "), cells[2], "{row}");
    }
}

/// `eval` reads data like `train`: documents of .jsonl lines and folders, and ids of the given width.
#[test]
fn data_is_measured_as_it_is_trained_on() {
    let place = Place::new();
    let config = RunConfig::read(&place.file(TINY), &[]).unwrap();
    train(&config, &place.path().join("run"), &Start::Anew, &mut Console::default(), |_| {}).unwrap();
    let text = "to be or not to be, that is the question\n".repeat(4);
    let line = format!("{}\n", serde_json::json!({ "text": text }));
    let folder = place.path().join("texts");
    std::fs::create_dir(&folder).unwrap();
    for (name, content) in [("a.txt", text.clone()), ("b.txt", format!("\u{feff}{text}")), ("c.NDJSON", line.clone())] {
        std::fs::write(place.path().join(name), &content).unwrap();
        std::fs::write(folder.join(name), content).unwrap();
    }
    let ids: Vec<u8> = (0..400u32).flat_map(|i| (i % 200).to_le_bytes()).collect();
    std::fs::write(place.path().join("wide.bin"), ids).unwrap();
    let eval = |data: &str, more: &[&str]| {
        let asked = ["eval", "run", data, "--sequence", "16", "--device", "cpu", "--json"];
        let output = place.gapless(&[&asked[..], more].concat());
        serde_json::from_slice::<serde_json::Value>(&output.stdout)
            .map_err(|_| String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let expected = eval("a.txt", &[]).unwrap();
    for same in ["b.txt", "c.NDJSON"] {
        assert_eq!(eval(same, &[]).unwrap(), expected, "{same}");
    }
    // Three documents, each followed by an end token.
    let tokens = 3 * (text.len() + 1) - 1;
    let whole = eval("texts", &[]).unwrap();
    assert!(whole["windows"] == tokens.div_ceil(16) && whole["tokens"] == tokens, "{whole}");
    assert!(eval("wide.bin", &[]).unwrap_err().contains("--token-width"));
    assert_eq!(eval("wide.bin", &["--token-width", "u32"]).unwrap()["windows"], 399_usize.div_ceil(16));
}

/// Examples are measured by their answers, at the run's sequence length, however few they are. `evaluation.path` names
/// data for validation: the same loss is measured during the run and by `eval`.
#[test]
fn held_out_examples_are_measured_by_their_answers() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let tokenizer = root.join("tests/evidence/hf/tokenizers/bytelevel_chatml_tagged/tokenizer.json");
    let place = Place::new();
    let chat = |count: usize| {
        let row = |i: usize| {
            let turn = |role: &str, content: String| serde_json::json!({ "role": role, "content": content });
            let messages = [turn("user", format!("say {i}")), turn("assistant", format!("it is {i}"))];
            format!("{}\n", serde_json::json!({ "messages": messages }))
        };
        (0..count).map(row).collect::<String>()
    };
    let prompt = |count: usize| "{\"prompt\": \"say \", \"completion\": \"no\"}\n".repeat(count);
    let vocabulary = format!("tokenizer = {tokenizer:?}\nformat = \"chat\"");
    // A format, the keys of its data, and the extension and the contents of a file with a number of examples.
    type Data<'a> = &'a dyn Fn(usize) -> String;
    let cases: [(&str, &str, &str, Data<'_>); 3] = [
        ("chat", &vocabulary, "jsonl", &chat),
        ("prompt", "vocabulary = 256\nformat = \"prompt\"", "jsonl", &prompt),
        ("text", "vocabulary = 256", "txt", &|count| "to be or not to be ".repeat(20 + count)),
    ];
    for (name, vocabulary, extension, data) in cases {
        let (training, held_out) = (format!("{name}.{extension}"), format!("{name}.held.{extension}"));
        std::fs::write(place.path().join(&training), data(60)).unwrap();
        std::fs::write(place.path().join(&held_out), data(48)).unwrap();
        let text = TINY.replace("text.txt", &training).replace("vocabulary = 256", vocabulary);
        let text = text.replace("sequence = 16", "sequence = 64").replace("\"to be\"", "\"\"");
        let evaluation = format!("[evaluation]\npath = \"DIR/{held_out}\"\nwindows = 0");
        let file = place.file(&text.replace("[evaluation]", &evaluation));
        let config = RunConfig::read(&file, &[]).unwrap();
        let dataset = config.dataset().unwrap();
        assert_eq!(dataset.validation_tokens(), 0, "{name}");
        let summary = train(&config, &place.path().join(name), &Start::Anew, &mut Console::default(), |_| {}).unwrap();
        let output = place.gapless(&["eval", name, &held_out, "--device", "cpu", "--batch", "3", "--json"]);
        let said: serde_json::Value =
            serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{name}: {output:?}"));
        assert_eq!(said["sequence"], 64, "{name}: {said}");
        let held_out = config.held_out(&place.path().join(&held_out), dataset.vocabulary()).unwrap();
        let windows = held_out.padded_validation(64, false).unwrap().unwrap();
        let size = windows.count() * 64;
        let (mut tokens, mut targets) = (vec![0; size], vec![0; size]);
        windows.fill(0, &mut tokens, &mut targets).unwrap();
        let counted = targets.iter().filter(|&&target| target != gapless::engine::data::IGNORED).count();
        assert_eq!(said["tokens"], counted, "{name}: {said}");
        // During a run, a text's last part of a window is left out.
        let (loss, expected) = (said["loss"].as_f64().unwrap(), f64::from(summary.val_loss.unwrap()));
        let allowed = if name == "text" { 0.05 } else { 1e-5 };
        assert!((loss - expected).abs() <= allowed * expected, "{name}: {loss} is not {expected}");
    }
    // 48 answers of two letters and the end of text.
    let output = place.gapless(&["eval", "prompt", "prompt.held.jsonl", "--device", "cpu", "--json"]);
    assert_eq!(serde_json::from_slice::<serde_json::Value>(&output.stdout).unwrap()["tokens"], 3 * 48);
    let error = |arguments: &[&str]| String::from_utf8_lossy(&place.gapless(arguments).stderr).into_owned();
    let wrong = error(&["eval", "prompt", "text.held.txt", "--format", "prompt", "--device", "cpu"]);
    assert!(wrong.contains("text.held.txt") && wrong.contains("line 1"), "{wrong}");
    let output = place.gapless(&["eval", "prompt", "text.held.txt", "--device", "cpu"]);
    assert!(String::from_utf8_lossy(&output.stdout).starts_with("perplexity"), "{output:?}");
    let wrong = error(&["eval", "text", "text.held.txt", "--format", "poem"]);
    assert!(wrong.contains("text, prompt, chat, preference or unpaired"), "{wrong}");
}

/// Data for validation of their own are counted in place of a part of the training data, and must fill a window.
#[test]
fn held_out_data_are_counted_and_fill_a_window() {
    let place = Place::new();
    let path = |name: &str| place.path().join(name).display().to_string();
    std::fs::write(path("held.txt"), "to be or not to be, that is").unwrap();
    std::fs::write(path("short.txt"), "to be").unwrap();
    let file = place.file(TINY).display().to_string();
    let go = |name: &str, out: &str| {
        place.gapless(&["train", &file, "--out", out, "--set", &format!("evaluation.path={}", path(name))])
    };
    let output = go("held.txt", "run");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains(" training tokens, 27 validation tokens, "), "{output:?}");
    let output = go("short.txt", "short");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(2) && !place.path().join("short").exists(), "{output:?}");
    assert!(error.contains("evaluation.path") && error.contains("5 tokens") && error.contains("needs 17"), "{error}");
}

/// A short text has fewer tokens than the vocabulary that the run asks for. The budget need only suffice for those.
#[test]
fn the_budget_is_that_of_the_vocabulary_of_the_text() {
    let place = Place::new();
    let text = TINY.replace("vocabulary = 256", "vocabulary = 4096");
    let config = RunConfig::read(&place.file(&text), &["memory.budget=600KiB".to_owned()]).unwrap();
    let architecture = config.model(4096).architecture().unwrap();
    assert!(gapless::Trainer::builder(|vb| architecture.model(vb), config.options()).plan(0).is_err());
    train(&config, &place.path().join("run"), &Start::Anew, &mut Console::default(), |_| {}).unwrap();
    let text = text.replace("steps = 4", "steps = 4\nmemory.budget = 1000");
    let small = RunConfig::read(&place.file(&text), &[]).unwrap();
    let error = train(&small, &place.path().join("small"), &Start::Anew, &mut Console::default(), |_| {}).unwrap_err();
    assert!(error.to_string().contains("budget") && !place.path().join("small").exists(), "{error}");
}

/// If the run file says so, only the last answer of a conversation counts, and answers of weight 0 don't count.
#[test]
fn conversations_count_the_answers_that_are_asked_for() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let tokenizer = root.join("tests/evidence/hf/tokenizers/bytelevel_chatml_tagged/tokenizer.json");
    let place = Place::new();
    let turn = |role: &str, content: &str| serde_json::json!({ "role": role, "content": content });
    let mut messages =
        vec![turn("user", "one"), turn("assistant", "first"), turn("user", "two"), turn("assistant", "second")];
    let counted = |messages: &[serde_json::Value], answers: &str| {
        let row = format!("{}\n", serde_json::json!({ "messages": messages }));
        std::fs::write(place.path().join("chat.jsonl"), row).unwrap();
        let data = format!("tokenizer = {tokenizer:?}\nformat = \"chat\"\nanswers = {answers:?}");
        let text = TINY.replace("vocabulary = 256", &data).replace("validation_every = 8", "validation_every = 0");
        let config = RunConfig::read(&place.file(&text.replace("text.txt", "chat.jsonl")), &[]).unwrap();
        let dataset = config.dataset().unwrap();
        let (mut tokens, mut targets, mut starts) = ([0; 128], [0; 128], [0; 128]);
        dataset.training(128, 1, 0).unwrap().fill_documents(0, 0, &mut tokens, &mut targets, &mut starts).unwrap();
        let targets: Vec<u32> =
            targets.into_iter().filter(|&target| target != gapless::engine::data::IGNORED).collect();
        dataset.vocabulary().decode(&targets).unwrap()
    };
    let all = counted(&messages, "all");
    let last = counted(&messages, "last");
    assert!(all.contains("first") && all.ends_with(&last), "{all:?} {last:?}");
    assert!(last.contains("second") && !last.contains("first"), "{last:?}");
    messages[3]["weight"] = 0.into();
    let first = counted(&messages, "all");
    assert!(first.contains("first") && !first.contains("second"), "{first:?}");
}

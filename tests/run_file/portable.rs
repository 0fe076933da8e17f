//! The folder of a run on its own: after a move, from another directory, and without the data and the model folder with
//! which the run was started. Also: the ways from a run to a Hugging Face folder, and failed runs.

use std::fs;
use std::path::Path;

use gapless::models::hf::{self, Architecture, Folder, HfError, NewFolder};
use gapless::models::{Llama, LlamaConfig};
use gapless::run::{Console, Report, RunConfig, Start, TrainedRun, train};
use gapless::{DeviceChoice, StepOptions, TrainOptions, Trainer};
use serde_json::Value;

use crate::{Place, TINY, losses};

/// Writes a tiny Llama with random weights, a tokenizer of 360 tokens, and a chat template.
fn write_model(folder: &Path) {
    let config = LlamaConfig {
        vocabulary: 360,
        layers: 2,
        heads: 2,
        kv_heads: 1,
        width: 16,
        hidden: 24,
        ..LlamaConfig::default()
    };
    let tokenizer = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/evidence/hf/tokenizers/bytelevel_chatml_tagged");
    let trainer = || Ok::<_, HfError>(Trainer::new(|vb| Llama::new(&config, vb), options().step)?);
    let new = NewFolder::of(&Architecture::Llama(config.clone()), 512, Some(359)).unwrap();
    new.save(folder, trainer, |to| hf::copy_tokenizer(&tokenizer, to)).unwrap();
}

fn options() -> TrainOptions {
    let step = StepOptions { batch: 1, sequence: 16, ..StepOptions::default() };
    TrainOptions { step, threads: 1, device: DeviceChoice::Cpu, ..TrainOptions::default() }
}

fn evaluated(trainer: &mut Trainer) -> u32 {
    let ids: Vec<u32> = (0..17).map(|i| i * i % 251).collect();
    trainer.evaluate(&ids[..16], &ids[1..]).unwrap().to_bits()
}

/// The results of a run's model: the bits of a loss, the ids of a text, and the chat template's text for a question.
fn results(run: &Path) -> (u32, Vec<u32>, Option<String>) {
    let run = TrainedRun::open(run).unwrap();
    let loss = evaluated(&mut run.for_inference(options()).unwrap());
    let chat = run.tokenizer_folder().map(|folder| {
        let tokenizer = gapless::engine::data::Tokenizer::open(folder).unwrap();
        let message = gapless::engine::data::Message::new("user", "to be?");
        tokenizer.chat_template().unwrap().render(&[message], true).unwrap()
    });
    (loss, run.vocabulary.encode_beginning("to be <|im_end|>").unwrap(), chat)
}

/// Runs with paths relative to the directory in which they were started: from scratch on bytes, with a trained vocabulary
/// and with a given tokenizer, and from a model folder, whole and with adapters.
#[test]
fn a_run_is_used_where_nothing_else_is_left() {
    let place = Place::new();
    write_model(&place.path().join("base"));
    let tiny = TINY.replace("DIR/", "");
    let gpt = "[model.gpt]\nlayers = 1\nheads = 2\nwidth = 16";
    let folder = |more: &str| {
        let text = tiny.replace(gpt, &format!("[model]\nfolder = \"base\"\n{more}"));
        text.replace("vocabulary = 256\n", "")
    };
    let runs = [
        ("bytes", tiny.clone()),
        ("trained", tiny.replace("vocabulary = 256", "vocabulary = 280")),
        ("given", tiny.replace("vocabulary = 256", "tokenizer = \"base/tokenizer.json\"")),
        ("whole", folder("")),
        ("adapter", folder("[trainable.lora]\nrank = 2")),
    ];
    for (name, text) in &runs {
        place.file(text);
        let output = place.gapless(&["train", "run.toml", "--out", name]);
        assert!(output.status.success(), "{name}: {output:?}");
    }
    let before: Vec<_> = runs.iter().map(|(name, _)| results(&place.path().join(name))).collect();
    assert_eq!(before.iter().map(|(.., chat)| chat.is_some()).collect::<Vec<_>>(), [false, false, true, true, true]);

    // The runs are moved, and all else gets other names.
    let elsewhere = tempfile::tempdir().unwrap();
    for ((name, _), before) in runs.iter().zip(before) {
        let run = elsewhere.path().join(name);
        fs::rename(place.path().join(name), &run).unwrap();
        if *name == "bytes" {
            for name in ["text.txt", "run.toml", "base", "cache"] {
                fs::rename(place.path().join(name), place.path().join(format!("{name}.gone"))).unwrap();
            }
        }
        assert_eq!(results(&run), before, "{name}");
        assert_eq!(Report::open(std::slice::from_ref(&run)).unwrap().runs()[0].error(), None);

        // The exported model has the bits of the run's.
        let out = elsewhere.path().join(format!("{name}.exported/"));
        TrainedRun::open(&run).unwrap().export(&out).unwrap();
        let folder = Folder::open(&out).unwrap();
        let mut trainer = Trainer::new(|vb| folder.model(vb), options().step).unwrap();
        folder.load(&mut trainer).unwrap();
        let tokenizer = gapless::engine::data::Tokenizer::open(&out).unwrap();
        assert_eq!(
            tokenizer.encode("to be", true).unwrap(),
            TrainedRun::open(&run).unwrap().vocabulary.encode_beginning("to be").unwrap()
        );
        assert_eq!(tokenizer.chat_template().is_some(), before.2.is_some());
        // Merging adds the adapters in f32, before the product with the input.
        let (found, expected) = (f32::from_bits(evaluated(&mut trainer)), f32::from_bits(before.0));
        let is_same = if *name == "adapter" { (found - expected).abs() < 1e-5 } else { found == expected };
        assert!(is_same, "{name}: {found} is not {expected}");
    }

    // The commands, from a directory that has nothing to do with the run.
    let gapless = |arguments: &[&str]| place.gapless(arguments);
    let path = |name: &str| elsewhere.path().join(name).display().to_string();
    fs::write(place.path().join("other.txt"), "that is the question, or not to be\n".repeat(9)).unwrap();
    let loss = |folder: &str| {
        let output = gapless(&["eval", &path(folder), "other.txt", "--sequence", "16", "--device", "cpu", "--json"]);
        serde_json::from_slice::<Value>(&output.stdout).unwrap_or_else(|_| panic!("{output:?}"))["loss"].clone()
    };
    assert_eq!(loss("given"), loss("given.exported"));
    let sampled = |folder: &str| {
        let asked = ["sample", &path(folder), "--chat", "--prompt", "to be?", "--tokens", "4", "--temperature", "0"];
        let output = gapless(&asked);
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    assert!(gapless(&["merge", &path("adapter"), "merged"]).status.success());
    fs::rename(place.path().join("merged"), elsewhere.path().join("merged")).unwrap();
    assert_eq!(sampled("adapter"), sampled("merged"));
    let refused = |arguments: &[&str], words: &str| {
        let output = gapless(arguments);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(2) && error.contains(words), "{output:?}");
    };
    refused(&["merge", &path("whole"), "new"], "has no adapters; `gapless export`");
    refused(&["merge", &path("adapter"), "new", "--base", "x"], "leave --base out");
    refused(&["export", &path("merged"), "new"], "is not a run");
    refused(&["export", &path("given"), &path("merged")], "not empty");
    refused(&["sample", &path("trained"), "--chat", "--prompt", "x"], "no chat template");
    // The adapter's folder names its base by an absolute path, and says what is missing.
    let adapter = path("adapter/adapter");
    refused(
        &["sample", &adapter, "--prompt", "to be"],
        "and there is no such folder; name the base model's folder with --base",
    );
    let with_base =
        gapless(&["sample", &adapter, "--chat", "--prompt", "to be?", "--tokens", "1", "--base", "base.gone"]);
    assert!(with_base.status.success(), "{with_base:?}");
}

/// A run of a multimodal model is exported as this model as long as the folder exists from which it started, and then as its
/// text part. The other parts are those of the folder.
#[test]
fn a_multimodal_model_is_exported_with_its_other_parts() {
    let place = Place::new();
    let base = place.path().join("base");
    write_model(&base);
    let weights =
        |folder: &Path| candle_core::safetensors::load(folder.join("model.safetensors"), &candle_core::Device::Cpu);
    let text: Value = serde_json::from_slice(&fs::read(base.join("config.json")).unwrap()).unwrap();
    let whole =
        serde_json::json!({ "model_type": "llava", "text_config": text, "vision_config": {}, "dtype": "float32" });
    fs::write(base.join("config.json"), whole.to_string()).unwrap();
    fs::write(base.join("preprocessor_config.json"), "{}").unwrap();
    let mut tensors: std::collections::HashMap<String, _> =
        weights(&base).unwrap().into_iter().map(|(name, tensor)| (format!("language_model.{name}"), tensor)).collect();
    let vision = candle_core::Tensor::new(&[[1.5_f32, -2.0]], &candle_core::Device::Cpu).unwrap();
    tensors.insert("vision_tower.weight".to_owned(), vision);
    candle_core::safetensors::save(&tensors, base.join("model.safetensors")).unwrap();

    let gpt = "[model.gpt]\nlayers = 1\nheads = 2\nwidth = 16";
    let text = TINY.replace("DIR/", "").replace(gpt, "[model]\nfolder = \"base\"").replace("vocabulary = 256\n", "");
    place.file(&text);
    let output = place.gapless(&["train", "run.toml", "--out", "run"]);
    assert!(output.status.success(), "{output:?}");
    let run = place.path().join("run");
    let trained = results(&run).0;
    let exported = |name: &str| {
        let out = place.path().join(name);
        TrainedRun::open(&run).unwrap().export(&out).unwrap();
        let folder = Folder::open(&out).unwrap();
        let mut trainer = Trainer::new(|vb| folder.model(vb), options().step).unwrap();
        folder.load(&mut trainer).unwrap();
        assert_eq!(evaluated(&mut trainer), trained, "{name}");
        let tensors = weights(&out).unwrap();
        let vision = tensors.get("vision_tower.weight").map(|it| it.to_vec2::<f32>().unwrap());
        (folder.config().is_multimodal(), vision, out.join("preprocessor_config.json").exists())
    };
    let other = vec![vec![1.5, -2.0]];
    assert_eq!(exported("whole"), (true, Some(other), true));
    fs::rename(&base, place.path().join("gone")).unwrap();
    assert_eq!(exported("text"), (false, None, false));
}

/// A run can be resumed from another directory with its own run.toml, which has absolute paths.
#[test]
fn a_run_is_resumed_from_another_directory() {
    let place = Place::new();
    place.file(&TINY.replace("DIR/", ""));
    assert!(place.gapless(&["train", "run.toml", "--out", "run", "--set", "steps=2"]).status.success());
    let out = place.path().join("run");
    let config = RunConfig::read(&out.join("run.toml"), &["steps=4".to_owned()]).unwrap();
    train(&config, &out, &Start::Resume, &mut Console::default(), |_| {}).unwrap();
    assert_eq!(losses(&out.join("metrics.jsonl")).len(), 4);
    // If the run and its data are moved together, the data have another path, but are the same.
    let moved = tempfile::tempdir().unwrap();
    fs::rename(&out, moved.path().join("run")).unwrap();
    fs::rename(place.path().join("text.txt"), moved.path().join("text.txt")).unwrap();
    let text = format!("data.path={}", moved.path().join("text.txt").display());
    let config = RunConfig::read(&moved.path().join("run/run.toml"), &["steps=6".to_owned(), text]);
    train(&config.unwrap(), &moved.path().join("run"), &Start::Resume, &mut Console::default(), |_| {}).unwrap();
}

/// A failed run leaves its error in the log, the summary and the report. The next run keeps the failed run's files together.
#[test]
fn a_failed_run_leaves_its_reason() {
    let place = Place::new();
    let out = place.path().join("run");
    let fails = ["steps=40", "guard.loss=1e-6", "guard.window=1", "guard.patience=1", "evaluation.every=0"];
    let fails = fails.map(str::to_owned);
    let go = |settings: &[String], start: Start| {
        let config = RunConfig::read(&place.file(TINY), settings).unwrap();
        train(&config, &out, &start, &mut Console::default(), |_| {})
    };
    let error = go(&fails, Start::Anew).unwrap_err().to_string();
    let summary = |out: &Path| serde_json::from_slice::<Value>(&fs::read(out.join("summary.json")).unwrap()).unwrap();
    assert_eq!((&summary(&out)["error"], &summary(&out)["ended"]), (&error.clone().into(), &"failed".into()));
    assert!(summary(&out)["steps"].as_u64() > Some(0) && summary(&out)["final_loss"].is_f64());
    assert!(fs::read_to_string(out.join("log.txt")).unwrap().contains(&format!("the run has failed: {error}")));
    let report = Report::open(std::slice::from_ref(&out)).unwrap();
    assert_eq!(report.runs()[0].error(), Some(&*error));
    let rows = fs::read(out.join("metrics.jsonl")).unwrap();

    go(&[], Start::Anew).unwrap();
    assert!(summary(&out).get("error").is_none());
    let earlier = out.join("earlier.1");
    assert_eq!((fs::read(earlier.join("metrics.jsonl")).unwrap(), &summary(&earlier)["error"]), (rows, &error.into()));

    // A run that fails after a checkpoint is resumed. Its summary is then that of a run that has not failed.
    let saves = [&fails[..], &["checkpoints.every=1".to_owned()]].concat();
    go(&saves, Start::Anew).unwrap_err();
    assert!(summary(&out).get("error").is_some());
    go(&["steps=40".to_owned(), "evaluation.every=0".to_owned()], Start::Resume).unwrap();
    assert!(summary(&out).get("error").is_none() && out.join("earlier.2").exists());

    // A run that is refused before it begins leaves the folder as it is.
    fs::remove_file(place.path().join("text.txt")).unwrap();
    let config = RunConfig::read_without_data(Some(&place.path().join("run.toml")), &[]).unwrap();
    train(&config, &out, &Start::Anew, &mut Console::default(), |_| {}).unwrap_err();
    assert!(summary(&out).get("error").is_none() && !out.join("earlier.3").exists());
}

/// The tokenizer may be read-only, and it may be the copy of the earlier run in the same folder.
#[test]
fn a_given_tokenizer_is_copied_before_the_earlier_run_is_moved() {
    let place = Place::new();
    let (base, out) = (place.path().join("base"), place.path().join("run"));
    write_model(&base);
    let file = base.join("tokenizer.json");
    let mut permissions = fs::metadata(&file).unwrap().permissions();
    permissions.set_readonly(true);
    fs::set_permissions(&file, permissions).unwrap();
    let go = |tokenizer: &Path| {
        let text = TINY.replace("vocabulary = 256", &format!("tokenizer = {tokenizer:?}"));
        let config = RunConfig::read(&place.file(&text), &[]).unwrap();
        train(&config, &out, &Start::Anew, &mut Console::default(), |_| {}).unwrap();
    };
    go(&file);
    // A run that was killed while it copied has left a part of the copies.
    fs::create_dir(out.join("pretrained.partial")).unwrap();
    fs::write(out.join("pretrained.partial/tokenizer.json"), "{").unwrap();
    go(&file);
    go(&out.join("pretrained/tokenizer.json"));
    for folder in [out.clone(), out.join("earlier.1"), out.join("earlier.2")] {
        let pretrained = folder.join("pretrained");
        assert_eq!(fs::read(pretrained.join("tokenizer.json")).unwrap(), fs::read(&file).unwrap());
        assert!(gapless::engine::data::Tokenizer::open(&pretrained).unwrap().chat_template().is_some());
    }
    assert!(!out.join("pretrained.partial").exists());
}

/// The default number of sampled tokens is that of run.toml. A run without a checkpoint is named, and the earlier run of
/// its folder.
#[test]
fn a_run_is_sampled_as_its_file_says() {
    let place = Place::new();
    let out = place.path().join("run");
    let go = |tokens: &str| {
        let config = RunConfig::read(&place.file(TINY), &[tokens.to_owned()]).unwrap();
        train(&config, &out, &Start::Anew, &mut Console::default(), |_| {}).unwrap();
    };
    let told = |folder: &str| {
        let asked = ["sample", folder, "--prompt", "to be", "--ignore-eos", "--temperature", "0"];
        String::from_utf8(place.gapless(&asked).stderr).unwrap()
    };
    go("sample.tokens=7");
    assert!(told("run").contains(", 7 new tokens"), "{}", told("run"));
    go("sample.tokens=0");
    assert!(told("run").contains(", 256 new tokens"), "{}", told("run"));
    fs::remove_dir_all(out.join("checkpoints")).unwrap();
    let none = told("run");
    assert!(none.contains("the run in run has no checkpoint yet") && none.contains("run/earlier.1"), "{none}");
    assert!(told("run/earlier.1").contains(", 7 new tokens"));
    let file = place.path().join("run.toml").display().to_string();
    let output = place.gapless(&["train", &file, "--out", "fork", "--fork", "run"]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("has no checkpoint yet"), "{output:?}");
}

/// The commands of docs/fine_tuning.md, from a printed run file to a conversation with the result. Only the number of steps
/// is smaller.
#[test]
fn a_printed_file_leads_to_a_conversation() {
    let page = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/fine_tuning.md")).unwrap();
    let mut blocks = page.split("```sh\n").skip(1).filter_map(|block| block.split("```").next());
    let commands = blocks.find(|block| block.contains("gapless init sft")).unwrap();
    let place = Place::new();
    write_model(&place.path().join("SmolLM-135M-Instruct"));
    let line =
        r#"{"messages": [{"role": "user", "content": "What is 2 + N?"}, {"role": "assistant", "content": "2 + N"}]}"#;
    let lines: String = (0..48).map(|n| line.replace('N', &n.to_string()) + "\n").collect();
    fs::write(place.path().join("conversations.jsonl"), lines).unwrap();
    let mut done = Vec::new();
    for command in commands.lines().filter(|line| line.starts_with("gapless ")) {
        let command = command.split('#').next().unwrap().trim();
        let (command, file) = command.split_once(" > ").map_or((command, None), |(first, file)| (first, Some(file)));
        // Arguments in quotes are one argument each.
        let parts = command.split('"').enumerate();
        let words = parts.flat_map(|(at, part)| match at % 2 {
            0 => part.split_whitespace().map(str::to_owned).collect::<Vec<_>>(),
            _ => vec![part.to_owned()],
        });
        let words: Vec<String> = words.skip(1).collect();
        let output = place.gapless(&words.iter().map(String::as_str).collect::<Vec<_>>());
        assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
        if let Some(file) = file {
            let text = String::from_utf8(output.stdout).unwrap().replace("steps = 100", "steps = 2");
            fs::write(place.path().join(file), text.replace("sequence = 512", "sequence = 64")).unwrap();
        }
        done.push(words[0].clone());
    }
    assert_eq!(done, ["init", "train", "sample", "merge", "sample"]);
}

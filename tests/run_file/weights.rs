//! The results of a run: weights in the format in which they were loaded, and a model that can continue texts.

use std::path::Path;

use gapless::models::hf::{Adapter, Folder};
use gapless::run::{Console, RunConfig, Start, TrainedRun, train, validation_loss};
use gapless::{DeviceChoice, StepOptions, TrainOptions, Trainer};
use serde_json::Value;

use crate::{Place, TINY, tokenizer};

/// A run starts from a model folder. The run writes the same folder with trained weights, or an adapter.
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
        (Trainer::new(|vb| Folder::open(&base).unwrap().model(vb), config.options()).unwrap(), out)
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
    let log = std::fs::read_to_string(out.join("log.txt")).unwrap();
    assert!(log.contains(" parameters are trained ("), "{log}");
    let (folder, adapter) = (Folder::open(&base).unwrap(), Adapter::open(out.join("adapter")).unwrap());
    folder.load(&mut trainer).unwrap();
    adapter.load(&folder, &mut trainer).unwrap();
    assert!(!out.join("model").exists());
}

/// Files of the user are never replaced: neither those of the model's folder, nor files that have the names of a
/// run's files.
#[test]
fn files_of_others_are_not_replaced() {
    let place = Place::new();
    let base = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/evidence/hf/models/mixtral_bf16/checkpoint");
    let own = place.path().join("model");
    std::fs::create_dir(&own).unwrap();
    for entry in std::fs::read_dir(&base).unwrap().map(Result::unwrap) {
        std::fs::copy(entry.path(), own.join(entry.file_name())).unwrap();
    }
    std::fs::write(own.join("notes.txt"), "mine").unwrap();
    let contents = |folder: &Path| {
        let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        let mut all: Vec<_> = entries.map(|path| (path.clone(), std::fs::read(path).unwrap())).collect();
        all.sort();
        all
    };
    let text = TINY.replace("[model.gpt]\nlayers = 1\nheads = 2\nwidth = 16", "[model]\nfolder = \"model\"");
    let text = text.replace("vocabulary = 256", &format!("tokenizer = {:?}", tokenizer(&place)));
    let (before, file) = (contents(&own), place.file(&text));
    let config = std::fs::read(&file).unwrap();
    for (more, weights) in [(&[][..], "model.1"), (&["--set", "steps=4"], "model.2"), (&["--resume"], "model.2")] {
        let output = place.gapless(&[&["train", "run.toml", "--out", "."], more].concat());
        assert!(output.status.success(), "{output:?}");
        assert_eq!((contents(&own), std::fs::read(&file).unwrap()), (before.clone(), config.clone()));
        Folder::open(place.path().join(weights)).unwrap();
        let summary = std::fs::read(place.path().join("summary.json")).unwrap();
        assert_eq!(serde_json::from_slice::<Value>(&summary).unwrap()["weights"], weights);
    }
    assert!(!place.path().join("model.3").exists() && place.path().join("earlier.1/checkpoints").exists());

    // A folder that does not belong to a run has another configuration or another vocabulary.
    let refused = |arguments: &[&str], name: &str| {
        let output = place.gapless(arguments);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(2) && said.contains(name), "{output:?}");
    };
    refused(&["train", "run.toml", "--out", ".", "--set", "steps=3"], "has a run.toml that no run wrote");
    let other = place.path().join("other");
    std::fs::create_dir(&other).unwrap();
    std::fs::write(other.join("tokenizer.json"), "mine").unwrap();
    refused(&["train", "run.toml", "--out", "other"], "has a tokenizer.json that no run wrote");
    assert_eq!(contents(&other).len(), 1);
}

/// `sample` and `eval` accept a run's folder or a checkpoint. They print the text that the run printed at that
/// checkpoint, and measure the same loss as the library. Covers models of one rank and of a pipeline, bf16, bytes and
/// trained vocabularies, isolated documents, and adapters.
#[test]
fn what_was_trained_continues_texts_and_is_measured() {
    let place = Place::new();
    let base = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/evidence/hf/models/mixtral_bf16/checkpoint");
    let other = tokenizer(&place);
    let tokenizer = format!("tokenizer = {other:?}");
    let model = format!("[model]\nfolder = {base:?}\n[trainable.lora]\nrank = 2\ntargets = [\"q_proj\"]");
    let adapter = TINY.replace("[model.gpt]\nlayers = 1\nheads = 2\nwidth = 16", &model);
    let ranks = "threads = 1\nmesh.pipeline = 2";
    let pipeline = TINY.replace("layers = 1", "layers = 2").replace("threads = 1", ranks);
    let pipeline = pipeline.replace("\"f32\"", "\"bf16\"");
    for (name, text) in [
        ("bytes", TINY.to_owned()),
        ("pipeline", pipeline.replace("vocabulary = 256", "vocabulary = 280")),
        ("documents", TINY.replace("text.txt\"", "documents.jsonl\"\nisolate_documents = true")),
        ("adapter", adapter.replace("vocabulary = 256", &tokenizer)),
    ] {
        let assignments = ["learning_rate.peak=0.03".to_owned(), "checkpoints.keep_last=2".to_owned()];
        let config = RunConfig::read(&place.file(&text), &assignments).unwrap();
        train(&config, &place.path().join(name), &Start::Anew, &mut Console::default(), |_| {}).unwrap();
        let samples = std::fs::read_to_string(place.path().join(name).join("samples.txt")).unwrap();
        let (second, last) = samples.strip_prefix("=== step 2\n").unwrap().split_once("=== step 4\n").unwrap();
        for (folder, expected) in [(name.to_owned(), last), (format!("{name}/checkpoints/step-00000002"), second)] {
            let asked = ["sample", &folder, "--prompt", "to be", "--tokens", "4", "--seed", "3", "--ignore-eos"];
            let output = place.gapless(&asked);
            // The printed text contains no end-of-text tokens. An incomplete character is printed as a replacement
            // character.
            let bare = |text: &str| text.replace('\0', "").trim_end_matches(['\u{fffd}', '\n']).to_owned();
            assert_eq!(bare(&String::from_utf8_lossy(&output.stdout)), bare(expected), "{folder}: {output:?}");
        }
        let dataset = config.dataset().unwrap();
        // The last window is padded.
        let windows = dataset.padded_validation(16, config.data.has_documents()).unwrap().unwrap();
        let device = DeviceChoice::Cpu;
        let options = TrainOptions {
            step: StepOptions { batch: 1, sequence: 16, documents: true, ..StepOptions::default() },
            threads: 1,
            device,
            ..TrainOptions::default()
        };
        let mut model = TrainedRun::open(&place.path().join(name)).unwrap().for_inference(options).unwrap();
        let expected = validation_loss(&mut model, &windows).unwrap().unwrap();
        let folder = dataset.folder().unwrap().to_str().unwrap();
        for (batch, data) in [("1", folder), ("7", folder), ("1", "text.txt")] {
            let asked = ["eval", name, data, "--sequence", "16", "--batch", batch, "--device", "cpu", "--json"];
            let output = place.gapless(&asked);
            let said: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{output:?}"));
            let difference = (said["loss"].as_f64().unwrap() - f64::from(expected)).abs();
            // The whole text consists of repetitions of the sentence in its validation part.
            let allowed = if data == folder { 1e-6 } else { 0.2 };
            assert!(difference <= allowed * f64::from(expected), "{name} {batch} {data}: {said} is not {expected}");
        }
    }
    let refused = |asked: &[&str], why: &str| {
        let output = place.gapless(asked);
        assert!(output.status.code() == Some(2) && String::from_utf8_lossy(&output.stderr).contains(why), "{output:?}");
    };
    refused(&["eval", "bytes", other.parent().unwrap().to_str().unwrap()], "another vocabulary");
    refused(&["eval", "bytes", "text.txt", "--average"], "average/");
    refused(&["eval", base.to_str().unwrap(), "text.txt", "--average"], "has no averages");
    refused(&["sample", "bytes", "--prompt", "to be", "--chat"], "chat template");
    // A folder two levels below a run.toml is not the folder of a run.
    assert!(place.path().join("run.toml").exists() && !TrainedRun::is_at(&place.path().join("models/llama")));
}

/// A run on bare token ids cannot print text, but its perplexity can be measured.
#[test]
fn runs_of_bare_ids_are_measured() {
    let place = Place::new();
    for vocabulary in [300, 70_000u32] {
        let ids = (0..4000).map(|i| i * i % 290);
        let bytes: Vec<u8> = match vocabulary {
            300 => ids.flat_map(|id| (id as u16).to_le_bytes()).collect(),
            _ => ids.flat_map(u32::to_le_bytes).collect(),
        };
        std::fs::write(place.path().join("ids.bin"), bytes).unwrap();
        let text = TINY.replace("text.txt", "ids.bin").replace("\"to be\"", "\"\"");
        let file = place.file(&text.replace("vocabulary = 256", &format!("vocabulary = {vocabulary}")));
        let config = RunConfig::read(&file, &[]).unwrap();
        let out = place.path().join(vocabulary.to_string());
        let summary = train(&config, &out, &Start::Anew, &mut Console::default(), |_| {}).unwrap();
        let asked = ["eval", out.to_str().unwrap(), "ids.bin", "--sequence", "16", "--device", "cpu", "--json"];
        let output = place.gapless(&asked);
        let said: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{output:?}"));
        assert_eq!(said["tokens"], 3999, "{said}");
        let (loss, expected) = (said["loss"].as_f64().unwrap(), f64::from(summary.val_loss.unwrap()));
        assert!((loss - expected).abs() < 0.2, "{loss} is not {expected}");
    }
}

/// A trained run can be sampled without the text that it was trained on.
#[test]
fn a_run_is_sampled_without_its_data() {
    let place = Place::new();
    let config = RunConfig::read(&place.file(TINY), &["steps=1".to_owned()]).unwrap();
    train(&config, &place.path().join("run"), &Start::Anew, &mut Console::default(), |_| {}).unwrap();
    std::fs::remove_file(place.path().join("text.txt")).unwrap();
    let output = place.gapless(&["sample", "run", "--prompt", "to be", "--tokens", "2"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

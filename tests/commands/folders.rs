//! Tests of the command line with Hugging Face folders: element types, lengths, ends of texts, and adapters.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::generate::{error, gapless, text};

/// A model with 300 tokens, an adapter for it, and a tokenizer whose tokens are bytes.
struct Folders {
    folder: tempfile::TempDir,
}

impl Folders {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let evidence = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/evidence/hf/lora/llama_qv");
        for name in ["base", "adapter"] {
            copy(&evidence.join(name), &folder.path().join(name));
        }
        std::fs::write(folder.path().join("base/tokenizer.json"), byte_tokenizer().to_string()).unwrap();
        Self { folder }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn name(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_owned()
    }

    /// Changes options of a JSON file.
    fn set(&self, file: &str, options: Value) {
        let path = self.path(file);
        let mut all: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        all.as_object_mut().unwrap().extend(options.as_object().unwrap().clone());
        std::fs::write(path, all.to_string()).unwrap();
    }

    fn loss(&self, name: &str, more: &[&str]) -> f64 {
        let name = self.name(name);
        let arguments = [&["eval", &name, TEXT, "--sequence", "128", "--json"], more].concat();
        serde_json::from_str::<Value>(&text(&arguments)).unwrap()["loss"].as_f64().unwrap()
    }

    /// Samples a text, and returns the part after the prompt.
    fn sampled(&self, name: &str, more: &[&str]) -> String {
        let text = text(&[&["sample", &self.name(name), "--prompt", "Hello"], more].concat());
        text.strip_prefix("Hello").and_then(|text| text.strip_suffix('\n')).unwrap().to_owned()
    }
}

const TEXT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/LICENSE-MIT");

pub fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

/// Returns a tokenizer in which id n is byte n, spelled as in GPT-2.
pub fn byte_tokenizer() -> Value {
    let is_shown = |byte: u32| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    let mut others = 256..;
    let of_byte = |byte| char::from_u32(if is_shown(byte) { byte } else { others.next().unwrap() }).unwrap();
    let vocabulary: serde_json::Map<String, Value> =
        (0..256).map(of_byte).map(String::from).zip((0..256).map(Value::from)).collect();
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false },
        "post_processor": null,
        "decoder": { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false },
        "model": { "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                   "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocabulary, "merges": [] },
    })
}

/// Returns the ids of all tokens except the letters a to z, which are to be suppressed.
fn letters_only() -> Vec<u32> {
    (0..300).filter(|id| !(97..123).contains(id)).collect()
}

#[test]
fn generation_options_of_the_folder_are_followed() {
    let folders = Folders::new();
    let config = "base/generation_config.json";
    folders.set(config, json!({ "suppress_tokens": letters_only(), "no_repeat_ngram_size": 1, "max_new_tokens": 9 }));
    let whole = folders.sampled("base", &[]);
    let mut letters: Vec<char> = whole.chars().collect();
    assert_eq!((letters.len(), letters.iter().all(char::is_ascii_lowercase)), (9, true), "{whole}");
    letters.sort_unstable();
    letters.dedup();
    assert_eq!(letters.len(), 9, "a letter comes twice: {whole}");
    assert_eq!(folders.sampled("base", &["--tokens", "4"]), whole[..4]);
    folders.set(config, json!({ "max_new_tokens": null, "max_length": 8 }));
    assert_eq!(folders.sampled("base", &[]), whole[..3]);
    let name = folders.name("base");
    assert!(error(&["sample", &name, "--prompt", "Hello world"]).contains("max_length"));
    // A text ends with the token that completes a stop string. The stop string may begin in the prompt. In this case,
    // the end token would come later than the stop string.
    folders.set(config, json!({ "max_length": null, "max_new_tokens": 9, "stop_strings": [&whole[2..4], "Hell"] }));
    assert_eq!(folders.sampled("base", &[]), whole[..4]);
    folders.set(config, json!({ "stop_strings": format!("llo{}", &whole[..1]) }));
    assert_eq!(folders.sampled("base", &[]), whole[..1]);
    folders.set(config, json!({ "stop_strings": null, "eos_token_id": u32::from(whole.as_bytes()[1]) }));
    assert_eq!(folders.sampled("base", &[]), whole[..2]);
    folders.set(config, json!({ "min_new_tokens": 1, "begin_suppress_tokens": [whole.as_bytes()[0]], "top_h": 0.5 }));
    let output = gapless(&["sample", &name, "--prompt", "Hello"]);
    let told = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success() && told.contains("top_h (0.5)") && !told.contains("min_new_tokens"), "{told}");
    assert_ne!(output.stdout[5], whole.as_bytes()[0]);
}

#[test]
fn a_character_that_is_not_whole_is_shown_at_the_end() {
    let folders = Folders::new();
    // Only the first byte of a two-byte character is allowed.
    let others: Vec<u32> = (0..300).filter(|&id| id != 0xc3).collect();
    folders.set("base/generation_config.json", json!({ "suppress_tokens": others }));
    assert_eq!(folders.sampled("base", &["--tokens", "1"]), "\u{fffd}");
}

#[test]
fn weights_have_the_type_that_is_asked_for() {
    let folders = Folders::new();
    let loss = |more: &[&str]| folders.loss("base", more);
    let (plain, f32, bf16) = (loss(&[]), loss(&["--dtype", "f32"]), loss(&["--dtype", "bf16"]));
    assert_eq!(plain, f32);
    assert!(bf16 != f32 && (bf16 - f32).abs() < 1e-2 * f32, "{bf16} {f32}");
    let sampled = |dtype| folders.sampled("base", &["--tokens", "8", "--ignore-eos", "--dtype", dtype]);
    assert_eq!(sampled("f32"), folders.sampled("base", &["--tokens", "8", "--ignore-eos"]));
    assert!(!sampled("bf16").is_empty());
}

#[test]
fn adapters_are_sampled_evaluated_and_merged() {
    let folders = Folders::new();
    let [base, adapter, out] = ["base", "adapter", "out"].map(|name| folders.name(name));
    let loss = |folder: &str, more: &[&str]| folders.loss(folder, more);
    let of_adapter = loss("adapter", &[]);
    assert!((of_adapter - loss("base", &[])).abs() > 1e-4);
    text(&["merge", &adapter, &out]);
    assert!((loss("out", &[]) - of_adapter).abs() < 1e-5);
    let options = ["--tokens", "12", "--ignore-eos"];
    assert_eq!(folders.sampled("out", &options), folders.sampled("adapter", &options));
    assert!(error(&["merge", &adapter, &out]).contains("not empty"));
    assert!(error(&["merge", &base, &folders.name("new")]).contains("not an adapter"));
    assert!(error(&["eval", &base, TEXT, "--base", &out]).contains("not an adapter"));

    // The base model is moved, and the adapter has its own tokenizer, which is copied to the merged model.
    copy(&folders.path("base"), &folders.path("elsewhere"));
    std::fs::remove_dir_all(folders.path("base")).unwrap();
    assert!(error(&["eval", &adapter, TEXT]).contains("../base"));
    let elsewhere = folders.name("elsewhere");
    assert_eq!(loss("adapter", &["--base", &elsewhere]), of_adapter);
    std::fs::rename(folders.path("elsewhere/tokenizer.json"), folders.path("adapter/tokenizer.json")).unwrap();
    std::fs::write(folders.path("elsewhere/chat_template.jinja"), "of the base").unwrap();
    assert_eq!(loss("adapter", &["--base", &elsewhere]), of_adapter);
    let second = folders.name("second");
    text(&["merge", &adapter, &second, "--base", &elsewhere]);
    assert!(folders.path("second/tokenizer.json").exists() && !folders.path("second/chat_template.jinja").exists());
    assert_eq!(loss("second", &[]), loss("out", &[]));
}

/// The model has as many positions as its position table has rows. A longer prompt is refused rather than silently cut.
#[test]
fn prompts_longer_than_the_model_are_refused() {
    let Some(gpt2) = gapless_testing::next_to_repository("hf/models/gpt2/checkpoint").filter(|folder| folder.is_dir())
    else {
        gapless_testing::not_checked("there is no ../shared/hf/models/gpt2");
        return;
    };
    let folder = gpt2.to_str().unwrap();
    let prompt = "Hello world. ".repeat(200);
    let told = error(&["sample", folder, "--prompt", &prompt]);
    assert!(told.contains("positions for") && told.contains("--window"), "{told}");
    assert!(text(&["sample", folder, "--prompt", &prompt, "--window", "16", "--tokens", "2"]).starts_with(&prompt));
}

/// Rotary positions have no limit, but the user is warned if a sequence is longer than the model was trained on.
#[test]
fn sequences_longer_than_the_model_was_trained_on_are_told() {
    let folders = Folders::new();
    let base = folders.name("base");
    let told = |arguments: &[&str]| String::from_utf8(gapless(arguments).stderr).unwrap();
    let long = "Hello world. ".repeat(12);
    for (arguments, is_told) in [
        (&["sample", &base, "--prompt", &long, "--tokens", "2"][..], true),
        (&["sample", &base, "--prompt", "Hello", "--tokens", "2"], false),
        (&["eval", &base, TEXT, "--sequence", "256"], true),
        (&["eval", &base, TEXT, "--sequence", "128"], false),
    ] {
        let told = told(arguments);
        assert_eq!(told.contains("more than the 128 that the model was trained on"), is_told, "{told}");
    }
}

/// Conversations and prompts are measured by their answers, with the template of the folder.
#[test]
fn answers_are_measured_with_the_template_of_the_folder() {
    let folders = Folders::new();
    let base = folders.name("base");
    let row = json!({ "messages": [{ "role": "user", "content": "a" }, { "role": "assistant", "content": "bcd" }] });
    std::fs::write(folders.path("chat.jsonl"), format!("{row}\n").repeat(5)).unwrap();
    let row = json!({ "prompt": "abc", "completion": "de" });
    std::fs::write(folders.path("prompt.jsonl"), format!("{row}\n").repeat(5)).unwrap();
    let (chat, prompt) = (folders.name("chat.jsonl"), folders.name("prompt.jsonl"));
    let measured = |data: &str, format: &str| {
        let said = text(&["eval", &base, data, "--format", format, "--device", "cpu", "--batch", "4", "--json"]);
        serde_json::from_str::<Value>(&said).unwrap()
    };
    assert!(error(&["eval", &base, &chat, "--format", "chat"]).contains("no chat template"));
    let template = "{% for message in messages %}{{ message['content'] }}|{% endfor %}";
    std::fs::write(folders.path("base/chat_template.jinja"), template).unwrap();
    // An answer has three bytes, and the template ends it.
    let said = measured(&chat, "chat");
    assert!(said["tokens"] == 4 * 5 || said["tokens"] == 3 * 5, "{said}");
    assert_eq!((said["windows"].as_u64(), said["sequence"].as_u64()), (Some(1), Some(128)), "{said}");
    let said = measured(&prompt, "prompt");
    assert!((2 * 5..=3 * 5).contains(&said["tokens"].as_u64().unwrap()), "{said}");
    let told = error(&["eval", &base, &prompt]);
    assert!(told.contains("missing field `text`") && told.contains("--format chat"), "{told}");

    // The adapter has a tokenizer and a template, and only its base names the token that ends a text.
    let adapter = folders.name("adapter");
    std::fs::rename(folders.path("base/chat_template.jinja"), folders.path("adapter/chat_template.jinja")).unwrap();
    std::fs::copy(folders.path("base/tokenizer.json"), folders.path("adapter/tokenizer.json")).unwrap();
    let said = text(&["eval", &adapter, &chat, "--format", "chat", "--device", "cpu", "--json"]);
    let said: Value = serde_json::from_str(&said).unwrap();
    assert!(said["tokens"] == 4 * 5 || said["tokens"] == 3 * 5, "{said}");
    std::fs::remove_file(folders.path("base/generation_config.json")).unwrap();
    folders.set("base/config.json", json!({ "eos_token_id": null }));
    assert!(error(&["eval", &adapter, &chat, "--format", "chat"]).contains("data.end_of_text"));
}

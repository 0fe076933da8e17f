//! Tests of `gapless sample` and `gapless eval`, run as a user would.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use candle_core::{D, DType, Device, IndexOp};

pub fn gapless(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_gapless")).args(arguments).stdin(Stdio::null()).output().unwrap()
}

/// Runs a command that must succeed, and returns its standard output.
pub fn text(arguments: &[&str]) -> String {
    let output = gapless(arguments);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Runs a command that must fail, and returns its standard error.
pub fn error(arguments: &[&str]) -> String {
    let output = gapless(arguments);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    String::from_utf8(output.stderr).unwrap()
}

/// Returns a model with a tokenizer, or `None` if the larger collection does not exist.
fn case() -> Option<PathBuf> {
    let case =
        gapless_testing::next_to_repository("hf").map(|hf| hf.join("models/smollm")).filter(|case| case.exists());
    if case.is_none() {
        gapless_testing::not_checked("there is no ../shared/hf/models/smollm");
    }
    case
}

/// Copies the folder and adds a chat template.
fn with_template(from: &Path, to: &Path) {
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
    let template = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}\
                    {% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}";
    std::fs::write(to.join("chat_template.jinja"), template).unwrap();
}

#[test]
fn text_comes_as_it_is_asked_for() {
    let Some(case) = case() else { return };
    let folder = case.join("checkpoint");
    let folder = folder.to_str().unwrap();
    let sample = |more: &[&str]| {
        text(&[&["sample", folder, "--prompt", "Hello", "--tokens", "24", "--ignore-eos"], more].concat())
    };
    let greedy = sample(&[]);
    assert!(greedy.starts_with("Hello") && greedy.ends_with('\n') && greedy.len() > 16, "{greedy:?}");
    assert_eq!(sample(&["--threads", "1"]), greedy);
    assert_eq!(sample(&["--temperature", "0"]), greedy);
    let drawn = sample(&["--temperature", "1.5", "--top-p", "0.9", "--min-p", "0.01", "--seed", "3"]);
    assert_eq!(sample(&["--temperature", "1.5", "--top-p", "0.9", "--min-p", "0.01", "--seed", "3"]), drawn);
    assert_ne!(drawn, greedy);
    assert_ne!(sample(&["--repetition-penalty", "1.5"]), greedy);
    // The text is also generated with a sliding window and, after that, as a conversation.
    assert!(sample(&["--window", "8"]).starts_with("Hello"));
    let copy = tempfile::tempdir().unwrap();
    with_template(Path::new(folder), copy.path());
    let copy = copy.path().to_str().unwrap();
    let plain =
        text(&["sample", copy, "--prompt", "system: s\nuser: Hello\nassistant: ", "--tokens", "9", "--ignore-eos"]);
    let chat = text(&["sample", copy, "--chat", "--system", "s", "--prompt", "Hello", "--tokens", "9", "--ignore-eos"]);
    assert_eq!(format!("system: s\nuser: Hello\nassistant: {chat}"), plain);

    // GPT-2 has neither a chat template nor a token that begins every text.
    let gpt2 = case.with_file_name("gpt2").join("checkpoint");
    let gpt2 = gpt2.to_str().unwrap();
    assert!(error(&["sample", gpt2, "--prompt", "x", "--chat"]).contains("chat template"));
    assert!(error(&["sample", gpt2]).contains("prompt is empty"));
    assert!(error(&["sample", folder, "--prompt", "x", "--top-p", "2"]).contains("top_p"));
    assert!(error(&["sample", "nowhere", "--prompt", "x"]).contains("nowhere"));
}

#[test]
fn perplexity_is_that_of_the_logits_of_transformers() {
    let Some(case) = case() else { return };
    let folder = case.join("checkpoint");
    let folder = folder.to_str().unwrap();
    let expected = candle_core::safetensors::load(case.join("expected.safetensors"), &Device::Cpu).unwrap();
    let ids: Vec<u32> = expected["input_ids"].i(0).unwrap().to_dtype(DType::U32).unwrap().to_vec1().unwrap();
    let logits: Vec<Vec<f64>> = expected["logits"].i(0).unwrap().to_dtype(DType::F64).unwrap().to_vec2().unwrap();
    assert_eq!(expected["logits"].dim(D::Minus2).unwrap(), ids.len());
    let loss =
        |(logits, &id): (&Vec<f64>, &u32)| logits.iter().map(|x| x.exp()).sum::<f64>().ln() - logits[id as usize];
    let losses: Vec<f64> = logits.iter().zip(&ids[1..]).map(loss).collect();
    let expected = losses.iter().sum::<f64>() / losses.len() as f64;

    let data = tempfile::tempdir().unwrap();
    let bin = data.path().join("ids.bin");
    let bytes = |ids: &[u32]| ids.iter().flat_map(|&id| (id as u16).to_le_bytes()).collect::<Vec<u8>>();
    std::fs::write(&bin, bytes(&ids)).unwrap();
    let object: serde_json::Value =
        serde_json::from_str(&text(&["eval", folder, bin.to_str().unwrap(), "--json"])).unwrap();
    let found = object["loss"].as_f64().unwrap();
    // This is the tolerance for losses in tests/hugging_face.
    assert!((found - expected).abs() <= 2e-5, "{found} is not {expected}");
    assert_eq!(object["perplexity"], found.exp());
    assert_eq!(object["tokens"], ids.len() - 1);

    // At first, the data has several batches of several windows, and an incomplete last batch. After that, the data is
    // a text.
    std::fs::write(&bin, bytes(&ids.repeat(3))).unwrap();
    let eval = |batch: &str| -> serde_json::Value {
        let sequence = ["--sequence", "7", "--json", "--batch", batch];
        serde_json::from_str(&text(&[&["eval", folder, bin.to_str().unwrap()], &sequence[..]].concat())).unwrap()
    };
    let (one, four) = (eval("1"), eval("4"));
    let difference = (one["loss"].as_f64().unwrap() - four["loss"].as_f64().unwrap()).abs();
    // The losses are means of means, rounded to f32.
    assert!(difference <= 1e-6 * one["loss"].as_f64().unwrap(), "{one} {four}");
    let file = data.path().join("a.txt");
    std::fs::write(&file, "Hello world. ".repeat(9)).unwrap();
    assert!(text(&["eval", folder, file.to_str().unwrap()]).starts_with("perplexity "));
    assert!(error(&["eval", folder, "nowhere.txt"]).contains("nowhere.txt"));
}

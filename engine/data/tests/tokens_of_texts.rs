//! The tokens of texts. Settings of other calls in a tokenizer's file are ignored, and the files in its folder
//! determine how documents begin and end.

use std::fs;
use std::path::Path;

use gapless_data::{DataError, DataOptions, Dataset, Source, TextOptions, Tokenizer, Vocabulary, VocabularyChoice};
use serde_json::{Value, json};

/// A byte-level tokenizer, with these special tokens after its bytes and additional entries in its file.
fn tokenizer(special: &[&str], more: Value) -> Value {
    let letter = |byte: u8| char::from_u32(if byte.is_ascii_graphic() { byte.into() } else { 256 + u32::from(byte) });
    let mut vocabulary: serde_json::Map<String, Value> =
        (32..127).map(|byte| (letter(byte).unwrap_or_default().to_string(), json!(byte - 32))).collect();
    // In byte-level BPE, a space is written as Ġ, a line break as Ċ.
    vocabulary.insert("Ġ".into(), json!(0));
    vocabulary.insert("Ċ".into(), json!(95));
    let added: Vec<Value> = special
        .iter()
        .zip(96..)
        .map(|(token, id)| {
            json!({"id": id, "content": token, "special": true, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false})
        })
        .collect();
    let mut file = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "post_processor": null, "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null, "end_of_word_suffix": null,
            "fuse_unk": false, "byte_fallback": false, "ignore_merges": false, "vocab": vocabulary, "merges": []}
    });
    for (key, value) in more.as_object().unwrap() {
        match key.as_str() {
            "dropout" => file["model"]["dropout"] = value.clone(),
            _ => file[key] = value.clone(),
        }
    }
    file
}

/// A post-processor that puts `begin` before a text and `end` after it, with the ids that these tokens have in
/// [`tokenizer`].
fn template(begin: &str, end: &str) -> Value {
    let special = |token: &str| json!({"SpecialToken": {"id": token, "type_id": 0}});
    let known = |token: &str, id: u32| json!({"id": token, "ids": [id], "tokens": [token]});
    json!({"post_processor": {"type": "TemplateProcessing", "single": [special(begin), {"Sequence": {"id": "A", "type_id": 0}}, special(end)],
        "pair": [], "special_tokens": {begin: known(begin, 96), end: known(end, 97)}}})
}

fn write(folder: &Path, files: &[(&str, Value)]) {
    for (name, value) in files {
        fs::write(folder.join(name), value.to_string()).unwrap();
    }
}

/// All tokens of the texts.
fn tokens(folder: &Path, texts: &[&str], text: TextOptions) -> Result<Vec<u32>, DataError> {
    let data = folder.join("data");
    fs::create_dir_all(&data).unwrap();
    for (index, text) in texts.iter().enumerate() {
        fs::write(data.join(format!("{index}.txt")), text).unwrap();
    }
    let vocabulary = VocabularyChoice::File(folder.join("tokenizer.json"));
    let options =
        DataOptions { vocabulary, validation_every: 0, text, cache: folder.join("cache"), ..DataOptions::default() };
    let dataset = Dataset::prepare(&Source::Path(data), &options)?;
    let count = dataset.training_tokens() as usize;
    let (mut ids, mut targets) = (vec![0; count - 1], vec![0; count - 1]);
    dataset.training(count - 1, 1, 0)?.fill(0, 0, &mut ids, &mut targets)?;
    ids.extend(targets.last());
    let framing = |dataset: &Dataset| dataset.vocabulary().framing();
    let again = Dataset::prepare(&Source::Path(folder.join("data")), &options)?;
    assert_eq!((framing(&again), again.hash()), (framing(&dataset), dataset.hash()));
    assert_eq!(framing(&dataset), Vocabulary::open_with(&folder.join("tokenizer.json"), &options.text)?.framing());
    // Opening the folder again gives the same tokens.
    assert_eq!(Dataset::open_prepared(dataset.folder().unwrap())?.hash(), dataset.hash());
    Ok(ids)
}

#[test]
fn settings_of_other_calls_do_not_count() {
    let truncation = json!({"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0});
    let padding = |strategy: Value| json!({"strategy": strategy, "direction": "Left", "pad_to_multiple_of": 8, "pad_id": 5, "pad_type_id": 0, "pad_token": "%"});
    for more in [
        json!({}),
        json!({ "truncation": truncation }),
        json!({ "padding": padding(json!({"Fixed": 40})) }),
        json!({ "padding": padding(json!("BatchLongest")), "truncation": truncation }),
        json!({ "dropout": 0.9 }),
    ] {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), &[("tokenizer.json", tokenizer(&["</s>"], more.clone()))]);
        let ids = tokens(folder.path(), &["a long text"], TextOptions::default()).unwrap();
        assert_eq!(ids, [65, 0, 76, 79, 78, 71, 0, 84, 69, 88, 84, 96], "{more}");
        let opened = Tokenizer::open(folder.path()).unwrap();
        assert_eq!(opened.encode("a long text", true).unwrap(), ids[..11], "{more}");
        assert_eq!(opened.encode_spans("a long text", &[], false).unwrap().0, ids[..11], "{more}");
    }
}

#[test]
fn the_end_of_a_document_is_the_one_that_the_files_name() {
    let special = ["<pad>", "<eos>", "</s>", "<|im_end|>"];
    for (files, end) in [
        (vec![], 98),
        (vec![("tokenizer_config.json", json!({"eos_token": "<|im_end|>"}))], 99),
        (vec![("tokenizer_config.json", json!({"eos_token": {"__type": "AddedToken", "content": "</s>"}}))], 98),
        (vec![("special_tokens_map.json", json!({"eos_token": {"content": "<|im_end|>"}}))], 99),
        (
            vec![
                ("tokenizer_config.json", json!({"eos_token": null})),
                ("config.json", json!({"eos_token_id": 98})),
                ("generation_config.json", json!({"eos_token_id": 97})),
            ],
            98,
        ),
        (vec![("config.json", json!({"eos_token_id": [99, 97]}))], 99),
        (vec![("generation_config.json", json!({"eos_token_id": [98, 97]}))], 98),
        // A name is ignored if the tokenizer has no such token.
        (
            vec![
                ("tokenizer_config.json", json!({"eos_token": "<end>"})),
                ("config.json", json!({"eos_token_id": 99})),
            ],
            99,
        ),
    ] {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), &[("tokenizer.json", tokenizer(&special, json!({})))]);
        write(folder.path(), &files);
        let ids = tokens(folder.path(), &["a", "b"], TextOptions::default()).unwrap();
        assert_eq!(ids, [65, end, 66, end], "{files:?}");
        assert_eq!(Tokenizer::open(folder.path()).unwrap().eos(), Some(end), "{files:?}");
    }
}

/// Gemma's vocabulary also contains `</s>`, but as an HTML tag and not as a special token.
#[test]
fn a_token_that_is_text_ends_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let mut file = tokenizer(&["<bos>", "<eos>"], json!({}));
    let vocabulary = file["model"]["vocab"].as_object_mut().unwrap();
    vocabulary.remove("~");
    vocabulary.insert("</s>".into(), json!(94));
    write(folder.path(), &[("tokenizer.json", file.clone())]);
    assert_eq!(tokens(folder.path(), &["a"], TextOptions::default()).unwrap(), [65, 97]);
    file["added_tokens"].as_array_mut().unwrap().pop();
    write(folder.path(), &[("tokenizer.json", file)]);
    let error = Vocabulary::open(&folder.path().join("tokenizer.json")).unwrap_err();
    assert!(error.to_string().contains("data.end_of_text"), "{error}");
}

#[test]
fn documents_begin_as_the_post_processor_says_and_special_tokens_in_a_text_are_text() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), &[("tokenizer.json", tokenizer(&["<s>", "</s>"], template("<s>", "</s>")))]);
    let ids = |text: &str, options: TextOptions| tokens(folder.path(), &[text], options).unwrap();
    let default = TextOptions::default;
    assert_eq!(ids("a", default()), [96, 65, 97]);
    assert_eq!(ids("a", TextOptions { begin: false, ..default() }), [65, 97]);
    assert_eq!(ids("a</s>b", default()), [96, 65, 28, 15, 83, 30, 66, 97]);
    assert_eq!(ids("a</s>b", TextOptions { special: true, ..default() }), [96, 65, 97, 66, 97]);
    assert_eq!(ids("a", TextOptions { end: Some("<s>".into()), ..default() }), [96, 65, 96]);
    let vocabulary = Vocabulary::open(&folder.path().join("tokenizer.json")).unwrap();
    assert_eq!(vocabulary.encode_beginning("a").unwrap(), [96, 65]);
    let said = "documents begin with <s> (96) and end with </s> (97), by the names of its tokens";
    assert_eq!(vocabulary.framing().unwrap(), said);
    let error = tokens(folder.path(), &["a"], TextOptions { end: Some("<end>".into()), ..default() }).unwrap_err();
    assert!(matches!(error, DataError::NoToken { .. }), "{error}");
}

/// A document that is large enough to be written in several pieces.
#[test]
fn a_long_document_begins_and_ends_once() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), &[("tokenizer.json", tokenizer(&["<s>", "</s>"], template("<s>", "</s>")))]);
    let text = "a line of text\n".repeat(20_000);
    let ids = tokens(folder.path(), &[&text, "b"], TextOptions::default()).unwrap();
    let at = |special: u32| ids.iter().enumerate().filter(move |(_, id)| **id == special).map(|(at, _)| at);
    assert_eq!(at(96).collect::<Vec<_>>(), [0, text.len() + 2]);
    assert_eq!(at(97).collect::<Vec<_>>(), [text.len() + 1, text.len() + 4]);
}

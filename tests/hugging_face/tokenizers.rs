//! Compares tokenizers and chat templates with those of transformers.

use std::fmt::Write;

use gapless::engine::data::Tokenizer;
use serde_json::Value;
use sha2::{Digest, Sha256};

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn hash(ids: &[u32]) -> String {
    let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
    Sha256::digest(&bytes).iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").unwrap();
        text
    })
}

fn check_text(tokenizer: &Tokenizer, case: &Value) {
    let text = case["text"].as_str().unwrap();
    let whole = text.repeat(case["repeat"].as_u64().unwrap() as usize);
    let found = tokenizer.encode(&whole, false).unwrap();
    assert_eq!(
        (found.len() as u64, hash(&found)),
        (case["count"].as_u64().unwrap(), case["sha256_of_ids_u32_le"].as_str().unwrap().into()),
        "{text:?}"
    );
    if case["ids"].is_null() {
        return;
    }
    let with_special = tokenizer.encode(text, true).unwrap();
    assert_eq!((found, &with_special), (ids(&case["ids"]), &ids(&case["ids_with_special"])), "{text:?}");
    assert_eq!(tokenizer.decode(&with_special, true).unwrap(), case["decoded"].as_str().unwrap(), "{text:?}");
    let plain = case["decoded_skip_special"].as_str().unwrap();
    assert_eq!(tokenizer.decode(&with_special, false).unwrap(), plain, "{text:?}");
    // Decoding token by token gives the same text, at whichever token it starts.
    for cut in 0..with_special.len().min(40) {
        let (prompt, rest) = with_special.split_at(cut);
        let begun = tokenizer.decode(prompt, false).unwrap();
        let Some(expected) = plain.strip_prefix(begun.as_str()) else { continue };
        let mut stream = tokenizer.stream().after(prompt).unwrap();
        let mut streamed: String = rest.iter().filter_map(|&id| stream.push(id).unwrap()).collect();
        streamed += &stream.finish().unwrap();
        assert_eq!(streamed, expected, "{text:?} from {cut}");
    }
}

fn check_chat(tokenizer: &Tokenizer, case: &Value) {
    let template = tokenizer.chat_template().unwrap();
    let messages = case["messages"].as_array().unwrap();
    let text = template.render(messages, false);
    if let Some(error) = case["error"].as_str() {
        let raised = error.split_once(": ").unwrap().1;
        assert!(text.unwrap_err().to_string().contains(raised), "{error}");
        return;
    }
    let text = text.unwrap();
    assert_eq!(text, case["text"].as_str().unwrap());
    assert_eq!(template.render(messages, true).unwrap(), case["text_with_generation_prompt"].as_str().unwrap());
    assert_eq!(tokenizer.encode(&text, false).unwrap(), ids(&case["ids"]), "{text:?}");
    check_answers(tokenizer, case, messages, &text);
}

/// Checks that the tokens of the answers count, and no others.
fn check_answers(tokenizer: &Tokenizer, case: &Value, messages: &[Value], text: &str) {
    let answers = tokenizer.chat_template().unwrap().answers(messages);
    if case["assistant_spans_chars"].is_null() {
        assert!(answers.unwrap_err().to_string().contains("{% generation %}"), "{text:?}");
        return;
    }
    let (same, spans) = answers.unwrap();
    assert_eq!(same, text);
    let (tokens, counts) = tokenizer.encode_spans(text, &spans, false).unwrap();
    assert_eq!(tokens, ids(&case["ids"]), "{text:?}");
    let (required, allowed) = (ids(&case["mask_required"]), ids(&case["mask_allowed"]));
    let fits = |index: usize| u32::from(counts[index]) >= required[index] && u32::from(counts[index]) <= allowed[index];
    assert!(counts.len() == required.len() && (0..counts.len()).all(fits), "{text:?}: {counts:?}");
}

#[test]
fn tokenizers_and_templates_agree_with_transformers() {
    let (mut texts, mut chats) = (0, 0);
    for folder in crate::roots().iter().flat_map(|root| crate::folders(&root.join("tokenizers"))) {
        let tokenizer = Tokenizer::open(&folder).unwrap();
        let cases: Value = serde_json::from_slice(&std::fs::read(folder.join("cases.json")).unwrap()).unwrap();
        assert!(tokenizer.size() as u64 <= cases["vocab_size_with_added"].as_u64().unwrap());
        for case in cases["texts"].as_array().unwrap() {
            check_text(&tokenizer, case);
            texts += 1;
        }
        for case in cases["chats"].as_array().unwrap() {
            check_chat(&tokenizer, case);
            chats += 1;
        }
        println!("{} agrees", folder.display());
    }
    println!("{texts} texts, {chats} conversations");
    assert!(texts > 0 && chats > 0);
}

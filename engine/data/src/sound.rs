//! Checks of a tokenizer.json for assumptions that the tokenizers library makes. The checks run before the library
//! reads the file. If the library panics nevertheless, the panic becomes an error.
//!
//! In: the text of an untrusted file. Out: nothing, or the reason why the file is refused. The vocabulary is not
//! checked here; the library checks it.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use serde_json::Value as Json;

use crate::DataError;

/// The largest factor by which all replacements together may lengthen a text. Real tokenizers write three bytes for a
/// space.
const MAX_GROWTH: f64 = 256.0;

/// The most characters of a word in WordPiece, whose time grows with the square of a word's length.
const LONGEST_WORD: u64 = 1 << 14;

/// The parts of a tokenizer.json that are checked.
#[derive(Deserialize)]
struct File {
    #[serde(default)]
    normalizer: Json,
    #[serde(default)]
    post_processor: Json,
    #[serde(default)]
    decoder: Json,
    #[serde(default)]
    model: Model,
}

#[derive(Default, Deserialize)]
struct Model {
    #[serde(default)]
    max_input_chars_per_word: Json,
}

/// Checks that a file does not make the library panic, run out of memory or take hours.
///
/// # Errors
/// Returns [`DataError::Tokenizer`] with the offending part and the limit.
pub(crate) fn check(json: &str, path: &Path) -> Result<(), DataError> {
    let wrong = |reason: String| DataError::Tokenizer { path: path.to_owned(), reason };
    let file: File = serde_json::from_str(json).map_err(|error| wrong(error.to_string()))?;
    for (name, part) in [("normalizer", &file.normalizer), ("decoder", &file.decoder)] {
        let mut growth = 1.0;
        each(part, &mut |part| {
            match part["type"].as_str() {
                Some("Replace") => growth *= growth_of(part)?,
                Some("Precompiled") => check_charsmap(part)?,
                _ => {}
            }
            Ok(())
        })
        .map_err(|why: String| wrong(format!("its {name} {why}")))?;
        if growth > MAX_GROWTH {
            let why = format!("its {name} makes a text up to {growth:.0} × as long; the limit is {MAX_GROWTH} ×");
            return Err(wrong(why));
        }
    }
    each(&file.post_processor, &mut check_template).map_err(|why| wrong(format!("its post_processor {why}")))?;
    match file.model.max_input_chars_per_word.as_u64().filter(|&word| word > LONGEST_WORD) {
        Some(word) => Err(wrong(format!("its model has max_input_chars_per_word {word}; the limit is {LONGEST_WORD}"))),
        None => Ok(()),
    }
}

/// Visits a part. If the part is a sequence, also visits its parts, recursively.
fn each(part: &Json, visit: &mut impl FnMut(&Json) -> Result<(), String>) -> Result<(), String> {
    visit(part)?;
    let inner = ["normalizers", "decoders", "processors"].into_iter().filter_map(|name| part[name].as_array());
    inner.flatten().try_for_each(|part| each(part, visit))
}

/// Returns the largest factor by which a replacement can lengthen a text.
fn growth_of(replace: &Json) -> Result<f64, String> {
    let content = replace["content"].as_str().unwrap_or_default().len();
    let replaced = match replace["pattern"]["String"].as_str() {
        Some("") => return Err("replaces the empty text, which matches everywhere".into()),
        Some(text) => text.len(),
        // A match of a regular expression has at least one byte.
        None => 1,
    };
    Ok((content as f64 / replaced as f64).max(1.0))
}

/// Checks a charsmap. Its first four bytes are the size in bytes of the trie that follows, which has four bytes per
/// node (`spm_precompiled`).
fn check_charsmap(precompiled: &Json) -> Result<(), String> {
    let text = precompiled["precompiled_charsmap"].as_str().unwrap_or_default();
    let charsmap =
        STANDARD.decode(text).map_err(|error| format!("has a precompiled_charsmap that is not base64: {error}"))?;
    let (bytes, trie) = (charsmap.len(), charsmap.first_chunk().map_or(0, |first| u32::from_le_bytes(*first)));
    if trie as usize > bytes || !trie.is_multiple_of(4) || trie == 0 {
        return Err(format!("has a precompiled_charsmap of {bytes} bytes, which declares a trie of {trie} bytes"));
    }
    Ok(())
}

/// Checks that a template's special tokens are listed with their ids.
fn check_template(processor: &Json) -> Result<(), String> {
    if processor["type"] != "TemplateProcessing" {
        return Ok(());
    }
    let pieces = ["single", "pair"].into_iter().filter_map(|name| processor[name].as_array()).flatten();
    let mut named = pieces.filter_map(|piece| piece["SpecialToken"]["id"].as_str());
    match named.find(|token| processor["special_tokens"].get(token).is_none()) {
        Some(token) => Err(format!("writes the special token {token:?}, which special_tokens does not list")),
        None => Ok(()),
    }
}

/// Texts of all kinds, to find out whether a tokenizer panics.
const PROBES: [&str; 5] = ["a", "A b aaaa\n", "  \t", "é1漢\u{1f600}", ""];

/// Encodes and decodes a few texts, so that a file that makes the library panic is refused when the file is opened.
///
/// # Errors
/// Returns the library's error, or its panic as an error.
pub(crate) fn probe(tokenizer: &tokenizers::Tokenizer, path: &Path) -> Result<(), DataError> {
    for text in PROBES {
        guarded(path, || {
            tokenizer.encode(text, true).and_then(|encoding| tokenizer.decode(encoding.get_ids(), false))
        })?;
    }
    Ok(())
}

/// Calls the library and turns a panic into an error.
///
/// # Errors
/// Returns the library's error, or its panic as an error.
pub(crate) fn guarded<T>(path: &Path, call: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, DataError> {
    // The only state of the library that outlives a call are caches behind locks, so a panic leaves nothing
    // inconsistent.
    let reason = match catch_unwind(AssertUnwindSafe(call)) {
        Ok(Ok(done)) => return Ok(done),
        Ok(Err(error)) => error.to_string(),
        Err(panic) => format!("the tokenizers library panicked: {}", message(&*panic)),
    };
    Err(DataError::Tokenizer { path: path.to_owned(), reason })
}

fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("for an unknown reason")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn files_that_the_library_cannot_bear_are_refused() {
        let replace = |pattern: Json, content: &str| json!({"type": "Replace", "pattern": pattern, "content": content});
        let growing = replace(json!({"String": "a"}), &"a".repeat(20));
        let template = |token: &str| {
            json!({"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": token, "type_id": 0}}], "pair": [],
                "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}})
        };
        for (file, expected) in [
            (json!({"normalizer": replace(json!({"String": " "}), "▁")}), None),
            (json!({ "normalizer": growing }), None),
            (json!({"normalizer": {"type": "Sequence", "normalizers": [growing, growing]}}), Some("up to 400 ×")),
            (
                json!({"decoder": {"type": "Sequence", "decoders": [growing, growing]}}),
                Some("its decoder makes a text up to 400 ×"),
            ),
            (json!({"normalizer": replace(json!({"Regex": "a+"}), &"b".repeat(300))}), Some("up to 300 ×")),
            (json!({"normalizer": replace(json!({"String": ""}), "x")}), Some("the empty text")),
            (json!({"post_processor": template("<s>")}), None),
            (json!({"post_processor": {"type": "Sequence", "processors": [template("[NONE]")]}}), Some("\"[NONE]\"")),
            (json!({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAAgP8="}}), Some("2147483648")),
            (json!({"normalizer": {"type": "Precompiled", "precompiled_charsmap": ""}}), Some("of 0 bytes")),
            (json!({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "BAAAAAAAAAAA"}}), None),
            (json!({"model": {"max_input_chars_per_word": 100}}), None),
            (json!({"model": {"max_input_chars_per_word": 1_000_000_000}}), Some("max_input_chars_per_word")),
        ] {
            let found = check(&file.to_string(), Path::new("t.json")).map_err(|error| error.to_string());
            match expected {
                None => assert_eq!(found, Ok(()), "{file}"),
                Some(part) => assert!(found.as_ref().is_err_and(|error| error.contains(part)), "{file}: {found:?}"),
            }
        }
        let failed = guarded::<()>(Path::new("t.json"), || panic!("no room")).unwrap_err().to_string();
        assert!(failed.contains("t.json") && failed.contains("no room"), "{failed}");
    }
}

//! The special tokens around a document, and the treatment of special tokens whose text occurs in a document.
//!
//! In: a tokenizer, the files in its folder, and the options of a run. Out: a [`Framing`], which also records the file
//! or option that named the end token. Never: a token that the tokenizer does not have.

use std::path::Path;

use serde::{Deserialize, Serialize};
use tokenizers::Tokenizer;

use crate::DataError;
use crate::chat::{read_json, special_token};

/// The token that ends documents in tokenizers trained by this crate.
pub(crate) const END_OF_TEXT: &str = "<|endoftext|>";

/// Common names of the end-of-text token. They are tried if no file names that token.
const END_OF_TEXT_NAMES: [&str; 6] =
    [END_OF_TEXT, "<|end_of_text|>", "<｜end▁of▁sentence｜>", "</s>", "<eos>", "[SEP]"];

/// Options for turning a document into token ids.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct TextOptions {
    /// True if a document begins with the tokens that the tokenizer's post-processor puts before a text, such as `<s>`
    /// for Llama 2 and `<bos>` for Gemma. GPT-2 and Qwen have no such tokens. The default is true, as in transformers.
    pub begin: bool,
    /// The text of the token that ends a document. By default, the files in the tokenizer's folder name this token.
    pub end: Option<String>,
    /// True if text that spells a special token is encoded as that token, as in transformers. By default it is encoded
    /// as plain text, so that a document about a tokenizer does not end in its middle.
    pub special: bool,
}

impl Default for TextOptions {
    fn default() -> Self {
        Self { begin: true, end: None, special: false }
    }
}

/// The tokens that a tokenizer puts around each document.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Framing {
    pub begin: Vec<u32>,
    pub end: u32,
    pub end_token: String,
    /// The file or option that named the end token.
    pub source: &'static str,
}

impl Framing {
    /// Determines the framing of a tokenizer at a path. The end token is named by the first of these that names one:
    /// 1. the options
    /// 2. `eos_token` in tokenizer_config.json, then in special_tokens_map.json, as in transformers
    /// 3. `eos_token_id` in the model's config.json, then in generation_config.json
    /// 4. a token of the tokenizer with one of the common names
    ///
    /// # Errors
    /// Returns an error if the tokenizer does not have the end token of the options, if no end token is found, or if a
    /// file is not JSON.
    pub fn of(tokenizer: &Tokenizer, path: &Path, options: &TextOptions) -> Result<Self, DataError> {
        let begin = if options.begin { begin_of(tokenizer, path)? } else { Vec::new() };
        let (source, end_token, end) = match &options.end {
            Some(token) => {
                let end = tokenizer
                    .token_to_id(token)
                    .ok_or_else(|| DataError::NoToken { path: path.to_owned(), token: token.clone() })?;
                ("data.end_of_text", token.clone(), end)
            }
            None => end_of(tokenizer, path)?
                .ok_or_else(|| DataError::NoEndOfText { path: path.to_owned(), wanted: END_OF_TEXT })?,
        };
        Ok(Self { begin, end, end_token, source })
    }
}

/// The tokens that the post-processor puts before a text.
fn begin_of(tokenizer: &Tokenizer, path: &Path) -> Result<Vec<u32>, DataError> {
    let ids = |special| {
        let encoding = tokenizer
            .encode_fast("a", special)
            .map_err(|error| DataError::Tokenizer { path: path.to_owned(), reason: error.to_string() })?;
        Ok::<_, DataError>(encoding.get_ids().to_vec())
    };
    let (bare, all) = (ids(false)?, ids(true)?);
    let at = if bare.is_empty() { None } else { all.windows(bare.len()).position(|window| window == bare) };
    Ok(all[..at.unwrap_or(0)].to_vec())
}

type EndToken = (&'static str, String, u32);

fn end_of(tokenizer: &Tokenizer, path: &Path) -> Result<Option<EndToken>, DataError> {
    let folder = path.parent().unwrap_or(Path::new("."));
    for file in ["tokenizer_config.json", "special_tokens_map.json"] {
        let token = special_token(&read_json(folder, file)?, "eos_token");
        let Some(token) = token else { continue };
        match tokenizer.token_to_id(&token) {
            Some(id) => return Ok(Some((file, token, id))),
            None => tracing::warn!("{}: the tokenizer does not have the eos_token {token:?} of {file}", path.display()),
        }
    }
    for file in ["config.json", "generation_config.json"] {
        let found = read_json(folder, file)?["eos_token_id"].take();
        // If the file lists several ids, the first id is that of the tokenizer's end token.
        let id = if found.is_array() { found[0].as_u64() } else { found.as_u64() };
        let id = id.and_then(|id| u32::try_from(id).ok());
        if let Some((id, token)) = id.and_then(|id| Some((id, tokenizer.id_to_token(id)?))) {
            return Ok(Some((file, token, id)));
        }
    }
    // Special tokens are tried before tokens that are plain text for the tokenizer. For Gemma, for example, `</s>` is
    // an HTML tag.
    let special: Vec<String> =
        tokenizer.get_added_tokens_decoder().into_values().filter(|it| it.special).map(|it| it.content).collect();
    let named = |name: &&str| special.is_empty() || special.iter().any(|token| token == name);
    Ok(END_OF_TEXT_NAMES
        .into_iter()
        .filter(named)
        .find_map(|name| Some(("the names of its tokens", name.to_owned(), tokenizer.token_to_id(name)?))))
}

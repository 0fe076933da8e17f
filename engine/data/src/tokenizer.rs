//! The tokenizer of a Hugging Face folder.
//!
//! In: a folder with tokenizer.json and, usually, tokenizer_config.json and a chat template. Out: ids with the special
//! tokens with which the model was trained, text that is decoded token by token, and conversations as text. A special
//! token is never encoded as plain text.

use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};

use tokenizers::models::ModelWrapper;

use crate::compressed::read_text;
use crate::framing::Framing;
use crate::sound::{check, guarded, probe};
use crate::{ChatTemplate, DataError, TextOptions, TextStream};

/// The most bytes of a tokenizer.json. A file with 256,000 tokens has 35 MiB.
const MAX_BYTES: u64 = 512 << 20;

/// A tokenizer, its special tokens, and its chat template.
pub struct Tokenizer {
    path: PathBuf,
    tokenizer: Box<tokenizers::Tokenizer>,
    eos: Option<u32>,
    template: Option<ChatTemplate>,
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokenizer").field("path", &self.path).field("eos", &self.eos).finish_non_exhaustive()
    }
}

impl Tokenizer {
    /// Opens the tokenizer in a folder.
    ///
    /// # Errors
    /// Returns an error if tokenizer.json is missing or not a tokenizer, if tokenizer_config.json is not JSON, or if
    /// the template cannot be parsed.
    pub fn open(folder: &Path) -> Result<Self, DataError> {
        let path = folder.join("tokenizer.json");
        let tokenizer = read(&path)?;
        let eos = match Framing::of(&tokenizer, &path, &TextOptions::default()) {
            Ok(framing) => Some(framing.end),
            Err(DataError::NoEndOfText { .. }) => None,
            Err(error) => return Err(error),
        };
        let template = ChatTemplate::open(folder)?;
        Ok(Self { path, tokenizer: Box::new(tokenizer), eos, template })
    }

    /// Returns the token that ends a text, or `None` if none is known. The token is determined like the default of
    /// [`TextOptions::end`].
    pub fn eos(&self) -> Option<u32> {
        self.eos
    }

    /// Number of rows that an embedding needs for all ids of this tokenizer.
    pub fn size(&self) -> usize {
        // Ids may have gaps, so counting tokens is not enough.
        self.tokenizer.get_vocab(true).values().max().map_or(0, |&id| id as usize + 1)
    }

    /// Returns the ids of a text. Special tokens that the text spells out become their ids. If `with_special`, the
    /// special tokens that belong around a text are added. The output of [`ChatTemplate::render`] already contains
    /// them.
    ///
    /// # Errors
    /// Returns an error if the tokenizer returns one.
    pub fn encode(&self, text: &str, with_special: bool) -> Result<Vec<u32>, DataError> {
        let encoding = guarded(&self.path, || self.tokenizer.encode_fast(text, with_special))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Like [`Self::encode`]. For each id, it also returns whether any of its bytes lie in one of the spans, such as
    /// those of [`ChatTemplate::answers`].
    ///
    /// # Errors
    /// Returns an error if the tokenizer returns one.
    pub fn encode_spans(
        &self,
        text: &str,
        spans: &[Range<usize>],
        with_special: bool,
    ) -> Result<(Vec<u32>, Vec<bool>), DataError> {
        let encoding = guarded(&self.path, || self.tokenizer.encode(text, with_special))?;
        Ok((encoding.get_ids().to_vec(), are_inside(encoding.get_offsets(), spans)))
    }

    /// Returns the text of ids. If `with_special`, special tokens are spelled out; otherwise they are left out.
    ///
    /// # Errors
    /// Returns an error if the tokenizer returns one.
    pub fn decode(&self, ids: &[u32], with_special: bool) -> Result<String, DataError> {
        guarded(&self.path, || self.tokenizer.decode(ids, !with_special))
    }

    /// Decodes tokens as they arrive. Special tokens are left out.
    pub fn stream(&self) -> TextStream<'_> {
        TextStream::new(|ids| self.decode(ids, false))
    }

    /// Returns the chat template, or `None` if the folder has none.
    pub fn chat_template(&self) -> Option<&ChatTemplate> {
        self.template.as_ref()
    }
}

/// Reads a tokenizer.json. Its settings for truncation, padding and dropout are ignored. They come from the last call
/// before the file was saved, or from the training of the tokenizer's model. So texts are encoded whole, without
/// padding and deterministically, as in transformers.
///
/// # Errors
/// Returns an error if the file is missing, is not a tokenizer, or would make the library panic.
pub(crate) fn read(path: &Path) -> Result<tokenizers::Tokenizer, DataError> {
    let json = read_text(path, MAX_BYTES).map_err(|error| DataError::read(path, error))?;
    check(&json, path)?;
    // `parse` is already compiled in the tokenizers crate. `from_bytes` would compile the whole deserializer into this
    // crate.
    let mut tokenizer: tokenizers::Tokenizer = guarded(path, || json.parse())?;
    tokenizer.with_padding(None).with_truncation(None).map_err(|error| wrong(path, error))?;
    // A vocabulary is large, so the model is copied only if a setting has to change.
    let settled = match tokenizer.get_model() {
        ModelWrapper::BPE(bpe) if bpe.dropout.is_some() => {
            let mut bpe = bpe.clone();
            bpe.dropout = None;
            Some(ModelWrapper::BPE(bpe))
        }
        ModelWrapper::Unigram(unigram) if unigram.alpha.is_some() || unigram.nbest_size.is_some() => {
            let mut unigram = unigram.clone();
            (unigram.alpha, unigram.nbest_size) = (None, None);
            Some(ModelWrapper::Unigram(unigram))
        }
        _ => None,
    };
    if let Some(model) = settled {
        tokenizer.with_model(model);
    }
    probe(&tokenizer, path)?;
    Ok(tokenizer)
}

/// Returns for each token whether any of its bytes lie in one of the spans. The offsets of a white-space token may be
/// empty; such a token counts as one byte.
pub(super) fn are_inside(offsets: &[(usize, usize)], spans: &[Range<usize>]) -> Vec<bool> {
    let is_inside =
        |&(start, end): &(usize, usize)| spans.iter().any(|span| start < span.end && end.max(start + 1) > span.start);
    offsets.iter().map(is_inside).collect()
}

fn wrong(path: &Path, error: impl fmt::Display) -> DataError {
    DataError::Tokenizer { path: path.to_owned(), reason: error.to_string() }
}

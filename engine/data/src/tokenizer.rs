//! A tokenizer as a Hugging Face folder has it.
//!
//! In: a folder with tokenizer.json and, as a rule, tokenizer_config.json and a chat template. Out: ids with the special tokens that the
//! model was trained with, text as its tokens come, conversations as text. Never: a special token that is taken for plain text.

use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};

use tokenizers::models::ModelWrapper;

use crate::compressed::read_text;
use crate::framing::Framing;
use crate::sound::{check, guarded, probe};
use crate::{ChatTemplate, DataError, TextOptions, TextStream};

/// Bytes of a tokenizer.json, at most: those of 256,000 tokens have 35 MiB.
const MOST_BYTES: u64 = 512 << 20;

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
    /// Opens a folder.
    ///
    /// # Errors
    /// A tokenizer.json that is missing or no tokenizer; a tokenizer_config.json that is no JSON; a template with a mistake.
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

    /// The token that ends a text, as [`TextOptions::end`] has it by default.
    pub fn eos(&self) -> Option<u32> {
        self.eos
    }

    /// Rows that an embedding of its ids needs.
    pub fn size(&self) -> usize {
        // Ids may have holes, so that counting tokens would not do.
        self.tokenizer.get_vocab(true).values().max().map_or(0, |&id| id as usize + 1)
    }

    /// The ids of a text, in which special tokens may be spelled out; with those that belong around it, or without, as for what
    /// [`ChatTemplate::render`] makes.
    ///
    /// # Errors
    /// When the tokenizer refuses.
    pub fn encode(&self, text: &str, with_special: bool) -> Result<Vec<u32>, DataError> {
        let encoding = guarded(&self.path, || self.tokenizer.encode_fast(text, with_special))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// [`Self::encode`], and of each id whether any of its bytes stand in one of the spans, as of [`ChatTemplate::answers`].
    ///
    /// # Errors
    /// When the tokenizer refuses.
    pub fn encode_spans(
        &self,
        text: &str,
        spans: &[Range<usize>],
        with_special: bool,
    ) -> Result<(Vec<u32>, Vec<bool>), DataError> {
        let encoding = guarded(&self.path, || self.tokenizer.encode(text, with_special))?;
        Ok((encoding.get_ids().to_vec(), are_inside(encoding.get_offsets(), spans)))
    }

    /// The text of ids, special tokens spelled out or left out.
    ///
    /// # Errors
    /// When the tokenizer refuses.
    pub fn decode(&self, ids: &[u32], with_special: bool) -> Result<String, DataError> {
        guarded(&self.path, || self.tokenizer.decode(ids, !with_special))
    }

    /// Text as its tokens come. Special tokens are left out.
    pub fn stream(&self) -> TextStream<'_> {
        TextStream::new(|ids| self.decode(ids, false))
    }

    /// How conversations are written, if the folder says so.
    pub fn chat_template(&self) -> Option<&ChatTemplate> {
        self.template.as_ref()
    }
}

/// Reads a tokenizer.json. Truncation, padding and dropout in it are settings of the call that was made last before it was saved, or of
/// how its model was trained: texts are encoded whole, alone, and the same every time, as transformers does.
///
/// # Errors
/// A file that is missing, no tokenizer, or one that the library cannot bear.
pub(crate) fn read(path: &Path) -> Result<tokenizers::Tokenizer, DataError> {
    let json = read_text(path, MOST_BYTES).map_err(|error| DataError::read(path, error))?;
    check(&json, path)?;
    // `parse` is compiled with the tokenizers, where `from_bytes` would compile all that there can be in a file here.
    let mut tokenizer: tokenizers::Tokenizer = guarded(path, || json.parse())?;
    tokenizer.with_padding(None).with_truncation(None).map_err(|error| wrong(path, error))?;
    // A vocabulary is large, and few are copied for this.
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

/// Of each token whether any of its bytes stand in one of the spans. A token of white space may say that it has no bytes.
pub(super) fn are_inside(offsets: &[(usize, usize)], spans: &[Range<usize>]) -> Vec<bool> {
    let is_inside =
        |&(start, end): &(usize, usize)| spans.iter().any(|span| start < span.end && end.max(start + 1) > span.start);
    offsets.iter().map(is_inside).collect()
}

fn wrong(path: &Path, error: impl fmt::Display) -> DataError {
    DataError::Tokenizer { path: path.to_owned(), reason: error.to_string() }
}

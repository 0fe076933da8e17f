//! Vocabularies: from text to token ids and back.

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use aho_corasick::AhoCorasick;
use serde_json::{Map, Value, json};
use tokenizers::models::TrainerWrapper;
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, Tokenizer};

use crate::encode::pieces_for_training;
use crate::framing::{END_OF_TEXT, Framing};
use crate::sound::guarded;
use crate::tokenizer::{are_inside, read};
use crate::{DataError, TextOptions, TextStream};

/// The smallest byte-level vocabulary: every byte, and the end-of-text token.
const LEAST_BPE_SIZE: usize = 256 + 1;

/// The choice of a dataset's vocabulary.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum VocabularyChoice {
    /// The 256 bytes. Byte 0 ends a document, since no text contains it.
    Bytes,
    /// Byte-level BPE, trained on the corpus. For .bin files without a tokenizer, only the size is used.
    Bpe {
        /// Number of tokens, including the end-of-text token.
        size: usize,
    },
    /// An existing `tokenizer.json`.
    File(PathBuf),
    /// Bare ids, for a model whose tokenizer is missing. Text cannot be encoded.
    Ids {
        /// Number of tokens.
        size: usize,
    },
}

impl VocabularyChoice {
    /// Byte-level BPE of this size, trained on the corpus. If the size is 256, plain bytes.
    pub fn of_size(size: usize) -> Self {
        if size == 256 { Self::Bytes } else { Self::Bpe { size } }
    }
}

/// A mapping from text to token ids and back.
///
/// ```
/// use gapless_data::Vocabulary;
/// let bytes = Vocabulary::bytes();
/// assert_eq!(bytes.encode("Hé")?, [72, 195, 169]);
///
/// let trained = Vocabulary::train(["one fish two fish", "red fish blue fish"].into_iter(), 265)?;
/// let ids = trained.encode("two red fish")?;
/// assert!(ids.len() < "two red fish".len());
/// assert_eq!(trained.decode(&ids)?, "two red fish");
/// # Ok::<(), gapless_data::DataError>(())
/// ```
#[derive(Debug, Clone)]
pub struct Vocabulary {
    kind: Kind,
}

#[derive(Debug, Clone)]
enum Kind {
    Bytes,
    Tokenizer { tokenizer: Box<Tokenizer>, size: usize, framing: Framing, spelled: Option<AhoCorasick>, json: String },
    Ids { size: usize },
}

impl Vocabulary {
    /// The vocabulary of the 256 bytes.
    pub fn bytes() -> Self {
        Self { kind: Kind::Bytes }
    }

    /// A vocabulary of ids whose meaning is not known, as in a .bin file without its tokenizer. Ids are decoded as
    /// decimal numbers.
    pub fn ids(size: usize) -> Self {
        Self { kind: Kind::Ids { size } }
    }

    /// Trains byte-level BPE (Sennrich et al., 2016, on bytes as in GPT-2). Equal texts give equal vocabularies. A
    /// small corpus may not have enough pairs for `size` tokens; [`Self::size`] returns the actual number.
    ///
    /// # Errors
    /// Returns an error if the size is below 257, the number of bytes plus the end-of-text token.
    pub fn train<'a>(texts: impl Iterator<Item = &'a str> + Send, size: usize) -> Result<Self, DataError> {
        if size < LEAST_BPE_SIZE {
            return Err(DataError::VocabularyTooSmall { size, least: LEAST_BPE_SIZE });
        }
        tracing::info!("training a vocabulary of {size} tokens");
        let path = Path::new("in training");
        let mut tokenizer = Tokenizer::new(BPE::default());
        let byte_level = ByteLevel::new(false, false, true);
        tokenizer.with_pre_tokenizer(Some(byte_level)).with_decoder(Some(byte_level));
        let mut trainer = TrainerWrapper::from(
            BpeTrainer::builder()
                .vocab_size(size)
                .min_frequency(2)
                .show_progress(false)
                .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
                .special_tokens(vec![AddedToken::from(END_OF_TEXT, true)])
                .build(),
        );
        let pieces = texts.flat_map(pieces_for_training);
        tokenizer.train(&mut trainer, pieces).map_err(|error| tokenizer_error(path, error))?;
        Self::new(tokenizer, path, &TextOptions::default())
    }

    /// Opens a `tokenizer.json` with the default [`TextOptions`].
    ///
    /// # Errors
    /// Returns an error in the same cases as [`Self::open_with`].
    pub fn open(path: &Path) -> Result<Self, DataError> {
        Self::open_with(path, &TextOptions::default())
    }

    /// Opens a `tokenizer.json`. Its settings for truncation, padding and dropout are ignored. The files in its folder
    /// determine the token that ends a document.
    ///
    /// # Errors
    /// Returns an error if the file is missing or not a tokenizer, if it does not have the requested end token, or if
    /// no end token is found.
    pub fn open_with(path: &Path, options: &TextOptions) -> Result<Self, DataError> {
        Self::new(read(path)?, path, options)
    }

    fn new(mut tokenizer: Tokenizer, path: &Path, options: &TextOptions) -> Result<Self, DataError> {
        let json = serde_json::to_string_pretty(&tokenizer).map_err(|error| tokenizer_error(path, error.into()))?;
        let framing = Framing::of(&tokenizer, path, options)?;
        tokenizer.set_encode_special_tokens(!options.special);
        let spelled = if options.special { None } else { special_tokens(&tokenizer) };
        // Ids may have gaps, so counting tokens is not enough.
        let size = tokenizer.get_vocab(true).values().max().map_or(0, |&id| id as usize + 1);
        Ok(Self { kind: Kind::Tokenizer { tokenizer: Box::new(tokenizer), size, framing, spelled, json } })
    }

    /// Number of rows that an embedding of this vocabulary needs.
    pub fn size(&self) -> usize {
        match self.kind {
            Kind::Bytes => 256,
            Kind::Tokenizer { size, .. } | Kind::Ids { size } => size,
        }
    }

    /// Returns the token that ends each document, or `None` for bare ids.
    pub fn end_of_text(&self) -> Option<u32> {
        match self.kind {
            Kind::Bytes => Some(0),
            Kind::Tokenizer { ref framing, .. } => Some(framing.end),
            Kind::Ids { .. } => None,
        }
    }

    /// The tokens that begin a document; empty for most tokenizers.
    pub fn begin_of_text(&self) -> &[u32] {
        match &self.kind {
            Kind::Tokenizer { framing, .. } => &framing.begin,
            Kind::Bytes | Kind::Ids { .. } => &[],
        }
    }

    /// Returns the text options in effect, with the name of the end token that was found. Returns `None` for bytes and
    /// bare ids.
    pub fn text_options(&self) -> Option<TextOptions> {
        match &self.kind {
            Kind::Tokenizer { tokenizer, framing, .. } => Some(TextOptions {
                begin: !framing.begin.is_empty(),
                end: Some(framing.end_token.clone()),
                special: !tokenizer.get_encode_special_tokens(),
            }),
            Kind::Bytes | Kind::Ids { .. } => None,
        }
    }

    /// Describes the tokens around documents, for example `documents begin with <s> (1) and end with </s> (2), by
    /// tokenizer_config.json`. Returns `None` for bytes and bare ids.
    pub fn framing(&self) -> Option<String> {
        let Kind::Tokenizer { tokenizer, framing, .. } = &self.kind else { return None };
        let Framing { begin, end, end_token, source } = framing;
        let token = |&id: &u32| format!("{} ({id})", tokenizer.id_to_token(id).unwrap_or_default());
        let begin = match &begin[..] {
            [] => String::new(),
            begin => format!("begin with {} and ", begin.iter().map(token).collect::<Vec<_>>().join(" ")),
        };
        Some(format!("documents {begin}end with {end_token} ({end}), by {source}"))
    }

    /// Returns the first special token that a text spells out. Returns `None` if the text spells out none, or if
    /// spelled-out special tokens are encoded as special tokens.
    pub(crate) fn spelled_special<'a>(&self, text: &'a str) -> Option<&'a str> {
        let Kind::Tokenizer { spelled: Some(special), .. } = &self.kind else { return None };
        special.find(text).map(|found| &text[found.range()])
    }

    /// Returns the tokens of a text that is to be continued. They include the tokens that begin a document.
    ///
    /// # Errors
    /// Returns an error in the same cases as [`Self::encode`].
    pub fn encode_beginning(&self, text: &str) -> Result<Vec<u32>, DataError> {
        Ok([self.begin_of_text(), &self.encode(text)?].concat())
    }

    /// Returns the tokens of a text, without the tokens that begin or end a document.
    ///
    /// # Errors
    /// Returns an error for bare ids, or if the tokenizer returns one.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, DataError> {
        match &self.kind {
            Kind::Bytes => Ok(text.bytes().map(u32::from).collect()),
            Kind::Tokenizer { tokenizer, .. } => {
                Ok(guarded(Path::new("encoding"), || tokenizer.encode_fast(text, false))?.get_ids().to_vec())
            }
            Kind::Ids { .. } => Err(DataError::NoTokenizer),
        }
    }

    /// True if a text can be cut after a line without changing its tokens. This is tested on a few lines. The result is
    /// false for tokenizers that mark the beginning of a text, such as Llama 2's. If it is false, documents are encoded
    /// whole.
    ///
    /// # Errors
    /// Returns an error in the same cases as [`Self::encode`].
    pub(crate) fn cuts_at_lines(&self) -> Result<bool, DataError> {
        for (before, behind) in
            [("a line.\n", "Another"), ("x\n", "x x"), ("fn f() {\n", "}"), ("1\n", "2 3"), (".\n", "\"")]
        {
            let parts = [self.encode(before)?, self.encode(behind)?].concat();
            if parts != self.encode(&[before, behind].concat())? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Like [`Self::encode`]. For each token, it also returns whether any of its bytes lie in one of the spans.
    ///
    /// # Errors
    /// Returns an error in the same cases as [`Self::encode`].
    pub(crate) fn encode_spans(&self, text: &str, spans: &[Range<usize>]) -> Result<(Vec<u32>, Vec<bool>), DataError> {
        match &self.kind {
            Kind::Tokenizer { tokenizer, .. } => {
                let encoding = guarded(Path::new("encoding"), || tokenizer.encode(text, false))?;
                Ok((encoding.get_ids().to_vec(), are_inside(encoding.get_offsets(), spans)))
            }
            Kind::Bytes | Kind::Ids { .. } => {
                let offsets: Vec<(usize, usize)> = (0..text.len()).map(|byte| (byte, byte + 1)).collect();
                Ok((self.encode(text)?, are_inside(&offsets, spans)))
            }
        }
    }

    /// Returns the text of tokens. Bytes that are not UTF-8 become �, and bare ids become decimal numbers.
    ///
    /// # Errors
    /// Returns an error if the tokenizer returns one.
    pub fn decode(&self, ids: &[u32]) -> Result<String, DataError> {
        match &self.kind {
            Kind::Bytes => {
                let bytes: Vec<u8> = ids.iter().map(|&id| id as u8).collect();
                Ok(String::from_utf8_lossy(&bytes).into_owned())
            }
            Kind::Tokenizer { tokenizer, .. } => guarded(Path::new("decoding"), || tokenizer.decode(ids, false)),
            Kind::Ids { .. } => Ok(ids.iter().map(u32::to_string).collect::<Vec<_>>().join(" ")),
        }
    }

    /// Decodes tokens as they arrive. The end-of-text token is left out.
    pub fn stream(&self) -> TextStream<'_> {
        match &self.kind {
            Kind::Tokenizer { tokenizer, .. } => {
                TextStream::new(|ids| guarded(Path::new("decoding"), || tokenizer.decode(ids, true)))
            }
            Kind::Bytes => TextStream::new(|ids| {
                let bytes: Vec<u8> = ids.iter().filter_map(|&id| u8::try_from(id).ok()).filter(|&id| id != 0).collect();
                Ok(String::from_utf8_lossy(&bytes).into_owned())
            }),
            Kind::Ids { .. } => TextStream::new(|ids| Ok(ids.iter().map(|id| format!("{id} ")).collect())),
        }
    }

    /// Checks that a model was built for this vocabulary. `model` is the number of tokens of the model's vocabulary.
    ///
    /// # Errors
    /// Returns [`DataError::VocabularyMismatch`] with both sizes if the model was built for another size.
    pub fn check_model(&self, model: usize) -> Result<(), DataError> {
        match self.size() {
            size if size == model => Ok(()),
            tokenizer => Err(DataError::VocabularyMismatch { model, tokenizer }),
        }
    }

    /// Returns the blake3 hash of the vocabulary's definition, as hexadecimal digits.
    pub fn hash(&self) -> String {
        let definition = match &self.kind {
            Kind::Bytes => "bytes",
            // For these tokenizers, which include all that are trained here, the hash is that of the file alone.
            Kind::Tokenizer { json, framing, tokenizer, .. }
                if framing.begin.is_empty()
                    && framing.end_token == END_OF_TEXT
                    && tokenizer.get_encode_special_tokens() =>
            {
                json
            }
            Kind::Tokenizer { json, framing, tokenizer, .. } => {
                let Framing { begin, end, .. } = framing;
                &format!("{json}\n{begin:?} {end} {}", tokenizer.get_encode_special_tokens())
            }
            Kind::Ids { size } => &format!("ids {size}"),
        };
        blake3::hash(definition.as_bytes()).to_hex().to_string()
    }

    /// Writes `tokenizer.json`. For bytes and bare ids, which have no tokenizer, writes nothing.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written.
    pub fn save(&self, path: &Path) -> Result<(), DataError> {
        match &self.kind {
            Kind::Tokenizer { json, .. } => fs::write(path, json).map_err(DataError::write(path)),
            Kind::Bytes | Kind::Ids { .. } => Ok(()),
        }
    }

    /// Writes `tokenizer.json` and `tokenizer_config.json` into a folder, as transformers reads them. Bytes are written
    /// as a tokenizer with one token per byte, whose id is the byte. For bare ids, writes nothing.
    ///
    /// # Errors
    /// Returns an error if a file cannot be written.
    pub fn save_pretrained(&self, folder: &Path) -> Result<(), DataError> {
        let mut config = json!({ "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": false });
        let tokenizer = match &self.kind {
            Kind::Ids { .. } => return Ok(()),
            // The end-of-text token is left out, because a text that spells its character would contain the token.
            Kind::Bytes => byte_tokenizer().to_string(),
            Kind::Tokenizer { json, framing, tokenizer, .. } => {
                config["eos_token"] = json!(framing.end_token);
                if let Some(begin) = framing.begin.first().and_then(|&id| tokenizer.id_to_token(id)) {
                    config["bos_token"] = json!(begin);
                }
                json.clone()
            }
        };
        for (name, text) in [("tokenizer.json", tokenizer), ("tokenizer_config.json", format!("{config:#}\n"))] {
            let path = folder.join(name);
            fs::write(&path, text).map_err(DataError::write(&path))?;
        }
        Ok(())
    }
}

/// Returns a byte-level tokenizer.json without merges, in which the id of a byte's token is the byte.
fn byte_tokenizer() -> Value {
    let byte_level =
        json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false });
    let is_shown = |byte: u32| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    // As in GPT-2, a byte that is no visible character in Latin-1 is spelled as a character above these.
    let mut others = 256..;
    let token = |byte| char::from_u32(if is_shown(byte) { byte } else { others.next()? }).map(String::from);
    let tokens: Map<String, Value> = (0..256).map_while(token).zip((0..256).map(Value::from)).collect();
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": byte_level, "post_processor": null, "decoder": byte_level,
        "model": { "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                   "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": tokens, "merges": [] },
    })
}

/// Returns a matcher for the special tokens of a tokenizer, or `None` if it has none.
fn special_tokens(tokenizer: &Tokenizer) -> Option<AhoCorasick> {
    let special = tokenizer.get_added_tokens_decoder().into_values().filter(|token| token.special);
    let special: Vec<String> = special.map(|token| token.content).filter(|token| !token.is_empty()).collect();
    AhoCorasick::new(special).ok().filter(|special| special.patterns_len() > 0)
}

fn tokenizer_error(path: &Path, error: tokenizers::Error) -> DataError {
    DataError::Tokenizer { path: path.to_owned(), reason: error.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gapless_testing::prelude::*;
    use std::sync::LazyLock;

    const OWN: &str = include_str!("vocabulary.rs");
    static TRAINED: LazyLock<Vocabulary> = LazyLock::new(|| Vocabulary::train(OWN.split("\n\n"), 512).unwrap());

    #[test]
    fn training_is_deterministic_and_reopens() {
        let again = Vocabulary::train(OWN.split("\n\n"), 512).unwrap();
        assert_eq!(TRAINED.hash(), again.hash());
        assert_eq!(TRAINED.size(), 512);

        let file = tempfile::NamedTempFile::new().unwrap();
        TRAINED.save(file.path()).unwrap();
        let opened = Vocabulary::open(file.path()).unwrap();
        assert_eq!((opened.hash(), opened.size(), opened.end_of_text()), (TRAINED.hash(), 512, Some(0)));
        assert_eq!(opened.encode(OWN).unwrap(), TRAINED.encode(OWN).unwrap());
    }

    /// The tokenizer that is written for transformers gives the same ids as the vocabulary.
    #[test]
    fn saved_tokenizers_give_the_same_ids() {
        let all: String = ('\u{0}'..'\u{250}').collect();
        for vocabulary in [&Vocabulary::bytes(), &*TRAINED] {
            let folder = tempfile::tempdir().unwrap();
            vocabulary.save_pretrained(folder.path()).unwrap();
            let opened = crate::Tokenizer::open(folder.path()).unwrap();
            for text in [&OWN.replace(END_OF_TEXT, ""), &all] {
                assert_eq!(opened.encode(text, true).unwrap(), vocabulary.encode(text).unwrap());
            }
            assert_eq!(opened.decode(&vocabulary.encode("Hé").unwrap(), false).unwrap(), "Hé");
            assert_eq!(opened.size(), vocabulary.size());
        }
        let folder = tempfile::tempdir().unwrap();
        Vocabulary::ids(7).save_pretrained(folder.path()).unwrap();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn the_end_of_text_in_a_text_is_text() {
        let ids = TRAINED.encode("a <|endoftext|> b").unwrap();
        assert!(!ids.contains(&TRAINED.end_of_text().unwrap()), "{ids:?}");
        assert_eq!(TRAINED.decode(&ids).unwrap(), "a <|endoftext|> b");
    }

    generated! {
        #[test]
        fn decoding_undoes_encoding(text: String) {
            prop_assert_eq!(TRAINED.decode(&TRAINED.encode(&text).unwrap()).unwrap(), text.as_str());
            let bytes = Vocabulary::bytes();
            prop_assert_eq!(bytes.decode(&bytes.encode(&text).unwrap()).unwrap(), text.as_str());
        }
    }

    #[test]
    fn mistakes_have_remedies() {
        let message = |result: Result<Vocabulary, DataError>| result.unwrap_err().to_string();
        assert!(message(Vocabulary::train(["x"].into_iter(), 256)).contains("at least 257"));
        assert!(message(Vocabulary::open(Path::new("nowhere.json"))).contains("does not exist"));

        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), "{}").unwrap();
        assert!(message(Vocabulary::open(file.path())).contains("tokenizer"));
        let without_end = Tokenizer::new(BPE::default()).to_string(false).unwrap();
        fs::write(file.path(), without_end).unwrap();
        assert!(message(Vocabulary::open(file.path())).contains("name one in data.end_of_text"));

        let mismatch = TRAINED.check_model(50257).unwrap_err().to_string();
        assert!(mismatch.contains("50257") && mismatch.contains("512"), "{mismatch}");
        TRAINED.check_model(512).unwrap();
    }
}

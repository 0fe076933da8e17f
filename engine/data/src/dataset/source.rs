//! Sources of data, and options for tokenizing and splitting them.

use std::path::PathBuf;

use crate::files::token_files;
use crate::texts::{TextFiles, Texts};
use crate::{Answers, Corpus, DataError, RustSources, TextOptions, TokenWidth, VocabularyChoice};

/// A source of data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// The Rust sources of a workspace and its locked dependencies.
    RustSources(RustSources),
    /// A text file, a folder of text files, or token ids: a .bin file or a folder of them. Ids are little-endian. Their
    /// width is that of llm.c's header in the file, or else [`DataOptions::width`].
    Path(PathBuf),
}

/// Turns a path into a source. A path named `Cargo.lock` stands for the Rust sources of its packages, which exist
/// wherever a Rust project was built.
impl From<PathBuf> for Source {
    fn from(path: PathBuf) -> Self {
        let is_lock = path.file_name().is_some_and(|name| name == "Cargo.lock");
        if is_lock { Self::RustSources(RustSources::of_lock(path)) } else { Self::Path(path) }
    }
}

/// Options for tokenizing and splitting data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DataOptions {
    /// The vocabulary. The default is BPE of 4,096 tokens.
    pub vocabulary: VocabularyChoice,
    /// Every n-th document is used for validation, so that both parts have the same distribution. With fewer documents
    /// than n, and for .bin files, the last n-th of the tokens is used. 0 means no validation. 1 counts as 2, because
    /// it would leave nothing to train on. The default is 32, about 3 % of the data.
    pub validation_every: usize,
    /// The treatment of special tokens around a document and in its text.
    pub text: TextOptions,
    /// Bytes per id of .bin files without a header. The default is 2, or 4 for vocabularies of more than 65,536 tokens.
    /// With the default, files whose ids appear to be wider are refused.
    pub width: Option<TokenWidth>,
    /// The answers of a conversation that count in the loss.
    pub answers: Answers,
    /// The folder for tokenizers and tokens. It has a subfolder for each corpus, vocabulary and split. The default is
    /// `.gapless/data`.
    pub cache: PathBuf,
}

impl Default for DataOptions {
    fn default() -> Self {
        Self {
            vocabulary: VocabularyChoice::Bpe { size: 4096 },
            validation_every: 32,
            text: TextOptions::default(),
            width: None,
            answers: Answers::All,
            cache: ".gapless/data".into(),
        }
    }
}

impl Source {
    /// Opens the documents of the source, which must not be a file of ids.
    pub(super) fn texts(&self) -> Result<Box<dyn Texts>, DataError> {
        Ok(match self {
            Self::RustSources(sources) => Box::new(Corpus::rust_sources(sources)?),
            Self::Path(path) => Box::new(TextFiles::open(path)?),
        })
    }

    /// True if the source is a file or a folder of token ids.
    ///
    /// # Errors
    /// Returns an error if a folder cannot be read.
    pub fn is_ids(&self) -> Result<bool, DataError> {
        match self {
            Self::RustSources(_) => Ok(false),
            Self::Path(path) => Ok(token_files(path)?.is_some()),
        }
    }
}

//! Where data comes from, and how it is tokenized and split.

use std::path::PathBuf;

use crate::files::token_files;
use crate::texts::{TextFiles, Texts};
use crate::{Answers, Corpus, DataError, RustSources, TextOptions, TokenWidth, VocabularyChoice};

/// Where data comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// The Rust sources of a workspace and its locked dependencies.
    RustSources(RustSources),
    /// A file of text, a folder of them, or token ids as .bin, a file or a folder of them: little-endian, as [`DataOptions::width`] or the
    /// header of llm.c says.
    Path(PathBuf),
}

/// A `Cargo.lock` stands for the Rust sources that it names: text that is there wherever Rust is.
impl From<PathBuf> for Source {
    fn from(path: PathBuf) -> Self {
        let is_lock = path.file_name().is_some_and(|name| name == "Cargo.lock");
        if is_lock { Self::RustSources(RustSources::of_lock(path)) } else { Self::Path(path) }
    }
}

/// How data is tokenized and split.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DataOptions {
    /// The vocabulary; by default BPE of 4,096 tokens.
    pub vocabulary: VocabularyChoice,
    /// Every n-th document is validation (so that both parts have the same distribution); with fewer documents than n,
    /// and for .bin, it is the last n-th of the tokens. 0 means no validation; 1 would leave nothing to train on and is
    /// taken as 2. By default 32, about 3 %.
    pub validation_every: usize,
    /// What a document's text becomes.
    pub text: TextOptions,
    /// Bytes of the ids of .bin files without a header. By default 2, or 4 for vocabularies of more than 65,536; ids that look as if they
    /// were wider are then refused.
    pub width: Option<TokenWidth>,
    /// Which answers of a conversation count.
    pub answers: Answers,
    /// Where tokenizers and tokens are kept, one folder for each corpus, vocabulary and split. By default `.gapless/data`.
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
    /// Its documents, if it is no file of ids.
    pub(super) fn texts(&self) -> Result<Box<dyn Texts>, DataError> {
        Ok(match self {
            Self::RustSources(sources) => Box::new(Corpus::rust_sources(sources)?),
            Self::Path(path) => Box::new(TextFiles::open(path)?),
        })
    }

    /// Whether it is a file or a folder of token ids.
    ///
    /// # Errors
    /// A folder that cannot be read.
    pub fn is_ids(&self) -> Result<bool, DataError> {
        match self {
            Self::RustSources(_) => Ok(false),
            Self::Path(path) => Ok(token_files(path)?.is_some()),
        }
    }
}

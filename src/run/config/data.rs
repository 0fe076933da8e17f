//! `[data]`: what a run learns from.

use std::path::PathBuf;

use gapless_engine::data::{DataError, DataOptions, Dataset, Format, Source, VocabularyChoice};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{ModelConfig, RunConfig};

/// `[data]`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DataConfig {
    /// A file or folder of .txt, .rs, .md or .jsonl, also as .gz or .zst, or of .parquet, a .bin of token ids or a folder of them, or a `Cargo.lock` for the Rust
    /// sources that it names.
    pub path: PathBuf,
    /// Further sources, each with its part of the windows; `path` has the rest.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mix: Vec<SourceConfig>,
    /// Tokens of the byte-pair encoding that is trained on it, 4096 where neither this nor `tokenizer` is there; 256 for plain bytes.
    /// Not beside `tokenizer`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vocabulary: Option<usize>,
    /// A tokenizer.json that is there already; of `model.folder` its own where this is absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokenizer: Option<PathBuf>,
    /// What a line of a .jsonl file, or a row of a .parquet file, holds: `text`; `prompt` and `completion`; or `chat`, a conversation. Of the latter two only
    /// completions, or what the assistant says, count in the loss, and examples are packed into sequences without seeing each other.
    #[serde(default)]
    pub format: Format,
    /// Whether documents that share a sequence of the format `text` neither see each other nor share their places.
    #[serde(default)]
    pub isolate_documents: bool,
    /// Every n-th document is for validation; 0 for none.
    #[serde(default = "default_validation")]
    pub validation_every: usize,
    /// Where tokens are kept.
    #[serde(default = "default_cache")]
    pub cache: PathBuf,
}

/// `[[data.mix]]`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SourceConfig {
    /// As `data.path`.
    pub path: PathBuf,
    /// Its part of the windows, of 1.
    pub weight: f64,
}

fn default_validation() -> usize {
    DataOptions::default().validation_every
}

fn default_cache() -> PathBuf {
    DataOptions::default().cache
}

impl DataConfig {
    /// Whether several documents, or examples, share a sequence without seeing each other.
    pub fn has_documents(&self) -> bool {
        self.isolate_documents || self.format.has_answers()
    }
}

impl RunConfig {
    /// The data, tokenized: read anew, or as an earlier run left them.
    ///
    /// # Errors
    /// As [`Dataset::prepare`].
    pub fn dataset(&self) -> Result<Dataset, DataError> {
        let DataConfig { path, mix, vocabulary, tokenizer, format, isolate_documents: _, validation_every, cache } =
            self.data.clone();
        let tokenizer = tokenizer.or_else(|| match &self.model {
            ModelConfig::Folder(folder) => Some(folder.join("tokenizer.json")),
            _ => None,
        });
        let vocabulary = match (tokenizer, vocabulary) {
            (Some(file), _) => VocabularyChoice::File(file),
            (None, size) => VocabularyChoice::of_size(size.unwrap_or(4096)),
        };
        let options = DataOptions { vocabulary, validation_every, cache };
        if mix.is_empty() {
            return match format.has_answers() {
                true => Dataset::examples(&path, format, &options),
                false => Dataset::prepare(&Source::from(path), &options),
            };
        }
        let rest = 1.0 - mix.iter().map(|source| source.weight).sum::<f64>();
        let sources = std::iter::once((path, rest)).chain(mix.into_iter().map(|source| (source.path, source.weight)));
        if format.has_answers() {
            let parts = sources.map(|(path, weight)| Ok((Dataset::examples(&path, format, &options)?, weight)));
            return Dataset::mixture(parts.collect::<Result<_, _>>()?);
        }
        let sources: Vec<(Source, f64)> = sources.map(|(path, weight)| (Source::from(path), weight)).collect();
        Dataset::prepare_mixture(&sources, &options)
    }
}

//! The folder of a prepared dataset: the tokenizer, the tokens, and a manifest that describes both.
//!
//! In: texts, or the folder of an earlier call. Out: the dataset, tokenized only once. Never: a folder whose bytes
//! differ from those that were written.

use std::fs::{self, File};
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::{DataOptions, Dataset, TOKENIZER, last_part};
use crate::encode::move_into_place;
use crate::texts::Texts;
use crate::tokenize::{begun_with, sample, tokenize};
use crate::{CorpusReport, DataError, TextOptions, TokenWidth, Tokens, Vocabulary, VocabularyChoice};

pub(super) const TOKENS: &str = "tokens.bin";
pub(super) const MANIFEST: &str = "dataset.json";

/// The contents of `dataset.json`, which is the last file to be written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Manifest {
    corpus: CorpusReport,
    /// Hash of the byte vocabulary, or of `tokenizer.json` together with `text`.
    vocabulary_hash: String,
    /// The text options with which the tokens were made.
    #[serde(default)]
    text: TextOptions,
    width: TokenWidth,
    training_tokens: u64,
    validation_tokens: u64,
    tokens_hash: String,
}

/// Creates a folder and locks it until the returned file is dropped. If another process prepares the same data, waits
/// for it. The operating system releases the lock of a process that ends. On a file system without locks, nothing is
/// locked.
pub(super) fn lock(folder: &Path) -> Result<File, DataError> {
    let path = folder.join("lock");
    fs::create_dir_all(folder).map_err(DataError::write(folder))?;
    let file = File::options().create(true).write(true).truncate(false).open(&path).map_err(DataError::write(&path))?;
    if file.try_lock().is_err() {
        tracing::info!(folder = %folder.display(), "waiting for another process that prepares the same data");
        match file.lock() {
            Err(error) if error.kind() != std::io::ErrorKind::Unsupported => {
                return Err(DataError::write(&path)(error));
            }
            _ => {}
        }
    }
    Ok(file)
}

impl Dataset {
    /// Reuses the dataset that an earlier call prepared from these texts. If there is none, tokenizes and splits the
    /// texts.
    pub(super) fn from_texts(texts: &dyn Texts, options: &DataOptions) -> Result<Self, DataError> {
        let report = texts.report();
        let (known, name) = match &options.vocabulary {
            VocabularyChoice::Bytes => (Some(Vocabulary::bytes()), "bytes".to_owned()),
            VocabularyChoice::Bpe { size } => (None, format!("bpe-{size}")),
            VocabularyChoice::Ids { .. } => return Err(DataError::NoTokenizer),
            VocabularyChoice::File(path) => {
                let given = Vocabulary::open_with(path, &options.text)?;
                let name = format!("given-{}", &given.hash()[..8]);
                (Some(given), name)
            }
        };
        // The folder's name contains everything that determines the tokens. So a folder that one run needs is never
        // overwritten by another run.
        let folder = options.cache.join(format!("{}-{name}-{}", &report.hash[..16], options.validation_every));
        let kept = |folder| match Self::open_prepared(folder) {
            Ok(dataset) if dataset.corpus.as_ref().is_some_and(|kept| kept.hash == report.hash) => Ok(Some(dataset)),
            Err(error @ DataError::Damaged { .. }) => Err(error),
            _ => Ok(None),
        };
        let prepared = |dataset: Self| {
            tracing::debug!(folder = %folder.display(), "dataset prepared before");
            // Only the given vocabulary records which file named its end-of-text token, so it replaces the vocabulary
            // of the folder.
            let vocabulary = known.clone().unwrap_or_else(|| dataset.vocabulary.clone());
            Ok(Self { corpus: Some(report.clone()), vocabulary, ..dataset })
        };
        if let Ok(Some(dataset)) = kept(&folder) {
            return prepared(dataset);
        }
        // If several processes need the folder, one of them prepares it while the others wait here.
        let _alone = lock(&folder)?;
        match kept(&folder) {
            Ok(Some(dataset)) => return prepared(dataset),
            Err(error) => tracing::warn!(%error, "preparing the dataset again"),
            Ok(None) => tracing::info!(folder = %folder.display(), %report, "preparing the dataset"),
        }
        let vocabulary = match (&known, &options.vocabulary) {
            (None, VocabularyChoice::Bpe { size }) => match begun_with(&folder.join(TOKENS), &report.hash) {
                // If an interrupted preparation has already trained a vocabulary, that vocabulary is used.
                Some(hash) => Vocabulary::open(&folder.join(TOKENIZER)).ok().filter(|kept| kept.hash() == hash),
                None => None,
            }
            .map_or_else(|| Vocabulary::train(sample(texts, &folder)?.iter().map(String::as_str), *size), Ok)?,
            (known, _) => known.clone().unwrap_or_else(Vocabulary::bytes),
        };
        let built = Self::build(texts, &vocabulary, options.validation_every, &folder)?;
        Ok(Self { vocabulary, ..built })
    }

    /// Opens a folder that [`Dataset::prepare`] wrote, even if the source has changed or is gone. A run that resumes
    /// opens the folder with which it started.
    ///
    /// # Errors
    /// Returns an error if the folder is missing or damaged.
    pub fn open_prepared(folder: &Path) -> Result<Self, DataError> {
        let damaged = |reason: String| DataError::Damaged { path: folder.to_owned(), reason };
        let path = folder.join(MANIFEST);
        let json = fs::read(&path).map_err(|error| DataError::read(&path, error))?;
        let manifest: Manifest =
            serde_json::from_slice(&json).map_err(|error| damaged(format!("{MANIFEST}: {error}")))?;

        let bytes = Vocabulary::bytes();
        let vocabulary = if manifest.vocabulary_hash == bytes.hash() {
            bytes
        } else {
            Vocabulary::open_with(&folder.join(TOKENIZER), &manifest.text)
                .map_err(|error| damaged(error.to_string()))?
        };
        if vocabulary.hash() != manifest.vocabulary_hash {
            return Err(damaged(format!("{TOKENIZER} is not the one that encoded the tokens")));
        }
        let tokens =
            Tokens::open_bare(&folder.join(TOKENS), manifest.width).map_err(|error| damaged(error.to_string()))?;
        let scan = tokens.scan(vocabulary.size())?;
        let count = manifest.training_tokens.checked_add(manifest.validation_tokens);
        if scan.hash != manifest.tokens_hash || scan.outside.is_some() || count != Some(tokens.count()) {
            return Err(damaged(format!("{TOKENS} has changed")));
        }
        let dataset = Self::new(vocabulary, tokens, manifest.validation_tokens, &scan);
        Ok(Self { corpus: Some(manifest.corpus), folder: Some(folder.to_owned()), ..dataset })
    }

    /// Writes the folder of a dataset, its manifest last, and opens it.
    fn build(texts: &dyn Texts, vocabulary: &Vocabulary, every: usize, folder: &Path) -> Result<Self, DataError> {
        let tokenizer = folder.join(TOKENIZER);
        vocabulary.save(&tokenizer.with_extension("json.tmp"))?;
        move_into_place(&tokenizer)?;

        let corpus = texts.report();
        let by_document = every > 0 && corpus.documents >= every.max(2);
        let every_nth = every.max(2) as u64;
        let is_validation = |document: u64| by_document && document % every_nth == every_nth - 1;
        let parts = tokenize(texts, vocabulary, &is_validation, &folder.join(TOKENS))?;
        let validation_tokens = if by_document { parts.validation_tokens } else { last_part(parts.all.tokens, every) };
        let manifest = Manifest {
            corpus,
            vocabulary_hash: vocabulary.hash(),
            text: vocabulary.text_options().unwrap_or_default(),
            width: TokenWidth::of_vocabulary(vocabulary.size()),
            training_tokens: parts.all.tokens - validation_tokens,
            validation_tokens,
            tokens_hash: parts.all.hash,
        };
        let path = folder.join(MANIFEST);
        let json = serde_json::to_vec_pretty(&manifest).expect("a manifest of strings and numbers is valid JSON");
        fs::write(path.with_extension("json.tmp"), json).map_err(DataError::write(&path))?;
        move_into_place(&path)?;
        Self::open_prepared(folder)
    }
}

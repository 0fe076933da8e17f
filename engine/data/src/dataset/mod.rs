//! A prepared dataset: the vocabulary, the tokens, and their split into training and validation.

mod folder;
mod mixture;
mod source;
#[cfg(test)]
mod tests;

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::examples::{Encoding, Examples, Line, encode_lines, read_lines};
use crate::files::token_files;
use crate::tokens::Scan;
use crate::windows::WindowSource;
use crate::{
    Corpus, CorpusReport, DataError, Format, Tokenizer, Tokens, TrainingWindows, ValidationWindows, Vocabulary,
    VocabularyChoice,
};

pub use source::{DataOptions, Source};

const TOKENIZER: &str = "tokenizer.json";

/// A vocabulary, and one or more streams of tokens. The front of each stream is for training and its back for
/// validation.
#[derive(Debug, Clone)]
pub struct Dataset {
    vocabulary: Vocabulary,
    /// The stream of tokens, or the streams of a mixture.
    parts: Vec<TokenStream>,
    hash: String,
    corpus: Option<CorpusReport>,
    folder: Option<PathBuf>,
    /// The largest token id.
    largest: u32,
}

/// A stream of tokens.
#[derive(Debug, Clone)]
struct TokenStream {
    tokens: Arc<Tokens>,
    training: Range<u64>,
    validation: Range<u64>,
    /// The boundaries of the examples, and the tokens that count in the loss; `None` for plain text.
    examples: Option<Arc<Examples>>,
    /// The weight of this stream. Its share of the windows is the weight divided by the sum of all weights.
    weight: f64,
}

impl Dataset {
    /// Reads, tokenizes and splits a source, or reuses the result of an earlier call. Only a few pieces of text files
    /// are in memory at a time. If a call is interrupted, by a signal for example, the next call continues it.
    ///
    /// # Errors
    /// Returns an error if the source or the vocabulary is invalid, or if the cache cannot be written.
    pub fn prepare(source: &Source, options: &DataOptions) -> Result<Self, DataError> {
        if let Source::Path(path) = source
            && let Some((files, validation)) = token_files(path)?
        {
            return Self::from_ids(path, &files, validation, options);
        }
        Self::from_texts(&*source.texts()?, options)
    }

    /// Tokenizes and splits a corpus, or reuses the result of an earlier call.
    ///
    /// # Errors
    /// Returns an error if the vocabulary is invalid, or if the cache cannot be written.
    pub fn from_corpus(corpus: &Corpus, options: &DataOptions) -> Result<Self, DataError> {
        Self::from_texts(corpus, options)
    }

    /// Creates a dataset from token ids in memory. The last 1/`validation_every` of the ids is for validation; 0 means
    /// no validation.
    ///
    /// # Errors
    /// Returns an error if a token is outside the vocabulary.
    pub fn from_tokens(ids: Vec<u32>, vocabulary: Vocabulary, validation_every: usize) -> Result<Self, DataError> {
        let validation = last_part(ids.len() as u64, validation_every);
        Self::from_stream(Tokens::from_ids(ids), vocabulary, validation, Path::new("tokens in memory"))
    }

    /// Reads examples of answers and tokenizes them in memory. Every n-th example is for validation, where n is
    /// [`DataOptions::validation_every`]. If the vocabulary is a tokenizer's file, the files next to it determine the
    /// special tokens and the chat template.
    ///
    /// # Errors
    /// Returns an error if a line is not an example, if the vocabulary is invalid, if there are conversations but no
    /// chat template, or if the chat template rejects a conversation.
    pub fn examples(path: &Path, format: Format, options: &DataOptions) -> Result<Self, DataError> {
        let lines = read_lines(path, format)?;
        let vocabulary = match &options.vocabulary {
            VocabularyChoice::File(file) => Vocabulary::open_with(file, &options.text)?,
            VocabularyChoice::Bytes => Vocabulary::bytes(),
            VocabularyChoice::Ids { size } => Vocabulary::ids(*size),
            VocabularyChoice::Bpe { size } => Vocabulary::train(lines.iter().map(Line::text), *size)?,
        };
        Self::of_lines((path, format), &lines, vocabulary, options)
    }

    /// Opens data that no training uses, for a model with this vocabulary: text, files of token ids or, if `format` has
    /// answers, examples. All tokens are for validation, and text and examples are held in memory. If the vocabulary
    /// was read from a tokenizer's file, `options` must name it, because the files next to it determine the chat
    /// template.
    ///
    /// Each document of a text begins with the special tokens that the vocabulary puts before a text. If there are
    /// several documents, which are lines of a .jsonl file or files of a folder, each also ends with the end-of-text
    /// token.
    ///
    /// # Errors
    /// Returns an error if there is no data of the format, or if a token is outside the vocabulary. Also returns the
    /// errors of [`Self::examples`].
    pub fn held_out(
        path: &Path,
        format: Format,
        vocabulary: &Vocabulary,
        options: &DataOptions,
    ) -> Result<Self, DataError> {
        if format.has_answers() {
            let lines = read_lines(path, format)?;
            return Ok(Self::of_lines((path, format), &lines, vocabulary.clone(), options)?.for_validation());
        }
        if let Some((files, _)) = token_files(path)? {
            let tokens = Tokens::open_for(&files, options.width, vocabulary.size())?;
            return Ok(Self::from_stream(tokens, vocabulary.clone(), 0, path)?.for_validation());
        }
        let corpus = Corpus::read(path)?;
        let ends = corpus.documents().len() > 1;
        let mut ids = Vec::new();
        for document in corpus.documents() {
            ids.extend(vocabulary.encode_beginning(&document.text)?);
            ids.extend(vocabulary.end_of_text().filter(|_| ends));
        }
        Ok(Self::from_stream(Tokens::from_ids(ids), vocabulary.clone(), 0, path)?.for_validation())
    }

    /// Returns the same data, all of which is for validation.
    #[must_use]
    pub fn for_validation(mut self) -> Self {
        for part in &mut self.parts {
            (part.training, part.validation) = (0..0, 0..part.tokens.count());
        }
        self
    }

    /// Tokenizes examples.
    fn of_lines(
        (path, format): (&Path, Format),
        lines: &[Line],
        vocabulary: Vocabulary,
        options: &DataOptions,
    ) -> Result<Self, DataError> {
        let folder = match &options.vocabulary {
            VocabularyChoice::File(file) => file.parent().map(Tokenizer::open).transpose()?,
            _ => None,
        };
        // The examples for validation are moved to the end of the stream.
        let every = options.validation_every;
        let per_row = format.examples_per_row();
        let is_validation = |index: usize| every > 0 && index / per_row % every.max(2) == every.max(2) - 1;
        let encoding = Encoding { path, vocabulary: &vocabulary, folder: folder.as_ref(), answers: options.answers };
        let encoded = encode_lines(lines, &encoding)?.into_iter().enumerate();
        let (back, mut front): (Vec<_>, Vec<_>) = encoded.partition(|(index, _)| is_validation(*index));
        let validation = back.iter().map(|(_, (tokens, ..))| tokens.len() as u64).sum();
        front.extend(back);
        let (tokens, examples) = Examples::new(front.into_iter().map(|(_, example)| example).collect(), per_row == 2);
        let tokens = Tokens::from_ids(tokens);
        let scan = tokens.scan(vocabulary.size())?;
        let scan = Scan { hash: format!("{} {}", scan.hash, examples.hash()), ..scan };
        let mut dataset = Self::new(vocabulary, tokens, validation, &scan);
        dataset.parts[0].examples = Some(Arc::new(examples));
        Ok(dataset)
    }

    /// The vocabulary.
    pub fn vocabulary(&self) -> &Vocabulary {
        &self.vocabulary
    }

    /// Returns the report of the text that was read, or `None` for token ids, examples and mixtures.
    pub fn corpus(&self) -> Option<&CorpusReport> {
        self.corpus.as_ref()
    }

    /// Returns the folder in which the tokenizer and the tokens are kept, or `None` for token ids, examples and
    /// mixtures.
    pub fn folder(&self) -> Option<&Path> {
        self.folder.as_deref()
    }

    /// True if the examples are pairs of answers.
    pub(crate) fn are_pairs(&self) -> bool {
        self.parts.iter().any(|part| part.examples.as_ref().is_some_and(|examples| examples.are_pairs()))
    }

    /// Number of tokens for training.
    pub fn training_tokens(&self) -> u64 {
        self.parts.iter().map(|part| part.training.end - part.training.start).sum()
    }

    /// Number of tokens for validation.
    pub fn validation_tokens(&self) -> u64 {
        self.parts.iter().map(|part| part.validation.end - part.validation.start).sum()
    }

    /// The largest token id in the data. A model's embedding needs at least one row more than this.
    pub fn largest_token(&self) -> u32 {
        self.largest
    }

    /// The blake3 hash of the vocabulary, the tokens and the split, as hexadecimal digits. Datasets with equal hashes
    /// give equal batches.
    pub fn hash(&self) -> &str {
        &self.hash
    }

    /// Returns the batches of a training run.
    ///
    /// # Errors
    /// Returns an error if the training data is shorter than one window, or if a size is zero.
    pub fn training(&self, sequence: usize, batch: usize, seed: u64) -> Result<TrainingWindows, DataError> {
        let cut = |part: &TokenStream| Ok((self.cut(part, &part.training, sequence, "training")?, part.weight));
        TrainingWindows::of(self.parts.iter().map(cut).collect::<Result<_, DataError>>()?, batch, seed)
    }

    /// Returns at most `count` windows to evaluate on, or `None` if the dataset has no validation part.
    ///
    /// # Errors
    /// Returns an error if the validation data is shorter than one window, or if a size is zero.
    pub fn validation(&self, sequence: usize, count: usize) -> Result<Option<ValidationWindows>, DataError> {
        let there = self.parts.iter().filter(|part| !part.validation.is_empty());
        let cut = |part: &TokenStream| Ok((self.cut(part, &part.validation, sequence, "validation")?, part.weight));
        let cuts = there.map(cut).collect::<Result<Vec<_>, DataError>>()?;
        if cuts.is_empty() { Ok(None) } else { ValidationWindows::of(cuts, count).map(Some) }
    }

    /// Returns windows of all validation data, none of which is left out: tokens that do not fill the last window are
    /// followed by padding, whose targets are [`IGNORED`](crate::IGNORED). So the trainer must separate documents.
    /// Returns `None` if the dataset has no validation part. If `isolates` is true, documents of a text are separated.
    ///
    /// # Errors
    /// Returns an error if there are fewer than two tokens or no answers, if `sequence` is 0, or if documents should be
    /// separated and the vocabulary has no end-of-text token.
    pub fn padded_validation(&self, sequence: usize, isolates: bool) -> Result<Option<ValidationWindows>, DataError> {
        let end_of_text = self.vocabulary.end_of_text().filter(|_| isolates);
        let mut cuts = Vec::new();
        for part in self.parts.iter().filter(|part| !part.validation.is_empty()) {
            let (tokens, range) = (part.tokens.clone(), part.validation.clone());
            let cut = match &part.examples {
                Some(_) => self.cut(part, &range, sequence, "validation")?,
                None if isolates && end_of_text.is_none() => return Err(DataError::NoDocuments),
                None => WindowSource::padded(tokens, range, end_of_text, sequence, "validation")?,
            };
            cuts.push((cut, part.weight));
        }
        if cuts.is_empty() { Ok(None) } else { ValidationWindows::of(cuts, usize::MAX).map(Some) }
    }

    /// Cuts a range of a stream into windows. If the stream has examples, the windows consist of whole examples,
    /// otherwise of consecutive tokens.
    fn cut(
        &self,
        part: &TokenStream,
        range: &Range<u64>,
        sequence: usize,
        name: &'static str,
    ) -> Result<WindowSource, DataError> {
        let (tokens, range) = (part.tokens.clone(), range.clone());
        match &part.examples {
            Some(examples) => WindowSource::of_examples(tokens, range, examples.clone(), sequence, name),
            None => WindowSource::new(tokens, range, self.vocabulary.end_of_text(), sequence, name),
        }
    }

    /// Opens files of token ids. The vocabulary is the chosen tokenizer, or else the tokenizer in their folder, or else
    /// none. The last `validation` files are for validation. If `validation` is 0, the last 1/`validation_every` of the
    /// tokens is for validation.
    fn from_ids(path: &Path, files: &[PathBuf], validation: usize, options: &DataOptions) -> Result<Self, DataError> {
        let beside = if path.is_dir() { path.join(TOKENIZER) } else { path.with_file_name(TOKENIZER) };
        let vocabulary = match &options.vocabulary {
            VocabularyChoice::File(tokenizer) => Vocabulary::open_with(tokenizer, &options.text)?,
            VocabularyChoice::Bytes => Vocabulary::bytes(),
            VocabularyChoice::Bpe { .. } | VocabularyChoice::Ids { .. } if beside.exists() => {
                Vocabulary::open_with(&beside, &options.text)?
            }
            VocabularyChoice::Bpe { size } | VocabularyChoice::Ids { size } => Vocabulary::ids(*size),
        };
        let tokens = Tokens::open_for(files, options.width, vocabulary.size())?;
        let validation = match validation {
            0 => last_part(tokens.count(), options.validation_every),
            _ if options.validation_every == 0 => 0,
            files_of_it => {
                let last = &files[files.len() - files_of_it..];
                Tokens::open_for(last, options.width, vocabulary.size())?.count()
            }
        };
        Self::from_stream(tokens, vocabulary, validation, path)
    }

    fn from_stream(tokens: Tokens, vocabulary: Vocabulary, validation: u64, path: &Path) -> Result<Self, DataError> {
        if tokens.count() == 0 {
            return Err(DataError::Empty { path: path.to_owned(), skipped: 0, others: Vec::new() });
        }
        let scan = tokens.scan(vocabulary.size())?;
        if let Some((position, token)) = scan.outside {
            let ((path, position), vocabulary) = (tokens.place(position), vocabulary.size());
            let path = path.to_owned();
            return Err(DataError::TokenOutside { path, position, token, vocabulary });
        }
        Ok(Self::new(vocabulary, tokens, validation, &scan))
    }

    fn new(vocabulary: Vocabulary, tokens: Tokens, validation: u64, scan: &Scan) -> Self {
        let training = 0..tokens.count() - validation;
        let hash = blake3::hash(format!("{} {} {training:?}", vocabulary.hash(), scan.hash).as_bytes());
        let validation = training.end..tokens.count();
        let part = TokenStream { tokens: Arc::new(tokens), training, validation, examples: None, weight: 1.0 };
        let hash = hash.to_hex().to_string();
        Self { vocabulary, parts: vec![part], hash, corpus: None, folder: None, largest: scan.largest }
    }
}

/// The size of the last n-th of `tokens`.
fn last_part(tokens: u64, every: usize) -> u64 {
    if every == 0 { 0 } else { tokens / (every as u64).max(2) }
}

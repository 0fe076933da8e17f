//! A prepared dataset: vocabulary, tokens, and which part of them is validation.

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
use crate::windows::Cut;
use crate::{
    Corpus, CorpusReport, DataError, Format, Tokenizer, Tokens, TrainingWindows, ValidationWindows, Vocabulary,
    VocabularyChoice,
};

pub use source::{DataOptions, Source};

const TOKENIZER: &str = "tokenizer.json";

/// A vocabulary, and a stream of tokens whose front is for training and whose back for validation.
#[derive(Debug, Clone)]
pub struct Dataset {
    vocabulary: Vocabulary,
    /// One, or those of a mixture.
    parts: Vec<Part>,
    hash: String,
    corpus: Option<CorpusReport>,
    folder: Option<PathBuf>,
    /// The largest id.
    largest: u32,
}

/// A stream of tokens.
#[derive(Debug, Clone)]
struct Part {
    tokens: Arc<Tokens>,
    training: Range<u64>,
    validation: Range<u64>,
    /// What belongs together and what counts, if that is not all.
    examples: Option<Arc<Examples>>,
    /// What part of all windows is of this stream, relative to the others.
    weight: f64,
}

impl Dataset {
    /// Reads, tokenizes and splits a source, or takes what an earlier call kept. Of text files a few pieces are in memory at once; a
    /// call that was ended, as by a signal, is gone on with.
    ///
    /// # Errors
    /// Whatever is wrong with the source or the vocabulary, or a cache that cannot be written.
    pub fn prepare(source: &Source, options: &DataOptions) -> Result<Self, DataError> {
        if let Source::Path(path) = source
            && let Some((files, validation)) = token_files(path)?
        {
            return Self::from_ids(path, &files, validation, options);
        }
        Self::from_texts(&*source.texts()?, options)
    }

    /// Tokenizes and splits a corpus, or takes what an earlier call kept.
    ///
    /// # Errors
    /// Whatever is wrong with the vocabulary, or a cache that cannot be written.
    pub fn from_corpus(corpus: &Corpus, options: &DataOptions) -> Result<Self, DataError> {
        Self::from_texts(corpus, options)
    }

    /// Token ids that are in memory already; the last n-th is validation.
    ///
    /// # Errors
    /// A token outside the vocabulary.
    pub fn from_tokens(ids: Vec<u32>, vocabulary: Vocabulary, validation_every: usize) -> Result<Self, DataError> {
        let validation = last_part(ids.len() as u64, validation_every);
        Self::from_stream(Tokens::from_ids(ids), vocabulary, validation, Path::new("tokens in memory"))
    }

    /// Reads examples of answers, every n-th of them for validation, and tokenizes them in memory. Of a tokenizer's file, the folder
    /// around it says which special tokens there are and how conversations are written.
    ///
    /// # Errors
    /// Lines that are no examples; whatever is wrong with the vocabulary; conversations without a template, or that it refuses.
    pub fn examples(path: &Path, format: Format, options: &DataOptions) -> Result<Self, DataError> {
        let lines = read_lines(path, format)?;
        let vocabulary = match &options.vocabulary {
            VocabularyChoice::File(file) => Vocabulary::open_with(file, &options.text)?,
            VocabularyChoice::Bytes => Vocabulary::bytes(),
            VocabularyChoice::Ids { size } => Vocabulary::ids(*size),
            VocabularyChoice::Bpe { size } => Vocabulary::train(lines.iter().map(Line::text), *size)?,
        };
        let folder = match &options.vocabulary {
            VocabularyChoice::File(file) => file.parent().map(Tokenizer::open).transpose()?,
            _ => None,
        };
        // Those for validation come last.
        let every = options.validation_every;
        let is_validation = |index: usize| every > 0 && index % every.max(2) == every.max(2) - 1;
        let encoding = Encoding { path, vocabulary: &vocabulary, folder: folder.as_ref(), answers: options.answers };
        let encoded = encode_lines(&lines, &encoding)?.into_iter().enumerate();
        let (back, mut front): (Vec<_>, Vec<_>) = encoded.partition(|(index, _)| is_validation(*index));
        let validation = back.iter().map(|(_, (tokens, _))| tokens.len() as u64).sum();
        front.extend(back);
        let (tokens, examples) = Examples::new(front.into_iter().map(|(_, example)| example).collect());
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

    /// What text was read; nothing for bare tokens and mixtures.
    pub fn corpus(&self) -> Option<&CorpusReport> {
        self.corpus.as_ref()
    }

    /// The folder that the tokenizer and the tokens are kept in; nothing for bare tokens and mixtures.
    pub fn folder(&self) -> Option<&Path> {
        self.folder.as_deref()
    }

    /// Tokens for training.
    pub fn training_tokens(&self) -> u64 {
        self.parts.iter().map(|part| part.training.end - part.training.start).sum()
    }

    /// Tokens for validation.
    pub fn validation_tokens(&self) -> u64 {
        self.parts.iter().map(|part| part.validation.end - part.validation.start).sum()
    }

    /// The largest token id in it: a model has more rows in its embedding.
    pub fn largest_token(&self) -> u32 {
        self.largest
    }

    /// blake3 of the vocabulary, the tokens and the split, in hexadecimal: the same hash gives the same batches.
    pub fn hash(&self) -> &str {
        &self.hash
    }

    /// The batches of a training run.
    ///
    /// # Errors
    /// Data shorter than one window; a size of zero.
    pub fn training(&self, sequence: usize, batch: usize, seed: u64) -> Result<TrainingWindows, DataError> {
        let cut = |part: &Part| Ok((self.cut(part, &part.training, sequence, "training")?, part.weight));
        TrainingWindows::of(self.parts.iter().map(cut).collect::<Result<_, DataError>>()?, batch, seed)
    }

    /// At most `count` windows to evaluate on; nothing when there is no validation part.
    ///
    /// # Errors
    /// Data shorter than one window; a size of zero.
    pub fn validation(&self, sequence: usize, count: usize) -> Result<Option<ValidationWindows>, DataError> {
        let there = self.parts.iter().filter(|part| !part.validation.is_empty());
        let cut = |part: &Part| Ok((self.cut(part, &part.validation, sequence, "validation")?, part.weight));
        let cuts = there.map(cut).collect::<Result<Vec<_>, DataError>>()?;
        if cuts.is_empty() { Ok(None) } else { ValidationWindows::of(cuts, count).map(Some) }
    }

    /// A part of it in windows: of whole examples, or of a stream.
    fn cut(&self, part: &Part, range: &Range<u64>, sequence: usize, name: &'static str) -> Result<Cut, DataError> {
        let (tokens, range) = (part.tokens.clone(), range.clone());
        match &part.examples {
            Some(examples) => Cut::of_examples(tokens, range, examples.clone(), sequence, name),
            None => Cut::new(tokens, range, self.vocabulary.end_of_text(), sequence, name),
        }
    }

    /// Files of ids, with the tokenizer beside them, the one that was chosen, or none. The last `validation` files are validation;
    /// if none is, the last n-th of the tokens.
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
        let part = Part { tokens: Arc::new(tokens), training, validation, examples: None, weight: 1.0 };
        let hash = hash.to_hex().to_string();
        Self { vocabulary, parts: vec![part], hash, corpus: None, folder: None, largest: scan.largest }
    }
}

/// How many of `tokens` the last n-th is.
fn last_part(tokens: u64, every: usize) -> u64 {
    if every == 0 { 0 } else { tokens / (every as u64).max(2) }
}

//! `[data]`: the training data.

use std::path::{Path, PathBuf};

use gapless_engine::data::{
    Answers, DataError, DataOptions, Dataset, Format, Source, TextOptions, TokenWidth, Vocabulary, VocabularyChoice,
};
use gapless_models::hf::Config;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::check::MAX_STEPS;
use super::{ConfigError, ModelConfig, RunConfig};
use crate::run::RunError;

/// The table `[data]` of a run file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct DataConfig {
    /// The data to train on: a file or folder of .txt, .rs, .md or .jsonl (also compressed as .gz or .zst) or .parquet;
    /// a .bin file of token ids or a folder of them; or a `Cargo.lock`, for the Rust sources that it names. A run
    /// requires this key; a plan of a run does not.
    pub path: PathBuf,
    /// Further data sources, each with its share of the training windows. `path` gets the remaining share.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub mix: Vec<SourceConfig>,
    /// The vocabulary size of the byte-pair encoding that is trained on the data; 256 uses plain bytes. The default is
    /// 4096. It cannot be combined with `tokenizer`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vocabulary: Option<usize>,
    /// The path of an existing tokenizer.json. If the model is a `model.folder`, the default is the tokenizer in this
    /// folder.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokenizer: Option<PathBuf>,
    /// The contents of a line of a .jsonl file or a row of a .parquet file. In all formats but `text`, only answers count
    /// in the loss. In the formats `prompt` and `chat`, examples are packed into sequences without attending to each
    /// other.
    pub format: Format,
    /// The assistant messages of a conversation that count in the loss, in the format `chat`.
    pub answers: Answers,
    /// In the format `text`, whether documents that are packed into one sequence are isolated. Isolated documents do
    /// not attend to each other, and each starts at position 0.
    pub isolate_documents: bool,
    /// Whether each document starts with the tokens that the tokenizer adds to a text, such as `<s>` of Llama 2 or
    /// `<bos>` of Gemma. GPT-2 and Qwen add none.
    pub begin_of_text: bool,
    /// The text of the token that ends each document. The default is the end-of-text token that is named in the files
    /// next to the tokenizer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub end_of_text: Option<String>,
    /// Whether special tokens that are spelled out in a text, such as `<|im_end|>`, are converted to their ids.
    /// Otherwise they are treated as plain text. In all formats but `text` they are always converted if the
    /// tokenizer is read from a file.
    pub special_tokens: bool,
    /// The width of the ids in .bin files without a header. The default is 16 bits, or 32 bits for vocabularies of more
    /// than 65,536 tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_width: Option<TokenWidth>,
    /// Every n-th document is used for validation; 0 uses none.
    pub validation_every: usize,
    /// The folder in which tokenized data is cached.
    pub cache: PathBuf,
}

/// An entry of `[[data.mix]]`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SourceConfig {
    /// The data, as in `data.path`.
    pub path: PathBuf,
    /// The share of this source in the training windows, between 0 and 1.
    pub weight: f64,
}

impl Default for DataConfig {
    fn default() -> Self {
        let DataOptions { validation_every, cache, text, .. } = DataOptions::default();
        Self {
            path: PathBuf::new(),
            mix: Vec::new(),
            vocabulary: None,
            tokenizer: None,
            format: Format::default(),
            answers: Answers::default(),
            isolate_documents: false,
            begin_of_text: text.begin,
            end_of_text: None,
            special_tokens: false,
            token_width: None,
            validation_every,
            cache,
        }
    }
}

/// Default size of the byte-pair encoding that is trained on the data.
const TRAINED_VOCABULARY: usize = 4096;

impl DataConfig {
    /// Whether these settings determine the vocabulary size. If false, a planned model keeps its own vocabulary size.
    pub(in crate::run) fn decides_vocabulary(&self) -> bool {
        !self.path.as_os_str().is_empty() || self.vocabulary.is_some() || self.tokenizer.is_some()
    }

    /// Returns the size of the vocabulary that is trained on the data if no tokenizer is given.
    pub(in crate::run) fn vocabulary_size(&self) -> usize {
        self.vocabulary.unwrap_or(TRAINED_VOCABULARY)
    }

    /// True if a sequence may hold several documents or examples that do not attend to each other.
    pub fn has_documents(&self) -> bool {
        self.isolate_documents || self.format.has_answers()
    }

    /// Returns the options for converting a document to tokens.
    pub fn text_options(&self) -> TextOptions {
        let special = self.special_tokens || self.format.has_answers();
        TextOptions { begin: self.begin_of_text, end: self.end_of_text.clone(), special }
    }
}

impl RunConfig {
    /// Returns the run with `epochs` converted to `steps`, by the number of windows in an epoch of the data. A run that
    /// has `steps` is returned as it is.
    ///
    /// # Errors
    /// Returns an error if the data are too short for a window, or if the learning rate does not fit the number of steps.
    pub fn with_steps(&self, dataset: &Dataset) -> Result<Self, RunError> {
        let Some(epochs) = self.epochs else { return Ok(self.clone()) };
        let windows = dataset.training(self.step.sequence, self.step.batch, self.seed)?.per_epoch();
        let steps = (epochs * windows as f64 / self.step.batch as f64).ceil().max(1.0) as u64;
        if steps > MAX_STEPS {
            let why = format!("is {epochs}, which takes more than the maximum of {MAX_STEPS} steps");
            return Err(ConfigError::value("epochs", why, "choose a smaller value").into());
        }
        let run = Self { steps, epochs: None, ..self.clone() };
        run.check_keys()?;
        Ok(run)
    }

    /// Tokenizes the data, or opens the tokenized data that an earlier run has left in the cache.
    ///
    /// # Errors
    /// Returns the errors of [`Dataset::prepare`], and an error if the model folder cannot be read.
    pub fn dataset(&self) -> Result<Dataset, RunError> {
        let DataConfig { path, mix, format, .. } = self.data.clone();
        let options = self.data_options()?;
        if mix.is_empty() {
            return Ok(match format.has_answers() {
                true => Dataset::examples(&path, format, &options),
                false => Dataset::prepare(&Source::from(path), &options),
            }?);
        }
        let rest = 1.0 - mix.iter().map(|source| source.weight).sum::<f64>();
        let sources = std::iter::once((path, rest)).chain(mix.into_iter().map(|source| (source.path, source.weight)));
        if format.has_answers() {
            let parts = sources.map(|(path, weight)| Ok((Dataset::examples(&path, format, &options)?, weight)));
            return Ok(Dataset::mixture(parts.collect::<Result<_, DataError>>()?)?);
        }
        let sources: Vec<(Source, f64)> = sources.map(|(path, weight)| (Source::from(path), weight)).collect();
        Ok(Dataset::prepare_mixture(&sources, &options)?)
    }

    /// Opens data that the run does not train on, in the format of the run's data. All of it is for validation.
    /// `vocabulary` is the vocabulary of the run's dataset.
    ///
    /// # Errors
    /// Returns the errors of [`Dataset::held_out`], and an error if the model folder cannot be read.
    pub fn held_out(&self, path: &Path, vocabulary: &Vocabulary) -> Result<Dataset, RunError> {
        Ok(Dataset::held_out(path, self.data.format, vocabulary, &self.data_options()?)?)
    }

    fn data_options(&self) -> Result<DataOptions, RunError> {
        let DataConfig { answers, cache, token_width: width, .. } = self.data.clone();
        let validation_every = self.validation_every();
        let (vocabulary, text) = (self.vocabulary_choice()?, self.data.text_options());
        Ok(DataOptions { vocabulary, validation_every, text, width, answers, cache })
    }

    /// Returns `data.validation_every`, or 0 if `evaluation.path` is set, because the data there are then used for
    /// validation in place of a part of the training data.
    pub(super) fn validation_every(&self) -> usize {
        if self.evaluation.path.is_some() { 0 } else { self.data.validation_every }
    }

    /// Returns the tokenizer of the run's data.
    fn vocabulary_choice(&self) -> Result<VocabularyChoice, RunError> {
        let beside = match &self.model {
            ModelConfig::Folder(folder) => Some(folder.join("tokenizer.json")),
            _ => None,
        };
        Ok(match (self.data.tokenizer.clone().or(beside), &self.model) {
            (Some(file), ..) if file.exists() => VocabularyChoice::File(file),
            // Data that consist of token ids need no tokenizer. The config.json of the model gives the vocabulary size.
            (_, ModelConfig::Folder(folder)) => VocabularyChoice::Ids { size: Config::read(folder)?.vocabulary() },
            (Some(file), ..) => VocabularyChoice::File(file),
            (None, _) => VocabularyChoice::of_size(self.data.vocabulary_size()),
        })
    }

    /// Returns the size of the vocabulary before the data are read. If the vocabulary is trained on the data, this is
    /// its minimum, because a short text has fewer tokens than the run asks for.
    ///
    /// # Errors
    /// Returns an error if the tokenizer or the model folder cannot be read.
    pub(in crate::run) fn least_vocabulary(&self) -> Result<usize, RunError> {
        Ok(match self.vocabulary_choice()? {
            VocabularyChoice::File(file) => Vocabulary::open_with(&file, &self.data.text_options())?.size(),
            VocabularyChoice::Bytes | VocabularyChoice::Bpe { .. } => Vocabulary::bytes().size(),
            VocabularyChoice::Ids { size } => size,
        })
    }
}

//! Opens trained weights for inference.

use std::path::{Path, PathBuf};

use anyhow::{anyhow, ensure};
use gapless::engine::data::{
    Corpus, DataError, DataOptions, Dataset, Format, Source, TextOptions, TokenWidth, Tokenizer, Vocabulary,
    VocabularyChoice,
};
use gapless::models::hf::{Adapter, Config, Folder, HfError};
use gapless::run::TrainedRun;
use gapless::{Precision, StepOptions, TrainOptions, Trainer};
use serde_json::Value;

use crate::output::tell;

/// The type in which a folder's weights are stored in memory and computed with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum WeightType {
    /// Weights as stored, or widened to f32; nothing is rounded to 16 bits.
    F32,
    /// Half the memory. Weights and results are rounded to bf16, as transformers computes a model stored in bf16.
    Bf16,
}

/// The settings with which a folder's weights are opened.
#[derive(Debug, clap::Args)]
pub struct FolderArguments {
    /// The type of a folder's weights in memory. The default is f32, whatever the file stores, as it adds no rounding; bf16 takes
    /// half the memory, and computes as transformers does with weights stored in bf16.
    #[arg(long, value_enum)]
    dtype: Option<WeightType>,
    /// The folder of an adapter's base model, if it is not the one that the adapter names.
    #[arg(long)]
    base: Option<PathBuf>,
}

/// Opens the run at a path. If the path does not belong to a run, returns `None`, and the caller should open it as a
/// Hugging Face folder. Returns an error if `average` is set for such a folder, because it has no averages.
pub fn run_at(path: &Path, average: bool, of_folder: &FolderArguments) -> anyhow::Result<Option<TrainedRun>> {
    if !TrainedRun::is_at(path) {
        ensure!(!average, "a Hugging Face folder has no averages; leave --average out");
        return Ok(None);
    }
    ensure!(of_folder.dtype.is_none(), "a run's weights have the type of its run.toml; leave --dtype out");
    ensure!(of_folder.base.is_none(), "a run has the weights of its base in its checkpoints; leave --base out");
    let mut run = TrainedRun::open(path)?;
    run.average = average;
    Ok(Some(run))
}

/// A Hugging Face folder, which is either the folder of a model, or the folder of an adapter together with that of its
/// base model.
pub struct Pretrained {
    /// The folder of the model, or of the adapter's base model.
    pub folder: Folder,
    adapter: Option<Adapter>,
    /// The folder with the tokenizer.
    pub tokenizer: PathBuf,
    precision: Precision,
}

impl Pretrained {
    /// Opens a folder, and prints its notices.
    pub fn open(path: &Path, arguments: &FolderArguments) -> anyhow::Result<Self> {
        let precision = match arguments.dtype {
            None | Some(WeightType::F32) => Precision::F32,
            Some(WeightType::Bf16) => Precision::Bf16,
        };
        let opened = match with_base(path, arguments.base.as_deref())? {
            Some((adapter, folder)) => {
                let tokenizer = if adapter.has_tokenizer() { path } else { folder.path() }.to_owned();
                Self { folder, adapter: Some(adapter), tokenizer, precision }
            }
            None => {
                ensure!(arguments.base.is_none(), "{} is not an adapter; leave --base out", path.display());
                Self { folder: Folder::open(path)?, adapter: None, tokenizer: path.to_owned(), precision }
            }
        };
        opened.folder.notices().iter().for_each(tell);
        Ok(opened)
    }

    /// Opens data to measure the model on. All of it is for validation. Each document of a text has the special tokens
    /// that the tokenizer puts around a text. If there are several documents, each also ends with the end-of-text token.
    pub fn held_out(&self, path: &Path, format: Format, width: Option<TokenWidth>) -> anyhow::Result<Dataset> {
        let file = match self.tokenizer.is_dir() {
            true => self.tokenizer.join("tokenizer.json"),
            false => self.tokenizer.clone(),
        };
        let mut text = TextOptions { special: true, ..TextOptions::default() };
        let size = self.folder.config().vocabulary();
        let ids = || Vocabulary::ids(size);
        if format.has_answers() || Source::from(path.to_owned()).is_ids()? {
            // Ids need no tokenizer.
            let vocabulary = match format.has_answers() {
                true => match Vocabulary::open_with(&file, &text) {
                    Err(error @ DataError::NoEndOfText { .. }) => {
                        text.end = Some(self.end_token(&file).ok_or(error)?);
                        Vocabulary::open_with(&file, &text)?
                    }
                    opened => opened?,
                },
                false => ids(),
            };
            let vocabulary_choice = VocabularyChoice::File(file);
            let options = DataOptions { vocabulary: vocabulary_choice, text, width, ..DataOptions::default() };
            return Ok(Dataset::held_out(path, format, &vocabulary, &options)?);
        }
        let (tokenizer, corpus) = (Tokenizer::open(&self.tokenizer)?, Corpus::read(path)?);
        let ends = corpus.documents().len() > 1;
        let mut tokens = Vec::new();
        for document in corpus.documents() {
            tokens.extend(tokenizer.encode(&document.text, true)?);
            tokens.extend(tokenizer.eos().or_else(|| self.end_id()).filter(|_| ends));
        }
        Ok(Dataset::from_tokens(tokens, ids(), 0)?.for_validation())
    }

    /// Returns the id of the end-of-text token in the files of the model, or of the adapter's base. The tokenizer of an
    /// adapter may have no files of its own that name the token.
    fn end_id(&self) -> Option<u32> {
        let found = ["config.json", "generation_config.json"].into_iter().find_map(|name| {
            let config = read_json(&self.folder.path().join(name))?;
            let id = &config["eos_token_id"];
            // Of several ids, the first is that of the tokenizer's end token.
            if id.is_array() { id[0].as_u64() } else { id.as_u64() }
        });
        found.and_then(|id| u32::try_from(id).ok())
    }

    /// Returns the token with the id [`Self::end_id`], as the tokenizer's file spells it.
    fn end_token(&self, tokenizer: &Path) -> Option<String> {
        let (id, tokenizer) = (self.end_id()?, read_json(tokenizer)?);
        let mut added = tokenizer["added_tokens"].as_array().into_iter().flatten();
        if let Some(token) = added.find(|token| token["id"] == id) {
            return Some(token["content"].as_str()?.to_owned());
        }
        match &tokenizer["model"]["vocab"] {
            Value::Object(tokens) => tokens.iter().find(|(_, its)| **its == id).map(|(token, _)| token.clone()),
            // A Unigram model lists pairs of a token and its score.
            tokens => Some(tokens[id as usize][0].as_str()?.to_owned()),
        }
    }

    /// Builds the model with its weights. The precision in `options` is replaced by the precision that the arguments
    /// select.
    pub fn model(&self, options: TrainOptions) -> Result<Trainer, HfError> {
        let options = TrainOptions { step: StepOptions { precision: self.precision, ..options.step }, ..options };
        if let Some(adapter) = &self.adapter {
            return adapter.for_inference(&self.folder, options);
        }
        let mut trainer = Trainer::builder(|vb| self.folder.model(vb), options).for_inference().build()?;
        self.folder.load(&mut trainer)?;
        Ok(trainer)
    }
}

fn read_json(path: &Path) -> Option<Value> {
    serde_json::from_slice(&std::fs::read(path).ok()?).ok()
}

/// Opens the adapter at a path, together with its base model. Returns `None` if the path is not an adapter's folder.
pub fn with_base(path: &Path, base: Option<&Path>) -> anyhow::Result<Option<(Adapter, Folder)>> {
    if !Adapter::is_at(path) {
        return Ok(None);
    }
    let adapter = Adapter::open(path)?;
    let base = match base {
        Some(base) => base.to_owned(),
        None => adapter.base().map_err(|error| anyhow!("{error}; name the base model's folder with --base"))?,
    };
    let folder = Folder::open(base)?;
    Ok(Some((adapter, folder)))
}

/// Warns if a sequence of `tokens` tokens is longer than the sequences that the model was trained on. The callers never
/// exceed the limit of models whose number of positions is fixed.
pub fn tell_of_positions(config: &Config, tokens: usize) {
    if let Some(trained) =
        config.trained_positions().filter(|&trained| trained < tokens && config.longest_sequence().is_none())
    {
        tell(format_args!(
            "{tokens} tokens are more than the {trained} that the model was trained on (max_position_embeddings)"
        ));
    }
}

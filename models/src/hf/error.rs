//! Errors of opening, loading and saving pretrained weights.

use std::fmt::Display;
use std::io;
use std::path::PathBuf;

use gapless_engine::TrainError;

/// `Result` with [`HfError`].
pub type Result<T, E = HfError> = std::result::Result<T, E>;

/// An error of opening, loading or saving a folder.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages name the fields")]
pub enum HfError {
    #[error("cannot read {path}: {source}")]
    Read { path: PathBuf, source: io::Error },
    #[error("cannot write {path}: {source}")]
    Write { path: PathBuf, source: io::Error },
    #[error("{path} is not valid JSON: {why}; near: {line}")]
    Json { path: PathBuf, why: String, line: String },
    #[error("{path} is malformed: {why}")]
    Malformed { path: PathBuf, why: String },
    /// The configuration is refused. `problems` lists every option that is wrong or unsupported.
    #[error("{path} is refused: {}", listed(problems))]
    Config { path: PathBuf, problems: Vec<ConfigProblem> },
    #[error(
        "{path} has no weights: neither model.safetensors nor model.safetensors.index.json; other formats are not read"
    )]
    NoWeights { path: PathBuf },
    #[error("{path} has no adapter_model.safetensors; other formats are not read")]
    NoAdapter { path: PathBuf },
    #[error("{index} names the file {file:?}, which is not a file of the same folder")]
    ShardPath { index: PathBuf, file: String },
    #[error("{path} is not a safetensors file: {why}")]
    Header { path: PathBuf, why: String },
    /// The weights are refused. `problems` lists every tensor that is missing, superfluous, invalid, or not as the
    /// configuration requires.
    #[error("the weights in {path} are refused: {}", listed(problems))]
    Weights { path: PathBuf, problems: Vec<WeightProblem> },
    #[error("the adapter in {path} was trained for the model in {base}, and there is no such folder")]
    NoBase { path: PathBuf, base: PathBuf },
    /// A model that is not one of the families. `differences` are the settings in which the nearest family differs.
    #[error(
        "no Hugging Face family has this model: the nearest one, {family}, needs {}; only a model with the settings of a \
         family can be written as a folder",
        differences.join(", ")
    )]
    NoFamily { family: &'static str, differences: Vec<String> },
    #[error("{path} exists and is not empty; save to a new folder")]
    Exists { path: PathBuf },
    #[error(transparent)]
    Train(#[from] TrainError),
}

impl From<gapless_engine::Error> for HfError {
    fn from(error: gapless_engine::Error) -> Self {
        Self::Train(error.into())
    }
}

impl From<candle_core::Error> for HfError {
    fn from(error: candle_core::Error) -> Self {
        Self::Train(error.into())
    }
}

/// A problem with one option of a config.json.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages name the fields")]
pub enum ConfigProblem {
    #[error("{field} is missing")]
    Missing { field: String },
    #[error("{field} is {found}, which is not {expected}")]
    Value { field: String, found: String, expected: String },
    #[error("{field} is {found}; supported: {supported}")]
    Unsupported { field: String, found: String, supported: String },
    #[error("model_type is {found}, which has {missing}; these are not supported")]
    Family { found: String, missing: &'static str },
    #[error("{field} is {found}, but this option is unknown for this model")]
    Unknown { field: String, found: String },
}

/// A problem with one tensor.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages name the fields")]
pub enum WeightProblem {
    #[error("{name} {shape:?} is missing")]
    Missing { name: String, shape: Vec<usize> },
    #[error("{name} {shape:?} is not a tensor of the model")]
    Extra { name: String, shape: Vec<usize> },
    #[error("{name} has the shape {found:?}, not {expected:?}")]
    Shape { name: String, expected: Vec<usize>, found: Vec<usize> },
    #[error("{name} is of type {found}; F32, F16 and BF16 are supported")]
    Type { name: String, found: String },
    #[error("{name} is not in {file}, where the index places it")]
    NotInShard { name: String, file: String },
    #[error("{name} is in {file}, but not in the index")]
    NotInIndex { name: String, file: String },
    #[error("{name} has {value} among its elements; go back to a sound checkpoint")]
    NotFinite { name: String, value: String },
    #[error("{name} differs from {other}, to which tie_word_embeddings ties it")]
    Untied { name: String, other: String },
    #[error("{name} is {found}; supported: {supported}")]
    Constant { name: String, found: String, supported: String },
}

/// The maximum number of problems that a message lists. The field `problems` holds all of them.
const SHOWN: usize = 40;

fn listed<T: Display>(problems: &[T]) -> String {
    let mut text: Vec<String> = problems.iter().take(SHOWN).map(T::to_string).collect();
    if problems.len() > SHOWN {
        text.push(format!("and {} more", problems.len() - SHOWN));
    }
    text.join("; ")
}

//! What can be wrong with a checkpoint, and what to do about it.

use std::io;
use std::path::PathBuf;

use candle_core::DType;

use crate::Difference;

/// Why a checkpoint could not be saved or opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// Nothing is at the path.
    #[error("there is no checkpoint at {path}; check the path")]
    Missing {
        /// The path as given.
        path: PathBuf,
    },
    /// A folder without a manifest: its writing never came to its end.
    #[error("{path} has no manifest: its saving was interrupted, or it is not a checkpoint; use an older checkpoint")]
    Interrupted {
        /// The folder.
        path: PathBuf,
    },
    /// A file that the manifest names is not there.
    #[error("{path} is missing from its checkpoint; restore the file, or use an older checkpoint")]
    MissingFile {
        /// The file.
        path: PathBuf,
    },
    /// A file has another size than it was written with.
    #[error("{path} has {found} bytes, but was written with {expected}: it is cut off; use an older checkpoint")]
    Truncated {
        /// The file.
        path: PathBuf,
        /// Bytes that were written.
        expected: u64,
        /// Bytes that are there.
        found: u64,
    },
    /// A file has other contents than it was written with.
    #[error("{path} is damaged: {reason}; use an older checkpoint")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What does not match.
        reason: String,
    },
    /// A later version of this program made the checkpoint.
    #[error("{path} has format {found}, but this version reads formats up to {known}; use the version that wrote it")]
    NewerFormat {
        /// The manifest.
        path: PathBuf,
        /// The manifest's format.
        found: u64,
        /// The newest format that is read.
        known: u64,
    },
    /// There are checkpoints, but none of them is sound.
    #[error("none of the {count} checkpoints in {path} can be used; the newest: {newest}")]
    NoneSound {
        /// The folder of checkpoints.
        path: PathBuf,
        /// How many there are.
        count: usize,
        /// What is wrong with the newest.
        newest: Box<CheckpointError>,
    },
    /// The checkpoint is of another model, or of other data.
    #[error(
        "{path} was saved with another {key}: {}{}; use the {key} that it was saved with, or start a new run",
        listed(differences),
        made_with(config)
    )]
    Other {
        /// The checkpoint.
        path: PathBuf,
        /// Which part of the metadata was compared.
        key: String,
        /// Every key that differs.
        differences: Vec<Difference>,
        /// The configuration of the model that it was made with, where the run saved it.
        config: Option<serde_json::Value>,
    },
    /// A folder that nothing can be written into.
    #[error("cannot write into the folder {path}: {source}; choose another folder, or change its permissions")]
    Unwritable {
        /// The folder.
        path: PathBuf,
        /// What the operating system said.
        source: io::Error,
    },
    /// A run's folder would have a file that is there already, and that no run wrote.
    #[error(
        "{path} has a {name} that no run wrote, and a run would replace it; choose another folder, or move the file"
    )]
    Foreign {
        /// The folder.
        path: PathBuf,
        /// The file in it.
        name: &'static str,
    },
    /// Another process works in the folder.
    #[error("{path} is in use by {owner}; wait for its end, stop it, or choose another folder")]
    Locked {
        /// The folder.
        path: PathBuf,
        /// Who has locked it.
        owner: String,
    },
    /// A section that the checkpoint doesn't have.
    #[error("{path} has no section {file}; it has {}", present.join(", "))]
    NoSection {
        /// The checkpoint.
        path: PathBuf,
        /// The section asked for.
        file: String,
        /// Those that there are.
        present: Vec<String>,
    },
    /// A tensor that the section doesn't have.
    #[error("{path} has no tensor {name}; use a checkpoint of the same model")]
    NoTensor {
        /// The section's file.
        path: PathBuf,
        /// The tensor asked for.
        name: String,
    },
    /// The bytes at hand are not those of the tensor's type and shape.
    #[error("tensor {name} ({} {shape:?}) takes {expected} bytes, but {found} were given", dtype.as_str())]
    TensorSize {
        /// The tensor.
        name: String,
        /// Its type.
        dtype: DType,
        /// Its shape.
        shape: Vec<usize>,
        /// Bytes of that type and shape.
        expected: usize,
        /// Bytes given.
        found: usize,
    },
    /// The sections cannot be written as they are: two of a name, or a name that is no file's.
    #[error("cannot save section {file}: {reason}")]
    Section {
        /// The section's file name.
        file: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The operating system refused a read.
    #[error("cannot read {path}: {source}")]
    Read {
        /// What was read.
        path: PathBuf,
        /// What the operating system said.
        source: io::Error,
    },
    /// The operating system refused a write.
    #[error("cannot write {path}: {source}; check that the disk has room (earlier checkpoints are intact)")]
    Write {
        /// What was written.
        path: PathBuf,
        /// What the operating system said.
        source: io::Error,
    },
    /// Candle refused the tensor.
    #[error("tensor {name}: {source}")]
    Candle {
        /// The tensor.
        name: String,
        /// What candle said.
        source: Box<candle_core::Error>,
    },
}

fn listed(differences: &[Difference]) -> String {
    const MOST: usize = 3;
    // A parameter says more than the states of its optimizer, which have a path before their names.
    let (states, parameters): (Vec<_>, Vec<_>) =
        differences.iter().partition(|difference| difference.key.contains('/'));
    let all = parameters.into_iter().chain(states);
    let listed: Vec<String> = all.take(MOST).map(Difference::to_string).collect();
    let more = differences.len().saturating_sub(MOST);
    if more == 0 { listed.join(", ") } else { format!("{}, and {more} more", listed.join(", ")) }
}

fn made_with(config: &Option<serde_json::Value>) -> String {
    config.as_ref().map_or_else(String::new, |config| format!("; its model is {config}"))
}

//! Errors of saving and opening checkpoints. Their messages say what to do.

use std::io;
use std::path::PathBuf;

use candle_core::DType;

use crate::Difference;

/// An error of saving or opening a checkpoint.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The path does not exist.
    #[error("there is no checkpoint at {path}; check the path")]
    Missing {
        /// The path as given.
        path: PathBuf,
    },
    /// A folder has no manifest, because its save was interrupted.
    #[error("{path} has no manifest: its saving was interrupted, or it is not a checkpoint; use an older checkpoint")]
    Interrupted {
        /// The folder.
        path: PathBuf,
    },
    /// A file that the manifest lists is missing.
    #[error("{path} is missing from its checkpoint; restore the file, or use an older checkpoint")]
    MissingFile {
        /// The file.
        path: PathBuf,
    },
    /// A file has another size than when it was saved.
    #[error("{path} has {found} bytes, but was written with {expected}: it is cut off; use an older checkpoint")]
    Truncated {
        /// The file.
        path: PathBuf,
        /// Size in bytes when the file was saved.
        expected: u64,
        /// Size in bytes now.
        found: u64,
    },
    /// A file has other contents than when it was saved.
    #[error("{path} is damaged: {reason}; use an older checkpoint")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Description of the mismatch.
        reason: String,
    },
    /// The checkpoint was written by a later version of this program.
    #[error("{path} has format {found}, but this version reads formats up to {known}; use the version that wrote it")]
    NewerFormat {
        /// The manifest.
        path: PathBuf,
        /// The manifest's format.
        found: u64,
        /// The newest format that this program reads.
        known: u64,
    },
    /// There are checkpoints, but none of them is usable.
    #[error("none of the {count} checkpoints in {path} can be used; the newest: {newest}")]
    NoneSound {
        /// The folder of checkpoints.
        path: PathBuf,
        /// Number of checkpoints.
        count: usize,
        /// Error of the newest checkpoint.
        newest: Box<CheckpointError>,
    },
    /// The checkpoint belongs to another model or to other data.
    #[error(
        "{path} was saved with another {key}: {}{}; use the {key} that it was saved with, or start a new run",
        listed(differences),
        made_with(config)
    )]
    Other {
        /// The checkpoint.
        path: PathBuf,
        /// Key of the metadata that was compared.
        key: String,
        /// Every key that differs.
        differences: Vec<Difference>,
        /// Configuration of the checkpoint's model, if the run saved it.
        config: Option<serde_json::Value>,
    },
    /// A folder is not writable.
    #[error("cannot write into the folder {path}: {source}; choose another folder, or change its permissions")]
    Unwritable {
        /// The folder.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// The folder has a file that no run wrote and that a run would replace.
    #[error(
        "{path} has a {name} that no run wrote, and a run would replace it; choose another folder, or move the file"
    )]
    Foreign {
        /// The folder.
        path: PathBuf,
        /// Name of the file.
        name: &'static str,
    },
    /// Another process uses the folder.
    #[error("{path} is in use by {owner}; wait for its end, stop it, or choose another folder")]
    Locked {
        /// The folder.
        path: PathBuf,
        /// Description of the process that holds the lock.
        owner: String,
    },
    /// The checkpoint does not have the requested section.
    #[error("{path} has no section {file}; it has {}", present.join(", "))]
    NoSection {
        /// The checkpoint.
        path: PathBuf,
        /// The requested section.
        file: String,
        /// The sections of the checkpoint.
        present: Vec<String>,
    },
    /// The section does not have the requested tensor.
    #[error("{path} has no tensor {name}; use a checkpoint of the same model")]
    NoTensor {
        /// The section's file.
        path: PathBuf,
        /// The requested tensor.
        name: String,
    },
    /// The number of bytes given does not fit the tensor's type and shape.
    #[error("tensor {name} ({} {shape:?}) takes {expected} bytes, but {found} were given", dtype.as_str())]
    TensorSize {
        /// Name of the tensor.
        name: String,
        /// Element type of the tensor.
        dtype: DType,
        /// Shape of the tensor.
        shape: Vec<usize>,
        /// Number of bytes that the type and shape require.
        expected: usize,
        /// Number of bytes that were given.
        found: usize,
    },
    /// The sections cannot be saved: two have the same name, or a name is not valid for a file.
    #[error("cannot save section {file}: {reason}")]
    Section {
        /// The section's file name.
        file: String,
        /// Description of the problem.
        reason: String,
    },
    /// The operating system refused a read.
    #[error("cannot read {path}: {source}")]
    Read {
        /// The file or folder.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// The operating system refused a write.
    #[error("cannot write {path}: {source}; check that the disk has room (earlier checkpoints are intact)")]
    Write {
        /// The file or folder.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// Candle cannot represent the tensor.
    #[error("tensor {name}: {source}")]
    Candle {
        /// The tensor.
        name: String,
        /// Candle's error.
        source: Box<candle_core::Error>,
    },
}

fn listed(differences: &[Difference]) -> String {
    const MOST: usize = 3;
    // Parameters come first, since they say more than optimizer states. The names of optimizer states contain a slash.
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

//! Plans in files, so that the next run plays its plan from the first request on.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::script::{NoPlan, Script};

/// The version of the format. A file of another version is not read.
const VERSION: u32 = 1;

/// A file that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SavedError {
    /// The file cannot be read or written.
    #[error("{path}: {source}")]
    File {
        /// The file.
        path: PathBuf,
        /// The error.
        source: std::io::Error,
    },
    /// The file is no saved plan.
    #[error(
        "{path} is not a saved plan: {source}. It is not overwritten, and this run saves no plan; remove it, or name another file"
    )]
    Format {
        /// The file.
        path: PathBuf,
        /// The error.
        source: serde_json::Error,
    },
    /// The file is of another version.
    #[error("{path} has version {found} of the format, not {VERSION}; this run replaces it when it has a plan")]
    Version {
        /// The file.
        path: PathBuf,
        /// Its version.
        found: u32,
    },
    /// The plan is wrong.
    #[error("{path}: {source}; this run replaces it when it has a plan")]
    Check {
        /// The file.
        path: PathBuf,
        /// The violation.
        source: NoPlan,
    },
}

impl SavedError {
    /// True if the file is a saved plan, which another one may replace.
    pub fn is_plan(&self) -> bool {
        matches!(self, Self::Version { .. } | Self::Check { .. })
    }
}

#[derive(Serialize, Deserialize)]
struct File<S> {
    version: u32,
    script: S,
}

/// Reads a plan and checks it.
///
/// # Errors
/// Returns an error if the file cannot be read, is of another version, or has a plan that fails the check.
pub fn read(path: &Path) -> Result<Script, SavedError> {
    let text = std::fs::read(path).map_err(|source| SavedError::File { path: path.into(), source })?;
    let file: File<Script> =
        serde_json::from_slice(&text).map_err(|source| SavedError::Format { path: path.into(), source })?;
    if file.version != VERSION {
        return Err(SavedError::Version { path: path.into(), found: file.version });
    }
    file.script.check().map_err(|source| SavedError::Check { path: path.into(), source })?;
    Ok(file.script)
}

/// Writes a plan under another name first, so that a process that ends meanwhile leaves no part of a file.
///
/// # Errors
/// Returns the error of the file system.
pub fn write(path: &Path, script: &Script) -> Result<(), SavedError> {
    let failed = |source| SavedError::File { path: path.into(), source };
    let text = serde_json::to_vec(&File { version: VERSION, script })
        .map_err(|source| SavedError::Format { path: path.into(), source })?;
    // The whole name stays in front: its end tells the devices of a process apart.
    let mut partial = path.as_os_str().to_owned();
    partial.push(format!(".{}.partial", std::process::id()));
    let partial = PathBuf::from(partial);
    std::fs::write(&partial, text).and_then(|()| std::fs::rename(&partial, path)).map_err(failed)
}

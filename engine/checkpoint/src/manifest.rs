//! `manifest.json`: the files of a checkpoint, its step and its metadata.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::CheckpointError;

/// The format that is written. Older formats can be read too. In format 1, a part of a tensor was a range of its elements;
/// since format 2, it can be any window.
pub(super) const FORMAT: u64 = 2;
pub(super) const MANIFEST: &str = "manifest.json";
/// Name of the file with the hash of the manifest. This hash reveals damage to the manifest itself.
pub(super) const MANIFEST_HASH: &str = "manifest.b3";

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Manifest {
    pub format: u64,
    pub step: u64,
    pub files: BTreeMap<String, FileEntry>,
    pub metadata: Value,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FileEntry {
    pub bytes: u64,
    pub blake3: String,
}

impl Manifest {
    /// Reads the manifest in a checkpoint's folder and compares it with its hash.
    pub fn read(folder: &Path) -> Result<Self, CheckpointError> {
        if let Err(source) = fs::metadata(folder) {
            let path = folder.to_owned();
            return Err(match source.kind() {
                io::ErrorKind::NotFound => CheckpointError::Missing { path },
                _ => CheckpointError::Read { path, source },
            });
        }
        let path = folder.join(MANIFEST);
        let hash_path = folder.join(MANIFEST_HASH);
        let read = |path: &Path, missing: CheckpointError| {
            fs::read(path).map_err(|source| match source.kind() {
                io::ErrorKind::NotFound => missing,
                _ => CheckpointError::Read { path: path.to_owned(), source },
            })
        };
        let damaged = |reason: String| CheckpointError::Damaged { path: path.clone(), reason };

        let json = read(&path, CheckpointError::Interrupted { path: folder.to_owned() })?;
        let hash = read(&hash_path, CheckpointError::MissingFile { path: hash_path.clone() })?;
        if hash != hash_line(&json).as_bytes() {
            return Err(damaged(format!("its hash is not the one in {MANIFEST_HASH}")));
        }
        // The format is checked first, because a newer manifest may have other fields.
        let value: Value = serde_json::from_slice(&json).map_err(|error| damaged(error.to_string()))?;
        match value.get("format").and_then(Value::as_u64) {
            Some(found) if found > FORMAT => Err(CheckpointError::NewerFormat { path, found, known: FORMAT }),
            _ => serde_json::from_value(value).map_err(|error| damaged(error.to_string())),
        }
    }
}

/// The contents of [`MANIFEST_HASH`], in the format that `b3sum --check` reads.
pub(super) fn hash_line(manifest: &[u8]) -> String {
    format!("{}  {MANIFEST}\n", blake3::hash(manifest).to_hex())
}

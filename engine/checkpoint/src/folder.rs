//! A folder of checkpoints: their names, the newest sound one, and how many to keep.

use std::fs;
use std::path::{Path, PathBuf};

use crate::manifest::Manifest;
use crate::{Checkpoint, CheckpointError};

const PARTIAL: &str = ".partial";
const REPLACED: &str = ".replaced";

pub(super) fn step_path(dir: &Path, step: u64) -> PathBuf {
    dir.join(format!("step-{step:08}"))
}

pub(super) fn partial_path(dir: &Path, step: u64) -> PathBuf {
    dir.join(format!("step-{step:08}{PARTIAL}"))
}

pub(super) fn replaced_path(dir: &Path, step: u64) -> PathBuf {
    dir.join(format!("step-{step:08}{REPLACED}"))
}

/// What a folder's name says it is. The order is that of preference: a later step, then the one that replaced the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Name {
    Partial,
    Replaced(u64),
    Committed(u64),
}

impl Name {
    fn parse(name: &str) -> Option<Self> {
        let rest = name.strip_prefix("step-")?;
        if let Some(step) = rest.strip_suffix(PARTIAL) {
            return step.parse::<u64>().ok().map(|_| Self::Partial);
        }
        if let Some(step) = rest.strip_suffix(REPLACED) {
            return step.parse().ok().map(Self::Replaced);
        }
        rest.parse().ok().map(Self::Committed)
    }

    fn preference(self) -> (u64, bool) {
        match self {
            Self::Committed(step) => (step, true),
            Self::Replaced(step) => (step, false),
            Self::Partial => (0, false),
        }
    }
}

impl Checkpoint {
    /// The folder of the checkpoint of a step.
    pub fn path_of(dir: &Path, step: u64) -> PathBuf {
        step_path(dir, step)
    }

    /// Opens the newest sound checkpoint of a folder. Interrupted and damaged ones are passed over, each with a warning
    /// that says which and why. Nothing if there has never been one.
    ///
    /// # Errors
    /// A folder that cannot be read; one with checkpoints of which none is sound, so that a run does not start anew
    /// unnoticed.
    pub fn latest(dir: &Path) -> Result<Option<Self>, CheckpointError> {
        let mut newest_error = None;
        let mut count = 0;
        for (name, path) in entries(dir)? {
            if name == Name::Partial {
                tracing::warn!(path = %path.display(), "passing over a checkpoint whose saving was interrupted");
                continue;
            }
            count += 1;
            match Self::open(&path) {
                Ok(checkpoint) => return Ok(Some(checkpoint)),
                Err(error) => {
                    tracing::warn!(path = %path.display(), %error, "passing over a checkpoint that is not sound");
                    newest_error.get_or_insert(error);
                }
            }
        }
        match newest_error {
            None => Ok(None),
            Some(newest) => Err(CheckpointError::NoneSound { path: dir.to_owned(), count, newest: Box::new(newest) }),
        }
    }

    /// Removes all but the newest `keep` (at least one) complete checkpoints, and what interrupted saves left. Answers what
    /// was removed. Newest is the highest step: a run that starts anew belongs into a folder of its own. A checkpoint counts
    /// as complete when all its files have their sizes. To be called when none is being saved.
    ///
    /// # Errors
    /// A folder that cannot be read, or a removal that fails.
    pub fn prune(dir: &Path, keep: usize) -> Result<Vec<PathBuf>, CheckpointError> {
        let mut removed = Vec::new();
        let mut kept: Vec<u64> = Vec::new();
        for (name, path) in entries(dir)? {
            let (step, _) = name.preference();
            let keeps = match name {
                Name::Partial => false,
                // An incomplete one newer than all complete ones may be wanted for a rescue; it goes when it is old.
                _ if !is_complete(&path) => kept.len() < keep.max(1),
                Name::Replaced(_) if kept.contains(&step) => false,
                _ => {
                    let keeps = kept.len() < keep.max(1);
                    if keeps {
                        kept.push(step);
                    }
                    keeps
                }
            };
            if !keeps {
                fs::remove_dir_all(&path).map_err(|source| CheckpointError::Write { path: path.clone(), source })?;
                removed.push(path);
            }
        }
        Ok(removed)
    }
}

/// The checkpoints of a folder, newest first. A folder that is not there has none.
fn entries(dir: &Path) -> Result<Vec<(Name, PathBuf)>, CheckpointError> {
    let read_error = |source| CheckpointError::Read { path: dir.to_owned(), source };
    let mut found = Vec::new();
    if !dir.exists() {
        return Ok(found);
    }
    for entry in fs::read_dir(dir).map_err(read_error)? {
        let entry = entry.map_err(read_error)?;
        if let Some(name) = entry.file_name().to_str().and_then(Name::parse) {
            found.push((name, entry.path()));
        }
    }
    found.sort_by_key(|(name, path)| (std::cmp::Reverse(name.preference()), path.clone()));
    Ok(found)
}

fn is_complete(path: &Path) -> bool {
    Manifest::read(path).is_ok_and(|manifest| {
        let has_size =
            |(file, bytes): (&String, u64)| fs::metadata(path.join(file)).is_ok_and(|found| found.len() == bytes);
        manifest.files.iter().map(|(file, entry)| (file, entry.bytes)).all(has_size)
    })
}

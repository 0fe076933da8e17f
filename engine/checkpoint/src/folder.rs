//! A folder of checkpoints: their names, the newest usable one, and the removal of old ones.

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::manifest::Manifest;
use crate::{Checkpoint, CheckpointError};

/// The state of a checkpoint according to its folder's name. If several folders have one step, later variants take
/// precedence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum State {
    /// The checkpoint is being saved, or its save was interrupted.
    Partial,
    /// The checkpoint was renamed to make room for a new checkpoint of the same step.
    Replaced,
    /// The checkpoint is complete.
    Complete,
}

impl State {
    fn suffix(self) -> &'static str {
        match self {
            Self::Partial => ".partial",
            Self::Replaced => ".replaced",
            Self::Complete => "",
        }
    }
}

/// Returns the path for a folder of the given step and state, such as `step-00000100`. If that name belongs to a file
/// or to a checkpoint of another step, the path is `step-00000100-2` and so on. Several writers of one step get the
/// same path.
pub(super) fn path_for(dir: &Path, step: u64, state: State) -> PathBuf {
    let numbers = std::iter::once(String::new()).chain((2u64..).map(|number| format!("-{number}")));
    let mut paths = numbers.map(|number| dir.join(format!("step-{step:08}{number}{}", state.suffix())));
    paths.find(|path| is_free(path, step, state)).expect("numbers do not end")
}

/// True if a folder of this step and state may have this path. A folder of the same step and state at this path may be
/// replaced.
fn is_free(path: &Path, step: u64, state: State) -> bool {
    if path.is_dir() {
        return state == State::Partial || Manifest::read(path).map_or(true, |manifest| manifest.step == step);
    }
    // A path that cannot be examined counts as free; writing to it then returns the reason.
    fs::symlink_metadata(path).is_err()
}

/// A checkpoint's folder within a folder of checkpoints.
struct Entry {
    path: PathBuf,
    state: State,
    /// The step in the manifest or, if the manifest cannot be read, the step in the folder's name.
    step: u64,
    /// True if the folder's name has the step of the manifest. If the steps differ, the user has renamed or copied the
    /// folder, and the folder is never removed.
    is_ours: bool,
}

impl Entry {
    /// Determines a checkpoint's state from its path. Returns `None` if the name is not that of a checkpoint.
    fn of(path: PathBuf) -> Option<Self> {
        let name = path.file_name()?.to_str()?.strip_prefix("step-")?;
        let states = [State::Partial, State::Replaced, State::Complete];
        let (state, name) = states.into_iter().find_map(|state| Some((state, name.strip_suffix(state.suffix())?)))?;
        let (step, number) = name.split_once('-').unwrap_or((name, "0"));
        number.parse::<u64>().ok()?;
        let named: u64 = step.parse().ok()?;
        let step = match state {
            State::Partial => named,
            _ => Manifest::read(&path).map_or(named, |manifest| manifest.step),
        };
        Some(Self { path, state, step, is_ours: step == named })
    }

    fn is_complete(&self) -> bool {
        Manifest::read(&self.path).is_ok_and(|manifest| {
            manifest
                .files
                .iter()
                .all(|(file, entry)| fs::metadata(self.path.join(file)).is_ok_and(|found| found.len() == entry.bytes))
        })
    }
}

/// A complete checkpoint in a folder, as described by its manifest. Its other files were not read.
#[derive(Debug, Clone)]
pub struct Listed {
    /// Path of the checkpoint's folder.
    pub path: PathBuf,
    /// The step after which the checkpoint was saved.
    pub step: u64,
    /// Metadata that was given to [`Checkpoint::save`].
    pub metadata: Value,
}

impl Checkpoint {
    /// Returns the complete checkpoints of a folder, newest first.
    ///
    /// # Errors
    /// Returns an error if the folder cannot be read.
    pub fn list(dir: &Path) -> Result<Vec<Listed>, CheckpointError> {
        let complete = entries(dir)?.into_iter().filter(|entry| entry.state == State::Complete && entry.is_complete());
        let listed = |entry: Entry| {
            let metadata = Manifest::read(&entry.path).ok()?.metadata;
            Some(Listed { path: entry.path, step: entry.step, metadata })
        };
        Ok(complete.filter_map(listed).collect())
    }

    /// Opens the newest usable checkpoint of a folder: the one whose manifest has the highest step, whatever the names
    /// of the folders. Interrupted and damaged checkpoints are skipped; for each, a warning gives the path and the
    /// reason. Returns `None` if the folder has no checkpoints, or only interrupted ones.
    ///
    /// # Errors
    /// Returns an error if the folder cannot be read. Also returns an error if the folder has completed checkpoints but
    /// all are damaged, so that a run does not silently start anew.
    pub fn latest(dir: &Path) -> Result<Option<Self>, CheckpointError> {
        let mut newest_error = None;
        let mut count = 0;
        for Entry { path, state, step, is_ours } in entries(dir)? {
            let shown = path.display();
            if state == State::Partial {
                tracing::warn!(path = %shown, "skipping a checkpoint whose saving was interrupted");
                continue;
            }
            count += 1;
            match Self::open(&path) {
                Ok(checkpoint) => {
                    if !is_ours {
                        tracing::warn!(path = %shown, step, "the folder of a checkpoint is named after another step");
                    }
                    return Ok(Some(checkpoint));
                }
                Err(error) => {
                    tracing::warn!(path = %shown, %error, "skipping a checkpoint that cannot be used");
                    newest_error.get_or_insert(error);
                }
            }
        }
        match newest_error {
            None => Ok(None),
            Some(newest) => Err(CheckpointError::NoneSound { path: dir.to_owned(), count, newest: Box::new(newest) }),
        }
    }

    /// Removes old checkpoints and the remains of interrupted saves, and returns the removed paths. The newest `keep`
    /// usable checkpoints are kept, and so are the checkpoints of the steps `others`. If `keep` is 0, it counts as 1.
    /// The newest checkpoint is the one of the highest step, so a run that starts anew needs a folder of its own. This
    /// must not be called while a checkpoint is being saved.
    ///
    /// Like in [`Checkpoint::latest`], the newest checkpoint is verified by its hashes. If it is damaged, older
    /// checkpoints are verified as well, until `keep` usable ones are found. All other checkpoints count as usable if
    /// their files have the right sizes. A damaged checkpoint is kept as long as there are fewer than `keep` newer
    /// usable ones. Files in `dir` itself, and folders whose name does not have the step of their manifest, are left
    /// unchanged.
    ///
    /// # Errors
    /// Returns an error if the folder cannot be read. If a removal fails, the other removals are still done, and the
    /// first error is returned.
    pub fn prune(dir: &Path, keep: usize, others: &[u64]) -> Result<Vec<PathBuf>, CheckpointError> {
        let (mut removed, mut failed) = (Vec::new(), None);
        let (mut kept, mut damage_seen) = (BTreeSet::new(), false);
        for entry in entries(dir)?.into_iter().filter(|entry| entry.is_ours) {
            let is_superseded = entry.state == State::Replaced && kept.contains(&entry.step);
            if entry.state != State::Partial && !is_superseded && kept.len() < keep.max(1) {
                let verify = kept.is_empty() || damage_seen;
                let is_sound = if verify { Self::open(&entry.path).is_ok() } else { entry.is_complete() };
                if is_sound {
                    kept.insert(entry.step);
                } else {
                    // The damaged checkpoint is kept, because it is newer than the usable ones and the user may be able
                    // to rescue it.
                    damage_seen = true;
                }
                continue;
            }
            if entry.state == State::Complete && others.contains(&entry.step) {
                continue;
            }
            match fs::remove_dir_all(&entry.path) {
                Ok(()) => removed.push(entry.path),
                Err(source) => _ = failed.get_or_insert(CheckpointError::Write { path: entry.path, source }),
            }
        }
        failed.map_or(Ok(removed), Err)
    }
}

/// Returns the checkpoints of a folder, newest first and interrupted ones last. Among checkpoints of one step and
/// state, those whose name has the right step come before renamed copies. A missing folder has no checkpoints, and
/// files with a checkpoint's name do not count.
fn entries(dir: &Path) -> Result<Vec<Entry>, CheckpointError> {
    let read_error = |source| CheckpointError::Read { path: dir.to_owned(), source };
    let listed = match fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        listed => listed.map_err(read_error)?,
    };
    let mut found = Vec::new();
    for entry in listed {
        let path = entry.map_err(read_error)?.path();
        // A path that cannot be examined counts as a folder, so that the error is reported when the checkpoint is
        // opened.
        let is_folder =
            fs::metadata(&path).map_or_else(|error| error.kind() != io::ErrorKind::NotFound, |it| it.is_dir());
        if is_folder {
            found.extend(Entry::of(path));
        }
    }
    found.sort_by_cached_key(|entry| {
        (Reverse((entry.state != State::Partial, entry.step, entry.state, entry.is_ours)), entry.path.clone())
    });
    Ok(found)
}

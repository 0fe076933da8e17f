//! A folder of checkpoints: their names, the newest sound one, and how many to keep.

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::manifest::Manifest;
use crate::{Checkpoint, CheckpointError};

/// What a folder's name says of its state. The order is that of preference among folders of one step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum State {
    /// Being saved, or left by a save that was interrupted.
    Partial,
    /// Set aside by another of its step, which takes its place.
    Replaced,
    /// Complete.
    Committed,
}

impl State {
    fn suffix(self) -> &'static str {
        match self {
            Self::Partial => ".partial",
            Self::Replaced => ".replaced",
            Self::Committed => "",
        }
    }
}

/// The path for a folder of a step and state: `step-00000100`, or `step-00000100-2` and so on where something has that name
/// which is no folder, or a checkpoint of another step. Two writers of one step that ask find the same.
pub(super) fn path_for(dir: &Path, step: u64, state: State) -> PathBuf {
    let numbers = std::iter::once(String::new()).chain((2u64..).map(|number| format!("-{number}")));
    let mut paths = numbers.map(|number| dir.join(format!("step-{step:08}{number}{}", state.suffix())));
    paths.find(|path| is_free(path, step, state)).expect("numbers do not end")
}

/// Whether a folder of this step and state may have the path, in place of one of the same step and state.
fn is_free(path: &Path, step: u64, state: State) -> bool {
    if path.is_dir() {
        return state == State::Partial || Manifest::read(path).map_or(true, |manifest| manifest.step == step);
    }
    // What cannot be looked at is left to the write, whose error says why.
    fs::symlink_metadata(path).is_err()
}

/// One of a folder of checkpoints.
struct Entry {
    path: PathBuf,
    state: State,
    /// By its manifest, or if that cannot be read, by its name.
    step: u64,
    /// Whether its name gives the step of its manifest; who has renamed or copied it may remove it.
    is_ours: bool,
}

impl Entry {
    /// Nothing for a name that is not of a checkpoint.
    fn of(path: PathBuf) -> Option<Self> {
        let name = path.file_name()?.to_str()?.strip_prefix("step-")?;
        let states = [State::Partial, State::Replaced, State::Committed];
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

/// A complete checkpoint of a folder, by its manifest alone: its other files were not read.
#[derive(Debug, Clone)]
pub struct Listed {
    /// Where it is.
    pub path: PathBuf,
    /// The step after which it was saved.
    pub step: u64,
    /// What the caller of [`Checkpoint::save`] gave.
    pub metadata: Value,
}

impl Checkpoint {
    /// The complete checkpoints of a folder, newest first.
    ///
    /// # Errors
    /// A folder that cannot be read.
    pub fn list(dir: &Path) -> Result<Vec<Listed>, CheckpointError> {
        let complete = entries(dir)?.into_iter().filter(|entry| entry.state == State::Committed && entry.is_complete());
        let listed = |entry: Entry| {
            let metadata = Manifest::read(&entry.path).ok()?.metadata;
            Some(Listed { path: entry.path, step: entry.step, metadata })
        };
        Ok(complete.filter_map(listed).collect())
    }

    /// Opens the newest sound checkpoint of a folder: that of the highest step by the manifests, whatever the folders' names
    /// are. Interrupted and damaged ones are passed over, each with a warning that says which and why. Nothing if there has
    /// never been one.
    ///
    /// # Errors
    /// A folder that cannot be read; one with checkpoints of which none is sound, so that a run does not start anew
    /// unnoticed.
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

    /// Removes all but the newest `keep` (at least one) checkpoints and those of the steps `others`, and what interrupted saves left. Answers what was removed.
    /// Newest is the highest step: a run that starts anew belongs into a folder of its own. To be called when none is being
    /// saved.
    ///
    /// The newest one is verified by its hashes, as [`Checkpoint::latest`] does; where it is damaged, so are those before it,
    /// until `keep` are found that are sound. Others count by their files' sizes. Damaged ones do not count, and go when `keep`
    /// newer ones are there. What has another name than that of its step is left alone, and so are files.
    ///
    /// # Errors
    /// A folder that cannot be read, or the first removal that failed, after all others.
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
                    // Newer than those that are kept, it may be wanted for a rescue.
                    damage_seen = true;
                }
                continue;
            }
            if entry.state == State::Committed && others.contains(&entry.step) {
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

/// The checkpoints of a folder, newest first, interrupted ones last, those with the name of their step before copies of them. A folder that is not
/// there has none. Files with a checkpoint's name are none.
fn entries(dir: &Path) -> Result<Vec<Entry>, CheckpointError> {
    let read_error = |source| CheckpointError::Read { path: dir.to_owned(), source };
    let listed = match fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        listed => listed.map_err(read_error)?,
    };
    let mut found = Vec::new();
    for entry in listed {
        let path = entry.map_err(read_error)?.path();
        // A folder that cannot be looked at counts, so that its error is told.
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

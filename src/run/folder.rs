//! The folder of a run and its checkpoints. Only one run at a time can use the folder.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use gapless_engine::checkpoint::{Checkpoint, CheckpointError, FolderLock, Listed};
use gapless_engine::{TrainError, Trainer};

use super::references::REFERENCE;
use super::{Console, RunError};

/// Default number of checkpoints that are kept.
const DEFAULT_KEEP_LAST: usize = 2;

/// Name of the subfolder with the checkpoints.
const CHECKPOINTS: &str = "checkpoints";

/// Name of the subfolder of an earlier run, before its number.
const EARLIER: &str = "earlier";

/// Name of the subfolder with the files that a run was given and that it needs later, apart from its data.
pub(super) const PRETRAINED: &str = "pretrained";

/// Files and folders that a run writes. If a folder contains one of them, but not the lock file of a run, the files are
/// not from a run.
const WRITTEN: [&str; 9] = [
    CHECKPOINTS,
    PRETRAINED,
    REFERENCE,
    "metrics.jsonl",
    "log.txt",
    "samples.txt",
    "summary.json",
    "memory.html",
    "plan.csv",
];

/// Files that are copied, not moved, into the folder of an earlier run. They are needed to read the checkpoints there.
const COPIED: [&str; 2] = ["run.toml", "tokenizer.json"];

/// A folder that one run at a time writes into. Its checkpoints are in the subfolder `checkpoints`.
///
/// Call [`Self::open`] at the start of a program. It returns an error if the folder is in use, and never changes the
/// contents of the folder. Call [`Self::claim`] when the trainer exists and all settings have been checked.
#[derive(Debug)]
pub struct RunFolder {
    path: PathBuf,
    checkpoints: PathBuf,
    keep_last: usize,
    keep_best: usize,
    lock: OnceLock<FolderLock>,
}

impl RunFolder {
    /// Opens a folder, which need not exist. If earlier runs have used the folder, it is locked now; otherwise
    /// [`Self::claim`] locks it later.
    ///
    /// # Errors
    /// Returns [`CheckpointError::Locked`] if another process holds the lock; the error names this process. Returns
    /// [`CheckpointError::Foreign`] if no run has used the folder, but it contains a file that a run would replace.
    /// Also returns an error if the folder cannot be written to.
    pub fn open(path: &Path) -> Result<Self, CheckpointError> {
        let folder = Self::of_another_rank(path);
        match fs::metadata(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(folder),
            Err(source) => Err(CheckpointError::Read { path: path.to_owned(), source }),
            Ok(_) if FolderLock::was_acquired(path) => Ok(Self { lock: FolderLock::acquire(path)?.into(), ..folder }),
            Ok(_) => {
                let there = |name: &&str| fs::symlink_metadata(path.join(name)).is_ok();
                match WRITTEN.into_iter().chain([FolderLock::FILE]).find(there) {
                    Some(name) => Err(CheckpointError::Foreign { path: path.to_owned(), name }),
                    None => FolderLock::can_write(path).map(|()| folder),
                }
            }
        }
    }

    /// True if earlier runs had used the folder when it was opened.
    pub(super) fn was_run(&self) -> bool {
        self.lock.get().is_some()
    }

    /// Opens the folder on a rank other than the first, without locking it.
    pub(super) fn of_another_rank(path: &Path) -> Self {
        let (keep_last, keep_best, lock) = (DEFAULT_KEEP_LAST, 0, OnceLock::new());
        Self { path: path.to_owned(), checkpoints: path.join(CHECKPOINTS), keep_last, keep_best, lock }
    }

    /// Sets how many of the newest checkpoints are kept. The default is 2.
    pub fn keep_last(self, keep_last: usize) -> Self {
        Self { keep_last, ..self }
    }

    /// Sets how many of the checkpoints with the lowest validation loss are kept in addition to the newest. The default
    /// is 0. Only checkpoints that were saved right after an evaluation have a validation loss
    /// ([`TrainingLoop`](super::TrainingLoop)).
    pub fn keep_best(self, keep_best: usize) -> Self {
        Self { keep_best, ..self }
    }

    /// Creates the folder if it is missing, and locks it unless [`Self::open`] has already locked it.
    ///
    /// # Errors
    /// Returns an error if the folder cannot be created, and the errors of [`Self::open`] about the lock.
    pub fn claim(&self) -> Result<(), CheckpointError> {
        if self.lock.get().is_none() {
            let path = self.path.clone();
            fs::create_dir_all(&path).map_err(|source| CheckpointError::Write { path, source })?;
            let _first = self.lock.set(FolderLock::acquire(&self.path)?);
        }
        Ok(())
    }

    /// Checks that the folder at this path is still the one that was claimed. If that folder was deleted or moved,
    /// further output would be lost, or would get into a folder that another run may use. The check always succeeds on
    /// ranks other than the first, because these hold no lock.
    ///
    /// # Errors
    /// Returns [`RunError::FolderGone`] if the folder was deleted, moved or replaced.
    pub fn check_exists(&self) -> Result<(), RunError> {
        match self.lock.get() {
            Some(lock) if !lock.is_current(&self.path) => Err(RunError::FolderGone { path: self.path.clone() }),
            _ => Ok(()),
        }
    }

    /// Path of the folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Path of the subfolder with the checkpoints.
    pub fn checkpoints(&self) -> &Path {
        &self.checkpoints
    }

    /// Opens the newest usable checkpoint, which is neither interrupted nor damaged.
    ///
    /// # Errors
    /// Returns [`RunError::NothingToResume`] if there are no completed checkpoints. Returns another error if all
    /// completed checkpoints are damaged, or if the folder cannot be read.
    pub fn newest(&self) -> Result<Checkpoint, RunError> {
        let path = &self.checkpoints;
        Checkpoint::latest(path)?.ok_or_else(|| RunError::NothingToResume { path: path.clone() })
    }

    /// Opens the newest usable checkpoint with at most `steps` steps. Returns `None` if there is no such checkpoint.
    ///
    /// # Errors
    /// Returns an error if the folder cannot be read.
    pub(super) fn newest_until(&self, steps: u64) -> Result<Option<Checkpoint>, CheckpointError> {
        let mut all = Checkpoint::list(&self.checkpoints)?.into_iter().filter(|listed| listed.step <= steps);
        Ok(all.find_map(|listed| Checkpoint::open(&listed.path).ok()))
    }

    /// Removes all checkpoints of more than `steps` steps.
    ///
    /// # Errors
    /// Returns an error if a removal fails.
    pub(super) fn remove_after(&self, steps: u64) -> Result<(), CheckpointError> {
        for listed in Checkpoint::list(&self.checkpoints)?.into_iter().filter(|listed| listed.step > steps) {
            fs::remove_dir_all(&listed.path).map_err(|source| CheckpointError::Write { path: listed.path, source })?;
        }
        Ok(())
    }

    /// Begins a new run, or continues the run of this folder from the checkpoint `from`. To continue a run of another
    /// folder, call [`Self::fork`] instead. With several ranks, all ranks must call this method, and only the first
    /// rank changes files. The method does the following, in this order:
    ///
    /// - If `from` is given, the trainer resumes from this checkpoint.
    /// - The folder is locked.
    /// - If the run is new, the files of an earlier run in the folder are moved into a subfolder ([`Self::set_aside`]).
    /// - The memory map and the plan are written.
    /// # Errors
    /// Returns the errors of [`Trainer::resume`], [`Self::claim`] and [`Self::set_aside`], and an error if the memory
    /// map or the plan cannot be written.
    pub fn begin(&self, trainer: &mut Trainer, from: Option<&Checkpoint>, console: &Console) -> Result<(), RunError> {
        self.start(trainer, from, from.is_none(), console, || Ok(()))
    }

    /// Begins a new run that starts from a checkpoint of another run. The other run may be the one whose files are in
    /// this folder; these are then moved into a subfolder.
    ///
    /// # Errors
    /// Returns the errors of [`Self::begin`].
    pub fn fork(&self, trainer: &mut Trainer, from: &Checkpoint, console: &Console) -> Result<(), RunError> {
        self.start(trainer, Some(from), true, console, || Ok(()))
    }

    /// Like [`Self::begin`] or, if `is_new`, [`Self::fork`]. On the first rank, `prepare` is called when the folder is
    /// locked, before the files of an earlier run are moved.
    pub(super) fn start(
        &self,
        trainer: &mut Trainer,
        from: Option<&Checkpoint>,
        is_new: bool,
        console: &Console,
        prepare: impl FnOnce() -> Result<(), RunError>,
    ) -> Result<(), RunError> {
        if let Some(checkpoint) = from {
            trainer.resume(checkpoint)?;
        }
        if trainer.rank() > 0 {
            return Ok(());
        }
        console.say(trainer.device());
        console.say(trainer.report());
        self.claim()?;
        prepare()?;
        if let Some(checkpoint) = from {
            let path = checkpoint.path().display();
            console.say(format_args!("resumed after {} steps from {path}", checkpoint.step()));
        }
        if is_new && let Some(earlier) = self.set_aside()? {
            console.say(format_args!(
                "the earlier run of this folder is now in {}; --resume would have continued it",
                earlier.display()
            ));
        }
        let map = self.path.join("memory.html");
        write(&map, &trainer.memory_map().html())?;
        let plan = self.path.join("plan.csv");
        let cannot = |source| RunError::Io { what: format!("cannot write {}", plan.display()), source };
        fs::File::create(&plan)
            .and_then(|file| trainer.write_plan(io::BufWriter::new(file)).map_err(io::Error::other))
            .map_err(cannot)?;
        console.say(format_args!("memory map: {}", map.display()));
        Ok(())
    }

    /// Moves the files of an earlier run into a new subfolder `earlier.N`, and returns the path of the subfolder.
    /// Returns `None` if there is no earlier run. The subfolder also gets copies of run.toml and tokenizer.json, so
    /// that it is the complete folder of a run. Call this method only when the new run can no longer fail to start.
    ///
    /// # Errors
    /// Returns an error if a file cannot be moved or copied.
    pub fn set_aside(&self) -> Result<Option<PathBuf>, CheckpointError> {
        let is_there = |name: &&str| fs::symlink_metadata(self.path.join(name)).is_ok();
        let written: Vec<&str> = WRITTEN.into_iter().filter(is_there).collect();
        if written.is_empty() {
            return Ok(None);
        }
        let earlier = free_name(&self.path.join(EARLIER), 1);
        let put = |name: &str, put: fn(&Path, &Path) -> io::Result<()>| {
            let (from, to) = (self.path.join(name), earlier.join(name));
            put(&from, &to).map_err(|source| CheckpointError::Write { path: to, source })
        };
        fs::create_dir(&earlier).map_err(|source| CheckpointError::Write { path: earlier.clone(), source })?;
        for name in COPIED.into_iter().filter(|name| self.path.join(name).is_file()) {
            put(name, |from, to| fs::copy(from, to).map(drop))?;
        }
        for name in written {
            put(name, |from, to| fs::rename(from, to))?;
        }
        Ok(Some(earlier))
    }

    /// Saves a checkpoint and returns its path. Then removes old checkpoints, except for those that [`Self::keep_last`]
    /// and [`Self::keep_best`] keep. If a checkpoint cannot be removed, a warning is logged.
    ///
    /// # Errors
    /// Returns the errors of [`Trainer::save`].
    pub fn save(&self, trainer: &mut Trainer, run: serde_json::Value) -> Result<PathBuf, TrainError> {
        let path = trainer.save(&self.checkpoints, run)?;
        if trainer.rank() == 0
            && let Err(error) = self.best().and_then(|best| Checkpoint::prune(&self.checkpoints, self.keep_last, &best))
        {
            tracing::warn!(%error, "cannot remove an old checkpoint");
        }
        Ok(path)
    }

    /// Returns the numbers of steps of the checkpoints that are kept for their low validation loss.
    fn best(&self) -> Result<Vec<u64>, CheckpointError> {
        if self.keep_best == 0 {
            return Ok(Vec::new());
        }
        let all = Checkpoint::list(&self.checkpoints)?;
        let loss = |listed: &Listed| Some((listed.metadata["run"]["val_loss"].as_f64()?, listed.step));
        let mut all: Vec<_> = all.iter().filter_map(loss).collect();
        all.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        Ok(all.into_iter().take(self.keep_best).map(|(_, step)| step).collect())
    }
}

/// Returns the newest subfolder `earlier.N` of a run's folder that has checkpoints.
pub(super) fn newest_earlier(folder: &Path) -> Option<PathBuf> {
    let all = (1..).map(|number| folder.join(format!("{EARLIER}.{number}"))).take_while(|earlier| earlier.is_dir());
    all.filter(|earlier| Checkpoint::list(&earlier.join(CHECKPOINTS)).is_ok_and(|all| !all.is_empty())).last()
}

/// Returns the first of the paths `path.FIRST`, `path.FIRST+1`, … that does not exist.
pub(super) fn free_name(path: &Path, first: u64) -> PathBuf {
    let numbered = |number| {
        let mut name = path.as_os_str().to_owned();
        name.push(format!(".{number}"));
        PathBuf::from(name)
    };
    let mut free = (first..).map(numbered).filter(|path| fs::symlink_metadata(path).is_err());
    free.next().expect("numbers do not end")
}

/// Creates or replaces a file with this text.
pub(super) fn write(path: &Path, text: &str) -> Result<(), RunError> {
    fs::write(path, text).map_err(|source| RunError::Io { what: format!("cannot write {}", path.display()), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_run_at_a_time_and_nothing_is_touched_before_it_is_claimed() {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("run");
        let first = RunFolder::open(&out).unwrap();
        assert!(!out.exists());
        first.claim().unwrap();
        let error = RunFolder::open(&out).unwrap_err().to_string();
        assert!(error.contains(&format!("in use by process {}", std::process::id())), "{error}");

        assert_eq!(first.set_aside().unwrap(), None);
        for name in ["metrics.jsonl", "run.toml"] {
            fs::write(out.join(name), name).unwrap();
        }
        fs::create_dir(first.checkpoints()).unwrap();
        drop(first);
        let second = RunFolder::open(&out).unwrap();
        assert!(second.checkpoints().exists());
        let earlier = out.join("earlier.1");
        assert_eq!(second.set_aside().unwrap(), Some(earlier.clone()));
        assert!(["checkpoints", "metrics.jsonl", "run.toml"].iter().all(|name| earlier.join(name).exists()));
        assert!(out.join("run.toml").exists() && !out.join("metrics.jsonl").exists());
        fs::create_dir(second.checkpoints()).unwrap();
        assert_eq!(second.set_aside().unwrap(), Some(out.join("earlier.2")));
    }

    #[test]
    fn a_folder_that_is_gone_is_seen() {
        let place = tempfile::tempdir().unwrap();
        let (out, moved) = (place.path().join("run"), place.path().join("moved"));
        let folder = RunFolder::open(&out).unwrap();
        folder.check_exists().unwrap();
        folder.claim().unwrap();
        folder.check_exists().unwrap();
        fs::rename(&out, &moved).unwrap();
        let is_gone = || matches!(folder.check_exists(), Err(RunError::FolderGone { path }) if path == out);
        assert!(is_gone());
        // Another folder at the same path.
        let other = RunFolder::open(&out).unwrap();
        other.claim().unwrap();
        assert!(is_gone() == cfg!(unix) && other.check_exists().is_ok());
        drop(other);
        fs::remove_dir_all(&out).unwrap();
        fs::rename(&moved, &out).unwrap();
        folder.check_exists().unwrap();
    }

    #[test]
    fn a_folder_of_somebody_else_is_refused_and_left_as_it_is() {
        for name in WRITTEN.into_iter().chain([FolderLock::FILE]) {
            let folder = tempfile::tempdir().unwrap();
            fs::write(folder.path().join(name), "mine").unwrap();
            let error = RunFolder::open(folder.path()).unwrap_err();
            assert!(matches!(error, CheckpointError::Foreign { name: found, .. } if found == name), "{error}");
            assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        }
        // Files that no run writes do not matter.
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("notes.txt"), "mine").unwrap();
        RunFolder::open(folder.path()).unwrap();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}

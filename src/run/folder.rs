//! The folder of a run: one run at a time, and its checkpoints.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use gapless_engine::checkpoint::{Checkpoint, CheckpointError, FolderLock, Listed};
use gapless_engine::{TrainError, Trainer};

use super::{Console, RunError};

/// Checkpoints that are kept, unless it is said otherwise.
const KEPT: usize = 2;

/// A folder that one run at a time writes into. Its checkpoints are in `checkpoints`.
///
/// [`Self::open`] is for the start of a program: it refuses a folder that is in use, and changes nothing. [`Self::claim`] is for
/// when there is a trainer, and nothing else can be refused.
#[derive(Debug)]
pub struct RunFolder {
    path: PathBuf,
    checkpoints: PathBuf,
    keep_last: usize,
    keep_best: usize,
    lock: OnceLock<FolderLock>,
}

impl RunFolder {
    /// Locks the folder if it is there.
    ///
    /// # Errors
    /// [`CheckpointError::Locked`], which names the process that has it; a folder that cannot be written into.
    pub fn open(path: &Path) -> Result<Self, CheckpointError> {
        let lock = match fs::metadata(path) {
            Ok(_) => FolderLock::acquire(path)?.into(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => OnceLock::new(),
            Err(source) => return Err(CheckpointError::Read { path: path.to_owned(), source }),
        };
        Ok(Self { lock, ..Self::of_another_rank(path) })
    }

    /// The folder as another rank than the first has it: the first locks it.
    pub(super) fn of_another_rank(path: &Path) -> Self {
        let (keep_last, keep_best, lock) = (KEPT, 0, OnceLock::new());
        Self { path: path.to_owned(), checkpoints: path.join("checkpoints"), keep_last, keep_best, lock }
    }

    /// Keeps as many of the newest checkpoints; two by default.
    pub fn keep_last(self, keep_last: usize) -> Self {
        Self { keep_last, ..self }
    }

    /// Keeps as many of those with the lowest validation loss besides; none by default. Those count that were saved right behind an
    /// evaluation ([`Fit`](super::Fit)).
    pub fn keep_best(self, keep_best: usize) -> Self {
        Self { keep_best, ..self }
    }

    /// Makes the folder and locks it, unless it was there.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn claim(&self) -> Result<(), CheckpointError> {
        if self.lock.get().is_none() {
            let path = self.path.clone();
            fs::create_dir_all(&path).map_err(|source| CheckpointError::Write { path, source })?;
            let _first = self.lock.set(FolderLock::acquire(&self.path)?);
        }
        Ok(())
    }

    /// Where it lies.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Where its checkpoints are.
    pub fn checkpoints(&self) -> &Path {
        &self.checkpoints
    }

    /// The newest sound checkpoint, to go on from.
    ///
    /// # Errors
    /// [`RunError::NothingToResume`]; a folder that cannot be read.
    pub fn newest(&self) -> Result<Checkpoint, RunError> {
        let path = &self.checkpoints;
        Checkpoint::latest(path)?.ok_or_else(|| RunError::NothingToResume { path: path.clone() })
    }

    /// The newest sound checkpoint of at most so many steps.
    ///
    /// # Errors
    /// A folder that cannot be read.
    pub(super) fn newest_until(&self, steps: u64) -> Result<Option<Checkpoint>, CheckpointError> {
        let mut all = Checkpoint::list(&self.checkpoints)?.into_iter().filter(|listed| listed.step <= steps);
        Ok(all.find_map(|listed| Checkpoint::open(&listed.path).ok()))
    }

    /// Removes the checkpoints of more steps.
    ///
    /// # Errors
    /// A removal that fails.
    pub(super) fn remove_behind(&self, steps: u64) -> Result<(), CheckpointError> {
        for listed in Checkpoint::list(&self.checkpoints)?.into_iter().filter(|listed| listed.step > steps) {
            fs::remove_dir_all(&listed.path).map_err(|source| CheckpointError::Write { path: listed.path, source })?;
        }
        Ok(())
    }

    /// The start of a run: the trainer takes the checkpoint's place, if it goes on from one, of this folder or of another run. Then nothing can refuse it any more: the
    /// folder is this run's, an earlier one's checkpoints are set aside, the memory map is written, and all of it is said. With
    /// several ranks all call it, and the first does it.
    ///
    /// # Errors
    /// As [`Trainer::resume`], [`Self::claim`] and [`Self::set_aside`]; a memory map that cannot be written.
    pub fn begin(&self, trainer: &mut Trainer, from: Option<&Checkpoint>, console: &Console) -> Result<(), RunError> {
        if let Some(checkpoint) = from {
            trainer.resume(checkpoint)?;
        }
        if trainer.rank() > 0 {
            return Ok(());
        }
        console.say(trainer.device());
        console.say(trainer.report());
        self.claim()?;
        if let Some(checkpoint) = from {
            let path = checkpoint.path().display();
            console.say(format_args!("resumed after {} steps from {path}", checkpoint.step()));
        }
        let is_own = from.is_some_and(|checkpoint| checkpoint.path().parent() == Some(&self.checkpoints));
        if !is_own && let Some(earlier) = self.set_aside()? {
            console.say(format_args!(
                "checkpoints of an earlier run are now in {}; --resume would have gone on from them",
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

    /// Renames the checkpoints of an earlier run, for one that starts anew, and answers where they are now. To be called when
    /// nothing can refuse the new run any more.
    ///
    /// # Errors
    /// A rename that fails.
    pub fn set_aside(&self) -> Result<Option<PathBuf>, CheckpointError> {
        match fs::symlink_metadata(&self.checkpoints) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(CheckpointError::Read { path: self.checkpoints.clone(), source }),
            Ok(_) => {}
        }
        let names = (1u64..).map(|number| self.path.join(format!("checkpoints.{number}")));
        let mut free = names.filter(|path| fs::symlink_metadata(path).is_err());
        let earlier = free.next().expect("numbers do not end");
        match fs::rename(&self.checkpoints, &earlier) {
            Ok(()) => Ok(Some(earlier)),
            Err(source) => Err(CheckpointError::Write { path: self.checkpoints.clone(), source }),
        }
    }

    /// Saves a checkpoint, and removes old ones but for the newest that are sound. That one cannot be removed is a warning.
    ///
    /// # Errors
    /// As [`Trainer::save`].
    pub fn save(&self, trainer: &mut Trainer, run: serde_json::Value) -> Result<PathBuf, TrainError> {
        let path = trainer.save(&self.checkpoints, run)?;
        if trainer.rank() == 0
            && let Err(error) = self.best().and_then(|best| Checkpoint::prune(&self.checkpoints, self.keep_last, &best))
        {
            tracing::warn!(%error, "an old checkpoint stays");
        }
        Ok(path)
    }

    /// The steps of the checkpoints that are kept for their validation loss.
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

/// Writes a file whole.
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
        fs::create_dir(first.checkpoints()).unwrap();
        drop(first);
        let second = RunFolder::open(&out).unwrap();
        assert!(second.checkpoints().exists());
        assert_eq!(second.set_aside().unwrap(), Some(out.join("checkpoints.1")));
        fs::create_dir(second.checkpoints()).unwrap();
        assert_eq!(second.set_aside().unwrap(), Some(out.join("checkpoints.2")));
    }
}

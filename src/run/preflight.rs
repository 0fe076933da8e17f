//! Checks of a run before its data are read. Tokenizing may take hours, so everything that can be refused earlier is
//! refused here.

use std::path::Path;

use gapless_alloc::draw::Bytes;
use gapless_communicator::Communicator;
use gapless_engine::Trainer;
use gapless_engine::checkpoint::Checkpoint;

use super::{CheckpointConfig, ConfigError, RunConfig, RunError, RunFolder, Start};

/// Checks the model, the device, the budget and the disk space of a run. If the vocabulary is trained on the data, its
/// size is not known yet, and the smallest one is assumed. With several ranks, all ranks must call this function.
///
/// # Errors
/// Returns the errors of [`TrainerBuilder::check`](gapless_engine::TrainerBuilder::check), and an error if the disk has no
/// room for the checkpoints that the run keeps.
pub(super) fn preflight(
    world: &mut dyn Communicator,
    config: &RunConfig,
    folder: &RunFolder,
    start: &Start,
) -> Result<(), RunError> {
    let (architecture, _) = config.model(config.least_vocabulary()?).open()?;
    let bytes = Trainer::builder(|vb| architecture.model(vb), config.options()).check(world.rank())?;
    let mut all = vec![0; size_of::<u64>() * world.size()];
    world.all_gather(&bytes.to_le_bytes(), &mut all)?;
    let bytes = all.as_chunks().0.iter().map(|bytes| u64::from_le_bytes(*bytes)).sum();
    if world.rank() > 0 {
        return Ok(());
    }
    let existing = if *start == Start::Resume { Checkpoint::list(folder.checkpoints())?.len() } else { 0 };
    let count = most_checkpoints(config).saturating_sub(existing);
    match free_bytes(folder.path()) {
        Some(free) => expect_room(count, bytes, free, config.checkpoints, folder.path()),
        None => Ok(()),
    }
}

/// Returns the maximum number of checkpoints that are in the run's folder at the same time. An old checkpoint is removed
/// after a new one was saved. The number of steps of an epoch is only known after the data, so 1 is returned for epochs.
fn most_checkpoints(config: &RunConfig) -> usize {
    let kept = config.checkpoints;
    let saved = match kept.every {
        _ if config.epochs.is_some() => 1,
        _ if kept.minutes.is_some() => usize::MAX,
        0 => 1,
        every => usize::try_from(config.steps.div_ceil(every)).unwrap_or(usize::MAX),
    };
    saved.min(kept.keep_last.saturating_add(kept.keep_best).saturating_add(1))
}

/// Checks that `count` checkpoints of `bytes` bytes fit into `free` bytes.
fn expect_room(count: usize, bytes: u64, free: u64, kept: CheckpointConfig, folder: &Path) -> Result<(), RunError> {
    let needed = bytes.saturating_mul(count as u64);
    if needed <= free {
        return Ok(());
    }
    let why = format!(
        "{count} checkpoint{} of {} take{} {}, but the disk of {} has {} left",
        if count == 1 { "" } else { "s" },
        Bytes(bytes),
        if count == 1 { "s" } else { "" },
        Bytes(needed),
        folder.display(),
        Bytes(free)
    );
    let remedy = match count > 1 && kept.keep_last.saturating_add(kept.keep_best) > 1 {
        true => "free some space, lower checkpoints.keep_last or checkpoints.keep_best, or choose another folder",
        false => "free some space, or choose another folder",
    };
    Err(ConfigError::value("checkpoints", why, remedy).into())
}

/// Returns the bytes that this user may still write at a path, or `None` if the system does not report this. The path may
/// be that of a folder that does not exist yet.
#[cfg(unix)]
fn free_bytes(path: &Path) -> Option<u64> {
    let path = std::path::absolute(path).ok()?;
    let there = path.ancestors().find(|path| path.exists())?;
    let disk = rustix::fs::statvfs(there).ok()?;
    Some(disk.f_bavail.saturating_mul(disk.f_frsize))
}

#[cfg(not(unix))]
fn free_bytes(_: &Path) -> Option<u64> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checkpoints_need_room() {
        let config = |assignments: &[&str]| {
            let assignments: Vec<String> =
                ["model=small", "steps=1000"].iter().chain(assignments).map(|text| (*text).to_owned()).collect();
            RunConfig::read_without_data(None, &assignments).unwrap()
        };
        let most = |assignments: &[&str]| most_checkpoints(&config(assignments));
        assert_eq!(most(&[]), 3);
        assert_eq!(most(&["checkpoints.every=0"]), 1);
        assert_eq!(most(&["checkpoints.every=600"]), 2);
        assert_eq!(most(&["checkpoints.keep_last=4", "checkpoints.keep_best=2"]), 7);
        assert_eq!(most(&["checkpoints.every=0", "checkpoints.minutes=5"]), 3);
        assert_eq!(most(&["epochs=2", "checkpoints.keep_last=4", "checkpoints.minutes=5"]), 1);
        let folder = Path::new("runs/a");
        let kept = |keep_last| CheckpointConfig { keep_last, ..CheckpointConfig::default() };
        assert!(expect_room(3, 10, 30, kept(2), folder).is_ok());
        let error = expect_room(3, 5 << 30, 14 << 30, kept(2), folder).unwrap_err().to_string();
        let parts = ["checkpoints: 3 checkpoints of 5", "take 15", "runs/a has 14", "checkpoints.keep_last"];
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
        for (count, keep_last) in [(2, 1), (1, 2)] {
            let error = expect_room(count, 5 << 30, 4 << 30, kept(keep_last), folder).unwrap_err().to_string();
            assert!(!error.contains("keep_last") && error.contains("another folder"), "{error}");
        }
    }

    #[cfg(unix)]
    #[test]
    fn free_space_is_that_of_the_disk() {
        let folder = tempfile::tempdir().unwrap();
        assert!(free_bytes(&folder.path().join("not/yet/there")).is_some_and(|free| free > 0));
    }
}

//! One run per folder: an advisory lock that the operating system releases when its owner ends, however it ends.

use std::fs::{self, File, TryLockError};
use std::io::{self, Read, Seek, Write};
use std::path::Path;

use crate::CheckpointError;

/// Most bytes that are read of who has the lock.
const OWNER_BYTES: u64 = 200;
/// The beginning of every owner that is written into the file. A file of this name that begins otherwise is somebody else's.
const OWNER: &str = "process ";

/// A folder that no other process locks as long as this lives. The file `lock` in it says who has it, and stays.
///
/// ```
/// use gapless_checkpoint::FolderLock;
///
/// # let folder = tempfile::tempdir()?;
/// let lock = FolderLock::acquire(folder.path())?;
/// let error = FolderLock::acquire(folder.path()).unwrap_err().to_string();
/// assert!(error.contains(&format!("in use by process {}", std::process::id())), "{error}");
/// drop(lock);
/// FolderLock::acquire(folder.path())?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct FolderLock {
    file: File,
}

/// Released in so many words, not by closing the file: a process that is being started in another thread has a copy of it until its
/// own program begins.
impl Drop for FolderLock {
    fn drop(&mut self) {
        // Of a file system without locks.
        let _ = self.file.unlock();
    }
}

impl FolderLock {
    /// The name of the file that is locked.
    pub const FILE: &str = "lock";

    /// Whether a folder has been locked before, be it by a process that has ended since.
    pub fn was_acquired(dir: &Path) -> bool {
        let path = dir.join(Self::FILE);
        path.is_file() && File::open(path).is_ok_and(|file| is_ours(&file))
    }

    /// Whether files can be made in a folder: one without a name is, and is gone again.
    ///
    /// # Errors
    /// [`CheckpointError::Unwritable`].
    pub fn can_write(dir: &Path) -> Result<(), CheckpointError> {
        let unwritable = |source| CheckpointError::Unwritable { path: dir.to_owned(), source };
        tempfile::tempfile_in(dir).map(drop).map_err(unwritable)
    }

    /// Locks a folder that is there. On a file system without locks it warns, and goes on without.
    ///
    /// # Errors
    /// [`CheckpointError::Locked`], which names the owner; [`CheckpointError::Foreign`] where `lock` is a file of somebody else's; a
    /// folder that cannot be written into.
    pub fn acquire(dir: &Path) -> Result<Self, CheckpointError> {
        let path = dir.join(Self::FILE);
        let write_error = |source| CheckpointError::Write { path: path.clone(), source };
        let options = File::options().read(true).write(true).create(true).truncate(false).clone();
        let mut file = options.open(&path).map_err(|source| match source.kind() {
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
                CheckpointError::Unwritable { path: dir.to_owned(), source }
            }
            _ => write_error(source),
        })?;
        if !is_ours(&file) {
            return Err(CheckpointError::Foreign { path: dir.to_owned(), name: Self::FILE });
        }
        match file.try_lock() {
            Ok(()) => {
                // Only a message would lack the owner.
                let _ = file.set_len(0).and_then(|()| writeln!(file, "{}", this_process()));
            }
            Err(TryLockError::WouldBlock) => {
                return Err(CheckpointError::Locked { path: dir.to_owned(), owner: owner(&file) });
            }
            Err(TryLockError::Error(error)) if error.kind() == io::ErrorKind::Unsupported => {
                tracing::warn!(path = %path.display(), "this file system has no locks: let no other run use this folder");
            }
            Err(TryLockError::Error(error)) => return Err(write_error(error)),
        }
        Ok(Self { file })
    }

    /// Whether the folder is still the one that was locked: false where it was deleted or moved, or another is in its place.
    pub fn holds(&self, dir: &Path) -> bool {
        match (fs::metadata(dir.join(Self::FILE)), self.file.metadata()) {
            (Ok(there), Ok(locked)) => is_same_file(&there, &locked),
            (Err(error), _) => !matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory),
            (_, Err(_)) => true,
        }
    }
}

#[cfg(unix)]
fn is_same_file(a: &fs::Metadata, b: &fs::Metadata) -> bool {
    use std::os::unix::fs::MetadataExt;
    (a.dev(), a.ino()) == (b.dev(), b.ino())
}

/// The system does not say.
#[cfg(not(unix))]
fn is_same_file(_: &fs::Metadata, _: &fs::Metadata) -> bool {
    true
}

fn this_process() -> String {
    let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let on = if host.trim().is_empty() { String::new() } else { format!(" on {}", host.trim()) };
    format!("{OWNER}{}{on}", std::process::id())
}

/// The first line of the file; empty where its owner has not written it yet.
fn first_line(mut file: &File) -> String {
    let mut bytes = Vec::new();
    let _ = file.rewind().and_then(|()| file.take(OWNER_BYTES).read_to_end(&mut bytes));
    let _ = file.rewind();
    String::from_utf8_lossy(&bytes).lines().next().unwrap_or_default().to_owned()
}

fn is_ours(file: &File) -> bool {
    let line = first_line(file);
    line.is_empty() || line.starts_with(OWNER)
}

fn owner(file: &File) -> String {
    Some(first_line(file)).filter(|line| !line.is_empty()).unwrap_or_else(|| "another process".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_of_somebody_else_is_not_locked_or_changed() {
        let folder = tempfile::tempdir().unwrap();
        assert!(!FolderLock::was_acquired(folder.path()));
        fs::write(folder.path().join(FolderLock::FILE), "a key\n").unwrap();
        assert!(matches!(
            FolderLock::acquire(folder.path()),
            Err(CheckpointError::Foreign { name: FolderLock::FILE, .. })
        ));
        assert_eq!(fs::read_to_string(folder.path().join(FolderLock::FILE)).unwrap(), "a key\n");
        fs::remove_file(folder.path().join(FolderLock::FILE)).unwrap();
        drop(FolderLock::acquire(folder.path()).unwrap());
        assert!(FolderLock::was_acquired(folder.path()));
    }

    /// As a child has it between its fork and its program's start.
    #[test]
    fn a_copy_of_the_file_does_not_hold_the_lock() {
        let folder = tempfile::tempdir().unwrap();
        let lock = FolderLock::acquire(folder.path()).unwrap();
        let _copy = lock.file.try_clone().unwrap();
        assert!(matches!(FolderLock::acquire(folder.path()), Err(CheckpointError::Locked { .. })));
        drop(lock);
        FolderLock::acquire(folder.path()).unwrap();
    }
}

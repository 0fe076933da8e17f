//! A lock that lets only one run use a folder. The lock is advisory: it only keeps out processes that ask for it. The
//! operating system releases it when its owner ends, even after a crash.

use std::fs::{self, File, TryLockError};
use std::io::{self, Read, Seek, Write};
use std::path::Path;

use crate::CheckpointError;

/// The most bytes of the owner's description that are read.
const OWNER_BYTES: u64 = 200;
/// The beginning of every owner's description. A file named `lock` that begins with other text belongs to another
/// program.
const OWNER: &str = "process ";

/// A lock on a folder. While it lives, no other process can lock the folder. The file `lock` in it describes the owner,
/// and is not removed.
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

/// Unlocks explicitly instead of by closing the file. If another thread is starting a process, that process has a copy
/// of the open file until its own program begins, and the copy would hold the lock.
impl Drop for FolderLock {
    fn drop(&mut self) {
        // This returns an error on a file system without locks.
        let _ = self.file.unlock();
    }
}

impl FolderLock {
    /// The name of the file that is locked.
    pub const FILE: &str = "lock";

    /// True if a folder has ever been locked, even by a process that has ended.
    pub fn was_acquired(dir: &Path) -> bool {
        let path = dir.join(Self::FILE);
        path.is_file() && File::open(path).is_ok_and(|file| is_lock_file(&file))
    }

    /// Checks that files can be created in a folder, by creating an unnamed temporary file.
    ///
    /// # Errors
    /// Returns [`CheckpointError::Unwritable`] if the file cannot be created.
    pub fn can_write(dir: &Path) -> Result<(), CheckpointError> {
        let unwritable = |source| CheckpointError::Unwritable { path: dir.to_owned(), source };
        tempfile::tempfile_in(dir).map(drop).map_err(unwritable)
    }

    /// Locks an existing folder. On a file system without locks, this only logs a warning.
    ///
    /// # Errors
    /// Returns [`CheckpointError::Locked`] with the owner if the folder is locked, [`CheckpointError::Foreign`] if the
    /// file `lock` belongs to another program, and an error if the folder is not writable.
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
        if !is_lock_file(&file) {
            return Err(CheckpointError::Foreign { path: dir.to_owned(), name: Self::FILE });
        }
        match file.try_lock() {
            Ok(()) => {
                // An error is ignored: without the description, the lock still works, and only the error messages of
                // other processes lack the owner.
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

    /// True if `dir` is still the folder that was locked. It is false if that folder was deleted or moved, even if
    /// another folder has taken its place.
    pub fn is_current(&self, dir: &Path) -> bool {
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

/// Always returns true, because the standard library does not identify files on this system.
#[cfg(not(unix))]
fn is_same_file(_: &fs::Metadata, _: &fs::Metadata) -> bool {
    true
}

fn this_process() -> String {
    let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let on = if host.trim().is_empty() { String::new() } else { format!(" on {}", host.trim()) };
    format!("{OWNER}{}{on}", std::process::id())
}

/// Returns the first line of the file. The line is empty if the owner has not written it yet.
fn first_line(mut file: &File) -> String {
    let mut bytes = Vec::new();
    let _ = file.rewind().and_then(|()| file.take(OWNER_BYTES).read_to_end(&mut bytes));
    let _ = file.rewind();
    String::from_utf8_lossy(&bytes).lines().next().unwrap_or_default().to_owned()
}

fn is_lock_file(file: &File) -> bool {
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

    /// The copied file handle simulates the handle that a child process has between its fork and the start of its
    /// program.
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

//! One run per folder: an advisory lock that the operating system releases when its owner ends, however it ends.

use std::fs::{self, File, TryLockError};
use std::io::{self, Read, Write};
use std::path::Path;

use crate::CheckpointError;

const LOCK: &str = "lock";
/// Most bytes that are read of who has the lock.
const OWNER_BYTES: u64 = 200;

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
    /// Locks a folder that is there. On a file system without locks it warns, and goes on without.
    ///
    /// # Errors
    /// [`CheckpointError::Locked`], which names the owner; a folder that cannot be written into.
    pub fn acquire(dir: &Path) -> Result<Self, CheckpointError> {
        let path = dir.join(LOCK);
        let write_error = |source| CheckpointError::Write { path: path.clone(), source };
        let options = File::options().read(true).write(true).create(true).truncate(false).clone();
        let mut file = options.open(&path).map_err(|source| match source.kind() {
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
                CheckpointError::Unwritable { path: dir.to_owned(), source }
            }
            _ => write_error(source),
        })?;
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
}

fn this_process() -> String {
    let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let on = if host.trim().is_empty() { String::new() } else { format!(" on {}", host.trim()) };
    format!("process {}{on}", std::process::id())
}

fn owner(file: &File) -> String {
    let mut bytes = Vec::new();
    // Its owner may not have written it yet.
    let _ = file.take(OWNER_BYTES).read_to_end(&mut bytes);
    match String::from_utf8_lossy(&bytes).lines().next() {
        Some(line) if !line.is_empty() => line.to_owned(),
        _ => "another process".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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

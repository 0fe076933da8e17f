//! The file of a sweep's rows: one line per row, each written as a whole.
//!
//! In: rows, as they are computed. Out: the lines of earlier runs, by key. Two kinds of lines are dropped. One is an
//! incomplete last line, which a killed process may have written. The other is a row that does not match the hash at
//! the start of its line, because it was edited. While rows are being computed, the file is only appended to.

use std::collections::HashMap;
use std::fs::{self, File, TryLockError};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use super::Row;

/// Errors of reading or writing the rows of a sweep.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// A file or folder cannot be used.
    #[error("cannot use {}: {source}", path.display())]
    File {
        /// Path of the file or folder.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// Another process writes to the same file.
    #[error("{} is used by another sweep; wait for it, or use another folder", path.display())]
    InUse {
        /// Path of the file.
        path: PathBuf,
    },
    /// The system refuses to start a thread.
    #[error("cannot start a thread: {0}; raise the limit of processes (ulimit -u) or of memory (ulimit -v)")]
    Threads(io::Error),
    /// A line of the file is not a row.
    #[error("{}, line {line}: {why}; remove it, or use another folder", path.display())]
    Line {
        /// Path of the file.
        path: PathBuf,
        /// Line number, counted from 1.
        line: usize,
        /// The fault in the line.
        why: String,
    },
}

/// The `results.jsonl` of a folder, locked for this process.
pub(super) struct Store {
    path: PathBuf,
    file: File,
}

/// Unlocks the file explicitly, because closing it may not be enough: a child process that another thread starts holds
/// a copy of the file descriptor for a moment (see [`FolderLock`](gapless_engine::checkpoint::FolderLock)).
impl Drop for Store {
    fn drop(&mut self) {
        let _ = self.file.unlock();
    }
}

fn failed(path: &Path) -> impl Fn(io::Error) -> StoreError + '_ {
    move |source| StoreError::File { path: path.to_owned(), source }
}

/// The rows of earlier runs.
pub(super) struct StoredRows {
    pub by_key: HashMap<String, String>,
    /// Number of rows that were edited since they were written.
    pub changed: usize,
}

/// Returns a row's line: its JSON object, with the hash of that JSON as the first field.
fn with_hash(row: &str) -> String {
    format!("{{\"hash\":\"{}\",{}", &blake3::hash(row.as_bytes()).to_hex()[..16], &row[1..])
}

/// True if the line's hash matches its row.
fn has_valid_hash(line: &str) -> bool {
    line.split_once(',').is_some_and(|(_, rest)| with_hash(&format!("{{{rest}")) == line)
}

impl Store {
    /// Opens the folder's file, or creates it, and reads the lines that it has.
    pub fn open(folder: &Path) -> Result<(Self, StoredRows), StoreError> {
        fs::create_dir_all(folder).map_err(failed(folder))?;
        let path = folder.join("results.jsonl");
        let cannot = failed(&path);
        let mut file =
            File::options().create(true).truncate(false).read(true).write(true).open(&path).map_err(&cannot)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(StoreError::InUse { path: path.clone() }),
            Err(TryLockError::Error(error)) => return Err(cannot(error)),
        }
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(&cannot)?;
        // Everything after the last end of line is an incomplete row.
        bytes.truncate(bytes.iter().rposition(|&byte| byte == b'\n').map_or(0, |end| end + 1));
        file.set_len(bytes.len() as u64).map_err(&cannot)?;
        file.seek(SeekFrom::End(0)).map_err(&cannot)?;
        let mut known = StoredRows { by_key: HashMap::new(), changed: 0 };
        for (index, line) in bytes.split(|&byte| byte == b'\n').enumerate().filter(|(_, line)| !line.is_empty()) {
            let fail = |why: String| StoreError::Line { path: path.clone(), line: index + 1, why };
            let line = std::str::from_utf8(line).map_err(|error| fail(error.to_string()))?;
            let row: Row = serde_json::from_str(line).map_err(|error| fail(error.to_string()))?;
            match has_valid_hash(line) {
                true => drop(known.by_key.insert(row.key, line.to_owned())),
                false => known.changed += 1,
            }
        }
        let path = path.clone();
        Ok((Self { path, file }, known))
    }

    /// Appends a row and returns its line.
    pub fn append(&mut self, row: &Row) -> Result<String, StoreError> {
        let line = with_hash(&serde_json::to_string(row).expect("a row is plain data"));
        self.file.write_all(format!("{line}\n").as_bytes()).map_err(failed(&self.path))?;
        Ok(line)
    }

    /// Parses a line. The values of the returned row are exactly those that any reader of the file gets.
    pub fn parse(&self, line: &str) -> Result<Row, StoreError> {
        serde_json::from_str(line).map_err(|error| StoreError::Line {
            path: self.path.clone(),
            line: 0,
            why: error.to_string(),
        })
    }

    /// Rewrites the file. It then has the given lines in their order, followed by the lines of other sweeps, sorted by
    /// key.
    pub fn finish(&self, lines: &[String], others: HashMap<String, String>) -> Result<(), StoreError> {
        let mut others: Vec<(String, String)> = others.into_iter().collect();
        others.sort();
        let lines = lines.iter().chain(others.iter().map(|(_, line)| line));
        replace(&self.path, lines.map(|line| line.clone() + "\n").collect::<String>().as_bytes())
    }
}

/// Writes a temporary file next to `path` and renames it, so that `path` is always complete.
pub(super) fn replace(path: &Path, bytes: &[u8]) -> Result<(), StoreError> {
    let beside = path.with_extension("tmp");
    fs::write(&beside, bytes).and_then(|()| fs::rename(&beside, path)).map_err(failed(path))
}

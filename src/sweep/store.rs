//! The rows of a sweep in a file, one a line, each there whole or not at all.
//!
//! In: rows, as they come. Out: the lines of earlier runs, by key. A last line without an end, of a process that was killed, is
//! dropped, and so is a row that is not as it was written: each line begins with a hash of its row. Never: a line that is rewritten
//! while rows still come.

use std::collections::HashMap;
use std::fs::{self, File, TryLockError};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use super::Row;

/// Why rows cannot be kept.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// A file or folder.
    #[error("cannot use {}: {source}", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// Another process writes rows there.
    #[error("{} is used by another sweep; wait for it, or use another folder", path.display())]
    InUse {
        /// Which.
        path: PathBuf,
    },
    /// The system starts no thread.
    #[error("cannot start a thread: {0}; raise the limit of processes (ulimit -u) or of memory (ulimit -v)")]
    Threads(io::Error),
    /// A line that is no row.
    #[error("{}, line {line}: {why}; remove it, or use another folder", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// Counted from 1.
        line: usize,
        /// What is wrong.
        why: String,
    },
}

/// `results.jsonl` of a folder.
pub(super) struct Store {
    path: PathBuf,
    file: File,
}

/// As [`FolderLock`](gapless_engine::checkpoint::FolderLock)'s: a process that another thread starts has a copy of the file for a moment.
impl Drop for Store {
    fn drop(&mut self) {
        let _ = self.file.unlock();
    }
}

fn failed(path: &Path) -> impl Fn(io::Error) -> StoreError + '_ {
    move |source| StoreError::File { path: path.to_owned(), source }
}

/// The lines of earlier runs.
pub(super) struct Known {
    pub by_key: HashMap<String, String>,
    /// Rows that are not as they were written.
    pub changed: usize,
}

/// A row's line, with a hash before what is hashed.
fn sealed(row: &str) -> String {
    format!("{{\"hash\":\"{}\",{}", &blake3::hash(row.as_bytes()).to_hex()[..16], &row[1..])
}

/// Whether a line is as it was written.
fn is_sealed(line: &str) -> bool {
    line.split_once(',').is_some_and(|(_, rest)| sealed(&format!("{{{rest}")) == line)
}

impl Store {
    /// Opens or makes it; answers the lines that are there.
    pub fn open(folder: &Path) -> Result<(Self, Known), StoreError> {
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
        // Up to the last end of a line.
        bytes.truncate(bytes.iter().rposition(|&byte| byte == b'\n').map_or(0, |end| end + 1));
        file.set_len(bytes.len() as u64).map_err(&cannot)?;
        file.seek(SeekFrom::End(0)).map_err(&cannot)?;
        let mut known = Known { by_key: HashMap::new(), changed: 0 };
        for (index, line) in bytes.split(|&byte| byte == b'\n').enumerate().filter(|(_, line)| !line.is_empty()) {
            let fail = |why: String| StoreError::Line { path: path.clone(), line: index + 1, why };
            let line = std::str::from_utf8(line).map_err(|error| fail(error.to_string()))?;
            let row: Row = serde_json::from_str(line).map_err(|error| fail(error.to_string()))?;
            match is_sealed(line) {
                true => drop(known.by_key.insert(row.key, line.to_owned())),
                false => known.changed += 1,
            }
        }
        let path = path.clone();
        Ok((Self { path, file }, known))
    }

    /// Writes a row, and answers its line.
    pub fn append(&mut self, row: &Row) -> Result<String, StoreError> {
        let line = sealed(&serde_json::to_string(row).expect("a row is plain data"));
        self.file.write_all(format!("{line}\n").as_bytes()).map_err(failed(&self.path))?;
        Ok(line)
    }

    /// A line as a row: numbers are those that whoever reads the file finds.
    pub fn parse(&self, line: &str) -> Result<Row, StoreError> {
        serde_json::from_str(line).map_err(|error| StoreError::Line {
            path: self.path.clone(),
            line: 0,
            why: error.to_string(),
        })
    }

    /// Puts the lines in order; behind them, those of other sweeps, by key.
    pub fn finish(&self, lines: &[String], others: HashMap<String, String>) -> Result<(), StoreError> {
        let mut others: Vec<(String, String)> = others.into_iter().collect();
        others.sort();
        let lines = lines.iter().chain(others.iter().map(|(_, line)| line));
        replace(&self.path, lines.map(|line| line.clone() + "\n").collect::<String>().as_bytes())
    }
}

/// Writes a file beside the one that has its name, and renames it.
pub(super) fn replace(path: &Path, bytes: &[u8]) -> Result<(), StoreError> {
    let beside = path.with_extension("tmp");
    fs::write(&beside, bytes).and_then(|()| fs::rename(&beside, path)).map_err(failed(path))
}

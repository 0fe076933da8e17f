//! A writer of JSON lines for the metrics of a run, and the memory use of the process.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::Serialize;

pub use gapless_runtime::process_memory::{available_memory_bytes, current_rss_bytes, peak_rss_bytes};

/// Writes rows as JSON, one per line.
///
/// A row is built in a reused buffer, so writing rows of similar size does not allocate. The row is then written in one
/// piece, so a reader never sees half of it. If a write fails, for example because the disk is full, the caller gets an
/// error and may write further rows. The next row then starts on a new line.
///
/// ```
/// use gapless_engine::metrics::JsonLines;
///
/// #[derive(serde::Serialize)]
/// struct Row {
///     step: u64,
///     loss: f32,
/// }
///
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("metrics.jsonl");
/// let mut metrics = JsonLines::create(&path)?;
/// metrics.write(&Row { step: 1, loss: 8.25 })?;
/// metrics.write(&Row { step: 2, loss: f32::NAN })?; // JSON has no NaN
/// assert_eq!(std::fs::read_to_string(&path)?, "{\"step\":1,\"loss\":8.25}\n{\"step\":2,\"loss\":null}\n");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct JsonLines<W: Write = File> {
    out: W,
    path: PathBuf,
    row: Vec<u8>,
    /// Whether the file may end in the middle of a line, for example after a failed write.
    torn: bool,
}

/// A row that could not be written.
#[derive(Debug, thiserror::Error)]
#[error("cannot write metrics to {path}: {source}; check that the disk has room")]
pub struct MetricsError {
    /// Path of the file.
    pub path: PathBuf,
    /// The underlying error.
    pub source: io::Error,
}

impl JsonLines {
    /// Creates a file, or replaces an existing one.
    ///
    /// # Errors
    /// Returns an error if the file cannot be created.
    pub fn create(path: &Path) -> Result<Self, MetricsError> {
        Self::opened(path, File::create(path), false)
    }

    /// Opens the file of a resumed run, to append rows. Creates the file if it does not exist.
    ///
    /// # Errors
    /// Returns an error if the file cannot be opened.
    pub fn append(path: &Path) -> Result<Self, MetricsError> {
        let file = File::options().append(true).create(true).open(path);
        // The previous run may have been killed in the middle of a line. If so, the next row must start on a new
        // line. An empty line between rows is harmless.
        let torn = file.as_ref().is_ok_and(|file| file.metadata().is_ok_and(|metadata| metadata.len() > 0))
            && !ends_with_newline(path);
        Self::opened(path, file, torn)
    }

    fn opened(path: &Path, file: io::Result<File>, torn: bool) -> Result<Self, MetricsError> {
        let out = file.map_err(|source| MetricsError { path: path.to_owned(), source })?;
        Ok(Self { torn, ..Self::new(out, path) })
    }
}

impl<W: Write> JsonLines<W> {
    /// Creates a writer that writes rows to `out`. Error messages contain `name`.
    pub fn new(out: W, name: impl Into<PathBuf>) -> Self {
        Self { out, path: name.into(), row: Vec::with_capacity(1024), torn: false }
    }

    /// Writes one row.
    ///
    /// # Errors
    /// Returns an error if the row cannot be represented as JSON (a map whose keys are not strings), or if the write
    /// fails.
    pub fn write(&mut self, row: &impl Serialize) -> Result<(), MetricsError> {
        self.row.clear();
        if self.torn {
            self.row.push(b'\n');
        }
        let result = serde_json::to_writer(&mut self.row, row).map_err(io::Error::from).and_then(|()| {
            self.row.push(b'\n');
            self.torn = true;
            self.out.write_all(&self.row)?;
            self.torn = false;
            self.out.flush()
        });
        result.map_err(|source| MetricsError { path: self.path.clone(), source })
    }
}

fn ends_with_newline(path: &Path) -> bool {
    use std::io::{Read, Seek, SeekFrom};
    let last = || {
        let mut file = File::open(path)?;
        file.seek(SeekFrom::End(-1))?;
        let mut byte = [0];
        file.read_exact(&mut byte)?;
        io::Result::Ok(byte)
    };
    last().is_ok_and(|byte| byte == *b"\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// A writer that accepts `room` bytes, then fails once, and accepts everything after that.
    struct Full {
        written: Vec<u8>,
        room: usize,
    }

    impl Write for Full {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            if self.room == 0 {
                self.room = usize::MAX;
                return Err(io::ErrorKind::StorageFull.into());
            }
            let count = bytes.len().min(self.room);
            self.written.extend(&bytes[..count]);
            self.room -= count;
            Ok(count)
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_torn_row_does_not_tear_the_next() {
        for room in 0..20 {
            let mut metrics = JsonLines::new(Full { written: Vec::new(), room }, "metrics");
            let results = [1, 2, 3].map(|step| metrics.write(&json!({ "step": step })).is_ok());
            let text = String::from_utf8(metrics.out.written).unwrap();
            let whole: Vec<u64> = text
                .lines()
                .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok()?.get("step")?.as_u64())
                .collect();
            for (step, written) in (1..).zip(results) {
                assert!(!written || whole.contains(&step), "room {room}, step {step}: {text}");
            }
            assert_eq!(results.iter().filter(|written| !**written).count(), 1, "room {room}");
        }
    }

    #[test]
    fn appending_goes_on_after_a_torn_line() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let check = |before: &str, after: &str| {
            std::fs::write(file.path(), before).unwrap();
            JsonLines::append(file.path()).unwrap().write(&json!({ "step": 2 })).unwrap();
            assert_eq!(std::fs::read_to_string(file.path()).unwrap(), after);
        };
        check("", "{\"step\":2}\n");
        check("{\"step\":1}\n", "{\"step\":1}\n{\"step\":2}\n");
        check("{\"ste", "{\"ste\n{\"step\":2}\n");
    }

    #[test]
    fn a_row_that_is_no_json_is_an_error() {
        let mut metrics = JsonLines::new(Vec::new(), "metrics");
        let keys_are_lists = std::collections::BTreeMap::from([(vec![1], 2)]);
        assert!(metrics.write(&keys_are_lists).is_err());
        metrics.write(&json!({ "step": 1 })).unwrap();
        assert_eq!(metrics.out, b"{\"step\":1}\n");
        assert!(JsonLines::create(Path::new("nowhere/at/all.jsonl")).is_err());
    }
}

//! Recordings, instances and tables that tests compare with.

use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::{Path, PathBuf};

use flate2::read::GzDecoder;

use crate::skipped::is_slow_asked;

/// A folder of `tests/evidence`; with `GAPLESS_SLOW_TESTS`, the same folder of the larger collection beside the project, where
/// there is one.
///
/// # Panics
/// When the repository lacks it.
pub fn evidence(name: &str) -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let larger = Some(here.join("../../../shared").join(name)).filter(|folder| is_slow_asked() && folder.exists());
    let found = larger.unwrap_or_else(|| here.join("../evidence").join(name));
    assert!(found.exists(), "there is no tests/evidence/{name}");
    found
}

/// Opens a file of it, and decompresses it if its name ends in `.gz`.
///
/// # Errors
/// When it cannot be opened.
pub fn open(path: &Path) -> io::Result<BufReader<Box<dyn Read>>> {
    let file = File::open(path)?;
    let is_compressed = path.extension().is_some_and(|extension| extension == "gz");
    Ok(BufReader::new(if is_compressed { Box::new(GzDecoder::new(file)) } else { Box::new(file) }))
}

/// The name of a table without folder and endings, if it is one (`.csv` or `.csv.gz`).
pub fn table_name(path: &Path) -> Option<&str> {
    let name = path.file_name()?.to_str()?;
    name.strip_suffix(".gz").unwrap_or(name).strip_suffix(".csv")
}

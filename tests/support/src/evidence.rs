//! Recordings, instances and tables with which tests compare results.

use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::{Path, PathBuf};

use flate2::read::GzDecoder;

use crate::skipped::is_slow_asked;

/// Returns a folder of `tests/evidence`. With `GAPLESS_SLOW_TESTS`, returns the same folder of the larger collection
/// next to the repository, if that exists.
///
/// # Panics
/// Panics if the repository has no such folder.
pub fn evidence(name: &str) -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let larger = Some(here.join("../../../shared").join(name)).filter(|folder| is_slow_asked() && folder.exists());
    let found = larger.unwrap_or_else(|| here.join("../evidence").join(name));
    assert!(found.exists(), "there is no tests/evidence/{name}");
    found
}

/// Opens a file of the evidence. If the file's name ends in `.gz`, the returned reader decompresses it.
///
/// # Errors
/// Returns an error if the file cannot be opened.
pub fn open(path: &Path) -> io::Result<BufReader<Box<dyn Read>>> {
    let file = File::open(path)?;
    let is_compressed = path.extension().is_some_and(|extension| extension == "gz");
    Ok(BufReader::new(if is_compressed { Box::new(GzDecoder::new(file)) } else { Box::new(file) }))
}

/// Returns the name of a table without its folder and extension, or `None` if the file is not a table (`.csv` or
/// `.csv.gz`).
pub fn table_name(path: &Path) -> Option<&str> {
    let name = path.file_name()?.to_str()?;
    name.strip_suffix(".gz").unwrap_or(name).strip_suffix(".csv")
}

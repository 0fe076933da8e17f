//! Files that commands read.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

use anyhow::Context;
use flate2::bufread::MultiGzDecoder;

/// Opens a file for reading. A gzipped file is decompressed.
pub fn open(path: &Path) -> anyhow::Result<Box<dyn BufRead>> {
    let cannot = || format!("cannot open {}", path.display());
    let mut file = BufReader::new(File::open(path).with_context(cannot)?);
    let is_gzip = file.fill_buf().with_context(cannot)?.starts_with(&[0x1f, 0x8b]);
    Ok(if is_gzip { Box::new(BufReader::new(MultiGzDecoder::new(file))) } else { Box::new(file) })
}

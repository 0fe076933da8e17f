//! The file that activations are offloaded to between forward and backward.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::Path;

use crate::error::{Error, Result};

/// An unnamed temporary file. The operating system deletes it when the process ends, even if the process is killed.
#[derive(Debug)]
pub(crate) struct OffloadFile(File);

impl OffloadFile {
    /// Creates a file of `bytes` bytes.
    ///
    /// # Errors
    /// Returns an error if the file cannot be created in `folder`.
    pub fn new(folder: &Path, bytes: u64) -> Result<Self> {
        let what = || format!("cannot create a file of {bytes} bytes in {}", folder.display());
        Self::of_bytes(folder, bytes).map_err(|source| Error::Offload { what: what(), source })
    }

    /// Creates a file like [`Self::new`].
    pub fn of_bytes(folder: &Path, bytes: u64) -> io::Result<Self> {
        tempfile::tempfile_in(folder).and_then(|file| file.set_len(bytes).map(|()| Self(file)))
    }

    /// Writes bytes at an offset of the file.
    pub fn write(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.0.seek(SeekFrom::Start(offset))?;
        self.0.write_all(bytes)
    }

    /// Reads bytes at an offset of the file.
    pub fn read(&mut self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.0.seek(SeekFrom::Start(offset))?;
        self.0.read_exact(bytes)
    }
}

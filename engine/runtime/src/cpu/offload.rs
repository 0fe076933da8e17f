//! Copies of activations to the file that they wait in for their backward, and back.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::Path;

use crate::error::{Error, Result};

/// A file without a name: it is gone with the process, whatever ends it.
#[derive(Debug)]
pub(super) struct HostFile(File);

impl HostFile {
    /// One of so many bytes.
    ///
    /// # Errors
    /// When it cannot be made there.
    pub fn new(folder: &Path, bytes: u64) -> Result<Self> {
        let file = tempfile::tempfile_in(folder).and_then(|file| file.set_len(bytes).map(|()| file));
        let what = || format!("cannot create a file of {bytes} bytes in {}", folder.display());
        file.map(Self).map_err(|source| Error::Offload { what: what(), source })
    }

    /// Copies bytes out.
    pub fn write(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.0.seek(SeekFrom::Start(offset))?;
        self.0.write_all(bytes)
    }

    /// Copies bytes back.
    pub fn read(&mut self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.0.seek(SeekFrom::Start(offset))?;
        self.0.read_exact(bytes)
    }
}

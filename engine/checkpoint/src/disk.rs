//! The file system operations that saving uses, as a trait, so that tests can replace them by operations that fail.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

/// The operations that change a disk. In tests, each operation may fail, and a power failure may follow each operation.
pub(super) trait Disk {
    fn create_folder(&mut self, path: &Path) -> io::Result<()>;
    fn create(&mut self, path: &Path) -> io::Result<File>;
    fn write(&mut self, file: &mut File, bytes: &[u8]) -> io::Result<()>;
    fn sync(&mut self, file: &File) -> io::Result<()>;
    fn sync_folder(&mut self, path: &Path) -> io::Result<()>;
    fn rename(&mut self, from: &Path, to: &Path) -> io::Result<()>;
    fn remove_folder(&mut self, path: &Path) -> io::Result<()>;
}

/// The file system of the operating system.
pub(super) struct RealDisk;

impl Disk for RealDisk {
    fn create_folder(&mut self, path: &Path) -> io::Result<()> {
        fs::create_dir_all(path)
    }

    fn create(&mut self, path: &Path) -> io::Result<File> {
        File::create(path)
    }

    fn write(&mut self, file: &mut File, bytes: &[u8]) -> io::Result<()> {
        file.write_all(bytes)
    }

    fn sync(&mut self, file: &File) -> io::Result<()> {
        file.sync_all()
    }

    /// Makes the names in a folder durable. On Windows this does nothing, since Windows has no such operation and needs
    /// none.
    fn sync_folder(&mut self, path: &Path) -> io::Result<()> {
        if cfg!(unix) { File::open(path)?.sync_all() } else { Ok(()) }
    }

    fn rename(&mut self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn remove_folder(&mut self, path: &Path) -> io::Result<()> {
        fs::remove_dir_all(path)
    }
}

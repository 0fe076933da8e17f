//! Machine code on disk, so that a kernel is compiled once on a machine.
//!
//! In: a family, an architecture, a compiler. Out: its machine code. An entry's name is the hash of all that went into it, and its
//! first bytes are the hash of the rest: whatever else is found under the name is made again. Never: an entry that is
//! half-written, whoever else uses the folder meanwhile.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use gapless_kernels::cuda::{Family, HEADERS};

use super::error::KernelError;
use super::nvrtc::{Architecture, Compiled, Nvrtc};
use super::resources::Resources;

/// A folder of compiled kernels.
#[derive(Debug, Clone)]
pub struct Cache {
    folder: PathBuf,
}

/// Bytes of the hash in front of an entry.
const HASH: usize = blake3::OUT_LEN;

impl Cache {
    /// In this folder, which is made when it is needed.
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Self { folder: folder.into() }
    }

    /// In `GAPLESS_CACHE`, else in the user's folder for caches, else in one for temporary files.
    pub fn of_user() -> Self {
        let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let folder = variable("GAPLESS_CACHE")
            .or_else(|| variable("XDG_CACHE_HOME").map(|caches| caches.join("gapless")))
            .or_else(|| variable("HOME").map(|home| home.join(".cache/gapless")))
            .unwrap_or_else(|| std::env::temp_dir().join("gapless"));
        Self::new(folder.join("kernels"))
    }

    /// A family's machine code: as it was compiled before, or now.
    ///
    /// # Errors
    /// What [`Nvrtc::compile`] returns. Where the folder cannot be written to, a warning says so, and the next process compiles
    /// it again.
    pub fn load(&self, nvrtc: &Nvrtc, family: Family, architecture: Architecture) -> Result<Vec<u8>, KernelError> {
        let compile = || nvrtc.compile(family, architecture).map(|compiled| compiled.code);
        self.entry(&key(family, architecture, &nvrtc.version()), compile)
    }

    /// Compiles a family, whether that was done before or not, keeps the code, and returns what its kernels take.
    ///
    /// # Errors
    /// As [`Self::load`].
    pub fn fill(
        &self,
        nvrtc: &Nvrtc,
        family: Family,
        architecture: Architecture,
    ) -> Result<Vec<Resources>, KernelError> {
        let Compiled { code, kernels } = nvrtc.compile(family, architecture)?;
        self.keep(&self.path(&key(family, architecture, &nvrtc.version())), &code);
        Ok(kernels)
    }

    fn path(&self, key: &str) -> PathBuf {
        self.folder.join(format!("{key}.cubin"))
    }

    fn entry(&self, key: &str, make: impl FnOnce() -> Result<Vec<u8>, KernelError>) -> Result<Vec<u8>, KernelError> {
        let path = self.path(key);
        if let Some(code) = read(&path) {
            return Ok(code);
        }
        let code = make()?;
        self.keep(&path, &code);
        Ok(code)
    }

    /// Code that cannot be kept is compiled again by the next process.
    fn keep(&self, path: &Path, code: &[u8]) {
        if let Err(error) = self.write(path, code) {
            tracing::warn!(path = %path.display(), %error, "a compiled kernel cannot be kept; GAPLESS_CACHE names another folder");
        }
    }

    /// By a file of its own that then takes the name.
    fn write(&self, path: &Path, code: &[u8]) -> std::io::Result<()> {
        fs::create_dir_all(&self.folder)?;
        let mut file = tempfile::NamedTempFile::new_in(&self.folder)?;
        file.write_all(blake3::hash(code).as_bytes())?;
        file.write_all(code)?;
        file.persist(path)?;
        Ok(())
    }
}

/// The code of an entry that is whole.
fn read(path: &Path) -> Option<Vec<u8>> {
    let mut entry = fs::read(path).ok()?;
    let (hash, code) = entry.split_at_checked(HASH)?;
    let is_whole = blake3::hash(code).as_bytes()[..] == *hash;
    is_whole.then(|| entry.split_off(HASH))
}

/// The hash of all that decides the code.
fn key(family: Family, architecture: Architecture, version: &str) -> String {
    let mut hasher = blake3::Hasher::new();
    let options = Nvrtc::options(architecture);
    let headers = HEADERS.iter().flat_map(|&(name, text)| [name, text]);
    let parts = [version, family.file(), family.source()].into_iter().chain(headers);
    for part in parts.chain(options.iter().map(String::as_str)) {
        // Lengths keep neighbours apart.
        hasher.update(&(part.len() as u64).to_le_bytes());
        hasher.update(part.as_bytes());
    }
    hasher.finalize().to_hex().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_made_once_and_again_when_they_are_not_whole() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::new(folder.path().join("kernels"));
        let made = std::cell::Cell::new(0);
        let make = || {
            made.set(made.get() + 1);
            Ok(vec![1, 2, 3])
        };
        let path = folder.path().join("kernels/key.cubin");
        for (spoil, times) in [(None, 1), (None, 1), (Some(&b"short"[..]), 2), (Some(&[7; HASH + 3]), 3), (None, 3)] {
            if let Some(bytes) = spoil {
                fs::write(&path, bytes).unwrap();
            }
            assert_eq!(cache.entry("key", make).unwrap(), [1, 2, 3]);
            assert_eq!(made.get(), times);
        }
        // Nothing is left over beside the entry.
        assert_eq!(fs::read_dir(folder.path().join("kernels")).unwrap().count(), 1);
    }

    #[test]
    fn failures_are_not_kept_and_code_that_cannot_be_is_used() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::new(folder.path());
        let fails = || Err(KernelError::Nvrtc { call: "a call", what: "no".into() });
        assert!(matches!(cache.entry("key", fails), Err(KernelError::Nvrtc { .. })));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);

        let file = folder.path().join("file");
        fs::write(&file, "").unwrap();
        let code = Cache::new(file.join("below")).entry("key", || Ok(vec![1]));
        assert_eq!(code.unwrap(), [1]);
    }

    #[test]
    fn whatever_decides_the_code_decides_the_key() {
        let (old, new) = (Architecture::new(8, 0), Architecture::new(9, 0));
        let base = key(Family::Norm, old, "13.0");
        assert_eq!(base, key(Family::Norm, old, "13.0"));
        for other in [key(Family::Norm, new, "13.0"), key(Family::Norm, old, "13.1"), key(Family::Reduce, old, "13.0")]
        {
            assert_ne!(base, other);
        }
    }
}

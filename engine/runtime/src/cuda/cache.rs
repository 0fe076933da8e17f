//! A cache of machine code on disk, so that each kernel is compiled once per machine.
//!
//! - In: a family, an architecture, a compiler.
//! - Out: the family's machine code. The name of an entry is the hash of everything that determines the code. The
//!   entry itself begins with the hash of the code. If this hash does not match, the code is compiled again.
//! - Never: a half-written entry, even if several processes use the folder at once.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use gapless_kernels::cuda::{Family, HEADERS};

use super::error::KernelError;
use super::nvrtc::{Architecture, Compiled, Nvrtc};
use super::resources::Resources;

/// A folder of compiled kernels and measured algorithm choices.
#[derive(Debug, Clone)]
pub struct Cache {
    folder: PathBuf,
}

/// Length of the hash at the beginning of an entry.
const HASH: usize = blake3::OUT_LEN;

impl Cache {
    /// Creates a cache in this folder. The folder is created when the first entry is written.
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Self { folder: folder.into() }
    }

    /// Returns the user's cache. Its folder is `GAPLESS_CACHE` if that is set, or else the user's cache folder, or
    /// else the folder for temporary files.
    pub fn of_user() -> Self {
        let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let folder = variable("GAPLESS_CACHE")
            .or_else(|| variable("XDG_CACHE_HOME").map(|caches| caches.join("gapless")))
            .or_else(|| variable("HOME").map(|home| home.join(".cache/gapless")))
            .unwrap_or_else(|| std::env::temp_dir().join("gapless"));
        Self::new(folder.join("kernels"))
    }

    /// Returns a family's machine code. If the cache does not contain the code, the family is compiled and the code is
    /// cached.
    ///
    /// # Errors
    /// Returns the errors of [`Nvrtc::compile`]. If the folder cannot be written to, a warning is logged and the next
    /// process has to compile the family again.
    pub fn load(&self, nvrtc: &Nvrtc, family: Family, architecture: Architecture) -> Result<Vec<u8>, KernelError> {
        let compile = || nvrtc.compile(family, architecture).map(|compiled| compiled.code);
        self.entry(&key(family, architecture, &nvrtc.version()), compile)
    }

    /// Compiles a family even if it is cached, caches the code, and returns the resources that its kernels use.
    ///
    /// # Errors
    /// Returns an error in the same cases as [`Self::load`].
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

    /// Returns the measured algorithm choices for a device, which `device` identifies (card, driver version, library
    /// version). Each entry maps a product's form to the index of the fastest of the algorithms that the library
    /// proposes. If there is no entry for the device, the map is empty.
    pub(super) fn choices(&self, device: &[String]) -> BTreeMap<String, usize> {
        let text = read(&self.choices_path(device)).and_then(|bytes| String::from_utf8(bytes).ok()).unwrap_or_default();
        let choice =
            |line: &str| line.split_once(' ').and_then(|(form, index)| Some((form.to_owned(), index.parse().ok()?)));
        text.lines().filter_map(choice).collect()
    }

    /// Adds choices to those that are cached for a device.
    pub(super) fn keep_choices(&self, device: &[String], choices: &BTreeMap<String, usize>) {
        let mut all = self.choices(device);
        all.extend(choices.iter().map(|(form, &index)| (form.clone(), index)));
        let text: String = all.iter().map(|(form, index)| format!("{form} {index}\n")).collect();
        self.keep(&self.choices_path(device), text.as_bytes());
    }

    fn choices_path(&self, device: &[String]) -> PathBuf {
        let mut hasher = blake3::Hasher::new();
        device.iter().for_each(|word| {
            hasher.update(&(word.len() as u64).to_le_bytes()).update(word.as_bytes());
        });
        self.folder.join(format!("{}.products", hasher.finalize().to_hex()))
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

    /// Writes an entry. If this fails, logs a warning; the next process then has to compile or measure again.
    fn keep(&self, path: &Path, code: &[u8]) {
        if let Err(error) = self.write(path, code) {
            tracing::warn!(path = %path.display(), %error, "what was compiled or measured for this device cannot be kept; GAPLESS_CACHE names another folder");
        }
    }

    /// Writes to a temporary file and renames it, so that no other process sees a half-written entry.
    fn write(&self, path: &Path, code: &[u8]) -> std::io::Result<()> {
        fs::create_dir_all(&self.folder)?;
        let mut file = tempfile::NamedTempFile::new_in(&self.folder)?;
        file.write_all(blake3::hash(code).as_bytes())?;
        file.write_all(code)?;
        file.persist(path)?;
        Ok(())
    }
}

/// Returns the code of an entry, or `None` if the entry is missing or damaged.
fn read(path: &Path) -> Option<Vec<u8>> {
    let mut entry = fs::read(path).ok()?;
    let (hash, code) = entry.split_at_checked(HASH)?;
    let is_whole = blake3::hash(code).as_bytes()[..] == *hash;
    is_whole.then(|| entry.split_off(HASH))
}

/// Returns the hash of everything that determines the code.
fn key(family: Family, architecture: Architecture, version: &str) -> String {
    let mut hasher = blake3::Hasher::new();
    let options = Nvrtc::options(architecture);
    let headers = HEADERS.iter().flat_map(|&(name, text)| [name, text]);
    let parts = [version, family.file(), family.source()].into_iter().chain(headers);
    for part in parts.chain(options.iter().map(String::as_str)) {
        // Without the lengths, different texts could have the same concatenation.
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
        // No temporary file remains.
        assert_eq!(fs::read_dir(folder.path().join("kernels")).unwrap().count(), 1);
    }

    #[test]
    fn choices_are_kept_by_device_and_added_to() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::new(folder.path().join("kernels"));
        let [one, other] = ["H100", "H200"].map(|card| [card.to_owned(), "13.0".to_owned()]);
        let choices = |all: &[(&str, usize)]| all.iter().map(|&(form, index)| (form.to_owned(), index)).collect();
        cache.keep_choices(&one, &choices(&[("a", 3), ("b", 0)]));
        cache.keep_choices(&one, &choices(&[("c", 7)]));
        assert_eq!(cache.choices(&one), choices(&[("a", 3), ("b", 0), ("c", 7)]));
        assert_eq!(cache.choices(&other), choices(&[]));
        fs::write(cache.choices_path(&one), "not whole").unwrap();
        assert_eq!(cache.choices(&one), choices(&[]));
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

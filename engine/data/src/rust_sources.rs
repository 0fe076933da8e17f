//! The default corpus: Rust sources, which exist on every machine on which the project was built.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use crate::compressed::read_text;
use crate::files::text_files;
use crate::{Corpus, DataError};

/// The most bytes of a lock file.
const MAX_BYTES: u64 = 64 << 20;

/// The Rust sources of a workspace and of its locked dependencies, as unpacked by cargo.
///
/// First come the workspace's own sources, then the packages in the order of the lock file, each with its files sorted.
/// Packages that cargo has not unpacked on this machine are left out. Of several versions of a package, only the last
/// is read. Otherwise, near copies would appear in both training and validation. Reading stops before the document that
/// would exceed the cap.
///
/// ```no_run
/// use gapless_data::{Corpus, RustSources};
/// let corpus = Corpus::rust_sources(&RustSources::of_lock("Cargo.lock"))?;
/// println!("{}", corpus.report());
/// # Ok::<(), gapless_data::DataError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RustSources {
    /// Path of the `Cargo.lock`; its folder is the workspace.
    pub lock: PathBuf,
    /// Cargo's folder. The default is `CARGO_HOME`, or `.cargo` in the user's home.
    pub cargo_home: Option<PathBuf>,
    /// The most bytes of text in total.
    pub max_bytes: u64,
    /// The most bytes of text from one package, so that generated bindings do not dominate the corpus.
    pub max_package_bytes: u64,
}

impl RustSources {
    /// The sources of a lock file, up to 24 MiB in total and 1 MiB of each package.
    pub fn of_lock(lock: impl Into<PathBuf>) -> Self {
        let home = || env::home_dir().map(|home| home.join(".cargo"));
        let cargo_home = env::var_os("CARGO_HOME").filter(|path| !path.is_empty()).map(PathBuf::from).or_else(home);
        Self { lock: lock.into(), cargo_home, max_bytes: 24 << 20, max_package_bytes: 1 << 20 }
    }
}

impl Corpus {
    /// Reads the Rust sources of a workspace and its locked dependencies.
    ///
    /// # Errors
    /// Returns an error if the lock file is missing or invalid, or if there are no sources at all.
    pub fn rust_sources(sources: &RustSources) -> Result<Self, DataError> {
        let packages = locked_packages(&sources.lock)?;
        let registries = sources.cargo_home.as_deref().map(registry_folders).unwrap_or_default();

        let mut corpus = Self::default();
        let workspace = match sources.lock.parent() {
            Some(parent) if parent != Path::new("") => parent,
            _ => Path::new("."),
        };
        corpus.add_rust_files(workspace, sources.max_bytes)?;
        for package in packages {
            let Some(folder) = registries.iter().map(|folder| folder.join(&package)).find(|path| path.is_dir()) else {
                continue;
            };
            let room = sources.max_bytes.saturating_sub(corpus.bytes());
            let left_out = corpus.add_rust_files(&folder, sources.max_package_bytes.min(room))?;
            corpus.count_package();
            if left_out.is_some_and(|bytes| bytes > room) {
                break;
            }
        }
        if corpus.documents().is_empty() {
            return Err(DataError::Empty { path: workspace.to_owned(), skipped: corpus.skipped(), others: Vec::new() });
        }
        Ok(corpus)
    }

    /// Adds files until a file would exceed `max_bytes`. Returns the total size including that file, or `None` if all
    /// files were added.
    fn add_rust_files(&mut self, folder: &Path, max_bytes: u64) -> Result<Option<u64>, DataError> {
        let mut bytes = 0;
        for file in text_files(folder, &["rs"])? {
            bytes += fs::metadata(&file).map_err(|error| DataError::read(&file, error))?.len();
            if bytes > max_bytes {
                return Ok(Some(bytes));
            }
            self.add_or_skip(&file)?;
        }
        Ok(None)
    }
}

/// Returns the lock file's packages from a registry as `name-version`, in the order of the file. Of each package, only
/// the last version is returned.
fn locked_packages(lock: &Path) -> Result<Vec<String>, DataError> {
    #[derive(serde::Deserialize)]
    struct Lock {
        package: Vec<Package>,
    }
    #[derive(serde::Deserialize)]
    struct Package {
        name: String,
        version: String,
        source: Option<String>,
    }
    let text = read_text(lock, MAX_BYTES).map_err(|error| DataError::read(lock, error))?;
    let parsed: Lock = toml::from_str(&text)
        .map_err(|error| DataError::Lock { path: lock.to_owned(), reason: error.message().to_owned() })?;
    let mut packages = parsed.package;
    packages.retain(|package| package.source.as_deref().is_some_and(|source| !source.starts_with("git+")));
    let names = packages.chunk_by(|one, next| one.name == next.name); // versions of a package follow each other
    Ok(names.filter_map(<[_]>::last).map(|package| format!("{}-{}", package.name, package.version)).collect())
}

/// Returns the folders into which cargo unpacks packages, one per registry, sorted.
fn registry_folders(cargo_home: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(cargo_home.join("registry").join("src")) else {
        return Vec::new();
    };
    let mut folders: Vec<_> = entries.flatten().map(|entry| entry.path()).filter(|path| path.is_dir()).collect();
    folders.sort();
    folders
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOCK: &str = r#"
version = 4
[[package]]
name = "own"
version = "0.1.0"
[[package]]
name = "beta"
version = "2.0.0"
source = "registry+https://example.org/index"
[[package]]
name = "alpha"
version = "0.9.0"
source = "registry+https://example.org/index"
[[package]]
name = "alpha"
version = "1.0.0"
source = "registry+https://example.org/index"
[[package]]
name = "not-unpacked"
version = "1.0.0"
source = "registry+https://example.org/index"
[[package]]
name = "from-git"
version = "1.0.0"
source = "git+https://example.org/from-git"
"#;

    /// A workspace with one source file of its own, and a registry with packages.
    fn workspace() -> (tempfile::TempDir, RustSources) {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            let file = folder.path().join(name);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, text).unwrap();
        };
        write("own/Cargo.lock", LOCK);
        write("own/src/lib.rs", "// own");
        for package in ["alpha-0.9.0", "alpha-1.0.0", "beta-2.0.0", "beta-9.9.9", "from-git-1.0.0"] {
            write(&format!("cargo/registry/src/one/{package}/src/lib.rs"), &format!("// {package}"));
        }
        write("cargo/registry/src/one/alpha-1.0.0/README.md", "no Rust");
        write("cargo/registry/src/one/beta-2.0.0/src/more.rs", "// more of beta");
        let lock = folder.path().join("own/Cargo.lock");
        let cargo_home = Some(folder.path().join("cargo"));
        (folder, RustSources { lock, cargo_home, max_bytes: 1 << 20, max_package_bytes: 1 << 20 })
    }

    fn texts(sources: &RustSources) -> Vec<String> {
        Corpus::rust_sources(sources).unwrap().documents().iter().map(|d| d.text.clone()).collect()
    }

    #[test]
    fn own_sources_then_the_locks_order_within_the_caps() {
        let (_folder, mut sources) = workspace();
        assert_eq!(texts(&sources), ["// own", "// beta-2.0.0", "// more of beta", "// alpha-1.0.0"]);
        let report = Corpus::rust_sources(&sources).unwrap().report();
        assert_eq!((report.packages, report.files, report.skipped), (2, 4, 0));

        sources.max_package_bytes = "// beta-2.0.0".len() as u64;
        assert_eq!(texts(&sources), ["// own", "// beta-2.0.0"], "alpha's only file is longer");
        sources.max_package_bytes = "// alpha-1.0.0".len() as u64;
        assert_eq!(texts(&sources), ["// own", "// beta-2.0.0", "// alpha-1.0.0"]);
        sources.max_bytes = "// own// beta-2.0.0".len() as u64;
        assert_eq!(texts(&sources), ["// own", "// beta-2.0.0"]);

        sources.cargo_home = None;
        assert_eq!(texts(&sources), ["// own"]);
    }

    #[test]
    fn a_lock_that_is_none() {
        let (_folder, mut sources) = workspace();
        fs::write(&sources.lock, "package = 3").unwrap();
        assert!(matches!(Corpus::rust_sources(&sources), Err(DataError::Lock { .. })));
        sources.lock.set_file_name("nowhere.lock");
        assert!(matches!(Corpus::rust_sources(&sources), Err(DataError::Missing { .. })));
    }
}

//! Finds NVIDIA's libraries in Python packages, in addition to installed ones, and reports which files were loaded.
//!
//! - In: a library's file name.
//! - Out: paths to try, or libraries that stay loaded.
//! - Never: the start of a Python interpreter or any other process.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};

/// Returns the files of this name in Python packages, the most likely one first.
pub(super) fn in_packages(name: &str) -> Vec<PathBuf> {
    static FOLDERS: OnceLock<Vec<PathBuf>> = OnceLock::new();
    let folders = FOLDERS.get_or_init(|| folders_of_packages(&|name| std::env::var_os(name)));
    folders.iter().map(|folder| folder.join(name)).filter(|path| path.is_file()).collect()
}

/// Loads the first of these libraries that a Python package contains, and keeps it loaded, so that a later load by the
/// same name returns this library. Returns false if no package contains any of them.
pub(super) fn keep_from_packages(names: &[&str]) -> bool {
    names.iter().flat_map(|name| in_packages(name)).any(|path| keep(&path).is_ok())
}

/// Loads the libraries whose names have this prefix from the folder of `library`. NVRTC loads its builtins by name
/// alone, and would not find them in this folder.
pub(super) fn keep_siblings(library: &Path, prefix: &str) {
    // If `library` is a symbolic link, the other libraries may be in the folder of its target.
    for folder in [Some(library.to_owned()), library.canonicalize().ok()].iter().flatten().filter_map(|l| l.parent()) {
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        let siblings = entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(prefix));
        siblings.for_each(|sibling| drop(keep(&sibling.path())));
    }
}

/// Loads a library and never unloads it.
fn keep(path: &Path) -> Result<(), libloading::Error> {
    static KEPT: Mutex<Vec<libloading::Library>> = Mutex::new(Vec::new());
    // SAFETY: these are NVIDIA's libraries; loading them has no preconditions.
    let library = unsafe { libloading::Library::new(path) }?;
    KEPT.lock().unwrap_or_else(PoisonError::into_inner).push(library);
    Ok(())
}

/// Returns the files that this process has loaded whose names begin with one of `names`, from the kernel's list of
/// mappings. Returns no files if the system has no such list.
pub(super) fn taken(names: &[&str]) -> Vec<String> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let mut paths: Vec<String> = Vec::new();
    for path in maps.lines().filter_map(|line| line.find('/').map(|at| &line[at..])) {
        let is_one = |name: &&str| path.rsplit('/').next().is_some_and(|file| file.starts_with(*name));
        if names.iter().any(is_one) && !paths.iter().any(|known| known == path) {
            paths.push(path.to_owned());
        }
    }
    paths
}

/// Returns the folders with libraries in the packages of every Python that `PATH` and similar variables name.
fn folders_of_packages(variable: &dyn Fn(&str) -> Option<OsString>) -> Vec<PathBuf> {
    let paths = |name: &str| -> Vec<PathBuf> {
        variable(name).map(|value| std::env::split_paths(&value).collect()).unwrap_or_default()
    };
    let one = |name: &str| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    // `lib` is next to the folder of `bin/python3`. In a virtual environment, `bin/python3` is a link to the Python
    // that created the environment.
    let pythons: Vec<PathBuf> =
        paths("PATH").iter().map(|bin| bin.join("python3")).filter(|python| python.is_file()).collect();
    let prefix = |python: &Path| python.parent().and_then(Path::parent).map(Path::to_owned);
    let own = pythons.iter().filter_map(|python| prefix(python));
    let linked = pythons.iter().filter_map(|python| prefix(&python.canonicalize().ok()?));
    let prefixes = ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(one).chain(own);
    let prefixes = prefixes.chain(one("HOME").map(|home| home.join(".local"))).chain(linked);
    let packages = paths("PYTHONPATH").into_iter().chain(prefixes.flat_map(|prefix| packages_below(&prefix)));
    let mut folders: Vec<PathBuf> = Vec::new();
    for packages in packages {
        // NVIDIA's packages have their libraries in nvidia/NAME/lib. A PyTorch that bundles the libraries has them in
        // torch/lib.
        for folder in below(&packages.join("nvidia")).map(|part| part.join("lib")).chain([packages.join("torch/lib")]) {
            if folder.is_dir() && !folders.contains(&folder) {
                folders.push(folder);
            }
        }
    }
    folders
}

/// Returns package folders such as `lib/python3.12/site-packages`, newest Python first.
fn packages_below(prefix: &Path) -> Vec<PathBuf> {
    let is_python = |path: &PathBuf| path.file_name().is_some_and(|name| has_prefix(name, "python3"));
    let libraries = ["lib", "lib64", "local/lib"].map(|name| prefix.join(name));
    let mut pythons: Vec<PathBuf> = libraries.iter().flat_map(|folder| below(folder)).filter(is_python).collect();
    pythons.sort_by_key(|path| std::cmp::Reverse(path.file_name().map(version)));
    pythons.iter().flat_map(|python| ["site-packages", "dist-packages"].map(|name| python.join(name))).collect()
}

/// Returns the minor version in a name such as python3.12.
fn version(name: &OsStr) -> u32 {
    name.to_string_lossy().rsplit('.').next().and_then(|minor| minor.parse().ok()).unwrap_or(0)
}

fn has_prefix(name: &OsStr, prefix: &str) -> bool {
    name.to_string_lossy().starts_with(prefix)
}

/// Returns the entries of a folder, sorted. If the folder cannot be read, returns no entries.
fn below(folder: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    let mut entries: Vec<PathBuf> =
        std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    entries.sort();
    entries.into_iter()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packages_of_the_nearest_python_come_first() {
        let root = tempfile::tempdir().unwrap();
        let folder = |path: &str| {
            let folder = root.path().join(path);
            std::fs::create_dir_all(&folder).unwrap();
            folder
        };
        for prefix in ["system", "environment"] {
            std::fs::write(folder(&format!("{prefix}/bin")).join("python3"), "").unwrap();
        }
        let expected = [
            folder("given/nvidia/cublas/lib"),
            folder("environment/lib/python3.12/site-packages/nvidia/cu13/lib"),
            folder("environment/lib/python3.9/site-packages/nvidia/cuda_nvrtc/lib"),
            folder("system/lib/python3.11/dist-packages/torch/lib"),
            folder("home/.local/lib/python3.11/site-packages/nvidia/cublas/lib"),
        ];
        // A package without libraries, and a folder that does not belong to a Python.
        folder("environment/lib/python3.12/site-packages/nvidia/cuda_nvcc");
        folder("environment/lib/perl5/site-packages/nvidia/cu13/lib");
        let path = |name: &str| root.path().join(name).into_os_string();
        let variable = |name: &str| match name {
            "PATH" => Some(std::env::join_paths([path("environment/bin"), path("system/bin")]).unwrap()),
            "PYTHONPATH" => Some(path("given")),
            "HOME" => Some(path("home")),
            _ => None,
        };
        assert_eq!(folders_of_packages(&variable), expected);
        assert_eq!(folders_of_packages(&|_| None), [] as [PathBuf; 0]);
    }

    /// The C library is found, which every process has loaded.
    #[test]
    fn loaded_libraries_are_listed() {
        let taken = taken(&["libc.so", "libnothing.so"]);
        assert!(taken.len() == 1 && taken[0].ends_with("/libc.so.6"), "{taken:?}");
    }
}

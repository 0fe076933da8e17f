//! Where NVIDIA's libraries are: what Python's packages brought is found as well as what is installed, and which were taken can be
//! said.
//!
//! In: a library's file name. Out: paths to try, or libraries that stay loaded. Never: a Python interpreter, or a process, that is
//! started for it.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};

/// The files of this name that packages of Python brought, the likeliest first.
pub(super) fn in_packages(name: &str) -> Vec<PathBuf> {
    static FOLDERS: OnceLock<Vec<PathBuf>> = OnceLock::new();
    let folders = FOLDERS.get_or_init(|| folders_of_packages(&|name| std::env::var_os(name)));
    folders.iter().map(|folder| folder.join(name)).filter(|path| path.is_file()).collect()
}

/// Loads a library of Python's packages, the first of these names that there is; and keeps it, so that whoever asks the loader for the
/// name gets this one. False if there is none.
pub(super) fn keep_from_packages(names: &[&str]) -> bool {
    names.iter().flat_map(|name| in_packages(name)).any(|path| keep(&path).is_ok())
}

/// Loads what lies beside a library, is loaded by it by name alone, and would not be found: NVRTC's builtins.
pub(super) fn keep_siblings(library: &Path, prefix: &str) {
    // A link leads to where the others are.
    for folder in [Some(library.to_owned()), library.canonicalize().ok()].iter().flatten().filter_map(|l| l.parent()) {
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        let siblings = entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(prefix));
        siblings.for_each(|sibling| drop(keep(&sibling.path())));
    }
}

/// Loads a library that is never unloaded.
fn keep(path: &Path) -> Result<(), libloading::Error> {
    static KEPT: Mutex<Vec<libloading::Library>> = Mutex::new(Vec::new());
    // SAFETY: these are libraries of NVIDIA's, which may be loaded at any time.
    let library = unsafe { libloading::Library::new(path) }?;
    KEPT.lock().unwrap_or_else(PoisonError::into_inner).push(library);
    Ok(())
}

/// The files that this process has loaded of libraries whose names begin with these, as the kernel lists them; none where it doesn't.
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

/// Folders of libraries in the packages of every Python that `PATH` and its kind name.
fn folders_of_packages(variable: &dyn Fn(&str) -> Option<OsString>) -> Vec<PathBuf> {
    let paths = |name: &str| -> Vec<PathBuf> {
        variable(name).map(|value| std::env::split_paths(&value).collect()).unwrap_or_default()
    };
    let one = |name: &str| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    // `bin/python3` lies beside `lib`; in a virtual environment it is a link to the one that it was made from.
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
        // A wheel of NVIDIA's has its libraries in nvidia/NAME/lib; a PyTorch that brings its own has them in torch/lib.
        for folder in below(&packages.join("nvidia")).map(|part| part.join("lib")).chain([packages.join("torch/lib")]) {
            if folder.is_dir() && !folders.contains(&folder) {
                folders.push(folder);
            }
        }
    }
    folders
}

/// `lib/python3.12/site-packages` and its kind, the newest Python first.
fn packages_below(prefix: &Path) -> Vec<PathBuf> {
    let is_python = |path: &PathBuf| path.file_name().is_some_and(|name| has_prefix(name, "python3"));
    let libraries = ["lib", "lib64", "local/lib"].map(|name| prefix.join(name));
    let mut pythons: Vec<PathBuf> = libraries.iter().flat_map(|folder| below(folder)).filter(is_python).collect();
    pythons.sort_by_key(|path| std::cmp::Reverse(path.file_name().map(version)));
    pythons.iter().flat_map(|python| ["site-packages", "dist-packages"].map(|name| python.join(name))).collect()
}

/// 12 of python3.12.
fn version(name: &OsStr) -> u32 {
    name.to_string_lossy().rsplit('.').next().and_then(|minor| minor.parse().ok()).unwrap_or(0)
}

fn has_prefix(name: &OsStr, prefix: &str) -> bool {
    name.to_string_lossy().starts_with(prefix)
}

/// What is in a folder, in order; nothing if it cannot be read.
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
        // Packages without libraries, and what is no Python.
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

    /// This process has loaded the C library.
    #[test]
    fn loaded_libraries_are_listed() {
        let taken = taken(&["libc.so", "libnothing.so"]);
        assert!(taken.len() == 1 && taken[0].ends_with("/libc.so.6"), "{taken:?}");
    }
}

//! Somebody's weights: what transformers computes from a folder, and what is made of a spoiled one.
//!
//! The cases are folders: those of `tests/evidence/hf`, and those of `$GAPLESS_HF` or else `../shared/hf`, where there are some.

mod case;
mod generation;
mod generation_options;
mod hostile;
mod lora;
mod numbers;
mod options;
mod published;
mod saving;
mod tokenizers;

use std::path::{Path, PathBuf};

/// Places with cases.
fn roots() -> Vec<PathBuf> {
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/evidence/hf");
    let others = match std::env::var_os("GAPLESS_HF") {
        Some(folder) => Some(PathBuf::from(folder)),
        None => gapless_testing::shared("hf"),
    };
    [own].into_iter().chain(others).collect()
}

/// Folders in a folder, by name.
fn folders(path: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(path).into_iter().flatten().map(|entry| entry.unwrap().path());
    let mut found: Vec<PathBuf> = entries.filter(|path| path.is_dir()).collect();
    found.sort();
    found
}

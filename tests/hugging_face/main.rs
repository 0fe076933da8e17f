//! Pretrained weights in Hugging Face folders. Compares results with those of transformers, and checks that damaged
//! folders are refused.
//!
//! The cases are the folders of `tests/evidence/hf`. If the folder `$GAPLESS_HF` or `../shared/hf` exists, the folders
//! in it are cases too.

mod case;
mod families;
mod generation;
mod generation_options;
mod hostile;
mod lora;
mod new_folder;
mod numbers;
mod options;
mod preference;
mod published;
mod quantized;
mod reloaded;
mod saving;
mod tokenizers;

use std::path::{Path, PathBuf};

/// The folders that contain cases.
fn roots() -> Vec<PathBuf> {
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/evidence/hf");
    let others = match std::env::var_os("GAPLESS_HF") {
        Some(folder) => Some(PathBuf::from(folder)),
        None => gapless_testing::next_to_repository("hf"),
    };
    [own].into_iter().chain(others).collect()
}

/// Returns the subfolders of a folder, sorted by name.
fn folders(path: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(path).into_iter().flatten().map(|entry| entry.unwrap().path());
    let mut found: Vec<PathBuf> = entries.filter(|path| path.is_dir()).collect();
    found.sort();
    found
}

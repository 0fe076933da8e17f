//! Checkpoints that are saved and opened as a whole or not at all.
//!
//! A checkpoint is a folder of safetensors files and a manifest with every file's size and blake3 hash. It is written
//! under another name, flushed to the disk, and renamed last. A full disk, a crash or a kill at any moment therefore
//! leaves the previous checkpoint intact.
//!
//! Opening a checkpoint reads every byte once and compares the hashes. Its tensors are then read one by one into memory
//! that the caller provides, and compared with the verified hashes, so that a file that changes in between is an error.
//! The step of a checkpoint is given by its manifest, not by its folder's name.
//!
//! ```text
//! runs/gpt/
//!   step-00000100/                  complete: `latest` opens it
//!     model.safetensors             any safetensors reader opens these
//!     optimizer.safetensors
//!     manifest.b3                   the manifest's own hash, in b3sum's format
//!     manifest.json                 format, step, sizes and hashes, the caller's metadata
//!   step-00000200.partial/          interrupted: `latest` skips it, `prune` removes it
//! ```
//!
//! ```
//! use candle_core::DType;
//! use gapless_checkpoint::{Checkpoint, Section, TensorBytes};
//! use serde_json::json;
//!
//! # let folder = tempfile::tempdir()?;
//! # let runs = folder.path().join("runs");
//! let weight: Vec<u8> = [1f32, 2.0, 3.0, 4.0].iter().flat_map(|value| value.to_le_bytes()).collect();
//! let tensors = vec![TensorBytes { name: "wte.weight", dtype: DType::F32, shape: &[2, 2], bytes: &weight }];
//! let sections = [Section { file: "model.safetensors", tensors }];
//! Checkpoint::save(&runs, 100, &sections, json!({ "model": { "width": 2 } }))?;
//! Checkpoint::prune(&runs, 3, &[])?;
//!
//! let checkpoint = Checkpoint::latest(&runs)?.expect("one was saved");
//! checkpoint.expect("model", &json!({ "width": 2 }))?;
//! let mut bytes = vec![0; weight.len()];
//! checkpoint.section("model.safetensors")?.read_into("wte.weight", &mut bytes)?;
//! assert_eq!((checkpoint.step(), bytes), (100, weight));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod difference;
mod disk;
mod error;
mod folder;
mod lock;
mod manifest;
mod open;
mod save;

pub use difference::{Difference, differences};
pub use error::CheckpointError;
pub use folder::Listed;
pub use lock::FolderLock;
pub use open::{Checkpoint, SavedSection, SavedTensor, TensorReader};
pub use save::{Draft, Section, TensorBytes, WrittenFiles};

#[cfg(test)]
mod tests;

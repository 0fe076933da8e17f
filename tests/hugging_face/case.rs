//! A test case: a checkpoint, and the results that transformers has computed from it.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use gapless::engine::learning_rate::{LearningRate, Shape};
use gapless::engine::optim::AdamW;
use gapless::models::hf::{Folder, HfError};
use gapless::{DeviceChoice, StepOptions, TrainError, TrainOptions, Trainer};
use serde_json::Value;

pub struct Case {
    pub name: String,
    pub checkpoint: PathBuf,
    pub expected: HashMap<String, Tensor>,
    pub about: Value,
}

impl Case {
    /// The cases of all roots.
    pub fn all() -> Vec<Self> {
        let folders = crate::roots().into_iter().flat_map(|root| crate::folders(&root.join("models")));
        folders.map(|folder| Self::read(&folder)).collect()
    }

    fn read(folder: &Path) -> Self {
        let (expected, about) = read(folder);
        let name = folder.file_name().unwrap().to_string_lossy().into_owned();
        Self { name, checkpoint: folder.join("checkpoint"), expected, about }
    }

    /// Opens the folder, and creates a trainer with its weights for sequences of `sequence` tokens. Returns an error
    /// if the folder is refused.
    pub fn trainer(&self, sequence: usize) -> Result<(Folder, Trainer), HfError> {
        let folder = Folder::open(&self.checkpoint)?;
        let mut trainer = Trainer::new(|vb| folder.model(vb), options(sequence))?;
        folder.load(&mut trainer)?;
        Ok((folder, trainer))
    }

    /// Token ids, one list per sequence.
    pub fn ids(&self) -> Vec<Vec<u32>> {
        self.expected["input_ids"].to_dtype(DType::U32).unwrap().to_vec2().unwrap()
    }

    /// Returns the error that f32 rounding alone causes in this case, for the named result.
    pub fn noise(&self, name: &str) -> f64 {
        self.about["noise_f32_against_f64"][name].as_f64().unwrap_or(0.0)
    }
}

/// Reads the expected results of a case: tensors and JSON.
pub fn read(folder: &Path) -> (HashMap<String, Tensor>, Value) {
    let expected = candle_core::safetensors::load(folder.join("expected.safetensors"), &Device::Cpu).unwrap();
    (expected, serde_json::from_slice(&std::fs::read(folder.join("expected.json")).unwrap()).unwrap())
}

/// Returns training options as described in the README of the cases: no clipping and a constant learning rate.
pub fn options(sequence: usize) -> TrainOptions {
    let optimizer = AdamW { max_norm: f64::INFINITY, ..AdamW::default() };
    let learning_rate = LearningRate { peak: 1e-3, floor: 1e-3, warmup_steps: 0, steps: 0, shape: Shape::Constant };
    TrainOptions {
        step: StepOptions {
            batch: 2,
            sequence,
            optimizer: optimizer.into(),
            keep_gradients: true,
            ..StepOptions::default()
        },
        device: DeviceChoice::Cpu,
        threads: 2,
        learning_rate,
        ..TrainOptions::default()
    }
}

/// Returns the message of an error that says that a folder is not supported, or `None` for any other error.
pub fn unsupported(error: &HfError) -> Option<String> {
    matches!(error, HfError::Config { .. }).then(|| error.to_string())
}

/// Maps the name of a stored tensor to a parameter: the parameter's name, the expert, and whether the tensor is
/// stored transposed. Written independently of the library, one name at a time.
fn place(stored: &str) -> (String, Option<usize>, bool) {
    let name = stored.strip_prefix("transformer.").unwrap_or(stored).replace("block_sparse_moe", "mlp");
    let is_conv = ["c_attn.weight", "c_proj.weight", "c_fc.weight"].iter().any(|end| name.ends_with(end));
    let Some((layer, expert)) = name.split_once(".mlp.experts.") else { return (name, None, is_conv) };
    let parts: Vec<&str> = expert.split('.').collect();
    let projection = match parts[1] {
        "w1" => "gate_proj",
        "w2" => "down_proj",
        "w3" => "up_proj",
        other => other,
    };
    (format!("{layer}.mlp.experts.{projection}"), Some(parts[0].parse().unwrap()), false)
}

/// Returns the trainer's value of a stored tensor, in the shape that it has on disk.
pub fn on_disk(stored: &str, tensor: impl Fn(&str) -> Result<Tensor, TrainError>) -> Tensor {
    let (parameter, expert, is_transposed) = place(stored);
    let mut found = tensor(&parameter).unwrap_or_else(|error| panic!("{stored}: {error}"));
    if let Some(expert) = expert {
        found = found.get(expert).unwrap();
    }
    if is_transposed { found.t().unwrap().contiguous().unwrap() } else { found.copy().unwrap() }
}

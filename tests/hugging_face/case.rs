//! A case: a checkpoint, and what transformers computes from it.

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
    /// Those of all places.
    pub fn all() -> Vec<Self> {
        let folders = crate::roots().into_iter().flat_map(|root| crate::folders(&root.join("models")));
        folders.map(|folder| Self::read(&folder)).collect()
    }

    fn read(folder: &Path) -> Self {
        let (expected, about) = read(folder);
        let name = folder.file_name().unwrap().to_string_lossy().into_owned();
        Self { name, checkpoint: folder.join("checkpoint"), expected, about }
    }

    /// The folder, and a trainer of sequences of some length that has its weights; or the error that refuses it.
    pub fn trainer(&self, sequence: usize) -> Result<(Folder, Trainer), HfError> {
        let folder = Folder::open(&self.checkpoint)?;
        let mut trainer = Trainer::new(|vb| folder.model(vb), options(sequence))?;
        folder.load(&mut trainer)?;
        Ok((folder, trainer))
    }

    /// Token ids, sequence after sequence.
    pub fn ids(&self) -> Vec<Vec<u32>> {
        self.expected["input_ids"].to_dtype(DType::U32).unwrap().to_vec2().unwrap()
    }

    /// A figure of f32's own rounding in this case.
    pub fn noise(&self, of: &str) -> f64 {
        self.about["noise_f32_against_f64"][of].as_f64().unwrap_or(0.0)
    }
}

/// What is expected of a case.
pub fn read(folder: &Path) -> (HashMap<String, Tensor>, Value) {
    let expected = candle_core::safetensors::load(folder.join("expected.safetensors"), &Device::Cpu).unwrap();
    (expected, serde_json::from_slice(&std::fs::read(folder.join("expected.json")).unwrap()).unwrap())
}

/// Training as the cases' README describes it: no clipping, no schedule.
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

/// Why a folder is not supported, if that is all there is to an error.
pub fn unsupported(error: &HfError) -> Option<String> {
    matches!(error, HfError::Config { .. }).then(|| error.to_string())
}

/// A stored tensor's place among the parameters: name, expert, and whether it is stored transposed. Says it otherwise than the
/// library does, one name at a time.
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

/// What a trainer has under a stored name, in the shape on disk.
pub fn on_disk(stored: &str, tensor: impl Fn(&str) -> Result<Tensor, TrainError>) -> Tensor {
    let (parameter, expert, is_transposed) = place(stored);
    let mut found = tensor(&parameter).unwrap_or_else(|error| panic!("{stored}: {error}"));
    if let Some(expert) = expert {
        found = found.get(expert).unwrap();
    }
    if is_transposed { found.t().unwrap().contiguous().unwrap() } else { found.copy().unwrap() }
}

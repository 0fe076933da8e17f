//! A trainer's state on disk: all it takes to go on with the same bits.

use std::path::{Path, PathBuf};

use candle_core::DType;
use gapless_alloc::Role;
use serde_json::{Map, Value, json};

use super::Trainer;
use crate::checkpoint::{Checkpoint, Section, TensorBytes};
use crate::error::Result;

const SECTIONS: [(&str, Role); 2] =
    [("model.safetensors", Role::Parameter), ("optimizer.safetensors", Role::OptimizerState)];

impl Trainer {
    /// Saves parameters, optimizer states, step and seed as `dir/step-…`, with `run` (what the caller needs to go on: its
    /// data, its model's configuration) in the manifest. Returns the checkpoint's folder.
    ///
    /// # Errors
    /// A full disk, or any other failure to write; what was there before stays.
    pub fn save(&self, dir: &Path, run: Value) -> Result<PathBuf> {
        let _span = tracing::info_span!("save", step = self.step).entered();
        let metadata = json!({
            "tensors": self.saved_shapes(),
            "seed": self.options.seed,
            "engine": env!("CARGO_PKG_VERSION"),
            "run": run,
        });
        self.executor.with_persistent(|tensors| {
            let section = |&(file, role): &(&'static str, Role)| {
                let of_role = tensors.iter().filter(|t| t.label.role == role);
                let tensors = of_role.map(|t| TensorBytes {
                    name: &t.label.tensor,
                    dtype: DType::F32,
                    shape: t.spec.dims(),
                    bytes: t.bytes,
                });
                Section { file, tensors: tensors.collect() }
            };
            let sections: Vec<Section<'_>> = SECTIONS.iter().map(section).collect();
            Ok(Checkpoint::save(dir, self.step, &sections, metadata)?)
        })?
    }

    /// Goes on from a checkpoint: parameters, optimizer states, step and seed become those that were saved. Returns the
    /// `run` part of what was given to [`Self::save`].
    ///
    /// # Errors
    /// A checkpoint of another model; it is left untouched, and so is the trainer.
    pub fn resume(&mut self, checkpoint: &Checkpoint) -> Result<Value> {
        checkpoint.expect("tensors", &self.saved_shapes())?;
        for (file, role) in SECTIONS {
            let section = checkpoint.section(file)?;
            let names: Vec<String> = self.executor.names(role).map(ToOwned::to_owned).collect();
            for name in names {
                self.executor.fill_tensor(&name, |bytes| section.read_into(&name, bytes))??;
            }
        }
        self.step = checkpoint.step();
        self.options.seed = checkpoint.metadata()["seed"].as_u64().unwrap_or(self.options.seed);
        Ok(checkpoint.metadata()["run"].clone())
    }

    /// Name and shape of every tensor that a checkpoint holds: what makes a model this model.
    fn saved_shapes(&self) -> Value {
        let mut shapes = Map::new();
        for (_, role) in SECTIONS {
            for (name, shape) in self.executor.shapes(role) {
                shapes.insert(name.to_owned(), json!(shape));
            }
        }
        Value::Object(shapes)
    }
}

//! A run's model as a Hugging Face folder.

use std::path::Path;

use gapless_engine::{DeviceChoice, StepOptions, TrainOptions};
use gapless_models::hf::{NewFolder, copy_tokenizer};

use super::{ModelConfig, RunError, TrainedRun};

impl TrainedRun {
    /// Writes the model as a Hugging Face folder at `out`, which must be empty or not exist: config.json,
    /// generation_config.json, model.safetensors and the tokenizer. Adapters are merged into the weights of their layers.
    ///
    /// - A model that was trained from random weights gets the config.json of the family that computes the same
    ///   ([`NewFolder::of`]), and weights of the run's precision.
    /// - A model that was loaded from a folder keeps the settings of the folder and the type of its weights.
    ///
    /// # Errors
    /// Returns an error if no family has the model or if `out` is not empty, and the errors of [`Self::for_inference`] and
    /// [`NewFolder::save`].
    pub fn export(&self, out: &Path) -> Result<(), RunError> {
        let folder = match &self.config.model {
            ModelConfig::Folder(path) => NewFolder::like(path)?,
            _ => {
                let (positions, end) = (self.config.step.sequence, self.vocabulary.end_of_text());
                NewFolder::of(&self.config.model(self.vocabulary.size()).architecture()?, positions, end)?
            }
        };
        // The smallest batch and sequence suffice, because the model is not run.
        let options = TrainOptions {
            step: StepOptions { batch: 1, sequence: 1, ..StepOptions::default() },
            device: DeviceChoice::Cpu,
            ..TrainOptions::default()
        };
        folder.save(
            out,
            || self.for_inference(options),
            |to| match self.tokenizer_folder() {
                Some(folder) => Ok(copy_tokenizer(folder, to)?),
                None => Ok(self.vocabulary.save_pretrained(to)?),
            },
        )
    }
}

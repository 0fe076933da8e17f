//! A run's model as a Hugging Face folder.

use std::path::Path;

use gapless_engine::{DeviceChoice, StepOptions, TrainOptions};
use gapless_models::hf::{Config, Folder, NewFolder, copy_tokenizer};

use super::train::CONFIG;
use super::{ModelConfig, RunConfig, RunError, TrainedRun};

impl TrainedRun {
    /// Writes the model as a Hugging Face folder at `out`, which must be empty or not exist: config.json,
    /// generation_config.json, model.safetensors and the tokenizer. Adapters are merged into the weights of their layers.
    ///
    /// - A model that was trained from random weights gets the config.json of the family that computes the same
    ///   ([`NewFolder::of`]), and weights of the run's precision.
    /// - A model that was loaded from a folder keeps the settings of the folder and the type of its weights.
    /// - Of a multimodal model, the other parts are copied from the folder from which the run started. If this folder does
    ///   not exist any more or has been changed, the text part is written alone, as a model of its own family.
    ///
    /// # Errors
    /// Returns an error if no family has the model or if `out` is not empty, and the errors of [`Self::for_inference`] and
    /// [`NewFolder::save`].
    pub fn export(&self, out: &Path) -> Result<(), RunError> {
        // The smallest batch and sequence suffice, because the model is not run.
        let options = TrainOptions {
            step: StepOptions { batch: 1, sequence: 1, ..StepOptions::default() },
            device: DeviceChoice::Cpu,
            ..TrainOptions::default()
        };
        let folder = match &self.config.model {
            ModelConfig::Folder(path) => {
                if let Some(whole) = whole(path) {
                    let trainer = self.for_inference(options)?;
                    let tokenizer = self.tokenizer_folder().unwrap_or(path);
                    return Ok(whole.save_with_tokenizer(&trainer, out, None, tokenizer)?);
                }
                NewFolder::like(path)?
            }
            _ => {
                let (positions, end) = (self.config.step.sequence, self.vocabulary.end_of_text());
                NewFolder::of(&self.config.model(self.vocabulary.size()).architecture()?, positions, end)?
            }
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

/// Returns the folder of the multimodal model from which a run started, if it still exists. `settings` is the run's copy of
/// the folder's settings. Returns `None` if the model is not multimodal.
fn whole(settings: &Path) -> Option<Folder> {
    let config = Config::read(settings).ok().filter(Config::is_multimodal)?;
    let ModelConfig::Folder(base) =
        RunConfig::read_without_data(Some(&settings.with_file_name(CONFIG)), &[]).ok()?.model
    else {
        return None;
    };
    match Folder::open(&base).and_then(|folder| folder.check_saved().map(|()| folder)) {
        Ok(folder) if folder.config().architecture() == config.architecture() => return Some(folder),
        Ok(_) => tracing::warn!(base = %base.display(), "the text part is written alone: its base has been changed"),
        Err(error) => tracing::warn!(%error, "the text part is written alone, without the other parts of the model"),
    }
    None
}

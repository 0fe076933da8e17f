//! The memory that a run will take, planned from its run file.

use gapless_engine::data::Vocabulary;
use gapless_engine::{Report, Trainer};

use super::{ModelConfig, RunConfig, RunError};

impl RunConfig {
    /// Plans every rank; the reports give the bytes that [`train`](super::train) reserves, exactly. Reads neither data
    /// nor weights, only files that determine sizes: the config.json of a model folder, or the tokenizer that the file
    /// names. If a vocabulary will be trained on the data, it is assumed to reach the size that the file asks for.
    ///
    /// # Errors
    /// Returns the errors of [`TrainerBuilder::plan`](crate::TrainerBuilder::plan), and an error if a tokenizer or
    /// config.json cannot be read.
    pub fn plan(&self) -> Result<Vec<Report>, RunError> {
        let architecture = self.planned_model()?.architecture()?;
        Ok(Trainer::builder(|vb| architecture.model(vb), self.options()).plan_all()?)
    }

    /// The model with the vocabulary size that the data will give it, as far as that is known without reading them. A
    /// model folder keeps its own.
    pub fn planned_model(&self) -> Result<ModelConfig, RunError> {
        match (&self.model, &self.data.tokenizer) {
            (ModelConfig::Folder(_), _) => Ok(self.model.clone()),
            (_, Some(file)) => Ok(self.model(Vocabulary::open_with(file, &self.data.text_options())?.size())),
            _ if self.data.decides_vocabulary() => Ok(self.model(self.data.vocabulary_size())),
            _ => Ok(self.model.with_positions(self.step.sequence)),
        }
    }
}

//! What a run's file takes, before the run.

use gapless_engine::data::Vocabulary;
use gapless_engine::{Report, Trainer};

use super::{ModelConfig, RunConfig, RunError};

impl RunConfig {
    /// The plan of every rank: the bytes that [`train`](super::train) reserves, to the byte. Reads neither data nor weights, only what
    /// gives extents: a model folder's config.json, or the tokenizer that the file names. A vocabulary that is trained on the data is
    /// taken to become as large as the file asks for.
    ///
    /// # Errors
    /// As [`TrainerBuilder::plan`](crate::TrainerBuilder::plan); a tokenizer or a config.json that cannot be read.
    pub fn plan(&self) -> Result<Vec<Report>, RunError> {
        let architecture = self.planned_model()?.architecture()?;
        Ok(Trainer::builder(|vb| architecture.model(vb), self.options()).plan_all()?)
    }

    /// The model with the vocabulary that data will give it, as far as that is known without them. A model's folder has its own number.
    pub fn planned_model(&self) -> Result<ModelConfig, RunError> {
        match (&self.model, &self.data.tokenizer) {
            (ModelConfig::Folder(_), _) => Ok(self.model.clone()),
            (_, Some(file)) => Ok(self.model(Vocabulary::open_with(file, &self.data.text_options())?.size())),
            _ if self.data.decides_vocabulary() => Ok(self.model(self.data.vocabulary_size())),
            _ => Ok(self.model.with_positions(self.step.sequence)),
        }
    }
}

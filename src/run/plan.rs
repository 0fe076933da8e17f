//! The memory that a run will take, planned from its run file.

use gapless_engine::data::Vocabulary;
use gapless_engine::{Report, Trainer};

use super::{ModelConfig, RunConfig, RunError};

impl RunConfig {
    /// Plans every rank. The reports give exactly the bytes that [`train`](super::train) reserves. No data or weights
    /// are read, only files that determine sizes: a model folder's config.json, or the tokenizer named in the run file.
    /// A vocabulary that is still to be trained is assumed to reach the size set in the run file.
    ///
    /// # Errors
    /// Returns the errors of [`TrainerBuilder::plan`](crate::TrainerBuilder::plan), and an error if a tokenizer or
    /// config.json cannot be read.
    pub fn plan(&self) -> Result<Vec<Report>, RunError> {
        let architecture = self.planned_model()?.architecture()?;
        Ok(Trainer::builder(|vb| architecture.model(vb), self.options()).plan_all()?)
    }

    /// Returns the model with the vocabulary size that it will have in the run. A vocabulary that is trained on the
    /// data is assumed to reach its maximum size. A model folder keeps its own vocabulary size, and so does any model
    /// if `[data]` does not determine the vocabulary.
    pub fn planned_model(&self) -> Result<ModelConfig, RunError> {
        match (&self.model, &self.data.tokenizer) {
            (ModelConfig::Folder(_), _) => Ok(self.model.clone()),
            (_, Some(file)) => Ok(self.model(Vocabulary::open_with(file, &self.data.text_options())?.size())),
            _ if self.data.decides_vocabulary() => Ok(self.model(self.data.vocabulary_size())),
            _ => Ok(self.model.with_positions(self.step.sequence)),
        }
    }
}

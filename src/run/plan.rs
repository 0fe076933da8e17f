//! What a run's file takes, before the run.

use gapless_engine::data::Vocabulary;
use gapless_engine::{Report, TrainError, Trainer};

use super::{ModelConfig, RunConfig, RunError};

impl RunConfig {
    /// The plan of every rank: the bytes that [`train`](super::train) reserves, to the byte. Reads neither data nor weights, only what
    /// gives extents: a model folder's config.json, or the tokenizer that the file names. A vocabulary that is trained on the data is
    /// taken to become as large as the file asks for.
    ///
    /// # Errors
    /// As [`Trainer::plan_run`]; a configuration that [`Self::check_keys`] refuses, a tokenizer or a config.json that cannot be read.
    pub fn plan(&self) -> Result<Vec<Report>, RunError> {
        self.check_keys()?;
        let options = self.options()?;
        let architecture = self.model(self.planned_vocabulary()?).architecture()?;
        let plan = |rank| Trainer::plan_run(|vb| architecture.model(vb), &options, rank);
        let ranks = options.mesh.ranks().map_err(TrainError::from)?;
        Ok((0..ranks).map(plan).collect::<Result<_, _>>()?)
    }

    /// Tokens of the vocabulary, without the data. A model's folder has its own number, whatever this is.
    fn planned_vocabulary(&self) -> Result<usize, RunError> {
        Ok(match (&self.model, &self.data.tokenizer) {
            (ModelConfig::Folder(_), _) | (_, None) => self.data.vocabulary_size(),
            (_, Some(file)) => Vocabulary::open_with(file, &self.data.text_options())?.size(),
        })
    }
}

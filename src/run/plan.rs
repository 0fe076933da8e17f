//! What a run's file takes, before the run.

use gapless_engine::data::Vocabulary;
use gapless_engine::{Report, TrainOptions, Trainer};
use gapless_models::hf::Config;
use gapless_models::{Gpt, Llama, Moe};

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
        let model = self.model(self.planned_vocabulary()?);
        let ranks = options.mesh.ranks().map_err(gapless_engine::TrainError::from)?;
        (0..ranks).map(|rank| plan_rank(&model, &options, rank)).collect()
    }

    /// Tokens of the vocabulary, without the data. Of a model's folder the folder decides.
    fn planned_vocabulary(&self) -> Result<usize, RunError> {
        Ok(match (&self.data.tokenizer, &self.model) {
            (_, ModelConfig::Folder(folder)) => Config::read(folder)?.vocabulary(),
            (Some(file), _) => Vocabulary::open_with(file, &self.data.text_options())?.size(),
            (None, _) => self.data.vocabulary_size(),
        })
    }
}

fn plan_rank(model: &ModelConfig, options: &TrainOptions, rank: usize) -> Result<Report, RunError> {
    Ok(match model {
        ModelConfig::Gpt(gpt) => Trainer::plan_run(|vb| Gpt::new(gpt, vb), options, rank)?,
        ModelConfig::Llama(llama) => Trainer::plan_run(|vb| Llama::new(llama, vb), options, rank)?,
        ModelConfig::Moe(moe) => Trainer::plan_run(|vb| Moe::new(moe, vb), options, rank)?,
        ModelConfig::Folder(folder) => {
            let config = Config::read(folder)?;
            Trainer::plan_run(|vb| config.model(vb), options, rank)?
        }
    })
}

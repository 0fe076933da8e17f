//! The memory that a run will take, planned from its run file.

use std::fmt;

use gapless_engine::data::Vocabulary;
use gapless_engine::{Report, Trainer};
use serde::Serialize;

use super::{ModelConfig, RunConfig, RunError};

/// The work of the fullest context rank over the mean of all, in scores that causal attention computes.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct ContextBalance {
    /// In sequences of one text.
    pub one_text: f64,
    /// In the first batch of the run, whose sequences hold documents. `None` if the run has no documents, or if its data do
    /// not exist.
    pub documents: Option<f64>,
}

impl fmt::Display for ContextBalance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let one_text = self.one_text;
        write!(f, "context ranks: the fullest computes {one_text:.3} × the mean of attention's scores ")?;
        match self.documents {
            Some(documents) => write!(f, "without documents, and {documents:.3} × in the first batch of the data"),
            None => write!(f, "without documents"),
        }
    }
}

impl RunConfig {
    /// Returns the balance of the context ranks, or `None` if there is one. If sequences hold documents and the data exist,
    /// they are tokenized, or opened from the cache.
    ///
    /// # Errors
    /// Returns the errors of [`Self::dataset`], and an error if the data are too short for a batch.
    pub fn context_balance(&self) -> Result<Option<ContextBalance>, RunError> {
        let step = self.options().step;
        let size = step.batch * step.sequence;
        let one_text = if step.mesh.context > 1 { step.context_balance(&vec![0; step.sequence]) } else { None };
        let Some(one_text) = one_text else { return Ok(None) };
        let documents = match step.documents && self.data.path.exists() {
            true => {
                let training = self.dataset()?.training(step.sequence, step.batch, self.seed)?;
                let [mut tokens, mut targets, mut starts] = [(); 3].map(|()| vec![0; size]);
                training.fill_documents(0, 0, &mut tokens, &mut targets, &mut starts)?;
                step.context_balance(&starts)
            }
            false => None,
        };
        Ok(Some(ContextBalance { one_text, documents }))
    }

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

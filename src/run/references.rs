//! Log-likelihoods of the answers of a run on preferences: under the reference model, which are measured once at the
//! start of the run, and under the trained model at each evaluation.

use std::fs;
use std::path::Path;

use gapless_engine::data::{TrainingWindows, ValidationWindows};
use gapless_engine::nn::{Answer, Preference, Rewards};
use gapless_engine::{Batch, IGNORED, TrainError, Trainer};
use serde::{Deserialize, Serialize};

use super::folder::write;
use super::{ConfigError, EvaluationBatch, RunError};

/// Name of the file in a run's folder.
pub(super) const REFERENCE: &str = "reference.json";

/// The log-likelihoods of all answers of a run under its reference model: sums of log p over the tokens of each answer.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct References {
    /// Hashes of the validation data, which may change when a run is resumed.
    #[serde(default)]
    validation_data: String,
    /// The answers of training, in the order of [`TrainingWindows::all`].
    training: Vec<f32>,
    /// The answers of validation, in the order of the windows.
    validation: Vec<f32>,
}

impl References {
    /// Measures the answers of all windows with the trainer's present weights.
    ///
    /// # Errors
    /// Returns an error if reading fails, and the errors of [`Trainer::log_likelihoods`].
    pub fn measure(
        trainer: &mut Trainer,
        training: &TrainingWindows,
        validation: Option<&ValidationWindows>,
    ) -> Result<Self, RunError> {
        let sums = |answers: Vec<Answer>| answers.into_iter().map(|answer| answer.log_likelihood as f32).collect();
        let training = sums(answers(trainer, &training.all())?);
        let validation = validation.map(|windows| answers(trainer, windows)).transpose()?.map_or(Vec::new(), sums);
        Ok(Self { training, validation, validation_data: String::new() })
    }

    /// Writes the values into a run's folder. `validation_data` identifies the validation data.
    pub(super) fn save(&mut self, folder: &Path, validation_data: &str) -> Result<(), RunError> {
        validation_data.clone_into(&mut self.validation_data);
        let text = serde_json::to_string(self).expect("lists of finite numbers are JSON");
        write(&folder.join(REFERENCE), &format!("{text}\n"))
    }

    /// Reads the values that an earlier process of the run has written.
    ///
    /// # Errors
    /// Returns an error if the file is missing or broken, or if its values are of other validation data.
    pub(super) fn open(folder: &Path, validation_data: &str) -> Result<Self, RunError> {
        let path = folder.join(REFERENCE);
        let io = |source| RunError::Io { what: format!("cannot read {}", path.display()), source };
        let found: Self = serde_json::from_slice(&fs::read(&path).map_err(io)?).map_err(|error| io(error.into()))?;
        if found.validation_data != validation_data {
            let why = format!("{} has the reference of other validation data", path.display());
            let remedy = "set evaluation.path and evaluation.windows as they were when the run started";
            return Err(ConfigError::value("evaluation", why, remedy).into());
        }
        Ok(found)
    }

    /// Writes the values of the batch of `step` to `batch`, which has one element per sequence.
    pub(super) fn fill(&self, windows: &TrainingWindows, step: u64, batch: &mut [f32]) {
        for (index, value) in batch.iter_mut().enumerate() {
            *value = self.training[windows.index(step, index)];
        }
    }

    /// Returns the number of answers of training and of validation.
    pub fn count(&self) -> (usize, usize) {
        (self.training.len(), self.validation.len())
    }
}

/// Returns the mean loss and the mean rewards of the pairs of all validation windows. `references` is needed if the
/// loss has a reference.
///
/// # Errors
/// Returns an error if reading fails, and the errors of [`Trainer::log_likelihoods`].
pub fn validation_rewards(
    trainer: &mut Trainer,
    windows: &ValidationWindows,
    preference: &Preference,
    references: Option<&References>,
) -> Result<(f32, Rewards), RunError> {
    let mut answers = answers(trainer, windows)?;
    if let Some(references) = references.filter(|_| preference.needs_reference()) {
        answers.iter_mut().zip(&references.validation).for_each(|(answer, known)| answer.reference = f64::from(*known));
    }
    let (loss, rewards) = preference.of_pairs(answers.as_chunks().0);
    Ok((loss as f32, rewards))
}

/// Measures the answers of all windows, without a reference.
fn answers(trainer: &mut Trainer, windows: &ValidationWindows) -> Result<Vec<Answer>, RunError> {
    let (batch, sequence) = (trainer.options().step.evaluation_batch(), trainer.options().step.sequence);
    if windows.sequence() != sequence {
        let (name, given) = ("tokens of a window".to_owned(), windows.sequence());
        return Err(TrainError::ElementCount { name, expected: sequence, given }.into());
    }
    let (mut room, mut answers) = (EvaluationBatch::new(trainer), Vec::with_capacity(windows.count()));
    for first in (0..windows.count()).step_by(batch) {
        let count = batch.min(windows.count() - first);
        let [tokens, targets, starts] = room.windows(count, sequence);
        windows.fill_documents(first, tokens, targets, starts)?;
        room.pad(count * sequence);
        let EvaluationBatch { tokens, targets, starts } = &room;
        let sums = trainer.log_likelihoods(&Batch { tokens, targets, starts })?;
        let answer = |(index, (sum, targets)): (usize, (f32, &[u32]))| {
            let tokens = targets.iter().filter(|&&target| target != IGNORED).count();
            let is_desirable = windows.is_desirable(first + index);
            Answer { log_likelihood: f64::from(sum), reference: 0.0, tokens, is_desirable }
        };
        answers.extend(sums.into_iter().zip(targets.chunks_exact(sequence)).take(count).enumerate().map(answer));
    }
    Ok(answers)
}

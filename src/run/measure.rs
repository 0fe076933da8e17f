//! The loss of windows, whatever the batch of the trainer that measures it.

use gapless_engine::{Batch, TrainError, Trainer};
use gapless_engine::{IGNORED, data::ValidationWindows};

use super::RunError;

/// Room for a batch of an evaluation.
#[derive(Debug, Clone, Default)]
pub struct EvaluationBatch {
    /// Ids [batch × sequence].
    pub tokens: Vec<u32>,
    /// The id that follows each of them, or [`IGNORED`].
    pub targets: Vec<u32>,
    /// Where in its sequence the document of each token begins; empty if the trainer does not tell documents apart.
    pub starts: Vec<u32>,
}

/// The loss of some tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Measured {
    /// Summed over the targets that count.
    pub sum: f64,
    /// How many these are.
    pub counted: usize,
}

impl Measured {
    /// With others.
    #[must_use]
    pub fn with(self, other: Self) -> Self {
        Self { sum: self.sum + other.sum, counted: self.counted + other.counted }
    }

    /// The mean over the targets that count, if there are any.
    pub fn mean(self) -> Option<f64> {
        (self.counted > 0).then(|| self.sum / self.counted as f64)
    }
}

impl EvaluationBatch {
    /// For an evaluation of this trainer.
    pub fn new(trainer: &Trainer) -> Self {
        let options = trainer.options();
        let size = options.step.evaluation_batch() * options.step.sequence;
        let starts = if options.step.documents { size } else { 0 };
        Self { tokens: vec![0; size], targets: vec![0; size], starts: vec![0; starts] }
    }

    /// The first `windows` of the batch: tokens, targets, and where documents begin.
    pub fn windows(&mut self, windows: usize, sequence: usize) -> [&mut [u32]; 3] {
        let size = windows * sequence;
        let starts = size.min(self.starts.len());
        [&mut self.tokens[..size], &mut self.targets[..size], &mut self.starts[..starts]]
    }

    /// The loss of the first `windows` of the batch. What the evaluation computes besides does not count: padding, where the trainer
    /// knows of it; else the same windows again as often as they fit, and the first, whose own loss is then measured and taken off.
    ///
    /// # Errors
    /// Those of [`Trainer::evaluate_batch`].
    pub fn measure(&mut self, trainer: &mut Trainer, windows: usize) -> Result<Measured, TrainError> {
        let (batch, sequence) = (trainer.options().step.evaluation_batch(), trainer.options().step.sequence);
        let size = windows * sequence;
        let counted = self.targets[..size].iter().filter(|&&target| target != IGNORED).count();
        if counted == 0 {
            return Ok(Measured::default());
        }
        if trainer.options().step.documents {
            self.tokens[size..].fill(0);
            self.targets[size..].fill(IGNORED);
            self.starts[size..].fill(0);
        } else {
            self.repeat(windows, sequence);
        }
        let mean = self.evaluate(trainer)?;
        let (times, rest) = (batch / windows, batch % windows);
        if trainer.options().step.documents || rest == 0 {
            return Ok(Measured { sum: mean * counted as f64, counted });
        }
        self.repeat(1, sequence);
        let sum = (mean * batch as f64 - self.evaluate(trainer)? * rest as f64) / times as f64;
        Ok(Measured { sum: sum * sequence as f64, counted })
    }

    fn evaluate(&self, trainer: &mut Trainer) -> Result<f64, TrainError> {
        let Self { tokens, targets, starts } = self;
        trainer.evaluate_batch(&Batch { tokens, targets, starts }).map(f64::from)
    }

    /// Fills the batch with its first `windows`, whole times, and then with the first of all.
    fn repeat(&mut self, windows: usize, sequence: usize) {
        for ids in [&mut self.tokens, &mut self.targets] {
            let batch = ids.len() / sequence;
            for window in windows..batch {
                let from = if window < batch / windows * windows { window % windows } else { 0 };
                ids.copy_within(from * sequence..(from + 1) * sequence, window * sequence);
            }
        }
    }
}

/// Mean loss over what counts of all validation windows: −log p alone, without whatever else a training loss counts. It is that of the
/// windows, to rounding, whatever the batch, its micro-batches and ranks. None if no target counts.
///
/// # Errors
/// A read that fails; those of [`Trainer::evaluate_batch`].
pub fn validation_loss(trainer: &mut Trainer, windows: &ValidationWindows) -> Result<Option<f32>, RunError> {
    let (batch, sequence) = (trainer.options().step.evaluation_batch(), trainer.options().step.sequence);
    if windows.sequence() != sequence {
        let (name, given) = ("tokens of a window".to_owned(), windows.sequence());
        return Err(TrainError::ElementCount { name, expected: sequence, given }.into());
    }
    let (mut room, mut measured) = (EvaluationBatch::new(trainer), Measured::default());
    for first in (0..windows.count()).step_by(batch) {
        let count = batch.min(windows.count() - first);
        let [tokens, targets, starts] = room.windows(count, sequence);
        windows.fill_documents(first, tokens, targets, starts)?;
        measured = measured.with(room.measure(trainer, count)?);
    }
    Ok(measured.mean().map(|mean| mean as f32))
}

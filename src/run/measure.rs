//! The loss of validation windows, independent of the batch size of the trainer that measures it.

use gapless_engine::{Batch, TrainError, Trainer};
use gapless_engine::{IGNORED, data::ValidationWindows};

use super::RunError;

/// Buffers for one batch of an evaluation.
#[derive(Debug, Clone, Default)]
pub struct EvaluationBatch {
    /// Token ids, [batch × sequence].
    pub tokens: Vec<u32>,
    /// The id that follows each token, or [`IGNORED`].
    pub targets: Vec<u32>,
    /// For each token, the position at which the token's document begins, counted from the start of the sequence. Empty
    /// if the trainer does not separate documents.
    pub starts: Vec<u32>,
}

/// The loss of a set of tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct WindowLoss {
    /// Sum of the losses of the targets that count.
    pub sum: f64,
    /// Number of targets that count.
    pub counted: usize,
}

impl WindowLoss {
    /// Returns the loss of these and `other` tokens together.
    #[must_use]
    pub fn with(self, other: Self) -> Self {
        Self { sum: self.sum + other.sum, counted: self.counted + other.counted }
    }

    /// Returns the mean over the targets that count, or `None` if no target counts.
    pub fn mean(self) -> Option<f64> {
        (self.counted > 0).then(|| self.sum / self.counted as f64)
    }
}

impl EvaluationBatch {
    /// Creates buffers for the evaluation of this trainer.
    pub fn new(trainer: &Trainer) -> Self {
        let options = trainer.options();
        let size = options.step.evaluation_batch() * options.step.sequence;
        let starts = if options.step.documents { size } else { 0 };
        Self { tokens: vec![0; size], targets: vec![0; size], starts: vec![0; starts] }
    }

    /// Returns the buffers for the first `windows` windows of the batch, which the caller must fill: tokens, targets
    /// and document starts.
    pub fn windows(&mut self, windows: usize, sequence: usize) -> [&mut [u32]; 3] {
        let size = windows * sequence;
        let starts = size.min(self.starts.len());
        [&mut self.tokens[..size], &mut self.targets[..size], &mut self.starts[..starts]]
    }

    /// Measures the loss of the first `windows` windows of the batch. The rest of the batch does not change the result,
    /// and is overwritten:
    /// - If the trainer separates documents, the rest is filled with padding.
    /// - If not, all `windows` windows are repeated as often as they fit as a whole. Copies of the first window fill
    ///   what remains. Their loss is measured by a second evaluation, and subtracted.
    ///
    /// # Errors
    /// Returns the errors of [`Trainer::evaluate_batch`].
    pub fn measure(&mut self, trainer: &mut Trainer, windows: usize) -> Result<WindowLoss, TrainError> {
        let (batch, sequence) = (trainer.options().step.evaluation_batch(), trainer.options().step.sequence);
        let size = windows * sequence;
        let counted = self.targets[..size].iter().filter(|&&target| target != IGNORED).count();
        if counted == 0 {
            return Ok(WindowLoss::default());
        }
        if trainer.options().step.documents {
            self.pad(size);
        } else {
            self.repeat(windows, sequence);
        }
        let mean = self.evaluate(trainer)?;
        let (times, rest) = (batch / windows, batch % windows);
        if trainer.options().step.documents || rest == 0 {
            return Ok(WindowLoss { sum: mean * counted as f64, counted });
        }
        self.repeat(1, sequence);
        let sum = (mean * batch as f64 - self.evaluate(trainer)? * rest as f64) / times as f64;
        Ok(WindowLoss { sum: sum * sequence as f64, counted })
    }

    /// Fills the batch with padding, from token `size` on.
    pub(super) fn pad(&mut self, size: usize) {
        self.tokens[size..].fill(0);
        self.targets[size..].fill(IGNORED);
        self.starts[size..].fill(0);
    }

    fn evaluate(&self, trainer: &mut Trainer) -> Result<f64, TrainError> {
        let Self { tokens, targets, starts } = self;
        trainer.evaluate_batch(&Batch { tokens, targets, starts }).map(f64::from)
    }

    /// Repeats the first `windows` windows as often as they fit as a whole, and fills the rest of the batch with copies
    /// of the first window.
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

/// Returns the mean −log p over the targets of all validation windows, without the other terms of a training loss. Up
/// to rounding, the result does not depend on the numbers of sequences, micro-batches or ranks. Returns `None` if no
/// target counts.
///
/// # Errors
/// Returns an error if reading fails, and the errors of [`Trainer::evaluate_batch`].
pub fn validation_loss(trainer: &mut Trainer, windows: &ValidationWindows) -> Result<Option<f32>, RunError> {
    let (batch, sequence) = (trainer.options().step.evaluation_batch(), trainer.options().step.sequence);
    if windows.sequence() != sequence {
        let (name, given) = ("tokens of a window".to_owned(), windows.sequence());
        return Err(TrainError::ElementCount { name, expected: sequence, given }.into());
    }
    let (mut room, mut measured) = (EvaluationBatch::new(trainer), WindowLoss::default());
    for first in (0..windows.count()).step_by(batch) {
        let count = batch.min(windows.count() - first);
        let [tokens, targets, starts] = room.windows(count, sequence);
        windows.fill_documents(first, tokens, targets, starts)?;
        measured = measured.with(room.measure(trainer, count)?);
    }
    Ok(measured.mean().map(|mean| mean as f32))
}

//! The largest batch that fits.

use std::fmt;

use gapless_engine::TrainError;
use gapless_engine::compile::Error as CompileError;
use serde::Serialize;

use super::{Limit, Step};

/// The largest batch that fits.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LargestBatch {
    /// Number of sequences of the batch.
    pub batch: usize,
    /// Number of sequences of the next larger batch, which does not fit. A batch is a multiple of the number of
    /// micro-batches over all ranks that share it.
    pub next: usize,
    /// Number of batches that were planned.
    pub planned: usize,
}

impl Step {
    /// Finds the largest batch whose arenas are within a limit, with the step's number of micro-batches. Returns `None`
    /// if not even the smallest batch fits.
    ///
    /// # Errors
    /// Returns an error if the smallest batch cannot be planned.
    pub fn largest_batch(&self, limit: &Limit) -> Result<Option<LargestBatch>, TrainError> {
        let smallest = self.options.parts();
        let mut planned = 0;
        let mut fits = |factor: usize| -> Result<bool, TrainError> {
            let mut step = self.clone();
            step.options.batch = smallest.saturating_mul(factor);
            // Options refuse a batch with more tokens than any step has, and compiling one with too many bytes.
            if factor > 1 && step.options.check().is_err() {
                return Ok(false);
            }
            planned += 1;
            match step.fits(limit.clone()) {
                Ok(fits) => Ok(fits.fits),
                Err(TrainError::Compile(CompileError::TooLarge { .. })) if factor > 1 => Ok(false),
                Err(error) => Err(error),
            }
        };
        // `low` fits, and `high` does not.
        let (mut low, mut high) = (0, 1);
        while fits(high)? {
            (low, high) = (high, 2 * high);
        }
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            if fits(middle)? { low = middle } else { high = middle }
        }
        Ok((low > 0).then_some(LargestBatch { batch: low * smallest, next: high * smallest, planned }))
    }
}

impl fmt::Display for LargestBatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { batch, next, planned } = self;
        write!(f, "largest batch that fits: {batch} sequences; {next} do not fit ({planned} batches were planned)")
    }
}

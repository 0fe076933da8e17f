//! The windows of an evaluation: the same ones each time, spread evenly.

use std::ops::Range;
use std::sync::Arc;

use super::{Cut, documents, fill, shares};
use crate::{DataError, Tokens};

/// The same windows at every evaluation, spread evenly over a stream.
#[derive(Debug, Clone)]
pub struct ValidationWindows {
    /// Each with how many of the windows are its.
    parts: Vec<(Cut, usize)>,
}

impl ValidationWindows {
    /// At most `count` windows, evenly spread over the tokens of `range`.
    ///
    /// # Errors
    /// A range shorter than one window and the target of its last token; a size of zero.
    pub fn new(tokens: Arc<Tokens>, range: Range<u64>, sequence: usize, count: usize) -> Result<Self, DataError> {
        Self::of(vec![(Cut::new(tokens, range, None, sequence, "validation")?, 1.0)], count)
    }

    /// Of parts with their weights.
    pub(crate) fn of(parts: Vec<(Cut, f64)>, count: usize) -> Result<Self, DataError> {
        if count == 0 {
            return Err(DataError::Zero { what: "the number of validation windows" });
        }
        let shares = shares(&parts, count);
        let most = |cut: &Cut| usize::try_from(cut.all()).unwrap_or(usize::MAX);
        let with_count = |((cut, _), share): ((Cut, f64), usize)| {
            let count = share.min(most(&cut));
            (cut, count)
        };
        Ok(Self { parts: parts.into_iter().zip(shares).map(with_count).collect() })
    }

    /// How many windows there are.
    pub fn count(&self) -> usize {
        self.parts.iter().map(|(_, count)| count).sum()
    }

    /// Tokens in a window.
    pub fn sequence(&self) -> usize {
        self.parts[0].0.sequence
    }

    /// Which window is number `index`: its part, and there the position of its first token within the stream; of examples, the number of
    /// the row.
    pub(super) fn start(&self, mut index: usize) -> (&Cut, u64) {
        let mut parts = self.parts.iter();
        let (cut, count) = loop {
            let (cut, count) = parts.next().expect("windows are counted");
            match index.checked_sub(*count) {
                Some(rest) => index = rest,
                None => break (cut, *count),
            }
        };
        let window = (index as u128 * u128::from(cut.all()) / count as u128) as u64;
        (cut, cut.nth(window))
    }

    /// Writes windows `first..`, as many as the slices hold. Allocates nothing.
    ///
    /// # Errors
    /// Slices that don't hold whole windows, or more than there are; a read that fails.
    pub fn fill(&self, first: usize, inputs: &mut [u32], targets: &mut [u32]) -> Result<(), DataError> {
        fill(self.sequence(), self.count(), first, |index| self.start(index), inputs, targets)
    }

    /// [`Self::fill`], as [`TrainingWindows::fill_documents`](super::TrainingWindows::fill_documents).
    ///
    /// # Errors
    /// As there.
    pub fn fill_documents(
        &self,
        first: usize,
        inputs: &mut [u32],
        targets: &mut [u32],
        starts: &mut [u32],
    ) -> Result<(), DataError> {
        self.fill(first, inputs, targets)?;
        documents(self.sequence(), |index| self.start(first + index), inputs, targets, starts)
    }
}

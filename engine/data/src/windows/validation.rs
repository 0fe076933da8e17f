//! The windows of an evaluation. They are always the same ones, evenly spread.

use std::ops::Range;
use std::sync::Arc;

use super::{WindowSource, documents, fill, shares};
use crate::{DataError, Tokens};

/// The same windows in every evaluation, evenly spread over a stream.
#[derive(Debug, Clone)]
pub struct ValidationWindows {
    /// Each part, with its number of windows.
    parts: Vec<(WindowSource, usize)>,
}

impl ValidationWindows {
    /// Creates at most `count` windows, evenly spread over the tokens of `range`.
    ///
    /// # Errors
    /// Returns an error if the range is shorter than one window plus the target of its last token, or if a size is
    /// zero.
    pub fn new(tokens: Arc<Tokens>, range: Range<u64>, sequence: usize, count: usize) -> Result<Self, DataError> {
        Self::of(vec![(WindowSource::new(tokens, range, None, sequence, "validation")?, 1.0)], count)
    }

    /// Creates windows over several parts with their weights.
    pub(crate) fn of(parts: Vec<(WindowSource, f64)>, count: usize) -> Result<Self, DataError> {
        if count == 0 {
            return Err(DataError::Zero { what: "the number of validation windows" });
        }
        let shares = shares(&parts, count);
        let most = |cut: &WindowSource| usize::try_from(cut.all()).unwrap_or(usize::MAX);
        let with_count = |((cut, _), share): ((WindowSource, f64), usize)| {
            // A group of windows stays together.
            let group = cut.group() as usize;
            let count = share.min(most(&cut)).next_multiple_of(group);
            (cut, count)
        };
        Ok(Self { parts: parts.into_iter().zip(shares).map(with_count).collect() })
    }

    /// Creates windows that are all windows of several parts.
    pub(super) fn all(parts: Vec<WindowSource>) -> Self {
        let with_count = |cut: WindowSource| {
            let count = cut.all() as usize;
            (cut, count)
        };
        Self { parts: parts.into_iter().map(with_count).collect() }
    }

    /// Number of windows.
    pub fn count(&self) -> usize {
        self.parts.iter().map(|(_, count)| count).sum()
    }

    /// Tokens in a window.
    pub fn sequence(&self) -> usize {
        self.parts[0].0.sequence
    }

    /// Finds window `index`. Returns the window's part and the window's start. The start is the position of the first
    /// token in the stream, or the index of the row of examples.
    pub(super) fn start(&self, mut index: usize) -> (&WindowSource, u64) {
        let mut parts = self.parts.iter();
        let (cut, count) = loop {
            let (cut, count) = parts.next().expect("windows are counted");
            match index.checked_sub(*count) {
                Some(rest) => index = rest,
                None => break (cut, *count),
            }
        };
        let group = cut.group();
        let (index, count) = (index as u64, count as u64);
        let at = u128::from(index / group) * u128::from(cut.all() / group) / u128::from(count / group);
        let window = group * at as u64 + index % group;
        (cut, cut.nth(window))
    }

    /// Like [`TrainingWindows::is_desirable`](super::TrainingWindows::is_desirable), for window `index`.
    pub fn is_desirable(&self, index: usize) -> bool {
        let (cut, row) = self.start(index);
        cut.is_desirable(row)
    }

    /// Writes windows `first..`, as many as the slices hold. Allocates nothing.
    ///
    /// # Errors
    /// Returns an error if the slices do not hold whole windows, if the windows extend past the last one, or if a read
    /// fails.
    pub fn fill(&self, first: usize, inputs: &mut [u32], targets: &mut [u32]) -> Result<(), DataError> {
        fill(self.sequence(), self.count(), first, |index| self.start(index), inputs, targets)
    }

    /// Like [`Self::fill`]. It also writes the starts of documents, like
    /// [`TrainingWindows::fill_documents`](super::TrainingWindows::fill_documents).
    ///
    /// # Errors
    /// Returns an error in the same cases as
    /// [`TrainingWindows::fill_documents`](super::TrainingWindows::fill_documents).
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

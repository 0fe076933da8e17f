//! The windows of a training run. Each epoch visits all windows, in an order of its own.

use std::ops::Range;
use std::sync::Arc;

use super::{ValidationWindows, WindowSource, documents, fill, shares};
use crate::permutation::mix;
use crate::{DataError, Permutation, Tokens};

/// The batches of a training run: a pure function of seed, step and index.
///
/// The stream is cut into windows of `sequence` tokens. Each epoch draws a new offset for the cuts, and visits all its
/// windows once, in its own order. No state is kept from step to step, so a resumed run only needs the step number.
///
/// ```
/// use std::sync::Arc;
/// use gapless_data::{Tokens, TrainingWindows};
///
/// let tokens = Arc::new(Tokens::from_ids((0..101).collect()));
/// let windows = TrainingWindows::new(tokens, 0..101, 10, 2, 42)?;
/// assert_eq!(windows.per_epoch(), 9); // nine of ten tokens, and room to shift the borders
///
/// let (mut inputs, mut targets) = ([0; 20], [0; 20]);
/// windows.fill(3, 0, &mut inputs, &mut targets)?;
/// assert_eq!(targets, inputs.map(|token| token + 1));
/// # Ok::<(), gapless_data::DataError>(())
/// ```
#[derive(Debug, Clone)]
pub struct TrainingWindows {
    /// Each part, with the range of [`PLACES`] that belongs to it.
    parts: Vec<(WindowSource, Range<u64>)>,
    batch: usize,
    seed: u64,
}

/// The period of a mixture. In each period of this many windows, every part has the number of windows that its weight
/// implies, in a new order.
pub(super) const MIXTURE_PERIOD: u64 = 4096;

impl TrainingWindows {
    /// Creates batches of `batch` windows over the tokens of `range`.
    ///
    /// # Errors
    /// Returns an error if the range is shorter than one window plus the target of its last token, or if a size is
    /// zero.
    pub fn new(
        tokens: Arc<Tokens>,
        range: Range<u64>,
        sequence: usize,
        batch: usize,
        seed: u64,
    ) -> Result<Self, DataError> {
        Self::of(vec![(WindowSource::new(tokens, range, None, sequence, "training")?, 1.0)], batch, seed)
    }

    /// Creates batches over several parts with their weights.
    pub(crate) fn of(parts: Vec<(WindowSource, f64)>, batch: usize, seed: u64) -> Result<Self, DataError> {
        if batch == 0 {
            return Err(DataError::Zero { what: "the batch size" });
        }
        let shares = shares(&parts, MIXTURE_PERIOD as usize);
        let mut first = 0;
        let with_places = |((cut, _), share): ((WindowSource, f64), usize)| {
            let places = first..first + share as u64;
            first = places.end;
            (cut, places)
        };
        Ok(Self { parts: parts.into_iter().zip(shares).map(with_places).collect(), batch, seed })
    }

    /// Returns the number of windows in an epoch. For a mixture, this is the sum over the parts, each of which has its
    /// own epochs. In each epoch, a stream's windows are shifted by up to one window, so if the stream has several
    /// windows, the last window is left out.
    pub fn per_epoch(&self) -> u64 {
        self.parts.iter().map(|(cut, _)| cut.per_epoch()).sum()
    }

    /// Windows in a batch.
    pub fn batch(&self) -> usize {
        self.batch
    }

    /// Tokens in a window.
    pub fn sequence(&self) -> usize {
        self.parts[0].0.sequence
    }

    /// Finds window `index` of the batch of `step`. Returns the part of the data that contains the window, and the
    /// start of the window in this part. In a stream of tokens, the start is the position of the window's first token.
    /// In examples, it is the index of the window's row.
    pub(super) fn start(&self, step: u64, index: usize) -> (&WindowSource, u64) {
        let window = u128::from(step) * self.batch as u128 + index as u128;
        let group = u128::from(self.parts[0].0.group());
        let (visit, at_group) = (window / group, (window % group) as u64);
        if let [(cut, _)] = &self.parts[..] {
            return (cut, cut.visited(visit, self.seed) + at_group);
        }
        // In each period, a part has a fixed number of visits, in which it continues with its own next windows.
        let (round, at) = (visit / u128::from(MIXTURE_PERIOD), (visit % u128::from(MIXTURE_PERIOD)) as u64);
        let place = Permutation::new(MIXTURE_PERIOD, mix(!self.seed ^ mix(round as u64))).at(at);
        let part = self.parts.iter().find(|(_, places)| places.contains(&place));
        let (cut, places) = part.expect("the parts share all places");
        let own = u128::from(places.end - places.start);
        (cut, cut.visited(round * own + u128::from(place - places.start), self.seed) + at_group)
    }

    /// Returns all windows of examples, in the order of [`Self::index`].
    pub fn all(&self) -> ValidationWindows {
        ValidationWindows::all(self.parts.iter().map(|(cut, _)| cut.clone()).collect())
    }

    /// Returns the index in [`Self::all`] of window `index` of the batch of `step`, for windows of examples.
    pub fn index(&self, step: u64, index: usize) -> usize {
        let (cut, row) = self.start(step, index);
        let earlier = self.parts.iter().take_while(|(part, _)| !std::ptr::eq(part, cut));
        (earlier.map(|(part, _)| part.all()).sum::<u64>() + row) as usize
    }

    /// True if the answer in window `index` of the batch of `step` is desirable: for answers with labels the label, and
    /// for pairs whether it is the chosen one.
    pub fn is_desirable(&self, step: u64, index: usize) -> bool {
        let (cut, row) = self.start(step, index);
        cut.is_desirable(row)
    }

    /// Writes windows `first..` of the batch of `step`, as many as the slices hold. These may be a micro-batch, or a
    /// rank's share. Inputs and targets are row-major, windows × sequence. Each target is the token after its input.
    /// Allocates nothing.
    ///
    /// # Errors
    /// Returns an error if the slices do not hold whole windows, if the windows extend past the end of the batch, or if
    /// a read fails.
    pub fn fill(&self, step: u64, first: usize, inputs: &mut [u32], targets: &mut [u32]) -> Result<(), DataError> {
        fill(self.sequence(), self.batch, first, |index| self.start(step, index), inputs, targets)
    }

    /// Like [`Self::fill`]. It also writes to `starts`, for each token, where its document or example begins within the
    /// window. Targets that belong to another document, or that do not count in the loss, become
    /// [`IGNORED`](crate::IGNORED). If `starts` is empty, this is the same as [`Self::fill`].
    ///
    /// # Errors
    /// Returns an error in the same cases as [`Self::fill`], or for bare ids, whose documents are not known.
    pub fn fill_documents(
        &self,
        step: u64,
        first: usize,
        inputs: &mut [u32],
        targets: &mut [u32],
        starts: &mut [u32],
    ) -> Result<(), DataError> {
        self.fill(step, first, inputs, targets)?;
        documents(self.sequence(), |index| self.start(step, first + index), inputs, targets, starts)
    }
}

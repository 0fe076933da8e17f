//! The windows of a training run: each epoch all of them, in an order of its own.

use std::ops::Range;
use std::sync::Arc;

use super::{Cut, documents, fill, shares};
use crate::permutation::mix;
use crate::{DataError, Permutation, Tokens};

/// The batches of a training run: a pure function of seed, step and index.
///
/// The stream is cut into windows of `sequence` tokens, at a border that every epoch draws anew, and each epoch visits all
/// its windows once, in an order of its own. Nothing is remembered from step to step: a resumed run needs the step number
/// alone.
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
    /// Each with the places that it has among [`PLACES`].
    parts: Vec<(Cut, Range<u64>)>,
    batch: usize,
    seed: u64,
}

/// Windows of a mixture of which every part has as many as its weight says, in an order of their own.
pub(super) const PLACES: u64 = 4096;

impl TrainingWindows {
    /// Batches of `batch` windows over the tokens of `range`.
    ///
    /// # Errors
    /// A range shorter than one window and the target of its last token; a size of zero.
    pub fn new(
        tokens: Arc<Tokens>,
        range: Range<u64>,
        sequence: usize,
        batch: usize,
        seed: u64,
    ) -> Result<Self, DataError> {
        Self::of(vec![(Cut::new(tokens, range, None, sequence, "training")?, 1.0)], batch, seed)
    }

    /// Of parts with their weights.
    pub(crate) fn of(parts: Vec<(Cut, f64)>, batch: usize, seed: u64) -> Result<Self, DataError> {
        if batch == 0 {
            return Err(DataError::Zero { what: "the batch size" });
        }
        let shares = shares(&parts, PLACES as usize);
        let mut first = 0;
        let with_places = |((cut, _), share): ((Cut, f64), usize)| {
            let places = first..first + share as u64;
            first = places.end;
            (cut, places)
        };
        Ok(Self { parts: parts.into_iter().zip(shares).map(with_places).collect(), batch, seed })
    }

    /// Windows in an epoch; of a mixture, those of all of its parts, of which each has epochs of its own. The borders of a stream's shift by
    /// up to a window, so that the last one is left out (if there are more).
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

    /// Which window is number `index` of the batch of `step`: its part, and there the position of its first token within the stream; of
    /// examples, the number of the row.
    pub(super) fn start(&self, step: u64, index: usize) -> (&Cut, u64) {
        let visit = u128::from(step) * self.batch as u128 + index as u128;
        if let [(cut, _)] = &self.parts[..] {
            return (cut, cut.visited(visit, self.seed));
        }
        // Every so many windows, each part has its places, at which it goes on where it was.
        let (round, at) = (visit / u128::from(PLACES), (visit % u128::from(PLACES)) as u64);
        let place = Permutation::new(PLACES, mix(!self.seed ^ mix(round as u64))).at(at);
        let part = self.parts.iter().find(|(_, places)| places.contains(&place));
        let (cut, places) = part.expect("the parts share all places");
        let own = u128::from(places.end - places.start);
        (cut, cut.visited(round * own + u128::from(place - places.start), self.seed))
    }

    /// Writes windows `first..` of the batch of `step`, as many as the slices hold: a micro-batch, or a rank's share.
    /// Inputs and targets are row-major, windows × sequence; a target is the token after its input. Allocates nothing.
    ///
    /// # Errors
    /// Slices that don't hold whole windows, or more than the batch has; a read that fails.
    pub fn fill(&self, step: u64, first: usize, inputs: &mut [u32], targets: &mut [u32]) -> Result<(), DataError> {
        fill(self.sequence(), self.batch, first, |index| self.start(step, index), inputs, targets)
    }

    /// [`Self::fill`], and the place in its window where the document, or the example, of each token begins. Targets that stand in
    /// another document, or that the loss does not count, are [`IGNORED`](crate::IGNORED). Without room for `starts`, it is [`Self::fill`].
    ///
    /// # Errors
    /// As [`Self::fill`]; of bare ids, whose documents are not known.
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

//! Packed documents: the additional inputs of a step whose sequences hold several documents.

use crate::error::{Result, TrainError};

/// The target of a token that is excluded from the loss.
pub const IGNORED: u32 = u32::MAX;
#[cfg(feature = "data")]
const _: () = assert!(IGNORED == gapless_data::IGNORED);

/// The data of a training step or an evaluation: the sequences of the batch, one after another.
#[derive(Debug, Clone, Copy)]
pub struct Batch<'a> {
    /// Token ids [batch × sequence].
    pub tokens: &'a [u32],
    /// The id of the token that follows each token, or [`IGNORED`] for tokens that do not count in the loss. `IGNORED`
    /// is only allowed with [`StepOptions::documents`](gapless_compile::step::StepOptions::documents).
    pub targets: &'a [u32],
    /// For each token, the position at which the token's document starts, counted from the start of the sequence. A
    /// document whose targets are all [`IGNORED`] is padding; routers of experts ignore padding. If `starts` is empty,
    /// each sequence is one document up to its last target that is not `IGNORED`, and the rest of the sequence is
    /// padding.
    pub starts: &'a [u32],
}

impl Batch<'_> {
    /// Returns the number of targets that count in the loss, which are all that are not [`IGNORED`].
    pub fn counted(&self) -> usize {
        self.targets.iter().filter(|&&target| target != IGNORED).count()
    }

    /// Returns an error if the batch has document starts or ignored targets, which a step without documents does not
    /// support.
    pub(super) fn expect_no_documents(&self) -> Result<()> {
        let fail = |why: &str| Err(TrainError::config("documents", why, "set TrainOptions::documents"));
        if !self.starts.is_empty() {
            return fail("a batch has document starts");
        }
        if self.targets.contains(&IGNORED) {
            return fail("a batch has ignored targets");
        }
        Ok(())
    }
}

/// The additional inputs of a step over documents. All buffers are allocated before the first step.
#[derive(Debug, Default)]
pub(super) struct DocumentInputs {
    pub starts: Vec<u32>,
    pub positions: Vec<u32>,
    pub targets: Vec<u32>,
    pub weights: Vec<f32>,
    pub routed: Vec<f32>,
}

impl DocumentInputs {
    /// Allocates buffers for batches of at most `tokens` tokens.
    pub fn new(tokens: usize) -> Self {
        let ids = || Vec::with_capacity(tokens);
        let numbers = || Vec::with_capacity(tokens);
        Self { starts: ids(), positions: ids(), targets: ids(), weights: numbers(), routed: numbers() }
    }

    /// Computes the inputs for a batch whose sequences have `sequence` tokens each.
    ///
    /// The loss weight of an ignored target is 0. The loss weight of any other target is `weight` or, if it is `None`,
    /// t ÷ c, where t is the number of tokens of the batch, and c the number of its targets that are not ignored. With
    /// the latter weights, the mean over all tokens equals the mean over the targets that count, however the batch is
    /// divided among ranks. Router weights are computed in the same way, with padding in place of ignored targets.
    ///
    /// # Errors
    /// Returns an error if a document starts after one of its tokens or is not contiguous, or if no target counts.
    pub fn fill(&mut self, batch: &Batch<'_>, sequence: usize, weight: Option<f32>) -> Result<()> {
        let fail = |why, remedy| Err(TrainError::config("documents", why, remedy));
        let tokens = batch.tokens.len();
        let Self { starts, positions, targets, weights, routed } = self;
        // The start of each token's document, and each token's position in its document.
        starts.clear();
        starts.extend_from_slice(batch.starts);
        if batch.starts.is_empty() {
            for targets in batch.targets.chunks_exact(sequence) {
                let end = targets.iter().rposition(|&target| target != IGNORED).map_or(0, |last| last + 1);
                starts.extend((0..sequence).map(|at| if at < end { 0 } else { end as u32 }));
            }
        }
        positions.clear();
        for (index, &start) in starts.iter().enumerate() {
            let at = (index % sequence) as u32;
            // Each token either starts a document or belongs to the document of the preceding token.
            if start != at && (at == 0 || starts[index - 1] != start) {
                let why = format!(
                    "token {at} of sequence {} cannot belong to a document that starts at {start}",
                    index / sequence
                );
                return fail(why, "give each token the position of its document's first token within the sequence");
            }
            positions.push(at - start);
        }
        // Loss weights: if none is given, scaled so that their mean over the batch is 1.
        let counted = batch.counted();
        if counted == 0 {
            return fail(
                "all targets are ignored".to_owned(),
                "give batches with at least one target that is not ignored",
            );
        }
        let weight = weight.unwrap_or((tokens as f64 / counted as f64) as f32);
        targets.clear();
        targets.extend(batch.targets.iter().map(|&target| if target == IGNORED { 0 } else { target }));
        weights.clear();
        weights.extend(batch.targets.iter().map(|&target| if target == IGNORED { 0.0 } else { weight }));
        // Router weights: nonzero for documents with at least one target that counts.
        routed.clear();
        for (starts, mut targets) in starts.chunks_exact(sequence).zip(batch.targets.chunks_exact(sequence)) {
            for document in starts.chunk_by(|a, b| a == b) {
                let (own, others) = targets.split_at(document.len());
                let counts = own.iter().any(|&target| target != IGNORED);
                routed.extend(std::iter::repeat_n(f32::from(u8::from(counts)), own.len()));
                targets = others;
            }
        }
        let weight = (tokens as f64 / routed.iter().map(|&counts| f64::from(counts)).sum::<f64>()) as f32;
        routed.iter_mut().for_each(|counts| *counts *= weight);
        Ok(())
    }
}

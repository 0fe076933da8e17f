//! Packed documents: the inputs of a step in addition to tokens and targets.

use crate::error::{Result, TrainError};

/// The target of a token that does not count in the loss.
pub const IGNORED: u32 = u32::MAX;
#[cfg(feature = "data")]
const _: () = assert!(IGNORED == gapless_data::IGNORED);

/// The data of a training step or an evaluation: the sequences of the batch, one after another.
#[derive(Debug, Clone, Copy)]
pub struct Batch<'a> {
    /// Token ids [batch × sequence].
    pub tokens: &'a [u32],
    /// The next token id after each token, or [`IGNORED`] for tokens that do not count in the loss, which requires
    /// [`StepOptions::documents`](gapless_compile::step::StepOptions::documents).
    pub targets: &'a [u32],
    /// For each token, the index in its sequence at which its document starts. A document without targets that count is
    /// padding, which routers of experts ignore. If empty, each sequence is one document, followed by padding after its
    /// last target that counts.
    pub starts: &'a [u32],
}

impl Batch<'_> {
    /// Number of targets that count.
    pub fn counted(&self) -> usize {
        self.targets.iter().filter(|&&target| target != IGNORED).count()
    }

    /// Checks that the batch needs no support for documents.
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

/// The inputs of a step over documents. Their buffers are allocated before the first step.
#[derive(Debug, Default)]
pub(super) struct DocumentInputs {
    pub starts: Vec<u32>,
    pub positions: Vec<u32>,
    pub targets: Vec<u32>,
    pub weights: Vec<f32>,
    pub routed: Vec<f32>,
}

impl DocumentInputs {
    /// Allocates for batches of at most this many tokens.
    pub fn new(tokens: usize) -> Self {
        let ids = || Vec::with_capacity(tokens);
        let numbers = || Vec::with_capacity(tokens);
        Self { starts: ids(), positions: ids(), targets: ids(), weights: numbers(), routed: numbers() }
    }

    /// Computes the inputs for a batch of sequences of this length.
    ///
    /// The loss weights are such that the mean over all tokens of the batch, on whichever rank, is the mean over the
    /// targets that count. The router weights do the same for tokens that are not padding.
    ///
    /// # Errors
    /// Returns an error if a document starts after its tokens or is not contiguous, or if no target counts.
    pub fn fill(&mut self, batch: &Batch<'_>, sequence: usize) -> Result<()> {
        let fail = |why, remedy| Err(TrainError::config("documents", why, remedy));
        let tokens = batch.tokens.len();
        let Self { starts, positions, targets, weights, routed } = self;
        // The start of each token's document, and the position of each token in it.
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
            // Each token starts a document, or belongs to that of the token before.
            if start != at && (at == 0 || starts[index - 1] != start) {
                let why = format!(
                    "token {at} of sequence {} cannot belong to a document that starts at {start}",
                    index / sequence
                );
                return fail(why, "give each token the position of its document's first token within the sequence");
            }
            positions.push(at - start);
        }
        // Loss weights.
        let counted = batch.counted();
        if counted == 0 {
            return fail(
                "all targets are ignored".to_owned(),
                "give batches with at least one target that is not ignored",
            );
        }
        let weight = (tokens as f64 / counted as f64) as f32;
        targets.clear();
        targets.extend(batch.targets.iter().map(|&target| if target == IGNORED { 0 } else { target }));
        weights.clear();
        weights.extend(batch.targets.iter().map(|&target| if target == IGNORED { 0.0 } else { weight }));
        // Router weights: documents with a target that counts.
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

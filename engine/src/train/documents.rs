//! Packed documents: what a step is told of them beside its tokens and targets.

use crate::error::{Result, TrainError};

/// The target of a token whose loss does not count.
pub const IGNORED: u32 = u32::MAX;
#[cfg(feature = "data")]
const _: () = assert!(IGNORED == gapless_data::IGNORED);

/// What a step, or an evaluation, is given: as many sequences as the batch has, one after another.
#[derive(Debug, Clone, Copy)]
pub struct Batch<'a> {
    /// Ids [batch × sequence].
    pub tokens: &'a [u32],
    /// The id that follows each of them; [`IGNORED`] where the loss does not count it, which needs
    /// [`StepOptions::documents`](gapless_compile::step::StepOptions::documents).
    pub targets: &'a [u32],
    /// Where in its sequence the document of each token begins. A document of which no target counts is padding: routers of experts pay
    /// no attention to it. Empty where each sequence is one document, and padding what follows its last target that counts.
    pub starts: &'a [u32],
}

impl Batch<'_> {
    /// The targets that count.
    pub fn counted(&self) -> usize {
        self.targets.iter().filter(|&&target| target != IGNORED).count()
    }

    /// That nothing of it needs documents.
    pub(super) fn expect_none(&self) -> Result<()> {
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

/// The inputs of a step over documents, whose bytes are there from the first step on.
#[derive(Debug, Default)]
pub(super) struct DocumentInputs {
    pub starts: Vec<u32>,
    pub positions: Vec<u32>,
    pub targets: Vec<u32>,
    pub weights: Vec<f32>,
    pub routed: Vec<f32>,
}

impl DocumentInputs {
    /// For batches of at most so many tokens.
    pub fn new(tokens: usize) -> Self {
        let ids = || Vec::with_capacity(tokens);
        let numbers = || Vec::with_capacity(tokens);
        Self { starts: ids(), positions: ids(), targets: ids(), weights: numbers(), routed: numbers() }
    }

    /// Takes a batch of sequences of so many tokens. A loss that counts is weighted so that the mean over all tokens of the batch,
    /// wherever they are computed, is the mean over those that count; what routers count of a token, by those that are no padding.
    ///
    /// # Errors
    /// Documents that begin behind their tokens, or are not contiguous; a batch in which no target counts.
    pub fn fill(&mut self, batch: &Batch<'_>, sequence: usize) -> Result<()> {
        let fail = |why, remedy| Err(TrainError::config("documents", why, remedy));
        let tokens = batch.tokens.len();
        let Self { starts, positions, targets, weights, routed } = self;
        // The first token of each document, and the place of each token in its own.
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
            // A document begins with this token, or is that of the token before.
            if start != at && (at == 0 || starts[index - 1] != start) {
                let why = format!(
                    "token {at} of sequence {} cannot belong to a document that starts at {start}",
                    index / sequence
                );
                return fail(why, "give each token the position of its document's first token within the sequence");
            }
            positions.push(at - start);
        }
        // What counts.
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
        // What is routed: documents of which a target counts.
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

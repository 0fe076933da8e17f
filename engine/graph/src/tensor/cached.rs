//! Positions of tokens in their texts, and caches of past tokens.

use gapless_kernels::LossTerms;

use super::Tensor;
use crate::error::Result;
use crate::graph::Sequences;
use crate::{lock, ops};

impl Tensor {
    /// Looks up the rows of a table of positions: `self` is [positions, width]. The result has the first `tokens` rows
    /// [tokens, width]; if sequences are continued or documents packed, it has the rows of the tokens' positions
    /// [batch, tokens, width].
    ///
    /// # Errors
    /// Returns an error if the table has too few rows.
    pub fn rows_of_positions(&self, tokens: usize) -> Result<Self> {
        let Some(positions) = self.positions() else { return self.narrow(0, 0, tokens) };
        let (rows, window) = (self.dim(0)?, self.cache_window().unwrap_or(tokens));
        if window > rows {
            return Err(
                self.shape_error("embedding", format!("the table has {rows} positions, but the window has {window}"))
            );
        }
        self.embedding(&positions)
    }

    /// The greatest number of tokens in a sequence, if sequences are continued.
    pub fn cache_window(&self) -> Option<usize> {
        match self.sequences() {
            Sequences::Continued { window, .. } => Some(window),
            Sequences::Whole | Sequences::Packed { .. } => None,
        }
    }

    /// The relation between the tokens of this graph's sequences.
    pub(super) fn sequences(&self) -> Sequences {
        lock(&self.graph).sequences()
    }

    /// The positions of the tokens, if sequences are continued or documents packed.
    pub(super) fn positions(&self) -> Option<Self> {
        match self.sequences() {
            Sequences::Whole => None,
            Sequences::Continued { positions, .. } | Sequences::Packed { positions, .. } => {
                Some(Self::of(&self.graph, positions))
            }
        }
    }

    /// The factors of the targets' losses, if documents are packed.
    ///
    /// # Errors
    /// Returns an error if the number of targets is not that of the tokens.
    pub(super) fn target_weights(&self, targets: &Self) -> Result<Option<Self>> {
        match self.sequences() {
            Sequences::Packed { weights, .. } => {
                Self::of(&self.graph, weights).reshape(targets.shape().clone()).map(Some)
            }
            Sequences::Whole | Sequences::Continued { .. } => Ok(None),
        }
    }

    /// If documents are packed, returns the first token of each token's document, and the weight of each token in a
    /// router's statistics.
    pub(crate) fn documents(&self) -> Option<[Self; 2]> {
        match self.sequences() {
            Sequences::Packed { document_starts, routed, .. } => {
                Some([document_starts, routed].map(|id| Self::of(&self.graph, id)))
            }
            Sequences::Whole | Sequences::Continued { .. } => None,
        }
    }

    /// The terms of a loss over a vocabulary besides −log p of the targets.
    pub(super) fn loss_terms(&self) -> LossTerms {
        lock(&self.graph).loss_terms()
    }

    /// Writes `self` [batch, heads, tokens, size] or [batch, tokens, size] to a cache, after the past tokens, and
    /// returns the cache, with a row for each token of the window. `what` names the cache in the plan. If sequences are
    /// not continued, returns `self`.
    ///
    /// # Errors
    /// Returns an error if there are more tokens than the window has.
    pub fn cached(&self, what: &str) -> Result<Self> {
        let Sequences::Continued { positions, window } = self.sequences() else { return Ok(self.clone()) };
        if self.rank() == 3 {
            return self.unsqueeze(1)?.cached(what)?.squeeze(1);
        }
        let (batch, heads, _, size) = self.dims4()?;
        let spec = self.spec.in_shape((batch, heads, window, size));
        let id = lock(&self.graph).add_cache(what, spec)?;
        let positions = Self::of(&self.graph, positions);
        Self::apply_op::<1>(ops::CacheWrite, &[&Self::of(&self.graph, id), self, &positions]).map(|[cache]| cache)
    }
}

//! Positions of tokens in their texts, and caches of past tokens.

use gapless_kernels::LossTerms;

use super::Tensor;
use crate::error::Result;
use crate::graph::Sequences;
use crate::{lock, ops};

impl Tensor {
    /// Looks up position embeddings in a table `self` [positions, width]. The result is the first `tokens` rows:
    /// [tokens, width]. If the graph has a [position](Sequences) for each token, the result has the rows of these positions:
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

    /// Returns the greatest number of tokens in a text if sequences are continued, and `None` if not.
    pub fn cache_window(&self) -> Option<usize> {
        match self.sequences() {
            Sequences::Continued { window, .. } => Some(window),
            Sequences::Whole | Sequences::Placed { .. } | Sequences::Packed { .. } => None,
        }
    }

    /// Returns the relation between the tokens of this graph's sequences.
    pub(super) fn sequences(&self) -> Sequences {
        lock(&self.graph).sequences()
    }

    /// Returns the positions of the tokens if the graph has a value for them, and `None` if they are simply 0, 1, 2, ….
    pub(super) fn positions(&self) -> Option<Self> {
        match self.sequences() {
            Sequences::Whole => None,
            Sequences::Placed { positions }
            | Sequences::Continued { positions, .. }
            | Sequences::Packed { positions, .. } => Some(Self::of(&self.graph, positions)),
        }
    }

    /// Returns the weights of the losses of `targets` if documents are packed, and `None` if not.
    ///
    /// # Errors
    /// Returns an error if documents are packed and there is not exactly one target per token.
    pub(super) fn target_weights(&self, targets: &Self) -> Result<Option<Self>> {
        match self.sequences() {
            Sequences::Packed { weights, .. } => {
                Self::of(&self.graph, weights).reshape(targets.shape().clone()).map(Some)
            }
            Sequences::Whole | Sequences::Placed { .. } | Sequences::Continued { .. } => Ok(None),
        }
    }

    /// If documents are packed, returns two tensors: the index of the first token of each token's document, and the
    /// weight of each token in a router's statistics. Returns `None` if documents are not packed.
    pub(crate) fn documents(&self) -> Option<[Self; 2]> {
        match self.sequences() {
            Sequences::Packed { document_starts, routed, .. } => {
                Some([document_starts, routed].map(|id| Self::of(&self.graph, id)))
            }
            Sequences::Whole | Sequences::Placed { .. } | Sequences::Continued { .. } => None,
        }
    }

    /// Returns the terms that a loss over a vocabulary has in addition to −log p of the targets.
    pub(super) fn loss_terms(&self) -> LossTerms {
        lock(&self.graph).loss_terms()
    }

    /// Appends `self` to a cache of past tokens, and returns the whole cache, which has a row for each token of the
    /// window. `self` is [batch, heads, tokens, size] or [batch, tokens, size]. `what` names the cache in the plan. If
    /// sequences are not continued, `self` is returned unchanged.
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

//! Where tokens stand in their texts, and caches of what came before.

use gapless_kernels::LossTerms;

use super::Tensor;
use crate::error::Result;
use crate::graph::Sequences;
use crate::{lock, ops};

impl Tensor {
    /// The rows of `self`, a table [positions, width], of as many tokens: the first ones [tokens, width]; where sequences are
    /// continued or documents packed, those of the tokens' places [batch, tokens, width].
    ///
    /// # Errors
    /// When the table has fewer rows.
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

    /// Where sequences are continued: how many tokens one has at most.
    pub fn cache_window(&self) -> Option<usize> {
        match self.sequences() {
            Sequences::Continued { window, .. } => Some(window),
            Sequences::Whole | Sequences::Packed { .. } => None,
        }
    }

    /// What the tokens of this graph's sequences are.
    pub(super) fn sequences(&self) -> Sequences {
        lock(&self.graph).sequences()
    }

    /// Where sequences are continued or documents packed: the places of the tokens.
    pub(super) fn positions(&self) -> Option<Self> {
        match self.sequences() {
            Sequences::Whole => None,
            Sequences::Continued { positions, .. } | Sequences::Packed { positions, .. } => {
                Some(Self::of(&self.graph, positions))
            }
        }
    }

    /// Where documents are packed: what the loss of each target counts.
    ///
    /// # Errors
    /// When there is not one target for each token.
    pub(super) fn weights_of(&self, targets: &Self) -> Result<Option<Self>> {
        match self.sequences() {
            Sequences::Packed { weights, .. } => {
                Self::of(&self.graph, weights).reshape(targets.shape().clone()).map(Some)
            }
            Sequences::Whole | Sequences::Continued { .. } => Ok(None),
        }
    }

    /// Where documents are packed: the first token of each token's document, and what the token counts in the statistics of a router.
    pub(crate) fn documents(&self) -> Option<[Self; 2]> {
        match self.sequences() {
            Sequences::Packed { starts, routed, .. } => Some([starts, routed].map(|id| Self::of(&self.graph, id))),
            Sequences::Whole | Sequences::Continued { .. } => None,
        }
    }

    /// What a loss over a vocabulary counts beside the likelihood.
    pub(super) fn loss_terms(&self) -> LossTerms {
        lock(&self.graph).loss_terms()
    }

    /// `self` [batch, heads, tokens, size] or [batch, tokens, size] behind what a cache has of the tokens before: a row for each token of
    /// the window. `what` names the cache in the plan. `self` where no sequences are continued.
    ///
    /// # Errors
    /// When the window is shorter than the tokens.
    pub fn with_past(&self, what: &str) -> Result<Self> {
        let Sequences::Continued { positions, window } = self.sequences() else { return Ok(self.clone()) };
        if self.rank() == 3 {
            return self.unsqueeze(1)?.with_past(what)?.squeeze(1);
        }
        let (batch, heads, _, size) = self.dims4()?;
        let spec = self.spec.in_shape((batch, heads, window, size));
        let id = lock(&self.graph).add_cache(what, spec)?;
        let positions = Self::of(&self.graph, positions);
        Self::apply_op::<1>(ops::CacheWrite, &[&Self::of(&self.graph, id), self, &positions]).map(|[cache]| cache)
    }
}

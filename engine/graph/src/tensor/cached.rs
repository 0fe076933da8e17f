//! Sequences that are continued: the tokens' places, and caches of what came before.

use super::Tensor;
use crate::error::Result;
use crate::{lock, ops};

impl Tensor {
    /// The rows of `self`, a table [positions, width], of as many tokens: the first ones [tokens, width]; where sequences are
    /// continued, those of the tokens' places [batch, tokens, width].
    ///
    /// # Errors
    /// When the table has fewer rows.
    pub fn rows_of_positions(&self, tokens: usize) -> Result<Self> {
        let (Some(positions), Some(window)) = (self.positions(), self.cache_window()) else {
            return self.narrow(0, 0, tokens);
        };
        let rows = self.dim(0)?;
        if window > rows {
            return Err(self.shape_error("embedding", format!("there are {rows} positions for a window of {window}")));
        }
        self.embedding(&positions)
    }

    /// Where sequences are continued: how many tokens one has at most.
    pub fn cache_window(&self) -> Option<usize> {
        lock(&self.graph).token_cache().map(|cache| cache.window)
    }

    /// Where sequences are continued: the places of the tokens.
    pub(super) fn positions(&self) -> Option<Self> {
        let cache = lock(&self.graph).token_cache();
        cache.map(|cache| Self::of(&self.graph, cache.positions))
    }

    /// `self` [batch, heads, tokens, head size] behind what a cache has of the tokens before: [batch, heads, window, head size].
    pub(super) fn cached(&self, what: &str, positions: &Self) -> Result<Self> {
        let (batch, heads, tokens, size) = self.dims4()?;
        let spec = self.spec.in_shape((batch, heads, self.cache_window().unwrap_or(tokens), size));
        let id = lock(&self.graph).add_cache(what, spec)?;
        Self::apply_op::<1>(ops::CacheWrite, &[&Self::of(&self.graph, id), self, positions]).map(|[cache]| cache)
    }
}

//! What a language model is.

use crate::error::Result;
use crate::tensor::Tensor;

/// A language model: token ids to logits.
pub trait Model {
    /// Logits [batch, tokens, vocabulary] of ids [batch, tokens] (u32). `train` turns dropout on.
    ///
    /// # Errors
    /// When the shapes do not fit.
    fn forward(&self, tokens: &Tensor, train: bool) -> Result<Tensor>;

    /// The loss: a scalar, the mean over all tokens. By default the cross-entropy of the next token, over logits that exist
    /// whole; a model whose last layer is linear does better with
    /// [`Linear::cross_entropy`](super::Linear::cross_entropy).
    ///
    /// # Errors
    /// When the shapes do not fit.
    fn loss(&self, tokens: &Tensor, targets: &Tensor, train: bool) -> Result<Tensor> {
        self.forward(tokens, train)?.cross_entropy(targets)?.mean_all()
    }
}

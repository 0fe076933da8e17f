//! The interface of a language model.

use crate::error::Result;
use crate::tensor::Tensor;

/// A language model, from token ids to logits.
pub trait Model {
    /// Returns logits [batch, tokens, vocabulary] for ids [batch, tokens] (u32). `train` enables dropout.
    ///
    /// # Errors
    /// Returns an error if the shapes do not fit.
    fn forward(&self, tokens: &Tensor, train: bool) -> Result<Tensor>;

    /// Returns the loss: a scalar, the mean over all tokens. The default is the cross-entropy of `targets` under the
    /// logits of [`Self::forward`], which stores the logits as a whole. A model whose last layer is linear can override
    /// this with [`Linear::cross_entropy`](super::Linear::cross_entropy), which needs less memory.
    ///
    /// # Errors
    /// Returns an error if the shapes do not fit.
    fn loss(&self, tokens: &Tensor, targets: &Tensor, train: bool) -> Result<Tensor> {
        self.forward(tokens, train)?.cross_entropy(targets)?.mean_all()
    }
}

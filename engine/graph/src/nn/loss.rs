//! Losses, with the names of `candle_nn::loss`.

use crate::error::Result;
use crate::tensor::Tensor;

/// Mean negative log-likelihood. `inp` [n, classes] holds log-probabilities, and `target` \[n\] holds the classes
/// (u32).
///
/// # Errors
/// Returns an error if the shapes do not fit.
pub fn nll(inp: &Tensor, target: &Tensor) -> Result<Tensor> {
    inp.gather(&target.unsqueeze(1)?, 1)?.mean_all()?.neg()
}

/// Mean cross-entropy of `target` \[n\] (u32) under the logits `inp` [n, classes]; see [`Tensor::cross_entropy`].
///
/// # Errors
/// Returns an error if the shapes do not fit.
pub fn cross_entropy(inp: &Tensor, target: &Tensor) -> Result<Tensor> {
    inp.cross_entropy(target)?.mean_all()
}

/// Mean squared error.
///
/// # Errors
/// Returns an error if the shapes differ.
pub fn mse(inp: &Tensor, target: &Tensor) -> Result<Tensor> {
    (inp - target)?.sqr()?.mean_all()
}

/// Mean binary cross-entropy of `target` (floats between 0 and 1) under logits of the same shape. The loss of a logit x
/// and a target t is max(x, 0) − x·t + ln(1 + e⁻|ˣ|).
///
/// # Errors
/// Returns an error if the shapes differ.
pub fn binary_cross_entropy_with_logit(inp: &Tensor, target: &Tensor) -> Result<Tensor> {
    let tail = (inp.abs()?.neg()?.exp()? + 1.0)?.log()?;
    ((inp.relu()? - (inp * target)?)? + tail)?.mean_all()
}

/// Mean Huber loss, which is quadratic for differences below `delta` and linear above.
///
/// # Errors
/// Returns an error if the shapes differ.
pub fn huber(inp: &Tensor, target: &Tensor, delta: f64) -> Result<Tensor> {
    let difference = (inp - target)?.abs()?;
    let squares = (difference.sqr()? * 0.5)?;
    let lines = ((&difference * delta)? - 0.5 * delta * delta)?;
    difference.le(delta)?.where_cond(&squares, &lines)?.mean_all()
}

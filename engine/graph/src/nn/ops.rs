//! Free functions, with the names of `candle_nn::ops`.

use candle_core::D;
use candle_core::shape::Dim;

use super::ModuleT;
use crate::error::{Error, Result};
use crate::tensor::Tensor;

/// Softmax over one dimension.
///
/// # Errors
/// Returns an error if there is no such dimension.
pub fn softmax<D: Dim>(xs: &Tensor, dim: D) -> Result<Tensor> {
    let (dim, last) = (dim.to_index(xs.shape(), "softmax")?, xs.rank() - 1);
    xs.transpose(dim, last)?.softmax_last_dim()?.transpose(dim, last)
}

/// Softmax over the last dimension.
///
/// # Errors
/// Returns an error if the rank is 0.
pub fn softmax_last_dim(xs: &Tensor) -> Result<Tensor> {
    xs.softmax_last_dim()
}

/// ln softmax over one dimension.
///
/// # Errors
/// Returns an error if there is no such dimension.
pub fn log_softmax<D: Dim>(xs: &Tensor, dim: D) -> Result<Tensor> {
    let dim = dim.to_index(xs.shape(), "log_softmax")?;
    xs.broadcast_sub(&xs.log_sum_exp(dim)?.unsqueeze(dim)?)
}

/// 1/(1+e⁻ˣ).
///
/// # Errors
/// Returns an error if the type is not a float type.
pub fn sigmoid(xs: &Tensor) -> Result<Tensor> {
    xs.sigmoid()
}

/// x·sigmoid(x).
///
/// # Errors
/// Returns an error if the type is not a float type.
pub fn silu(xs: &Tensor) -> Result<Tensor> {
    xs.silu()
}

/// silu of the first half of the last dimension, times the second half.
///
/// # Errors
/// Returns an error if the last dimension is odd.
pub fn swiglu(xs: &Tensor) -> Result<Tensor> {
    match &*xs.chunk(2, D::Minus1)? {
        [gate, up] => gate.swiglu(up),
        _ => Err(Error::msg("swiglu: the last dimension must have two equal halves")),
    }
}

/// (x + 3)/6, limited to the range from 0 to 1.
///
/// # Errors
/// Returns an error if the type is not a float type.
pub fn hard_sigmoid(xs: &Tensor) -> Result<Tensor> {
    ((xs + 3.0)? / 6.0)?.clamp(0.0, 1.0)
}

/// x·tanh(ln(1 + eˣ)) (Misra, arXiv 1908.08681).
///
/// # Errors
/// Returns an error if the type is not a float type.
pub fn mish(xs: &Tensor) -> Result<Tensor> {
    xs * (1.0 + xs.exp()?)?.log()?.tanh()
}

/// x if x is positive, and `negative_slope`·x if not.
///
/// # Errors
/// Returns an error if the type is not a float type.
pub fn leaky_relu(xs: &Tensor, negative_slope: f64) -> Result<Tensor> {
    xs.relu()? + xs.minimum(0.0)? * negative_slope
}

/// Sets elements to zero at random; see [`Tensor::dropout`].
///
/// # Errors
/// Returns an error if p is outside [0, 1).
pub fn dropout(xs: &Tensor, drop_p: f32) -> Result<Tensor> {
    xs.dropout(f64::from(drop_p))
}

/// Root-mean-square normalisation; see [`Tensor::rms_norm`].
///
/// # Errors
/// Returns an error if `alpha` is not `[width]`.
pub fn rms_norm(xs: &Tensor, alpha: &Tensor, eps: f32) -> Result<Tensor> {
    xs.rms_norm(alpha, f64::from(eps))
}

/// Layer normalisation; see [`Tensor::layer_norm`].
///
/// # Errors
/// Returns an error if `alpha` or `beta` is not `[width]`.
pub fn layer_norm(xs: &Tensor, alpha: &Tensor, beta: &Tensor, eps: f32) -> Result<Tensor> {
    xs.layer_norm(alpha, beta, f64::from(eps))
}

/// Scaled dot-product attention. Without a mask, the attention is fused: [`Tensor::causal_attention`] if `do_causal` is
/// true, [`Tensor::attention`] if not. With a mask, this is [`Tensor::masked_attention`].
///
/// # Errors
/// Returns the errors of the named methods, and an error if a mask is given and `do_causal` is true, or if scores are
/// soft-capped (`softcapping` other than 1).
pub fn sdpa(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    mask: Option<&Tensor>,
    do_causal: bool,
    scale: f32,
    softcapping: f32,
) -> Result<Tensor> {
    if softcapping != 1.0 {
        return Err(Error::msg("sdpa: soft-capped scores have no kernel; compose them from matmul, tanh and softmax"));
    }
    let scale = f64::from(scale);
    match (mask, do_causal) {
        (None, true) => q.causal_attention(k, v, scale),
        (None, false) => q.attention(k, v, scale),
        (Some(mask), false) => q.masked_attention(k, v, mask, scale),
        (Some(_), true) => {
            Err(Error::msg("sdpa: a mask and causal attention exclude each other; put causality into the mask"))
        }
    }
}

/// A layer that sets elements to zero at random while training.
#[derive(Debug, Clone)]
pub struct Dropout {
    drop_p: f32,
}

impl Dropout {
    /// Creates a layer that sets each element to zero with probability `drop_p`.
    pub fn new(drop_p: f32) -> Self {
        Self { drop_p }
    }

    /// Applies [`Tensor::dropout`] if `train` is true; returns the tensor unchanged if not.
    ///
    /// # Errors
    /// Returns an error if the probability is outside [0, 1).
    pub fn forward(&self, xs: &Tensor, train: bool) -> Result<Tensor> {
        if train { dropout(xs, self.drop_p) } else { Ok(xs.clone()) }
    }
}

impl ModuleT for Dropout {
    fn forward_t(&self, xs: &Tensor, train: bool) -> Result<Tensor> {
        self.forward(xs, train)
    }
}

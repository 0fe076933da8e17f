//! Rotary position embedding from tables of cosines and sines, as in `candle_nn::rotary_emb`. [`Tensor::rope`] has a kernel, and
//! needs no tables.

use candle_core::D;

use crate::error::Result;
use crate::tensor::Tensor;

/// Rotates the halves of heads against each other: `xs` [batch, heads, tokens, size], `cos` and `sin` [tokens or more, size ÷ 2].
///
/// # Errors
/// When the shapes do not fit.
pub fn rope(xs: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    let (_, _, tokens, size) = xs.dims4()?;
    let (cos, sin) = (cos.narrow(0, 0, tokens)?, sin.narrow(0, 0, tokens)?);
    let [a, b] = [xs.narrow(D::Minus1, 0, size / 2)?, xs.narrow(D::Minus1, size / 2, size - size / 2)?];
    let first = (a.broadcast_mul(&cos)? - b.broadcast_mul(&sin)?)?;
    let second = (b.broadcast_mul(&cos)? + a.broadcast_mul(&sin)?)?;
    Tensor::cat(&[first, second], D::Minus1)
}

/// [`rope`], under the name of its differentiable form.
///
/// # Errors
/// As [`rope`].
pub fn rope_slow(xs: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    rope(xs, cos, sin)
}

/// Rotates neighbours against each other; shapes as for [`rope`].
///
/// # Errors
/// When the shapes do not fit.
pub fn rope_i(xs: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    let (batch, heads, tokens, size) = xs.dims4()?;
    let table = |table: &Tensor| table.narrow(0, 0, tokens)?.reshape((tokens, size / 2, 1));
    let (cos, sin) = (table(cos)?, table(sin)?);
    let pairs = xs.reshape((batch, heads, tokens, size / 2, 2))?;
    let [a, b] = [pairs.narrow(D::Minus1, 0, 1)?, pairs.narrow(D::Minus1, 1, 1)?];
    let first = (a.broadcast_mul(&cos)? - b.broadcast_mul(&sin)?)?;
    let second = (a.broadcast_mul(&sin)? + b.broadcast_mul(&cos)?)?;
    Tensor::cat(&[first, second], D::Minus1)?.reshape((batch, heads, tokens, size))
}

//! Rotary position embedding from tables of cosines and sines, with the names of `candle_nn::rotary_emb`.
//! [`Tensor::rope`] computes the same without tables, with one kernel.

use candle_core::D;

use crate::error::Result;
use crate::tensor::Tensor;

/// Rotates pairs of elements that are half a head apart. `xs` is [batch, heads, tokens, size]. `cos` and `sin` are
/// [positions, size ÷ 2] with at least as many positions as tokens.
///
/// # Errors
/// Returns an error if the shapes do not fit.
pub fn rope(xs: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    let (_, _, tokens, size) = xs.dims4()?;
    let (cos, sin) = (cos.narrow(0, 0, tokens)?, sin.narrow(0, 0, tokens)?);
    let [a, b] = [xs.narrow(D::Minus1, 0, size / 2)?, xs.narrow(D::Minus1, size / 2, size - size / 2)?];
    let first = (a.broadcast_mul(&cos)? - b.broadcast_mul(&sin)?)?;
    let second = (b.broadcast_mul(&cos)? + a.broadcast_mul(&sin)?)?;
    Tensor::cat(&[first, second], D::Minus1)
}

/// The same as [`rope`]. In candle, this is the name of the differentiable form.
///
/// # Errors
/// Returns the errors of [`rope`].
pub fn rope_slow(xs: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    rope(xs, cos, sin)
}

/// Rotates pairs of adjacent elements. The shapes are the same as for [`rope`].
///
/// # Errors
/// Returns an error if the shapes do not fit.
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

//! Group normalisation (Wu & He, arXiv 1803.08494).

use super::{Init, Module, VarBuilder};
use crate::error::{Error, Result};
use crate::tensor::Tensor;

/// Normalises [batch, channels, ..] over groups of channels.
#[derive(Debug, Clone)]
pub struct GroupNorm {
    weight: Tensor,
    bias: Tensor,
    eps: f64,
    num_groups: usize,
}

impl GroupNorm {
    /// Creates a layer from its parameters, which have one element per channel.
    ///
    /// # Errors
    /// Returns an error if the groups do not divide the channels.
    pub fn new(weight: Tensor, bias: Tensor, num_channels: usize, num_groups: usize, eps: f64) -> Result<Self> {
        if num_groups == 0 || !num_channels.is_multiple_of(num_groups) {
            return Err(Error::msg(format!("GroupNorm: {num_groups} groups do not divide {num_channels} channels")));
        }
        Ok(Self { weight, bias, eps, num_groups })
    }
}

impl Module for GroupNorm {
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        let (batch, channels) = (xs.dim(0)?, xs.dim(1)?);
        let groups = xs.reshape((batch, self.num_groups, ()))?;
        let centred = groups.broadcast_sub(&groups.mean_keepdim(2)?)?;
        let deviation = (centred.sqr()?.mean_keepdim(2)? + self.eps)?.sqrt()?;
        let normalised = centred.broadcast_div(&deviation)?.reshape(xs.dims().to_vec())?;
        let mut dims = vec![1; xs.rank()];
        dims[1] = channels;
        normalised.broadcast_mul(&self.weight.reshape(dims.clone())?)?.broadcast_add(&self.bias.reshape(dims)?)
    }
}

/// Declares a group normalisation with `weight` and `bias` `[channels]` under the builder's path.
///
/// # Errors
/// Returns an error if the groups do not divide the channels, or if parameters of these names are already declared with
/// other shapes.
pub fn group_norm(num_groups: usize, num_channels: usize, eps: f64, vb: VarBuilder) -> Result<GroupNorm> {
    let weight = vb.get_with_hints(num_channels, "weight", Init::Const(1.0))?;
    let bias = vb.get_with_hints(num_channels, "bias", Init::Const(0.0))?;
    GroupNorm::new(weight, bias, num_channels, num_groups, eps)
}

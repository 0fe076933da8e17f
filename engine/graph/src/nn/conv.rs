//! Convolutions over one and two dimensions.

use super::{Init, Module, VarBuilder};
use crate::error::Result;
use crate::tensor::Tensor;

/// The padding, stride, dilation and groups of a convolution, the same along every dimension.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConvConfig {
    /// Number of zeros added at each end.
    pub padding: usize,
    /// Distance between adjacent positions of the kernel.
    pub stride: usize,
    /// Distance between adjacent elements of the kernel.
    pub dilation: usize,
    /// Number of groups into which the channels are divided, each with a kernel of its own.
    pub groups: usize,
}

impl Default for ConvConfig {
    fn default() -> Self {
        Self { padding: 0, stride: 1, dilation: 1, groups: 1 }
    }
}

/// Convolution over the `RANK` dimensions (1 or 2) that follow [batch, channels].
#[derive(Debug, Clone)]
pub struct Conv<const RANK: usize> {
    weight: Tensor,
    bias: Option<Tensor>,
    config: ConvConfig,
}

/// Convolution of [batch, channels, length].
pub type Conv1d = Conv<1>;
/// [`ConvConfig`] under candle's name.
pub type Conv1dConfig = ConvConfig;
/// Convolution of [batch, channels, height, width].
pub type Conv2d = Conv<2>;
/// [`ConvConfig`] under candle's name.
pub type Conv2dConfig = ConvConfig;

impl<const RANK: usize> Conv<RANK> {
    /// Creates a layer from its kernel [channels out, channels in ÷ groups, ..] and an optional bias \[channels out\].
    pub fn new(weight: Tensor, bias: Option<Tensor>, config: ConvConfig) -> Self {
        Self { weight, bias, config }
    }

    /// The kernel.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// The bias.
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }

    /// Declares a layer under the builder's path. Its initial values are uniform within 1/√n, where n is the number of
    /// inputs of an output element.
    fn make(
        inputs: usize,
        outputs: usize,
        size: usize,
        config: ConvConfig,
        biased: bool,
        vb: &VarBuilder,
    ) -> Result<Self> {
        let shape = [&[outputs, inputs / config.groups.max(1)], &[size; RANK][..]].concat();
        let bound = 1.0 / (shape[1..].iter().product::<usize>().max(1) as f64).sqrt();
        let init = Init::Uniform { lo: -bound, up: bound };
        let weight = vb.get_with_hints(shape, "weight", init)?;
        let bias = biased.then(|| vb.get_with_hints(outputs, "bias", init)).transpose()?;
        Ok(Self { weight, bias, config })
    }
}

impl<const RANK: usize> Module for Conv<RANK> {
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        let ConvConfig { padding, stride, dilation, groups } = self.config;
        let out = match RANK {
            1 => xs.conv1d(&self.weight, padding, stride, dilation, groups)?,
            _ => xs.conv2d(&self.weight, padding, stride, dilation, groups)?,
        };
        match &self.bias {
            Some(bias) => out.broadcast_add(&bias.reshape([&[bias.elem_count()], &[1; RANK][..]].concat())?),
            None => Ok(out),
        }
    }
}

/// Declares a layer with `weight` and `bias` under the builder's path.
///
/// # Errors
/// Returns an error if parameters of these names are already declared with other shapes.
pub fn conv1d(inputs: usize, outputs: usize, size: usize, config: Conv1dConfig, vb: VarBuilder) -> Result<Conv1d> {
    Conv::make(inputs, outputs, size, config, true, &vb)
}

/// Declares a layer with `weight` under the builder's path.
///
/// # Errors
/// Returns an error if a parameter of this name is already declared with another shape.
pub fn conv1d_no_bias(
    inputs: usize,
    outputs: usize,
    size: usize,
    config: Conv1dConfig,
    vb: VarBuilder,
) -> Result<Conv1d> {
    Conv::make(inputs, outputs, size, config, false, &vb)
}

/// Declares a layer with `weight` and `bias` under the builder's path.
///
/// # Errors
/// Returns an error if parameters of these names are already declared with other shapes.
pub fn conv2d(inputs: usize, outputs: usize, size: usize, config: Conv2dConfig, vb: VarBuilder) -> Result<Conv2d> {
    Conv::make(inputs, outputs, size, config, true, &vb)
}

/// Declares a layer with `weight` under the builder's path.
///
/// # Errors
/// Returns an error if a parameter of this name is already declared with another shape.
pub fn conv2d_no_bias(
    inputs: usize,
    outputs: usize,
    size: usize,
    config: Conv2dConfig,
    vb: VarBuilder,
) -> Result<Conv2d> {
    Conv::make(inputs, outputs, size, config, false, &vb)
}

//! The norms of a decoder.

use gapless_engine::nn::{
    LayerNorm, Module, RmsNorm, VarBuilder, layer_norm, layer_norm_no_bias, rms_norm, rms_norm_offset,
};
use gapless_engine::{Result, Tensor};

use crate::llama::LlamaConfig;
use crate::traits::NormKind;

/// A norm over the last dimension.
#[derive(Debug, Clone)]
pub(crate) enum Norm {
    Rms(RmsNorm),
    Layer(LayerNorm),
}

impl Norm {
    /// Declares a norm over `width` elements with the configured epsilon and form.
    pub(crate) fn new(config: &LlamaConfig, width: usize, vb: VarBuilder) -> Result<Self> {
        let eps = config.rms_norm_eps;
        Ok(match config.traits.norm {
            NormKind::Rms if config.offset_norms => Self::Rms(rms_norm_offset(width, eps, vb)?),
            NormKind::Rms => Self::Rms(rms_norm(width, eps, vb)?),
            NormKind::Layer => Self::Layer(layer_norm(width, eps, vb)?),
            NormKind::LayerNoBias => Self::Layer(layer_norm_no_bias(width, eps, vb)?),
        })
    }
}

impl Module for Norm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::Rms(norm) => norm.forward(x),
            Self::Layer(norm) => norm.forward(x),
        }
    }
}

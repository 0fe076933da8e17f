//! The norms of a decoder.

use gapless_engine::graph::lock;
use gapless_engine::nn::{
    Init, LayerNorm, Module, RmsNorm, VarBuilder, layer_norm, layer_norm_no_bias, rms_norm, rms_norm_offset,
};
use gapless_engine::{Result, Tensor};

use crate::llama::LlamaConfig;
use crate::traits::NormKind;

/// A norm over the last dimension.
#[derive(Debug, Clone)]
pub(crate) enum Norm {
    Rms(RmsNorm),
    Layer(LayerNorm),
    /// Layer norm that multiplies by 1 + weight.
    OffsetLayer {
        weight: Tensor,
        bias: Tensor,
        eps: f64,
    },
    /// Layer norms of [batch, tokens, heads, head size], of which each head has its own weight.
    OfHeads {
        plain: LayerNorm,
        weight: Tensor,
    },
}

impl Norm {
    /// Declares a norm over `width` elements with the configured epsilon and form.
    pub(crate) fn new(config: &LlamaConfig, width: usize, vb: VarBuilder) -> Result<Self> {
        let eps = config.rms_norm_eps;
        Ok(match config.traits.norm {
            NormKind::Rms if config.offset_norms => Self::Rms(rms_norm_offset(width, eps, vb)?),
            NormKind::Rms => Self::Rms(rms_norm(width, eps, vb)?),
            NormKind::Layer if config.offset_norms => {
                let parameter = |name: &str| vb.get_with_hints(width, name, Init::Const(0.0));
                Self::OffsetLayer { weight: parameter("weight")?, bias: parameter("bias")?, eps }
            }
            NormKind::Layer => Self::Layer(layer_norm(width, eps, vb)?),
            NormKind::LayerNoBias => Self::Layer(layer_norm_no_bias(width, eps, vb)?),
            NormKind::LayerNoWeight => Self::Layer(plain_layer(config, width, &vb)?),
            NormKind::RmsNoWeight => Self::no_weight(config, width, &vb)?,
        })
    }

    /// Returns a root-mean-square norm without a weight.
    pub(crate) fn no_weight(config: &LlamaConfig, width: usize, vb: &VarBuilder) -> Result<Self> {
        let ones = Tensor::ones(width, vb.dtype(), vb.device())?;
        Ok(Self::Rms(RmsNorm::new(ones, config.rms_norm_eps)))
    }

    /// Declares a layer norm without a bias for each head: `weight` [heads, head size]. Optimizers treat its rows as vectors.
    pub(crate) fn of_heads(config: &LlamaConfig, heads: usize, head_size: usize, vb: VarBuilder) -> Result<Self> {
        let weight = vb.get_with_hints((heads, head_size), "weight", Init::Const(1.0))?;
        lock(vb.device()).mark_vectors(weight.id());
        Ok(Self::OfHeads { plain: plain_layer(config, head_size, &vb)?, weight })
    }
}

/// Returns a layer norm without parameters.
fn plain_layer(config: &LlamaConfig, width: usize, vb: &VarBuilder) -> Result<LayerNorm> {
    let (ones, zeros) = (Tensor::ones(width, vb.dtype(), vb.device())?, Tensor::zeros(width, vb.dtype(), vb.device())?);
    Ok(LayerNorm::new(ones, zeros, config.rms_norm_eps))
}

impl Module for Norm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::Rms(norm) => norm.forward(x),
            Self::Layer(norm) => norm.forward(x),
            Self::OffsetLayer { weight, bias, eps } => x.layer_norm(&weight.affine(1.0, 1.0)?, bias, *eps),
            Self::OfHeads { plain, weight } => plain.forward(x)?.broadcast_mul(weight),
        }
    }
}

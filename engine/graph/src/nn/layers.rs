//! The most common layers.

use super::adapter::Adapter;
use super::quantize::Weight;
use super::{Init, Module, VarBuilder};
use crate::error::Result;
use crate::graph::lock;
use crate::tensor::Tensor;

/// A linear layer: x·Wᵀ + b, plus the contribution of an adapter if the layer has one.
#[derive(Debug, Clone)]
pub struct Linear {
    weight: Weight,
    bias: Option<Tensor>,
    adapter: Option<Adapter>,
    layer: String,
}

impl Linear {
    /// Creates a layer from its parameters: weight [out, in] and an optional bias `[out]`. The layer has no adapter.
    pub fn new(weight: Tensor, bias: Option<Tensor>, layer: &str) -> Self {
        Self { weight: Weight::Plain(weight), bias, adapter: None, layer: layer.into() }
    }

    /// Declares the layer's parameters under the builder's path. If adapters are configured for this layer, declares
    /// those of an adapter too.
    fn declare((in_dim, out_dim): (usize, usize), bias: bool, init: Init, vb: &VarBuilder) -> Result<Self> {
        let weight = Weight::declare((in_dim, out_dim), init, vb)?;
        let bias = bias.then(|| vb.get_with_hints(out_dim, "bias", Init::Const(0.0))).transpose()?;
        Ok(Self { weight, bias, adapter: Adapter::of(in_dim, out_dim, vb)?, layer: vb.prefix().into() })
    }

    /// Returns the cross-entropy of each target (u32, [..]), for a layer that is the head of a language model. The
    /// logits are the layer's output for `xs` [.., in]. If the layer has no bias and no adapter, the logits are never
    /// stored as a whole (see [`Tensor::linear_cross_entropy`]).
    ///
    /// # Errors
    /// Returns an error if the shapes do not fit.
    pub fn cross_entropy(&self, xs: &Tensor, targets: &Tensor) -> Result<Tensor> {
        self.capped_cross_entropy(xs, targets, None)
    }

    /// Like [`Self::cross_entropy`]. If `cap` is given, the logits are capped as by [`Tensor::cap`].
    ///
    /// # Errors
    /// Returns an error if the shapes do not fit.
    pub fn capped_cross_entropy(&self, xs: &Tensor, targets: &Tensor, cap: Option<f64>) -> Result<Tensor> {
        if let Weight::Plain(weight) = &self.weight {
            lock(weight.device()).mark_head(weight.id());
            if self.bias.is_none() && self.adapter.is_none() {
                let _layer = xs.enter(&self.layer);
                return xs.capped_cross_entropy(weight, targets, cap);
            }
        }
        let logits = self.forward(xs)?;
        cap.map_or(Ok(logits.clone()), |cap| logits.cap(cap))?.cross_entropy(targets)
    }
}

impl Module for Linear {
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        let _layer = xs.enter(&self.layer);
        match &self.adapter {
            Some(adapter) => adapter.forward(xs, &self.weight, self.bias.as_ref()),
            None => self.weight.forward(xs, self.bias.as_ref()),
        }
    }
}

/// Default initial values of weights.
const WEIGHTS: Init = Init::Randn { mean: 0.0, stdev: 0.02 };

/// Declares a layer with `weight` [out, in] and `bias` `[out]` under the builder's path.
///
/// # Errors
/// Returns an error if parameters of these names are already declared with other shapes.
pub fn linear(in_dim: usize, out_dim: usize, vb: VarBuilder) -> Result<Linear> {
    linear_with_hints(in_dim, out_dim, WEIGHTS, vb)
}

/// Like [`linear`], with the initial values `weight` for the weight.
///
/// # Errors
/// Returns an error if parameters of these names are already declared with other shapes.
pub fn linear_with_hints(in_dim: usize, out_dim: usize, weight: Init, vb: VarBuilder) -> Result<Linear> {
    Linear::declare((in_dim, out_dim), true, weight, &vb)
}

/// Declares a layer with `weight` [out, in] under the builder's path.
///
/// # Errors
/// Returns an error if a parameter of this name is already declared with another shape.
pub fn linear_no_bias(in_dim: usize, out_dim: usize, vb: VarBuilder) -> Result<Linear> {
    Linear::declare((in_dim, out_dim), false, WEIGHTS, &vb)
}

/// Declares a layer like [`linear`] if `bias` is true, and like [`linear_no_bias`] if not.
///
/// # Errors
/// Returns an error if parameters of these names are already declared with other shapes.
pub fn linear_b(in_dim: usize, out_dim: usize, bias: bool, vb: VarBuilder) -> Result<Linear> {
    if bias { linear(in_dim, out_dim, vb) } else { linear_no_bias(in_dim, out_dim, vb) }
}

/// A table whose rows are looked up by ids.
#[derive(Debug, Clone)]
pub struct Embedding {
    embeddings: Tensor,
    padding: Option<u32>,
    layer: String,
}

impl Embedding {
    /// Creates a layer from its table [vocabulary, width].
    pub fn new(embeddings: Tensor, _width: usize) -> Self {
        Self { embeddings, padding: None, layer: String::new() }
    }

    /// Sets the id whose row gets no gradient, like PyTorch's `padding_idx`. `None` means that all rows get one.
    #[must_use]
    pub fn with_padding(self, padding: Option<u32>) -> Self {
        Self { padding, ..self }
    }

    /// The table [vocabulary, width], for a head that is tied to it.
    pub fn embeddings(&self) -> &Tensor {
        &self.embeddings
    }
}

impl Module for Embedding {
    fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        let _layer = ids.enter(&self.layer);
        self.embeddings.padded_embedding(ids, self.padding)
    }
}

/// Declares a table `weight` [vocabulary, width] under the builder's path.
///
/// # Errors
/// Returns an error if a parameter of this name is already declared with another shape.
pub fn embedding(vocabulary: usize, width: usize, vb: VarBuilder) -> Result<Embedding> {
    Ok(Embedding { embeddings: vb.get((vocabulary, width), "weight")?, padding: None, layer: vb.prefix().into() })
}

/// Layer normalisation.
#[derive(Debug, Clone)]
pub struct LayerNorm {
    weight: Tensor,
    bias: Tensor,
    eps: f64,
    layer: String,
}

impl LayerNorm {
    /// Creates a layer from its parameters, `[width]` each.
    pub fn new(weight: Tensor, bias: Tensor, eps: f64) -> Self {
        Self { weight, bias, eps, layer: String::new() }
    }
}

impl Module for LayerNorm {
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        let _layer = xs.enter(&self.layer);
        xs.layer_norm(&self.weight, &self.bias, self.eps)
    }
}

/// Declares a layer normalisation with `weight` and `bias` `[width]` under the builder's path.
///
/// # Errors
/// Returns an error if parameters of these names are already declared with other shapes.
pub fn layer_norm(width: usize, eps: f64, vb: VarBuilder) -> Result<LayerNorm> {
    let weight = vb.get_with_hints(width, "weight", Init::Const(1.0))?;
    let bias = vb.get_with_hints(width, "bias", Init::Const(0.0))?;
    Ok(LayerNorm { weight, bias, eps, layer: vb.prefix().into() })
}

/// Like [`layer_norm`], without the bias.
///
/// # Errors
/// Returns an error if a parameter of this name is already declared with another shape.
pub fn layer_norm_no_bias(width: usize, eps: f64, vb: VarBuilder) -> Result<LayerNorm> {
    let weight = vb.get_with_hints(width, "weight", Init::Const(1.0))?;
    let bias = Tensor::zeros(width, vb.dtype(), vb.device())?;
    Ok(LayerNorm { weight, bias, eps, layer: vb.prefix().into() })
}

/// Root-mean-square normalisation.
#[derive(Debug, Clone)]
pub struct RmsNorm {
    weight: Tensor,
    eps: f64,
    /// True if the norm multiplies by 1 + weight.
    is_offset: bool,
    layer: String,
}

impl RmsNorm {
    /// Creates a layer from its parameter `[width]`.
    pub fn new(weight: Tensor, eps: f64) -> Self {
        Self { weight, eps, is_offset: false, layer: String::new() }
    }
}

impl Module for RmsNorm {
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        let _layer = xs.enter(&self.layer);
        match self.is_offset {
            true => xs.rms_norm(&self.weight.affine(1.0, 1.0)?, self.eps),
            false => xs.rms_norm(&self.weight, self.eps),
        }
    }
}

/// Declares a root-mean-square normalisation with `weight` `[width]` under the builder's path.
///
/// # Errors
/// Returns an error if a parameter of this name is already declared with another shape.
pub fn rms_norm(width: usize, eps: f64, vb: VarBuilder) -> Result<RmsNorm> {
    let weight = vb.get_with_hints(width, "weight", Init::Const(1.0))?;
    Ok(RmsNorm { weight, eps, is_offset: false, layer: vb.prefix().into() })
}

/// Like [`rms_norm`], but multiplies by 1 + weight, as in Gemma. The weights are initially 0, and weight decay draws
/// the factor 1 + weight towards 1.
///
/// # Errors
/// Returns an error if a parameter of this name is already declared with another shape.
pub fn rms_norm_offset(width: usize, eps: f64, vb: VarBuilder) -> Result<RmsNorm> {
    let weight = vb.get_with_hints(width, "weight", Init::Const(0.0))?;
    Ok(RmsNorm { weight, eps, is_offset: true, layer: vb.prefix().into() })
}

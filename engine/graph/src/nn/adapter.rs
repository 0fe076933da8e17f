//! LoRA and DoRA adapters of linear layers.

use super::quantize::Weight;
use super::{Init, VarBuilder};
use crate::error::Result;
use crate::graph::lock;
use crate::tensor::Tensor;

/// Name of the parameter A [rank, in] under the layer's path.
pub(super) const LORA_A: &str = "lora_A.weight";
/// Name of the parameter B [out, rank] under the layer's path.
pub(super) const LORA_B: &str = "lora_B.weight";
/// Name of the magnitudes `[out]` of DoRA under the layer's path.
pub(super) const MAGNITUDE: &str = "lora_magnitude_vector";

/// The adapter Δ(x) = scale · (x·Aᵀ)·Bᵀ of a linear layer. With LoRA, the layer's output is x·Wᵀ + Δ(x) + bias.
///
/// With DoRA (arXiv 2402.09353), it is m/n · (x·Wᵀ + Δ(x)) + bias, with a trained magnitude m for each output, and the norms
/// n of the rows of W + scale·B·A, which count as constants in the backward.
#[derive(Debug, Clone)]
pub(super) struct Adapter {
    a: Tensor,
    b: Tensor,
    magnitude: Option<Tensor>,
    scale: f64,
    dropout: f64,
}

impl Adapter {
    /// Declares the adapter of the layer under the builder's path. Returns `None` if the layer is not a target of
    /// adapters. The initial values are PEFT's: A is uniform within 1/√in (Kaiming with a = √5), and B is zero.
    pub fn of(in_dim: usize, out_dim: usize, vb: &VarBuilder) -> Result<Option<Self>> {
        lock(vb.device()).declare_linear(vb.prefix());
        let Some(lora) = vb.lora().filter(|lora| lora.is_target(vb.prefix())) else { return Ok(None) };
        let bound = 1.0 / (in_dim as f64).sqrt();
        Ok(Some(Self {
            a: vb.get_with_hints((lora.rank, in_dim), LORA_A, Init::Uniform { lo: -bound, up: bound })?,
            b: vb.get_with_hints((out_dim, lora.rank), LORA_B, Init::Const(0.0))?,
            magnitude: match lora.dora {
                true => Some(vb.get_with_hints(out_dim, MAGNITUDE, Init::Const(1.0))?),
                false => None,
            },
            scale: lora.scale(),
            dropout: if vb.is_training() { lora.dropout } else { 0.0 },
        }))
    }

    /// Returns the output of the adapted layer with the given weight and bias.
    pub fn forward(&self, xs: &Tensor, weight: &Weight, bias: Option<&Tensor>) -> Result<Tensor> {
        let Some(magnitude) = &self.magnitude else {
            let ys = weight.forward(xs, bias)?;
            return ys.add(&self.delta(&xs.dropout(self.dropout)?)?);
        };
        let norm = weight.norm(&self.a, &self.b, self.scale)?;
        let factor = magnitude.div(&norm)?;
        if self.dropout == 0.0 {
            let ys = weight.forward(xs, None)?.add(&self.delta(xs)?)?.broadcast_mul(&factor)?;
            return bias.map_or(Ok(ys.clone()), |bias| ys.broadcast_add(bias));
        }
        // As in PEFT, dropout applies to all that the adapter changes: m/n · (x·Wᵀ + Δ(x)) − x·Wᵀ.
        let ys = weight.forward(xs, bias)?;
        let dropped = xs.dropout(self.dropout)?;
        let plain = weight.forward(&dropped, None)?;
        let adapted = plain.add(&self.delta(&dropped)?)?.broadcast_mul(&factor)?;
        ys.add(&adapted.sub(&plain)?)
    }

    /// Returns Δ(x). The scale is applied between A and B, where the tensor is smallest.
    fn delta(&self, xs: &Tensor) -> Result<Tensor> {
        let mut inner = xs.linear(&self.a, None)?;
        if self.scale != 1.0 {
            inner = inner.affine(self.scale, 0.0)?;
        }
        inner.linear(&self.b, None)
    }
}

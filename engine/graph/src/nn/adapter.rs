//! LoRA adapters of linear layers.

use super::{Init, VarBuilder};
use crate::error::Result;
use crate::graph::lock;
use crate::tensor::Tensor;

/// Name of the parameter A [rank, in] under the layer's path.
pub(super) const LORA_A: &str = "lora_A.weight";
/// Name of the parameter B [out, rank] under the layer's path.
pub(super) const LORA_B: &str = "lora_B.weight";

/// The adapter scale · (dropout(x)·Aᵀ)·Bᵀ, which is added to the output of a linear layer.
#[derive(Debug, Clone)]
pub(super) struct Adapter {
    a: Tensor,
    b: Tensor,
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
            scale: lora.scale(),
            dropout: if vb.is_training() { lora.dropout } else { 0.0 },
        }))
    }

    /// Returns the adapter's contribution to the layer's output. The scale is applied between A and B, where the tensor
    /// is smallest.
    pub fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        let mut inner = xs.dropout(self.dropout)?.linear(&self.a, None)?;
        if self.scale != 1.0 {
            inner = inner.affine(self.scale, 0.0)?;
        }
        inner.linear(&self.b, None)
    }
}

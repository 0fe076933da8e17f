//! What LoRA adds to a linear layer.

use super::{Init, VarBuilder};
use crate::error::Result;
use crate::tensor::Tensor;

/// Name of A [rank, in] under the layer's path.
pub(super) const LORA_A: &str = "lora_A.weight";
/// Name of B [out, rank].
pub(super) const LORA_B: &str = "lora_B.weight";

/// scale · (dropout(x)·Aᵀ)·Bᵀ beside a linear layer.
#[derive(Debug, Clone)]
pub(super) struct Adapter {
    a: Tensor,
    b: Tensor,
    scale: f64,
    dropout: f64,
}

impl Adapter {
    /// The adapter of the layer under the builder's path, if it is a target. As PEFT begins: A uniform within 1/√in (Kaiming's
    /// with a = √5), B zero.
    pub fn of(in_dim: usize, out_dim: usize, vb: &VarBuilder) -> Result<Option<Self>> {
        let Some(lora) = vb.lora().filter(|lora| lora.is_target(vb.prefix())) else { return Ok(None) };
        let bound = 1.0 / (in_dim as f64).sqrt();
        Ok(Some(Self {
            a: vb.get_with_hints((lora.rank, in_dim), LORA_A, Init::Uniform { lo: -bound, up: bound })?,
            b: vb.get_with_hints((out_dim, lora.rank), LORA_B, Init::Const(0.0))?,
            scale: lora.scale(),
            dropout: if vb.is_training() { lora.dropout } else { 0.0 },
        }))
    }

    /// What it adds to the layer's output. The scale is applied where there are the fewest elements.
    pub fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        let mut inner = xs.dropout(self.dropout)?.linear(&self.a, None)?;
        if self.scale != 1.0 {
            inner = inner.affine(self.scale, 0.0)?;
        }
        inner.linear(&self.b, None)
    }
}

//! Feed-forward layers, of which each row passes through one.

use super::Routing;
use crate::error::Result;
use crate::graph::Tensor;
use crate::nn::VarBuilder;

/// Gated units down(silu(gate)·up): `gate_proj` and `up_proj` [experts, hidden, width], `down_proj` [experts, width, hidden].
#[derive(Debug, Clone)]
pub struct Experts {
    gate_proj: Tensor,
    up_proj: Tensor,
    down_proj: Tensor,
    layer: String,
}

impl Experts {
    /// Declares the parameters.
    ///
    /// # Errors
    /// When the names were used with other shapes.
    pub fn new(experts: usize, width: usize, hidden: usize, vb: VarBuilder) -> Result<Self> {
        Ok(Self {
            gate_proj: vb.get((experts, hidden, width), "gate_proj")?,
            up_proj: vb.get((experts, hidden, width), "up_proj")?,
            down_proj: vb.get((experts, width, hidden), "down_proj")?,
            layer: vb.prefix().to_owned(),
        })
    }

    /// [batch, tokens, width] to the same: every token through the experts that it was routed to, weighted and summed.
    ///
    /// # Errors
    /// When the shapes do not fit.
    pub fn forward(&self, x: &Tensor, routing: &Routing) -> Result<Tensor> {
        let _layer = x.enter(&self.layer);
        let rows = routing.dispatch(x)?;
        let (gate, up) = (routing.linear(&rows, &self.gate_proj)?, routing.linear(&rows, &self.up_proj)?);
        routing.combine(&routing.linear(&routing.swiglu(&gate, &up)?, &self.down_proj)?)
    }
}

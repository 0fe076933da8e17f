//! The experts of a mixture: feed-forward layers, of which each row passes through one.

use super::Routing;
use crate::error::{Error, Result};
use crate::nn::VarBuilder;
use crate::tensor::Tensor;

/// A group of experts, each computing down(silu(gate)·up). `gate_proj` and `up_proj` are [experts, hidden, width];
/// `down_proj` is [experts, width, hidden]. Each expert rank holds an equal share of the experts, and the ranks
/// exchange rows.
#[derive(Debug, Clone)]
pub struct Experts {
    gate_proj: Tensor,
    up_proj: Tensor,
    down_proj: Tensor,
    ranks: usize,
    layer: String,
}

impl Experts {
    /// Declares the parameters.
    ///
    /// # Errors
    /// Returns an error if the number of experts is not a multiple of the number of expert ranks, or if parameters of
    /// these names are already declared with other shapes.
    pub fn new(experts: usize, width: usize, hidden: usize, vb: VarBuilder) -> Result<Self> {
        Ok(Self {
            gate_proj: vb.get_share((experts, hidden, width), "gate_proj")?,
            up_proj: vb.get_share((experts, hidden, width), "up_proj")?,
            down_proj: vb.get_share((experts, width, hidden), "down_proj")?,
            ranks: vb.expert_ranks(),
            layer: vb.prefix().to_owned(),
        })
    }

    /// Passes every token of [batch, tokens, width] through the experts to which it is routed. Returns the weighted sum
    /// of the experts' outputs in the same shape.
    ///
    /// # Errors
    /// Returns an error if the shapes do not fit, or if the router has another number of experts.
    pub fn forward(&self, x: &Tensor, routing: &Routing) -> Result<Tensor> {
        let _layer = x.enter(&self.layer);
        let experts = self.gate_proj.dim(0)? * self.ranks;
        if experts != routing.experts {
            let why = format!("there are {experts} experts, but the router chooses among {}", routing.experts);
            return Err(Error::config("experts", why, "use the same number for both"));
        }
        let routed = routing.exchange(self.ranks)?;
        let rows = routed.receive(&routing.dispatch(x)?)?;
        let weights = routed.receive(&routing.row_weights()?)?;
        let (gate, up) = (routed.linear(&rows, &self.gate_proj)?, routed.linear(&rows, &self.up_proj)?);
        let rows = routed.linear(&routed.swiglu(&gate, &up, &weights)?, &self.down_proj)?;
        routing.combine(&routed.send_back(&rows)?)
    }
}

//! The experts of a mixture: feed-forward layers, of which each row passes through one.

use super::Routing;
use crate::error::{Error, Result};
use crate::graph::lock;
use crate::nn::{ExpertRanks, Init, VarBuilder};
use crate::ops::LimitedActivation;
use crate::tensor::Tensor;

/// A group of experts, each computing down(silu(gate)·up). `gate_proj` and `up_proj` are [experts, hidden, width];
/// `down_proj` is [experts, width, hidden]. Each expert rank holds an equal share of the experts, and the ranks
/// exchange rows.
#[derive(Debug, Clone)]
pub struct Experts {
    gate_proj: Tensor,
    up_proj: Tensor,
    down_proj: Tensor,
    limited: Option<Limited>,
    scales_inputs: bool,
    ranks: ExpertRanks,
    layer: String,
}

/// The biases and the activation of limited experts.
#[derive(Debug, Clone)]
struct Limited {
    /// [experts, hidden].
    gate_bias: Tensor,
    /// [experts, hidden].
    up_bias: Tensor,
    /// [experts, width].
    down_bias: Tensor,
    activation: LimitedActivation,
}

impl Experts {
    /// Declares the parameters.
    ///
    /// # Errors
    /// Returns an error if the number of experts is not a multiple of the number of expert ranks, or if parameters of
    /// these names are already declared with other shapes.
    pub fn new(experts: usize, width: usize, hidden: usize, vb: VarBuilder) -> Result<Self> {
        let init = Init::Randn { mean: 0.0, stdev: 0.02 };
        Ok(Self {
            gate_proj: vb.get_share((experts, hidden, width), "gate_proj", init)?,
            up_proj: vb.get_share((experts, hidden, width), "up_proj", init)?,
            down_proj: vb.get_share((experts, width, hidden), "down_proj", init)?,
            limited: None,
            scales_inputs: false,
            ranks: vb.expert_ranks(),
            layer: vb.prefix().to_owned(),
        })
    }

    /// Declares the parameters of experts with biases: also `gate_proj_bias` and `up_proj_bias` [experts, hidden], and
    /// `down_proj_bias` [experts, width].
    ///
    /// # Errors
    /// Returns the errors of [`Self::new`].
    pub fn limited(
        experts: usize,
        width: usize,
        hidden: usize,
        activation: LimitedActivation,
        vb: VarBuilder,
    ) -> Result<Self> {
        let bias = |extent: usize, name: &str| -> Result<Tensor> {
            let bias = vb.get_share((experts, extent), name, Init::Const(0.0))?;
            lock(vb.device()).mark_vectors(bias.id());
            Ok(bias)
        };
        let plain = Self::new(experts, width, hidden, vb.clone())?;
        let (gate_bias, up_bias) = (bias(hidden, "gate_proj_bias")?, bias(hidden, "up_proj_bias")?);
        let down_bias = bias(width, "down_proj_bias")?;
        Ok(Self { limited: Some(Limited { gate_bias, up_bias, down_bias, activation }), ..plain })
    }

    /// Multiplies the experts' inputs by the router's weights, instead of their outputs (Llama 4).
    #[must_use]
    pub fn scaling_inputs(self) -> Self {
        Self { scales_inputs: true, ..self }
    }

    /// Passes every token of [batch, tokens, width] through the experts to which it is routed. Returns the weighted sum
    /// of the experts' outputs in the same shape, or the sum of the outputs if the weights are those of the inputs.
    ///
    /// # Errors
    /// Returns an error if the shapes do not fit, or if the router has another number of experts.
    pub fn forward(&self, x: &Tensor, routing: &Routing) -> Result<Tensor> {
        let _layer = x.enter(&self.layer);
        let experts = self.gate_proj.dim(0)? * self.ranks.ranks;
        if experts != routing.experts {
            let why = format!("there are {experts} experts, but the router chooses among {}", routing.experts);
            return Err(Error::config("experts", why, "use the same number for both"));
        }
        let routed = routing.exchange(self.ranks)?;
        let (rows, weights) = match self.scales_inputs {
            true => {
                let rows = routing.dispatch(x)?.broadcast_mul(&routing.row_weights()?)?;
                let rows = routed.receive(&rows)?;
                let ones = Tensor::ones((rows.dim(0)?, 1), rows.dtype(), rows.device())?;
                (rows, ones)
            }
            false => (routed.receive(&routing.dispatch(x)?)?, routed.receive(&routing.row_weights()?)?),
        };
        let (gate, up) = (routed.linear(&rows, &self.gate_proj)?, routed.linear(&rows, &self.up_proj)?);
        let rows = match &self.limited {
            None => routed.linear(&routed.swiglu(&gate, &up, &weights)?, &self.down_proj)?,
            Some(limited) => {
                // A product with one column adds to each row the bias of its expert.
                let bias = |factors: &Tensor, bias: &Tensor| routed.linear(factors, &bias.unsqueeze(2)?);
                let ones = Tensor::ones((rows.dim(0)?, 1), rows.dtype(), rows.device())?;
                let gate = gate.add(&bias(&ones, &limited.gate_bias)?)?;
                let up = up.add(&bias(&ones, &limited.up_bias)?)?;
                let rows = routed.limited(&gate, &up, &weights, limited.activation)?;
                routed.linear(&rows, &self.down_proj)?.add(&bias(&weights, &limited.down_bias)?)?
            }
        };
        routing.combine(&routed.send_back(&rows)?)
    }
}

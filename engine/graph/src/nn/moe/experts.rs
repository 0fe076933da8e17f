//! The experts of a mixture: feed-forward layers, of which each row passes through one.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::Routing;
use crate::error::{Error, Result};
use crate::graph::lock;
use crate::nn::{ExpertRanks, Init, VarBuilder};
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

/// The activation (u + 1)·g·sigmoid(alpha·g) of experts with biases, where g is the gate limited to at most `limit`, and u
/// is up limited to −`limit` to `limit` (gpt-oss).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct LimitedActivation {
    /// The factor of the gate in its sigmoid.
    pub alpha: f64,
    /// The limit of gate and up.
    pub limit: f64,
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
            limited: None,
            ranks: vb.expert_ranks(),
            layer: vb.prefix().to_owned(),
        })
    }

    /// Declares the parameters of experts with biases: also `gate_proj_bias` and `up_proj_bias` [experts, hidden], and
    /// `down_proj_bias` [experts, width].
    ///
    /// # Errors
    /// Returns the errors of [`Self::new`], and an error if several ranks share the experts.
    pub fn limited(
        experts: usize,
        width: usize,
        hidden: usize,
        activation: LimitedActivation,
        vb: VarBuilder,
    ) -> Result<Self> {
        if vb.expert_ranks().ranks > 1 {
            let why = "experts with biases cannot be shared by ranks".to_owned();
            return Err(Error::config("mesh.expert", why, "set it to 1, without mesh.fold"));
        }
        let bias = |extent: usize, name: &str| -> Result<Tensor> {
            let bias = vb.get_with_hints((experts, extent), name, Init::Const(0.0))?;
            lock(vb.device()).mark_vectors(bias.id());
            Ok(bias)
        };
        let plain = Self::new(experts, width, hidden, vb.clone())?;
        let (gate_bias, up_bias) = (bias(hidden, "gate_proj_bias")?, bias(hidden, "up_proj_bias")?);
        let down_bias = bias(width, "down_proj_bias")?;
        Ok(Self { limited: Some(Limited { gate_bias, up_bias, down_bias, activation }), ..plain })
    }

    /// Passes every token of [batch, tokens, width] through the experts to which it is routed. Returns the weighted sum
    /// of the experts' outputs in the same shape.
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
        let rows = routed.receive(&routing.dispatch(x)?)?;
        let weights = routed.receive(&routing.row_weights()?)?;
        let (gate, up) = (routed.linear(&rows, &self.gate_proj)?, routed.linear(&rows, &self.up_proj)?);
        if let Some(limited) = &self.limited {
            // A product with one column adds to each row the bias of its expert.
            let bias = |factors: &Tensor, bias: &Tensor| routed.linear(factors, &bias.unsqueeze(2)?);
            let ones = weights.ones_like()?;
            let gate = gate.add(&bias(&ones, &limited.gate_bias)?)?;
            let up = up.add(&bias(&ones, &limited.up_bias)?)?;
            let rows = limited.activation.forward(&gate, &up)?.broadcast_mul(&weights)?;
            let rows = routed.linear(&rows, &self.down_proj)?.add(&bias(&weights, &limited.down_bias)?)?;
            return routing.combine(&rows);
        }
        let rows = routed.linear(&routed.swiglu(&gate, &up, &weights)?, &self.down_proj)?;
        routing.combine(&routed.send_back(&rows)?)
    }
}

impl LimitedActivation {
    fn forward(self, gate: &Tensor, up: &Tensor) -> Result<Tensor> {
        let gate = gate.minimum(self.limit)?;
        let up = up.clamp(-self.limit, self.limit)?;
        up.affine(1.0, 1.0)?.mul(&gate)?.mul(&gate.affine(self.alpha, 0.0)?.sigmoid()?)
    }
}

//! Feed-forward layers: dense, and with routed experts.

use gapless_engine::nn::{Experts, Init, Linear, Module, Router, VarBuilder, linear_b, linear_no_bias};
use gapless_engine::{DType, Result, Tensor};

use crate::llama::{GateActivation, LlamaConfig};
use crate::moe::MoeConfig;

/// The feed-forward layer down(activation(gate)·up), or down(activation(up)) without a gate.
#[derive(Debug, Clone)]
pub(crate) struct Mlp {
    /// The layers of gate and up, or one that computes both, or that of up if there is no gate.
    inner: Vec<Linear>,
    down_proj: Linear,
    activation: Activation,
    is_gated: bool,
    layer: String,
}

impl Mlp {
    pub(crate) fn new(config: &LlamaConfig, vb: VarBuilder) -> Result<Self> {
        let &LlamaConfig { width, hidden, mlp_bias, .. } = config;
        let linear = |out: usize, name: &str| linear_b(width, out, mlp_bias, vb.pp(name));
        let inner = match (config.traits.ungated, config.traits.fused_gate_up) {
            (true, _) => vec![linear(hidden, "up_proj")?],
            (false, true) => vec![linear(2 * hidden, "gate_up_proj")?],
            (false, false) => vec![linear(hidden, "gate_proj")?, linear(hidden, "up_proj")?],
        };
        Ok(Self {
            inner,
            down_proj: linear_b(hidden, width, mlp_bias, vb.pp("down_proj"))?,
            activation: Activation::new(config.activation, &vb.pp("act_fn"))?,
            is_gated: !config.traits.ungated,
            layer: vb.prefix().to_owned(),
        })
    }

    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let _layer = x.enter(&self.layer);
        let first = self.inner[0].forward(x)?;
        if !self.is_gated {
            return self.down_proj.forward(&self.activation.forward(&first)?);
        }
        let (gate, up) = match self.inner.get(1) {
            Some(up) => (first, up.forward(x)?),
            None => {
                let hidden = first.dim(2)? / 2;
                (first.narrow(2, 0, hidden)?, first.narrow(2, hidden, hidden)?)
            }
        };
        self.down_proj.forward(&match self.activation {
            Activation::Plain(GateActivation::Silu) => gate.swiglu(&up)?,
            _ => self.activation.forward(&gate)?.mul(&up)?,
        })
    }
}

/// An activation function with its parameters.
#[derive(Debug, Clone)]
enum Activation {
    Plain(GateActivation),
    /// xIELU with the parameters αₚ and αₙ before softplus, `[1]` each.
    Xielu([Tensor; 2]),
}

/// The factor of the linear term of xIELU.
pub const XIELU_BETA: f64 = 0.5;

impl Activation {
    fn new(kind: GateActivation, vb: &VarBuilder) -> Result<Self> {
        if kind != GateActivation::Xielu {
            return Ok(Self::Plain(kind));
        }
        // After softplus, and with β added to αₙ, both are 0.8.
        let alpha = |name: &str, at: f64| vb.get_with_hints(1, name, Init::Const(at.exp_m1().ln()));
        Ok(Self::Xielu([alpha("alpha_p", 0.8)?, alpha("alpha_n", 0.8 - XIELU_BETA)?]))
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::Plain(GateActivation::Silu) => x.silu(),
            Self::Plain(GateActivation::Gelu) => x.gelu(),
            Self::Plain(GateActivation::GeluErf) => x.gelu_erf(),
            Self::Plain(GateActivation::Relu) => x.relu(),
            Self::Plain(GateActivation::Relu2) => x.relu()?.sqr(),
            Self::Plain(GateActivation::Xielu) => unreachable!("it has parameters"),
            // For x > 0: αₚ·x² + β·x. For x ≤ 0: αₙ·(eˣ − 1 − x) + β·x. Each part is 0 where the other applies. The
            // differences cancel, so they are computed in f32.
            Self::Xielu([p, n]) => {
                let softplus = |alpha: &Tensor| alpha.to_dtype(DType::F32)?.exp()?.affine(1.0, 1.0)?.log();
                let (dtype, x) = (x.dtype(), x.to_dtype(DType::F32)?);
                let negative = x.neg()?.relu()?.neg()?;
                let below = negative.exp()?.affine(1.0, -1.0)?.sub(&negative)?;
                let above = x.relu()?.sqr()?.broadcast_mul(&softplus(p)?)?;
                let below = below.broadcast_mul(&softplus(n)?.affine(1.0, XIELU_BETA)?)?;
                above.add(&below)?.add(&x.affine(XIELU_BETA, 0.0)?)?.to_dtype(dtype)
            }
        }
    }
}

/// A layer of routed experts, with an optional shared expert.
#[derive(Debug, Clone)]
pub(crate) struct Sparse {
    gate: Router,
    experts: Experts,
    shared: Option<Mlp>,
    shared_gate: Option<Linear>,
    layer: String,
}

impl Sparse {
    /// Declares the parameters of the layer under the path of `vb`. A shared expert may be under that of its `block`.
    pub(crate) fn new(config: &MoeConfig, vb: VarBuilder, block: &VarBuilder) -> Result<Self> {
        let width = config.llama.width;
        let shared = match config.shared_hidden {
            0 => None,
            hidden => {
                let of_shared = LlamaConfig { hidden, ..config.llama.clone() };
                // DeepSeek's checkpoints, the only ones with latent attention, have the name in the plural.
                let name = if config.latent.is_some() { "shared_experts" } else { "shared_expert" };
                let parent = if config.shared_outside { block } else { &vb };
                Some(Mlp::new(&of_shared, parent.pp(name))?)
            }
        };
        let shared_gate =
            config.has_shared_gate().then(|| linear_no_bias(width, 1, vb.pp("shared_expert_gate"))).transpose()?;
        let (experts, hidden) = (config.router.experts, config.expert_hidden);
        let gate = Router::new(&config.router, width, vb.pp("gate"))?;
        let experts = match config.limited {
            None => Experts::new(experts, width, hidden, vb.pp("experts"))?,
            Some(activation) => Experts::limited(experts, width, hidden, activation, vb.pp("experts"))?,
        };
        Ok(Self {
            gate,
            experts: if config.scales_inputs { experts.scaling_inputs() } else { experts },
            shared,
            shared_gate,
            layer: vb.prefix().to_owned(),
        })
    }

    /// Returns the output, and the terms that the router adds to the loss of every token.
    pub(crate) fn forward(&self, x: &Tensor, train: bool) -> Result<(Tensor, Option<Tensor>)> {
        let _layer = x.enter(&self.layer);
        let routing = self.gate.forward(x, train)?;
        let mut y = self.experts.forward(x, &routing)?;
        if let Some(shared) = &self.shared {
            let mut own = shared.forward(x)?;
            if let Some(gate) = &self.shared_gate {
                own = own.broadcast_mul(&gate.forward(x)?.sigmoid()?)?;
            }
            y = y.add(&own)?;
        }
        Ok((y, routing.loss().cloned()))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use gapless_engine::graph::{Graph, lock};

    use super::*;

    /// In a bf16 model, only the output of xIELU is rounded to bf16.
    #[test]
    fn xielu_is_computed_in_f32() {
        let graph = Arc::new(Mutex::new(Graph::default()));
        let vb = VarBuilder::new(&graph, DType::BF16);
        let x = vb.get((2, 3), "x").unwrap();
        let y = Activation::new(GateActivation::Xielu, &vb).unwrap().forward(&x).unwrap();
        assert_eq!(y.dtype(), DType::BF16);
        let graph = lock(&graph);
        let outputs = graph.nodes().iter().flat_map(|node| node.outputs.iter());
        let rounded: Vec<_> = outputs.filter(|&&id| graph.value(id).spec.dtype == DType::BF16).collect();
        assert_eq!(rounded, [&y.id()]);
    }
}

//! The settings of a decoder with routed experts. They cover Mixtral (Jiang et al., arXiv 2401.04088), Qwen-MoE (arXiv
//! 2407.10671, section 2.2.2) and the routing of DeepSeek (arXiv 2401.06066, 2412.19437).

use gapless_engine::nn::{Capacity, Choice, LimitedActivation, RouterConfig, Score};
use gapless_engine::ops::{DropPolicy, ExpertGroups};
use gapless_engine::{Error, Result};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::latent::LatentConfig;
use crate::limits::{Checked, MAX_HIDDEN, MAX_TOKENS, MAX_WIDTH};
use crate::llama::LlamaConfig;

/// The settings of a [`Moe`](crate::Moe).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct MoeConfig {
    /// The settings shared with a Llama. `hidden` is the width of the layers without experts.
    pub llama: LlamaConfig,
    /// The settings of the routers.
    pub router: RouterConfig,
    /// The hidden width of each expert.
    pub expert_hidden: usize,
    /// The hidden width of the shared expert, which processes every token; 0 means no shared expert.
    pub shared_hidden: usize,
    /// Whether the output of the shared expert is multiplied by a sigmoid gate (Qwen2-MoE).
    pub shared_gate: bool,
    /// True if the shared expert is not a part of the layer of experts, but of the block (Granite).
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    #[schemars(extend("default" = false))]
    pub shared_outside: bool,
    /// The activation of experts with biases (gpt-oss). If it is missing, experts are SwiGLU layers without biases.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limited: Option<LimitedActivation>,
    /// Whether the router's weights multiply the experts' inputs instead of their outputs (Llama 4).
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    #[schemars(extend("default" = false))]
    pub scales_inputs: bool,
    /// The layers without experts.
    pub dense_layers: Vec<usize>,
    /// The settings of multi-head latent attention (DeepSeek). If they are missing, the model has the attention of a
    /// Llama.
    pub latent: Option<LatentConfig>,
}

impl Default for MoeConfig {
    /// The settings of Mixtral 8x7B.
    fn default() -> Self {
        let llama = LlamaConfig { vocabulary: 32_000, rope_theta: 1e6, ..LlamaConfig::default() };
        Self {
            llama,
            router: RouterConfig::default(),
            expert_hidden: 14_336,
            shared_hidden: 0,
            shared_gate: false,
            shared_outside: false,
            limited: None,
            scales_inputs: false,
            dense_layers: Vec::new(),
            latent: None,
        }
    }
}

/// Well-known kinds of mixtures of experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MoeStyle {
    /// One expert per token, with a capacity, jitter and a z-loss (arXiv 2101.03961, 2202.08906).
    Switch,
    /// Two of eight experts per token, with weights that sum to 1.
    Mixtral,
    /// Many small experts, and a shared expert for all tokens.
    Qwen,
    /// Sigmoid scores, groups of experts, a bias instead of a balance loss, a shared expert, and a dense first layer.
    DeepSeek,
    /// Experts choose tokens, instead of tokens choosing experts (arXiv 2202.09368).
    ExpertChoice,
}

impl MoeConfig {
    /// The settings of Qwen1.5-MoE-A2.7B: 60 small experts, of which a token uses 4, and a shared expert.
    pub fn qwen1_5_a2_7b() -> Self {
        let llama = LlamaConfig {
            vocabulary: 151_936,
            layers: 24,
            heads: 16,
            kv_heads: 16,
            width: 2048,
            hidden: 5632,
            rope_theta: 1e6,
            rms_norm_eps: 1e-6,
            ..LlamaConfig::default()
        };
        let router =
            RouterConfig { experts: 60, top_k: 4, renormalise: false, balance_loss: 0.001, ..Default::default() };
        Self { llama, router, expert_hidden: 1408, shared_hidden: 5632, shared_gate: true, ..Self::default() }
    }

    /// The settings of a small model with 4 layers and about 10 million parameters, of which a third is used for each
    /// token. It can be trained on text on a CPU within minutes.
    pub fn small(style: MoeStyle, vocabulary: usize) -> Self {
        let llama = LlamaConfig {
            vocabulary,
            layers: 4,
            heads: 4,
            kv_heads: 2,
            width: 192,
            hidden: 512,
            rope_theta: 10_000.0,
            rms_norm_eps: 1e-5,
            ..LlamaConfig::default()
        };
        let mixtral = Self { llama, expert_hidden: 384, ..Self::default() };
        let router = mixtral.router.clone();
        let fine = |router| Self { router, expert_hidden: 96, shared_hidden: 192, ..mixtral.clone() };
        match style {
            MoeStyle::Mixtral => mixtral,
            MoeStyle::Switch => {
                let capacity = Some(Capacity { factor: 1.25, drop: DropPolicy::Last });
                let router = RouterConfig {
                    top_k: 1,
                    renormalise: false,
                    capacity,
                    jitter: 0.01,
                    balance_loss: 0.01,
                    z_loss: 0.001,
                    ..router
                };
                Self { router, ..mixtral }
            }
            MoeStyle::ExpertChoice => {
                let capacity = Some(Capacity { factor: 1.0, drop: DropPolicy::Lightest });
                let router = RouterConfig { choice: Choice::Experts, capacity, balance_loss: 0.0, ..router };
                Self { router, ..mixtral }
            }
            MoeStyle::Qwen => {
                let router = RouterConfig { experts: 32, top_k: 4, renormalise: false, balance_loss: 0.01, ..router };
                Self { shared_gate: true, ..fine(router) }
            }
            MoeStyle::DeepSeek => {
                let router = RouterConfig {
                    experts: 32,
                    top_k: 4,
                    score: Score::Sigmoid,
                    scale: 2.5,
                    groups: Some(ExpertGroups { count: 4, limit: 2 }),
                    bias_rate: 0.001,
                    balance_loss: 0.0001,
                    ..router
                };
                Self { dense_layers: vec![0], ..fine(router) }
            }
        }
    }

    /// Checks that the settings are within the [`limits`](crate::limits).
    ///
    /// # Errors
    /// Returns an error for the first setting that is outside its limits.
    pub fn check(&self) -> Result<()> {
        self.llama.check()?;
        if self.latent.is_some() && self.llama.traits.has_attention() {
            let why = "latent attention has none of the traits of other attention";
            return Err(Error::config("model", why.to_owned(), "leave latent or these traits out"));
        }
        // An extent of 0 passes this check. The layer or router reports it with a message of its own.
        let checked = Checked::default()
            .extent("router.experts", self.router.experts.max(1), MAX_WIDTH)
            .extent("expert_hidden", self.expert_hidden.max(1), MAX_HIDDEN)
            .extent(
                "experts × expert_hidden",
                self.router.experts.max(1).saturating_mul(self.expert_hidden.max(1)),
                MAX_TOKENS,
            )
            .extent("shared_hidden", self.shared_hidden.max(1), MAX_HIDDEN);
        let latent = self.latent.iter().flat_map(|latent| {
            let LatentConfig { query_rank, kv_rank, plain_size, rotated_size, value_size, .. } = *latent;
            let rank = query_rank.unwrap_or(1);
            [
                ("latent.query_rank", rank),
                ("latent.kv_rank", kv_rank),
                ("latent.plain_size", plain_size),
                ("latent.rotated_size", rotated_size),
                ("latent.value_size", value_size),
                ("heads × latent.plain_size", self.llama.heads.saturating_mul(plain_size)),
                ("heads × latent.value_size", self.llama.heads.saturating_mul(value_size)),
            ]
        });
        latent.fold(checked, |checked, (name, extent)| checked.extent(name, extent, MAX_WIDTH)).done()?;
        Checked::default().elements(self.parameters().into()).done()
    }

    /// Returns the number of parameters.
    pub fn parameters(&self) -> u64 {
        self.count(self.router.experts)
    }

    /// Returns the number of parameters that are used for each token.
    pub fn active_parameters(&self) -> u64 {
        self.count(self.router.top_k)
    }

    fn count(&self, experts: usize) -> u64 {
        let sparse = (0..self.llama.layers).filter(|layer| !self.dense_layers.contains(layer));
        let (width, layers) = (self.llama.width as u64, sparse.count() as u64);
        let dense = self.llama.mlp_parameters() as u64;
        let shared = match self.shared_hidden {
            0 => 0,
            hidden => LlamaConfig { hidden, ..self.llama.clone() }.mlp_parameters() as u64,
        };
        let shared = shared + if self.has_shared_gate() { width } else { 0 };
        let logit_bias = if self.router.logit_bias { self.router.experts as u64 } else { 0 };
        let router = width * self.router.experts as u64 + logit_bias;
        let biases = if self.limited.is_some() { 2 * self.expert_hidden as u64 + width } else { 0 };
        let experts = experts as u64 * (3 * width * self.expert_hidden as u64 + biases);
        let of_all = self.llama.layers as u64;
        let attention = self.latent.as_ref().map_or(0, |latent| of_all * latent.parameters(&self.llama) as u64);
        let replaced = if self.latent.is_some() { of_all * self.llama.attention_parameters() as u64 } else { 0 };
        self.llama.parameters() + attention - replaced - layers * dense + layers * (router + experts + shared)
    }

    pub(crate) fn has_shared_gate(&self) -> bool {
        self.shared_gate && self.shared_hidden > 0
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use gapless_engine::DType;
    use gapless_engine::graph::{Graph, lock};
    use gapless_engine::nn::VarBuilder;

    use super::*;
    use crate::{Decoder, GateActivation, Traits};

    /// The number of parameters that is computed from the settings is that of the model, whatever the feed-forward
    /// layers.
    #[test]
    fn parameters_of_shared_experts_are_counted() {
        let small = MoeConfig { dense_layers: vec![0], ..MoeConfig::small(MoeStyle::Qwen, 10) };
        let ungated = Box::new(Traits { ungated: true, ..Traits::default() });
        let layers = [
            small.llama.clone(),
            LlamaConfig { mlp_bias: true, ..small.llama.clone() },
            LlamaConfig { traits: ungated.clone(), ..small.llama.clone() },
            LlamaConfig { mlp_bias: true, traits: ungated, activation: GateActivation::Xielu, ..small.llama.clone() },
        ];
        for (llama, shared_hidden) in layers.iter().flat_map(|llama| [(llama, 0), (llama, 48)]) {
            let config = MoeConfig { llama: llama.clone(), shared_hidden, ..small.clone() };
            let graph = Arc::new(Mutex::new(Graph::default()));
            Decoder::new(&config, VarBuilder::new(&graph, DType::F32)).unwrap();
            let graph = lock(&graph);
            let declared: usize = graph.persistent().map(|(id, _)| graph.value(id).spec.elements()).sum();
            assert_eq!(config.parameters(), declared as u64, "{config:?}");
        }
    }
}

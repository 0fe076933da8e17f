//! Mixtures of experts: Mixtral, Qwen2-MoE, Qwen3-MoE. The experts of a layer are stored one by one, or fused into one
//! tensor.

use gapless_engine::nn::RouterConfig;
use serde_json::Value;

use super::fields::Fields;
use super::llama::{self, Biases, Family, SIZE};
use super::window::WindowedLayers;
use crate::MoeConfig;

/// The greatest number of experts in a layer.
pub(super) const EXPERTS: usize = 1 << 16;

pub(super) fn mixtral(fields: &mut Fields) -> MoeConfig {
    let family = Family {
        rope_theta: 1e6,
        rms_norm_eps: 1e-5,
        kv_heads: Some(8),
        biases: Biases::Never,
        window: WindowedLayers::All(None),
        ..Family::LLAMA
    };
    let llama = llama::take(fields, &family);
    fields.require("router_jitter_noise", 0.0);
    let experts = fields.count("num_local_experts", Some(8), 1..=EXPERTS);
    fields.require("num_experts", experts);
    let router = router(fields, experts, 2, true);
    MoeConfig { expert_hidden: llama.hidden, llama, router, ..MoeConfig::default() }
}

pub(super) fn qwen2(fields: &mut Fields) -> MoeConfig {
    let biases = Biases::Qkv { option: Some("qkv_bias") };
    let family = Family { kv_heads: Some(16), biases, window: WindowedLayers::Alternate, ..Family::QWEN2 };
    let llama = llama::take(fields, &family);
    let renormalise = fields.flag("norm_topk_prob", false);
    let experts = fields.count("num_experts", Some(60), 1..=EXPERTS);
    MoeConfig {
        expert_hidden: fields.count("moe_intermediate_size", Some(1408), SIZE),
        shared_hidden: fields.count("shared_expert_intermediate_size", Some(5632), SIZE),
        shared_gate: true,
        dense_layers: dense_layers(fields, llama.layers),
        router: router(fields, experts, 4, renormalise),
        llama,
        latent: None,
    }
}

pub(super) fn qwen3(fields: &mut Fields) -> MoeConfig {
    let family = Family { kv_heads: Some(4), head_size: None, window: WindowedLayers::AllIfUsed, ..Family::QWEN3 };
    let llama = llama::take(fields, &family);
    let renormalise = fields.flag("norm_topk_prob", false);
    // Some files have the option `num_experts`, and others have `num_local_experts` instead.
    let experts = if fields.has("num_experts") { "num_experts" } else { "num_local_experts" };
    let experts = fields.count(experts, Some(128), 1..=EXPERTS);
    fields.require("num_local_experts", experts);
    MoeConfig {
        expert_hidden: fields.count("moe_intermediate_size", Some(768), SIZE),
        dense_layers: dense_layers(fields, llama.layers),
        router: router(fields, experts, 8, renormalise),
        llama,
        ..MoeConfig::default()
    }
}

/// Reads the settings of a router with softmax scores.
pub(super) fn router(fields: &mut Fields, experts: usize, top_k: usize, renormalise: bool) -> RouterConfig {
    let top_k = fields.count("num_experts_per_tok", Some(top_k.min(experts)), 1..=experts);
    // In transformers, this option adds a balance loss that differs from gapless's balance loss.
    fields.require("output_router_logits", false);
    RouterConfig { experts, top_k, renormalise, balance_loss: 0.0, ..RouterConfig::default() }
}

/// Returns the layers without experts: those listed in `mlp_only_layers`, and all layers except every
/// `decoder_sparse_step`th.
fn dense_layers(fields: &mut Fields, layers: usize) -> Vec<usize> {
    let step = fields.count("decoder_sparse_step", Some(1), 1..=1 << 20);
    let listed = fields.take("mlp_only_layers").unwrap_or(Value::Array(Vec::new()));
    let numbers: Option<Vec<u64>> = listed.as_array().and_then(|all| all.iter().map(Value::as_u64).collect());
    if numbers.is_none() {
        fields.wrong("mlp_only_layers", &listed, "a list of layers");
    }
    let numbers = numbers.unwrap_or_default();
    (0..layers).filter(|&layer| !(layer + 1).is_multiple_of(step) || numbers.contains(&(layer as u64))).collect()
}

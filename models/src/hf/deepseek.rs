//! DeepSeek-V3 (arXiv 2412.19437): latent attention, groups of experts that are chosen by sigmoid scores with a bias,
//! and a shared expert.

use std::ops::Range;

use gapless_engine::nn::{RouterConfig, Score};
use gapless_engine::ops::ExpertGroups;
use serde_json::Value;

use super::fields::Fields;
use super::llama::{self, Family, SIZE};
use super::moe::{EXPERTS, router};
use crate::{LatentConfig, LlamaConfig, MoeConfig};

pub(super) fn take(fields: &mut Fields) -> MoeConfig {
    let latent = latent(fields);
    let stretch = attention_stretch(fields);
    let family = Family { head_size: Some(latent.rotated_size), ..Family::LLAMA };
    let llama = llama::take(fields, &family);
    if llama.head_size != Some(latent.rotated_size) {
        fields.wrong("head_dim", &llama.head_size.into(), "qk_rope_head_dim");
    }
    if llama.kv_heads != llama.heads {
        fields.unsupported("num_key_value_heads", &llama.kv_heads.into(), "num_attention_heads");
    }
    let size = latent.head_size();
    fields.require("qk_head_dim", size);
    // The file's YaRN factor multiplies queries and keys, so its square multiplies the scores. The model divides the
    // scores by √`query_scale`, so the factor's fourth power divides `query_scale`.
    let query_scale = Some(size as f64 / stretch.powi(4));
    let llama = LlamaConfig { head_size: Some(size), query_scale, qkv_bias: false, ..llama };

    let experts = fields.count("n_routed_experts", Some(256), 1..=EXPERTS);
    fields.require("num_local_experts", experts);
    let expert_hidden = fields.count("moe_intermediate_size", Some(2048), SIZE);
    let shared = fields.count("n_shared_experts", Some(1), 0..=EXPERTS);
    let dense = fields.count("first_k_dense_replace", Some(3), 0..=4096);
    let router = sigmoid_router(fields, experts);
    fields.require("moe_layer_freq", 1);
    MoeConfig {
        dense_layers: (0..dense.min(llama.layers)).collect(),
        expert_hidden,
        shared_hidden: shared * expert_hidden,
        shared_gate: false,
        latent: Some(latent),
        router,
        llama,
    }
}

/// Returns the range of the layers after the model's own layers, which predict further tokens. They are left out of the
/// model, as in transformers.
pub(super) fn unread_layers(fields: &mut Fields, layers: usize) -> Range<usize> {
    let name = ["num_nextn_predict_layers", "num_mtp_layers"].into_iter().find(|name| fields.peek(name).is_some());
    layers..layers + name.map_or(0, |name| fields.count(name, Some(0), 0..=4096))
}

fn latent(fields: &mut Fields) -> LatentConfig {
    let LatentConfig { kv_rank, plain_size, rotated_size, value_size, .. } = LatentConfig::default();
    // If the option is null, queries are computed without a latent. Only a missing option has the default.
    let is_whole = fields.has("q_lora_rank") && fields.peek("q_lora_rank").is_none();
    let query_rank = (!is_whole).then(|| fields.count("q_lora_rank", Some(1536), SIZE));
    let rotated_size = fields.count("qk_rope_head_dim", Some(rotated_size), 1..=1 << 16);
    if !rotated_size.is_multiple_of(2) {
        fields.wrong("qk_rope_head_dim", &rotated_size.into(), "even, as rotary positions need");
    }
    LatentConfig {
        query_rank,
        kv_rank: fields.count("kv_lora_rank", Some(kv_rank), SIZE),
        plain_size: fields.count("qk_nope_head_dim", Some(plain_size), 1..=1 << 16),
        rotated_size,
        value_size: fields.count("v_head_dim", Some(value_size), 1..=1 << 16),
        neighbours: fields.flag("rope_interleave", true),
    }
}

fn sigmoid_router(fields: &mut Fields, experts: usize) -> RouterConfig {
    fields.require("scoring_func", "sigmoid");
    fields.require("topk_method", "noaux_tc");
    let renormalise = fields.flag("norm_topk_prob", true);
    let of_all = router(fields, experts, 8, renormalise);
    let count = fields.count("n_group", Some(8), 1..=experts);
    let limit = fields.count("topk_group", Some(4.min(count)), 1..=count);
    if !experts.is_multiple_of(count) {
        fields.wrong("n_group", &count.into(), &format!("a divisor of n_routed_experts, {experts}"));
    }
    RouterConfig {
        score: Score::Sigmoid,
        scale: fields.positive("routed_scaling_factor", Some(2.5)),
        groups: (count > limit).then_some(ExpertGroups { count, limit }),
        fixed_bias: true,
        ..of_all
    }
}

/// Returns YaRN's factor of queries and keys (arXiv 2309.00071, section 3.4), or 1 if the file does not apply it to the
/// attention scores.
fn attention_stretch(fields: &Fields) -> f64 {
    let scaling = fields.peek("rope_parameters").or_else(|| fields.peek("rope_scaling"));
    let number = |name: &str| scaling.and_then(|scaling| scaling.get(name)).and_then(Value::as_f64);
    match (number("factor"), number("mscale_all_dim")) {
        (Some(factor), Some(all)) if factor > 1.0 => 0.1 * all * factor.ln() + 1.0,
        _ => 1.0,
    }
}

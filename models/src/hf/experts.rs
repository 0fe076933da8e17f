//! Options of routed experts.

use std::ops::Range;

use gapless_engine::nn::{LimitedActivation, RouterConfig, Score};
use gapless_engine::ops::ExpertGroups;
use serde_json::Value;

use super::family::{Family, SIZE};
use super::fields::Fields;
use crate::{LatentConfig, LlamaConfig, MoeConfig};

/// The greatest number of experts in a layer.
const EXPERTS: usize = 1 << 16;

pub(super) fn mixtral(fields: &mut Fields, llama: LlamaConfig, _: &Family) -> MoeConfig {
    fields.require("router_jitter_noise", 0.0);
    let experts = fields.count("num_local_experts", Some(8), 1..=EXPERTS);
    fields.require("num_experts", experts);
    let router = router(fields, experts, Some(2), true);
    MoeConfig { expert_hidden: llama.hidden, llama, router, ..MoeConfig::default() }
}

pub(super) fn granite(fields: &mut Fields, llama: LlamaConfig, family: &Family) -> MoeConfig {
    mixtral(fields, llama, family)
}

pub(super) fn olmoe(fields: &mut Fields, llama: LlamaConfig, _: &Family) -> MoeConfig {
    let experts = experts(fields, 64);
    let renormalise = fields.flag("norm_topk_prob", false);
    let router = router(fields, experts, Some(8), renormalise);
    MoeConfig { expert_hidden: llama.hidden, llama, router, ..MoeConfig::default() }
}

pub(super) fn qwen2(fields: &mut Fields, llama: LlamaConfig, _: &Family) -> MoeConfig {
    let renormalise = fields.flag("norm_topk_prob", false);
    let experts = fields.count("num_experts", Some(60), 1..=EXPERTS);
    MoeConfig {
        expert_hidden: fields.count("moe_intermediate_size", Some(1408), SIZE),
        shared_hidden: fields.count("shared_expert_intermediate_size", Some(5632), SIZE),
        shared_gate: true,
        dense_layers: dense_layers(fields, llama.layers),
        router: router(fields, experts, Some(4), renormalise),
        llama,
        ..MoeConfig::default()
    }
}

pub(super) fn qwen3(fields: &mut Fields, llama: LlamaConfig, _: &Family) -> MoeConfig {
    let renormalise = fields.flag("norm_topk_prob", false);
    let experts = experts(fields, 128);
    MoeConfig {
        expert_hidden: fields.count("moe_intermediate_size", Some(768), SIZE),
        dense_layers: dense_layers(fields, llama.layers),
        router: router(fields, experts, Some(8), renormalise),
        llama,
        ..MoeConfig::default()
    }
}

/// Reads the options of MiniMax-M2 that decide about its table, and those of its published files that must have the value
/// that transformers assumes.
pub(super) fn prepare_minimax(fields: &mut Fields, _: &mut Family) {
    let size = fields.peek("head_dim").and_then(Value::as_f64).unwrap_or(128.0);
    if let Some(rotated) = fields.take("rotary_dim").and_then(|size| size.as_f64()) {
        fields.set("partial_rotary_factor", (rotated / size).into());
    }
    fields.require("use_routing_bias", true);
    fields.require("scoring_func", "sigmoid");
    fields.require("shared_intermediate_size", 0);
    fields.ignore(&["attn_type_list", "mtp_transformer_layers", "num_mtp_modules", "qk_norm_type", "use_mtp"]);
}

pub(super) fn minimax(fields: &mut Fields, llama: LlamaConfig, _: &Family) -> MoeConfig {
    fields.require("router_jitter_noise", 0.0);
    let experts = experts(fields, 256);
    let router = router(fields, experts, Some(8), true);
    let router = RouterConfig { score: Score::Sigmoid, fixed_bias: true, ..router };
    MoeConfig { expert_hidden: llama.hidden, llama, router, ..MoeConfig::default() }
}

pub(super) fn gpt_oss(fields: &mut Fields, llama: LlamaConfig, _: &Family) -> MoeConfig {
    let experts = experts(fields, 128);
    let activation = LimitedActivation {
        alpha: fields.positive("swiglu_alpha", Some(1.702)),
        limit: fields.positive("swiglu_limit", Some(7.0)),
    };
    let router = RouterConfig { logit_bias: true, ..router(fields, experts, Some(4), true) };
    // Another name of an option in published files, and the length of the first part of the training.
    fields.require("experts_per_token", router.top_k);
    fields.ignore(&["initial_context_length"]);
    MoeConfig { expert_hidden: llama.hidden, llama, router, limited: Some(activation), ..MoeConfig::default() }
}

/// Reads the options of Llama 4's experts, whose hidden width is `intermediate_size`. Layers without experts have another.
pub(super) fn llama4(fields: &mut Fields, llama: LlamaConfig, _: &Family) -> MoeConfig {
    fields.require("router_jitter_noise", 0.0);
    let sparse = layers(fields, "moe_layers").unwrap_or_else(|| {
        let step = fields.count("interleave_moe_layer_step", Some(1), 1..=1 << 20);
        (1..=llama.layers).filter(|number| number.is_multiple_of(step)).map(|number| number - 1).collect()
    });
    fields.ignore(&["interleave_moe_layer_step"]);
    let dense_layers: Vec<usize> = (0..llama.layers).filter(|layer| !sparse.contains(layer)).collect();
    let hidden = fields.count("intermediate_size_mlp", Some(16_384), 1..=1 << 22);
    if dense_layers.len() == llama.layers {
        fields.ignore(&["num_local_experts", "num_experts_per_tok"]);
    }
    let experts = fields.count("num_local_experts", Some(16), 1..=EXPERTS);
    let router = RouterConfig { score: Score::Sigmoid, ..router(fields, experts, Some(1), false) };
    MoeConfig {
        expert_hidden: llama.hidden,
        shared_hidden: llama.hidden,
        scales_inputs: true,
        dense_layers,
        router,
        llama: LlamaConfig { hidden, ..llama },
        ..MoeConfig::default()
    }
}

/// Reads the number of experts. Some files have the option `num_experts`, and others have `num_local_experts` instead.
fn experts(fields: &mut Fields, default: usize) -> usize {
    let option = if fields.has("num_experts") { "num_experts" } else { "num_local_experts" };
    let experts = fields.count(option, Some(default), 1..=EXPERTS);
    fields.require("num_local_experts", experts);
    experts
}

/// Reads the settings of a router with softmax scores.
fn router(fields: &mut Fields, experts: usize, top_k: Option<usize>, renormalise: bool) -> RouterConfig {
    let top_k = fields.count("num_experts_per_tok", top_k.map(|top_k| top_k.min(experts)), 1..=experts);
    // In transformers, this option adds a balance loss that differs from gapless's balance loss.
    fields.require("output_router_logits", false);
    RouterConfig { experts, top_k, renormalise, balance_loss: 0.0, ..RouterConfig::default() }
}

/// Returns the layers without experts: those listed in `mlp_only_layers`, and all layers except every
/// `decoder_sparse_step`th.
fn dense_layers(fields: &mut Fields, layers: usize) -> Vec<usize> {
    let step = fields.count("decoder_sparse_step", Some(1), 1..=1 << 20);
    let listed = self::layers(fields, "mlp_only_layers").unwrap_or_default();
    (0..layers).filter(|layer| !(layer + 1).is_multiple_of(step) || listed.contains(layer)).collect()
}

/// Reads a list of layers. Returns `None` if the option is missing or null.
fn layers(fields: &mut Fields, option: &str) -> Option<Vec<usize>> {
    let listed = fields.take(option)?;
    let number = |layer: &Value| layer.as_u64().and_then(|layer| usize::try_from(layer).ok());
    let numbers = listed.as_array().and_then(|all| all.iter().map(number).collect());
    if numbers.is_none() {
        fields.wrong(option, &listed, "a list of layers");
    }
    numbers
}

/// The defaults of DeepSeek's options of experts. `None` means that the option is required.
struct DeepSeek {
    experts: Option<usize>,
    top_k: Option<usize>,
    hidden: usize,
    shared: Option<usize>,
    dense: usize,
    renormalise: bool,
    scale: f64,
    groups: (usize, usize),
}

/// Reads the options of DeepSeek-V3's experts (arXiv 2412.19437): groups of experts that are chosen by sigmoid scores with
/// a bias, and shared experts.
fn sigmoid_experts(fields: &mut Fields, llama: LlamaConfig, defaults: &DeepSeek) -> MoeConfig {
    fields.require("scoring_func", "sigmoid");
    fields.require("topk_method", "noaux_tc");
    let renormalise = fields.flag("norm_topk_prob", defaults.renormalise);
    let mut moe = deepseek(fields, llama, defaults, renormalise);
    let experts = moe.router.experts;
    let count = fields.count("n_group", Some(defaults.groups.0), 1..=experts);
    let limit = fields.count("topk_group", Some(defaults.groups.1.min(count)), 1..=count);
    check_groups(fields, count, experts);
    let groups = (count > limit).then_some(ExpertGroups { count, limit });
    moe.router = RouterConfig { score: Score::Sigmoid, groups, fixed_bias: true, ..moe.router };
    moe
}

fn check_groups(fields: &mut Fields, count: usize, experts: usize) {
    if !experts.is_multiple_of(count) {
        fields.wrong("n_group", &count.into(), &format!("a divisor of n_routed_experts, {experts}"));
    }
}

fn deepseek(fields: &mut Fields, llama: LlamaConfig, defaults: &DeepSeek, renormalise: bool) -> MoeConfig {
    let experts = fields.count("n_routed_experts", defaults.experts, 1..=EXPERTS);
    ["num_local_experts", "num_experts"].iter().for_each(|name| fields.require(name, experts));
    let expert_hidden = fields.count("moe_intermediate_size", Some(defaults.hidden), SIZE);
    let shared = fields.count("n_shared_experts", defaults.shared, 0..=EXPERTS);
    let dense = fields.count("first_k_dense_replace", Some(defaults.dense), 0..=4096);
    fields.require("moe_layer_freq", 1);
    let scale = fields.positive("routed_scaling_factor", Some(defaults.scale));
    let router = RouterConfig { scale, ..router(fields, experts, defaults.top_k, renormalise) };
    MoeConfig {
        dense_layers: (0..dense.min(llama.layers)).collect(),
        expert_hidden,
        shared_hidden: shared * expert_hidden,
        router,
        llama,
        ..MoeConfig::default()
    }
}

pub(super) fn glm4(fields: &mut Fields, llama: LlamaConfig, _: &Family) -> MoeConfig {
    let (experts, top_k, shared, groups) = (Some(128), Some(8), Some(1), (1, 1));
    let defaults = DeepSeek { experts, top_k, hidden: 1408, shared, dense: 1, renormalise: true, scale: 1.0, groups };
    sigmoid_experts(fields, llama, &defaults)
}

pub(super) fn dots1(fields: &mut Fields, llama: LlamaConfig, _: &Family) -> MoeConfig {
    let (experts, top_k, shared, groups) = (None, None, None, (1, 1));
    let defaults = DeepSeek { experts, top_k, hidden: 1408, shared, dense: 0, renormalise: false, scale: 1.0, groups };
    sigmoid_experts(fields, llama, &defaults)
}

pub(super) fn deepseek_v3(fields: &mut Fields, llama: LlamaConfig, family: &Family) -> MoeConfig {
    let (experts, top_k, shared, groups) = (Some(256), Some(8), Some(1), (8, 4));
    let defaults = DeepSeek { experts, top_k, hidden: 2048, shared, dense: 3, renormalise: true, scale: 2.5, groups };
    let latent = latent(fields);
    let llama = latent_llama(fields, llama, &latent, family);
    MoeConfig { latent: Some(latent), ..sigmoid_experts(fields, llama, &defaults) }
}

/// Reads the options of DeepSeek-V2 (arXiv 2405.04434), whose experts are chosen by softmax scores.
pub(super) fn deepseek_v2(fields: &mut Fields, llama: LlamaConfig, family: &Family) -> MoeConfig {
    let (experts, shared) = (Some(64), Some(2));
    let defaults = DeepSeek {
        experts,
        top_k: None,
        hidden: 1407,
        shared,
        dense: 0,
        renormalise: false,
        scale: 1.0,
        groups: (1, 1),
    };
    let latent = latent(fields);
    let llama = latent_llama(fields, llama, &latent, family);
    fields.require("scoring_func", "softmax");
    // transformers ignores this option for this family.
    fields.ignore(&["norm_topk_prob"]);
    let method = fields.one_of("topk_method", &["greedy", "group_limited_greedy"]);
    let mut moe = deepseek(fields, llama, &defaults, false);
    if method == "greedy" {
        fields.ignore(&["n_group", "topk_group"]);
    } else {
        let count = fields.count("n_group", None, 1..=moe.router.experts);
        let limit = fields.count("topk_group", None, 1..=count);
        check_groups(fields, count, moe.router.experts);
        moe.router.groups = (count > limit).then_some(ExpertGroups { count, limit });
        moe.router.groups_by_best = true;
    }
    moe.latent = Some(latent);
    moe
}

/// Returns the range of the layers after the model's own layers, which predict further tokens. They are left out of the
/// model, as in transformers.
pub(super) fn unread_layers(fields: &mut Fields, layers: usize) -> Range<usize> {
    let counts = ["num_nextn_predict_layers", "num_mtp_layers"].map(|name| fields.count(name, Some(0), 0..=4096));
    layers..layers + counts[0].max(counts[1])
}

/// Sets the width of the rotated part of a head, and the factor of the scores.
pub(super) fn prepare_latent(fields: &mut Fields, family: &mut Family) {
    let size = fields.peek("qk_rope_head_dim").and_then(Value::as_u64).and_then(|size| usize::try_from(size).ok());
    family.head_size = Some(size.filter(|size| (1..=1 << 16).contains(size)).unwrap_or(64));
    family.stretch = attention_stretch(fields);
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

/// Returns the settings of a model with latent attention.
fn latent_llama(fields: &mut Fields, llama: LlamaConfig, latent: &LatentConfig, family: &Family) -> LlamaConfig {
    if llama.head_size != Some(latent.rotated_size) {
        fields.wrong("head_dim", &llama.head_size.into(), "qk_rope_head_dim");
    }
    if llama.kv_heads != llama.heads {
        fields.unsupported("num_key_value_heads", &llama.kv_heads.into(), "num_attention_heads");
    }
    if llama.traits.dynamic_rope.is_some() || llama.traits.long_rope.is_some() {
        let supported = "default, linear, llama3, yarn with latent attention";
        fields.unsupported("rope_type", &"dynamic or longrope".into(), supported);
    }
    let size = latent.head_size();
    fields.require("qk_head_dim", size);
    // The file's YaRN factor multiplies queries and keys, so its square multiplies the scores. The model divides the
    // scores by √`query_scale`, so the factor's fourth power divides `query_scale`.
    let query_scale = Some(size as f64 / family.stretch.powi(4));
    LlamaConfig { head_size: Some(size), query_scale, qkv_bias: false, ..llama }
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

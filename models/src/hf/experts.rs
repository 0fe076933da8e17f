//! Options of routed experts.

use std::ops::Range;

use gapless_engine::nn::{LimitedActivation, RouterConfig, Score};
use gapless_engine::ops::ExpertGroups;
use serde_json::Value;

use super::family::{Family, SIZE, Unrotated};
use super::fields::Fields;
use super::window::FULL;
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

/// Reads the options of Granite MoE's experts with a shared one, which is not a part of the layer of experts.
pub(super) fn granite_shared(fields: &mut Fields, llama: LlamaConfig, family: &Family) -> MoeConfig {
    let shared_hidden = fields.count("shared_intermediate_size", Some(0), 0..=*SIZE.end());
    MoeConfig { shared_hidden, shared_outside: true, ..mixtral(fields, llama, family) }
}

pub(super) fn olmoe(fields: &mut Fields, llama: LlamaConfig, _: &Family) -> MoeConfig {
    let experts = experts(fields, 64);
    let renormalise = fields.flag("norm_topk_prob", false);
    let router = router(fields, experts, Some(8), renormalise);
    MoeConfig { expert_hidden: llama.hidden, llama, router, ..MoeConfig::default() }
}

pub(super) fn flex_olmo(fields: &mut Fields, llama: LlamaConfig, family: &Family) -> MoeConfig {
    if fields.peek("num_local_experts").is_none() {
        fields.default("num_experts", 7.into());
    }
    fields.default("num_experts_per_tok", 5.into());
    olmoe(fields, llama, family)
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
        fields.set("partial_rotary_factor", ((rotated + 0.5) / size).into());
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

/// Returns the layers that are `dense` in `mlp_layer_types`. Returns `None` if the option is missing or null.
fn dense_types(fields: &mut Fields, layers: usize) -> Option<Vec<usize>> {
    let types = fields.take("mlp_layer_types")?;
    let is_dense = |kind: &Value| ["dense", "sparse"].iter().position(|known| kind == known).map(|at| at == 0);
    let found: Option<Vec<bool>> = types.as_array().and_then(|all| all.iter().map(is_dense).collect());
    match found.filter(|all| all.len() == layers) {
        Some(dense) => Some((0..layers).filter(|&layer| dense[layer]).collect()),
        None => {
            fields.wrong("mlp_layer_types", &types, &format!("dense or sparse for each of {layers} layers"));
            None
        }
    }
}

/// The defaults of DeepSeek's options of experts. `None` means that the option is required.
#[derive(Clone, Copy)]
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

const GLM4: DeepSeek = DeepSeek {
    experts: Some(128),
    top_k: Some(8),
    hidden: 1408,
    shared: Some(1),
    dense: 1,
    renormalise: true,
    scale: 1.0,
    groups: (1, 1),
};

pub(super) fn glm4(fields: &mut Fields, llama: LlamaConfig, _: &Family) -> MoeConfig {
    sigmoid_experts(fields, llama, &GLM4)
}

/// Reads the options of Solar Open's experts, which all layers have.
pub(super) fn solar(fields: &mut Fields, llama: LlamaConfig, _: &Family) -> MoeConfig {
    fields.require("first_k_dense_replace", 0);
    sigmoid_experts(fields, llama, &DeepSeek { hidden: 1280, dense: 0, ..GLM4 })
}

/// Reads the options of GLM-4.7-Flash, which has DeepSeek-V3's attention, and layers without experts by type.
pub(super) fn glm4_lite(fields: &mut Fields, llama: LlamaConfig, family: &Family) -> MoeConfig {
    let sizes = LatentConfig { query_rank: Some(768), plain_size: 192, value_size: 256, ..LatentConfig::default() };
    let latent = latent(fields, &sizes);
    let llama = latent_llama(fields, llama, &latent, family);
    let defaults = DeepSeek { experts: Some(64), top_k: Some(4), hidden: 1536, scale: 1.8, ..GLM4 };
    MoeConfig { latent: Some(latent), ..typed_experts(fields, llama, &defaults, true) }
}

/// Gives DeepSeek's names to the numbers of experts.
fn rename_numbers(fields: &mut Fields) {
    fields.rename("num_experts", "n_routed_experts");
    fields.rename("num_shared_experts", "n_shared_experts");
}

/// Reads the options of experts, and the layers without experts by type. If the file has no types, `first_k_dense_replace`
/// decides, unless transformers `ignores_first`, so that it must agree.
fn typed_experts(fields: &mut Fields, llama: LlamaConfig, defaults: &DeepSeek, ignores_first: bool) -> MoeConfig {
    let typed = dense_types(fields, llama.layers);
    if ignores_first {
        fields.require("first_k_dense_replace", typed.as_ref().map_or(1, Vec::len));
    }
    let moe = sigmoid_experts(fields, llama, defaults);
    MoeConfig { dense_layers: typed.unwrap_or(moe.dense_layers), ..moe }
}

/// Reads the options of K-EXAONE's experts.
pub(super) fn exaone(fields: &mut Fields, llama: LlamaConfig, _: &Family) -> MoeConfig {
    rename_numbers(fields);
    typed_experts(fields, llama, &DeepSeek { experts: Some(64), hidden: 1024, scale: 2.5, ..GLM4 }, false)
}

/// Reads the options of Hunyuan 3's experts, which have no groups.
pub(super) fn hunyuan_v3(fields: &mut Fields, llama: LlamaConfig, _: &Family) -> MoeConfig {
    rename_numbers(fields);
    fields.rename("router_scaling_factor", "routed_scaling_factor");
    ["n_group", "topk_group"].iter().for_each(|name| fields.require(name, 1));
    fields.require("norm_topk_prob", true);
    // The type in which the outputs of experts are added.
    fields.ignore(&["enable_moe_fp32_combine"]);
    typed_experts(fields, llama, &DeepSeek { experts: Some(192), hidden: 1536, scale: 2.826, ..GLM4 }, true)
}

/// Reads the options of Arcee Trinity's experts.
pub(super) fn afmoe(fields: &mut Fields, llama: LlamaConfig, _: &Family) -> MoeConfig {
    rename_numbers(fields);
    fields.rename("num_dense_layers", "first_k_dense_replace");
    fields.rename("route_scale", "routed_scaling_factor");
    // Options of the program that trained the models. Of each, only the value of the family is supported.
    fields.require("score_func", "sigmoid");
    ["route_norm", "norm_topk_prob"].iter().for_each(|name| fields.require(name, true));
    let groups = ["n_group", "topk_group", "num_expert_groups", "num_limited_groups"];
    groups.iter().for_each(|name| fields.require(name, 1));
    fields.ignore(&["load_balance_coeff", "use_grouped_mm"]);
    sigmoid_experts(fields, llama, &DeepSeek { experts: Some(64), top_k: Some(6), shared: Some(2), ..GLM4 })
}

/// Reads the options of ERNIE 4.5's experts, which a fixed bias chooses by their softmax scores.
pub(super) fn ernie(fields: &mut Fields, llama: LlamaConfig, _: &Family) -> MoeConfig {
    fields.rename("moe_k", "num_experts_per_tok");
    let experts = fields.count("moe_num_experts", Some(64), 1..=EXPERTS);
    let expert_hidden = fields.count("moe_intermediate_size", Some(1536), SIZE);
    let shared = fields.count("moe_num_shared_experts", Some(2), 0..=EXPERTS);
    let first = fields.count("moe_layer_start_index", Some(1), 0..=4096);
    let last = match fields.peek("moe_layer_end_index").and_then(Value::as_i64) {
        Some(-1) => {
            fields.ignore(&["moe_layer_end_index"]);
            llama.layers
        }
        _ => fields.count("moe_layer_end_index", Some(llama.layers), 0..=4096),
    };
    let every = fields.count("moe_layer_interval", Some(1), 1..=4096);
    let is_sparse = |layer: &usize| (first..=last).contains(layer) && (layer + 1).is_multiple_of(every);
    // The sum of a token's weights is greater than this bound: softmax scores are not 0.
    fields.require("moe_norm_min", 1e-12);
    fields.require("moe_gate", "topk");
    fields.require("moe_use_aux_free", true);
    fields.ignore(&["moe_capacity"]);
    MoeConfig {
        dense_layers: (0..llama.layers).filter(|layer| !is_sparse(layer)).collect(),
        expert_hidden,
        shared_hidden: shared * expert_hidden,
        router: RouterConfig { fixed_bias: true, ..router(fields, experts, Some(6), true) },
        llama,
        ..MoeConfig::default()
    }
}

/// Reads the options of Hunyuan's experts. Options that a file has for each layer must be equal.
pub(super) fn hunyuan(fields: &mut Fields, llama: LlamaConfig, _: &Family) -> MoeConfig {
    for option in ["moe_topk", "num_experts"] {
        let listed = fields.peek(option).and_then(Value::as_array).cloned();
        if let Some(first) =
            listed.as_ref().and_then(|all| all.first().filter(|first| all.iter().all(|it| it == *first)))
        {
            fields.set(option, first.clone());
        }
    }
    fields.rename("moe_topk", "num_experts_per_tok");
    let experts = experts(fields, 1);
    let router = router(fields, experts, Some(1), true);
    MoeConfig { expert_hidden: llama.hidden, shared_hidden: llama.hidden, llama, router, ..MoeConfig::default() }
}

pub(super) fn mellum(fields: &mut Fields, llama: LlamaConfig, _: &Family) -> MoeConfig {
    let renormalise = fields.flag("norm_topk_prob", true);
    let experts = experts(fields, 64);
    MoeConfig {
        expert_hidden: fields.count("moe_intermediate_size", Some(896), SIZE),
        dense_layers: dense_types(fields, llama.layers).unwrap_or_default(),
        router: router(fields, experts, Some(8), renormalise),
        llama,
        ..MoeConfig::default()
    }
}

/// Reads the options of latent attention in a model without experts.
fn latent_only(fields: &mut Fields, llama: LlamaConfig, family: &Family, sizes: &LatentConfig) -> MoeConfig {
    let latent = latent(fields, sizes);
    let llama = latent_llama(fields, llama, &latent, family);
    let router = RouterConfig { balance_loss: 0.0, ..RouterConfig::default() };
    let dense_layers = (0..llama.layers).collect();
    MoeConfig { latent: Some(latent), dense_layers, router, llama, ..MoeConfig::default() }
}

pub(super) fn youtu(fields: &mut Fields, llama: LlamaConfig, family: &Family) -> MoeConfig {
    latent_only(fields, llama, family, &LatentConfig::default())
}

pub(super) fn minicpm(fields: &mut Fields, llama: LlamaConfig, family: &Family) -> MoeConfig {
    let sizes = LatentConfig {
        query_rank: Some(768),
        kv_rank: 256,
        plain_size: 64,
        rotated_size: 32,
        value_size: llama.width / llama.heads,
        neighbours: false,
    };
    fields.require("rope_interleave", false);
    latent_only(fields, llama, family, &sizes)
}

/// Reads the options of Granite 4.0 that decide about its table. Layers of other kinds, and experts, are not supported.
pub(super) fn prepare_granite_hybrid(fields: &mut Fields, family: &mut Family) {
    const KINDS: &str = "attention in all layers; state-space layers are not supported";
    for option in ["layer_types", "layers_block_type"] {
        let is_attention = |kind: &Value| kind == "attention" || kind == FULL;
        let layers = fields.peek("num_hidden_layers").and_then(Value::as_u64);
        let are_all = |all: &Vec<Value>| Some(all.len() as u64) == layers && all.iter().all(is_attention);
        match fields.take(option) {
            Some(types) if !types.as_array().is_some_and(are_all) => {
                fields.unsupported(option, &types, KINDS);
            }
            None if option == "layer_types" && fields.peek("layers_block_type").is_none() => {
                fields.unsupported(option, &Value::Null, KINDS);
            }
            _ => {}
        }
    }
    let experts = fields.take("num_local_experts").unwrap_or(8.into());
    if experts != 0 {
        fields.unsupported("num_local_experts", &experts, "0");
    }
    fields.ignore(&["num_experts_per_tok", "intermediate_size"]);
    fields.default("shared_intermediate_size", 1024.into());
    fields.rename("shared_intermediate_size", "intermediate_size");
    // Without this option, no layer is rotated.
    if fields.text("position_embedding_type").as_deref() != Some("rope") {
        family.unrotated = Unrotated::Full;
    }
    let options =
        ["chunk_size", "conv_bias", "d_conv", "d_head", "d_state", "expand", "n_groups", "n_heads", "proj_bias"];
    options.iter().for_each(|option| fields.ignore(&[&format!("mamba_{option}")]));
    fields.ignore(&["time_step_limit", "time_step_min", "time_step_max", "init_method"]);
    fields.require("normalization_function", "rmsnorm");
}

pub(super) fn dots1(fields: &mut Fields, llama: LlamaConfig, _: &Family) -> MoeConfig {
    let (experts, top_k, shared, groups) = (None, None, None, (1, 1));
    let defaults = DeepSeek { experts, top_k, hidden: 1408, shared, dense: 0, renormalise: false, scale: 1.0, groups };
    sigmoid_experts(fields, llama, &defaults)
}

pub(super) fn deepseek_v3(fields: &mut Fields, llama: LlamaConfig, family: &Family) -> MoeConfig {
    let (experts, top_k, shared, groups) = (Some(256), Some(8), Some(1), (8, 4));
    let defaults = DeepSeek { experts, top_k, hidden: 2048, shared, dense: 3, renormalise: true, scale: 2.5, groups };
    let latent = latent(fields, &LatentConfig::default());
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
    let latent = latent(fields, &LatentConfig::default());
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

/// Reads the options of latent attention. `defaults` has the values of missing options.
fn latent(fields: &mut Fields, defaults: &LatentConfig) -> LatentConfig {
    let &LatentConfig { query_rank, kv_rank, plain_size, rotated_size, value_size, neighbours } = defaults;
    // If the option is null, queries are computed without a latent. Only a missing option has the default.
    let is_whole = fields.has("q_lora_rank") && fields.peek("q_lora_rank").is_none();
    let query_rank = (!is_whole).then(|| fields.count("q_lora_rank", query_rank, SIZE));
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
        neighbours: fields.flag("rope_interleave", neighbours),
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

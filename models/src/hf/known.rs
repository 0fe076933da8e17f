//! Options of a config.json that may occur in any model family and do not affect the model: metadata, whose values do
//! not matter, and unsupported features, which must be switched off.
//!
//! In: the options that a model family has not read. Out: those that this module does not list either, and a problem
//! for each unsupported feature that is switched on. Never: an option that is skipped because it is unknown.

use serde_json::{Value, json};

use super::fields::Fields;
use super::generation;

/// Options whose value does not matter: names, stored types, initialization settings, dropout (which is not applied),
/// labels, lengths that do not limit the model, and implementation choices of other programs.
const METADATA: [&str; 64] = [
    "attn_implementation",
    "auto_map",
    "aux_loss_alpha",
    "base_model",
    "chunk_size_feed_forward",
    "custom_pipelines",
    "dropout",
    "dtype",
    "embedding_initializer_range",
    "ep_size",
    "experts_implementation",
    "finetuning_task",
    "flash_attention",
    "gradient_checkpointing",
    "id2label",
    "initializer_range",
    "is_composition",
    "is_llama_config",
    "keys_to_ignore_at_inference",
    "label2id",
    "license",
    "max_model_len",
    "max_seq_len",
    "max_seq_length",
    "max_sequence_length",
    "model_max_length",
    "model_name",
    "model_type",
    "n_ctx",
    "n_special",
    "name_or_path",
    "neftune_noise_alpha",
    "num_labels",
    "output_attentions",
    "output_hidden_states",
    "output_past",
    "predict_special_tokens",
    "prefix",
    "pretraining_tp",
    "problem_type",
    "return_dict",
    "router_aux_loss_coef",
    "router_z_loss_coef",
    "seq_aux",
    "seq_length",
    "tags",
    "task_specific_params",
    "tf_legacy_loss",
    "tie_last_hidden_states",
    "tokenizer_class",
    "tokenizer_model_max_length",
    "tokenizer_padding_side",
    "torch_dtype",
    "torchscript",
    "transformers.js_config",
    "transformers_version",
    "transformers_weights",
    "use_bfloat16",
    "use_flash_attention",
    "use_flash_attention_2",
    "use_flash_attn",
    "use_return_dict",
    "version",
    "xla_device",
];

/// Prefixes of options that hold private state of the program that wrote the file, or notes of a training program.
const METADATA_PREFIXES: [&str; 2] = ["_", "unsloth_"];

/// Suffixes of options for special tokens and dropout.
const METADATA_SUFFIXES: [&str; 6] = ["_token_id", "_token_ids", "_token_index", "_pdrop", "_dropout", "_dropout_prob"];

/// Features that are unsupported, or supported only in some families. They must be switched off in all other families.
const OFF: [&str; 31] = [
    "add_bias_linear",
    "add_cross_attention",
    "alibi",
    "attention_chunk_size",
    "attention_out_bias",
    "attention_qkv_bias",
    "bias",
    "clip_qkv",
    "cross_attention_hidden_size",
    "dual_chunk_attention_config",
    "is_decoder",
    "is_encoder_decoder",
    "output_router_logits",
    "parallel_attn",
    "per_layer_config",
    "pruned_heads",
    "qk_norm",
    "qkv_bias",
    "rope_interleaved",
    "tie_encoder_decoder",
    "use_alibi",
    "use_bias",
    "use_bidirectional_attention",
    "use_dynamic_ntk",
    "use_logn_attn",
    "use_moe",
    "use_mrope",
    "use_mup",
    "use_parallel_residual",
    "use_qk_norm",
    "use_qkv_bias",
];

/// Returns the options that have no effect at a value other than null, false or empty, each with this value.
fn neutral() -> [(&'static str, Value); 18] {
    [
        ("embedding_multiplier", json!(1.0)),
        ("is_causal", json!(true)),
        ("logit_scale", json!(1.0)),
        ("logits_scaling", json!(1.0)),
        ("moe_intermediate_size", json!(0)),
        ("n_routed_experts", json!(0)),
        ("n_shared_experts", json!(0)),
        ("num_experts", json!(0)),
        ("num_local_experts", json!(0)),
        ("num_mtp_layers", json!(0)),
        ("num_nextn_predict_layers", json!(0)),
        ("residual_multiplier", json!(1.0)),
        ("rope_ratio", json!(1.0)),
        ("rope_scaling_factor", json!(1.0)),
        ("rotary_pct", json!(1.0)),
        ("scale_emb", json!(1.0)),
        ("shared_expert_intermediate_size", json!(0)),
        ("use_rope", json!(true)),
    ]
}

/// Reads the options of this module. Must be called after the model family has read its own options.
pub(super) fn take(fields: &mut Fields) {
    architectures(fields);
    fields.require_off(&OFF);
    for (field, value) in neutral() {
        fields.require(field, value);
    }
    fields.pass_over_if(|field| {
        METADATA.contains(&field)
            || METADATA_PREFIXES.iter().any(|prefix| field.starts_with(prefix))
            || METADATA_SUFFIXES.iter().any(|suffix| field.ends_with(suffix))
            || generation::is_option(field)
    });
}

/// True if this is the class name of a model without a head, such as `LlamaModel`.
fn is_base(name: &str) -> bool {
    let family = name.strip_suffix("TextModel").or(name.strip_suffix("Model"));
    family.is_some_and(|family| {
        !["Reward", "Bi", "Dense", "DoubleHeads", "Embedding"].iter().any(|suffix| family.ends_with(suffix))
    })
}

/// Checks that the model predicts the next token. Models for other tasks have other heads and are refused. A base model
/// is stored without a head. It is accepted, because the head may be tied to the embedding.
fn architectures(fields: &mut Fields) {
    let Some(found) = fields.take("architectures") else { return };
    let names: Vec<&str> = found.as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    let predicts_tokens = |name: &&str| match name.rsplit_once("For") {
        Some((_, task)) => task == "CausalLM",
        None => name.ends_with("LMHeadModel") || is_base(name),
    };
    if !names.is_empty() && !names.iter().any(predicts_tokens) {
        fields.unsupported(
            "architectures",
            &found,
            "models that predict the next token (…ForCausalLM, GPT2LMHeadModel)",
        );
    }
}

//! GPT-2. The weights of linear layers are stored transposed. Published files of GPT-2 lack the prefix `transformer.`
//! of tensor names.

use super::fields::Fields;
use crate::{Activation, GptConfig};

pub(super) fn take(fields: &mut Fields) -> GptConfig {
    let size = 1..=1 << 20;
    let width = fields.count("n_embd", None, size.clone());
    let heads = fields.count("n_head", None, size.clone());
    if !width.is_multiple_of(heads) {
        fields.wrong("n_head", &heads.into(), &format!("a divisor of n_embd, {width}"));
    }
    let hidden = fields.peek("n_inner").is_some().then(|| fields.count("n_inner", Some(4 * width), 1..=1 << 22));
    let config = GptConfig {
        vocabulary: fields.count("vocab_size", None, 1..=1 << 28),
        sequence: fields.count("n_positions", None, 1..=1 << 28),
        layers: fields.count("n_layer", None, 1..=4096),
        heads,
        width,
        hidden,
        layer_norm_eps: fields.positive("layer_norm_epsilon", Some(1e-5)),
        activation: match fields.one_of("activation_function", &["gelu_new", "gelu_pytorch_tanh", "gelu"]) {
            "gelu" => Activation::GeluErf,
            _ => Activation::GeluTanh,
        },
        tied: fields.flag("tie_word_embeddings", true),
        dropout: 0.0,
    };
    for (field, supported) in
        [("scale_attn_weights", true), ("scale_attn_by_inverse_layer_idx", false), ("reorder_and_upcast_attn", false)]
    {
        fields.require(field, supported);
    }
    // Other model families have these names for the same settings. If a GPT-2 file has such an option too, it must have
    // the value of GPT-2's own option.
    for (field, value) in [
        ("hidden_size", width),
        ("max_position_embeddings", config.sequence),
        ("num_attention_heads", heads),
        ("num_hidden_layers", config.layers),
    ] {
        fields.require(field, value);
    }
    // `summary_…` options affect only classification models.
    fields.pass_over_if(|field| field.starts_with("summary_"));
    config
}

/// Returns the stored name of a parameter, and true if the parameter is stored transposed.
pub(super) fn stored(parameter: &str, prefix: &str) -> (String, bool) {
    let is_transposed = ["c_attn.weight", "c_proj.weight", "c_fc.weight"].iter().any(|end| parameter.ends_with(end));
    let prefix = if parameter == super::HEAD { "" } else { prefix };
    (format!("{prefix}{parameter}"), is_transposed)
}

//! Gemma 2 (arXiv 2408.00118) and the text models of Gemma 3 (arXiv 2503.19786).

use super::fields::Fields;
use super::llama::{self, Family};
use super::window::WindowedLayers;
use crate::{GateActivation, LlamaConfig, Norms, QkNorm};

/// The settings that both families share: norms before and after each part of a block, which multiply by 1 + weight;
/// GeGLU; and a scaled embedding, to which the head is tied.
const GEMMA: Family = Family {
    kv_heads: Some(4),
    head_size: Some(256),
    norms: Norms::Both,
    window: WindowedLayers::AllBut { every: 2 },
    activation: GateActivation::Gelu,
    padding: Some(0),
    tied: true,
    ..Family::LLAMA
};

pub(super) fn gemma2(fields: &mut Fields) -> LlamaConfig {
    // An older name of `sliding_window`; files with the older name also have the newer one.
    fields.ignore(&["sliding_window_size"]);
    take(fields, &GEMMA, Some(50.0), Some(30.0))
}

pub(super) fn gemma3(fields: &mut Fields) -> LlamaConfig {
    // Layers with a window have a rotary base of their own.
    let local = fields.positive("rope_local_base_freq", Some(10_000.0));
    // Files with `_sliding_window_pattern` also have `layer_types`, which transformers reads instead.
    let every = fields.count("sliding_window_pattern", Some(6), 1..=4096);
    let window = WindowedLayers::AllBut { every };
    let family = Family { rope_theta: 1e6, qk_norm: QkNorm::Head, window, local_rope_theta: Some(local), ..GEMMA };
    take(fields, &family, None, None)
}

fn take(fields: &mut Fields, family: &Family, attention_cap: Option<f64>, logit_cap: Option<f64>) -> LlamaConfig {
    fields.one_of("hidden_activation", &["gelu_pytorch_tanh"]);
    fields.require("use_bidirectional_attention", false);
    let attention_cap = cap(fields, "attn_logit_softcapping", attention_cap);
    let logit_cap = cap(fields, "final_logit_softcapping", logit_cap);
    let query_scale = Some(fields.positive("query_pre_attn_scalar", Some(256.0)));
    LlamaConfig {
        offset_norms: true,
        scaled_embedding: true,
        query_scale,
        attention_cap,
        logit_cap,
        ..llama::take(fields, family)
    }
}

/// Reads a cap on scores or logits. A missing option has the default; null means no cap.
fn cap(fields: &mut Fields, field: &str, default: Option<f64>) -> Option<f64> {
    match fields.has(field) {
        true => fields.optional_positive(field),
        false => default,
    }
}

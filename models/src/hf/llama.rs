//! Llama and its like: Mistral, Qwen2, Qwen3, OLMo 2.

use std::ops::RangeInclusive;

use serde_json::Value;

use super::fields::Fields;
use super::rope;
use crate::{LlamaConfig, Norms, QkNorm};

/// Extents of one dimension.
pub(super) const SIZE: RangeInclusive<usize> = 1..=1 << 20;

/// What families have in common, and where they differ.
pub(super) struct Family {
    pub rope_theta: f64,
    pub rms_norm_eps: f64,
    /// Key-value heads where the file says nothing; all heads where there is nothing here.
    pub kv_heads: Option<usize>,
    /// The heads' width where the file says nothing; hidden/heads where there is nothing here.
    pub head_size: Option<usize>,
    pub biases: Biases,
    pub qk_norm: QkNorm,
    pub norms: Norms,
    pub window: Window,
}

/// Where attention has biases.
pub(super) enum Biases {
    Never,
    /// On queries, keys and values, by an option with this default.
    Qkv {
        option: Option<&'static str>,
    },
    /// `attention_bias` decides, for all four layers.
    All,
}

/// When `sliding_window` counts.
pub(super) enum Window {
    /// There is no such option.
    Never,
    /// Always; this where the file says nothing.
    Always(Option<usize>),
    /// With `use_sliding_window`, from layer `max_window_layers` on.
    Asked,
}

impl Family {
    pub const LLAMA: Self = Self {
        rope_theta: 10_000.0,
        rms_norm_eps: 1e-6,
        kv_heads: None,
        head_size: None,
        biases: Biases::All,
        qk_norm: QkNorm::None,
        norms: Norms::Before,
        window: Window::Never,
    };
    pub const MISTRAL: Self =
        Self { kv_heads: Some(8), biases: Biases::Never, window: Window::Always(Some(4096)), ..Self::LLAMA };
    pub const QWEN2: Self =
        Self { kv_heads: Some(32), biases: Biases::Qkv { option: None }, window: Window::Asked, ..Self::LLAMA };
    pub const QWEN3: Self =
        Self { kv_heads: Some(32), head_size: Some(128), qk_norm: QkNorm::Head, window: Window::Asked, ..Self::LLAMA };
    pub const OLMO2: Self = Self { rms_norm_eps: 1e-5, qk_norm: QkNorm::Width, norms: Norms::After, ..Self::LLAMA };
}

pub(super) fn take(fields: &mut Fields, family: &Family) -> LlamaConfig {
    let mut config = LlamaConfig {
        vocabulary: fields.count("vocab_size", None, 1..=1 << 28),
        layers: fields.count("num_hidden_layers", None, 1..=4096),
        heads: fields.count("num_attention_heads", None, SIZE),
        width: fields.count("hidden_size", None, SIZE),
        hidden: fields.count("intermediate_size", None, 1..=1 << 22),
        rope_theta: family.rope_theta,
        rms_norm_eps: fields.positive("rms_norm_eps", Some(family.rms_norm_eps)),
        qk_norm: family.qk_norm,
        norms: family.norms,
        tied: fields.flag("tie_word_embeddings", false),
        ..LlamaConfig::default()
    };
    let heads = config.heads;
    config.kv_heads = fields.count("num_key_value_heads", Some(family.kv_heads.unwrap_or(heads)), SIZE);
    if !heads.is_multiple_of(config.kv_heads) {
        let expected = format!("a divisor of num_attention_heads, {heads}");
        fields.wrong("num_key_value_heads", &config.kv_heads.into(), &expected);
    }
    let head_size = head_size(fields, &config, family);
    config.head_size = Some(head_size);
    fields.one_of("hidden_act", &["silu", "swish"]);
    match family.biases {
        Biases::Never => fields.only("attention_bias", false),
        Biases::Qkv { option } => {
            fields.only("attention_bias", false);
            config.qkv_bias = option.is_none_or(|option| fields.flag(option, true));
        }
        Biases::All => {
            config.qkv_bias = fields.flag("attention_bias", false);
            config.output_bias = config.qkv_bias;
        }
    }
    config.mlp_bias = fields.flag("mlp_bias", false);
    config.sliding_window = window(fields, &family.window, config.layers);
    rope::take(fields, &mut config, head_size);
    // Dropout is off; the other is how a product was once split.
    fields.pass_over(&["attention_dropout", "pretraining_tp"]);
    config
}

fn head_size(fields: &mut Fields, config: &LlamaConfig, family: &Family) -> usize {
    let &LlamaConfig { width, heads, .. } = config;
    let given = fields.has("head_dim").then(|| fields.count("head_dim", Some(0), 0..=1 << 16)).filter(|size| *size > 0);
    let Some(size) = given.or(family.head_size) else {
        if !width.is_multiple_of(heads) {
            fields.wrong("num_attention_heads", &heads.into(), &format!("a divisor of hidden_size, {width}"));
        }
        return (width / heads).max(1);
    };
    if !size.is_multiple_of(2) {
        fields.wrong("head_dim", &size.into(), "even, as rotary positions need");
    }
    size
}

/// Tokens that a token of some layer attends to at most.
fn window(fields: &mut Fields, window: &Window, layers: usize) -> Option<usize> {
    let types = fields.take("layer_types");
    let of_types = types.as_ref().map(|types| windowed(fields, types));
    let (default, is_used) = match window {
        Window::Never => {
            if of_types == Some(true) {
                fields.unsupported("layer_types", &types.unwrap_or_default(), "full_attention");
            }
            return None;
        }
        Window::Always(default) => (*default, true),
        Window::Asked => {
            let first = fields.count("max_window_layers", Some(28), 0..=1 << 40);
            (Some(4096), fields.flag("use_sliding_window", false) && first < layers)
        }
    };
    // Null is not the default, but none.
    let given = fields.has("sliding_window").then(|| fields.count("sliding_window", Some(0), 0..=1 << 40));
    let size = given.or(default).filter(|size| *size > 0);
    // What each layer does, where it is said, decides.
    size.filter(|_| of_types.unwrap_or(is_used))
}

/// Whether some layer has a window.
fn windowed(fields: &mut Fields, types: &Value) -> bool {
    let all: Option<Vec<&str>> = types.as_array().and_then(|types| types.iter().map(Value::as_str).collect());
    let known = ["full_attention", "sliding_attention"];
    match all {
        Some(all) if all.iter().all(|one| known.contains(one)) => all.contains(&known[1]),
        _ => {
            fields.unsupported("layer_types", types, &known.join(", "));
            false
        }
    }
}

//! Llama and related models: Mistral, Qwen2, Qwen3, OLMo 2.

use std::ops::RangeInclusive;

use super::fields::Fields;
use super::rope;
use super::window::{self, WindowedLayers};
use crate::{GateActivation, LlamaConfig, Norms, QkNorm};

/// The allowed range of widths and of numbers of heads.
pub(super) const SIZE: RangeInclusive<usize> = 1..=1 << 20;

/// The defaults and peculiarities of a family of models.
pub(super) struct Family {
    pub rope_theta: f64,
    /// Default rotary base of layers with a sliding window. `None` means the base of the other layers.
    pub local_rope_theta: Option<f64>,
    pub rms_norm_eps: f64,
    /// Default number of key-value heads. `None` means as many as query heads.
    pub kv_heads: Option<usize>,
    /// Default width of a head. `None` means width ÷ heads.
    pub head_size: Option<usize>,
    pub biases: Biases,
    pub qk_norm: QkNorm,
    pub norms: Norms,
    pub window: WindowedLayers,
    pub activation: GateActivation,
    /// Default padding token. `None` means that there is no padding token by default.
    pub padding: Option<u32>,
    /// True if the head is tied by default.
    pub tied: bool,
}

/// The projections of the attention that have biases.
pub(super) enum Biases {
    Never,
    /// The query, key and value projections have biases. If the family has an `option`, it can switch the biases off;
    /// its default is on.
    Qkv {
        option: Option<&'static str>,
    },
    /// All four projections have biases if the option `attention_bias` is on, and none has if it is off.
    All,
}

impl Family {
    pub const LLAMA: Self = Self {
        rope_theta: 10_000.0,
        local_rope_theta: None,
        rms_norm_eps: 1e-6,
        kv_heads: None,
        head_size: None,
        biases: Biases::All,
        qk_norm: QkNorm::None,
        norms: Norms::Before,
        window: WindowedLayers::Never,
        activation: GateActivation::Silu,
        padding: None,
        tied: false,
    };
    pub const MISTRAL: Self =
        Self { kv_heads: Some(8), biases: Biases::Never, window: WindowedLayers::All(Some(4096)), ..Self::LLAMA };
    pub const QWEN2: Self =
        Self { kv_heads: Some(32), biases: Biases::Qkv { option: None }, window: WindowedLayers::Last, ..Self::LLAMA };
    pub const QWEN3: Self = Self {
        kv_heads: Some(32),
        head_size: Some(128),
        qk_norm: QkNorm::Head,
        window: WindowedLayers::Last,
        ..Self::LLAMA
    };
    pub const OLMO2: Self =
        Self { rms_norm_eps: 1e-5, qk_norm: QkNorm::Width, norms: Norms::After, padding: Some(1), ..Self::LLAMA };
}

pub(super) fn take(fields: &mut Fields, family: &Family) -> LlamaConfig {
    let mut config = LlamaConfig {
        vocabulary: fields.count("vocab_size", None, 1..=1 << 28),
        layers: fields.count("num_hidden_layers", None, 1..=4096),
        heads: fields.count("num_attention_heads", None, SIZE),
        width: fields.count("hidden_size", None, SIZE),
        hidden: fields.count("intermediate_size", None, 1..=1 << 22),
        rope_theta: family.rope_theta,
        window_rope_theta: family.local_rope_theta,
        rms_norm_eps: fields.positive("rms_norm_eps", Some(family.rms_norm_eps)),
        qk_norm: family.qk_norm,
        norms: family.norms,
        activation: family.activation,
        tied: fields.flag("tie_word_embeddings", family.tied),
        ..LlamaConfig::default()
    };
    config.padding = padding(fields, family.padding, config.vocabulary);
    let heads = config.heads;
    config.kv_heads = fields.count("num_key_value_heads", Some(family.kv_heads.unwrap_or(heads)), SIZE);
    if !heads.is_multiple_of(config.kv_heads) {
        let expected = format!("a divisor of num_attention_heads, {heads}");
        fields.wrong("num_key_value_heads", &config.kv_heads.into(), &expected);
    }
    let head_size = head_size(fields, &config, family);
    config.head_size = Some(head_size);
    match family.activation {
        GateActivation::Silu => fields.one_of("hidden_act", &["silu", "swish"]),
        GateActivation::Gelu => fields.one_of("hidden_act", &["gelu_pytorch_tanh"]),
    };
    match family.biases {
        Biases::Never => fields.require("attention_bias", false),
        Biases::Qkv { option } => {
            fields.require("attention_bias", false);
            config.qkv_bias = option.is_none_or(|option| fields.flag(option, true));
            fields.require("qkv_bias", config.qkv_bias);
        }
        Biases::All => {
            config.qkv_bias = fields.flag("attention_bias", false);
            config.output_bias = config.qkv_bias;
        }
    }
    config.mlp_bias = fields.flag("mlp_bias", false);
    if family.qk_norm != QkNorm::None {
        ["qk_norm", "use_qk_norm"].iter().for_each(|name| fields.require(name, true));
    }
    (config.sliding_window, config.full_layers) = window::take(fields, family.window, config.layers);
    rope::take(fields, &mut config, head_size);
    config
}

/// Reads the padding token, whose embedding row is not trained, as in PyTorch. Null means that there is no padding
/// token. A negative number counts from the end of the vocabulary.
fn padding(fields: &mut Fields, default: Option<u32>, vocabulary: usize) -> Option<u32> {
    if !fields.has("pad_token_id") {
        return default.filter(|&id| (id as usize) < vocabulary);
    }
    let value = fields.take("pad_token_id")?;
    let place = |id: i64| u32::try_from(if id < 0 { id + vocabulary as i64 } else { id }).ok();
    let id = value.as_i64().and_then(place).filter(|&id| (id as usize) < vocabulary);
    if id.is_none() {
        fields.wrong("pad_token_id", &value, &format!("a token, below {vocabulary}"));
    }
    id
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

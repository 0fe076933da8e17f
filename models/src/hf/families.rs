//! The families, each a table of its traits and a map of its names. A table names what differs from Llama.

use super::experts;
use super::family::{ATTENTION_BIAS, Bias, Family, Unrotated};
use super::fields::Fields;
use super::layout::{GPT_OSS, GRANITE, LLAMA4, MIXTRAL};
use super::rope;
use super::window::WindowedLayers;
use crate::{FusedQkv, GateActivation, LlamaConfig, NormKind, Norms, QkNorm, QueryGrowth};

const LLAMA: Family = Family::LLAMA;

/// The bias of all linear layers by `use_bias`.
const fn use_bias(default: bool) -> [Bias; 3] {
    [Bias::Option("use_bias", default); 3]
}

/// The biases of the query, key and value projections alone, by `attention_bias`.
const fn qkv_bias(default: bool) -> [Bias; 3] {
    [Bias::Option("attention_bias", default), Bias::Never, Bias::Never]
}

/// No bias in the attention.
const NO_BIAS: [Bias; 3] = [Bias::Never, Bias::Never, Bias::Option("mlp_bias", false)];

const MISTRAL: Family = Family {
    name: "mistral",
    kv_heads: Some(8),
    biases: NO_BIAS,
    window: WindowedLayers::All(Some(4096)),
    positions: 131_072,
    ..LLAMA
};

const QWEN2: Family = Family {
    name: "qwen2",
    kv_heads: Some(32),
    biases: [Bias::Always, Bias::Never, Bias::Option("mlp_bias", false)],
    window: WindowedLayers::Last,
    positions: 32_768,
    ..LLAMA
};

const QWEN3: Family = Family {
    name: "qwen3",
    kv_heads: Some(32),
    head_size: Some(128),
    qk_norm: QkNorm::Head,
    window: WindowedLayers::Last,
    positions: 32_768,
    ..LLAMA
};

/// OLMo 2 (arXiv 2501.00656).
const OLMO2: Family = Family {
    name: "olmo2",
    eps: ("rms_norm_eps", 1e-5),
    qk_norm: QkNorm::Width,
    norms: Norms::After,
    padding: Some(1),
    ..LLAMA
};

/// Gemma (arXiv 2403.08295): norms that multiply by 1 + weight, GeGLU, and a scaled embedding, to which the head is tied.
const GEMMA: Family = Family {
    name: "gemma",
    kv_heads: Some(16),
    head_size: Some(256),
    activation: GateActivation::Gelu,
    padding: Some(0),
    tied: true,
    positions: 8192,
    prepare: |fields, _| {
        // In this family alone, `gelu` has always meant the tanh approximation.
        if fields.peek("hidden_act").is_some_and(|act| act == "gelu") {
            fields.ignore(&["hidden_act"]);
        }
        fields.one_of("hidden_activation", &["gelu_pytorch_tanh"]);
    },
    finish: |fields, config| {
        fields.require("use_bidirectional_attention", false);
        (config.offset_norms, config.scaled_embedding) = (true, true);
    },
    ..LLAMA
};

/// Gemma 2 (arXiv 2408.00118): norms before and after each part, and capped scores and logits.
const GEMMA2: Family = Family {
    name: "gemma2",
    kv_heads: Some(4),
    norms: Norms::Both,
    window: WindowedLayers::AllBut { every: 2 },
    prepare: |fields, _| {
        // An older name of `sliding_window`; files with the older name also have the newer one.
        fields.ignore(&["sliding_window_size"]);
        fields.one_of("hidden_act", &["gelu_pytorch_tanh"]);
        fields.one_of("hidden_activation", &["gelu_pytorch_tanh"]);
    },
    finish: |fields, config| gemma2(fields, config, [Some(50.0), Some(30.0)]),
    ..GEMMA
};

/// The text models of Gemma 3 (arXiv 2503.19786).
const GEMMA3: Family = Family {
    name: "gemma3_text",
    rope_theta: 1e6,
    qk_norm: QkNorm::Head,
    positions: 131_072,
    prepare: |fields, family| {
        (GEMMA2.prepare)(fields, family);
        // Layers with a window have a rotary base of their own.
        family.local_rope_theta = Some(fields.positive("rope_local_base_freq", Some(10_000.0)));
        // Files with `_sliding_window_pattern` also have `layer_types`, which transformers reads instead.
        family.window = window_pattern(fields, 6);
    },
    finish: |fields, config| gemma2(fields, config, [None, None]),
    ..GEMMA2
};

const PHI3: Family = Family {
    name: "phi3",
    partial: Some(1.0),
    original_positions: Some(4096),
    eps: ("rms_norm_eps", 1e-5),
    biases: NO_BIAS,
    fused_qkv: FusedQkv::Stacked,
    fused_gate_up: true,
    window: WindowedLayers::All(None),
    padding: Some(32_000),
    positions: 4096,
    prepare: |fields, _| {
        // Options of Phi-4-mini, whose other values are those of other models.
        fields.require("full_attn_mod", 1);
        fields.require("interpolate_factor", 1);
        fields.require("lm_head_bias", false);
    },
    ..LLAMA
};

/// GLM-4 (arXiv 2406.12793), as of 2024.
const GLM: Family = Family {
    name: "glm",
    partial: Some(0.5),
    eps: ("rms_norm_eps", 1.5625e-7),
    kv_heads: Some(2),
    head_size: Some(128),
    biases: qkv_bias(true),
    neighbours: true,
    fused_gate_up: true,
    padding: Some(151_329),
    positions: 131_072,
    ..LLAMA
};

/// GLM-4 of 2025, with norms before and after each part.
const GLM4: Family = Family {
    name: "glm4",
    norms: Norms::Both,
    names: &[
        ("post_attention_layernorm", "post_self_attn_layernorm"),
        ("pre_feedforward_layernorm", "post_attention_layernorm"),
        ("post_feedforward_layernorm", "post_mlp_layernorm"),
    ],
    ..GLM
};

/// GPT-NeoX (arXiv 2204.06745).
const GPT_NEOX: Family = Family {
    name: "gpt_neox",
    partial: Some(0.25),
    eps: ("layer_norm_eps", 1e-5),
    biases: [Bias::Option("attention_bias", true), Bias::Option("attention_bias", true), Bias::Always],
    norm: NormKind::Layer,
    fused_qkv: FusedQkv::ByHead,
    ungated: true,
    activation: GateActivation::GeluErf,
    names: &[
        ("model", "gpt_neox"),
        ("embed_tokens", "embed_in"),
        ("norm", "final_layer_norm"),
        ("lm_head", "embed_out"),
        ("self_attn", "attention"),
        ("qkv_proj", "query_key_value"),
        ("o_proj", "dense"),
        ("up_proj", "dense_h_to_4h"),
        ("down_proj", "dense_4h_to_h"),
    ],
    prepare: |fields, family| {
        let parallel = fields.flag("use_parallel_residual", true);
        family.norms = if parallel { Norms::Parallel } else { Norms::Before };
        fields.rename("rotary_emb_base", "rope_theta");
        fields.rename("rotary_pct", "partial_rotary_factor");
    },
    ..LLAMA
};

/// StarCoder2 (arXiv 2402.19173).
const STARCODER2: Family = Family {
    name: "starcoder2",
    eps: ("norm_epsilon", 1e-5),
    kv_heads: Some(2),
    biases: use_bias(true),
    norm: NormKind::Layer,
    window: WindowedLayers::All(None),
    ungated: true,
    activation: GateActivation::Gelu,
    tied: true,
    positions: 4096,
    names: &[("up_proj", "c_fc"), ("down_proj", "c_proj")],
    prepare: |fields, _| {
        fields.require("mlp_type", "default");
        fields.require("norm_type", "layer_norm");
        fields.require("scale_attn_weights", true);
        // Older names of `norm_epsilon` and `hidden_act`, and the type of the softmax: transformers does not read them.
        fields.ignore(&[
            "rms_norm_eps",
            "layer_norm_epsilon",
            "activation_function",
            "attention_softmax_in_fp32",
            "scale_attention_softmax_in_fp32",
        ]);
    },
    ..LLAMA
};

const STABLELM: Family = Family {
    name: "stablelm",
    partial: Some(0.25),
    eps: ("layer_norm_eps", 1e-5),
    kv_heads: Some(32),
    biases: [Bias::Option("use_qkv_bias", false), Bias::Never, Bias::Never],
    norm: NormKind::Layer,
    positions: 4096,
    prepare: |fields, family| {
        let parallel = fields.flag("use_parallel_residual", false);
        family.norms = if parallel { Norms::Shared } else { Norms::Before };
        family.qk_norm = if fields.flag("qk_layernorm", false) { QkNorm::OwnLayer } else { QkNorm::None };
    },
    names: &[("q_norm", "q_layernorm.norms"), ("k_norm", "k_layernorm.norms")],
    ..LLAMA
};

const COHERE: Family = Family {
    name: "cohere",
    rope_theta: 500_000.0,
    eps: ("layer_norm_eps", 1e-5),
    biases: [ATTENTION_BIAS, ATTENTION_BIAS, Bias::Never],
    norm: NormKind::LayerNoBias,
    norms: Norms::Shared,
    neighbours: true,
    padding: Some(0),
    tied: true,
    positions: 8192,
    prepare: |fields, family| {
        family.qk_norm = if fields.flag("use_qk_norm", false) { QkNorm::OwnLayer } else { QkNorm::None };
    },
    finish: |fields, config| config.traits.logit_scale = fields.positive("logit_scale", Some(0.0625)),
    ..LLAMA
};

const COHERE2: Family = Family {
    name: "cohere2",
    rope_theta: 10_000.0,
    unrotated: Unrotated::Full,
    prepare: |fields, family| {
        // Options of the program that trained Command R7B. Of each, only the value of the family is supported.
        fields.require("order_of_interleaved_layers", "local_attn_first");
        fields.require("position_embedding_type", "rope_gptj");
        let flags = ["use_embedding_sharing", "use_gated_activation", "use_parallel_block"];
        flags.iter().for_each(|flag| fields.require(flag, true));
        fields.ignore(&["use_parallel_embedding"]);
        family.window = window_pattern(fields, 4);
        match family.window {
            WindowedLayers::AllBut { every } if fields.peek("layer_types").is_none() => {
                fields.require("layer_switch", every);
            }
            _ => fields.ignore(&["layer_switch"]),
        }
    },
    ..COHERE
};

const GRANITE_DENSE: Family = Family { name: "granite", finish: multipliers, ..LLAMA };

const MIXTRAL_8X7B: Family = Family {
    name: "mixtral",
    rope_theta: 1e6,
    eps: ("rms_norm_eps", 1e-5),
    kv_heads: Some(8),
    biases: NO_BIAS,
    window: WindowedLayers::All(None),
    positions: 131_072,
    experts: Some(experts::mixtral),
    expert_names: MIXTRAL,
    ..LLAMA
};

/// DeepSeek-V3 (arXiv 2412.19437).
const DEEPSEEK_V3: Family = Family {
    name: "deepseek_v3",
    positions: 4096,
    prepare: experts::prepare_latent,
    experts: Some(experts::deepseek_v3),
    predicts_further: true,
    ..LLAMA
};

/// All families but GPT-2, which is not a [`Decoder`](crate::Decoder).
pub(super) const FAMILIES: &[Family] = &[
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    OLMO2,
    GEMMA,
    GEMMA2,
    GEMMA3,
    PHI3,
    GLM,
    GLM4,
    GPT_NEOX,
    STARCODER2,
    STABLELM,
    COHERE,
    COHERE2,
    GRANITE_DENSE,
    MIXTRAL_8X7B,
    DEEPSEEK_V3,
    Family { name: "ministral", window: WindowedLayers::Typed, ..MISTRAL },
    Family {
        name: "ministral3",
        eps: ("rms_norm_eps", 1e-5),
        head_size: Some(128),
        window: WindowedLayers::All(None),
        growing_queries: true,
        padding: Some(11),
        positions: 262_144,
        prepare: |fields, _| {
            rope::default(fields, || {
                serde_json::json!({
                    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16_384,
                    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                    "llama_4_scaling_beta": 0.1,
                })
            });
        },
        ..MISTRAL
    },
    // OLMo 3: a window in all but every fourth layer. Only the others have scaled frequencies.
    Family {
        name: "olmo3",
        rope_theta: 500_000.0,
        window: WindowedLayers::AllBut { every: 4 },
        // `rope_theta` has no effect on layers with a window, as in transformers.
        local_rope_theta: Some(500_000.0),
        ..OLMO2
    },
    Family {
        name: "smollm3",
        rope_theta: 2e6,
        kv_heads: Some(4),
        window: WindowedLayers::Unrotated,
        unrotated: Unrotated::Listed,
        padding: Some(128_004),
        positions: 32_768,
        tied: true,
        ..LLAMA
    },
    Family {
        name: "ernie4_5",
        positions: 131_072,
        rope_theta: 500_000.0,
        eps: ("rms_norm_eps", 1e-5),
        kv_heads: Some(2),
        head_size: Some(128),
        biases: use_bias(false),
        neighbours: true,
        padding: Some(0),
        tied: true,
        ..LLAMA
    },
    Family {
        name: "seed_oss",
        positions: 524_288,
        kv_heads: Some(8),
        head_size: Some(128),
        biases: [
            Bias::Option("attention_bias", true),
            Bias::Option("attention_out_bias", false),
            Bias::Option("mlp_bias", false),
        ],
        padding: Some(1),
        ..LLAMA
    },
    Family {
        name: "hunyuan_v1_dense",
        eps: ("rms_norm_eps", 1e-5),
        biases: [ATTENTION_BIAS, ATTENTION_BIAS, Bias::Never],
        qk_norm: QkNorm::Rotated,
        padding: Some(0),
        names: &[("q_norm", "query_layernorm"), ("k_norm", "key_layernorm")],
        prepare: |fields, _| rope::fixed_alpha(fields),
        ..LLAMA
    },
    Family {
        name: "exaone4",
        eps: ("rms_norm_eps", 1e-5),
        kv_heads: Some(32),
        biases: [Bias::Never; 3],
        qk_norm: QkNorm::Head,
        norms: Norms::After,
        unrotated: Unrotated::FullUnlessNull,
        prepare: |fields, family| {
            // All models of the family normalise queries and keys, and have their norms after each part.
            fields.ignore(&["reorder_qk_norm"]);
            family.window = window_pattern(fields, 4);
        },
        ..LLAMA
    },
    Family {
        name: "arcee",
        eps: ("rms_norm_eps", 1e-5),
        ungated: true,
        activation: GateActivation::Relu2,
        positions: 4096,
        ..LLAMA
    },
    // Apertus (arXiv 2509.14233).
    Family {
        name: "apertus",
        rope_theta: 1.2e7,
        eps: ("rms_norm_eps", 1e-5),
        biases: [ATTENTION_BIAS, ATTENTION_BIAS, Bias::Never],
        qk_norm: QkNorm::Head,
        ungated: true,
        activation: GateActivation::Xielu,
        padding: Some(3),
        positions: 65_536,
        names: &[("input_layernorm", "attention_layernorm"), ("post_attention_layernorm", "feedforward_layernorm")],
        prepare: |fields, _| {
            fields.require("post_norm", false);
            rope::default(fields, || {
                serde_json::json!({
                    "rope_type": "llama3", "rope_theta": 1.2e7, "factor": 8.0, "original_max_position_embeddings": 8192,
                    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                })
            });
        },
        ..LLAMA
    },
    Family {
        name: "qwen2_moe",
        kv_heads: Some(16),
        biases: [Bias::Option("qkv_bias", true), Bias::Never, Bias::Option("mlp_bias", false)],
        window: WindowedLayers::Alternate,
        experts: Some(experts::qwen2),
        ..QWEN2
    },
    Family {
        name: "qwen3_moe",
        kv_heads: Some(4),
        head_size: None,
        window: WindowedLayers::AllIfUsed,
        experts: Some(experts::qwen3),
        ..QWEN3
    },
    // OLMoE (arXiv 2409.02060).
    Family {
        name: "olmoe",
        positions: 4096,
        norms: Norms::Before,
        finish: |fields, config| config.traits.qkv_clip = fields.optional_positive("clip_qkv"),
        experts: Some(experts::olmoe),
        ..OLMO2
    },
    Family { name: "granitemoe", experts: Some(experts::granite), expert_names: GRANITE, ..GRANITE_DENSE },
    // DeepSeek-V2 (arXiv 2405.04434).
    Family {
        name: "deepseek_v2",
        positions: 2048,
        experts: Some(experts::deepseek_v2),
        predicts_further: false,
        ..DEEPSEEK_V3
    },
    Family {
        name: "glm4_moe",
        positions: 131_072,
        partial: Some(0.5),
        eps: ("rms_norm_eps", 1e-5),
        kv_heads: Some(8),
        biases: qkv_bias(false),
        names: &[("shared_expert", "shared_experts")],
        prepare: |fields, family| {
            let normed = fields.flag("use_qk_norm", false);
            family.qk_norm = if normed { QkNorm::Head } else { QkNorm::None };
        },
        experts: Some(experts::glm4),
        predicts_further: true,
        ..LLAMA
    },
    Family {
        name: "dots1",
        qk_norm: QkNorm::Head,
        biases: [ATTENTION_BIAS, ATTENTION_BIAS, Bias::Never],
        window: WindowedLayers::From(62),
        names: &[("shared_expert", "shared_experts")],
        experts: Some(experts::dots1),
        ..LLAMA
    },
    // gpt-oss (arXiv 2508.10925): sinks, and experts with biases and limits.
    Family {
        name: "gpt_oss",
        positions: 131_072,
        rope_theta: 150_000.0,
        eps: ("rms_norm_eps", 1e-5),
        kv_heads: Some(8),
        head_size: Some(64),
        biases: [Bias::Option("attention_bias", true), Bias::Option("attention_bias", true), Bias::Never],
        window: WindowedLayers::AllBut { every: 2 },
        names: &[("gate", "router")],
        prepare: |fields, _| {
            if !fields.has("sliding_window") {
                fields.set("sliding_window", 128.into());
            }
            rope::default(fields, || {
                serde_json::json!({
                    "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0,
                    "beta_slow": 1.0, "truncate": false,
                })
            });
        },
        finish: |_, config| config.traits.sinks = true,
        experts: Some(experts::gpt_oss),
        expert_names: GPT_OSS,
        ..LLAMA
    },
    // Llama 4: chunks in the layers with rotary positions, and growing queries in the others.
    Family {
        name: "llama4_text",
        positions: 131_072,
        rope_theta: 500_000.0,
        eps: ("rms_norm_eps", 1e-5),
        kv_heads: Some(8),
        head_size: Some(128),
        biases: [ATTENTION_BIAS, ATTENTION_BIAS, Bias::Never],
        window: WindowedLayers::Chunked,
        unrotated: Unrotated::Listed,
        neighbours: true,
        names: &[("mlp", "feed_forward"), ("gate", "router")],
        prepare: |fields, family| {
            let normed = fields.flag("use_qk_norm", true);
            family.qk_norm = if normed { QkNorm::RotatedNoWeight } else { QkNorm::None };
            fields.require("for_llm_compressor", false);
        },
        finish: |fields, config| {
            let length = fields.count("floor_scale", Some(8192), 1..=1 << 40);
            let rate = fields.positive("attn_scale", Some(0.1));
            let grows = fields.flag("attn_temperature_tuning", true);
            config.traits.query_growth = grows.then_some(QueryGrowth { rate, length, unrotated: true });
            config.traits.chunked = true;
        },
        experts: Some(experts::llama4),
        expert_names: LLAMA4,
        ..LLAMA
    },
    Family {
        name: "minimax_m2",
        positions: 196_608,
        rope_theta: 5e6,
        partial: Some(1.0),
        kv_heads: Some(8),
        head_size: Some(128),
        biases: [Bias::Never; 3],
        qk_norm: QkNorm::Width,
        prepare: experts::prepare_minimax,
        experts: Some(experts::minimax),
        expert_names: MIXTRAL,
        ..LLAMA
    },
];

/// Families that cannot be read, with the part that is missing.
pub(super) const REFUSED: [(&str, &str); 25] = [
    ("aya_vision", "a factor of the logits, which transformers leaves out of the whole model"),
    ("bamba", STATE_SPACE),
    ("falcon_h1", STATE_SPACE),
    ("falcon_mamba", STATE_SPACE),
    ("gemma3n", GEMMA3N),
    ("gemma3n_text", GEMMA3N),
    ("gemma4", GEMMA4),
    ("gemma4_text", GEMMA4),
    ("granitemoehybrid", STATE_SPACE),
    ("jamba", STATE_SPACE),
    ("kimi_linear", LINEAR),
    ("lfm2", "short convolutions"),
    ("mamba", STATE_SPACE),
    ("mamba2", STATE_SPACE),
    ("minimax", LINEAR),
    ("mllama", "layers of attention to images, between those of its text part"),
    ("nemotron_h", STATE_SPACE),
    ("paligemma", "attention of a prompt's tokens to later ones"),
    ("qwen3_5", LINEAR),
    ("qwen3_5_moe", LINEAR),
    ("qwen3_5_moe_text", LINEAR),
    ("qwen3_5_text", LINEAR),
    ("qwen3_next", LINEAR),
    ("recurrent_gemma", "recurrent layers"),
    ("zamba2", STATE_SPACE),
];

const STATE_SPACE: &str = "state-space layers";
const LINEAR: &str = "linear attention";
const GEMMA3N: &str = "per-layer embeddings, AltUp, LAuReL, sparse activations and layers that share keys and values";
const GEMMA4: &str =
    "heads of another width in layers with full attention, and in smaller models per-layer embeddings and shared keys";

/// Reads `sliding_window_pattern`: all but every so manyth layer have a window. Files without windows may have 0. The
/// pattern may be a text such as `LLLG` if it has no effect, because the file has `layer_types`.
fn window_pattern(fields: &mut Fields, default: usize) -> WindowedLayers {
    let is_text = fields.peek("sliding_window_pattern").is_some_and(serde_json::Value::is_string);
    if is_text && fields.peek("layer_types").is_some() {
        fields.ignore(&["sliding_window_pattern"]);
    }
    WindowedLayers::AllBut { every: fields.count("sliding_window_pattern", Some(default), 0..=4096) }
}

/// Reads the options that Gemma 2 and 3 share. The caps are the defaults for scores and logits.
fn gemma2(fields: &mut Fields, config: &mut LlamaConfig, [scores, logits]: [Option<f64>; 2]) {
    // A missing option has the default; null means no cap.
    let mut cap = |field: &str, default| if fields.has(field) { fields.optional_positive(field) } else { default };
    config.attention_cap = cap("attn_logit_softcapping", scores);
    config.logit_cap = cap("final_logit_softcapping", logits);
    config.query_scale = Some(fields.positive("query_pre_attn_scalar", Some(256.0)));
    (GEMMA.finish)(fields, config);
}

/// Reads the factors of Granite.
fn multipliers(fields: &mut Fields, config: &mut LlamaConfig) {
    config.traits.embedding_scale = fields.positive("embedding_multiplier", Some(1.0));
    config.traits.residual_scale = fields.positive("residual_multiplier", Some(1.0));
    config.traits.logit_scale = 1.0 / fields.positive("logits_scaling", Some(1.0));
    // The factor of the scores, which are divided by √`query_scale`.
    config.query_scale = Some(fields.positive("attention_multiplier", Some(1.0)).powi(-2));
}

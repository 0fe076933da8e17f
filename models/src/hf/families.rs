//! The families, each a table of its traits and a map of its names. A table names what differs from Llama.

use super::experts;
use super::family::{ATTENTION_BIAS, Bias, Family, Unrotated};
use super::fields::Fields;
use super::layout::{AFMOE, ERNIE, EXAONE, GPT_OSS, GRANITE, HUNYUAN, LLAMA4, MIXTRAL};
use super::rope;
use super::window::{FULL, SLIDING, WindowedLayers};
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

/// ERNIE 4.5.
const ERNIE_DENSE: Family = Family {
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
};

/// Hunyuan.
const HUNYUAN_DENSE: Family = Family {
    name: "hunyuan_v1_dense",
    eps: ("rms_norm_eps", 1e-5),
    biases: [ATTENTION_BIAS, ATTENTION_BIAS, Bias::Never],
    qk_norm: QkNorm::Rotated,
    padding: Some(0),
    names: &[("q_norm", "query_layernorm"), ("k_norm", "key_layernorm")],
    prepare: |fields, _| rope::fixed_alpha(fields),
    ..LLAMA
};

/// EXAONE 4 (arXiv 2507.11407).
const EXAONE4: Family = Family {
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
};

/// GLM-4.5 (arXiv 2508.06471).
const GLM4_MOE: Family = Family {
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
    ERNIE_DENSE,
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
    HUNYUAN_DENSE,
    EXAONE4,
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
    Family {
        name: "granitemoeshared",
        biases: [ATTENTION_BIAS, ATTENTION_BIAS, Bias::Never],
        fused_gate_up: true,
        names: &[("shared_expert", "shared_mlp"), ("gate_up_proj", "input_linear"), ("down_proj", "output_linear")],
        experts: Some(experts::granite_shared),
        expert_names: GRANITE,
        ..GRANITE_DENSE
    },
    // DeepSeek-V2 (arXiv 2405.04434).
    Family {
        name: "deepseek_v2",
        positions: 2048,
        experts: Some(experts::deepseek_v2),
        predicts_further: false,
        ..DEEPSEEK_V3
    },
    GLM4_MOE,
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
            fields.default("sliding_window", 128.into());
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
    // EXAONE 3 (arXiv 2408.03541): Llama under other names.
    Family {
        name: "exaone",
        positions: 4096,
        rope_theta: 500_000.0,
        eps: ("rms_norm_eps", 1e-5),
        kv_heads: Some(8),
        padding: Some(0),
        prepare: |fields, _| {
            fields.rename("num_layers", "num_hidden_layers");
            fields.rename("layer_norm_epsilon", "rms_norm_eps");
            fields.rename("activation_function", "hidden_act");
        },
        file_names: &[
            ("model.embed_tokens.", "transformer.wte."),
            ("model.layers.", "transformer.h."),
            ("model.norm.", "transformer.ln_f."),
            (".self_attn.o_proj.", ".attn.attention.out_proj."),
            (".self_attn.", ".attn.attention."),
            (".input_layernorm.", ".ln_1."),
            (".post_attention_layernorm.", ".ln_2."),
            (".mlp.gate_proj.", ".mlp.c_fc_0."),
            (".mlp.up_proj.", ".mlp.c_fc_1."),
            (".mlp.down_proj.", ".mlp.c_proj."),
        ],
        ..LLAMA
    },
    // Code World Model: a window in all but every fourth layer, of which the first has none.
    Family {
        name: "cwm",
        positions: 131_072,
        rope_theta: 1e6,
        eps: ("rms_norm_eps", 1e-5),
        kv_heads: Some(8),
        head_size: Some(128),
        biases: NO_BIAS,
        window: WindowedLayers::Typed,
        prepare: |fields, _| {
            fields.default("sliding_window", 8192.into());
            default_types(fields, |layer| if layer.is_multiple_of(4) { FULL } else { SLIDING });
            rope::default(fields, || {
                serde_json::json!({
                    "rope_type": "llama3", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 8192,
                    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                })
            });
        },
        ..LLAMA
    },
    Family {
        name: "helium",
        positions: 4096,
        rope_theta: 100_000.0,
        eps: ("rms_norm_eps", 1e-8),
        kv_heads: Some(20),
        head_size: Some(128),
        biases: [ATTENTION_BIAS, Bias::Never, Bias::Option("mlp_bias", false)],
        neighbours: true,
        padding: Some(3),
        ..LLAMA
    },
    Family {
        name: "iquestcoder",
        positions: 131_072,
        eps: ("rms_norm_eps", 1e-5),
        kv_heads: Some(8),
        head_size: Some(128),
        ..LLAMA
    },
    Family {
        name: "internlm3",
        positions: 32_768,
        eps: ("rms_norm_eps", 1e-5),
        kv_heads: Some(2),
        head_size: Some(128),
        padding: Some(2),
        prepare: |fields, _| {
            fields.rename("qkv_bias", "attention_bias");
            fields.rename("bias", "mlp_bias");
            // transformers has the same option for both.
            let bias = fields.peek_flag("attention_bias", false);
            if fields.peek_flag("mlp_bias", bias) != bias {
                fields.unsupported("bias", &(!bias).into(), "the value of qkv_bias");
            }
        },
        ..LLAMA
    },
    Family {
        name: "jais2",
        positions: 8192,
        eps: ("layer_norm_eps", 1e-5),
        biases: [
            Bias::Option("attention_bias", true),
            Bias::Option("attention_bias", true),
            Bias::Option("mlp_bias", true),
        ],
        norm: NormKind::Layer,
        ungated: true,
        activation: GateActivation::Relu2,
        ..LLAMA
    },
    // Nemotron-4 and Minitron (arXiv 2407.14679): layer norms that multiply by 1 + weight.
    Family {
        name: "nemotron",
        partial: Some(0.5),
        positions: 4096,
        eps: ("norm_eps", 1e-5),
        norm: NormKind::Layer,
        ungated: true,
        activation: GateActivation::Relu2,
        finish: |_, config| config.offset_norms = true,
        ..LLAMA
    },
    // OLMo (arXiv 2402.00838): norms without weights.
    Family {
        name: "olmo",
        biases: [ATTENTION_BIAS, ATTENTION_BIAS, Bias::Never],
        norm: NormKind::LayerNoWeight,
        eps: ("layer_norm_eps", 1e-5),
        padding: Some(1),
        // The epsilon is not an option.
        prepare: |fields, _| ["rms_norm_eps", "layer_norm_eps"].iter().for_each(|name| fields.require(name, 1e-5)),
        finish: |fields, config| config.traits.qkv_clip = fields.optional_positive("clip_qkv"),
        ..LLAMA
    },
    // VaultGemma: Gemma 2 without the norms after each part.
    Family {
        name: "vaultgemma",
        norms: Norms::Before,
        names: &[
            ("post_attention_layernorm", "pre_feedforward_layernorm"),
            ("pre_feedforward_layernorm", "post_attention_layernorm"),
        ],
        ..GEMMA2
    },
    // HyperCLOVA X: Granite with norms after each part, too.
    Family {
        name: "hyperclovax",
        norms: Norms::Both,
        names: &[
            ("post_attention_layernorm", "post_norm1"),
            ("pre_feedforward_layernorm", "post_attention_layernorm"),
            ("post_feedforward_layernorm", "post_norm2"),
        ],
        prepare: |fields, family| {
            if !fields.flag("use_post_norm", true) {
                (family.norms, family.names) = (Norms::Before, &[]);
            }
        },
        finish: |fields, config| {
            let size = config.head_size.unwrap_or(1) as f64;
            if fields.peek("attention_multiplier").is_none() {
                fields.set("attention_multiplier", size.sqrt().recip().into());
            }
            multipliers(fields, config);
            // The logits are multiplied by `logits_scaling`, not divided.
            config.traits.logit_scale = config.traits.logit_scale.recip();
        },
        ..GRANITE_DENSE
    },
    // Granite 4.0 without state-space layers and experts: the shared feed-forward layer alone.
    Family {
        name: "granitemoehybrid",
        fused_gate_up: true,
        names: &[("mlp", "shared_mlp"), ("gate_up_proj", "input_linear"), ("down_proj", "output_linear")],
        biases: [ATTENTION_BIAS, ATTENTION_BIAS, Bias::Never],
        prepare: experts::prepare_granite_hybrid,
        ..GRANITE_DENSE
    },
    // FlexOlmo (arXiv 2507.07024).
    Family {
        name: "flex_olmo",
        positions: 4096,
        rope_theta: 500_000.0,
        eps: ("rms_norm_eps", 1e-6),
        padding: Some(100_277),
        experts: Some(experts::flex_olmo),
        ..OLMO2
    },
    Family {
        name: "solar_open",
        rope_theta: 1e6,
        partial: None,
        head_size: Some(128),
        biases: qkv_bias(false),
        qk_norm: QkNorm::None,
        // Layers have no other feed-forward layers than experts.
        prepare: |fields, _| fields.default("intermediate_size", 1.into()),
        experts: Some(experts::solar),
        predicts_further: false,
        ..GLM4_MOE
    },
    // GLM-4.7-Flash: DeepSeek-V3's attention.
    Family {
        name: "glm4_moe_lite",
        positions: 202_752,
        eps: ("rms_norm_eps", 1e-5),
        experts: Some(experts::glm4_lite),
        ..DEEPSEEK_V3
    },
    // Youtu-LLM: DeepSeek-V3's attention without experts.
    Family {
        name: "youtu",
        positions: 131_072,
        tied: true,
        experts: Some(experts::youtu),
        predicts_further: false,
        ..DEEPSEEK_V3
    },
    // MiniCPM3: latent attention without experts, with factors of embedding, residuals and logits (arXiv 2404.06395).
    Family {
        name: "minicpm3",
        positions: 32_768,
        eps: ("rms_norm_eps", 1e-5),
        tied: true,
        prepare: |fields, family| {
            fields.default("qk_rope_head_dim", 32.into());
            experts::prepare_latent(fields, family);
        },
        finish: |fields, config| {
            config.traits.embedding_scale = fields.positive("scale_emb", Some(12.0));
            let (layers, width) = ((config.layers as f64).sqrt(), config.width as f64);
            let mut or = |name: &str, default, null| match fields.has(name) && fields.peek(name).is_none() {
                true => null,
                false => fields.positive(name, Some(default)),
            };
            config.traits.residual_scale = or("scale_depth", 1.4, layers) / layers;
            config.traits.logit_scale = or("dim_model_base", 256.0, width) / width;
        },
        experts: Some(experts::minicpm),
        predicts_further: false,
        ..DEEPSEEK_V3
    },
    Family {
        name: "hunyuan_v1_moe",
        names: &[("q_norm", "query_layernorm"), ("k_norm", "key_layernorm"), ("shared_expert", "shared_mlp")],
        experts: Some(experts::hunyuan),
        expert_names: HUNYUAN,
        ..HUNYUAN_DENSE
    },
    Family {
        name: "ernie4_5_moe",
        kv_heads: Some(4),
        head_size: None,
        names: &[("shared_expert", "shared_experts")],
        experts: Some(experts::ernie),
        expert_names: ERNIE,
        finish: |_, config| config.traits.head_bias = config.mlp_bias,
        predicts_further: true,
        ..ERNIE_DENSE
    },
    // K-EXAONE: norms before each part.
    Family {
        name: "exaone_moe",
        norms: Norms::Before,
        padding: Some(0),
        names: &[("shared_expert", "shared_experts")],
        experts: Some(experts::exaone),
        expert_names: EXAONE,
        predicts_further: true,
        ..EXAONE4
    },
    // Arcee Trinity: attention whose outputs are gated.
    Family {
        name: "afmoe",
        positions: 16_384,
        eps: ("rms_norm_eps", 1e-5),
        head_size: Some(128),
        biases: [ATTENTION_BIAS, ATTENTION_BIAS, Bias::Never],
        qk_norm: QkNorm::Head,
        norms: Norms::Both,
        unrotated: Unrotated::Full,
        names: &[
            ("pre_feedforward_layernorm", "pre_mlp_layernorm"),
            ("post_feedforward_layernorm", "post_mlp_layernorm"),
            ("shared_expert", "shared_experts"),
        ],
        prepare: |fields, family| {
            let every = fields.count("global_attn_every_n_layers", Some(4), 1..=4096);
            family.window = WindowedLayers::AllBut { every };
            fields.default("sliding_window", 1024.into());
        },
        finish: |fields, config| {
            config.scaled_embedding = fields.flag("mup_enabled", false);
            config.traits.gated_attention = true;
        },
        experts: Some(experts::afmoe),
        expert_names: AFMOE,
        ..LLAMA
    },
    // Hunyuan 3.
    Family {
        name: "hy_v3",
        positions: 131_072,
        rope_theta: 11_158_840.0,
        eps: ("rms_norm_eps", 1e-5),
        kv_heads: Some(8),
        head_size: Some(128),
        qk_norm: QkNorm::Head,
        names: &[("shared_expert", "shared_experts")],
        file_names: &[(".mlp.shared_experts.", ".mlp.shared_mlp.")],
        experts: Some(experts::hunyuan_v3),
        expert_names: AFMOE,
        predicts_further: true,
        ..LLAMA
    },
    // Mellum 2: layers with a window have a rotary base of their own.
    Family {
        name: "mellum",
        positions: 131_072,
        rope_theta: 500_000.0,
        local_rope_theta: Some(10_000.0),
        kv_heads: Some(4),
        window: WindowedLayers::Typed,
        prepare: |fields, _| {
            fields.default("sliding_window", 1024.into());
            default_types(fields, |_| FULL);
            // transformers reads rotary positions from `rope_parameters` alone.
            fields.require_off(&["rope_theta", "rope_scaling"]);
        },
        experts: Some(experts::mellum),
        ..QWEN3
    },
    // Phi-1 to Phi-2 (arXiv 2309.05463).
    Family {
        name: "phi",
        partial: Some(0.5),
        eps: ("layer_norm_eps", 1e-5),
        biases: [Bias::Always; 3],
        norm: NormKind::Layer,
        norms: Norms::Shared,
        ungated: true,
        activation: GateActivation::Gelu,
        names: &[
            ("norm", "final_layernorm"),
            ("o_proj", "dense"),
            ("q_norm", "q_layernorm"),
            ("k_norm", "k_layernorm"),
            ("up_proj", "fc1"),
            ("down_proj", "fc2"),
        ],
        prepare: |fields, family| {
            let normed = fields.flag("qk_layernorm", false);
            family.qk_norm = if normed { QkNorm::Head } else { QkNorm::None };
        },
        finish: |_, config| config.traits.head_bias = true,
        ..LLAMA
    },
    // Falcon (arXiv 2311.16867) with one key-value head, or with as many as query heads.
    Family {
        name: "falcon",
        eps: ("layer_norm_epsilon", 1e-5),
        biases: [Bias::Option("bias", false); 3],
        norm: NormKind::Layer,
        ungated: true,
        activation: GateActivation::GeluErf,
        tied: true,
        names: &[
            ("model", "transformer"),
            ("embed_tokens", "word_embeddings"),
            ("layers", "h"),
            ("norm", "ln_f"),
            ("self_attn", "self_attention"),
            ("qkv_proj", "query_key_value"),
            ("o_proj", "dense"),
            ("up_proj", "dense_h_to_4h"),
            ("down_proj", "dense_4h_to_h"),
        ],
        prepare: prepare_falcon,
        ..LLAMA
    },
    // Persimmon: GPT-NeoX with norms of queries and keys.
    Family {
        name: "persimmon",
        positions: 16_384,
        partial: Some(0.5),
        eps: ("layer_norm_eps", 1e-5),
        biases: [Bias::Always; 3],
        norm: NormKind::Layer,
        fused_qkv: FusedQkv::ByHead,
        ungated: true,
        activation: GateActivation::Relu2,
        names: &[
            ("norm", "final_layernorm"),
            ("qkv_proj", "query_key_value"),
            ("q_norm", "q_layernorm"),
            ("k_norm", "k_layernorm"),
            ("o_proj", "dense"),
            ("up_proj", "dense_h_to_4h"),
            ("down_proj", "dense_4h_to_h"),
        ],
        prepare: |fields, family| {
            let normed = fields.flag("qk_layernorm", true);
            family.qk_norm = if normed { QkNorm::Head } else { QkNorm::None };
        },
        ..LLAMA
    },
    // GPT-J, under GPT-2's names.
    Family {
        name: "gptj",
        partial: Some(1.0),
        eps: ("layer_norm_epsilon", 1e-5),
        biases: [Bias::Never, Bias::Never, Bias::Always],
        norm: NormKind::Layer,
        norms: Norms::Shared,
        neighbours: true,
        ungated: true,
        activation: GateActivation::Gelu,
        names: &[
            ("model", "transformer"),
            ("embed_tokens", "wte"),
            ("layers", "h"),
            ("norm", "ln_f"),
            ("self_attn", "attn"),
            ("o_proj", "out_proj"),
            ("input_layernorm", "ln_1"),
            ("up_proj", "fc_in"),
            ("down_proj", "fc_out"),
        ],
        prepare: prepare_gptj,
        finish: |_, config| config.traits.head_bias = true,
        ..LLAMA
    },
    // nanochat: norms without weights, one of which is that of the embedding, and a rotation in the other direction.
    Family {
        name: "nanochat",
        biases: [ATTENTION_BIAS, ATTENTION_BIAS, Bias::Never],
        qk_norm: QkNorm::RotatedNoWeight,
        norm: NormKind::RmsNoWeight,
        ungated: true,
        activation: GateActivation::Relu2,
        padding: Some(1),
        names: &[("up_proj", "fc1"), ("down_proj", "fc2")],
        finish: |fields, config| {
            let has = fields.has("final_logit_softcapping");
            config.logit_cap = if has { fields.optional_positive("final_logit_softcapping") } else { Some(15.0) };
            (config.traits.normed_embedding, config.traits.backwards) = (true, true);
        },
        ..LLAMA
    },
];

/// Reads `sliding_window_pattern`: all but every so manyth layer have a window. Files without windows may have 0. The
/// pattern may be a text such as `LLLG` if it has no effect, because the file has `layer_types`.
fn window_pattern(fields: &mut Fields, default: usize) -> WindowedLayers {
    let is_text = fields.peek("sliding_window_pattern").is_some_and(serde_json::Value::is_string);
    if is_text && fields.peek("layer_types").is_some() {
        fields.ignore(&["sliding_window_pattern"]);
    }
    WindowedLayers::AllBut { every: fields.count("sliding_window_pattern", Some(default), 0..=4096) }
}

/// Reads the options of Falcon that decide about its table.
fn prepare_falcon(fields: &mut Fields, family: &mut Family) {
    for (own, name) in [
        ("n_embed", "hidden_size"),
        ("n_layer", "num_hidden_layers"),
        ("n_head", "num_attention_heads"),
        ("ffn_hidden_size", "intermediate_size"),
        ("activation", "hidden_act"),
    ] {
        fields.rename(own, name);
    }
    let width = fields.peek("hidden_size").and_then(serde_json::Value::as_u64).unwrap_or(0);
    fields.default("intermediate_size", (4 * width.min(1 << 20)).into());
    let shares = fields.flag("multi_query", true);
    (family.fused_qkv, family.kv_heads) = if shares { (FusedQkv::Stacked, Some(1)) } else { (FusedQkv::ByHead, None) };
    family.norms = if fields.flag("parallel_attn", true) { Norms::Shared } else { Norms::Before };
    // The number of key-value heads has no effect, because `multi_query` decides.
    fields.ignore(&["num_kv_heads"]);
    let off =
        ["alibi", "new_decoder_architecture", "apply_residual_connection_post_layernorm", "num_ln_in_parallel_attn"];
    fields.require_off(&off);
}

/// Reads the options of GPT-J under the names of Llama's.
fn prepare_gptj(fields: &mut Fields, _: &mut Family) {
    for (own, name) in [
        ("n_positions", "max_position_embeddings"),
        ("n_embd", "hidden_size"),
        ("n_layer", "num_hidden_layers"),
        ("n_head", "num_attention_heads"),
        ("n_inner", "intermediate_size"),
        ("activation_function", "hidden_act"),
    ] {
        fields.rename(own, name);
    }
    let number = |name: &str| fields.peek(name).and_then(serde_json::Value::as_u64);
    let (width, heads) = (number("hidden_size").unwrap_or(0), number("num_attention_heads").unwrap_or(1).max(1));
    fields.default("intermediate_size", (4 * width.min(1 << 20)).into());
    // The base is not an option, and frequencies are not scaled.
    fields.ignore(&["rope_theta", "rotary"]);
    fields.require_off(&["rope_parameters", "rope_scaling", "partial_rotary_factor", "num_key_value_heads"]);
    let rotated = fields.count("rotary_dim", Some(64), 1..=1 << 16) as f64;
    fields.default("partial_rotary_factor", ((rotated + 0.5) * heads as f64 / width.max(1) as f64).into());
    fields.require("scale_attn_weights", true);
}

/// Sets `layer_types` if the file has none.
fn default_types(fields: &mut Fields, kind: fn(u64) -> &'static str) {
    let layers = fields.peek("num_hidden_layers").and_then(serde_json::Value::as_u64).unwrap_or(0).min(4096);
    if fields.peek("layer_types").is_none() {
        fields.set("layer_types", (0..layers).map(kind).collect());
    }
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
    // Without a factor, the scores are divided by the root of a head's size.
    if fields.has("attention_multiplier") && fields.peek("attention_multiplier").is_none() {
        fields.unsupported("attention_multiplier", &serde_json::Value::Null, "a number");
    }
    config.traits.embedding_scale = fields.positive("embedding_multiplier", Some(1.0));
    config.traits.residual_scale = fields.positive("residual_multiplier", Some(1.0));
    config.traits.logit_scale = 1.0 / fields.positive("logits_scaling", Some(1.0));
    // The factor of the scores, which are divided by √`query_scale`.
    config.query_scale = Some(fields.positive("attention_multiplier", Some(1.0)).powi(-2));
}

//! Options of config.json. Both styles have the same meaning, and an unsupported option is an error that names the
//! option.

use gapless::models::hf::{Architecture, Config};
use serde_json::{Value, json};

use crate::case::Case;

pub fn read(config: &Value) -> Result<Config, String> {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    Config::read(folder.path()).map_err(|error| error.to_string())
}

/// Returns the configuration of a small model, with some options changed.
pub fn with(model_type: &str, changes: &Value) -> Value {
    let mut config = json!({
        "model_type": model_type, "vocab_size": 10, "hidden_size": 8, "intermediate_size": 10, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_act": "silu", "max_position_embeddings": 32,
    });
    let mut extend = |more: Value| config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    match model_type {
        "gpt2" => {
            config = json!({ "model_type": "gpt2", "vocab_size": 10, "n_embd": 8, "n_head": 2, "n_layer": 2, "n_positions": 16 });
        }
        "gemma2" | "gemma3_text" => extend(json!({ "hidden_act": null, "hidden_activation": "gelu_pytorch_tanh" })),
        "deepseek_v3" => extend(json!({ "num_key_value_heads": 2, "n_routed_experts": 8, "qk_rope_head_dim": 4 })),
        _ => {}
    }
    config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
    config
}

/// Checks that the number of parameters that is computed from a configuration equals that of the model. A bias that is
/// not trained is not counted.
pub fn expect_counted(config: &Config, name: &str) {
    let counted = match config.architecture() {
        Architecture::Gpt(config) => config.parameters(),
        Architecture::Llama(config) => config.parameters(),
        Architecture::Moe(config) => config.parameters(),
    };
    let trained = config.parameters().filter(|(name, _)| !name.ends_with("e_score_correction_bias"));
    let declared: usize = trained.map(|(_, shape)| shape.iter().product::<usize>()).sum();
    assert_eq!(counted, declared as u64, "{name}");
}

#[test]
fn parameters_are_counted() {
    for case in Case::all() {
        let config = Config::read(&case.checkpoint).unwrap();
        expect_counted(&config, &case.name);
    }
}

/// A null stands for what transformers computes from it, not for the default of a missing option.
#[test]
fn nulls_are_not_missing_options() {
    let llama = |model_type: &str, changes: Value| {
        let config = read(&with(model_type, &changes)).unwrap_or_else(|error| panic!("{error}"));
        match config.architecture() {
            Architecture::Llama(config) => config.clone(),
            other => panic!("{other:?}"),
        }
    };
    for family in ["internlm3", "iquestcoder"] {
        assert_eq!(llama(family, json!({})).head_size, Some(128), "{family}");
        assert_eq!(llama(family, json!({ "head_dim": null })).head_size, Some(4), "{family}");
    }
    for changes in [json!({}), json!({ "attention_multiplier": null })] {
        assert_eq!(llama("hyperclovax", changes).query_scale.map(f64::round), Some(4.0));
    }
    let changes = json!({ "attention_multiplier": null });
    assert!(read(&with("granite", &changes)).unwrap_err().contains("attention_multiplier"));
}

#[test]
fn what_is_not_supported_is_named() {
    let check = |model_type: &str, changes: Value, words: &[&str]| {
        let error = read(&with(model_type, &changes)).expect_err(&changes.to_string());
        for word in words {
            assert!(error.contains(word), "{word} in {error}");
        }
    };
    check("unheard_of", json!({}), &["model_type", "unheard_of", "gpt2", "qwen3_moe"]);
    check("qwen3_moe", json!({ "hidden_act": "gelu" }), &["hidden_act", "silu"]);
    check("phi3", json!({ "partial_rotary_factor": 0.3 }), &["partial_rotary_factor", "head_dim, 4"]);
    check("gemma2", json!({ "hidden_act": "silu" }), &["hidden_act", "silu", "gelu_pytorch_tanh"]);
    check("gemma2", json!({ "attn_logit_softcapping": 0.0 }), &["attn_logit_softcapping", "above 0"]);
    check("gemma2", json!({ "use_bidirectional_attention": true }), &["use_bidirectional_attention"]);
    check("gemma2", json!({ "layer_types": ["full_attention"] }), &["layer_types", "2 layers"]);
    check(
        "gemma3_text",
        json!({ "rope_parameters": { "full_attention": {}, "sliding_attention": { "rope_type": "linear" } } }),
        &["rope_parameters.sliding_attention.rope_type", "linear"],
    );
    check("llama", json!({ "hidden_act": "mish" }), &["hidden_act", "mish", "silu"]);
    check("llama", json!({ "attention_multiplier": 0.5 }), &["attention_multiplier", "0.5"]);
    check("llama", json!({ "partial_rotary_factor": 0.5 }), &["partial_rotary_factor"]);
    check("llama", json!({ "rope_scaling": { "type": "dynamic" } }), &["rope_scaling.factor is missing"]);
    check(
        "llama",
        json!({ "rope_parameters": { "rope_type": "longrope" } }),
        &["rope_parameters.short_factor is missing", "rope_parameters.long_factor is missing"],
    );
    check("llama", json!({ "rope_scaling": { "type": "linear" } }), &["rope_scaling.factor is missing"]);
    check("llama", json!({ "rope_scaling": { "type": "linear", "factor": 2.0, "x": 1 } }), &["rope_scaling.x"]);
    check("llama", json!({ "quantization_config": { "bits": 4 } }), &["quantization_config"]);
    check("llama", json!({ "layer_types": ["full_attention", "sliding_attention"] }), &["layer_types"]);
    check("qwen3", json!({ "layer_types": ["linear_attention"] }), &["layer_types", "linear_attention"]);
    check("qwen2", json!({ "attention_bias": true }), &["attention_bias"]);
    check("mixtral", json!({ "router_jitter_noise": 0.1 }), &["router_jitter_noise"]);
    check("mixtral", json!({ "output_router_logits": true }), &["output_router_logits"]);
    check("qwen3_moe", json!({ "num_experts": 8, "num_local_experts": 4 }), &["num_local_experts"]);
    check("gpt2", json!({ "scale_attn_by_inverse_layer_idx": true }), &["scale_attn_by_inverse_layer_idx"]);
    check("gpt2", json!({ "activation_function": "relu" }), &["activation_function", "relu"]);
    // All faults are reported together.
    check("llama", json!({ "vocab_size": 0, "rms_norm_eps": -1, "foo": 1 }), &["vocab_size", "rms_norm_eps", "foo"]);
}

#[test]
fn both_styles_of_rope_mean_the_same() {
    let llama3 = |kind: &str| {
        json!({ kind: "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16 })
    };
    let old = json!({ "rope_theta": 500.0, "rope_scaling": llama3("rope_type") });
    let oldest = json!({ "rope_theta": 500.0, "rope_scaling": llama3("type") });
    let mut new = llama3("rope_type");
    new["rope_theta"] = json!(500.0);
    let new = json!({ "rope_parameters": new });
    let model = |changes| {
        format!("{:?}", read(&with("llama", &changes)).unwrap()).split_once("architecture").unwrap().1.to_owned()
    };
    let (old, oldest, new) = (model(old), model(oldest), model(new));
    assert!(old == oldest && old == new && old.contains("Llama3 { factor: 8.0, low: 1.0, high: 4.0, original: 16.0 }"));
}

/// Published files have options of the programs that trained them. They are read, and other values are refused.
#[test]
fn options_of_published_files_are_read() {
    let types = json!(["sliding_attention", "full_attention"]);
    let published = [
        ("phi3", json!({ "full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": false })),
        (
            "starcoder2",
            json!({ "mlp_type": "default", "norm_type": "layer_norm", "rms_norm_eps": 1e-5, "scale_attn_weights": true,
                    "layer_norm_epsilon": 1e-5, "attention_softmax_in_fp32": true, "residual_dropout": 0.1 }),
        ),
        ("apertus", json!({ "post_norm": false, "qk_norm": true, "mlp_bias": false })),
        (
            "exaone4",
            json!({ "sliding_window_pattern": "LLLG", "reorder_qk_norm": true, "layer_types": types, "sliding_window": 4 }),
        ),
        (
            "cohere2",
            json!({ "order_of_interleaved_layers": "local_attn_first", "position_embedding_type": "rope_gptj",
                    "use_embedding_sharing": true, "rotary_pct": 1.0, "layer_switch": 4, "sliding_window_pattern": 4,
                    "use_gated_activation": true, "use_parallel_block": true, "use_parallel_embedding": true,
                    "cache_implementation": "hybrid", "use_qk_norm": false }),
        ),
        // Llama 4 Scout, and MobileLLM-R1, which has no experts.
        (
            "llama4_text",
            json!({ "no_rope_layers": [], "for_llm_compressor": false, "cache_implementation": "hybrid", "head_dim": 4,
                    "num_local_experts": 2, "rope_scaling": { "rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0,
                    "high_freq_factor": 1.0, "original_max_position_embeddings": 8192 } }),
        ),
        (
            "llama4_text",
            json!({ "moe_layers": [], "interleave_moe_layer_step": 0, "num_local_experts": 0, "num_experts_per_tok": 0,
                    "head_dim": 4, "no_rope_layers": [1, 1], "attn_temperature_tuning": false }),
        ),
    ];
    for (family, options) in published {
        if let Err(error) = read(&with(family, &options)) {
            panic!("{family}: {error}");
        }
    }
    for (family, options, part) in [
        ("phi3", json!({ "full_attn_mod": 2 }), "full_attn_mod"),
        ("phi3", json!({ "lm_head_bias": true }), "lm_head_bias"),
        ("starcoder2", json!({ "mlp_type": "gated" }), "mlp_type"),
        ("starcoder2", json!({ "norm_type": "rms_norm" }), "norm_type"),
        ("apertus", json!({ "post_norm": true }), "post_norm"),
        ("exaone4", json!({ "sliding_window_pattern": "LLLG" }), "sliding_window_pattern"),
        ("cohere2", json!({ "layer_switch": 3 }), "layer_switch"),
        ("cohere2", json!({ "position_embedding_type": "alibi" }), "position_embedding_type"),
        ("llama", json!({ "lm_head_bias": false }), "lm_head_bias"),
        ("llama4_text", json!({ "for_llm_compressor": true }), "for_llm_compressor"),
        ("llama4_text", json!({ "layer_types": ["sliding_attention", "full_attention"] }), "chunked_attention"),
        ("llama4_text", json!({ "attention_chunk_size": 0 }), "attention_chunk_size"),
        ("llama4_text", json!({ "moe_layers": "all" }), "moe_layers"),
        ("gptj", json!({ "rope_scaling": { "type": "linear", "factor": 2.0 } }), "rope_scaling"),
        ("falcon", json!({ "alibi": true }), "alibi"),
        ("falcon", json!({ "new_decoder_architecture": true }), "new_decoder_architecture"),
        ("internlm3", json!({ "qkv_bias": true, "bias": false }), "the value of qkv_bias"),
        ("mellum", json!({ "rope_scaling": { "type": "linear", "factor": 2.0 } }), "rope_scaling"),
        ("solar_open", json!({ "first_k_dense_replace": 1 }), "first_k_dense_replace"),
        ("afmoe", json!({ "n_group": 2 }), "n_group"),
    ] {
        let error = read(&with(family, &options)).unwrap_err();
        assert!(error.contains(part), "{family}: {error}");
    }
}

/// Options that a file does not have are those of transformers' class.
#[test]
fn missing_options_have_the_defaults_of_the_family() {
    let config = |family, changes| match read(&with(family, &changes)).unwrap().architecture() {
        Architecture::Llama(llama) => llama.clone(),
        Architecture::Moe(moe) => moe.llama.clone(),
        Architecture::Gpt(_) => unreachable!("no family of the test"),
    };
    let experts = json!({ "num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 4 });
    assert_eq!(config("gpt_oss", experts).sliding_window, Some(128));
    let rope = json!({ "rope_type": "dynamic", "factor": 2.0 });
    for (family, positions) in
        [("llama", 2048), ("phi3", 4096), ("qwen3", 32_768), ("apertus", 65_536), ("glm", 131_072)]
    {
        let changes = json!({ "max_position_embeddings": null, "rope_scaling": rope, "head_dim": 8 });
        let dynamic = config(family, changes).traits.dynamic_rope.unwrap();
        assert_eq!(dynamic.positions, positions, "{family}");
    }
}

/// In OLMo 3, older options of the rotary positions have no effect on the layers with a window.
#[test]
fn windowed_layers_of_olmo3_keep_their_base() {
    let changes =
        json!({ "rope_theta": 7e4, "sliding_window": 4, "rope_scaling": { "type": "linear", "factor": 2.0 } });
    let config = read(&with("olmo3", &changes)).unwrap();
    let Architecture::Llama(llama) = config.architecture() else { panic!("it has no experts") };
    assert_eq!((llama.rope_theta, llama.window_rope_theta), (7e4, Some(5e5)));
    // transformers ignores options that are not under a type of layers.
    let flat = json!({ "rope_parameters": { "rope_type": "default", "rope_theta": 7e4 } });
    for family in ["olmo3", "gemma3_text"] {
        assert!(read(&with(family, &flat)).unwrap_err().contains("rope_parameters.rope_theta"));
    }
}

/// Returns the configuration of a multimodal model.
fn multimodal(model_type: &str, text: Value, whole: Value) -> Value {
    let class = "SomeForConditionalGeneration";
    let mut config = json!({ "model_type": model_type, "architectures": [class], "vision_config": { "depth": 2 } });
    let options = config.as_object_mut().unwrap();
    if !text.is_null() {
        options.insert("text_config".to_owned(), text);
    }
    options.extend(whole.as_object().unwrap().clone());
    config
}

/// Files of multimodal models leave options of the text part out if they have the defaults of its class, or have them beside
/// those of the other parts. Options of the other parts have no effect.
#[test]
fn the_text_part_of_a_multimodal_model_is_read() {
    let llama = |config: &Config| match config.architecture() {
        Architecture::Llama(llama) => llama.clone(),
        other => panic!("{other:?}"),
    };
    let few = json!({ "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
                      "rope_scaling": { "factor": 8.0, "rope_type": "linear" }, "sliding_window": 1024 });
    let gemma = llama(
        &read(&multimodal("gemma3", few, json!({ "mm_tokens_per_image": 256, "eoi_token_index": 256_000 }))).unwrap(),
    );
    let sizes = (gemma.vocabulary, gemma.width, gemma.layers, gemma.heads, gemma.kv_heads, gemma.tied);
    assert_eq!(sizes, (262_208, 2560, 34, 8, 4, true));
    assert_eq!(gemma.traits.names["model"], "model.language_model");

    let flat = with(
        "qwen2_5_vl",
        &json!({
            "architectures": ["Qwen2_5_VLForConditionalGeneration"], "vision_config": { "depth": 2 }, "vision_start_token_id": 3,
            "rope_scaling": { "type": "mrope", "mrope_section": [1, 1, 0] }, "num_key_value_heads": 2, "hidden_size": 16,
        }),
    );
    let nested = json!({ "text_config": with("qwen2_5_vl_text", &json!({
        "rope_parameters": { "rope_type": "default", "mrope_section": [1, 1, 0], "rope_theta": 1e6 }, "num_key_value_heads": 2,
        "hidden_size": 16,
    })) });
    let nested = multimodal("qwen2_5_vl", Value::Null, nested);
    let [flat, nested] = [flat, nested].map(|config| llama(&read(&config).unwrap()));
    assert_eq!(flat, nested);
    assert_eq!((flat.rope_theta, flat.rms_norm_eps, flat.qkv_bias, flat.tied), (1e6, 1e-5, true, false));

    // The whole model decides whether the head is tied. The text part decides if the whole model leaves it open.
    let tied = |model_type: &str, text: Value, whole: Value| {
        llama(&read(&multimodal(model_type, with("llama", &text), whole)).unwrap()).tied
    };
    let (yes, no) = (json!({ "tie_word_embeddings": true }), json!({ "tie_word_embeddings": false }));
    assert!(!tied("idefics3", yes.clone(), no.clone()) && tied("idefics3", no.clone(), yes.clone()));
    assert!(tied("idefics3", yes.clone(), json!({})) && !tied("idefics3", json!({}), json!({})));
    assert!(tied("llava", yes, no.clone()) && !tied("llava", no.clone(), no));
}

#[test]
fn multimodal_models_that_cannot_be_read_are_refused_with_the_reason() {
    let small = |model_type: &str, changes: Value| with(model_type, &changes);
    for (config, words) in [
        (multimodal("llava", small("mamba", json!({})), json!({})), ["mamba", "state-space layers"]),
        (multimodal("llava", small("unheard_of", json!({})), json!({})), ["text_config.model_type", "unheard_of"]),
        (multimodal("llava", small("llama", json!({ "qk_norm": true })), json!({})), ["text_config.qk_norm", "true"]),
        (
            multimodal(
                "gemma3",
                small("gemma3_text", json!({})),
                json!({ "architectures": ["Gemma3ForSequenceClassification"] }),
            ),
            ["architectures", "Gemma3ForSequenceClassification"],
        ),
        (
            multimodal("gemma3", small("gemma3_text", json!({ "final_logit_softcapping": 30.0 })), json!({})),
            ["text_config.logit_scale", "final_logit_softcapping"],
        ),
        (multimodal("aya_vision", small("cohere2", json!({})), json!({})), ["aya_vision", "factor of the logits"]),
        (multimodal("mllama", small("mllama_text_model", json!({})), json!({})), ["mllama", "attention to images"]),
        (multimodal("paligemma", small("gemma", json!({})), json!({})), ["paligemma", "later ones"]),
        (multimodal("qwen3_5", small("qwen3_5_text", json!({})), json!({})), ["qwen3_5", "linear attention"]),
    ] {
        let error = read(&config).unwrap_err();
        assert!(words.iter().all(|word| error.contains(word)), "{words:?} in {error}");
    }
}

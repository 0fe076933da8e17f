//! Options in published config.json files that have no effect, and similar options that would have one.

use gapless::models::hf::{Architecture, Config};
use serde_json::{Value, json};

use crate::options::{read, with};

/// The generic options that `PretrainedConfig.to_dict()` of transformers 4 and earlier adds to the options of a
/// family.
const DUMP: &str = r#"{
    "_attn_implementation_autoset": true, "_commit_hash": null, "_name_or_path": "x/y", "_num_labels": 2,
    "add_cross_attention": false, "architectures": null, "bad_words_ids": null, "begin_suppress_tokens": null,
    "bos_token_id": 1, "chunk_size_feed_forward": 0, "cross_attention_hidden_size": null,
    "decoder_start_token_id": null, "diversity_penalty": 0.0, "do_sample": false, "early_stopping": false,
    "encoder_no_repeat_ngram_size": 0, "eos_token_id": 2, "exponential_decay_length_penalty": null,
    "finetuning_task": null, "forced_bos_token_id": null, "forced_eos_token_id": null, "id2label": { "0": "A" },
    "is_decoder": false, "is_encoder_decoder": false, "label2id": { "A": 0 }, "length_penalty": 1.0,
    "max_length": 20, "min_length": 0, "no_repeat_ngram_size": 0, "num_beam_groups": 1, "num_beams": 1,
    "num_return_sequences": 1, "output_attentions": false, "output_hidden_states": false, "output_scores": false,
    "prefix": null, "problem_type": null, "pruned_heads": {}, "remove_invalid_values": false,
    "repetition_penalty": 1.0, "return_dict": true, "return_dict_in_generate": false, "sep_token_id": null,
    "suppress_tokens": null, "task_specific_params": null, "temperature": 0.7, "tf_legacy_loss": false,
    "tie_encoder_decoder": false, "tokenizer_class": null, "top_k": 50, "top_p": 0.9, "torch_dtype": "bfloat16",
    "torchscript": false, "transformers_version": "4.46.0", "typical_p": 1.0, "use_bfloat16": false,
    "xla_device": false, "output_past": true, "gradient_checkpointing": false, "use_cache": true
}"#;

/// Returns model families, each with options that can be added to a small model without an effect.
fn harmless() -> Vec<(&'static str, Value)> {
    let mut all = vec![
        ("llama", json!({ "is_llama_config": true, "rope_interleaved": false, "transformers.js_config": { "a": 1 } })),
        ("llama", json!({ "unsloth_version": "2024.9", "unsloth_fixed": true, "max_sequence_length": 2048 })),
        (
            "llama",
            json!({ "pretraining_tp": 2, "rope_scaling": null, "quantization_config": null, "pad_token_id": -1 }),
        ),
        ("llama", json!({ "sliding_window": 4096, "use_sliding_window": false, "max_window_layers": 1 })),
        ("llama", json!({ "layer_types": ["full_attention", "full_attention"], "num_experts": 0, "use_mup": false })),
        ("llama", json!({ "architectures": ["LLaMAForCausalLM"], "attn_implementation": "sdpa", "resid_pdrop": 0.1 })),
        ("llama", json!({ "architectures": ["LlamaModel"], "embedding_multiplier": 1, "logits_scaling": 1.0 })),
        (
            "llama",
            json!({ "rope_scaling": { "type": "linear", "factor": 1.0, "original_max_position_embeddings": 32 },
                          "_flash_attn_2_enabled": true, "mask_token_id": 7, "hidden_dropout": 0.1 }),
        ),
        ("mistral", json!({ "use_sliding_window": false, "max_window_layers": 1, "tokenizer_padding_side": "left" })),
        ("mistral", json!({ "layer_types": ["full_attention", "sliding_attention"] })),
        ("mixtral", json!({ "output_router_logits": false, "router_aux_loss_coef": 0.02, "router_jitter_noise": 0.0 })),
        ("mixtral", json!({ "layer_types": ["sliding_attention", "sliding_attention"], "num_local_experts": 8 })),
        ("qwen2", json!({ "use_mrope": false, "sliding_window": 32768, "max_window_layers": 1, "qkv_bias": true })),
        ("qwen2", json!({ "use_sliding_window": true, "sliding_window": null, "seq_length": 32768 })),
        ("qwen2_moe", json!({ "use_sliding_window": false, "sliding_window": 0, "max_window_layers": 1 })),
        ("qwen3", json!({ "attention_bias": false, "sliding_window": null, "use_qk_norm": true })),
        (
            "qwen3_moe",
            json!({ "mlp_only_layers": [], "decoder_sparse_step": 1, "use_qk_norm": true, "qkv_bias": false,
                              "shared_expert_intermediate_size": 0, "max_window_layers": 48 }),
        ),
        ("qwen3_moe", json!({ "layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": false })),
        (
            "gemma2",
            json!({ "cache_implementation": "hybrid", "sliding_window_size": 4096, "hidden_act": "gelu_pytorch_tanh" }),
        ),
        (
            "gemma3_text",
            json!({ "_sliding_window_pattern": 2, "sliding_window_pattern": 6, "cache_implementation": "hybrid" }),
        ),
        ("olmo2", json!({ "clip_qkv": null, "attention_dropout": 0.0, "use_qk_norm": true })),
        (
            "gpt2",
            json!({ "n_ctx": 16, "n_special": 0, "predict_special_tokens": true, "summary_type": "cls_index",
                         "summary_first_dropout": 0.1, "summary_activation": null, "embd_pdrop": 0.1,
                         "task_specific_params": { "text-generation": { "do_sample": true, "max_length": 50 } } }),
        ),
        ("gpt2", json!({ "hidden_size": 8, "num_hidden_layers": 2 })),
        (
            "gpt2",
            json!({ "reorder_and_upcast_attn": false, "scale_attn_by_inverse_layer_idx": false, "n_inner": null }),
        ),
        (
            "deepseek_v3",
            json!({ "ep_size": 1, "moe_layer_freq": 1, "aux_loss_alpha": 0.001, "seq_aux": true,
                                "auto_map": {}, "num_nextn_predict_layers": 0, "topk_method": "noaux_tc",
                                "scoring_func": "sigmoid", "quantization_config": null }),
        ),
    ];
    let families = ["deepseek_v3", "gemma2", "gemma3_text", "gpt2", "llama", "mistral", "mixtral", "olmo2", "qwen2"];
    let more = ["qwen2_moe", "qwen3", "qwen3_moe"];
    all.extend(families.into_iter().chain(more).map(|family| (family, serde_json::from_str(DUMP).unwrap())));
    all
}

#[test]
fn options_without_effect_are_ignored() {
    for (family, changes) in harmless() {
        let plain = read(&with(family, &json!({}))).unwrap();
        let found = read(&with(family, &changes)).unwrap_or_else(|error| panic!("{family}, {changes}: {error}"));
        let mut expected = plain.architecture().clone();
        // A negative token id counts from the end. A scaling by 1 has no effect, but the configuration still stores
        // it as a scaling.
        if let (Architecture::Llama(expected), Architecture::Llama(found)) = (&mut expected, found.architecture()) {
            expected.padding = found.padding;
            if changes["rope_scaling"].is_object() {
                expected.rope_scaling = found.rope_scaling;
            }
        }
        assert_eq!(*found.architecture(), expected, "{family}, {changes}");
        assert!(found.notices().is_empty());
    }
}

#[test]
fn unsupported_options_are_refused_by_name() {
    for (family, changes, word) in [
        ("llama", json!({ "rope_interleaved": true }), "rope_interleaved"),
        ("llama", json!({ "is_decoder": true }), "is_decoder"),
        ("llama", json!({ "pruned_heads": { "0": [1] } }), "pruned_heads"),
        ("llama", json!({ "sliding_window": 4096 }), "sliding_window"),
        ("llama", json!({ "use_sliding_window": true }), "use_sliding_window"),
        ("llama", json!({ "embedding_multiplier": 12.0 }), "embedding_multiplier"),
        ("llama", json!({ "num_experts": 8 }), "num_experts"),
        ("llama", json!({ "use_something_new": false }), "use_something_new"),
        ("llama", json!({ "is_causal": false }), "is_causal"),
        ("qwen2", json!({ "use_mrope": true }), "use_mrope"),
        ("qwen2", json!({ "qkv_bias": false }), "qkv_bias"),
        ("qwen2", json!({ "dual_chunk_attention_config": { "chunk_size": 8 } }), "dual_chunk_attention_config"),
        ("qwen2", json!({ "layer_types": ["full_attention", "sliding_attention"] }), "sliding_window"),
        ("qwen3_moe", json!({ "use_qk_norm": false }), "use_qk_norm"),
        ("qwen2_moe", json!({ "layer_types": ["full_attention", "sliding_attention"] }), "sliding_window"),
        ("gemma2", json!({ "sliding_window": null }), "sliding_window"),
        ("gpt2", json!({ "reorder_and_upcast_attn": true }), "reorder_and_upcast_attn"),
        ("gpt2", json!({ "add_cross_attention": true }), "add_cross_attention"),
        ("gpt2", json!({ "architectures": ["GPT2DoubleHeadsModel"] }), "architectures"),
        ("llama", json!({ "architectures": ["LlamaForSequenceClassification"] }), "architectures"),
        ("qwen3", json!({ "architectures": ["Qwen3ForTokenClassification"] }), "architectures"),
        ("mistral", json!({ "architectures": ["MistralForQuestionAnswering"] }), "architectures"),
        ("qwen2", json!({ "architectures": ["Qwen2ForRewardModel"] }), "architectures"),
        ("gpt2", json!({ "hidden_size": 16 }), "hidden_size"),
        ("deepseek_v3", json!({ "moe_layer_freq": 2 }), "moe_layer_freq"),
        ("deepseek_v3", json!({ "num_nextn_predict_layers": -1 }), "num_nextn_predict_layers"),
    ] {
        let error = read(&with(family, &changes)).expect_err(&changes.to_string());
        assert!(error.contains(word), "{family}, {changes}: {error}");
    }
}

/// Compares the size of the window, and the layers without a window, for models of four layers.
#[test]
fn windows_are_those_of_transformers() {
    let [full, sliding] = ["full_attention", "sliding_attention"];
    let types = json!([sliding, full, full, sliding]);
    for (family, changes, expected) in [
        ("llama", json!({}), (None, vec![])),
        ("mistral", json!({}), (Some(4096), vec![])),
        ("mistral", json!({ "sliding_window": null }), (None, vec![])),
        ("mistral", json!({ "sliding_window": 4, "layer_types": types }), (Some(4), vec![])),
        ("mixtral", json!({}), (None, vec![])),
        ("mixtral", json!({ "sliding_window": 4, "layer_types": types }), (Some(4), vec![])),
        ("mixtral", json!({ "layer_types": types }), (None, vec![])),
        ("qwen2", json!({ "sliding_window": 4 }), (None, vec![])),
        ("qwen2", json!({ "use_sliding_window": true, "sliding_window": 4 }), (None, vec![])),
        (
            "qwen2",
            json!({ "use_sliding_window": true, "sliding_window": 4, "max_window_layers": 1 }),
            (Some(4), vec![0]),
        ),
        ("qwen3", json!({ "use_sliding_window": true, "layer_types": types }), (Some(4096), vec![1, 2])),
        ("qwen2_moe", json!({ "sliding_window": 4 }), (None, vec![])),
        ("qwen2_moe", json!({ "use_sliding_window": true, "sliding_window": 4 }), (Some(4), vec![1, 3])),
        (
            "qwen2_moe",
            json!({ "use_sliding_window": true, "sliding_window": 4, "max_window_layers": 2 }),
            (Some(4), vec![1, 2, 3]),
        ),
        ("qwen2_moe", json!({ "use_sliding_window": true, "layer_types": types }), (Some(4096), vec![1, 2])),
        ("qwen3_moe", json!({ "sliding_window": 4 }), (None, vec![])),
        (
            "qwen3_moe",
            json!({ "use_sliding_window": true, "sliding_window": 4, "layer_types": types }),
            (Some(4), vec![]),
        ),
        ("gemma2", json!({ "sliding_window": 4 }), (Some(4), vec![1, 3])),
        ("gemma2", json!({ "sliding_window": 4, "layer_types": types }), (Some(4), vec![1, 2])),
        ("gemma3_text", json!({ "sliding_window_pattern": 3 }), (Some(4096), vec![2])),
        ("llama4_text", json!({ "num_local_experts": 2 }), (Some(8192), vec![3])),
        ("llama4_text", json!({ "num_local_experts": 2, "attention_chunk_size": null }), (None, vec![])),
        (
            "llama4_text",
            json!({ "attention_chunk_size": 6, "no_rope_layers": [0, 1, 1, 0], "num_local_experts": 2 }),
            (Some(6), vec![0, 3]),
        ),
    ] {
        let mut config = with(family, &changes);
        config["num_hidden_layers"] = json!(4);
        let found = read(&config).unwrap_or_else(|error| panic!("{family}, {changes}: {error}"));
        let (Architecture::Llama(llama) | Architecture::Moe(gapless::models::MoeConfig { llama, .. })) =
            found.architecture()
        else {
            panic!("{family}")
        };
        assert_eq!((llama.sliding_window, llama.full_layers.clone()), expected, "{family}, {changes}");
    }
}

/// Granite 4.0 without state-space layers has the options of those layers. Python writes the greatest of their steps as
/// Infinity, which is not JSON. A text is not changed.
#[test]
fn options_of_state_spaces_are_read_where_there_are_none() {
    let published = |family, experts: usize, kind: &str| {
        let options = json!({
            "layer_types": [kind, kind], "num_local_experts": experts, "shared_intermediate_size": 12,
            "position_embedding_type": "rope", "attention_multiplier": 0.5, "mamba_d_conv": 4, "mamba_d_head": "auto",
            "normalization_function": "rmsnorm", "name_or_path": "a \\ \"NaN Infinity",
        });
        let text = with(family, &options).to_string();
        let text = text.replacen('{', "{\"time_step_limit\": [0.0, Infinity], \"time_step_min\": -Infinity, ", 1);
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("config.json"), text).unwrap();
        Config::read(folder.path()).map_err(|error| error.to_string())
    };
    let granite = published("granitemoehybrid", 0, "attention").unwrap();
    let Architecture::Llama(llama) = granite.architecture() else { panic!("it has no experts") };
    assert!(llama.hidden == 12 && llama.traits.fused_gate_up && llama.traits.unrotated_layers.is_empty());
    for (family, experts, kind, part) in [
        ("granitemoehybrid", 0, "mamba", "state-space layers are not supported"),
        ("granitemoehybrid", 4, "attention", "num_local_experts is 4"),
        ("nemotron_h", 0, "attention", "state-space layers"),
    ] {
        let error = published(family, experts, kind).unwrap_err();
        assert!(error.contains(part), "{error}");
    }
}

/// Reads the published files next to the repository, if they exist.
#[test]
fn published_files_are_read() {
    let Some(folder) = gapless_testing::next_to_repository("cases/configs").filter(|folder| folder.is_dir()) else {
        gapless_testing::not_checked("there is no ../shared/cases/configs");
        return;
    };
    let files: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    for path in &files {
        Config::read(path).unwrap_or_else(|error| panic!("{error}"));
    }
    assert!(!files.is_empty());
}

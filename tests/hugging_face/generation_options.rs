//! Options of generation: which options are applied, which are reported as not applied, and from which file options are
//! read.

use gapless::models::hf::{GenerationConfig, HfError};
use gapless::{GenerateOptions, Sampling};
use serde_json::{Value, json};

/// Reads a folder with these options in generation_config.json, or in config.json alone.
fn read(own: Option<Value>, config: Value) -> Result<GenerationConfig, HfError> {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    if let Some(own) = own {
        std::fs::write(folder.path().join("generation_config.json"), own.to_string()).unwrap();
    }
    GenerationConfig::read(folder.path())
}

#[test]
fn options_that_are_not_followed_are_named() {
    let named = |options: Value| -> Vec<String> {
        let config = read(Some(options), json!({})).unwrap();
        config.not_followed.into_iter().map(|(option, _)| option).collect()
    };
    let neutral = r#"{
        "bad_words_ids": null, "begin_suppress_tokens": [], "cache_implementation": "hybrid", "constraints": null,
        "diversity_penalty": 0.0, "do_sample": true, "early_stopping": true, "encoder_no_repeat_ngram_size": 0,
        "encoder_repetition_penalty": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "guidance_scale": 1,
        "length_penalty": 2.0, "low_memory": true, "max_length": 30, "min_new_tokens": 0, "no_repeat_ngram_size": 0,
        "num_assistant_tokens": 5, "num_beams": 1, "num_beam_groups": 1, "num_return_sequences": 1, "penalty_alpha": 0,
        "remove_invalid_values": false, "renormalize_logits": true, "return_dict_in_generate": true,
        "sequence_bias": null, "suppress_tokens": [], "temperature": 0.6, "token_healing": false, "top_k": 20,
        "top_p": 0.95, "transformers_version": "4.51.0", "typical_p": 1.0, "watermarking_config": null,
        "_from_model_config": true
    }"#;
    assert_eq!(named(serde_json::from_str(neutral).unwrap()), Vec::<String>::new());
    // Options that are applied are not reported.
    let followed = json!({
        "bad_words_ids": [[1, 2]], "begin_suppress_tokens": [3], "epsilon_cutoff": 0.1, "eta_cutoff": 0.1, "max_new_tokens": 1,
        "min_length": 1, "min_new_tokens": 1, "no_repeat_ngram_size": 1, "stop_strings": "x", "suppress_tokens": [4],
        "typical_p": 0.9, "eos_token_id": [1, 2],
    });
    assert_eq!(named(followed), Vec::<String>::new());
    for (option, value) in [
        ("constraints", json!([{}])),
        ("diversity_penalty", json!(0.5)),
        ("encoder_no_repeat_ngram_size", json!(1)),
        ("encoder_repetition_penalty", json!(0.5)),
        ("exponential_decay_length_penalty", json!([1, 1.5])),
        ("forced_bos_token_id", json!(0)),
        ("forced_eos_token_id", json!(1)),
        ("guidance_scale", json!(0.5)),
        ("max_time", json!(0.5)),
        ("num_beams", json!(4)),
        ("num_return_sequences", json!(2)),
        ("penalty_alpha", json!(0.6)),
        ("remove_invalid_values", json!(true)),
        ("sequence_bias", json!([[[1], -1.0]])),
        ("token_healing", json!(true)),
        ("top_h", json!(0.4)),
        ("top_h", json!(1.0)),
        ("something_new", json!(0)),
    ] {
        assert_eq!(named(json!({ option: value.clone() })), [option], "{value}");
    }
    for (option, value) in [
        ("min_length", json!(-1)),
        ("stop_strings", json!([1])),
        ("bad_words_ids", json!([1])),
        ("do_sample", json!(1)),
    ] {
        let error = read(Some(json!({ option: value })), json!({})).unwrap_err().to_string();
        assert!(error.contains(option) && error.contains("generation_config.json"), "{error}");
    }
}

#[test]
fn options_are_those_of_transformers() {
    let options = |own: Value, prompt: usize| read(Some(own), json!({ "eos_token_id": 9 })).unwrap().options(prompt);
    let plain = GenerateOptions { stop: vec![9], ..GenerateOptions::greedy(200) };
    assert_eq!(options(json!({}), 5), plain);
    // If do_sample is not set, sampling options are ignored.
    assert_eq!(options(json!({ "temperature": 0.5, "typical_p": 0.5, "top_p": 0.5, "eta_cutoff": 0.1 }), 5), plain);
    let sampling = Sampling { repetition_penalty: 1.1, no_repeat_ngram_size: 3, ..Sampling::greedy() };
    let rules = json!({ "repetition_penalty": 1.1, "no_repeat_ngram_size": 3 });
    assert_eq!(options(rules, 5), GenerateOptions { sampling, ..plain.clone() });
    let sampling = Sampling {
        temperature: 0.5,
        top_k: 50,
        typical_p: 0.5,
        epsilon_cutoff: 0.25,
        eta_cutoff: 0.125,
        ..Sampling::default()
    };
    let drawn =
        json!({ "do_sample": true, "temperature": 0.5, "typical_p": 0.5, "epsilon_cutoff": 0.25, "eta_cutoff": 0.125 });
    assert_eq!(options(drawn, 5), GenerateOptions { sampling, ..plain.clone() });
    // Some limits of the length include the prompt and others do not. The limits without the prompt take precedence.
    for (own, prompt, tokens, min_tokens) in [
        (json!({ "max_length": 20 }), 5, 15, 0),
        (json!({ "max_length": 4 }), 5, 0, 0),
        (json!({ "max_length": 20, "max_new_tokens": 7 }), 5, 7, 0),
        (json!({ "min_length": 8, "max_new_tokens": 9 }), 5, 9, 3),
        (json!({ "min_length": 8, "min_new_tokens": 2, "max_new_tokens": 9 }), 5, 9, 2),
        (json!({ "min_length": 3, "max_new_tokens": 9 }), 5, 9, 0),
    ] {
        let found = options(own.clone(), prompt);
        assert_eq!((found.tokens, found.min_tokens), (tokens, min_tokens), "{own}");
    }
    // A banned word that consists of the end token alone is ignored.
    let banned = options(json!({ "bad_words_ids": [[9], [1], [2, 9]], "suppress_tokens": [9, 3] }), 5).banned;
    assert_eq!(banned, [vec![1], vec![2, 9], vec![9], vec![3]]);
}

/// Options are read from config.json only if the folder has no generation_config.json.
#[test]
fn options_of_config_json() {
    let config = json!({
        "vocab_size": 10, "do_sample": true, "temperature": 0.5, "num_beams": 4, "max_length": 50, "eos_token_id": 9,
        "task_specific_params": { "text-generation": { "top_k": 3 } }, "rope_theta": 1e4, "suppress_tokens": [1],
    });
    let found = read(None, config.clone()).unwrap();
    assert_eq!(found.not_followed, [("num_beams".to_owned(), "4".to_owned())]);
    assert_eq!((found.do_sample, found.sampling.temperature, found.sampling.top_k), (true, 0.5, 50));
    assert_eq!((found.max_length, &found.stop, &found.banned), (Some(50), &vec![9], &vec![vec![1]]));
    let own = read(Some(json!({ "top_k": 3 })), config).unwrap();
    assert_eq!((own.do_sample, own.sampling.top_k, own.max_length, own.stop), (false, 3, None, vec![9]));
    // This value is the default, which complete dumps of a configuration contain, so it is ignored.
    assert_eq!(read(None, json!({ "max_length": 20 })).unwrap().max_length, None);
    // A multimodal model has options of its text part.
    let part =
        read(None, json!({ "bos_token_id": 1, "text_config": { "eos_token_id": 9, "vocab_size": 10 } })).unwrap();
    assert_eq!(part.stop, [9]);
}

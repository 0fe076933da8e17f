//! New folders: the config.json of a model, and the weights of a trainer under the names of the model's family.
//!
//! In: an architecture, and a trainer of it. Out: a folder that [`Folder`](super::Folder) opens as the same model.
//! Never: a config.json that is read as another architecture, because every config.json is read back and compared
//! before it is used.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use gapless_engine::checkpoint::differences;
use gapless_engine::ops::RopeScaling;
use gapless_engine::{Precision, Trainer};
use serde_json::{Map, Value, json};

use super::config::{Architecture, Config};
use super::error::{HfError, Result};
use super::fields::read_object;
use super::folder::SINGLE;
use super::layout::layout;
use super::save::{copy_settings, origins, replace_config, write_error, write_file, write_parts, write_then_rename};
use super::tensors::Dtype;
use crate::{Activation, GptConfig, LatentConfig, LlamaConfig, MoeConfig};

/// A folder that does not exist yet: the config.json, and the names and types of the stored tensors.
///
/// ```no_run
/// use gapless_engine::{StepOptions, Trainer};
/// use gapless_models::hf::{Architecture, HfError, NewFolder};
/// use gapless_models::{Llama, LlamaConfig};
///
/// let config = LlamaConfig { vocabulary: 256, layers: 2, width: 64, ..LlamaConfig::default() };
/// let folder = NewFolder::of(&Architecture::Llama(config.clone()), 128, None)?;
/// let trainer = || Ok(Trainer::new(|vb| Llama::new(&config, vb), StepOptions::default())?);
/// folder.save("my-llama".as_ref(), trainer, |_| Ok::<_, HfError>(()))?;
/// # Ok::<(), HfError>(())
/// ```
#[derive(Debug)]
pub struct NewFolder {
    config: Config,
    options: Map<String, Value>,
    /// The folder whose settings are copied. `None` if the settings are those of `options`.
    like: Option<PathBuf>,
}

impl NewFolder {
    /// Describes a model that was trained from random weights. The family is the first of those that
    /// [`Folder`](super::Folder) reads that computes the same as the model. Settings that only affect training (dropout, the
    /// losses and the jitter of routers) make no difference. `positions` is the maximum number of tokens of a sequence
    /// in training. `end` is the token that ends a text.
    ///
    /// # Errors
    /// Returns [`HfError::NoFamily`], with the settings in which the nearest family differs, if no family has the model.
    pub fn of(architecture: &Architecture, positions: usize, end: Option<u32>) -> Result<Self> {
        let given = settings(canonical(architecture));
        let mut nearest: Option<(&'static str, Vec<String>)> = None;
        for (family, class, mut options) in candidates(architecture, positions) {
            options.extend(object(json!({
                "model_type": family, "architectures": [class], "bos_token_id": null, "eos_token_id": end,
                "initializer_range": 0.02, "use_cache": true,
            })));
            let config = match Config::of_options(options.clone(), PathBuf::from("config.json")) {
                Ok(config) => config,
                // The family does not have a value of one of its own options.
                Err(HfError::Config { problems, .. }) => {
                    nearest = nearest.or(Some((family, problems.iter().map(ToString::to_string).collect())));
                    continue;
                }
                Err(error) => return Err(error),
            };
            let needed = settings(canonical(config.architecture()));
            if needed == given {
                return Ok(Self { config, options, like: None });
            }
            let shown = |value: &Option<Value>| value.as_ref().map_or("absent".to_owned(), Value::to_string);
            let differing = differences(&given, &needed).into_iter();
            let differing: Vec<String> = differing
                .map(|one| format!("{} = {} (not {})", one.key, shown(&one.expected), shown(&one.saved)))
                .collect();
            if nearest.as_ref().is_none_or(|(_, fewest)| differing.len() < fewest.len()) {
                nearest = Some((family, differing));
            }
        }
        let (family, differences) = nearest.expect("every architecture has a family to compare with");
        Err(HfError::NoFamily { family, differences })
    }

    /// Describes a model like that in a folder, of which only the config.json needs to exist. The settings are copied, and
    /// tensors get the type that the config.json names. Of a multimodal model, the text part alone is described, with the
    /// settings of the text part's family.
    ///
    /// # Errors
    /// Returns the errors of [`Config::read`].
    pub fn like(folder: &Path) -> Result<Self> {
        let (mut config, mut options) = (Config::read(folder)?, read_object(&folder.join("config.json"))?);
        if let Some(part) = config.text_part_mut() {
            options = part.stand_alone();
        }
        Ok(Self { config, options, like: Some(folder.to_owned()) })
    }

    /// The config.json, as it is read.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Writes the folder at `out`, which must be empty or not exist. `trainer` builds a trainer of the model, whose
    /// adapters are merged into the weights of their layers. `beside` writes further files, such as a tokenizer, into the
    /// folder.
    ///
    /// # Errors
    /// Returns [`HfError::Exists`] if `out` is not empty, the errors of `trainer` and `beside`, and an error if a file
    /// cannot be written. After an error, no incomplete folder is left.
    pub fn save<E: From<HfError>>(
        &self,
        out: &Path,
        trainer: impl FnOnce() -> Result<Trainer, E>,
        beside: impl FnOnce(&Path) -> Result<(), E>,
    ) -> Result<(), E> {
        write_then_rename(out, |to| {
            let trainer = trainer()?;
            let dtype = self.dtype(&trainer);
            self.write_settings(to, dtype)?;
            self.write_weights(&trainer, &to.join(SINGLE), dtype)?;
            beside(to)
        })
    }

    /// Returns the type of stored tensors: the type in the config.json, or else the type of the trainer's parameters.
    fn dtype(&self, trainer: &Trainer) -> Dtype {
        let named = ["dtype", "torch_dtype"].into_iter().find_map(|name| self.options.get(name)?.as_str());
        match (named, trainer.options().step.precision) {
            (Some("bfloat16"), _) => Dtype::BF16,
            (Some("float16"), _) => Dtype::F16,
            (Some(_), _) | (None, Precision::F32) => Dtype::F32,
            (None, Precision::Bf16 | Precision::PureBf16) => Dtype::BF16,
        }
    }

    fn write_settings(&self, to: &Path, dtype: Dtype) -> Result<()> {
        let mut options = self.options.clone();
        if let Some(folder) = &self.like {
            copy_settings(folder, to)?;
            return if self.config.is_multimodal() { replace_config(options, to) } else { Ok(()) };
        }
        options.insert("dtype".into(), json!(if dtype == Dtype::BF16 { "bfloat16" } else { "float32" }));
        let generation = json!({ "eos_token_id": self.options["eos_token_id"] });
        for (name, options) in [("config.json", Value::Object(options)), ("generation_config.json", generation)] {
            let path = to.join(name);
            fs::write(&path, format!("{options:#}\n")).map_err(write_error(&path))?;
        }
        Ok(())
    }

    fn write_weights(&self, trainer: &Trainer, path: &Path, dtype: Dtype) -> Result<()> {
        // A GPT-2 is written with the prefix `transformer.`, which stored names decide.
        let layout = layout(&self.config, &BTreeMap::from([("transformer.", &[][..])]));
        let mut origins = origins(&layout, &self.config);
        if self.config.tied_to().is_some() {
            origins.remove(&self.config.head());
        }
        // The biases that choose experts are f32 in every file.
        let is_choice = |name: &str| name.ends_with("e_score_correction_bias") || name.ends_with("expert_bias");
        let dtype = |name: &str| if is_choice(name) { Dtype::F32 } else { dtype };
        let tensors = origins.iter().map(|(name, parts)| (name.as_str(), dtype(name), &parts[0].2.shape[..])).collect();
        write_file(path, tensors, None, &mut |name, dtype, write| {
            write_parts(trainer, dtype, &origins[name], write, path)
        })
    }
}

/// A family, its class in transformers, and the options of its config.json.
type Candidate = (&'static str, &'static str, Map<String, Value>);

/// Returns a config.json for each family that may have the architecture. An option that a family does not have is left
/// out, so the result may describe another architecture.
fn candidates(architecture: &Architecture, positions: usize) -> Vec<Candidate> {
    match architecture {
        Architecture::Gpt(gpt) => vec![("gpt2", "GPT2LMHeadModel", gpt2(gpt))],
        Architecture::Llama(llama) => {
            let with = |more: Value| {
                let mut options = of_llama(llama, positions);
                options.extend(object(more));
                options
            };
            let bias = llama.qkv_bias;
            vec![
                ("llama", "LlamaForCausalLM", with(json!({ "attention_bias": bias, "mlp_bias": llama.mlp_bias }))),
                ("mistral", "MistralForCausalLM", with(json!({ "sliding_window": llama.sliding_window }))),
                ("qwen2", "Qwen2ForCausalLM", with(window(llama))),
                ("qwen3", "Qwen3ForCausalLM", with(window(llama))),
                ("olmo2", "Olmo2ForCausalLM", with(json!({ "attention_bias": bias }))),
                ("gemma2", "Gemma2ForCausalLM", with(gemma(llama))),
                ("gemma3_text", "Gemma3ForCausalLM", with(gemma(llama))),
            ]
        }
        Architecture::Moe(moe) => {
            let with = |more: Value| {
                let mut options = of_llama(&moe.llama, positions);
                options.extend(object(of_router(moe)));
                options.extend(object(more));
                options
            };
            let MoeConfig { llama, router, expert_hidden, dense_layers, latent, .. } = moe;
            let mixtral = json!({
                "intermediate_size": expert_hidden, "num_local_experts": router.experts,
                "sliding_window": llama.sliding_window,
            });
            let qwen = json!({
                "moe_intermediate_size": expert_hidden, "num_experts": router.experts, "norm_topk_prob": router.renormalise,
                "mlp_only_layers": dense_layers, "decoder_sparse_step": 1, "use_sliding_window": false,
            });
            let with_shared =
                json!({ "shared_expert_intermediate_size": moe.shared_hidden, "qkv_bias": llama.qkv_bias });
            let mut qwen2 = with(qwen.clone());
            qwen2.extend(object(with_shared));
            let mut all = vec![
                ("mixtral", "MixtralForCausalLM", with(mixtral)),
                ("qwen2_moe", "Qwen2MoeForCausalLM", qwen2),
                ("qwen3_moe", "Qwen3MoeForCausalLM", with(qwen)),
            ];
            if let Some(latent) = latent {
                let mut options = with(deepseek(moe, latent));
                // This family's option of this name is the width of the rotated part.
                options.remove("head_dim");
                all = vec![("deepseek_v3", "DeepseekV3ForCausalLM", options)];
            }
            all
        }
    }
}

fn gpt2(gpt: &GptConfig) -> Map<String, Value> {
    object(json!({
        "vocab_size": gpt.vocabulary, "n_positions": gpt.sequence, "n_layer": gpt.layers, "n_head": gpt.heads,
        "n_embd": gpt.width, "n_inner": gpt.hidden, "layer_norm_epsilon": gpt.layer_norm_eps,
        "activation_function": match gpt.activation { Activation::GeluTanh => "gelu_new", Activation::GeluErf => "gelu" },
        "tie_word_embeddings": gpt.tied, "embd_pdrop": gpt.dropout, "resid_pdrop": gpt.dropout, "attn_pdrop": 0.0,
    }))
}

/// Returns the options that all families besides GPT-2 have.
fn of_llama(llama: &LlamaConfig, positions: usize) -> Map<String, Value> {
    object(json!({
        "vocab_size": llama.vocabulary, "num_hidden_layers": llama.layers, "num_attention_heads": llama.heads,
        "num_key_value_heads": llama.kv_heads, "hidden_size": llama.width, "intermediate_size": llama.hidden,
        "head_dim": head_size(llama), "hidden_act": "silu", "max_position_embeddings": positions,
        "rms_norm_eps": llama.rms_norm_eps, "rope_theta": llama.rope_theta, "rope_scaling": rope_scaling(llama.rope_scaling),
        "tie_word_embeddings": llama.tied, "pad_token_id": llama.padding, "attention_dropout": 0.0,
    }))
}

/// Returns the scaling of rotary frequencies, or null if there is none. YaRN's options are not known, only the results
/// that were computed from them.
fn rope_scaling(scaling: RopeScaling) -> Value {
    match scaling {
        RopeScaling::None | RopeScaling::Yarn { .. } => Value::Null,
        RopeScaling::Linear { factor } => json!({ "rope_type": "linear", "factor": factor }),
        RopeScaling::Llama3 { factor, low, high, original } => json!({
            "rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
            "original_max_position_embeddings": original as u64,
        }),
    }
}

/// Returns the options of a sliding window in families that list the layers with a window.
fn window(llama: &LlamaConfig) -> Value {
    let kind = |layer| if llama.full_layers.contains(&layer) { "full_attention" } else { "sliding_attention" };
    match llama.sliding_window {
        None => json!({ "use_sliding_window": false }),
        Some(width) => json!({
            "use_sliding_window": true, "sliding_window": width, "max_window_layers": 0,
            "layer_types": (0..llama.layers).map(kind).collect::<Vec<_>>(),
        }),
    }
}

fn gemma(llama: &LlamaConfig) -> Value {
    let slides = |layer| llama.sliding_window.is_some() && !llama.full_layers.contains(&layer);
    let kind = |layer| if slides(layer) { "sliding_attention" } else { "full_attention" };
    let mut options = json!({
        "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
        // transformers only accepts a whole number.
        "query_pre_attn_scalar": llama.query_scale.unwrap_or(head_size(llama) as f64) as u64,
        "attn_logit_softcapping": llama.attention_cap, "final_logit_softcapping": llama.logit_cap,
        "sliding_window": llama.sliding_window.unwrap_or(4096),
        "layer_types": (0..llama.layers).map(kind).collect::<Vec<_>>(),
    });
    if let Some(theta) = llama.window_rope_theta {
        options["rope_local_base_freq"] = json!(theta);
    }
    options
}

fn of_router(moe: &MoeConfig) -> Value {
    json!({
        "num_experts_per_tok": moe.router.top_k, "router_aux_loss_coef": moe.router.balance_loss,
        "output_router_logits": false,
    })
}

fn deepseek(moe: &MoeConfig, latent: &LatentConfig) -> Value {
    let MoeConfig { llama, router, expert_hidden, shared_hidden, dense_layers, .. } = moe;
    let groups = router.groups.as_ref().map_or((1, 1), |groups| (groups.count, groups.limit));
    json!({
        "num_key_value_heads": llama.heads, "attention_bias": llama.output_bias,
        "q_lora_rank": latent.query_rank, "kv_lora_rank": latent.kv_rank, "qk_nope_head_dim": latent.plain_size,
        "qk_rope_head_dim": latent.rotated_size, "v_head_dim": latent.value_size, "rope_interleave": latent.neighbours,
        "n_routed_experts": router.experts, "n_shared_experts": shared_hidden / expert_hidden.max(&1),
        "moe_intermediate_size": expert_hidden, "first_k_dense_replace": dense_layers.len(),
        "norm_topk_prob": router.renormalise, "n_group": groups.0, "topk_group": groups.1,
        "routed_scaling_factor": router.scale, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    })
}

/// Returns the architecture without settings that do not affect its results after training, so that architectures that
/// compute the same are equal.
fn canonical(architecture: &Architecture) -> Architecture {
    match architecture.clone() {
        Architecture::Gpt(gpt) => {
            let hidden = gpt.hidden.filter(|&hidden| hidden != 4 * gpt.width);
            Architecture::Gpt(GptConfig { dropout: 0.0, hidden, ..gpt })
        }
        Architecture::Llama(llama) => Architecture::Llama(canonical_llama(llama)),
        Architecture::Moe(mut moe) => {
            moe.dense_layers.sort_unstable();
            moe.dense_layers.dedup();
            if moe.dense_layers.is_empty() {
                moe.llama.hidden = moe.expert_hidden;
            }
            if let Some(latent) = &moe.latent {
                moe.llama.head_size = Some(latent.head_size());
                moe.llama.kv_heads = moe.llama.heads;
            }
            moe.shared_gate &= moe.shared_hidden > 0;
            let router = &mut moe.router;
            (router.balance_loss, router.z_loss, router.jitter) = (0.0, 0.0, 0.0);
            router.fixed_bias |= router.bias_rate > 0.0;
            router.bias_rate = 0.0;
            router.groups = router.groups.take().filter(|groups| groups.count > groups.limit);
            moe.llama = canonical_llama(moe.llama);
            Architecture::Moe(moe)
        }
    }
}

fn canonical_llama(mut llama: LlamaConfig) -> LlamaConfig {
    let size = head_size(&llama);
    llama.head_size = Some(size);
    llama.query_scale = llama.query_scale.filter(|&scale| scale != size as f64);
    llama.full_layers.sort_unstable();
    if llama.sliding_window.is_none() {
        llama.full_layers.clear();
    }
    llama
}

fn head_size(llama: &LlamaConfig) -> usize {
    llama.head_size.unwrap_or(llama.width / llama.heads.max(1))
}

fn settings(architecture: Architecture) -> Value {
    match architecture {
        Architecture::Gpt(gpt) => json!(gpt),
        Architecture::Llama(llama) => json!(llama),
        Architecture::Moe(moe) => json!(moe),
    }
}

fn object(value: Value) -> Map<String, Value> {
    let Value::Object(object) = value else { unreachable!("only objects are converted") };
    object
}

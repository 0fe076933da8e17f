//! The generation settings of a folder: the options in its generation_config.json. If there is no such file, the same
//! options are read from its config.json.

use std::path::{Path, PathBuf};

use gapless_engine::{GenerateOptions, Sampling};
use serde_json::{Map, Value};

use super::error::{HfError, Result};
use super::fields::read_object;

/// The generation settings of a folder.
#[derive(Debug, Clone, PartialEq)]
pub struct GenerationConfig {
    /// Tokens that end a sequence.
    pub stop: Vec<u32>,
    /// Texts that end a sequence. The token that completes such a text is kept as a whole
    /// ([`StopStrings`](super::StopStrings)).
    pub stop_strings: Vec<String>,
    /// The greatest number of tokens to add.
    pub max_new_tokens: Option<usize>,
    /// The greatest number of tokens of prompt and generated text together. `max_new_tokens` takes precedence.
    pub max_length: Option<usize>,
    /// Minimum number of tokens to add. Until this number is reached, no token of `stop` is chosen.
    pub min_new_tokens: Option<usize>,
    /// Minimum number of tokens including the prompt. Until this number is reached, no token of `stop` is chosen.
    /// `min_new_tokens` takes precedence.
    pub min_length: Option<usize>,
    /// True if tokens are sampled at random; if false, the likeliest token is chosen.
    pub do_sample: bool,
    /// The sampling settings. Options that are missing from the folder have the defaults of transformers.
    pub sampling: Sampling,
    /// Sequences of tokens that are never generated, from `suppress_tokens` and `bad_words_ids`.
    pub banned: Vec<Vec<u32>>,
    /// Tokens that are never chosen as the first generated token, from `begin_suppress_tokens`.
    pub banned_first: Vec<u32>,
    /// Options that would change the generated text but are not supported, with their values.
    pub not_followed: Vec<(String, String)>,
}

/// Supported options.
const FOLLOWED: [&str; 19] = [
    "bad_words_ids",
    "begin_suppress_tokens",
    "do_sample",
    "eos_token_id",
    "epsilon_cutoff",
    "eta_cutoff",
    "max_length",
    "max_new_tokens",
    "min_length",
    "min_new_tokens",
    "min_p",
    "no_repeat_ngram_size",
    "repetition_penalty",
    "stop_strings",
    "suppress_tokens",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
];

/// Unsupported options. If a number is given, the option has no effect at that value. Null, false and empty values
/// switch any option off.
const NOT_FOLLOWED: [(&str, Option<f64>); 21] = [
    ("constraints", None),
    ("diversity_penalty", Some(0.0)),
    ("dola_layers", None),
    ("encoder_no_repeat_ngram_size", Some(0.0)),
    ("encoder_repetition_penalty", Some(1.0)),
    ("exponential_decay_length_penalty", None),
    ("force_bos_token_to_be_generated", None),
    ("force_words_ids", None),
    ("forced_bos_token_id", None),
    ("forced_eos_token_id", None),
    ("guidance_scale", Some(1.0)),
    ("max_time", None),
    ("num_beam_groups", Some(1.0)),
    ("num_beams", Some(1.0)),
    ("num_return_sequences", Some(1.0)),
    ("penalty_alpha", Some(0.0)),
    ("remove_invalid_values", None),
    ("sequence_bias", None),
    ("token_healing", None),
    ("top_h", None),
    ("watermarking_config", None),
];

/// Options that do not change which tokens are generated: outputs besides the text, caches, speculative decoding, and
/// options that have an effect only in beam search, which is not supported.
const WITHOUT_EFFECT: [&str; 36] = [
    "assistant_confidence_threshold",
    "assistant_early_exit",
    "assistant_ensemble_weight",
    "assistant_lookbehind",
    "bos_token_id",
    "cache_config",
    "cache_implementation",
    "compile_config",
    "continuous_batching_config",
    "decoder_start_token_id",
    "disable_compile",
    "early_stopping",
    "is_assistant",
    "length_penalty",
    "low_memory",
    "max_cache_len",
    "max_matching_ngram_size",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "output_attentions",
    "output_hidden_states",
    "output_logits",
    "output_scores",
    "pad_token_id",
    "prefill_chunk_size",
    "prompt_lookup_num_tokens",
    "renormalize_logits",
    "return_dict_in_generate",
    "sep_token_id",
    "speculation_type",
    "target_lookbehind",
    "transformers_version",
    "trust_remote_code",
    "unk_token_id",
    "use_cache",
    "use_mtp",
];

/// The default `max_length` of older versions of transformers, which wrote all defaults into config.json. There, this
/// value is not a limit chosen for the model, and is ignored.
const DUMPED_MAX_LENGTH: usize = 20;

/// True if this is the name of a generation option.
pub(super) fn is_option(name: &str) -> bool {
    FOLLOWED.contains(&name) || WITHOUT_EFFECT.contains(&name) || NOT_FOLLOWED.iter().any(|(known, _)| *known == name)
}

impl GenerationConfig {
    /// Reads the generation settings of a folder. If there is no generation_config.json, the generation options in
    /// config.json are used. If generation_config.json has no end token, the one in config.json is used.
    ///
    /// # Errors
    /// Returns an error if a file is not valid JSON, or if the value of an option has a wrong type or is out of range.
    pub fn read(folder: impl AsRef<Path>) -> Result<Self> {
        let folder = folder.as_ref();
        let (own, model) = (folder.join("generation_config.json"), folder.join("config.json"));
        let mut config = Options { left: read_object(&model)?, path: model };
        // The settings of a multimodal model may be among those of its text part.
        if let Some(Value::Object(text)) = config.left.get("text_config").cloned() {
            for (option, value) in text {
                config.left.entry(option).or_insert(value);
            }
        }
        let end = config.left.get("eos_token_id").cloned();
        let is_own = own.exists();
        let mut options = if is_own {
            Options { left: read_object(&own)?, path: own }
        } else {
            config.left.retain(|option, _| is_option(option));
            config
        };
        options.left.entry("eos_token_id").or_insert(Value::Null);
        if options.left["eos_token_id"].is_null() {
            options.left.insert("eos_token_id".into(), end.unwrap_or_default());
        }
        options.take(is_own)
    }

    /// Returns the settings that transformers' `generate` would use for a prompt of `prompt` tokens. The result does
    /// not include stop strings. If the folder gives no limit, at most 200 tokens are generated.
    pub fn options(&self, prompt: usize) -> GenerateOptions {
        let default = GenerateOptions::default();
        GenerateOptions {
            tokens: self.tokens(prompt).unwrap_or(default.tokens),
            min_tokens: self.min_new_tokens.unwrap_or_else(|| self.min_length.unwrap_or(0).saturating_sub(prompt)),
            sampling: self.default_sampling(),
            stop: self.stop.clone(),
            banned: self.banned.clone(),
            banned_first: self.banned_first.clone(),
        }
    }

    /// Returns the greatest number of tokens to add to a prompt of `prompt` tokens, or `None` if the folder gives no
    /// limit.
    pub fn tokens(&self, prompt: usize) -> Option<usize> {
        self.max_new_tokens.or_else(|| Some(self.max_length?.saturating_sub(prompt)))
    }

    /// Returns the sampling settings that transformers' `generate` uses.
    pub fn default_sampling(&self) -> Sampling {
        let Sampling { repetition_penalty, no_repeat_ngram_size, .. } = self.sampling;
        match self.do_sample {
            true => self.sampling,
            false => Sampling { repetition_penalty, no_repeat_ngram_size, ..Sampling::greedy() },
        }
    }
}

/// The options of a file that have not been read yet.
struct Options {
    path: PathBuf,
    left: Map<String, Value>,
}

impl Options {
    fn take(mut self, is_own: bool) -> Result<GenerationConfig> {
        let top_k = self.number("top_k", 50.0)?.max(0.0) as usize;
        // In transformers, a `top_p` of 0 leaves only the likeliest token. The smallest positive value has the same
        // effect here.
        let top_p = self.number("top_p", 1.0)?.min(1.0);
        let top_p = if top_p == 0.0 { f32::MIN_POSITIVE } else { top_p };
        let max_length = self.count("max_length")?;
        let stop = self.parsed("eos_token_id", ids)?.unwrap_or_default();
        let mut banned: Vec<Vec<u32>> = self.parsed("bad_words_ids", sequences)?.unwrap_or_default();
        // An end token may be generated even if `bad_words_ids` lists it.
        banned.retain(|word| !matches!(word[..], [id] if stop.contains(&id)));
        banned.extend(self.parsed("suppress_tokens", ids)?.unwrap_or_default().into_iter().map(|id| vec![id]));
        let config = GenerationConfig {
            stop_strings: self.parsed("stop_strings", texts)?.unwrap_or_default(),
            max_new_tokens: self.count("max_new_tokens")?,
            max_length: max_length.filter(|&length| is_own || length != DUMPED_MAX_LENGTH),
            min_new_tokens: self.count("min_new_tokens")?,
            min_length: self.count("min_length")?,
            do_sample: self.parsed("do_sample", Value::as_bool)?.unwrap_or(false),
            sampling: Sampling {
                temperature: self.number("temperature", 1.0)?,
                top_k,
                top_p,
                min_p: self.number("min_p", 0.0)?,
                typical_p: self.number("typical_p", 1.0)?.min(1.0),
                epsilon_cutoff: self.cutoff("epsilon_cutoff")?,
                eta_cutoff: self.cutoff("eta_cutoff")?,
                repetition_penalty: self.number("repetition_penalty", 1.0)?,
                no_repeat_ngram_size: self.count("no_repeat_ngram_size")?.unwrap_or(0),
                seed: 0,
            },
            banned,
            banned_first: self.parsed("begin_suppress_tokens", ids)?.unwrap_or_default(),
            not_followed: Vec::new(),
            stop,
        };
        let not_followed = self.left.iter().filter(|(option, value)| changes_the_text(option, value));
        let not_followed = not_followed.map(|(option, value)| (option.clone(), value.to_string())).collect();
        Ok(GenerationConfig { not_followed, ..config })
    }

    /// Removes an option and parses its value. Returns `None` if the option is missing or null.
    fn parsed<T>(&mut self, option: &str, parse: impl Fn(&Value) -> Option<T>) -> Result<Option<T>> {
        let Some(found) = self.left.remove(option).filter(|value| !value.is_null()) else { return Ok(None) };
        let wrong = || {
            let why = format!("its {option} is {found}, which is not a valid value");
            HfError::Malformed { path: self.path.clone(), why }
        };
        parse(&found).map(Some).ok_or_else(wrong)
    }

    fn number(&mut self, option: &str, default: f32) -> Result<f32> {
        Ok(self.parsed(option, Value::as_f64)?.map_or(default, |number| number as f32))
    }

    /// Reads a cutoff. Values outside (0, 1) have no effect and become 0.
    fn cutoff(&mut self, option: &str) -> Result<f32> {
        let cutoff = self.number(option, 0.0)?;
        Ok(if cutoff > 0.0 && cutoff < 1.0 { cutoff } else { 0.0 })
    }

    fn count(&mut self, option: &str) -> Result<Option<usize>> {
        self.parsed(option, |value| usize::try_from(value.as_u64()?).ok())
    }
}

/// True if an unsupported or unknown option is switched on. An unknown option is on unless its value is null, false or
/// empty.
fn changes_the_text(option: &str, value: &Value) -> bool {
    let neutral = NOT_FOLLOWED.iter().find(|(known, _)| *known == option).and_then(|(_, neutral)| *neutral);
    let is_off = match value {
        Value::Null | Value::Bool(false) => true,
        Value::Array(values) => values.is_empty(),
        Value::Object(values) => values.is_empty(),
        value => neutral.is_some() && value.as_f64() == neutral,
    };
    !is_off && !option.starts_with('_') && !FOLLOWED.contains(&option) && !WITHOUT_EFFECT.contains(&option)
}

/// Parses one token or a list of tokens.
fn ids(found: &Value) -> Option<Vec<u32>> {
    let id = |value: &Value| u32::try_from(value.as_u64()?).ok();
    found.as_array().map_or_else(|| Some(vec![id(found)?]), |list| list.iter().map(id).collect())
}

fn sequences(found: &Value) -> Option<Vec<Vec<u32>>> {
    found.as_array()?.iter().map(|ids_of_one| ids_of_one.is_array().then(|| ids(ids_of_one))?).collect()
}

/// Parses one text or a list of texts. Empty texts are dropped, because an empty stop string would match everywhere.
fn texts(found: &Value) -> Option<Vec<String>> {
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let texts: Vec<String> =
        found.as_array().map_or_else(|| Some(vec![text(found)?]), |list| list.iter().map(text).collect())?;
    Some(texts.into_iter().filter(|text| !text.is_empty()).collect())
}

//! What a folder says of generation: generation_config.json, and the end token of config.json.

use std::path::Path;

use gapless_engine::Sampling;
use serde_json::{Map, Value};

use super::error::{HfError, Result};
use super::fields::read_object;

/// How a folder's model is to generate.
#[derive(Debug, Clone, PartialEq)]
pub struct GenerationConfig {
    /// Tokens that end a sequence.
    pub stop: Vec<u32>,
    /// Whether tokens are drawn by chance; else the likeliest is taken.
    pub do_sample: bool,
    /// The rule. Of what the folder does not say, what transformers takes.
    pub sampling: Sampling,
    /// Options that it sets and that are not followed, with their values.
    pub not_followed: Vec<(String, String)>,
}

/// Options that have no effect on which tokens come, or only for other kinds of generation.
const PASSED_OVER: [&str; 18] = [
    "_from_model_config",
    "bos_token_id",
    "cache_implementation",
    "decoder_start_token_id",
    "disable_compile",
    "max_length",
    "max_new_tokens",
    "output_attentions",
    "output_hidden_states",
    "output_logits",
    "output_scores",
    "pad_token_id",
    "return_dict_in_generate",
    "transformers_version",
    "trust_remote_code",
    "use_cache",
    "early_stopping",
    "length_penalty",
];

impl GenerationConfig {
    /// Reads the files of a folder; one without generation_config.json has its end token in config.json.
    ///
    /// # Errors
    /// A file that is no JSON; a value of another type or size than its option has.
    pub fn read(folder: impl AsRef<Path>) -> Result<Self> {
        let folder = folder.as_ref();
        let path = folder.join("generation_config.json");
        let mut options = if path.exists() { read_object(&path)? } else { Map::new() };
        let mut model = read_object(&folder.join("config.json"))?;
        let wrong = |option: &str, found: &Value| HfError::Malformed {
            path: path.clone(),
            why: format!("its {option} is {found}, which is none"),
        };
        let mut take = |option: &str| options.remove(option).filter(|value| !value.is_null());
        let stop = match take("eos_token_id").or_else(|| model.remove("eos_token_id")) {
            None | Some(Value::Null) => Vec::new(),
            Some(found) => ids(&found).ok_or_else(|| wrong("eos_token_id", &found))?,
        };
        let do_sample = match take("do_sample") {
            None => false,
            Some(found) => found.as_bool().ok_or_else(|| wrong("do_sample", &found))?,
        };
        let mut number = |option: &str, default: f32| match take(option) {
            None => Ok(default),
            Some(found) => found.as_f64().map(|x| x as f32).ok_or_else(|| wrong(option, &found)),
        };
        let sampling = Sampling {
            temperature: number("temperature", 1.0)?,
            top_k: number("top_k", 50.0)? as usize,
            top_p: number("top_p", 1.0)?,
            min_p: number("min_p", 0.0)?,
            repetition_penalty: number("repetition_penalty", 1.0)?,
            seed: 0,
        };
        let is_set = |(option, value): &(&String, &Value)| {
            let is_off = matches!(value, Value::Null | Value::Bool(false)) || value.as_f64().is_some_and(|x| x <= 1.0);
            !is_off && !PASSED_OVER.contains(&option.as_str())
        };
        let not_followed = options.iter().filter(is_set).map(|(option, value)| (option.clone(), value.to_string()));
        Ok(Self { stop, do_sample, sampling, not_followed: not_followed.collect() })
    }

    /// The rule that `generate` of transformers follows.
    pub fn default_sampling(&self) -> Sampling {
        match self.do_sample {
            true => self.sampling,
            false => Sampling { repetition_penalty: self.sampling.repetition_penalty, ..Sampling::greedy() },
        }
    }
}

/// A token, or several.
fn ids(found: &Value) -> Option<Vec<u32>> {
    let id = |value: &Value| u32::try_from(value.as_u64()?).ok();
    found.as_array().map_or_else(|| Some(vec![id(found)?]), |list| list.iter().map(id).collect())
}

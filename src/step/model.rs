//! A model by name: a preset, extents, or somebody's config.json.

use std::fmt;
use std::path::Path;

use gapless_models::hf::{Architecture, Config};
use gapless_models::{GptConfig, LlamaConfig, MoeConfig};
use serde::de::value::MapAccessDeserializer;
use serde::de::{DeserializeOwned, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::run::ModelConfig;

/// Models that are known by name, and what people call them.
pub const PRESETS: [(&str, &str); 9] = [
    ("small", "small GPT, 6 layers of width 384"),
    ("gpt2", "GPT-2 124M"),
    ("gpt2-medium", "GPT-2 355M"),
    ("gpt2-large", "GPT-2 774M"),
    ("gpt2-xl", "GPT-2 1.5B"),
    ("llama2-7b", "Llama 2 7B"),
    ("llama3-8b", "Llama 3 8B"),
    ("mixtral8x7b", "Mixtral 8x7B"),
    ("qwen-moe", "Qwen1.5-MoE-A2.7B"),
];

/// What the key `model` can be: the name of a preset (`llama2-7b`), a family with other extents than its defaults
/// (`llama:layers=4,width=256`), a folder or config.json of Hugging Face's, whose weights are not read; or a run's `[model]` table.
#[derive(Debug, Clone, PartialEq)]
pub enum ModelSpec {
    /// As a text.
    Named(String),
    /// As a run's table.
    Table(Box<ModelConfig>),
}

impl Serialize for ModelSpec {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Named(name) => to.serialize_str(name),
            Self::Table(table) => table.serialize(to),
        }
    }
}

impl<'de> Deserialize<'de> for ModelSpec {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct TextOrTable;
        impl<'de> Visitor<'de> for TextOrTable {
            type Value = ModelSpec;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a model's name, like \"llama2-7b\", or a table like { llama = { layers = 4 } }")
            }

            fn visit_str<E>(self, name: &str) -> Result<ModelSpec, E> {
                Ok(ModelSpec::Named(name.to_owned()))
            }

            fn visit_map<A: MapAccess<'de>>(self, table: A) -> Result<ModelSpec, A::Error> {
                let config = ModelConfig::deserialize(MapAccessDeserializer::new(table))?;
                Ok(ModelSpec::Table(Box::new(config)))
            }
        }
        from.deserialize_any(TextOrTable)
    }
}

/// A model with all its extents.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Resolved {
    pub title: String,
    pub architecture: Architecture,
    /// If it is somebody's config.json.
    pub config: Option<Config>,
}

impl Resolved {
    /// The model that a specification names, with positions for sequences of so many tokens.
    ///
    /// # Errors
    /// Why there is no such model.
    pub fn new(spec: &ModelSpec, sequence: usize) -> Result<Self, String> {
        let sized = |architecture| match architecture {
            Architecture::Gpt(gpt) => Architecture::Gpt(GptConfig { sequence: gpt.sequence.max(sequence), ..gpt }),
            other => other,
        };
        let alone = |title: String, architecture| Self { title, architecture: sized(architecture), config: None };
        let read = |path: &Path| {
            let config = Config::read(path).map_err(|error| error.to_string())?;
            let (title, architecture) = (path.display().to_string(), config.architecture().clone());
            Ok(Self { title, architecture, config: Some(config) })
        };
        let text = match spec {
            ModelSpec::Named(text) => text,
            ModelSpec::Table(table) => {
                return match &**table {
                    ModelConfig::Gpt(gpt) => Ok(alone("GPT".into(), Architecture::Gpt(gpt.clone()))),
                    ModelConfig::Llama(llama) => Ok(alone("Llama".into(), Architecture::Llama(llama.clone()))),
                    ModelConfig::Moe(moe) => Ok(alone("mixture".into(), Architecture::Moe(moe.clone()))),
                    ModelConfig::Folder(path) => read(path),
                };
            }
        };
        if let Some((_, title)) = PRESETS.iter().find(|(name, _)| name == text) {
            return Ok(alone((*title).to_owned(), preset(text)));
        }
        let path = Path::new(text);
        if path.exists() {
            return read(path);
        }
        let (family, extents) = text.split_once(':').unwrap_or((text, ""));
        let architecture = match family {
            "gpt" => Architecture::Gpt(with_extents(extents)?),
            "llama" => Architecture::Llama(with_extents(extents)?),
            "moe" => Architecture::Moe(with_extents(extents)?),
            _ => {
                let names = PRESETS.map(|(name, _)| name).join(", ");
                return Err(format!(
                    "there is no such folder or config.json, and no model of that name; names are {names}, and gpt, llama and moe with \
                     extents behind a colon"
                ));
            }
        };
        Ok(alone(text.clone(), architecture))
    }
}

/// `layers=4,width=256`: a configuration with these values.
fn with_extents<T: DeserializeOwned>(extents: &str) -> Result<T, String> {
    let lines = extents.replace(',', "\n");
    toml::from_str(&lines).map_err(|error| crate::run::with_nearest(error.message().to_owned()))
}

/// The extents behind a name of [`PRESETS`].
fn preset(name: &str) -> Architecture {
    let gpt = |layers, heads, width| Architecture::Gpt(GptConfig { layers, heads, width, ..GptConfig::default() });
    match name {
        "small" => {
            // Its positions are as many as the sequence has.
            let config =
                GptConfig { vocabulary: 4096, sequence: 0, layers: 6, heads: 6, width: 384, ..GptConfig::default() };
            Architecture::Gpt(config)
        }
        "gpt2" => gpt(12, 12, 768),
        "gpt2-medium" => gpt(24, 16, 1024),
        "gpt2-large" => gpt(36, 20, 1280),
        "gpt2-xl" => gpt(48, 25, 1600),
        "llama2-7b" => {
            let (vocabulary, kv_heads, hidden) = (32_000, 32, 11_008);
            Architecture::Llama(LlamaConfig { vocabulary, kv_heads, hidden, rope_theta: 1e4, ..LlamaConfig::default() })
        }
        "mixtral8x7b" => Architecture::Moe(MoeConfig::default()),
        "qwen-moe" => Architecture::Moe(MoeConfig::qwen1_5_a2_7b()),
        _ => Architecture::Llama(LlamaConfig::default()),
    }
}

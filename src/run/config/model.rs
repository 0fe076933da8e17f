//! `model`: the model to train, given by its sizes, by a preset's name, or as a folder.

use std::fmt;
use std::path::{Path, PathBuf};

use gapless_models::hf::{self, Architecture, Config, Folder};
use gapless_models::{GptConfig, LlamaConfig, MoeConfig};
use schemars::JsonSchema;
use serde::de::value::MapAccessDeserializer;
use serde::de::{DeserializeOwned, Error, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

use super::presets::PRESETS;
use super::read::with_nearest;

/// The model of a run file: `[model.gpt]`, `[model.llama]` or `[model.moe]` with the sizes of a model that starts from
/// random weights, or `model.folder`. The data determine the vocabulary size. The number of positions of a GPT is the
/// number of tokens of a sequence. In place of a table, a string may give a preset (`"gpt2"`), a family with sizes
/// (`"llama:layers=4,width=256"`) or a folder.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[expect(clippy::large_enum_variant, reason = "there is one of it")]
pub enum ModelConfig {
    /// A GPT-2 style model, trained from random weights.
    Gpt(GptConfig),
    /// A Llama style model, trained from random weights.
    Llama(LlamaConfig),
    /// A mixture of experts, trained from random weights.
    Moe(MoeConfig),
    /// A Hugging Face folder, whose weights are fine-tuned. The tokenizer of the folder is used unless `data` names
    /// another tokenizer. A plan reads only the config.json of the folder.
    Folder(PathBuf),
}

impl ModelConfig {
    /// Parses the name of a preset, a family with sizes, or the path of a folder.
    pub(super) fn named(text: &str) -> Result<Self, String> {
        if let Some((.., table)) = PRESETS.iter().find(|(name, ..)| *name == text) {
            return toml::from_str(table).map_err(|error| error.to_string());
        }
        if Path::new(text).exists() {
            return Ok(Self::Folder(text.into()));
        }
        let (family, extents) = text.split_once(':').unwrap_or((text, ""));
        match family {
            "gpt" => with_extents(extents).map(Self::Gpt),
            "llama" => with_extents(extents).map(Self::Llama),
            "moe" => with_extents(extents).map(Self::Moe),
            _ => Err(format!(
                "unknown model {text:?}; use a folder, a config.json, {}, or gpt, llama or moe with extents after a colon",
                PRESETS.map(|(name, ..)| name).join(", ")
            )),
        }
    }

    /// Returns the model with room for at least `tokens` token positions.
    pub(in crate::run) fn with_positions(&self, tokens: usize) -> Self {
        match self {
            Self::Gpt(gpt) => Self::Gpt(GptConfig { sequence: gpt.sequence.max(tokens), ..gpt.clone() }),
            other => other.clone(),
        }
    }

    /// The key of the table with this model's sizes.
    pub(super) fn key(&self) -> &'static str {
        match self {
            Self::Gpt(_) => "model.gpt",
            Self::Llama(_) => "model.llama",
            Self::Moe(_) => "model.moe",
            Self::Folder(_) => "model.folder",
        }
    }

    /// The title of this model in reports.
    pub fn title(&self) -> String {
        if let Some((_, title, _)) = PRESETS.iter().find(|(name, ..)| Self::named(name).is_ok_and(|it| it == *self)) {
            return (*title).to_owned();
        }
        let extents = |layers, width| format!("{layers} layers of width {width}");
        match self {
            Self::Gpt(gpt) => format!("GPT, {}", extents(gpt.layers, gpt.width)),
            Self::Llama(llama) => format!("Llama, {}", extents(llama.layers, llama.width)),
            Self::Moe(moe) => format!("mixture of experts, {}", extents(moe.llama.layers, moe.llama.width)),
            Self::Folder(path) => path.display().to_string(),
        }
    }

    /// Returns the family and sizes of the model. For a folder, only config.json is read, not the weights.
    ///
    /// # Errors
    /// Returns the errors of [`Config::read`].
    pub fn architecture(&self) -> hf::Result<Architecture> {
        Ok(match self {
            Self::Gpt(gpt) => Architecture::Gpt(gpt.clone()),
            Self::Llama(llama) => Architecture::Llama(llama.clone()),
            Self::Moe(moe) => Architecture::Moe(moe.clone()),
            Self::Folder(path) => Config::read(path)?.architecture().clone(),
        })
    }

    /// Returns the architecture. If the model is a folder, also opens and returns the folder; its weight files must
    /// exist.
    pub(in crate::run) fn open(&self) -> hf::Result<(Architecture, Option<Folder>)> {
        let Self::Folder(path) = self else { return Ok((self.architecture()?, None)) };
        let folder = Folder::open(path)?;
        Ok((folder.config().architecture().clone(), Some(folder)))
    }
}

/// Parses sizes such as `layers=4,width=256` into a configuration.
fn with_extents<T: DeserializeOwned>(extents: &str) -> Result<T, String> {
    let lines = extents.replace(',', "\n");
    toml::from_str(&lines).map_err(|error| with_nearest(error.message().to_owned()))
}

/// Deserializes a table, or a string that names one.
pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<ModelConfig, D::Error> {
    struct TextOrTable;
    impl<'de> Visitor<'de> for TextOrTable {
        type Value = ModelConfig;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a model's name, like \"llama2-7b\", or a table like { llama = { layers = 4 } }")
        }

        fn visit_str<E: Error>(self, name: &str) -> Result<ModelConfig, E> {
            ModelConfig::named(name).map_err(E::custom)
        }

        fn visit_map<A: MapAccess<'de>>(self, mut table: A) -> Result<ModelConfig, A::Error> {
            let model = ModelConfig::deserialize(MapAccessDeserializer::new(&mut table))?;
            match table.next_key::<String>()? {
                None => Ok(model),
                Some(other) => Err(A::Error::custom(format_args!("a model has one family; leave {other} out"))),
            }
        }
    }
    from.deserialize_any(TextOrTable)
}

//! `[memory]`: what of a step's memory is saved, and how.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::read::{parses_as, size};
use super::schema;
use crate::Recompute;

/// `[memory]`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct MemoryConfig {
    /// What is computed again in the backward: `none`, `layers`, `first:3`, `layers:h.0,h.2` or `ops:layer_norm,gelu`.
    #[serde(deserialize_with = "parses_as::<Recompute, _>")]
    pub recompute: String,
    /// Bytes of the arena, at most, as a number or a text (`"600MiB"`): what is computed again is then chosen so that it costs least time.
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "size")]
    #[schemars(schema_with = "schema::size")]
    pub budget: Option<u64>,
    /// Operations whose results wait for the backward in eight bits.
    pub compress: Vec<String>,
    /// Operations whose results wait for the backward in a file.
    pub offload: Vec<String>,
    /// Where that file is.
    pub offload_to: PathBuf,
}

impl Default for MemoryConfig {
    fn default() -> Self {
        let (compress, offload) = (Vec::new(), Vec::new());
        Self { recompute: "none".into(), budget: None, compress, offload, offload_to: ".".into() }
    }
}

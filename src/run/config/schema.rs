//! Every key of a run's file, as a JSON schema.

use schemars::{Schema, SchemaGenerator, json_schema};

use super::RunConfig;

impl RunConfig {
    /// A [JSON schema](https://json-schema.org/draft/2020-12) of run files: keys, types, defaults and what each means. Editors that
    /// know TOML complete and check by it. That reading accepts a file says more: not all that is of the right type can be together.
    pub fn schema() -> serde_json::Value {
        schemars::schema_for!(Self).into()
    }
}

/// Of a number of bytes or a text that means one.
pub(super) fn size(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": ["integer", "string", "null"], "minimum": 0 })
}

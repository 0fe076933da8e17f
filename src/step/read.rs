//! Reading: the `[step]` table of a file, and keys that go before what it says.

use std::path::Path;

use serde::Deserialize;
use toml::{Table, Value};

use super::StepSpec;
use crate::run::{ConfigError, text_of, with_nearest};

impl StepSpec {
    /// The `[step]` of a file, if there is one, under the keys of `over`.
    ///
    /// # Errors
    /// [`ConfigError`]: a file that cannot be read, keys that do not exist, values of another type.
    pub fn read(file: Option<&Path>, over: &Table) -> Result<Self, ConfigError> {
        let Some(path) = file else { return Self::over(&Table::new(), over) };
        let text = text_of(path)?;
        let syntax = |message| ConfigError::Syntax { path: path.to_owned(), message };
        #[derive(Deserialize)]
        struct File {
            #[serde(default)]
            step: StepSpec,
        }
        // By itself first, for the lines of its mistakes.
        let File { step } = toml::from_str(&text).map_err(|error| syntax(with_nearest(error.to_string())))?;
        if over.is_empty() {
            return Ok(step);
        }
        let mut root: Table = toml::from_str(&text).map_err(|error| syntax(error.to_string()))?;
        let below = match root.remove("step") {
            Some(Value::Table(table)) => table,
            _ => Table::new(),
        };
        Self::over(&below, over)
    }

    /// Some keys, under those of `over`.
    ///
    /// # Errors
    /// [`ConfigError::Value`]: keys that do not exist, values of another type.
    pub fn over(below: &Table, over: &Table) -> Result<Self, ConfigError> {
        let mut table = below.clone();
        table.extend(over.iter().map(|(key, value)| (key.clone(), value.clone())));
        Self::deserialize(table).map_err(|error| {
            // The key that is no good by itself.
            let alone = |(key, value): (&String, &Value)| {
                let refused = Self::deserialize(Table::from_iter([(key.clone(), value.clone())])).err()?;
                Some((key.clone(), refused))
            };
            let (key, error) = over.iter().chain(below).find_map(alone).unwrap_or_else(|| ("step".to_owned(), error));
            let why = with_nearest(error.message().to_owned());
            ConfigError::Value { key, line: None, why, remedy: "docs/sweep.md lists the keys of a step" }
        })
    }
}

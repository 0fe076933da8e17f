//! Compares a checkpoint's settings with those of the program that resumes it. Settings that the program does not give
//! are taken from the checkpoint. Differences in settings that may change are printed; other differences are an error.

use std::path::Path;

use gapless_engine::checkpoint::{Checkpoint, Difference, differences};
use gapless_engine::data::{DataOptions, Dataset, Source};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::{Console, RunConfig, RunError};

/// Returns the settings of a resumed run. A setting for which `is_given` returns true is taken from `now`, and any
/// other setting from the checkpoint. `part` is the key of the settings in the value that was saved with the run
/// ([`TrainingLoop::save`](super::TrainingLoop::save)). The result is checked by [`expect_same`].
///
/// # Errors
/// Returns the errors of [`expect_same`], and an error if the saved settings are not of type `T`.
pub fn with_saved<T: Serialize + DeserializeOwned>(
    now: &T,
    is_given: impl Fn(&str) -> bool,
    checkpoint: &Checkpoint,
    part: &str,
    may_change: &[&str],
    console: &Console,
) -> Result<T, RunError> {
    let mut all = json!(now);
    let saved = checkpoint.metadata().get("run").and_then(|run| run.get(part)).and_then(Value::as_object);
    for (key, value) in all.as_object_mut().into_iter().flatten() {
        if let Some(saved) = saved.and_then(|saved| saved.get(key)).filter(|_| !is_given(key)) {
            *value = saved.clone();
        }
    }
    expect_same(checkpoint, part, &all, may_change, console)?;
    serde_json::from_value(all)
        .map_err(|error| RunError::Changed { path: checkpoint.path().to_owned(), differences: vec![error.to_string()] })
}

/// Compares settings with those of a checkpoint. Prints the differences in settings that may change, and returns an
/// error if other settings differ. Each name in `may_change` stands for a key and for all keys below this key.
///
/// # Errors
/// Returns [`RunError::Changed`] if a setting outside of `may_change` differs. The error has the key of each such
/// setting, with its saved and its present value.
pub fn expect_same(
    checkpoint: &Checkpoint,
    part: &str,
    now: &Value,
    may_change: &[&str],
    console: &Console,
) -> Result<(), RunError> {
    let saved = saved_part(checkpoint, part);
    let is_below =
        |key: &str, name: &str| key.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'));
    let all = differences(&saved, now);
    let (allowed, refused): (Vec<_>, Vec<_>) =
        all.iter().partition(|difference| may_change.iter().any(|name| is_below(&difference.key, name)));
    for difference in allowed {
        console.say(format_args!("changed since the checkpoint: {}", in_words(difference, part)));
    }
    if refused.is_empty() {
        return Ok(());
    }
    let differences = refused.into_iter().map(|difference| in_words(difference, part)).collect();
    Err(RunError::Changed { path: checkpoint.path().to_owned(), differences })
}

/// Prints the settings that have changed since the checkpoint.
pub(super) fn say_changes(checkpoint: &Checkpoint, part: &str, now: &Value, console: &Console) {
    for difference in differences(&saved_part(checkpoint, part), now) {
        console.say(format_args!("changed since the checkpoint: {}", in_words(&difference, part)));
    }
}

/// Returns the saved settings under `part`. If they are a run configuration, returns its [`RunConfig::compared`] settings.
fn saved_part(checkpoint: &Checkpoint, part: &str) -> Value {
    let saved = checkpoint.metadata().get("run").and_then(|run| run.get(part)).unwrap_or(&Value::Null);
    let config = || RunConfig::of_table(&toml::Table::try_from(without_nulls(saved)).ok()?).ok();
    config().map_or_else(|| saved.clone(), |config| config.compared())
}

/// Returns a value without the keys that are null, because TOML has no null.
fn without_nulls(value: &Value) -> Value {
    match value {
        Value::Object(entries) => {
            let entries = entries.iter().filter(|(_, value)| !value.is_null());
            entries.map(|(key, value)| (key.clone(), without_nulls(value))).collect()
        }
        other => other.clone(),
    }
}

/// Opens the data of a run. A new run prepares the data. A resumed run opens the prepared data in the folder that the
/// checkpoint names (`"data"` of the saved value). The hash of the data must be the one in the checkpoint
/// (`"data_hash"`).
///
/// # Errors
/// Returns the errors of [`Dataset::prepare`] and [`Dataset::open_prepared`], and [`RunError::Changed`] if the hash
/// differs.
pub fn dataset(source: &Source, options: &DataOptions, resumed: Option<&Checkpoint>) -> Result<Dataset, RunError> {
    let Some(checkpoint) = resumed else { return Ok(Dataset::prepare(source, options)?) };
    let dataset = match checkpoint.metadata()["run"]["data"].as_str() {
        Some(folder) => Dataset::open_prepared(Path::new(folder))?,
        None => Dataset::prepare(source, options)?,
    };
    expect_same(checkpoint, "data_hash", &json!(dataset.hash()), &[], &Console::default())?;
    Ok(dataset)
}

fn in_words(difference: &Difference, part: &str) -> String {
    let shown = |value: &Option<Value>| value.as_ref().map_or("absent".to_owned(), Value::to_string);
    let key = if difference.key.is_empty() { part } else { &difference.key };
    let why = if key == "data.validation_every" { " (0 if evaluation.path is set)" } else { "" };
    format!("{key} was {} and is {}{why}", shown(&difference.saved), shown(&difference.expected))
}

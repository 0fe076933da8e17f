//! Reads a TOML file and assignments into a [`RunConfig`]. Adds to each error the line of its key.

use std::path::{Path, PathBuf};

use gapless_engine::data::read_text;
use serde::Deserialize;
use serde_json::Value as Json;
use toml::{Table, Value};

use super::names::{NAMES, flatten, key_of, move_former_names, set};
use super::{ModelConfig, RunConfig};

/// The reason why a run file or an assignment of the command line is invalid.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The text is not TOML, or has an unknown key or a value of the wrong type.
    #[error("{}: {message}", path.display())]
    Syntax {
        /// Path of the file.
        path: PathBuf,
        /// Description of the fault, with its position in the file.
        message: String,
    },
    /// An assignment of the command line that cannot be parsed.
    #[error("{assignment:?} is not an assignment: {why}; write, for example, step.batch=16")]
    Assignment {
        /// The assignment as given.
        assignment: String,
        /// The fault.
        why: String,
    },
    /// Assignments of the command line whose key or value is refused.
    #[error("--set {assignment}: {why}")]
    Refused {
        /// The assignment as given. If only the combination of all assignments is refused, all of them.
        assignment: String,
        /// The fault.
        why: String,
    },
    /// A value that is invalid, or that cannot be combined with others.
    #[error("{key}{}: {why}; {remedy}", line.map_or(String::new(), |line| format!(" (line {line})")))]
    Value {
        /// The key.
        key: String,
        /// The line of the key in the file. `None` if the value is a default or an assignment of the command line.
        line: Option<usize>,
        /// The fault.
        why: String,
        /// Advice on how to correct the value.
        remedy: &'static str,
    },
}

impl ConfigError {
    /// Creates an error for a value whose line is not known.
    pub(crate) fn value(key: &str, why: impl ToString, remedy: &'static str) -> Self {
        Self::Value { key: key.to_owned(), line: None, why: why.to_string(), remedy }
    }
}

impl RunConfig {
    /// Reads a run file and checks all settings that can be checked without opening the data and without a device.
    /// Assignments (`step.batch=16`) override the file. Relative paths in the file are relative to the working
    /// directory; the run.toml that a run writes has absolute paths.
    ///
    /// # Errors
    /// Returns a [`ConfigError`] if a setting is invalid. The error has the line, the key and a remedy.
    pub fn read(path: &Path, assignments: &[String]) -> Result<Self, ConfigError> {
        let text = text_of(path)?;
        let config = parse(&text, path, assignments)?;
        config.check().map_err(|error| at_line(error, &text, assignments))?;
        Ok(config)
    }

    /// Like [`Self::read`], but the data need not exist. This is for planning a run, or for using a trained model. If
    /// there is no file, the assignments must give all required keys.
    ///
    /// # Errors
    /// Returns a [`ConfigError`] if a setting is invalid. The error has the line, the key and a remedy.
    pub fn read_without_data(path: Option<&Path>, assignments: &[String]) -> Result<Self, ConfigError> {
        let text = path.map(text_of).transpose()?.unwrap_or_default();
        let config = parse(&text, path.unwrap_or(Path::new("the run")), assignments)?;
        config.check_keys().map_err(|error| at_line(error, &text, assignments))?;
        Ok(config)
    }

    /// Like [`Self::read_without_data`], but the model is the Hugging Face folder `model`, whatever the file says.
    ///
    /// # Errors
    /// Returns a [`ConfigError`] if a setting is invalid.
    pub(in crate::run) fn read_with_model(path: &Path, model: &Path) -> Result<Self, ConfigError> {
        let Ok(mut root) = toml::from_str::<Table>(&text_of(path)?) else {
            return Self::read_without_data(Some(path), &[]);
        };
        let model = Value::try_from(ModelConfig::Folder(model.to_owned()));
        root.insert(
            "model".to_owned(),
            model.map_err(|error| ConfigError::value("model", error, "rename the folder"))?,
        );
        let config = Self::of_table(&root)?;
        config.check_keys()?;
        Ok(config)
    }

    /// Parses the text of a run file. Constraints between keys are not checked.
    ///
    /// # Errors
    /// Returns a [`ConfigError`] if a setting is invalid. The error has the line, the key and a remedy.
    pub fn parse(text: &str, assignments: &[String]) -> Result<Self, ConfigError> {
        parse(text, Path::new("the run"), assignments)
    }

    /// Converts a table to a configuration. Constraints between keys are not checked.
    ///
    /// # Errors
    /// Returns a [`ConfigError::Value`] for an unknown key or a value of the wrong type.
    pub(crate) fn of_table(table: &Table) -> Result<Self, ConfigError> {
        let mut root = table.clone();
        let notices = move_former_names(&mut root)?;
        let error = match Self::deserialize(root) {
            Ok(config) => return Ok(Self { notices, ..config }.with_targets()),
            Err(error) => error,
        };
        // The error has no key, so each key is tried on its own to find the faulty one.
        let mut root = table.clone();
        move_former_names(&mut root)?;
        let alone = |(key, value): (String, Value)| {
            let mut one = Table::from_iter([("model".to_owned(), Value::from("small"))]);
            set(&mut one, &key, value).ok()?;
            Self::deserialize(one).err().map(|error| (key, error))
        };
        let (key, error) = flatten(&root, "").into_iter().find_map(alone).unwrap_or_else(|| {
            let quoted = error.message().split('`').nth(1).unwrap_or("the run");
            (quoted.to_owned(), error)
        });
        let why = with_nearest_name(error.message().to_owned());
        Err(ConfigError::Value { key, line: None, why, remedy: "docs/run_file.md lists the keys" })
    }
}

/// Parses a text and applies the assignments. Checks only the type of each value, not their combination.
fn parse(text: &str, path: &Path, assignments: &[String]) -> Result<RunConfig, ConfigError> {
    let syntax = |message| ConfigError::Syntax { path: path.to_owned(), message };
    let mut root: Table = toml::from_str(text).map_err(|error| syntax(error.to_string()))?;
    expect_tables(&root).and_then(|()| expect_one_length(&root)).map_err(|error| at_line(error, text, &[]))?;
    let notices = move_former_names(&mut root).map_err(|error| at_line(error, text, &[]))?;
    let config = match (assignments, &notices[..]) {
        // Deserialized from the text, so that errors have line numbers.
        ([], []) => toml::from_str(text).map_err(|error| syntax(with_nearest(error.to_string())))?,
        ([], _) => RunConfig::deserialize(root).map_err(|error| syntax(with_nearest(error.to_string())))?,
        _ => {
            if notices.is_empty() && root.contains_key("model") {
                toml::from_str::<RunConfig>(text).map_err(|error| syntax(with_nearest(error.to_string())))?;
            }
            assigned(&root, assignments)?
        }
    };
    Ok(RunConfig { notices, ..config }.with_targets())
}

/// Maximum size of a run file in bytes. No file that is written by hand is larger.
const MAX_BYTES: u64 = 16 << 20;

pub(crate) fn text_of(path: &Path) -> Result<String, ConfigError> {
    read_text(path, MAX_BYTES).map_err(|source| ConfigError::Read { path: path.to_owned(), source })
}

/// Returns an error if the file has a list where a table is required. Without this check, serde would accept the list,
/// and take its elements as the values of the table's keys in order.
fn expect_tables(table: &Table) -> Result<(), ConfigError> {
    let schema = RunConfig::schema();
    match list_for_table(&schema, &schema, &Value::Table(table.clone())) {
        None => Ok(()),
        Some(mut path) => {
            path.reverse();
            Err(ConfigError::value(&path.join("."), "is a list, but must be a table", "write each value with its key"))
        }
    }
}

/// Returns an error if the file gives the length of the run twice.
fn expect_one_length(table: &Table) -> Result<(), ConfigError> {
    match table.contains_key("steps") && table.contains_key("epochs") {
        true => Err(ConfigError::value("epochs", "is given along with steps", "leave one of them out")),
        false => Ok(()),
    }
}

/// Finds a list where the schema requires a table. Returns the keys on the path to this list, from the innermost to the
/// outermost. Returns `None` if there is no such list.
fn list_for_table(root: &Json, schema: &Json, value: &Value) -> Option<Vec<String>> {
    let forms = forms(root, schema);
    match value {
        Value::Array(items) => {
            let has_type = |form: &&Json, name: &str| {
                form["type"] == name
                    || form["type"].as_array().is_some_and(|names| names.iter().any(|listed| listed == name))
            };
            let lists: Vec<&Json> = forms.iter().copied().filter(|form| has_type(form, "array")).collect();
            if lists.is_empty() {
                return forms.iter().any(|form| has_type(form, "object")).then(Vec::new);
            }
            items.iter().find_map(|item| lists.iter().find_map(|list| list_for_table(root, &list["items"], item)))
        }
        Value::Table(table) => table.iter().find_map(|(key, value)| {
            let mut path = forms.iter().find_map(|form| list_for_table(root, form["properties"].get(key)?, value))?;
            path.push(key.clone());
            Some(path)
        }),
        _ => None,
    }
}

/// All alternatives that a schema allows for a value.
fn forms<'a>(root: &'a Json, schema: &'a Json) -> Vec<&'a Json> {
    let named = schema["$ref"].as_str().and_then(|name| root.pointer(name.strip_prefix('#')?));
    let several = ["anyOf", "oneOf", "allOf"].into_iter().filter_map(|key| schema[key].as_array()).flatten();
    let inner: Vec<&Json> = named.into_iter().chain(several).flat_map(|schema| forms(root, schema)).collect();
    inner.into_iter().chain([schema]).collect()
}

/// Returns the configuration of the file with the assignments applied.
fn assigned(root: &Table, assignments: &[String]) -> Result<RunConfig, ConfigError> {
    let refused = match with_assignments(root, assignments)? {
        Ok(config) => return Ok(config),
        Err(refused) => refused,
    };
    // Values may depend on each other. So the error names a single assignment only if this assignment is refused
    // without the others.
    let mut root = root.clone();
    root.entry("model").or_insert("small".into());
    for assignment in assignments {
        if let Err(why) = with_assignments(&root, std::slice::from_ref(assignment))? {
            return Err(ConfigError::Refused { assignment: assignment.clone(), why });
        }
    }
    Err(ConfigError::Refused { assignment: assignments.join(" --set "), why: refused })
}

/// Applies the assignments and parses the resulting table. The outer error is for an assignment that cannot be parsed
/// or applied. The inner error is the reason why the resulting table is invalid.
fn with_assignments(root: &Table, assignments: &[String]) -> Result<Result<RunConfig, String>, ConfigError> {
    let mut root = root.clone();
    assign(&mut root, assignments)?;
    expect_tables(&root)?;
    Ok(RunConfig::deserialize(root).map_err(|error| with_nearest_name(error.to_string())))
}

/// Sets the keys of assignments, each of which is `KEY=VALUE`.
pub(crate) fn assign(root: &mut Table, assignments: &[String]) -> Result<(), ConfigError> {
    for assignment in assignments {
        let wrong = |why: &str| ConfigError::Assignment { assignment: assignment.clone(), why: why.to_owned() };
        let (key, value) = assignment.split_once('=').ok_or_else(|| wrong("it has no ="))?;
        // A value is TOML or, failing that, a string without quotes.
        let value = value.trim();
        let parsed = toml::from_str::<Table>(&format!("x = {value}")).ok().and_then(|mut table| table.remove("x"));
        let value = parsed.unwrap_or_else(|| Value::String(value.to_owned()));
        let key = key_of(key.trim());
        if key.split('.').any(str::is_empty) {
            return Err(wrong("it has no key"));
        }
        set(root, key, value).map_err(|why: String| wrong(&why))?;
    }
    Ok(())
}

/// Adds the most similar valid name to a message about an unknown key or value. If no name is similar enough, returns
/// the message unchanged.
pub(crate) fn with_nearest(message: String) -> String {
    let quoted: Vec<&str> = message.split('`').skip(1).step_by(2).collect();
    let Some((wrong, known)) = quoted.split_first().filter(|_| message.contains("unknown")) else { return message };
    match nearest(wrong, known) {
        Some(name) => format!("{}\ndid you mean `{name}`?", message.trim_end()),
        None => message,
    }
}

/// Like [`with_nearest`], but also suggests short names, for places that accept them.
fn with_nearest_name(message: String) -> String {
    let Some(wrong) = message.strip_prefix("unknown field `").and_then(|rest| rest.split('`').next()) else {
        return with_nearest(message);
    };
    let names: Vec<&str> = NAMES.iter().map(|(short, _)| *short).collect();
    match nearest(wrong, &names).filter(|_| message.contains("`learning_rate`")) {
        Some(name) => format!("unknown key `{wrong}`\ndid you mean `{name}`?"),
        None => with_nearest(message),
    }
}

/// Returns the name that was probably meant, or `None` if no name is similar enough. Up to a third of the letters may
/// be misspelled, or the name may be abbreviated.
fn nearest<'a>(wrong: &str, known: &[&'a str]) -> Option<&'a str> {
    // A common beginning counts more than an equal length.
    let alike = |name: &str| wrong.bytes().zip(name.bytes()).take_while(|(a, b)| a == b).count();
    let distance = |name: &str| strsim::damerau_levenshtein(wrong, name);
    let is_near = |name: &str| {
        let is_cut = alike(name) >= 3 && alike(name) == wrong.len().min(name.len());
        is_cut || distance(name) <= (wrong.len().max(name.len()) / 3).max(1)
    };
    known.iter().copied().filter(|name| is_near(name)).min_by_key(|name| distance(name) as isize - alike(name) as isize)
}

/// Adds to an error the line of the key that the error names.
fn at_line(error: ConfigError, text: &str, assignments: &[String]) -> ConfigError {
    let ConfigError::Value { key, line: None, why, remedy } = error else { return error };
    let is_assigned = assignments
        .iter()
        .any(|assignment| assignment.split('=').next().is_some_and(|k| key_of(k.trim()).starts_with(&key)));
    let line = if is_assigned { None } else { line_of(text, &key) };
    ConfigError::Value { key, line, why, remedy }
}

/// Returns the line of a key, counted from 1, or `None` if the text does not contain it. The text may use the key's
/// present name or a former name.
pub(crate) fn line_of(text: &str, key: &str) -> Option<usize> {
    let former = NAMES.iter().filter(|(_, name)| *name == key).map(|(short, _)| format!("step.{short}"));
    std::iter::once(key.to_owned()).chain(former).find_map(|key| line_of_name(text, &key))
}

fn line_of_name(text: &str, key: &str) -> Option<usize> {
    let root = toml::de::DeTable::parse(text).ok()?;
    let mut parts = key.split('.');
    let mut found = root.get_ref().get_key_value(parts.next()?)?;
    for part in parts {
        found = found.1.get_ref().as_table()?.get_key_value(part)?;
    }
    Some(text[..found.0.span().start].matches('\n').count() + 1)
}

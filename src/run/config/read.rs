//! Reading: TOML and assignments → [`RunConfig`], and where mistakes are.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use gapless_alloc::draw::Bytes;
use gapless_engine::data::read_text;
use serde::de::Visitor;
use serde::{Deserialize, Deserializer};
use serde_json::Value as Json;
use toml::Value;

use super::RunConfig;

/// Why a file is no run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// It cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// No TOML, a key that does not exist, or a value of another type; says where.
    #[error("{}: {message}", path.display())]
    Syntax {
        /// The file.
        path: PathBuf,
        /// What and where.
        message: String,
    },
    /// An assignment of the command line that is none.
    #[error("{assignment:?} is no assignment: {why}; write, for example, step.batch=16")]
    Assignment {
        /// As given.
        assignment: String,
        /// What is wrong.
        why: String,
    },
    /// Assignments of the command line whose key or value is refused.
    #[error("--set {assignment}: {why}")]
    Refused {
        /// As given; several where only all of them together are refused.
        assignment: String,
        /// What is wrong.
        why: String,
    },
    /// Values that cannot be, or not together.
    #[error("{key}{}: {why}; {remedy}", line.map_or(String::new(), |line| format!(" (line {line})")))]
    Value {
        /// The key.
        key: String,
        /// Where it stands, unless it is a default or of the command line.
        line: Option<usize>,
        /// What is wrong.
        why: String,
        /// What would do.
        remedy: &'static str,
    },
}

impl ConfigError {
    /// A wrong value, wherever it stands.
    pub(crate) fn value(key: &str, why: impl ToString, remedy: &'static str) -> Self {
        Self::Value { key: key.to_owned(), line: None, why: why.to_string(), remedy }
    }
}

impl RunConfig {
    /// Reads a file, with assignments (`step.batch=16`) that go before what it says, and checks all that can be checked without
    /// data and without a device. Paths in it are relative to where the process runs.
    ///
    /// # Errors
    /// [`ConfigError`], with line, key and remedy.
    pub fn read(path: &Path, assignments: &[String]) -> Result<Self, ConfigError> {
        read(path, assignments, Self::check)
    }

    /// The same where the data need not be there: to plan a run, or to use what it has trained.
    ///
    /// # Errors
    /// [`ConfigError`], with line, key and remedy.
    pub fn read_without_data(path: &Path, assignments: &[String]) -> Result<Self, ConfigError> {
        read(path, assignments, Self::check_keys)
    }
}

fn read(
    path: &Path,
    assignments: &[String],
    check: fn(&RunConfig) -> Result<(), ConfigError>,
) -> Result<RunConfig, ConfigError> {
    let text = text_of(path)?;
    let syntax = |message| ConfigError::Syntax { path: path.to_owned(), message };
    let table: toml::Table = toml::from_str(&text).map_err(|error| syntax(error.to_string()))?;
    expect_tables(&table).map_err(|error| at_line(error, &text, &[]))?;
    // The file by itself first, for the lines of its mistakes; then with what the command line says.
    let config: RunConfig = toml::from_str(&text).map_err(|error| syntax(with_nearest(error.to_string())))?;
    let config = if assignments.is_empty() { config } else { assigned(&text, assignments)? };
    check(&config).map_err(|error| at_line(error, &text, assignments))?;
    Ok(config)
}

/// Bytes of a file that somebody writes by hand, at most.
const MOST_BYTES: u64 = 16 << 20;

pub(crate) fn text_of(path: &Path) -> Result<String, ConfigError> {
    read_text(path, MOST_BYTES).map_err(|source| ConfigError::Read { path: path.to_owned(), source })
}

/// Refuses lists where tables belong: they would be taken for the values of the table's keys in their order.
fn expect_tables(table: &toml::Table) -> Result<(), ConfigError> {
    let schema = RunConfig::schema();
    match list_for_table(&schema, &schema, &Value::Table(table.clone())) {
        None => Ok(()),
        Some(mut path) => {
            path.reverse();
            Err(ConfigError::value(&path.join("."), "is a list, where a table belongs", "give each value its key"))
        }
    }
}

/// The keys, from the last to the first, of a list in the place of a table.
fn list_for_table(root: &Json, schema: &Json, value: &Value) -> Option<Vec<String>> {
    let forms = forms(root, schema);
    match value {
        Value::Array(items) => {
            let has_type = |form: &&Json, name: &str| {
                form["type"] == name || form["type"].as_array().is_some_and(|of| of.iter().any(|of| of == name))
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

/// All forms that a schema allows.
fn forms<'a>(root: &'a Json, schema: &'a Json) -> Vec<&'a Json> {
    let named = schema["$ref"].as_str().and_then(|name| root.pointer(name.strip_prefix('#')?));
    let several = ["anyOf", "oneOf", "allOf"].into_iter().filter_map(|of| schema[of].as_array()).flatten();
    let inner: Vec<&Json> = named.into_iter().chain(several).flat_map(|schema| forms(root, schema)).collect();
    inner.into_iter().chain([schema]).collect()
}

/// The file's configuration with other values.
fn assigned(text: &str, assignments: &[String]) -> Result<RunConfig, ConfigError> {
    let refused = match with_assignments(text, assignments)? {
        Ok(config) => return Ok(config),
        Err(refused) => refused,
    };
    // Values may need each other, so one is blamed only where it is refused by itself.
    for assignment in assignments {
        if let Err(why) = with_assignments(text, std::slice::from_ref(assignment))? {
            return Err(ConfigError::Refused { assignment: assignment.clone(), why });
        }
    }
    Err(ConfigError::Refused { assignment: assignments.join(" --set "), why: refused })
}

/// The same, or why its keys and values are refused.
fn with_assignments(text: &str, assignments: &[String]) -> Result<Result<RunConfig, String>, ConfigError> {
    let mut root: toml::Table = toml::from_str(text).expect("it was read just now");
    for assignment in assignments {
        let wrong = |why: &str| ConfigError::Assignment { assignment: assignment.clone(), why: why.to_owned() };
        let (key, value) = assignment.split_once('=').ok_or_else(|| wrong("it has no ="))?;
        // As TOML, or else as a text without its quotes.
        let value = value.trim();
        let parsed =
            toml::from_str::<toml::Table>(&format!("x = {value}")).ok().and_then(|mut table| table.remove("x"));
        let value = parsed.unwrap_or_else(|| Value::String(value.to_owned()));
        let mut path: Vec<&str> = key.trim().split('.').collect();
        let last = path.pop().filter(|last| !last.is_empty()).ok_or_else(|| wrong("it names no key"))?;
        let mut table = &mut root;
        for part in path {
            let below = table.entry(part).or_insert_with(|| Value::Table(toml::Table::new()));
            table = below.as_table_mut().ok_or_else(|| wrong(&format!("{part} is no table")))?;
        }
        table.insert(last.to_owned(), value);
    }
    expect_tables(&root)?;
    Ok(RunConfig::deserialize(root).map_err(|error| with_nearest(error.to_string())))
}

/// A message about a key or value that does not exist, with the nearest that does, where one is near.
pub(crate) fn with_nearest(message: String) -> String {
    let quoted: Vec<&str> = message.split('`').skip(1).step_by(2).collect();
    let Some((wrong, known)) = quoted.split_first().filter(|_| message.contains("unknown")) else { return message };
    match nearest(wrong, known) {
        Some(name) => format!("{}\ndid you mean `{name}`?", message.trim_end()),
        None => message,
    }
}

/// The name that somebody is likely to have meant: a third of it may be wrong, or it may be cut short.
fn nearest<'a>(wrong: &str, known: &[&'a str]) -> Option<&'a str> {
    // What begins alike is nearer than what is as long.
    let alike = |name: &str| wrong.bytes().zip(name.bytes()).take_while(|(a, b)| a == b).count();
    let distance = |name: &str| strsim::damerau_levenshtein(wrong, name);
    let is_near = |name: &str| {
        let is_cut = alike(name) >= 3 && alike(name) == wrong.len().min(name.len());
        is_cut || distance(name) <= (wrong.len().max(name.len()) / 3).max(1)
    };
    known.iter().copied().filter(|name| is_near(name)).min_by_key(|name| distance(name) as isize - alike(name) as isize)
}

/// Where the key of an error stands.
fn at_line(error: ConfigError, text: &str, assignments: &[String]) -> ConfigError {
    let ConfigError::Value { key, line: None, why, remedy } = error else { return error };
    let is_assigned =
        assignments.iter().any(|assignment| assignment.split('=').next().is_some_and(|k| k.trim() == key));
    let line = if is_assigned { None } else { line_of(text, &key) };
    ConfigError::Value { key, line, why, remedy }
}

/// The line on which a key stands, from 1 on.
pub(crate) fn line_of(text: &str, key: &str) -> Option<usize> {
    let root = toml::de::DeTable::parse(text).ok()?;
    let mut parts = key.split('.');
    let mut found = root.get_ref().get_key_value(parts.next()?)?;
    for part in parts {
        found = found.1.get_ref().as_table()?.get_key_value(part)?;
    }
    Some(text[..found.0.span().start].matches('\n').count() + 1)
}

/// A text that means a `T`, kept as it is written.
pub(super) fn parses_as<'de, T: FromStr<Err: fmt::Display>, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    let text = String::deserialize(from)?;
    T::from_str(&text).map(|_| text).map_err(serde::de::Error::custom)
}

/// A number of bytes, or a text that means one.
pub(crate) fn size<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u64>, D::Error> {
    struct Size;
    impl Visitor<'_> for Size {
        type Value = Option<u64>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a number of bytes, like 4096 or \"600MiB\"")
        }

        fn visit_i64<E: serde::de::Error>(self, bytes: i64) -> Result<Self::Value, E> {
            u64::try_from(bytes).map(Some).map_err(|_| E::invalid_value(serde::de::Unexpected::Signed(bytes), &self))
        }

        fn visit_u64<E: serde::de::Error>(self, bytes: u64) -> Result<Self::Value, E> {
            Ok(Some(bytes))
        }

        fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Self::Value, E> {
            Bytes::read(text).map(Some).map_err(E::custom)
        }
    }
    from.deserialize_any(Size)
}

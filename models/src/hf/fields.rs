//! The options of a config.json, which are read one by one.
//!
//! In: a JSON object. Out: checked values, and in the end every problem. Never: an option that is silently skipped; an
//! option that was not read is a problem.

use std::io::Read;
use std::ops::RangeInclusive;
use std::path::Path;

use gapless_engine::data::open_regular;
use serde_json::{Map, Value};

use super::error::{ConfigProblem, HfError, Result};

/// The greatest size of a JSON file in bytes. Even the index of a model with a million tensors is smaller.
const MAX_BYTES: u64 = 256 << 20;

/// The options of an object that have not been read yet, and the problems found in those that have been read.
#[derive(Debug)]
pub(super) struct Fields {
    left: Map<String, Value>,
    /// Prefix of option names in messages.
    path: String,
    pub problems: Vec<ConfigProblem>,
}

impl Fields {
    pub fn new(options: Map<String, Value>, path: &str) -> Self {
        Self { left: options, path: path.to_owned(), problems: Vec::new() }
    }

    /// True if the option is present and has not been read yet, even if its value is null.
    pub fn has(&self, field: &str) -> bool {
        self.left.contains_key(field)
    }

    /// Returns the option without removing it, or `None` if it is missing or null.
    pub fn peek(&self, field: &str) -> Option<&Value> {
        self.left.get(field).filter(|value| !value.is_null())
    }

    /// Removes and returns the option. Returns `None` if it is missing or null.
    pub fn take(&mut self, field: &str) -> Option<Value> {
        self.left.remove(field).filter(|value| !value.is_null())
    }

    /// Removes an option whose value is an object, and returns that object's options. Returns `None` if the option is
    /// missing or null, or if its value is not an object. A value that is not an object is recorded as a problem.
    pub fn object(&mut self, field: &str) -> Option<Self> {
        match self.take(field)? {
            Value::Object(options) => Some(Self::new(options, &format!("{}{field}.", self.path))),
            other => {
                self.wrong(field, &other, "an object");
                None
            }
        }
    }

    /// Reads an integer. If the value is outside `within`, or if the option is missing and has no default, records a
    /// problem and returns the lower bound of `within`.
    pub fn count(&mut self, field: &str, default: Option<usize>, within: RangeInclusive<usize>) -> usize {
        let Some(value) = self.take(field) else {
            if default.is_none() {
                self.problems.push(ConfigProblem::Missing { field: self.full(field) });
            }
            return default.unwrap_or(*within.start());
        };
        let found = value.as_u64().and_then(|found| usize::try_from(found).ok()).filter(|found| within.contains(found));
        found.unwrap_or_else(|| {
            self.wrong(field, &value, &format!("a whole number from {} to {}", within.start(), within.end()));
            *within.start()
        })
    }

    /// Reads a number above 0. For any other value, or if the option is missing and has no default, records a problem
    /// and returns 1.
    pub fn positive(&mut self, field: &str, default: Option<f64>) -> f64 {
        let Some(value) = self.take(field) else {
            if default.is_none() {
                self.problems.push(ConfigProblem::Missing { field: self.full(field) });
            }
            return default.unwrap_or(1.0);
        };
        value.as_f64().filter(|found| *found > 0.0 && found.is_finite()).unwrap_or_else(|| {
            self.wrong(field, &value, "a number above 0");
            1.0
        })
    }

    /// Reads a list of numbers above 0. For any other value, or if the option is missing, records a problem and returns an
    /// empty list.
    pub fn positives(&mut self, field: &str) -> Vec<f64> {
        let Some(value) = self.take(field) else {
            self.problems.push(ConfigProblem::Missing { field: self.full(field) });
            return Vec::new();
        };
        let number = |value: &Value| value.as_f64().filter(|number| *number > 0.0);
        value.as_array().and_then(|all| all.iter().map(number).collect()).unwrap_or_else(|| {
            self.wrong(field, &value, "a list of numbers above 0");
            Vec::new()
        })
    }

    /// Reads a number above 0 like [`Self::positive`]. Returns `None` if the option is missing or null.
    pub fn optional_positive(&mut self, field: &str) -> Option<f64> {
        let value = self.take(field)?;
        self.left.insert(field.to_owned(), value);
        Some(self.positive(field, None))
    }

    pub fn flag(&mut self, field: &str, default: bool) -> bool {
        let Some(value) = self.take(field) else { return default };
        value.as_bool().unwrap_or_else(|| {
            self.wrong(field, &value, "true or false");
            default
        })
    }

    /// Reads a flag like [`Self::flag`], but leaves it to be read again.
    pub fn peek_flag(&mut self, field: &str, default: bool) -> bool {
        let found = self.flag(field, default);
        self.set(field, found.into());
        found
    }

    /// Sets an option, as if the file had it.
    pub fn set(&mut self, field: &str, value: Value) {
        self.left.insert(field.to_owned(), value);
    }

    /// Sets an option that the file does not have.
    pub fn default(&mut self, field: &str, value: Value) {
        if !self.has(field) {
            self.set(field, value);
        }
    }

    /// Renames an option of another name, if it is present.
    pub fn rename(&mut self, from: &str, to: &str) {
        if let Some(value) = self.take(from) {
            self.set(to, value);
        }
    }

    pub fn text(&mut self, field: &str) -> Option<String> {
        match self.take(field)? {
            Value::String(text) => Some(text),
            other => {
                self.wrong(field, &other, "a text");
                None
            }
        }
    }

    /// Reads an option that is one of the texts in `supported`. The first of these is the default. Any other value is
    /// recorded as a problem.
    pub fn one_of<'a>(&mut self, field: &str, supported: &[&'a str]) -> &'a str {
        let Some(found) = self.text(field) else { return supported[0] };
        supported.iter().copied().find(|known| *known == found).unwrap_or_else(|| {
            self.unsupported(field, &Value::String(found), &supported.join(", "));
            supported[0]
        })
    }

    /// Reads an option of which only one value is supported. Any other value is recorded as a problem.
    pub fn require(&mut self, field: &str, supported: impl Into<Value>) {
        let supported = supported.into();
        if let Some(found) = self.take(field)
            && found != supported
            && (found.as_f64().is_none() || found.as_f64() != supported.as_f64())
        {
            self.unsupported(field, &found, &supported.to_string());
        }
    }

    /// Removes options without checking their values, because they have no effect.
    pub fn ignore(&mut self, fields: &[&str]) {
        fields.iter().for_each(|field| drop(self.left.remove(*field)));
    }

    /// Removes all options whose names satisfy a condition, without checking their values.
    pub fn pass_over_if(&mut self, is_one: impl Fn(&str) -> bool) {
        self.left.retain(|field, _| !is_one(field));
    }

    /// Reads options that are supported only if they are switched off: null, false or empty.
    pub fn require_off(&mut self, fields: &[&str]) {
        for field in fields {
            let is_off = |value: &Value| match value {
                Value::Array(values) => values.is_empty(),
                Value::Object(options) => options.is_empty(),
                value => *value == false,
            };
            if let Some(found) = self.take(field).filter(|value| !is_off(value)) {
                self.unsupported(field, &found, "null, false or empty");
            }
        }
    }

    pub fn wrong(&mut self, field: &str, found: &Value, expected: &str) {
        let (field, found, expected) = (self.full(field), short(found), expected.to_owned());
        self.problems.push(ConfigProblem::Value { field, found, expected });
    }

    pub fn unsupported(&mut self, field: &str, found: &Value, supported: &str) {
        let (field, found, supported) = (self.full(field), short(found), supported.to_owned());
        self.problems.push(ConfigProblem::Unsupported { field, found, supported });
    }

    /// Returns all problems. An option that was not read is a problem too, unless its value is null.
    pub fn problems(mut self) -> Vec<ConfigProblem> {
        for (field, value) in std::mem::take(&mut self.left) {
            if !value.is_null() {
                self.problems.push(ConfigProblem::Unknown { field: self.full(&field), found: short(&value) });
            }
        }
        self.problems
    }

    /// The name of an option with the path of its object.
    pub fn full(&self, field: &str) -> String {
        format!("{}{field}", self.path)
    }
}

/// Formats a value for a message.
fn short(value: &Value) -> String {
    shortened(&value.to_string())
}

fn shortened(text: &str) -> String {
    const MOST: usize = 80;
    match text.char_indices().nth(MOST) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// Encodes Infinity, -Infinity and NaN, which Python writes as numbers, as newer versions of transformers do.
fn encoded_constants(bytes: Vec<u8>) -> Vec<u8> {
    const CONSTANTS: [&str; 3] = ["-Infinity", "Infinity", "NaN"];
    if !CONSTANTS.iter().any(|constant| bytes.windows(constant.len()).any(|part| part == constant.as_bytes())) {
        return bytes;
    }
    let (mut out, mut rest, mut in_text) = (Vec::new(), &bytes[..], false);
    while let [first, others @ ..] = rest {
        if let Some(constant) = CONSTANTS.iter().find(|it| !in_text && rest.starts_with(it.as_bytes())) {
            out.extend(format!("{{\"__float__\":\"{constant}\"}}").into_bytes());
            rest = &rest[constant.len()..];
            continue;
        }
        out.push(*first);
        rest = others;
        match first {
            b'"' => in_text = !in_text,
            // The next byte belongs to the text, even if it is a quotation mark.
            b'\\' if in_text => {
                if let [escaped, others @ ..] = rest {
                    out.push(*escaped);
                    rest = others;
                }
            }
            _ => {}
        }
    }
    out
}

/// Reads a file that holds a JSON object.
pub(super) fn read_object(path: &Path) -> Result<Map<String, Value>> {
    let read_error = |source| HfError::Read { path: path.to_owned(), source };
    let file = open_regular(path).map_err(read_error)?;
    let mut bytes = Vec::new();
    file.take(MAX_BYTES + 1).read_to_end(&mut bytes).map_err(read_error)?;
    if bytes.len() as u64 > MAX_BYTES {
        return Err(HfError::Malformed { path: path.to_owned(), why: format!("it has more than {MAX_BYTES} bytes") });
    }
    let bytes = encoded_constants(bytes);
    serde_json::from_slice(&bytes).map_err(|error| {
        let mut lines = bytes.split(|&byte| byte == b'\n');
        let line = lines.nth(error.line().saturating_sub(1)).unwrap_or_default();
        let begin = error.column().min(line.len()).saturating_sub(60);
        let line = shortened(String::from_utf8_lossy(&line[begin..]).trim());
        HfError::Json { path: path.to_owned(), why: error.to_string(), line }
    })
}

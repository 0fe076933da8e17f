//! Reads and writes JSON like Python's module `json`: keys keep their order, and integers keep all their digits.

use super::call::Given;
use super::limits::{Limits, NESTING, Outcome, fault};
use super::operators::sorted;
use super::print::{Text, float_repr, str_of};
use super::render::Renderer;
use super::strings::count_of;
use super::value::{Dict, Value};

/// Parses a JSON text.
pub(crate) fn parse(limits: &Limits, text: &str) -> Outcome<Value> {
    let mut reader = Reader { limits, text, at: 0 };
    let value = reader.value(0)?;
    reader.skip_space();
    if reader.at < text.len() { reader.unexpected() } else { Ok(value) }
}

struct Reader<'a> {
    limits: &'a Limits,
    text: &'a str,
    at: usize,
}

impl Reader<'_> {
    fn unexpected<T>(&self) -> Outcome<T> {
        match self.text[self.at..].chars().next() {
            Some(letter) => fault(format!("not JSON: unexpected {letter:?} at byte {}", self.at)),
            None => fault("not JSON: unexpected end of input"),
        }
    }

    fn skip_space(&mut self) {
        let rest = &self.text[self.at..];
        self.at += rest.len() - rest.trim_start_matches([' ', '\t', '\n', '\r']).len();
    }

    fn take(&mut self, text: &str) -> bool {
        let is_there = self.text[self.at..].starts_with(text);
        self.at += if is_there { text.len() } else { 0 };
        is_there
    }

    /// Parses elements separated by commas, up to the closing bracket `end`.
    fn elements(&mut self, end: &str, mut element: impl FnMut(&mut Self) -> Outcome<()>) -> Outcome<()> {
        self.skip_space();
        if self.take(end) {
            return Ok(());
        }
        loop {
            element(self)?;
            self.skip_space();
            if self.take(end) {
                return Ok(());
            }
            if !self.take(",") {
                return self.unexpected();
            }
        }
    }

    fn value(&mut self, depth: usize) -> Outcome<Value> {
        if depth > NESTING {
            return fault(format!("JSON is nested more than {NESTING} deep"));
        }
        self.skip_space();
        if self.take("[") {
            let mut items = Vec::new();
            self.elements("]", |reader| {
                items.push(reader.value(depth + 1)?);
                Ok(())
            })?;
            return Value::list(self.limits, items);
        }
        if self.take("{") {
            let mut entries = Vec::new();
            self.elements("}", |reader| {
                reader.skip_space();
                let key = Value::text(reader.string()?);
                reader.skip_space();
                if !reader.take(":") {
                    return reader.unexpected();
                }
                entries.push((key, reader.value(depth + 1)?));
                Ok(())
            })?;
            return Dict::of(self.limits, entries);
        }
        for (word, value) in [
            ("null", Value::None),
            ("true", Value::Bool(true)),
            ("false", Value::Bool(false)),
            ("NaN", Value::Float(f64::NAN)),
            ("Infinity", Value::Float(f64::INFINITY)),
            ("-Infinity", Value::Float(f64::NEG_INFINITY)),
        ] {
            if self.take(word) {
                return Ok(value);
            }
        }
        if self.text[self.at..].starts_with('"') {
            return Ok(Value::text(self.string()?));
        }
        self.number()
    }

    fn string(&mut self) -> Outcome<String> {
        let rest = &self.text[self.at..];
        if !rest.starts_with('"') {
            return self.unexpected();
        }
        let mut is_escaped = false;
        let end = rest.bytes().skip(1).position(|byte| {
            let ends = byte == b'"' && !is_escaped;
            is_escaped = byte == b'\\' && !is_escaped;
            ends
        });
        let Some(end) = end else { return fault("not JSON: a string has no end") };
        self.limits.grow(end)?;
        let text = serde_json::from_str(&rest[..end + 2]);
        self.at += end + 2;
        text.or_else(|error| fault(format!("not JSON: {error}")))
    }

    fn number(&mut self) -> Outcome<Value> {
        let rest = &self.text[self.at..];
        let end =
            rest.find(|letter: char| !matches!(letter, '0'..='9' | '+' | '-' | '.' | 'e' | 'E')).unwrap_or(rest.len());
        let number = &rest[..end];
        // The number must follow the grammar of JSON, which is stricter than Rust's.
        if serde_json::from_str::<serde_json::Number>(number).is_err() && !is_long_number(number) {
            return self.unexpected();
        }
        self.at += end;
        match number.contains(['.', 'e', 'E']) {
            true => number.parse().map(Value::Float).or_else(|_| fault(format!("{number} is not a number"))),
            false => {
                number.parse().map(Value::Int).or_else(|_| fault(format!("{number} is not an integer of 128 bits")))
            }
        }
    }
}

/// True if serde rejects a number only because of its size.
fn is_long_number(number: &str) -> bool {
    let digits = number.strip_prefix('-').unwrap_or(number);
    let starts = digits.starts_with('0') && !digits[1..].starts_with(|digit: char| digit.is_ascii_digit());
    (starts || digits.starts_with(|digit: char| digit.is_ascii_digit()))
        && number.parse::<f64>().is_ok_and(f64::is_infinite)
}

/// The options of `json.dumps`.
struct Style {
    ensure_ascii: bool,
    /// The indentation of each nesting level.
    indent: Option<String>,
    between: String,
    behind_key: String,
    sort_keys: bool,
}

/// `value | tojson(...)`.
pub(super) fn dumps(renderer: &Renderer<'_>, value: &Value, given: Given) -> Outcome<String> {
    let limits = renderer.limits;
    let [ensure_ascii, indent, separators, sort_keys] =
        given.bind("tojson", ["ensure_ascii", "indent", "separators", "sort_keys"])?;
    let indent = match indent {
        None | Some(Value::None) => None,
        Some(Value::Str(text, _)) => Some(text.to_string()),
        count => {
            let count = usize::try_from(count_of(count, 0, "tojson's indent")?).unwrap_or(0);
            limits.grow(count)?;
            Some(" ".repeat(count))
        }
    };
    let (between, behind_key) = match separators {
        None | Some(Value::None) => (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()),
        Some(separators) => match &separators.iterate(limits)?[..] {
            [Value::Str(between, _), Value::Str(behind_key, _)] => (between.to_string(), behind_key.to_string()),
            _ => return fault("tojson's separators are two texts"),
        },
    };
    let is_set = |value: Option<Value>| value.is_some_and(|value| value.is_true());
    let style = Style { ensure_ascii: is_set(ensure_ascii), indent, between, behind_key, sort_keys: is_set(sort_keys) };
    let mut out = Text::new(limits);
    style.write(&mut out, value, 0)?;
    Ok(out.text)
}

impl Style {
    fn line(&self, out: &mut Text<'_>, depth: usize) -> Outcome<()> {
        match &self.indent {
            None => Ok(()),
            Some(indent) => {
                out.push("\n")?;
                out.repeat(indent, depth)
            }
        }
    }

    fn write(&self, out: &mut Text<'_>, value: &Value, depth: usize) -> Outcome<()> {
        out.limits.step(1)?;
        match value {
            Value::None => out.push("null"),
            Value::Bool(value) => out.push(if *value { "true" } else { "false" }),
            Value::Int(value) => out.push(&value.to_string()),
            Value::Float(value) => out.push(&json_float(*value)),
            Value::Str(text, _) => self.string(out, text),
            Value::List(items) | Value::Tuple(items) if items.items.is_empty() => out.push("[]"),
            Value::List(items) | Value::Tuple(items) => {
                out.push("[")?;
                for (index, item) in items.items.iter().enumerate() {
                    out.push(if index == 0 { "" } else { &self.between })?;
                    self.line(out, depth + 1)?;
                    self.write(out, item, depth + 1)?;
                }
                self.line(out, depth)?;
                out.push("]")
            }
            Value::Dict(dict) if dict.entries.is_empty() => out.push("{}"),
            Value::Dict(dict) => {
                out.push("{")?;
                let mut entries: Vec<&(Value, Value)> = dict.entries.iter().collect();
                if self.sort_keys {
                    entries = sorted(out.limits, entries, |(key, _)| Ok(key.clone()), false)?;
                }
                for (index, (key, value)) in entries.into_iter().enumerate() {
                    out.push(if index == 0 { "" } else { &self.between })?;
                    self.line(out, depth + 1)?;
                    match key {
                        Value::Str(text, _) => self.string(out, text)?,
                        Value::None => out.push("\"null\"")?,
                        Value::Bool(value) => out.push(if *value { "\"true\"" } else { "\"false\"" })?,
                        Value::Int(_) => self.string(out, &str_of(out.limits, key)?)?,
                        Value::Float(value) => self.string(out, &json_float(*value))?,
                        other => {
                            return fault(format!(
                                "keys must be str, int, float, bool or None, not {}",
                                other.type_name()
                            ));
                        }
                    }
                    out.push(&self.behind_key)?;
                    self.write(out, value, depth + 1)?;
                }
                self.line(out, depth)?;
                out.push("}")
            }
            other => fault(format!("Object of type {} is not JSON serializable", other.type_name())),
        }
    }

    fn string(&self, out: &mut Text<'_>, text: &str) -> Outcome<()> {
        out.push("\"")?;
        // Runs of characters without escapes are copied as a whole.
        let is_plain = |letter: char| {
            !matches!(letter, '"' | '\\' | '\0'..' ') && (!self.ensure_ascii || (letter.is_ascii() && letter != '\x7f'))
        };
        let mut rest = text;
        while let Some(at) = rest.find(|letter| !is_plain(letter)) {
            out.push(&rest[..at])?;
            out.limits.step(1)?;
            let letter = rest[at..].chars().next().expect("it was found");
            rest = &rest[at + letter.len_utf8()..];
            match letter {
                '"' => out.push("\\\"")?,
                '\\' => out.push("\\\\")?,
                '\n' => out.push("\\n")?,
                '\r' => out.push("\\r")?,
                '\t' => out.push("\\t")?,
                '\x08' => out.push("\\b")?,
                '\x0c' => out.push("\\f")?,
                other => {
                    for unit in other.encode_utf16(&mut [0; 2]) {
                        out.push(&format!("\\u{unit:04x}"))?;
                    }
                }
            }
        }
        out.push(rest)?;
        out.push("\"")
    }
}

fn json_float(value: f64) -> String {
    match value {
        _ if value.is_nan() => "NaN".into(),
        f64::INFINITY => "Infinity".into(),
        f64::NEG_INFINITY => "-Infinity".into(),
        _ => float_repr(value),
    }
}

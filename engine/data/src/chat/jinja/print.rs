//! Prints values like Python's `str` and `repr`.

use std::fmt::Write;

use super::limits::{Limits, Outcome, fault};
use super::value::{Value, View};

/// A string that grows within the limits.
pub(super) struct Text<'a> {
    pub limits: &'a Limits,
    pub text: String,
}

impl<'a> Text<'a> {
    pub fn new(limits: &'a Limits) -> Self {
        Self { limits, text: String::new() }
    }

    pub fn push(&mut self, text: &str) -> Outcome<()> {
        self.limits.grow(text.len())?;
        self.text.push_str(text);
        Ok(())
    }

    /// Appends `text` `count` times.
    pub fn repeat(&mut self, text: &str, count: usize) -> Outcome<()> {
        self.limits.grow(text.len().saturating_mul(count))?;
        self.text.push_str(&text.repeat(count));
        Ok(())
    }
}

/// `str(value)`.
pub(super) fn str_of(limits: &Limits, value: &Value) -> Outcome<String> {
    let mut out = Text::new(limits);
    write_str(&mut out, value)?;
    Ok(out.text)
}

/// Writes `str(value)`.
pub(super) fn write_str(out: &mut Text<'_>, value: &Value) -> Outcome<()> {
    match value {
        Value::Undefined(_) => Ok(()),
        Value::Str(text, _) => out.push(text),
        other => write_repr(out, other),
    }
}

/// Writes `repr(value)`.
pub(super) fn write_repr(out: &mut Text<'_>, value: &Value) -> Outcome<()> {
    out.limits.step(1)?;
    match value {
        Value::Undefined(_) => out.push("Undefined"),
        Value::None => out.push("None"),
        Value::Bool(value) => out.push(if *value { "True" } else { "False" }),
        Value::Int(value) => out.push(&value.to_string()),
        Value::Float(value) => out.push(&float_repr(*value)),
        Value::Str(text, false) => {
            out.limits.scan(text)?;
            out.push(&str_repr(text))
        }
        Value::Str(text, true) => out.push(&format!("Markup({})", str_repr(text))),
        Value::List(items) => write_items(out, "[", &items.items, "]"),
        Value::Tuple(items) if items.items.len() == 1 => write_items(out, "(", &items.items, ",)"),
        Value::Tuple(items) => write_items(out, "(", &items.items, ")"),
        Value::Dict(dict) => {
            out.push("{")?;
            for (index, (key, value)) in dict.entries.iter().enumerate() {
                out.push(if index == 0 { "" } else { ", " })?;
                write_repr(out, key)?;
                out.push(": ")?;
                write_repr(out, value)?;
            }
            out.push("}")
        }
        Value::View(kind, _) => {
            out.push(match kind {
                View::Keys => "dict_keys(",
                View::Values => "dict_values(",
                View::Items => "dict_items(",
            })?;
            write_items(out, "[", &value.iterate(out.limits)?, "])")
        }
        Value::Range(start, end, 1) => out.push(&format!("range({start}, {end})")),
        Value::Range(start, end, step) => out.push(&format!("range({start}, {end}, {step})")),
        Value::Macro(macro_value) => out.push(&format!("<Macro {}>", str_repr(&macro_value.node.name))),
        Value::Loop(running) => {
            let (index, length) = (running.index0() + 1, running.known_length());
            match length {
                Some(length) => out.push(&format!("<LoopContext {index}/{length}>")),
                None => fault("a loop over a filtered sequence cannot be printed"),
            }
        }
        // Python would print the addresses of these objects.
        Value::Stream(_)
        | Value::Function(_)
        | Value::Method(_)
        | Value::Cycler(_)
        | Value::Joiner(_)
        | Value::Namespace(_) => {
            fault(format!("a {} cannot be printed; of a generator, take |list", value.type_name()))
        }
    }
}

fn write_items(out: &mut Text<'_>, start: &str, items: &[Value], end: &str) -> Outcome<()> {
    out.push(start)?;
    for (index, item) in items.iter().enumerate() {
        out.push(if index == 0 { "" } else { ", " })?;
        write_repr(out, item)?;
    }
    out.push(end)
}

/// Prints a float as Python does, with the fewest digits that parse back to it.
pub(super) fn float_repr(value: f64) -> String {
    if value.is_nan() {
        return "nan".into();
    }
    if value.is_infinite() {
        return if value > 0.0 { "inf" } else { "-inf" }.into();
    }
    let scientific = format!("{value:e}");
    let (digits, exponent) = scientific.split_once('e').expect("an exponent is always there");
    match exponent.parse::<i32>().expect("an exponent is a number") {
        -4..16 if value.fract() == 0.0 => format!("{value:.1}"),
        -4..16 => value.to_string(),
        exponent => format!("{digits}e{}{:02}", if exponent < 0 { '-' } else { '+' }, exponent.abs()),
    }
}

/// Prints a string in quotes. Characters that Python does not print are escaped.
pub(super) fn str_repr(text: &str) -> String {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    let mut out = String::with_capacity(text.len() + 2);
    out.push(quote);
    for letter in text.chars() {
        match letter {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\\' => out.push_str("\\\\"),
            _ if letter == quote => {
                out.push('\\');
                out.push(letter);
            }
            _ if is_printable(letter) => out.push(letter),
            _ => {
                let code = u32::from(letter);
                let escaped = match code {
                    0..0x100 => write!(out, "\\x{code:02x}"),
                    0x100..0x10000 => write!(out, "\\u{code:04x}"),
                    _ => write!(out, "\\U{code:08x}"),
                };
                escaped.expect("a String takes all");
            }
        }
    }
    out.push(quote);
    out
}

/// True if Python prints a character without escaping it. Rust's debug output escapes the same characters. Only
/// combining marks at the start of a string differ.
pub(super) fn is_printable(letter: char) -> bool {
    if letter.is_ascii() {
        return !letter.is_ascii_control();
    }
    let mut text = String::from("x");
    text.push(letter);
    text.escape_debug().nth(1) == Some(letter)
}

//! The functions that every template can call.

use std::cell::Cell;
use std::rc::Rc;

use super::access;
use super::call::Given;
use super::limits::{Outcome, fault};
use super::print::str_of;
use super::render::Renderer;
use super::strings::{optional_text, text_of};
use super::value::{Dict, Value, range_len};

/// The most elements of a range, as in Jinja's sandbox.
const LONGEST_RANGE: usize = 100_000;

const FUNCTIONS: [&str; 8] =
    ["cycler", "dict", "joiner", "lipsum", "namespace", "raise_exception", "range", "strftime_now"];

/// Returns a function's name as a constant, or `None` if there is no such function.
pub(super) fn find(name: &str) -> Option<&'static str> {
    FUNCTIONS.into_iter().find(|known| *known == name)
}

/// Calls a function.
pub(super) fn call(renderer: &Renderer<'_>, name: &str, given: Given) -> Outcome<Value> {
    match name {
        "range" => {
            let mut numbers = Vec::new();
            for value in &given.positional {
                match value.defined()?.as_int() {
                    Some(number) => numbers.push(number),
                    None => {
                        return fault(format!("'{}' object cannot be interpreted as an integer", value.type_name()));
                    }
                }
            }
            let (start, end, step) = match (&numbers[..], given.named.is_empty()) {
                (&[end], true) => (0, end, 1),
                (&[start, end], true) => (start, end, 1),
                (&[start, end, step], true) => (start, end, step),
                _ => return fault("range takes 1 to 3 plain arguments"),
            };
            let fits = |number: i128| number.unsigned_abs() <= 1 << 100;
            if step == 0 || !fits(start) || !fits(end) || !fits(step) {
                return fault("range() arg 3 must not be zero, and numbers must be below 2**100");
            }
            if range_len(start, end, step) > LONGEST_RANGE {
                return fault(format!(
                    "Range too big. The sandbox blocks ranges larger than MAX_RANGE ({LONGEST_RANGE})."
                ));
            }
            Ok(Value::Range(start, end, step))
        }
        "dict" => Dict::of(renderer.limits, access::dict(renderer, given)?),
        "namespace" => {
            let mut variables = Vec::new();
            for (key, value) in access::dict(renderer, given)? {
                let name = text_of(&key, "namespace")?;
                if name.starts_with('_') {
                    return fault(format!(
                        "Chat templates cannot store underscore-prefixed attributes on a namespace, but got '{name}'."
                    ));
                }
                variables.push((name, value));
            }
            renderer.namespace(variables)
        }
        "raise_exception" => {
            let [message] = given.require(name, ["message"])?;
            fault(str_of(renderer.limits, &message)?)
        }
        "strftime_now" => {
            let [format] = given.require(name, ["format"])?;
            let format = text_of(&format, name)?;
            // Limiting the length of the format bounds the length of the date. A width within the format would break
            // this bound, so a format with a width is refused.
            if format.len() > 256 || has_width(&format) {
                return fault("the format of strftime_now is longer than 256 bytes or has a width");
            }
            match jiff::fmt::strtime::format(&*format, &jiff::Zoned::now()) {
                Ok(text) => Ok(Value::text(text)),
                Err(error) => fault(error.to_string()),
            }
        }
        "cycler" => {
            if given.positional.is_empty() || !given.named.is_empty() {
                return fault("at least one item has to be provided");
            }
            Ok(Value::Cycler(Rc::new((given.positional, Cell::new(0)))))
        }
        "joiner" => {
            let [separator] = given.bind(name, ["sep"])?;
            let separator = optional_text(separator, name)?.unwrap_or_else(|| ", ".into());
            Ok(Value::Joiner(Rc::new((separator, Cell::new(false)))))
        }
        _ => fault(format!("the function {name} is not supported")),
    }
}

/// True if digits follow a percent sign and its flags.
fn has_width(format: &str) -> bool {
    format.split('%').skip(1).any(|behind| {
        behind.trim_start_matches(['-', '_', '^', '#', '0']).starts_with(|letter: char| letter.is_ascii_digit())
    })
}

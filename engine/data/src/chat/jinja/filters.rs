//! Filters of strings and numbers: `x | upper`. Those of sequences are in [`super::sequences`].

use super::call::Given;
use super::limits::{Outcome, fault};
use super::numbers::{parse_float, parse_int};
use super::operators::{binary, negative};
use super::print::{Text, str_of};
use super::render::Renderer;
use super::strings::{capitalized, count_of, lines, optional_text, padded, replaced, stripped, text_of};
use super::value::Value;
use super::{access, ast, format, json, sequences};

/// Names of Jinja's filters. The last names in the list are those of unsupported filters.
const FILTERS: [&str; 54] = [
    "abs",
    "attr",
    "batch",
    "capitalize",
    "center",
    "count",
    "d",
    "default",
    "dictsort",
    "e",
    "escape",
    "filesizeformat",
    "first",
    "float",
    "forceescape",
    "format",
    "groupby",
    "indent",
    "int",
    "items",
    "join",
    "last",
    "length",
    "list",
    "lower",
    "map",
    "max",
    "min",
    "reject",
    "rejectattr",
    "replace",
    "reverse",
    "round",
    "safe",
    "select",
    "selectattr",
    "slice",
    "sort",
    "string",
    "sum",
    "title",
    "tojson",
    "trim",
    "truncate",
    "unique",
    "upper",
    "wordcount",
    "pprint",
    "random",
    "striptags",
    "urlencode",
    "urlize",
    "wordwrap",
    "xmlattr",
];

/// True if Jinja has a filter of this name.
pub(super) fn is_known(name: &str) -> bool {
    FILTERS.contains(&name)
}

/// Escapes HTML's special characters.
pub(super) fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('\'', "&#39;").replace('"', "&#34;")
}

/// Applies a filter to a value.
pub(super) fn apply(renderer: &Renderer<'_>, name: &str, value: Value, given: Given) -> Outcome<Value> {
    let limits = renderer.limits;
    limits.step(1)?;
    limits.deeper(|| match name {
        "default" | "d" => {
            let [default, boolean] = given.bind(name, ["default_value", "boolean"])?;
            let is_boolean = boolean.is_some_and(|boolean| boolean.is_true());
            let is_missing = matches!(value, Value::Undefined(_)) || (is_boolean && !value.is_true());
            Ok(if is_missing { default.unwrap_or_else(|| Value::text("")) } else { value })
        }
        "tojson" => json::dumps(renderer, &value, given).map(Value::text),
        "attr" => {
            let [attribute] = given.require(name, ["name"])?;
            let attribute = text_of(&attribute, name)?;
            // `attr` only finds attributes of Python's objects, not items.
            match &value {
                Value::Dict(dict) if dict.get_str(&attribute).is_some() => {
                    fault("attr of a mapping that has the key is not supported; use an index")
                }
                value => access::attribute(renderer, value, &attribute),
            }
        }
        "abs" | "int" | "float" | "round" | "filesizeformat" => number(renderer, name, &value, given),
        "capitalize" | "center" | "format" | "indent" | "lower" | "replace" | "title" | "trim" | "truncate"
        | "upper" | "wordcount" | "string" | "safe" | "e" | "escape" | "forceescape" => {
            text(renderer, name, value, given)
        }
        "pprint" | "random" | "striptags" | "urlencode" | "urlize" | "wordwrap" | "xmlattr" => {
            fault(format!("the filter {name} is not supported"))
        }
        _ if is_known(name) => sequences::apply(renderer, name, value, given),
        _ => fault(format!("no filter named '{name}'")),
    })
}

fn text(renderer: &Renderer<'_>, name: &str, value: Value, given: Given) -> Outcome<Value> {
    let limits = renderer.limits;
    let (text, is_safe) = match &value {
        Value::Str(text, is_safe) => (text.clone(), *is_safe),
        other => (str_of(limits, other)?.into(), false),
    };
    limits.scan(&text)?;
    // The length of the text is charged here, because most results are about as long as the text. Filters that lengthen
    // the text charge for the difference.
    limits.grow(text.len())?;
    let same_kind = |text: String| Ok(Value::Str(text.into(), is_safe));
    match name {
        "string" | "safe" | "e" | "escape" | "forceescape" | "capitalize" | "lower" | "upper" | "title"
        | "wordcount" => {
            given.bind::<0>(name, [])?;
            match name {
                "string" => Ok(Value::Str(text, is_safe)),
                "safe" => Ok(Value::Str(text, true)),
                "e" | "escape" if is_safe => Ok(value),
                "e" | "escape" | "forceescape" => {
                    limits.grow(5 * text.len())?;
                    Ok(Value::Str(escaped(&text).into(), true))
                }
                "capitalize" => same_kind(capitalized(&text)),
                "lower" => same_kind(text.to_lowercase()),
                "upper" => same_kind(text.to_uppercase()),
                "title" => Ok(Value::text(title(&text))),
                _ => {
                    let is_word = |letter: char| letter == '_' || letter.is_alphanumeric();
                    Ok(
                        Value::Int(
                            text.split(|letter| !is_word(letter)).filter(|word| !word.is_empty()).count() as i128
                        ),
                    )
                }
            }
        }
        "trim" => {
            let [letters] = given.bind(name, ["chars"])?;
            same_kind(stripped(&text, optional_text(letters, name)?.as_deref(), true, true).to_owned())
        }
        "center" => {
            let [width] = given.bind(name, ["width"])?;
            same_kind(padded(renderer, &text, name, count_of(width, 80, name)?, " ")?)
        }
        "format" if is_safe => fault("format of an escaped text is not supported"),
        "format" => {
            let values = match (given.positional.is_empty(), given.named.is_empty()) {
                (false, false) => return fault("can't handle positional and keyword arguments at the same time"),
                (true, false) => {
                    let entries = given.named.into_iter().map(|(name, value)| (Value::text(name), value));
                    super::value::Dict::of(limits, entries)?
                }
                _ => Value::tuple(limits, given.positional)?,
            };
            format::percent(renderer, &text, &values).map(Value::text)
        }
        "replace" => {
            let [old, new, count] = given.bind(name, ["old", "new", "count"])?;
            let (Some(old), Some(new)) = (old, new) else { return fault("replace takes an old and a new text") };
            let count = if matches!(count, Some(Value::None)) { None } else { count };
            let (old, new) = (str_of(limits, &old)?, str_of(limits, &new)?);
            Ok(Value::text(replaced(renderer, &text, &old, &new, count_of(count, -1, name)?)?))
        }
        "indent" | "truncate" if value.as_str().is_none() => {
            value.defined()?;
            fault(format!("{name} takes a text, not {}", value.type_name()))
        }
        "indent" => {
            let [width, first, blank] = given.bind(name, ["width", "first", "blank"])?;
            let indent = match width {
                Some(Value::Str(width, _)) => width.to_string(),
                width => {
                    let width = usize::try_from(count_of(width, 4, name)?).unwrap_or(0);
                    limits.grow(width)?;
                    " ".repeat(width)
                }
            };
            let is_set = |value: Option<Value>| value.is_some_and(|value| value.is_true());
            let (first, blank) = (is_set(first), is_set(blank));
            // Like Jinja, this appends a line end, so that an empty last line counts.
            let text = format!("{text}\n");
            let mut out = Text::new(limits);
            for (index, line) in lines(&text, false).into_iter().enumerate() {
                out.push(if index == 0 { "" } else { "\n" })?;
                let is_indented = if index == 0 { first } else { blank || !line.is_empty() };
                out.push(if is_indented { &indent } else { "" })?;
                out.push(line)?;
            }
            same_kind(out.text)
        }
        _ => {
            let [length, kill_words, end, leeway] = given.bind(name, ["length", "killwords", "end", "leeway"])?;
            let end = optional_text(end, name)?.unwrap_or_else(|| "...".into());
            let leeway = if matches!(leeway, Some(Value::None)) { None } else { leeway };
            let (length, leeway) = (count_of(length, 255, name)?, count_of(leeway, 5, name)?);
            let kept = length - end.chars().count() as i128;
            if kept < 0 || leeway < 0 {
                return fault(format!("expected length >= {} and leeway >= 0", end.chars().count()));
            }
            if text.chars().count() as i128 <= length + leeway {
                return Ok(value);
            }
            let kept: String = text.chars().take(kept as usize).collect();
            let words = match kill_words.is_some_and(|kill| kill.is_true()) {
                true => &kept,
                false => kept.rsplit_once(' ').map_or(kept.as_str(), |(words, _)| words),
            };
            same_kind(format!("{words}{end}"))
        }
    }
}

/// Capitalizes each word. White space, hyphens and opening brackets separate words.
fn title(text: &str) -> String {
    let (mut out, mut starts) = (String::with_capacity(text.len()), true);
    let mut word = String::new();
    let parts = |letter: char| super::strings::is_space(letter) || "-({[<".contains(letter);
    for letter in text.chars() {
        if parts(letter) {
            out.push_str(&word.to_lowercase());
            word.clear();
            out.push(letter);
            starts = true;
        } else if starts {
            out.extend(letter.to_uppercase());
            starts = false;
        } else {
            word.push(letter);
        }
    }
    out + &word.to_lowercase()
}

fn number(renderer: &Renderer<'_>, name: &str, value: &Value, given: Given) -> Outcome<Value> {
    match name {
        "abs" => {
            given.bind::<0>(name, [])?;
            match value.defined()? {
                Value::Float(number) => Ok(Value::Float(number.abs())),
                other => match other.as_int() {
                    Some(number) if number < 0 => negative(other),
                    Some(number) => Ok(Value::Int(number)),
                    None => fault(format!("bad operand type for abs(): '{}'", other.type_name())),
                },
            }
        }
        "int" => {
            let [default, base] = given.bind(name, ["default", "base"])?;
            let default = default.unwrap_or(Value::Int(0));
            let base = count_of(base, 10, name)?;
            let whole = |number: f64| match number {
                _ if number.abs() < 1e38 => Ok(Value::Int(number as i128)),
                _ => fault("an integer of more than 128 bits, which is not supported"),
            };
            match value.defined()? {
                Value::Str(text, _) => {
                    renderer.limits.scan(text)?;
                    let (0 | 2..=36, Ok(base)) = (base, u32::try_from(base)) else { return Ok(default) };
                    match parse_int(text, base)? {
                        Some(number) => Ok(Value::Int(number)),
                        None => parse_float(text).filter(|number| number.is_finite()).map_or(Ok(default), whole),
                    }
                }
                Value::Float(number) if number.is_infinite() => fault("cannot convert float infinity to integer"),
                Value::Float(number) if number.is_nan() => Ok(default),
                Value::Float(number) => whole(*number),
                other => Ok(other.as_int().map_or(default, Value::Int)),
            }
        }
        "float" => {
            let [default] = given.bind(name, ["default"])?;
            let number = match value.defined()? {
                Value::Str(text, _) => parse_float(text),
                other => other.as_float(),
            };
            Ok(number.map_or(default.unwrap_or(Value::Float(0.0)), Value::Float))
        }
        "round" => round(renderer, value, given),
        _ => {
            let [binary] = given.bind(name, ["binary"])?;
            let is_binary = binary.is_some_and(|binary| binary.is_true());
            let Some(bytes) = value.as_str().map_or_else(|| value.as_float(), |text| parse_float(text)) else {
                return fault("filesizeformat takes a number");
            };
            let base: f64 = if is_binary { 1024.0 } else { 1000.0 };
            if bytes == 1.0 {
                return Ok(Value::text("1 Byte"));
            }
            if bytes < base {
                return Ok(Value::text(format!("{} Bytes", bytes.trunc())));
            }
            let exponent = (1..8).find(|&exponent| bytes < base.powi(exponent + 1)).unwrap_or(8);
            let letter = ["k", "M", "G", "T", "P", "E", "Z", "Y"][exponent as usize - 1];
            let unit = if is_binary { format!("{}iB", letter.to_uppercase()) } else { format!("{letter}B") };
            Ok(Value::text(format!("{:.1} {unit}", base * bytes / base.powi(exponent + 1))))
        }
    }
}

fn round(renderer: &Renderer<'_>, value: &Value, given: Given) -> Outcome<Value> {
    let [precision, method] = given.bind("round", ["precision", "method"])?;
    let method = optional_text(method, "round")?.unwrap_or_else(|| "common".into());
    let precision = count_of(precision, 0, "round")?;
    let Some(number) = value.defined()?.as_float() else {
        return fault(format!("type {} doesn't define __round__ method", value.type_name()));
    };
    match &*method {
        "common" => match value.as_int() {
            Some(whole) if precision >= 0 => Ok(Value::Int(whole)),
            Some(_) => fault("rounding an integer to tens is not supported"),
            None if !number.is_finite() || precision > 300 => Ok(Value::Float(number)),
            None if precision < 0 => fault("rounding to tens is not supported"),
            // The number is rounded to the nearest decimal, ties to even, and then to the nearest float.
            None => Ok(Value::Float(
                format!("{number:.*}", precision as usize).parse().expect("it was written as a number"),
            )),
        },
        "ceil" | "floor" => {
            let scale = binary(renderer, ast::Operator::Pow, &Value::Int(10), &Value::Int(precision))?;
            let scaled = binary(renderer, ast::Operator::Mul, value, &scale)?.as_float().unwrap_or(f64::NAN);
            if !scaled.is_finite() || scaled.abs() > 1e38 {
                return fault("a float that is too large to round");
            }
            let whole = if *method == *"ceil" { scaled.ceil() } else { scaled.floor() };
            binary(renderer, ast::Operator::Div, &Value::Int(whole as i128), &scale)
        }
        _ => fault("method must be common, ceil or floor"),
    }
}

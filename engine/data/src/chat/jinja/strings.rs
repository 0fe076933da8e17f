//! Methods of strings, as in Python's `str`.

use std::collections::HashSet;
use std::sync::Arc;

use super::call::Given;
use super::format::{format_map, format_method};
use super::limits::{Outcome, fault};
use super::print::{Text, is_printable};
use super::render::Renderer;
use super::value::Value;

/// The methods that are supported.
pub(super) const METHODS: [&str; 44] = [
    "capitalize",
    "casefold",
    "center",
    "count",
    "endswith",
    "expandtabs",
    "find",
    "format",
    "format_map",
    "index",
    "isalnum",
    "isalpha",
    "isascii",
    "isdecimal",
    "isdigit",
    "isidentifier",
    "islower",
    "isnumeric",
    "isprintable",
    "isspace",
    "istitle",
    "isupper",
    "join",
    "ljust",
    "lower",
    "lstrip",
    "partition",
    "removeprefix",
    "removesuffix",
    "replace",
    "rfind",
    "rindex",
    "rjust",
    "rpartition",
    "rsplit",
    "rstrip",
    "split",
    "splitlines",
    "startswith",
    "strip",
    "swapcase",
    "title",
    "upper",
    "zfill",
];

/// The other methods of Python's `str`.
pub(super) const NOT_SUPPORTED: [&str; 3] = ["encode", "maketrans", "translate"];

/// White space as defined by Python's `str.isspace`.
pub(super) fn is_space(letter: char) -> bool {
    letter.is_whitespace() || ('\x1c'..='\x1f').contains(&letter)
}

/// Calls a method.
pub(super) fn call(renderer: &Renderer<'_>, text: &Arc<str>, method: &str, given: Given) -> Outcome<Value> {
    let limits = renderer.limits;
    limits.scan(text)?;
    // The length of the string is charged here, because most results are about as long as the string. Methods that
    // lengthen the string charge for the difference.
    limits.grow(text.len())?;
    let of_letters = |test: fn(char) -> bool| Ok(Value::Bool(!text.is_empty() && text.chars().all(test)));
    Ok(match method {
        "upper" | "lower" | "capitalize" | "title" | "swapcase" | "casefold" | "isalnum" | "isalpha" | "isascii"
        | "isdecimal" | "isdigit" | "isidentifier" | "islower" | "isnumeric" | "isprintable" | "isspace"
        | "istitle" | "isupper" => {
            given.bind::<0>(method, [])?;
            return match method {
                "upper" => Ok(Value::text(text.to_uppercase())),
                "lower" => Ok(Value::text(text.to_lowercase())),
                "casefold" => Ok(Value::text(text.chars().flat_map(folded).collect::<String>())),
                "capitalize" => Ok(Value::text(capitalized(text))),
                "title" => Ok(Value::text(titled(text))),
                "swapcase" if text.contains('Σ') => fault("swapcase of a capital sigma is not supported"),
                "swapcase" => Ok(Value::text(text.chars().map(swapped).collect::<String>())),
                "isalnum" => of_letters(|letter| is_alpha(letter) || letter.is_numeric()),
                "isalpha" => of_letters(is_alpha),
                "isascii" => Ok(Value::Bool(text.is_ascii())),
                "isdecimal" => of_letters(|letter| decimal(letter).is_some()),
                "isdigit" => of_letters(|letter| decimal(letter).is_some() || is_small_digit(letter)),
                "isnumeric" => of_letters(char::is_numeric),
                "isidentifier" => {
                    let starts = text.starts_with(|letter: char| letter == '_' || letter.is_alphabetic());
                    Ok(Value::Bool(starts && text.chars().all(|letter| letter == '_' || letter.is_alphanumeric())))
                }
                "isprintable" => Ok(Value::Bool(text.chars().all(is_printable))),
                "isspace" => of_letters(is_space),
                "istitle" => Ok(Value::Bool(is_cased(text) && titled(text) == **text)),
                "islower" => Ok(Value::Bool(is_cased(text) && !text.chars().any(char::is_uppercase))),
                _ => Ok(Value::Bool(is_cased(text) && !text.chars().any(char::is_lowercase))),
            };
        }
        "strip" | "lstrip" | "rstrip" => {
            let [letters] = given.bind(method, ["chars"])?;
            let letters = optional_text(letters, method)?;
            Value::text(stripped(text, letters.as_deref(), method != "rstrip", method != "lstrip"))
        }
        "split" | "rsplit" => {
            let [by, most] = given.bind(method, ["sep", "maxsplit"])?;
            let by = optional_text(by, method)?;
            let most = count_of(most, -1, method)?;
            if by.as_deref() == Some("") {
                return fault("split by an empty text: empty separator");
            }
            let parts = split(text, by.as_deref(), most, method == "rsplit");
            limits.grow(parts.len() * 48)?;
            Value::list(limits, parts.into_iter().map(Value::text).collect())?
        }
        "splitlines" => {
            let [keep] = given.bind(method, ["keepends"])?;
            let lines = lines(text, keep.is_some_and(|keep| keep.is_true()));
            limits.grow(lines.len() * 48)?;
            Value::list(limits, lines.into_iter().map(Value::text).collect())?
        }
        "partition" | "rpartition" => {
            let [by] = given.require(method, ["sep"])?;
            let by = text_of(&by, method)?;
            if by.is_empty() {
                return fault("partition by an empty text: empty separator");
            }
            let found = if method == "partition" { text.find(&*by) } else { text.rfind(&*by) };
            let parts = match found {
                Some(at) => [&text[..at], &*by, &text[at + by.len()..]],
                None if method == "partition" => [text, "", ""],
                None => ["", "", text],
            };
            Value::tuple(limits, parts.map(Value::text).into())?
        }
        "replace" => {
            let [old, new, count] = given.bind(method, ["old", "new", "count"])?;
            let (Some(old), Some(new)) = (old, new) else { return fault("replace takes an old and a new text") };
            let (old, new) = (text_of(&old, method)?, text_of(&new, method)?);
            Value::text(replaced(renderer, text, &old, &new, count_of(count, -1, method)?)?)
        }
        "startswith" | "endswith" => {
            let [what, start, end] = given.bind(method, ["prefix", "start", "end"])?;
            let Some((_, part)) = part(text, start, end)? else { return Ok(Value::Bool(false)) };
            let has = |one: &Value| {
                let one = text_of(one, method)?;
                Ok(if method == "startswith" { part.starts_with(&*one) } else { part.ends_with(&*one) })
            };
            let mut any = false;
            match what {
                Some(Value::Tuple(all)) => {
                    for one in &all.items {
                        any |= has(one)?;
                    }
                }
                Some(one) => any = has(&one)?,
                None => return fault(format!("{method} takes at least 1 argument")),
            }
            Value::Bool(any)
        }
        "find" | "rfind" | "index" | "rindex" | "count" => {
            let [what, start, end] = given.bind(method, ["sub", "start", "end"])?;
            let Some(what) = what else { return fault(format!("{method} takes at least 1 argument")) };
            let what = text_of(&what, method)?;
            let part = part(text, start, end)?;
            if method == "count" {
                return Ok(Value::Int(part.map_or(0, |(_, part)| part.matches(&*what).count() as i128)));
            }
            let found = part.and_then(|(skipped, part)| {
                let at = if method.starts_with('r') { part.rfind(&*what) } else { part.find(&*what) };
                Some(skipped + part[..at?].chars().count())
            });
            match found {
                Some(at) => Value::Int(at as i128),
                None if method.ends_with("index") => return fault("substring not found"),
                None => Value::Int(-1),
            }
        }
        "join" => {
            let [items] = given.require(method, ["iterable"])?;
            let mut out = Text::new(limits);
            for (index, item) in items.iterate(limits)?.iter().enumerate() {
                let Some(item) = item.as_str() else {
                    return fault(format!("sequence item {index}: expected str instance, {} found", item.type_name()));
                };
                out.push(if index == 0 { "" } else { text })?;
                out.push(item)?;
            }
            Value::text(out.text)
        }
        "removeprefix" => Value::text(text.strip_prefix(&*one_text(given, method)?).unwrap_or(text)),
        "removesuffix" => Value::text(text.strip_suffix(&*one_text(given, method)?).unwrap_or(text)),
        "center" | "ljust" | "rjust" => {
            let [width, fill] = given.bind(method, ["width", "fillchar"])?;
            let Some(width) = width else { return fault(format!("{method} takes at least 1 argument")) };
            let fill = optional_text(fill, method)?.unwrap_or_else(|| " ".into());
            if fill.chars().count() != 1 {
                return fault("The fill character must be exactly one character long");
            }
            Value::text(padded(renderer, text, method, count_of(Some(width), 0, method)?, &fill)?)
        }
        "zfill" => {
            let [width] = given.require(method, ["width"])?;
            let missing = missing(text, count_of(Some(width), 0, method)?);
            let sign = usize::from(text.starts_with(['+', '-']));
            let mut out = Text::new(limits);
            out.push(&text[..sign])?;
            out.repeat("0", missing)?;
            out.push(&text[sign..])?;
            Value::text(out.text)
        }
        "expandtabs" => {
            let [size] = given.bind(method, ["tabsize"])?;
            let size = usize::try_from(count_of(size, 8, method)?).unwrap_or(0);
            let (mut out, mut column) = (Text::new(limits), 0);
            for letter in text.chars() {
                match letter {
                    '\t' if size == 0 => {}
                    '\t' => {
                        out.repeat(" ", size - column % size)?;
                        column += size - column % size;
                    }
                    other => {
                        out.push(other.encode_utf8(&mut [0; 4]))?;
                        column = if matches!(other, '\n' | '\r') { 0 } else { column + 1 };
                    }
                }
            }
            Value::text(out.text)
        }
        "format" => Value::text(format_method(renderer, text, given)?),
        "format_map" => {
            let [map] = given.require(method, ["mapping"])?;
            Value::text(format_map(renderer, text, map)?)
        }
        _ => return fault(format!("the method {method} of a text is not supported")),
    })
}

fn is_alpha(letter: char) -> bool {
    // Letter-like numbers and combining marks do not count as letters.
    letter.is_alphabetic() && !letter.is_numeric() && (letter.is_ascii() || !is_mark(letter))
}

/// True if Rust considers a character to be a combining mark, which belongs to the character before it.
fn is_mark(letter: char) -> bool {
    letter.escape_debug().next() == Some('\\')
}

fn is_small_digit(letter: char) -> bool {
    matches!(letter, '²' | '³' | '¹' | '⁰' | '⁴'..='⁹' | '₀'..='₉' | '①'..='⑨' | '⑴'..='⑼' | '⒈'..='⒐')
}

/// Returns the value of a decimal digit in any common script, or `None` for other characters.
pub(super) fn decimal(letter: char) -> Option<u32> {
    // The zeros of the scripts whose digits are in common use.
    const ZEROS: [u32; 22] = [
        0x30, 0x660, 0x6f0, 0x7c0, 0x966, 0x9e6, 0xa66, 0xae6, 0xb66, 0xbe6, 0xc66, 0xce6, 0xd66, 0xde6, 0xe50, 0xed0,
        0xf20, 0x1040, 0x17e0, 0x1810, 0xff10, 0x1d7ce,
    ];
    let code = u32::from(letter);
    ZEROS.into_iter().find(|zero| (*zero..zero + 10).contains(&code)).map(|zero| code - zero)
}

fn is_cased(text: &str) -> bool {
    text.chars().any(|letter| letter.is_uppercase() || letter.is_lowercase())
}

/// Case-folds a letter. For ß and ligatures, the result differs from Rust's lower case.
fn folded(letter: char) -> Vec<char> {
    match letter {
        'ı' => vec![letter],
        // Cherokee letters fold to capital letters.
        '\u{13a0}'..='\u{13fd}' | '\u{ab70}'..='\u{abbf}' => letter.to_uppercase().collect(),
        _ if letter.is_lowercase() => letter.to_uppercase().flat_map(char::to_lowercase).collect(),
        _ => letter.to_lowercase().collect(),
    }
}

fn swapped(letter: char) -> String {
    if letter.is_uppercase() { letter.to_lowercase().collect() } else { letter.to_uppercase().collect() }
}

/// Appends a letter in title case. If the upper case of a letter has several letters, as for ß, only the first of these
/// stays a capital.
fn title_letter(letter: char, out: &mut String) {
    let mut upper = letter.to_uppercase();
    out.extend(upper.next());
    upper.for_each(|more| out.extend(more.to_lowercase()));
}

/// Puts the first letter in title case and all others in lower case.
pub(super) fn capitalized(text: &str) -> String {
    let mut letters = text.chars();
    let mut out = String::with_capacity(text.len());
    if let Some(first) = letters.next() {
        title_letter(first, &mut out);
    }
    out + &letters.as_str().to_lowercase()
}

/// Puts the first letter of each word in title case and all others in lower case.
fn titled(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let is_cased = |letter: char| letter.is_uppercase() || letter.is_lowercase();
    let mut rest = text;
    while let Some(start) = rest.find(is_cased) {
        out.push_str(&rest[..start]);
        let length = rest[start..].find(|letter| !is_cased(letter)).unwrap_or(rest.len() - start);
        // The word is lower-cased as a whole, because a sigma at the end of a word has its own form.
        let (word, behind) = rest[start..].split_at(length);
        let first = word.chars().next().expect("it was found");
        title_letter(first, &mut out);
        out.push_str(&word.to_lowercase()[first.to_lowercase().map(char::len_utf8).sum()..]);
        rest = behind;
    }
    out + rest
}

/// Removes white space, or the given characters, from either or both ends.
pub(super) fn stripped<'a>(text: &'a str, letters: Option<&str>, start: bool, end: bool) -> &'a str {
    let letters: Option<HashSet<char>> = letters.map(|letters| letters.chars().collect());
    let goes = |letter: char| letters.as_ref().map_or_else(|| is_space(letter), |letters| letters.contains(&letter));
    let text = if start { text.trim_start_matches(goes) } else { text };
    if end { text.trim_end_matches(goes) } else { text }
}

fn split<'a>(text: &'a str, by: Option<&str>, most: i128, from_end: bool) -> Vec<&'a str> {
    let most = usize::try_from(most).unwrap_or(usize::MAX);
    let mut parts: Vec<&str> = match (by, from_end) {
        (Some(by), false) => text.splitn(most.saturating_add(1), by).collect(),
        (Some(by), true) => text.rsplitn(most.saturating_add(1), by).collect(),
        (None, _) => {
            let (mut parts, mut rest) = (Vec::new(), stripped(text, None, !from_end, from_end));
            while !rest.is_empty() && parts.len() < most {
                let cut = if from_end { rest.rfind(is_space) } else { rest.find(is_space) };
                let Some(at) = cut else { break };
                if from_end {
                    parts.push(rest[at..].trim_start_matches(is_space));
                    rest = rest[..at].trim_end_matches(is_space);
                } else {
                    parts.push(&rest[..at]);
                    rest = rest[at..].trim_start_matches(is_space);
                }
            }
            if !rest.is_empty() {
                parts.push(rest);
            }
            parts
        }
    };
    if from_end {
        parts.reverse();
    }
    parts
}

/// Splits a string into lines, at all of Python's line ends.
pub(super) fn lines(text: &str, keep_ends: bool) -> Vec<&str> {
    const ENDS: [char; 10] = ['\n', '\r', '\x0b', '\x0c', '\x1c', '\x1d', '\x1e', '\u{85}', '\u{2028}', '\u{2029}'];
    let (mut lines, mut rest) = (Vec::new(), text);
    while let Some(at) = rest.find(ENDS) {
        let end = if rest[at..].starts_with("\r\n") { 2 } else { rest[at..].chars().next().map_or(1, char::len_utf8) };
        lines.push(&rest[..if keep_ends { at + end } else { at }]);
        rest = &rest[at + end..];
    }
    if !rest.is_empty() {
        lines.push(rest);
    }
    lines
}

/// Replaces the first `count` occurrences, or all if `count` is negative.
pub(super) fn replaced(renderer: &Renderer<'_>, text: &str, old: &str, new: &str, count: i128) -> Outcome<String> {
    let count = usize::try_from(count).unwrap_or(usize::MAX);
    let found = text.matches(old).take(count).count();
    renderer.limits.grow(text.len().saturating_add(found.saturating_mul(new.len())))?;
    Ok(text.replacen(old, new, count))
}

fn missing(text: &str, width: i128) -> usize {
    usize::try_from(width - text.chars().count() as i128).unwrap_or(0)
}

/// Pads a string to a width. `method` says whether the string is centered, or at the left or right.
pub(super) fn padded(renderer: &Renderer<'_>, text: &str, method: &str, width: i128, fill: &str) -> Outcome<String> {
    let missing = missing(text, width);
    let left = match method {
        "ljust" => 0,
        "rjust" => missing,
        // If the padding is odd, CPython puts the extra space on the left if the width is odd too.
        _ => missing / 2 + (missing & (width as usize) & 1),
    };
    let mut out = Text::new(renderer.limits);
    out.repeat(fill, left)?;
    out.push(text)?;
    out.repeat(fill, missing - left)?;
    Ok(out.text)
}

/// Returns the part of a string between two character positions, and the number of characters before this part. Returns
/// `None` if the start is after the end of the string.
fn part(text: &str, start: Option<Value>, end: Option<Value>) -> Outcome<Option<(usize, &str)>> {
    if start.is_none() && end.is_none() {
        return Ok(Some((0, text)));
    }
    let length = text.chars().count() as i128;
    let position = |value: Option<Value>, default: i128| match value {
        None | Some(Value::None) => Ok(default),
        Some(value) => match value.as_int() {
            Some(at) if at < 0 => Ok((at + length).max(0)),
            Some(at) => Ok(at),
            None => fault("slice indices must be integers or None"),
        },
    };
    let (start, end) = (position(start, 0)?, position(end, length)?.min(length));
    if start > end {
        return Ok(None);
    }
    let byte = |at: i128| text.char_indices().nth(at as usize).map_or(text.len(), |(byte, _)| byte);
    Ok(Some((start as usize, &text[byte(start)..byte(end)])))
}

/// Returns an argument's string, or an error if the argument is not a string.
pub(super) fn text_of(value: &Value, method: &str) -> Outcome<Arc<str>> {
    match value.defined()?.as_str() {
        Some(text) => Ok(text.clone()),
        None => fault(format!("{method} takes a text, not {}", value.type_name())),
    }
}

fn one_text(given: Given, method: &str) -> Outcome<Arc<str>> {
    let [text] = given.require(method, ["text"])?;
    text_of(&text, method)
}

/// Returns an optional argument's string; `None` if it was not given or is none.
pub(super) fn optional_text(value: Option<Value>, method: &str) -> Outcome<Option<Arc<str>>> {
    match value {
        None | Some(Value::None) => Ok(None),
        Some(value) => text_of(&value, method).map(Some),
    }
}

/// Returns an argument's integer, or the default if it was not given.
pub(super) fn count_of(value: Option<Value>, default: i128, method: &str) -> Outcome<i128> {
    match value {
        None => Ok(default),
        Some(value) => match value.defined()?.as_int() {
            Some(count) => Ok(count),
            None => fault(format!("{method} takes an integer, not {}", value.type_name())),
        },
    }
}

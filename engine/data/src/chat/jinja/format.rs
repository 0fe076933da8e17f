//! `'%s' % value`, and `'{}'.format(value)`.

use super::access;
use super::call::Given;
use super::limits::{Outcome, fault};
use super::numbers::{float_digits, grouped, int_digits, short_float};
use super::print::{Text, float_repr, str_of, write_repr};
use super::render::Renderer;
use super::value::Value;

/// Splits off the leading digits of a string as a number, and returns the rest too. A number that overflows becomes the
/// largest possible one.
fn leading_number(text: &str) -> (Option<usize>, &str) {
    let length = text.find(|digit: char| !digit.is_ascii_digit()).unwrap_or(text.len());
    let number = (length > 0).then(|| text[..length].parse().unwrap_or(usize::MAX));
    (number, &text[length..])
}

/// `ascii(value)`: `repr(value)` with all non-ASCII characters escaped.
fn ascii_of(renderer: &Renderer<'_>, value: &Value) -> Outcome<String> {
    let text = repr_of(renderer, value)?;
    let mut out = Text::new(renderer.limits);
    for letter in text.chars() {
        match u32::from(letter) {
            _ if letter.is_ascii() => out.push(letter.encode_utf8(&mut [0; 4]))?,
            code @ 0..0x100 => out.push(&format!("\\x{code:02x}"))?,
            code @ 0x100..0x10000 => out.push(&format!("\\u{code:04x}"))?,
            code => out.push(&format!("\\U{code:08x}"))?,
        }
    }
    Ok(out.text)
}

fn repr_of(renderer: &Renderer<'_>, value: &Value) -> Outcome<String> {
    let mut out = Text::new(renderer.limits);
    write_repr(&mut out, value)?;
    Ok(out.text)
}

/// The first `count` characters of a string.
fn first(text: &str, count: usize) -> &str {
    text.char_indices().nth(count).map_or(text, |(end, _)| &text[..end])
}

/// `format % values`.
pub(super) fn percent(renderer: &Renderer<'_>, format: &str, values: &Value) -> Outcome<String> {
    let mut out = Text::new(renderer.limits);
    let mut left: std::collections::VecDeque<Value> = match values {
        Value::Tuple(items) => items.items.iter().cloned().collect(),
        other => [other.clone()].into(),
    };
    // As in Python, every value that has items counts as a mapping here. It is no error if none of its items is used.
    let is_mapping = matches!(values, Value::Dict(_) | Value::List(_) | Value::Range(..) | Value::Undefined(_));
    let mut rest = format;
    while let Some(at) = rest.find('%') {
        renderer.limits.step(1)?;
        out.push(&rest[..at])?;
        rest = &rest[at + 1..];
        if let Some(behind) = rest.strip_prefix('%') {
            out.push("%")?;
            rest = behind;
            continue;
        }
        let mut keyed = None;
        if let Some(behind) = rest.strip_prefix('(') {
            let (Some(end), Value::Dict(dict)) = (behind.find(')'), values) else {
                return fault("format requires a mapping");
            };
            let key = &behind[..end];
            let Some(value) = dict.get_str(key) else {
                return fault(format!("the format's mapping has no key '{key}'"));
            };
            keyed = Some(value.clone());
            rest = &behind[end + 1..];
        }
        let mut take = |what: Option<Value>| match what.or_else(|| left.pop_front()) {
            Some(value) => Ok(value),
            None => fault("not enough arguments for format string"),
        };
        let flags_end = rest.find(|flag| !"#0- +".contains(flag)).unwrap_or(rest.len());
        let (flags, behind) = rest.split_at(flags_end);
        let mut is_left = flags.contains('-');
        let mut number = |text: &'_ str| -> Outcome<(Option<i128>, usize)> {
            if text.starts_with('*') {
                return match take(None)?.as_int() {
                    Some(value) => Ok((Some(value), 1)),
                    None => fault("* wants int"),
                };
            }
            let (value, left) = leading_number(text);
            Ok((value.map(|value| value as i128), text.len() - left.len()))
        };
        let (width, length) = number(behind)?;
        is_left |= width.is_some_and(|width| width < 0);
        let width = usize::try_from(width.unwrap_or(0).unsigned_abs()).unwrap_or(usize::MAX);
        rest = &behind[length..];
        let mut digits = None;
        if let Some(behind) = rest.strip_prefix('.') {
            let (value, length) = number(behind)?;
            digits = Some(usize::try_from(value.unwrap_or(0)).unwrap_or(0));
            rest = &behind[length..];
        }
        rest = rest.strip_prefix(['h', 'l', 'L']).unwrap_or(rest);
        let Some(letter) = rest.chars().next() else { return fault("incomplete format") };
        rest = &rest[letter.len_utf8()..];
        let value = take(keyed)?;
        let alternate = flags.contains('#');
        let (is_negative, prefix, body) = match letter {
            's' | 'r' | 'a' => {
                let text = match letter {
                    's' => str_of(renderer.limits, &value)?,
                    'r' => repr_of(renderer, &value)?,
                    _ => ascii_of(renderer, &value)?,
                };
                (None, "", first(&text, digits.unwrap_or(usize::MAX)).to_owned())
            }
            'c' => match (&value, value.as_int()) {
                (Value::Str(text, _), _) if text.chars().count() == 1 => (None, "", text.to_string()),
                (_, Some(code)) => match u32::try_from(code).ok().and_then(char::from_u32) {
                    Some(letter) => (None, "", letter.to_string()),
                    None => return fault("%c arg not in range(0x110000)"),
                },
                _ => return fault("%c requires int or char"),
            },
            'd' | 'i' | 'u' | 'o' | 'x' | 'X' => {
                let is_decimal = matches!(letter, 'd' | 'i' | 'u');
                let number = match (&value, value.as_int()) {
                    (_, Some(number)) => number,
                    (Value::Float(number), _) if is_decimal && number.abs() < 1e38 => *number as i128,
                    _ => {
                        return fault(format!(
                            "%{letter} format: a real number is required, not {}",
                            value.type_name()
                        ));
                    }
                };
                let text = int_digits(number, letter);
                let zeros = digits.unwrap_or(0).saturating_sub(text.len());
                let mut body = Text::new(renderer.limits);
                body.repeat("0", zeros)?;
                body.push(&text)?;
                let prefix = match letter {
                    'o' if alternate => "0o",
                    'x' if alternate => "0x",
                    'X' if alternate => "0X",
                    _ => "",
                };
                (Some(number < 0), prefix, body.text)
            }
            'e' | 'E' | 'f' | 'F' | 'g' | 'G' => {
                let Some(number) = value.as_float() else {
                    return fault(format!("must be real number, not {}", value.type_name()));
                };
                let is_negative = number.is_sign_negative() && !number.is_nan();
                (Some(is_negative), "", float_digits(number, letter, digits, alternate)?)
            }
            other => return fault(format!("unsupported format character '{other}'")),
        };
        let sign = match is_negative {
            Some(true) => "-",
            Some(false) if flags.contains('+') => "+",
            Some(false) if flags.contains(' ') => " ",
            _ => "",
        };
        let is_zeroed = flags.contains('0') && !is_left && is_negative.is_some();
        let spec = Spec {
            width,
            align: if is_left {
                '<'
            } else if is_zeroed {
                '='
            } else {
                '>'
            },
            fill: if is_zeroed { '0' } else { ' ' },
        };
        spec.write(&mut out, &format!("{sign}{prefix}"), &body)?;
    }
    out.push(rest)?;
    if !left.is_empty() && !is_mapping {
        return fault("not all arguments converted during string formatting");
    }
    Ok(out.text)
}

/// The format specification of a value: padding, sign and precision.
struct Spec {
    width: usize,
    align: char,
    fill: char,
}

impl Spec {
    fn write(&self, out: &mut Text<'_>, sign: &str, body: &str) -> Outcome<()> {
        let missing = self.width.saturating_sub(sign.len() + body.chars().count());
        let left = match self.align {
            '<' => 0,
            '^' => missing / 2,
            _ => missing,
        };
        let fill = self.fill.to_string();
        if self.align == '=' {
            out.push(sign)?;
            out.repeat(&fill, left)?;
        } else {
            out.repeat(&fill, left)?;
            out.push(sign)?;
        }
        out.push(body)?;
        out.repeat(&fill, missing - left)
    }
}

/// `text.format(...)`.
pub(super) fn format_method(renderer: &Renderer<'_>, text: &str, given: Given) -> Outcome<String> {
    Fields { renderer, given: &given, map: None, next: Some(0) }.all(text, 3)
}

/// `text.format_map(mapping)`.
pub(super) fn format_map(renderer: &Renderer<'_>, text: &str, map: Value) -> Outcome<String> {
    Fields { renderer, given: &Given::default(), map: Some(map), next: Some(0) }.all(text, 3)
}

struct Fields<'a> {
    renderer: &'a Renderer<'a>,
    given: &'a Given,
    map: Option<Value>,
    /// Index of the next field that has no number of its own; `None` once a field had a number.
    next: Option<usize>,
}

impl Fields<'_> {
    /// Replaces the fields of a format string. The format specification of a field may contain fields too, but only to
    /// one level.
    fn all(&mut self, text: &str, depth: usize) -> Outcome<String> {
        let mut out = Text::new(self.renderer.limits);
        if depth == 0 {
            return fault("Max string recursion exceeded");
        }
        let mut rest = text;
        while let Some(at) = rest.find(['{', '}']) {
            self.renderer.limits.step(1)?;
            out.push(&rest[..at])?;
            let (brace, behind) = rest[at..].split_at(1);
            if behind.starts_with(brace) {
                out.push(brace)?;
                rest = &behind[1..];
                continue;
            }
            if brace == "}" {
                return fault("Single '}' encountered in format string");
            }
            let mut open = 1;
            let end = behind.find(|letter| {
                open += i32::from(letter == '{') - i32::from(letter == '}');
                open == 0
            });
            let Some(end) = end else { return fault("expected '}' before end of string") };
            let field = &behind[..end];
            rest = &behind[end + 1..];
            let cut = field.find(['!', ':']).unwrap_or(field.len());
            let (name, more) = field.split_at(cut);
            let (conversion, spec) = match more.strip_prefix('!') {
                Some(more) => {
                    let letter = more.chars().next();
                    let behind = letter.map_or("", |letter| &more[letter.len_utf8()..]);
                    match behind.strip_prefix(':') {
                        None if !behind.is_empty() => return fault("expected ':' after conversion specifier"),
                        spec => (Some(letter), spec.unwrap_or("")),
                    }
                }
                None => (None, more.strip_prefix(':').unwrap_or("")),
            };
            let value = self.value(name)?;
            let spec = self.all(spec, depth - 1)?;
            let value = match conversion {
                None => value,
                Some(Some('s')) => Value::text(str_of(self.renderer.limits, &value)?),
                Some(Some('r')) => Value::text(repr_of(self.renderer, &value)?),
                Some(Some('a')) => Value::text(ascii_of(self.renderer, &value)?),
                Some(other) => return fault(format!("Unknown conversion specifier {}", other.unwrap_or(' '))),
            };
            write_formatted(self.renderer, &mut out, &value, &spec)?;
        }
        out.push(rest)?;
        Ok(out.text)
    }

    /// Returns the value of a field: an argument, or an attribute or item reached from it.
    fn value(&mut self, name: &str) -> Outcome<Value> {
        let end = name.find(['.', '[']).unwrap_or(name.len());
        let (first, mut rest) = name.split_at(end);
        let index = match (name.is_empty(), leading_number(first)) {
            (true, _) => match self.next {
                Some(next) => {
                    self.next = Some(next + 1);
                    Some(next)
                }
                None => return fault("cannot switch from manual field specification to automatic field numbering"),
            },
            (false, (Some(index), "")) => {
                if rest.is_empty() && self.next.is_some_and(|next| next > 0) {
                    return fault("cannot switch from automatic field numbering to manual field specification");
                }
                self.next = self.next.filter(|_| !rest.is_empty());
                Some(index)
            }
            _ => None,
        };
        let found = match (index, &self.map) {
            (Some(index), _) => self.given.positional.get(index).cloned(),
            (None, Some(Value::Dict(dict))) => dict.get_str(first).cloned(),
            (None, Some(other)) => return fault(format!("format_map takes a mapping, not {}", other.type_name())),
            (None, None) => self.given.named.iter().find(|(name, _)| **name == *first).map(|(_, value)| value.clone()),
        };
        let Some(mut value) = found else { return fault(format!("format has no argument for the field '{first}'")) };
        while !rest.is_empty() {
            if let Some(behind) = rest.strip_prefix('.') {
                let end = behind.find(['.', '[']).unwrap_or(behind.len());
                value = access::attribute(self.renderer, &value, &behind[..end].into())?;
                rest = &behind[end..];
            } else {
                let Some((item, behind)) = rest[1..].split_once(']') else {
                    return fault("Missing ']' in format string");
                };
                let item = match leading_number(item) {
                    (Some(index), "") => Value::Int(index as i128),
                    _ => Value::text(item),
                };
                value = access::item(self.renderer, &value, &item)?;
                rest = behind;
            }
        }
        Ok(value)
    }
}

/// `format(value, spec)`.
fn write_formatted(renderer: &Renderer<'_>, out: &mut Text<'_>, value: &Value, spec: &str) -> Outcome<()> {
    if spec.is_empty() {
        return out.push(&str_of(renderer.limits, value)?);
    }
    if !matches!(value, Value::Str(..) | Value::Int(_) | Value::Float(_) | Value::Bool(_)) {
        return fault(format!("unsupported format string passed to {}.__format__", value.type_name()));
    }
    let is_text = matches!(value, Value::Str(..));
    let letters: Vec<char> = spec.chars().take(2).collect();
    let is_align = |letter: Option<&char>| letter.is_some_and(|letter| "<>=^".contains(*letter));
    let (mut fill, mut align, mut rest) = (None, None, spec);
    if is_align(letters.get(1)) {
        (fill, align) = (Some(letters[0]), Some(letters[1]));
        rest = &spec[letters[0].len_utf8() + 1..];
    } else if is_align(letters.first()) {
        align = Some(letters[0]);
        rest = &spec[1..];
    }
    let mut take = |options: &str| {
        let letter = rest.chars().next().filter(|letter| options.contains(*letter))?;
        rest = &rest[1..];
        Some(letter)
    };
    let sign = take("+- ");
    let no_negative_zero = take("z").is_some();
    let alternate = take("#").is_some();
    if take("0").is_some() {
        fill = fill.or(Some('0'));
        align = align.or(Some(if is_text { '<' } else { '=' }));
    }
    let (width, left) = leading_number(rest);
    rest = left;
    let separator = rest.chars().next().filter(|letter| matches!(letter, ',' | '_'));
    rest = if separator.is_some() { &rest[1..] } else { rest };
    let mut digits = None;
    if let Some(behind) = rest.strip_prefix('.') {
        let (count, left) = leading_number(behind);
        if count.is_none() {
            return fault("Format specifier missing precision");
        }
        (digits, rest) = (count, left);
    }
    let mut letters = rest.chars();
    let letter = letters.next();
    let invalid = || fault(format!("Invalid format specifier '{spec}' for object of type '{}'", value.type_name()));
    if letters.next().is_some() {
        return invalid();
    }
    let spec =
        |default: char| Spec { width: width.unwrap_or(0), align: align.unwrap_or(default), fill: fill.unwrap_or(' ') };
    if let Value::Str(text, _) = value {
        if letter.is_some_and(|letter| letter != 's')
            || no_negative_zero
            || sign.is_some()
            || alternate
            || separator.is_some()
            || align == Some('=')
        {
            return invalid();
        }
        return spec('<').write(out, "", first(text, digits.unwrap_or(usize::MAX)));
    }
    let (is_negative, prefix, mut body) = match (value.as_int(), letter) {
        (Some(number), None | Some('d' | 'n' | 'b' | 'o' | 'x' | 'X')) => {
            if digits.is_some() || no_negative_zero {
                return fault("Precision and z are not allowed in integer format specifier");
            }
            let letter = letter.unwrap_or('d');
            let prefix = if alternate && !matches!(letter, 'd' | 'n') { format!("0{letter}") } else { String::new() };
            (number < 0, prefix, int_digits(number, letter))
        }
        (Some(number), Some('c')) => match u32::try_from(number).ok().and_then(char::from_u32) {
            Some(letter) => return spec('>').write(out, "", &letter.to_string()),
            None => return fault("%c arg not in range(0x110000)"),
        },
        (_, letter) => {
            let number = value.as_float().unwrap_or(0.0);
            let text = match (letter, digits) {
                (None, None) => float_repr(number.abs()),
                (None, Some(digits)) => short_float(number, digits)?,
                (Some('n'), digits) => float_digits(number, 'g', digits, alternate)?,
                (Some(letter), digits) if "eEfFgG%".contains(letter) => {
                    float_digits(number, letter, digits, alternate)?
                }
                _ => return invalid(),
            };
            let is_zero = no_negative_zero && !text.bytes().any(|digit| matches!(digit, b'1'..=b'9' | b'i'));
            (number.is_sign_negative() && !number.is_nan() && !is_zero, String::new(), text)
        }
    };
    let sign = if is_negative {
        "-"
    } else {
        sign.filter(|&sign| sign != '-').map_or("", |sign| if sign == '+' { "+" } else { " " })
    };
    let sign = format!("{sign}{prefix}");
    if let Some(separator) = separator {
        let size = if matches!(letter, Some('b' | 'o' | 'x' | 'X')) { 4 } else { 3 };
        if separator == ',' && size == 4 {
            return fault(format!("Cannot specify ',' with '{}'", letter.unwrap_or('x')));
        }
        let spec = spec('>');
        if spec.align == '=' && spec.fill == '0' {
            let missing = spec.width.saturating_sub(sign.len() + body.len());
            renderer.limits.grow(2 * missing)?;
            body = "0".repeat(missing) + &body;
            // The separators take the place of leading zeros, which are removed.
            for _ in 0..missing {
                if sign.len() + grouped(&body[1..], separator, size).len() >= spec.width {
                    body.remove(0);
                }
            }
        }
        body = grouped(&body, separator, size);
    }
    spec('>').write(out, &sign, &body)
}

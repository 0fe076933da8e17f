//! Formats numbers like `%` and `str.format` do, and parses numbers.

use super::limits::{Outcome, fault};
use super::print::float_repr;
use super::strings::{decimal, is_space};

/// The most digits after the decimal point. The smallest double has 1074 of them.
const MAX_DIGITS: usize = 1100;

/// Formats a float without its sign, with this many digits. `letter` is one of `eEfFgG%`, or `r` for the format of
/// `repr`.
pub(super) fn float_digits(value: f64, letter: char, digits: Option<usize>, alternate: bool) -> Outcome<String> {
    let value = value.abs();
    let digits = digits.unwrap_or(6);
    if digits > MAX_DIGITS {
        return fault(format!("a number with {digits} digits after the point; at most {MAX_DIGITS} are written"));
    }
    let text = match letter.to_ascii_lowercase() {
        _ if !value.is_finite() => float_repr(value),
        'f' => point(format!("{value:.digits$}"), alternate),
        '%' => point(format!("{:.digits$}", value * 100.0), alternate) + "%",
        'e' => exponential(value, digits, alternate),
        'g' => general(value, digits.max(1), alternate, false),
        _ => float_repr(value),
    };
    Ok(if letter.is_ascii_uppercase() { text.to_uppercase() } else { text })
}

/// Formats a float like `format` does with only a precision: like `g`, except that a whole number keeps one digit after
/// the point.
pub(super) fn short_float(value: f64, digits: usize) -> Outcome<String> {
    if digits > MAX_DIGITS {
        return fault(format!("a number with {digits} digits; at most {MAX_DIGITS} are written"));
    }
    Ok(if value.is_finite() { general(value.abs(), digits.max(1), false, true) } else { float_repr(value.abs()) })
}

fn point(text: String, alternate: bool) -> String {
    if alternate && !text.contains('.') { text + "." } else { text }
}

fn exponential(value: f64, digits: usize, alternate: bool) -> String {
    let text = format!("{value:.digits$e}");
    let (mantissa, exponent) = text.split_once('e').expect("an exponent is always there");
    let exponent: i32 = exponent.parse().expect("an exponent is a number");
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{}e{sign}{:02}", point(mantissa.to_owned(), alternate), exponent.abs())
}

fn general(value: f64, digits: usize, alternate: bool, keeps_digit: bool) -> String {
    let exponent: i32 = match format!("{value:.*e}", digits - 1).split_once('e') {
        Some((_, exponent)) => exponent.parse().expect("an exponent is a number"),
        None => 0,
    };
    // If one digit after the point is kept, scientific notation begins at an exponent that is lower by one.
    let most = digits as i32 - i32::from(keeps_digit);
    let is_fixed = (-4..most).contains(&exponent);
    let text = match is_fixed {
        true => format!("{value:.*}", usize::try_from(digits as i32 - 1 - exponent).unwrap_or(0)),
        false => exponential(value, digits - 1, alternate),
    };
    if alternate {
        return point(text, true);
    }
    let (mantissa, exponent) = match text.find('e') {
        Some(at) => text.split_at(at),
        None => (text.as_str(), ""),
    };
    let mantissa = match mantissa.contains('.') {
        true => mantissa.trim_end_matches('0').trim_end_matches('.'),
        false => mantissa,
    };
    let digit = if keeps_digit && exponent.is_empty() && !mantissa.contains('.') { ".0" } else { "" };
    format!("{mantissa}{digit}{exponent}")
}

/// Formats an integer without its sign. `letter` is one of `dboxX`.
pub(super) fn int_digits(value: i128, letter: char) -> String {
    let value = value.unsigned_abs();
    match letter {
        'b' => format!("{value:b}"),
        'o' => format!("{value:o}"),
        'x' => format!("{value:x}"),
        'X' => format!("{value:X}"),
        _ => value.to_string(),
    }
}

/// Groups the digits before the decimal point.
pub(super) fn grouped(digits: &str, separator: char, size: usize) -> String {
    let is_digit = |digit: char| digit.is_digit(if size == 4 { 16 } else { 10 });
    let end = digits.find(|digit| !is_digit(digit)).unwrap_or(digits.len());
    let mut out = String::with_capacity(2 * digits.len());
    for (index, digit) in digits[..end].chars().enumerate() {
        if index > 0 && (end - index) % size == 0 {
            out.push(separator);
        }
        out.push(digit);
    }
    out + &digits[end..]
}

/// Parses an integer like Python's `int(text, base)`. Returns `None` if the text is not an integer.
pub(super) fn parse_int(text: &str, base: u32) -> Outcome<Option<i128>> {
    let text = text.trim_matches(is_space);
    let (sign, digits) = match text.strip_prefix('-') {
        Some(digits) => (-1, digits),
        None => (1, text.strip_prefix('+').unwrap_or(text)),
    };
    let lower = digits.get(..2).map(str::to_ascii_lowercase);
    let prefixed = [(2, "0b"), (8, "0o"), (16, "0x")].into_iter().find(|(_, prefix)| lower.as_deref() == Some(prefix));
    let (base, digits, is_prefixed) = match (base, prefixed) {
        (0, Some((base, _))) => (base, &digits[2..], true),
        (base, Some((own, _))) if base == own => (base, &digits[2..], true),
        (0, None) if digits.starts_with('0') && !digits.trim_matches(['0', '_']).is_empty() => return Ok(None),
        (0, None) => (10, digits, false),
        _ => (base, digits, false),
    };
    let digits = if is_prefixed { digits.strip_prefix('_').unwrap_or(digits) } else { digits };
    let is_sound = !digits.is_empty() && !digits.starts_with('_') && !digits.ends_with('_') && !digits.contains("__");
    let value = |digit: char| decimal(digit).or_else(|| digit.to_digit(36)).filter(|&value| value < base);
    let digits: Option<Vec<u32>> = digits.chars().filter(|&digit| digit != '_').map(value).collect();
    let Some(digits) = digits.filter(|_| is_sound) else { return Ok(None) };
    let whole = digits
        .into_iter()
        .try_fold(0i128, |whole, digit| whole.checked_mul(i128::from(base))?.checked_add(i128::from(digit)));
    match whole {
        Some(whole) => Ok(Some(sign * whole)),
        None => fault(format!("{text} is not an integer of 128 bits")),
    }
}

/// Parses a float like Python's `float(text)`. Returns `None` if the text is not a float.
pub(super) fn parse_float(text: &str) -> Option<f64> {
    let text = text.trim_matches(is_space);
    let underscores = text.char_indices().filter(|&(_, letter)| letter == '_').all(|(at, _)| {
        let is_digit = |letter: Option<char>| letter.is_some_and(|letter| letter.is_ascii_digit());
        is_digit(text[..at].chars().next_back()) && is_digit(text[at + 1..].chars().next())
    });
    if !underscores {
        return None;
    }
    let ascii = |digit: char| decimal(digit).and_then(|value| char::from_digit(value, 10)).unwrap_or(digit);
    text.chars().filter(|&letter| letter != '_').map(ascii).collect::<String>().parse().ok()
}

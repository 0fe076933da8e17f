//! Operators on values, as in Python.

use std::cmp::Ordering;

use super::ast::Operator;
use super::filters::escaped;
use super::format::percent;
use super::limits::{Limits, Outcome, fault};
use super::print::Text;
use super::render::Renderer;
use super::value::{ELEMENT, Value, View, range_len};

fn too_large<T>() -> Outcome<T> {
    fault("an integer of more than 128 bits, which is not supported")
}

/// `-value`.
pub(super) fn negative(value: &Value) -> Outcome<Value> {
    match (value.defined()?, value.as_int()) {
        (_, Some(number)) => number.checked_neg().map_or_else(too_large, |number| Ok(Value::Int(number))),
        (Value::Float(number), _) => Ok(Value::Float(-number)),
        (other, _) => fault(format!("bad operand type for unary -: '{}'", other.type_name())),
    }
}

/// `+value`.
pub(super) fn positive(value: &Value) -> Outcome<Value> {
    match (value.defined()?, value.as_int()) {
        (_, Some(number)) => Ok(Value::Int(number)),
        (Value::Float(number), _) => Ok(Value::Float(*number)),
        (other, _) => fault(format!("bad operand type for unary +: '{}'", other.type_name())),
    }
}

/// Applies an arithmetic operator to two values.
pub(super) fn binary(renderer: &Renderer<'_>, operator: Operator, left: &Value, right: &Value) -> Outcome<Value> {
    let limits = renderer.limits;
    if let (Operator::Mod, Value::Str(format, safe)) = (operator, left) {
        if *safe {
            return fault("% of an escaped text is not supported");
        }
        return Ok(Value::text(percent(renderer, format, right)?));
    }
    left.defined()?;
    right.defined()?;
    if let (Some(a), Some(b)) = (left.as_int(), right.as_int()) {
        return of_ints(operator, a, b);
    }
    if let (Some(a), Some(b)) = (left.as_float(), right.as_float()) {
        return of_floats(operator, a, b).map(Value::Float);
    }
    let refused = || {
        let sign = match operator {
            Operator::Add => "+",
            Operator::Sub => "-",
            Operator::Mul => "*",
            Operator::Div => "/",
            Operator::FloorDiv => "//",
            Operator::Mod => "%",
            Operator::Pow => "**",
        };
        fault(format!("unsupported operand type(s) for {sign}: '{}' and '{}'", left.type_name(), right.type_name()))
    };
    match (operator, left, right) {
        (Operator::Add, Value::Str(a, is_safe), Value::Str(b, is_other_safe)) => {
            let mut out = Text::new(limits);
            let is_any_safe = *is_safe || *is_other_safe;
            for (text, is_safe) in [(a, is_safe), (b, is_other_safe)] {
                if is_any_safe && !is_safe { out.push(&escaped(text))? } else { out.push(text)? }
            }
            Ok(Value::Str(out.text.into(), is_any_safe))
        }
        (Operator::Add, Value::List(a), Value::List(b)) | (Operator::Add, Value::Tuple(a), Value::Tuple(b)) => {
            let length = a.items.len() + b.items.len();
            limits.step(length)?;
            limits.grow(length * ELEMENT)?;
            let items = a.items.iter().chain(&b.items).cloned().collect();
            if matches!(left, Value::List(_)) { Value::list(limits, items) } else { Value::tuple(limits, items) }
        }
        (Operator::Mul, sequence @ (Value::Str(..) | Value::List(_) | Value::Tuple(_)), count)
        | (Operator::Mul, count, sequence @ (Value::Str(..) | Value::List(_) | Value::Tuple(_))) => {
            let Some(count) = count.as_int() else { return refused() };
            let count = if count > 0 { usize::try_from(count).unwrap_or(usize::MAX) } else { 0 };
            match sequence {
                Value::Str(text, safe) => {
                    let mut out = Text::new(limits);
                    if !text.is_empty() {
                        out.repeat(text, count)?;
                    }
                    Ok(Value::Str(out.text.into(), *safe))
                }
                Value::List(items) | Value::Tuple(items) => {
                    let length = items.items.len().saturating_mul(count);
                    limits.step(length)?;
                    limits.grow(length.saturating_mul(ELEMENT))?;
                    let items = (0..length).map(|index| items.items[index % items.items.len()].clone()).collect();
                    if matches!(sequence, Value::List(_)) {
                        Value::list(limits, items)
                    } else {
                        Value::tuple(limits, items)
                    }
                }
                _ => refused(),
            }
        }
        _ => refused(),
    }
}

fn of_ints(operator: Operator, a: i128, b: i128) -> Outcome<Value> {
    let result = match operator {
        Operator::Add => a.checked_add(b),
        Operator::Sub => a.checked_sub(b),
        Operator::Mul => a.checked_mul(b),
        Operator::Div | Operator::FloorDiv | Operator::Mod if b == 0 => {
            return fault(if operator == Operator::Div {
                "division by zero"
            } else {
                "integer division or modulo by zero"
            });
        }
        Operator::Div => return Ok(Value::Float(a as f64 / b as f64)),
        Operator::FloorDiv => a.checked_div(b).map(|quotient| quotient - i128::from(a % b != 0 && (a < 0) != (b < 0))),
        Operator::Mod => a.checked_rem(b).map(|rest| if rest != 0 && (rest < 0) != (b < 0) { rest + b } else { rest }),
        Operator::Pow if b < 0 => return of_floats(operator, a as f64, b as f64).map(Value::Float),
        Operator::Pow => match (a, u32::try_from(b)) {
            (0 | 1, _) => Some(if b == 0 { 1 } else { a }),
            (-1, _) => Some(if b % 2 == 0 { 1 } else { -1 }),
            (_, Ok(exponent)) => a.checked_pow(exponent),
            _ => None,
        },
    };
    result.map_or_else(too_large, |result| Ok(Value::Int(result)))
}

fn of_floats(operator: Operator, a: f64, b: f64) -> Outcome<f64> {
    let modulo = || {
        let rest = a % b;
        if rest != 0.0 && (rest < 0.0) != (b < 0.0) {
            rest + b
        } else {
            rest.abs().copysign(if rest == 0.0 { b } else { rest })
        }
    };
    Ok(match operator {
        Operator::Add => a + b,
        Operator::Sub => a - b,
        Operator::Mul => a * b,
        Operator::Div | Operator::FloorDiv | Operator::Mod if b == 0.0 => return fault("float division by zero"),
        Operator::Div => a / b,
        Operator::FloorDiv => {
            let quotient = (a - modulo()) / b;
            let floor = quotient.floor();
            let nearest = if quotient - floor > 0.5 { floor + 1.0 } else { floor };
            if nearest == 0.0 { 0.0f64.copysign(a / b) } else { nearest }
        }
        Operator::Mod => modulo(),
        Operator::Pow if a == 0.0 && b < 0.0 => return fault("0.0 cannot be raised to a negative power"),
        Operator::Pow if a < 0.0 && a.is_finite() && b.is_finite() && b.fract() != 0.0 => {
            return fault("a complex number, which is not supported");
        }
        Operator::Pow => {
            let power = a.powf(b);
            if power.is_infinite() && a.is_finite() && b.is_finite() {
                return fault("Numerical result out of range");
            }
            power
        }
    })
}

/// True if two values are equal.
pub(super) fn equal(limits: &Limits, a: &Value, b: &Value) -> Outcome<bool> {
    limits.step(1)?;
    let all = |a: &[Value], b: &[Value]| {
        if a.len() != b.len() {
            return Ok(false);
        }
        for (a, b) in a.iter().zip(b) {
            if !equal(limits, a, b)? {
                return Ok(false);
            }
        }
        Ok(true)
    };
    Ok(match (a, b) {
        (Value::Undefined(_), Value::Undefined(_)) | (Value::None, Value::None) => true,
        (Value::Str(a, _), Value::Str(b, _)) => {
            limits.scan(if a.len() == b.len() { a } else { "" })?;
            a == b
        }
        (Value::List(a), Value::List(b)) | (Value::Tuple(a), Value::Tuple(b)) => all(&a.items, &b.items)?,
        (Value::Dict(a), Value::Dict(b)) => {
            if a.entries.len() != b.entries.len() {
                return Ok(false);
            }
            for (key, value) in &a.entries {
                match b.get(limits, key)? {
                    Some(other) if equal(limits, value, other)? => {}
                    _ => return Ok(false),
                }
            }
            true
        }
        (Value::View(View::Keys, a), Value::View(View::Keys, b)) => {
            let mut same = a.entries.len() == b.entries.len();
            for (key, _) in &a.entries {
                limits.step(1)?;
                same &= b.get(limits, key)?.is_some();
            }
            same
        }
        (Value::View(..), Value::View(..)) => return fault("values and items of mappings cannot be compared"),
        (&Value::Range(a, b, c), &Value::Range(d, e, f)) => {
            let length = range_len(a, b, c);
            length == range_len(d, e, f) && (length == 0 || (a == d && (length == 1 || c == f)))
        }
        (Value::Namespace(a), Value::Namespace(b)) => std::rc::Rc::ptr_eq(a, b),
        (Value::Macro(a), Value::Macro(b)) => std::rc::Rc::ptr_eq(a, b),
        (Value::Function(a), Value::Function(b)) => a == b,
        _ => order_of_numbers(a, b) == Some(Ordering::Equal),
    })
}

/// Returns the exact order of two numbers, or `None` if one of them is not a number or is NaN.
fn order_of_numbers(a: &Value, b: &Value) -> Option<Ordering> {
    match (a.as_int(), b.as_int()) {
        (Some(a), Some(b)) => Some(a.cmp(&b)),
        (None, Some(_)) => order_of_numbers(b, a).map(Ordering::reverse),
        (Some(a), None) => {
            let b = b.as_float().filter(|b| !b.is_nan())?;
            if b.abs() >= 1e38 {
                return Some(if b > 0.0 { Ordering::Less } else { Ordering::Greater });
            }
            let floor = b.floor();
            Some(a.cmp(&(floor as i128)).then(if b > floor { Ordering::Less } else { Ordering::Equal }))
        }
        (None, None) => a.as_float()?.partial_cmp(&b.as_float()?),
    }
}

/// Returns the order of two values, or `None` if one of them is NaN. Returns an error if Python cannot order the
/// values.
pub(super) fn compare(limits: &Limits, a: &Value, b: &Value, sign: &str) -> Outcome<Option<Ordering>> {
    limits.step(1)?;
    match (a.defined()?, b.defined()?) {
        (Value::Str(a, _), Value::Str(b, _)) => {
            limits.scan(a)?;
            Ok(Some(a.cmp(b)))
        }
        (Value::List(a), Value::List(b)) | (Value::Tuple(a), Value::Tuple(b)) => {
            for (a, b) in a.items.iter().zip(&b.items) {
                if !equal(limits, a, b)? {
                    return compare(limits, a, b, sign);
                }
            }
            Ok(Some(a.items.len().cmp(&b.items.len())))
        }
        (a, b) if a.as_float().is_some() && b.as_float().is_some() => Ok(order_of_numbers(a, b)),
        (a, b) => {
            fault(format!("'{sign}' not supported between instances of '{}' and '{}'", a.type_name(), b.type_name()))
        }
    }
}

/// Sorts values like Python's `sorted`. Equal values keep their order, even if the sort is reversed.
pub(super) fn sorted<T>(
    limits: &Limits,
    items: Vec<T>,
    key: impl Fn(&T) -> Outcome<Value>,
    reverse: bool,
) -> Outcome<Vec<T>> {
    let keyed = items.into_iter().map(|item| Ok((key(&item)?, item)));
    let mut keyed: Vec<(Value, T)> = keyed.collect::<Outcome<_>>()?;
    let mut failed = None;
    keyed.sort_by(|(a, _), (b, _)| {
        if failed.is_some() {
            return Ordering::Equal;
        }
        let order = compare(limits, a, b, "<").map(|order| order.unwrap_or(Ordering::Equal));
        let order = order.unwrap_or_else(|fault| {
            failed = Some(fault);
            Ordering::Equal
        });
        if reverse { order.reverse() } else { order }
    });
    match failed {
        Some(fault) => Err(fault),
        None => Ok(keyed.into_iter().map(|(_, item)| item).collect()),
    }
}

/// `item in container`.
pub(super) fn contains(renderer: &Renderer<'_>, container: &Value, item: &Value) -> Outcome<bool> {
    let limits = renderer.limits;
    match container {
        Value::Str(text, _) => match item {
            Value::Str(part, _) => {
                limits.scan(text)?;
                Ok(text.contains(&**part))
            }
            other => fault(format!("'in <string>' requires string as left operand, not {}", other.type_name())),
        },
        Value::Dict(dict) | Value::View(View::Keys, dict) => Ok(dict.get(limits, item)?.is_some()),
        Value::Stream(stream) => loop {
            let next = stream.left.borrow_mut().pop_front();
            match next {
                Some(next) if equal(limits, &next, item)? => return Ok(true),
                Some(_) => {}
                None => return Ok(false),
            }
        },
        Value::None | Value::Bool(_) | Value::Int(_) | Value::Float(_) => {
            fault(format!("argument of type '{}' is not iterable", container.type_name()))
        }
        other => {
            for one in other.iterate(limits)? {
                if equal(limits, &one, item)? {
                    return Ok(true);
                }
            }
            Ok(false)
        }
    }
}

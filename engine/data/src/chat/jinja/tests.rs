//! Jinja's tests of values: `x is string`.

use std::rc::Rc;

use super::ast::{Comparison, Operator};
use super::call::Given;
use super::filters;
use super::limits::{Outcome, fault};
use super::operators::{binary, equal};
use super::render::Renderer;
use super::value::Value;

/// The names of Jinja's tests.
const TESTS: [&str; 39] = [
    "!=",
    "<",
    "<=",
    "==",
    ">",
    ">=",
    "boolean",
    "callable",
    "defined",
    "divisibleby",
    "eq",
    "equalto",
    "escaped",
    "even",
    "false",
    "filter",
    "float",
    "ge",
    "greaterthan",
    "gt",
    "in",
    "integer",
    "iterable",
    "le",
    "lessthan",
    "lower",
    "lt",
    "mapping",
    "ne",
    "none",
    "number",
    "odd",
    "sameas",
    "sequence",
    "string",
    "test",
    "true",
    "undefined",
    "upper",
];

/// True if Jinja has a test of this name.
pub(super) fn is_known(name: &str) -> bool {
    TESTS.contains(&name)
}

/// Applies a test to a value.
pub(super) fn apply(renderer: &Renderer<'_>, name: &str, value: &Value, given: Given) -> Outcome<bool> {
    let comparison = match name {
        "eq" | "==" | "equalto" => Some(Comparison::Eq),
        "ne" | "!=" => Some(Comparison::Ne),
        "lt" | "<" | "lessthan" => Some(Comparison::Lt),
        "le" | "<=" => Some(Comparison::Le),
        "gt" | ">" | "greaterthan" => Some(Comparison::Gt),
        "ge" | ">=" => Some(Comparison::Ge),
        "in" => Some(Comparison::In),
        _ => None,
    };
    if let Some(comparison) = comparison {
        let [other] = given.require(name, ["other"])?;
        return renderer.compared(comparison, value, &other);
    }
    let modulo = |by: &Value| binary(renderer, Operator::Mod, value, by);
    match name {
        "divisibleby" => {
            let [by] = given.require(name, ["num"])?;
            return equal(renderer.limits, &modulo(&by)?, &Value::Int(0));
        }
        "sameas" => {
            let [other] = given.require(name, ["other"])?;
            return same(value, &other);
        }
        _ => _ = given.bind::<0>(name, [])?,
    }
    Ok(match name {
        "defined" => !matches!(value, Value::Undefined(_)),
        "undefined" => matches!(value, Value::Undefined(_)),
        "none" => matches!(value, Value::None),
        "boolean" => matches!(value, Value::Bool(_)),
        "true" => matches!(value, Value::Bool(true)),
        "false" => matches!(value, Value::Bool(false)),
        "integer" => matches!(value, Value::Int(_)),
        "float" => matches!(value, Value::Float(_)),
        "number" => value.as_float().is_some(),
        "string" => matches!(value, Value::Str(..)),
        "mapping" => matches!(value, Value::Dict(_)),
        "escaped" => matches!(value, Value::Str(_, true)),
        "sequence" => matches!(
            value,
            Value::Undefined(_) | Value::Str(..) | Value::List(_) | Value::Tuple(_) | Value::Dict(_) | Value::Range(..)
        ),
        "iterable" => matches!(
            value,
            Value::Undefined(_)
                | Value::Str(..)
                | Value::List(_)
                | Value::Tuple(_)
                | Value::Dict(_)
                | Value::View(..)
                | Value::Range(..)
                | Value::Stream(_)
                | Value::Loop(_)
        ),
        "callable" => matches!(
            value,
            Value::Undefined(_)
                | Value::Macro(_)
                | Value::Loop(_)
                | Value::Function(_)
                | Value::Method(_)
                | Value::Joiner(_)
        ),
        "odd" => equal(renderer.limits, &modulo(&Value::Int(2))?, &Value::Int(1))?,
        "even" => equal(renderer.limits, &modulo(&Value::Int(2))?, &Value::Int(0))?,
        "lower" | "upper" => {
            let text = Value::text(super::print::str_of(renderer.limits, value)?);
            let method = if name == "lower" { "islower" } else { "isupper" };
            super::access::call_method(renderer, &text, method, Given::default())?.is_true()
        }
        "filter" => value.as_str().is_some_and(|name| filters::is_known(name)),
        "test" => value.as_str().is_some_and(|name| is_known(name)),
        _ => return fault(format!("no test named '{name}'")),
    })
}

/// True if two values are the same object in Python. Python has only one object for each small integer, for each truth
/// value, and for `None`.
fn same(a: &Value, b: &Value) -> Outcome<bool> {
    Ok(match (a, b) {
        (Value::None, Value::None) => true,
        (Value::Bool(a), Value::Bool(b)) => a == b,
        (Value::Int(a), Value::Int(b)) if (-5..=256).contains(a) => a == b,
        (Value::List(a), Value::List(b)) | (Value::Tuple(a), Value::Tuple(b)) => Rc::ptr_eq(a, b),
        (Value::Dict(a), Value::Dict(b)) => Rc::ptr_eq(a, b),
        (Value::Namespace(a), Value::Namespace(b)) => Rc::ptr_eq(a, b),
        (a, b) if a.type_name() != b.type_name() => false,
        _ => {
            return fault(format!("sameas of two values of type '{}' is up to Python's memory; use ==", a.type_name()));
        }
    })
}

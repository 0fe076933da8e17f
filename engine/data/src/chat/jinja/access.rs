//! Attributes, items and slices of values, and methods of values other than strings.

use std::rc::Rc;
use std::sync::Arc;

use super::call::Given;
use super::limits::{Limits, Outcome, fault};
use super::operators::equal;
use super::render::Renderer;
use super::scope::Loop;
use super::strings;
use super::value::{Dict, Namespace, Value, View, range_len};

/// Python methods that would change a list or mapping. The sandbox forbids them.
const CHANGES: [&str; 10] =
    ["append", "clear", "extend", "insert", "pop", "popitem", "remove", "reverse", "setdefault", "sort"];

/// Other attributes of Python's objects that are not supported. No template should need them.
const NOT_SUPPORTED: [(&str, &[&str]); 5] = [
    ("str", &strings::NOT_SUPPORTED),
    ("Markup", &["encode", "maketrans", "translate", "unescape", "striptags", "escape"]),
    (
        "int",
        &[
            "as_integer_ratio",
            "bit_count",
            "bit_length",
            "conjugate",
            "denominator",
            "from_bytes",
            "numerator",
            "to_bytes",
        ],
    ),
    ("float", &["as_integer_ratio", "conjugate", "fromhex", "hex"]),
    ("dict", &["fromkeys"]),
];

/// `value.name`: the attribute of the object in Python, or else the item with this key.
pub(super) fn attribute(renderer: &Renderer<'_>, value: &Value, name: &Arc<str>) -> Outcome<Value> {
    match own(renderer, value.defined()?, name)? {
        Some(found) => Ok(found),
        None => Ok(match value {
            Value::Dict(dict) => dict.get_str(name).cloned(),
            _ => None,
        }
        .unwrap_or_else(|| missing(value, name))),
    }
}

fn missing(value: &Value, name: &str) -> Value {
    Value::undefined(format!("'{} object' has no attribute '{name}'", value.type_name()))
}

/// `value[key]`: the item, or else the attribute of the object in Python. If neither exists, the result is an undefined
/// value.
pub(super) fn item(renderer: &Renderer<'_>, value: &Value, key: &Value) -> Outcome<Value> {
    let at = |length: usize| {
        let index = key.as_int()?;
        usize::try_from(if index < 0 { index + length as i128 } else { index }).ok().filter(|&index| index < length)
    };
    let found = match value.defined()? {
        // Such a value cannot be a key of a mapping.
        Value::Dict(_) if matches!(key, Value::Undefined(_) | Value::List(_) | Value::Dict(_)) => None,
        Value::Dict(dict) => dict.get(renderer.limits, key)?.cloned(),
        Value::List(items) | Value::Tuple(items) => at(items.items.len()).map(|index| items.items[index].clone()),
        Value::Str(text, safe) if key.as_int().is_some() => {
            renderer.limits.scan(text)?;
            let letter = at(text.chars().count()).and_then(|index| text.chars().nth(index));
            letter.map(|letter| Value::Str(letter.encode_utf8(&mut [0; 4]).into(), *safe))
        }
        Value::Range(start, end, step) => {
            at(range_len(*start, *end, *step)).map(|index| Value::Int(start + index as i128 * step))
        }
        _ => None,
    };
    match (found, key) {
        (Some(found), _) => Ok(found),
        (None, Value::Str(name, _)) => Ok(own(renderer, value, name)?.unwrap_or_else(|| missing(value, name))),
        (None, Value::Int(index)) => Ok(missing(value, &index.to_string())),
        (None, other) => Ok(missing(value, other.type_name())),
    }
}

/// Returns the attribute of this name that the object has in Python, if any.
fn own(renderer: &Renderer<'_>, value: &Value, name: &Arc<str>) -> Outcome<Option<Value>> {
    let kind = value.type_name();
    if name.starts_with("__") && name.ends_with("__") {
        return fault(format!("access to attribute '{name}' of '{kind}' object is unsafe."));
    }
    let refused =
        NOT_SUPPORTED.iter().find(|(type_name, _)| *type_name == kind || (*type_name == "int" && kind == "bool"));
    if refused.is_some_and(|(_, names)| names.contains(&&**name)) {
        return fault(format!("the attribute '{name}' of '{kind}' objects is not supported"));
    }
    let method = || Some(Value::Method(Rc::new((value.clone(), name.clone()))));
    Ok(match (value, &**name) {
        (Value::Dict(_), "get" | "items" | "keys" | "values" | "copy") => method(),
        (Value::List(_), "count" | "index" | "copy") | (Value::Tuple(_) | Value::Range(..), "count" | "index") => {
            method()
        }
        (Value::List(_) | Value::Dict(_), name) if CHANGES.contains(&name) || (name == "update" && kind == "dict") => {
            // Lists have no `setdefault` and mappings no `append`. That makes no difference, since no template stores
            // items under these names.
            let is_of_list = !matches!(name, "popitem" | "setdefault");
            let is_of_dict = matches!(name, "clear" | "pop" | "popitem" | "setdefault" | "update");
            match if kind == "list" { is_of_list } else { is_of_dict } {
                true => Some(Value::undefined(format!("access to attribute '{name}' of '{kind}' object is unsafe."))),
                false => None,
            }
        }
        (Value::Tuple(items), "grouper") if items.is_group => Some(items.items[0].clone()),
        (Value::Tuple(items), "list") if items.is_group => Some(items.items[1].clone()),
        (Value::Str(..), name) if strings::METHODS.contains(&name) => method(),
        (Value::Int(_) | Value::Bool(_), "real") => value.as_int().map(Value::Int),
        (Value::Int(_) | Value::Bool(_), "imag") => Some(Value::Int(0)),
        (Value::Float(_), "real") => Some(value.clone()),
        (Value::Float(_), "imag") => Some(Value::Float(0.0)),
        (Value::Float(_), "is_integer") => method(),
        (Value::Range(start, ..), "start") => Some(Value::Int(*start)),
        (Value::Range(_, end, _), "stop") => Some(Value::Int(*end)),
        (Value::Range(_, _, step), "step") => Some(Value::Int(*step)),
        (Value::Namespace(variables), name) => {
            renderer.limits.step(variables.borrow().len() / 8)?;
            variables.borrow().iter().find(|(known, _)| **known == *name).map(|(_, value)| value.clone())
        }
        (Value::Macro(callee), "name") => Some(Value::text(callee.node.name.clone())),
        (Value::Macro(callee), "arguments") => {
            let names = callee.node.parameters.iter().map(|(name, _)| Value::text(name.clone())).collect();
            Some(Value::tuple(renderer.limits, names)?)
        }
        (Value::Loop(running), name) => of_loop(renderer, running, name, method)?,
        (Value::Cycler(_), "next" | "reset") => method(),
        (Value::Cycler(cycler), "current") => Some(cycler.0[cycler.1.get()].clone()),
        (Value::Function("dict"), "fromkeys") => return fault("the method dict.fromkeys is not supported"),
        (Value::View(..), "mapping" | "isdisjoint") | (Value::Stream(_), "send" | "close" | "throw") => {
            return fault(format!("the attribute '{name}' of '{kind}' objects is not supported"));
        }
        _ => None,
    })
}

fn of_loop(
    renderer: &Renderer<'_>,
    running: &Loop,
    name: &str,
    method: impl Fn() -> Option<Value>,
) -> Outcome<Option<Value>> {
    let index0 = running.index0();
    let length = || running.length(renderer).map(|length| length as i128);
    Ok(Some(match name {
        "index0" => Value::Int(index0),
        "index" => Value::Int(index0 + 1),
        "first" => Value::Bool(index0 == 0),
        "last" => Value::Bool(running.peek(renderer)?.is_none()),
        "length" => Value::Int(length()?),
        "revindex0" => Value::Int(length()? - index0 - 1),
        "revindex" => Value::Int(length()? - index0),
        "depth0" => Value::Int(running.depth0 as i128),
        "depth" => Value::Int(running.depth0 as i128 + 1),
        "previtem" => running.previous().unwrap_or_else(|| Value::undefined("there is no previous item")),
        "nextitem" => running.peek(renderer)?.unwrap_or_else(|| Value::undefined("there is no next item")),
        "cycle" | "changed" => return Ok(method()),
        _ => return Ok(None),
    }))
}

/// `value[start:end:step]`.
pub(super) fn slice(renderer: &Renderer<'_>, value: &Value, parts: [Option<Value>; 3]) -> Outcome<Value> {
    let limits = renderer.limits;
    let kind = value.defined()?.type_name();
    let length = match value {
        Value::Str(..) | Value::List(_) | Value::Tuple(_) | Value::Range(..) => value.len().unwrap_or(0) as i128,
        Value::Dict(_) => return fault("unhashable type: 'slice'"),
        _ => return fault(format!("'{kind}' object is not subscriptable")),
    };
    let mut numbers = [None; 3];
    for (number, part) in numbers.iter_mut().zip(parts) {
        *number = match part {
            None | Some(Value::None) => None,
            Some(part) => match part.as_int() {
                Some(number) => Some(number),
                None => return fault("slice indices must be integers or None or have an __index__ method"),
            },
        };
    }
    let [start, end, step] = numbers;
    let step = step.unwrap_or(1);
    if step == 0 {
        return fault("slice step cannot be zero");
    }
    // These are the bounds that Python's `slice.indices` returns.
    let (low, high) = if step > 0 { (0, length) } else { (-1, length - 1) };
    let bound = |part: Option<i128>, default: i128| match part {
        None => default,
        Some(at) if at < 0 => at.saturating_add(length).clamp(low, high),
        Some(at) => at.clamp(low, high),
    };
    let (start, end) =
        if step > 0 { (bound(start, low), bound(end, high)) } else { (bound(start, high), bound(end, low)) };
    let step = step.clamp(-length - 1, length + 1);
    let count = range_len(start, end, step);
    limits.step(1 + count)?;
    let indices = (0..count).map(|index| (start + index as i128 * step) as usize);
    match value {
        Value::Str(text, safe) => {
            limits.scan(text)?;
            limits.grow(text.len())?;
            let text: String = match step {
                1 => text.chars().skip(start as usize).take(count).collect(),
                _ => {
                    limits.grow(4 * length as usize)?;
                    let letters: Vec<char> = text.chars().collect();
                    indices.map(|index| letters[index]).collect()
                }
            };
            Ok(Value::Str(text.into(), *safe))
        }
        Value::List(items) => Value::list(limits, indices.map(|index| items.items[index].clone()).collect()),
        Value::Tuple(items) => Value::tuple(limits, indices.map(|index| items.items[index].clone()).collect()),
        Value::Range(first, _, by) => {
            Ok(Value::Range(first + start * by, first + end * by, by.checked_mul(step).unwrap_or(i128::MAX)))
        }
        _ => fault(format!("'{kind}' object is not subscriptable")),
    }
}

/// Sets a variable of a namespace.
pub(super) fn set(limits: &Limits, namespace: &Namespace, name: &Arc<str>, value: Value) -> Outcome<()> {
    if name.starts_with('_') {
        return fault(format!(
            "Chat templates cannot store underscore-prefixed attributes on a namespace, but got '{name}'. Please rename the attribute."
        ));
    }
    let mut variables = namespace.borrow_mut();
    limits.step(variables.len() / 8)?;
    match variables.iter_mut().find(|(known, _)| known == name) {
        Some(variable) => variable.1 = value,
        None => variables.push((name.clone(), value)),
    }
    Ok(())
}

/// Calls a method.
pub(super) fn call_method(renderer: &Renderer<'_>, value: &Value, name: &str, given: Given) -> Outcome<Value> {
    let limits = renderer.limits;
    match (value, name) {
        (Value::Str(text, false), name) => strings::call(renderer, text, name, given),
        // Methods without string arguments have nothing to escape.
        (
            Value::Str(text, true),
            "strip" | "lstrip" | "rstrip" | "upper" | "lower" | "capitalize" | "title" | "swapcase" | "startswith"
            | "endswith" | "find" | "count" | "isspace" | "isdigit" | "isalpha",
        ) => match strings::call(renderer, text, name, given)? {
            Value::Str(text, _) => Ok(Value::Str(text, true)),
            other => Ok(other),
        },
        (Value::Str(..), _) => fault(format!("the method {name} of an escaped text is not supported")),
        (Value::Dict(dict), "get") => {
            if !given.named.is_empty() {
                return fault("dict.get() takes no keyword arguments");
            }
            let [key, default] = given.bind("get", ["key", "default"])?;
            let Some(key) = key else { return fault("get expected at least 1 argument, got 0") };
            Ok(dict.get(limits, &key)?.cloned().or(default).unwrap_or(Value::None))
        }
        (Value::Dict(dict), "items" | "keys" | "values" | "copy") => {
            given.bind::<0>(name, [])?;
            Ok(match name {
                "items" => Value::View(View::Items, dict.clone()),
                "keys" => Value::View(View::Keys, dict.clone()),
                "values" => Value::View(View::Values, dict.clone()),
                _ => value.clone(),
            })
        }
        (Value::List(_), "copy") => {
            given.bind::<0>(name, [])?;
            Ok(value.clone())
        }
        (Value::List(_) | Value::Tuple(_) | Value::Range(..), "count" | "index") => {
            let [wanted] = given.require(name, ["value"])?;
            let mut count = 0;
            for (index, item) in value.iterate(limits)?.iter().enumerate() {
                if equal(limits, item, &wanted)? {
                    if name == "index" {
                        return Ok(Value::Int(index as i128));
                    }
                    count += 1;
                }
            }
            if name == "index" { fault("the value is not in the list") } else { Ok(Value::Int(count)) }
        }
        (Value::Float(number), "is_integer") => {
            given.bind::<0>(name, [])?;
            Ok(Value::Bool(number.fract() == 0.0))
        }
        (Value::Loop(running), "cycle") => {
            if given.positional.is_empty() || !given.named.is_empty() {
                return fault("no items for cycling given");
            }
            let index = running.index0().rem_euclid(given.positional.len() as i128);
            Ok(given.positional[index as usize].clone())
        }
        (Value::Loop(running), "changed") => running.changed(renderer, given.positional).map(Value::Bool),
        (Value::Cycler(cycler), "next") => {
            given.bind::<0>(name, [])?;
            let current = cycler.1.get();
            cycler.1.set((current + 1) % cycler.0.len());
            Ok(cycler.0[current].clone())
        }
        (Value::Cycler(cycler), "reset") => {
            cycler.1.set(0);
            Ok(Value::None)
        }
        _ => fault(format!("the method {name} of '{}' objects is not supported", value.type_name())),
    }
}

/// `dict(...)`.
pub(super) fn dict(renderer: &Renderer<'_>, given: Given) -> Outcome<Vec<(Value, Value)>> {
    let mut entries = Vec::new();
    if given.positional.len() > 1 {
        return fault(format!("dict expected at most 1 argument, got {}", given.positional.len()));
    }
    match given.positional.first() {
        None => {}
        Some(Value::Dict(dict)) => {
            renderer.limits.grow(64 * dict.entries.len())?;
            entries.extend(dict.entries.iter().cloned());
        }
        Some(pairs) => {
            for pair in pairs.defined()?.iterate(renderer.limits)? {
                match <[Value; 2]>::try_from(pair.iterate(renderer.limits)?) {
                    Ok([key, value]) => entries.push((key, value)),
                    Err(items) => {
                        return fault(format!("an element for dict has length {}; 2 is required", items.len()));
                    }
                }
            }
        }
    }
    entries.extend(given.named.into_iter().map(|(name, value)| (Value::text(name), value)));
    // If several entries have one key, the entry keeps the place of the first and the value of the last.
    let mut dict = Dict::default();
    for (key, value) in entries {
        dict.insert(key, value)?;
    }
    Ok(dict.entries)
}

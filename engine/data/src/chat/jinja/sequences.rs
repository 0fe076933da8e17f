//! Filters of sequences: `x | map(attribute='role') | join(',')`.

use std::collections::HashSet;
use std::sync::Arc;

use super::ast::Operator;
use super::call::Given;
use super::limits::{Outcome, fault};
use super::operators::{binary, compare, equal, sorted};
use super::print::{Text, str_of, write_str};
use super::render::Renderer;
use super::strings::{count_of, optional_text, text_of};
use super::value::{Value, View};
use super::{access, filters, tests};

/// A path of attributes and indices.
type Path = Vec<Value>;

fn path(attribute: Option<&Value>) -> Outcome<Path> {
    match attribute {
        None | Some(Value::None) => Ok(Vec::new()),
        Some(Value::Str(text, _)) => Ok(text
            .split('.')
            .map(|part| match part.parse() {
                Ok(index) if part.bytes().all(|digit| digit.is_ascii_digit()) => Value::Int(index),
                _ => Value::text(part),
            })
            .collect()),
        Some(index) => Ok(vec![index.clone()]),
    }
}

/// Follows a path of attributes from an item. Returns the default if the path leads to an undefined value.
fn follow(renderer: &Renderer<'_>, item: &Value, path: &Path, default: Option<&Value>) -> Outcome<Value> {
    let mut value = item.clone();
    for part in path {
        value = access::item(renderer, &value, part)?;
        if let (Value::Undefined(_), Some(default)) =
            (&value, default.filter(|default| !matches!(default, Value::None)))
        {
            value = default.clone();
        }
    }
    Ok(value)
}

/// Lower-cases a string for comparison, unless the comparison is case-sensitive.
fn folded(renderer: &Renderer<'_>, value: Value, case_sensitive: bool) -> Outcome<Value> {
    match value {
        Value::Str(text, _) if !case_sensitive => {
            renderer.limits.scan(&text)?;
            renderer.limits.grow(text.len())?;
            Ok(Value::text(text.to_lowercase()))
        }
        value => Ok(value),
    }
}

fn is_set(value: Option<Value>) -> bool {
    value.is_some_and(|value| value.is_true())
}

/// Applies a filter to a sequence.
pub(super) fn apply(renderer: &Renderer<'_>, name: &str, value: Value, given: Given) -> Outcome<Value> {
    let limits = renderer.limits;
    match name {
        "length" | "count" => {
            given.bind::<0>(name, [])?;
            limits.scan(value.as_str().map_or("", |text| text))?;
            match (&value, value.len()) {
                (Value::Loop(running), _) => Ok(Value::Int(running.length(renderer)? as i128)),
                (_, Some(length)) => Ok(Value::Int(length as i128)),
                (other, None) => fault(format!("object of type '{}' has no len()", other.type_name())),
            }
        }
        "list" => {
            given.bind::<0>(name, [])?;
            Value::list(limits, value.iterate(limits)?)
        }
        "first" => {
            given.bind::<0>(name, [])?;
            let first = match &value {
                Value::Stream(stream) => stream.left.borrow_mut().pop_front(),
                Value::Str(text, safe) => {
                    text.chars().next().map(|letter| Value::Str(letter.encode_utf8(&mut [0; 4]).into(), *safe))
                }
                other => other.iterate(limits)?.into_iter().next(),
            };
            Ok(first.unwrap_or_else(|| Value::undefined("No first item, sequence was empty.")))
        }
        "last" => {
            given.bind::<0>(name, [])?;
            if matches!(value, Value::Stream(_)) {
                return fault("'generator' object is not reversible");
            }
            let last = value.iterate(limits)?.pop();
            Ok(last.unwrap_or_else(|| Value::undefined("No last item, sequence was empty.")))
        }
        "reverse" => {
            given.bind::<0>(name, [])?;
            if let Value::Str(text, safe) = value {
                limits.grow(text.len())?;
                return Ok(Value::Str(text.chars().rev().collect::<String>().into(), safe));
            }
            let items = value.iterate(limits)?.into_iter().rev().collect();
            // Python cannot iterate a generator backwards, so Jinja returns a list for a generator. For other values,
            // Jinja returns a generator.
            if matches!(value, Value::Stream(_)) { Value::list(limits, items) } else { Value::stream(limits, items) }
        }
        "items" => {
            given.bind::<0>(name, [])?;
            match &value {
                Value::Undefined(_) => Value::stream(limits, Vec::new()),
                Value::Dict(dict) => Value::stream(limits, Value::View(View::Items, dict.clone()).iterate(limits)?),
                _ => fault("Can only get item pairs from a mapping."),
            }
        }
        "join" => {
            let [separator, attribute] = given.bind(name, ["d", "attribute"])?;
            let separator = separator.map_or(Ok(String::new()), |separator| str_of(limits, &separator))?;
            let path = path(attribute.as_ref())?;
            let mut out = Text::new(limits);
            for (index, item) in value.iterate(limits)?.iter().enumerate() {
                out.push(if index == 0 { "" } else { &separator })?;
                write_str(&mut out, &follow(renderer, item, &path, None)?)?;
            }
            Ok(Value::text(out.text))
        }
        "sum" => {
            let [attribute, start] = given.bind(name, ["attribute", "start"])?;
            let path = path(attribute.as_ref())?;
            let mut sum = start.unwrap_or(Value::Int(0));
            if sum.as_str().is_some() {
                return fault("sum() can't sum strings [use ''.join(seq) instead]");
            }
            for item in value.iterate(limits)? {
                sum = binary(renderer, Operator::Add, &sum, &follow(renderer, &item, &path, None)?)?;
            }
            Ok(sum)
        }
        "map" => map(renderer, &value, given),
        "select" | "reject" | "selectattr" | "rejectattr" => select(renderer, name, &value, given),
        "batch" | "slice" => {
            let [count, fill] =
                given.bind(name, [if name == "batch" { "linecount" } else { "slices" }, "fill_with"])?;
            let Some(count) = count else { return fault(format!("{name} is missing its size")) };
            let fill = fill.filter(|fill| !matches!(fill, Value::None));
            let items = value.iterate(limits)?;
            let parts = if name == "batch" { batches } else { slices }(
                count_of(Some(count), 0, name)?,
                &items,
                fill.as_ref(),
                limits,
            )?;
            let parts = parts.into_iter().map(|part| Value::list(limits, part)).collect::<Outcome<_>>()?;
            Value::stream(limits, parts)
        }
        "unique" => {
            let [case, attribute] = given.bind(name, ["case_sensitive", "attribute"])?;
            let (case, path) = (is_set(case), path(attribute.as_ref())?);
            let (mut seen, mut items) = (HashSet::new(), Vec::new());
            for item in value.iterate(limits)? {
                let key = folded(renderer, follow(renderer, &item, &path, None)?, case)?;
                if seen.insert(key.key()?) {
                    items.push(item);
                }
            }
            Value::stream(limits, items)
        }
        "sort" => {
            let [reverse, case, attribute] = given.bind(name, ["reverse", "case_sensitive", "attribute"])?;
            let case = is_set(case);
            // Several paths may be given, separated by commas.
            let paths = match &attribute {
                Some(Value::Str(text, _)) => {
                    text.split(',').map(|one| path(Some(&Value::text(one)))).collect::<Outcome<_>>()?
                }
                other => vec![path(other.as_ref())?],
            };
            let key = |item: &Value| {
                let keys = paths.iter().map(|path| folded(renderer, follow(renderer, item, path, None)?, case));
                Value::list(limits, keys.collect::<Outcome<_>>()?)
            };
            Value::list(limits, sorted(limits, value.iterate(limits)?, key, is_set(reverse))?)
        }
        "dictsort" => {
            let [case, by, reverse] = given.bind(name, ["case_sensitive", "by", "reverse"])?;
            let (case, by) = (is_set(case), optional_text(by, name)?.unwrap_or_else(|| "key".into()));
            let index = match &*by {
                "key" => 0,
                "value" => 1,
                _ => return fault("You can only sort by either \"key\" or \"value\""),
            };
            let Value::Dict(dict) = value.defined()? else {
                return fault(format!("'{}' object has no attribute 'items'", value.type_name()));
            };
            let pairs = Value::View(View::Items, dict.clone()).iterate(limits)?;
            let key = |pair: &Value| folded(renderer, access::item(renderer, pair, &Value::Int(index))?, case);
            Value::list(limits, sorted(limits, pairs, key, is_set(reverse))?)
        }
        "min" | "max" => {
            let [case, attribute] = given.bind(name, ["case_sensitive", "attribute"])?;
            let (case, path) = (is_set(case), path(attribute.as_ref())?);
            let mut best: Option<(Value, Value)> = None;
            for item in value.iterate(limits)? {
                let key = folded(renderer, follow(renderer, &item, &path, None)?, case)?;
                let is_better = match &best {
                    None => true,
                    Some((known, _)) if name == "min" => {
                        compare(limits, &key, known, "<")?.is_some_and(|order| order.is_lt())
                    }
                    Some((known, _)) => compare(limits, &key, known, ">")?.is_some_and(|order| order.is_gt()),
                };
                if is_better {
                    best = Some((key, item));
                }
            }
            Ok(best.map_or_else(|| Value::undefined("No aggregated item, sequence was empty."), |(_, item)| item))
        }
        "groupby" => {
            let [attribute, default, case] = given.bind(name, ["attribute", "default", "case_sensitive"])?;
            let (case, path) = (is_set(case), path(attribute.as_ref())?);
            let key = |item: &Value| folded(renderer, follow(renderer, item, &path, default.as_ref())?, case);
            let mut groups: Vec<(Value, Vec<Value>)> = Vec::new();
            for item in sorted(limits, value.iterate(limits)?, key, false)? {
                let own = key(&item)?;
                match groups.last_mut() {
                    Some((known, members)) if equal(limits, known, &own)? => members.push(item),
                    _ => groups.push((own, vec![item])),
                }
            }
            let groups = groups.into_iter().map(|(key, members)| {
                let key = if case { key } else { follow(renderer, &members[0], &path, default.as_ref())? };
                Value::group(limits, key, members)
            });
            Value::list(limits, groups.collect::<Outcome<_>>()?)
        }
        _ => fault(format!("no filter named '{name}'")),
    }
}

fn map(renderer: &Renderer<'_>, value: &Value, mut given: Given) -> Outcome<Value> {
    let limits = renderer.limits;
    let by_attribute = given.positional.is_empty() && given.named.iter().any(|(name, _)| **name == *"attribute");
    let items = if value.is_true() { value.iterate(limits)? } else { Vec::new() };
    let mapped: Vec<Value> = if by_attribute {
        let [attribute, default] = given.bind("map", ["attribute", "default"])?;
        let path = path(attribute.as_ref())?;
        items.iter().map(|item| follow(renderer, item, &path, default.as_ref())).collect::<Outcome<_>>()?
    } else {
        if given.positional.is_empty() {
            return fault("map requires a filter argument");
        }
        let filter = text_of(&given.positional.remove(0), "map")?;
        let apply = |item| filters::apply(renderer, &filter, item, again(renderer, &given)?);
        items.into_iter().map(apply).collect::<Outcome<_>>()?
    };
    Value::stream(limits, mapped)
}

/// Copies the arguments, since each call consumes its arguments.
fn again(renderer: &Renderer<'_>, given: &Given) -> Outcome<Given> {
    renderer.limits.step(given.positional.len() + given.named.len())?;
    renderer.limits.grow((given.positional.len() + given.named.len()) * super::value::ELEMENT)?;
    Ok(given.clone())
}

fn select(renderer: &Renderer<'_>, name: &str, value: &Value, mut given: Given) -> Outcome<Value> {
    let limits = renderer.limits;
    let mut attribute: Path = Vec::new();
    if name.ends_with("attr") {
        if given.positional.is_empty() {
            return fault("Missing parameter for attribute name");
        }
        attribute = path(Some(&given.positional.remove(0)))?;
    }
    let test: Option<Arc<str>> = match given.positional.is_empty() {
        true => None,
        false => Some(text_of(&given.positional.remove(0), name)?),
    };
    let mut kept = Vec::new();
    for item in if value.is_true() { value.iterate(limits)? } else { Vec::new() } {
        let tested = follow(renderer, &item, &attribute, None)?;
        let passes = match &test {
            Some(test) => limits.deeper(|| tests::apply(renderer, test, &tested, again(renderer, &given)?))?,
            None => tested.is_true(),
        };
        if passes == name.starts_with("select") {
            kept.push(item);
        }
    }
    Value::stream(limits, kept)
}

fn batches(
    size: i128,
    items: &[Value],
    fill: Option<&Value>,
    limits: &super::limits::Limits,
) -> Outcome<Vec<Vec<Value>>> {
    // A size that overflows makes a single batch. With size 0, Python's first batch is empty and its second batch has
    // all items.
    let size = match usize::try_from(size) {
        Ok(0) | Err(_) if !items.is_empty() => return fault("a batch has at least one item"),
        Ok(size) => size.max(1),
        Err(_) => 1,
    };
    let mut parts: Vec<Vec<Value>> = items.chunks(size).map(<[Value]>::to_vec).collect();
    if let (Some(last), Some(fill)) = (parts.last_mut(), fill) {
        limits.step(size - last.len())?;
        limits.grow((size - last.len()).saturating_mul(super::value::ELEMENT))?;
        last.resize(size, fill.clone());
    }
    Ok(parts)
}

fn slices(
    count: i128,
    items: &[Value],
    fill: Option<&Value>,
    limits: &super::limits::Limits,
) -> Outcome<Vec<Vec<Value>>> {
    let Some(count) = usize::try_from(count).ok().filter(|&count| count > 0) else {
        return fault("integer division or modulo by zero");
    };
    limits.step(count)?;
    limits.grow(count.saturating_mul(super::value::ELEMENT))?;
    let (size, longer) = (items.len() / count, items.len() % count);
    let mut rest = items;
    Ok((0..count)
        .map(|index| {
            let (part, left) = rest.split_at(size + usize::from(index < longer));
            rest = left;
            let mut part = part.to_vec();
            part.extend(fill.filter(|_| index >= longer).cloned());
            part
        })
        .collect())
}

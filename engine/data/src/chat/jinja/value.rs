//! Values of a template: those of Python that a sandboxed template can create. They are immutable, except for
//! namespaces and loops.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;

use super::limits::{Limits, NESTING, Outcome, fault};
use super::scope::{Loop, Macro};

/// A value.
#[derive(Clone)]
pub(crate) enum Value {
    /// A missing value, and the reason why it is missing.
    Undefined(Rc<str>),
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    /// A string, and whether it is `Markup`, that is, already escaped.
    Str(Arc<str>, bool),
    List(Rc<Items>),
    Tuple(Rc<Items>),
    Dict(Rc<Dict>),
    /// A view of the keys, values or items of a mapping.
    View(View, Rc<Dict>),
    /// Start, end and step.
    Range(i128, i128, i128),
    /// A generator, which yields each value once.
    Stream(Rc<Stream>),
    Namespace(Rc<Namespace>),
    Macro(Rc<Macro>),
    Loop(Rc<Loop>),
    /// A function of the environment.
    Function(&'static str),
    /// A method, bound to its object.
    Method(Rc<(Value, Arc<str>)>),
    Cycler(Rc<(Vec<Value>, Cell<usize>)>),
    Joiner(Rc<(Arc<str>, Cell<bool>)>),
}

/// The part of a mapping that a view shows.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum View {
    Keys,
    Values,
    Items,
}

/// Elements of a list or tuple.
pub(crate) struct Items {
    pub items: Vec<Value>,
    depth: usize,
    /// True for a pair from `groupby`, whose two members have names.
    pub is_group: bool,
}

/// The remaining values of a generator.
pub(crate) struct Stream {
    pub left: RefCell<VecDeque<Value>>,
    depth: usize,
}

/// Variables that a template can change, in the order in which they were first set.
pub(crate) type Namespace = RefCell<Vec<(Arc<str>, Value)>>;

/// A mapping that keeps the order of its keys.
#[derive(Default)]
pub(crate) struct Dict {
    pub entries: Vec<(Value, Value)>,
    places: HashMap<Key, usize>,
    depth: usize,
}

/// A key in the form in which keys are compared: 1, 1.0 and true are the same key.
#[derive(PartialEq, Eq, Hash)]
pub(crate) enum Key {
    None,
    Int(i128),
    Float(u64),
    Str(Arc<str>),
    Tuple(Vec<Key>),
}

/// Bytes that a value takes in a list.
pub(super) const ELEMENT: usize = size_of::<Value>();

/// The most elements of a tuple that is a key, including those nested in it.
const LONGEST_KEY: usize = 1000;

fn depth_over<'a>(items: impl IntoIterator<Item = &'a Value>) -> Outcome<usize> {
    let depth = 1 + items.into_iter().map(Value::depth).max().unwrap_or(0);
    if depth > NESTING {
        return fault(format!("a list or mapping is nested more than {NESTING} deep"));
    }
    Ok(depth)
}

impl Dict {
    /// Returns the value of a key, or `None` if the mapping does not have the key.
    pub fn get(&self, limits: &Limits, key: &Value) -> Outcome<Option<&Value>> {
        limits.scan(key.as_str().map_or("", |text| text))?;
        Ok(self.places.get(&key.key()?).map(|&place| &self.entries[place].1))
    }

    /// Returns the value of a string key, or `None` if the mapping does not have the key.
    pub fn get_str(&self, key: &str) -> Option<&Value> {
        self.places.get(&Key::Str(key.into())).map(|&place| &self.entries[place].1)
    }

    /// Adds an entry, or replaces the value of an existing key.
    pub fn insert(&mut self, key: Value, value: Value) -> Outcome<()> {
        let next = self.entries.len();
        let place = *self.places.entry(key.key()?).or_insert(next);
        self.depth = self.depth.max(depth_over([&key, &value])?);
        match self.entries.get_mut(place) {
            Some(entry) => entry.1 = value,
            None => self.entries.push((key, value)),
        }
        Ok(())
    }

    /// Creates a mapping of these entries.
    pub fn of(limits: &Limits, entries: impl IntoIterator<Item = (Value, Value)>) -> Outcome<Value> {
        let mut dict = Self::default();
        for (key, value) in entries {
            limits.grow(4 * ELEMENT)?;
            limits.scan(key.as_str().map_or("", |text| text))?;
            dict.insert(key, value)?;
        }
        Ok(Value::Dict(Rc::new(dict)))
    }
}

impl Value {
    /// Creates a string.
    pub fn text(text: impl Into<Arc<str>>) -> Self {
        Self::Str(text.into(), false)
    }

    /// Creates a list.
    pub fn list(limits: &Limits, items: Vec<Value>) -> Outcome<Self> {
        Ok(Self::List(Self::items(limits, items)?))
    }

    /// Creates a tuple.
    pub fn tuple(limits: &Limits, items: Vec<Value>) -> Outcome<Self> {
        Ok(Self::Tuple(Self::items(limits, items)?))
    }

    /// Creates a pair of `groupby`: a key and its members.
    pub fn group(limits: &Limits, key: Value, members: Vec<Value>) -> Outcome<Self> {
        let items = vec![key, Self::list(limits, members)?];
        let depth = depth_over(&items)?;
        Ok(Self::Tuple(Rc::new(Items { items, depth, is_group: true })))
    }

    /// Creates a generator.
    pub fn stream(limits: &Limits, items: Vec<Value>) -> Outcome<Self> {
        limits.grow(items.len() * ELEMENT)?;
        let depth = depth_over(&items)?;
        Ok(Self::Stream(Rc::new(Stream { left: RefCell::new(items.into()), depth })))
    }

    fn items(limits: &Limits, items: Vec<Value>) -> Outcome<Rc<Items>> {
        limits.grow(items.len() * ELEMENT)?;
        let depth = depth_over(&items)?;
        Ok(Rc::new(Items { items, depth, is_group: false }))
    }

    /// Creates a missing value, with the reason why it is missing.
    pub fn undefined(reason: impl Into<String>) -> Self {
        Self::Undefined(Rc::from(reason.into()))
    }

    /// The depth of nested lists.
    pub fn depth(&self) -> usize {
        match self {
            Self::List(items) | Self::Tuple(items) => items.depth,
            Self::Dict(dict) | Self::View(_, dict) => dict.depth,
            Self::Stream(stream) => stream.depth,
            Self::Method(method) => method.0.depth(),
            Self::Cycler(cycler) => 1 + cycler.0.iter().map(Self::depth).max().unwrap_or(0),
            Self::Loop(running) => running.depth_of_items(),
            _ => 0,
        }
    }

    /// Returns the name of the value's type in Python.
    pub fn type_name(&self) -> &'static str {
        match self {
            Self::Undefined(_) => "Undefined",
            Self::None => "NoneType",
            Self::Bool(_) => "bool",
            Self::Int(_) => "int",
            Self::Float(_) => "float",
            Self::Str(_, false) => "str",
            Self::Str(_, true) => "Markup",
            Self::List(_) => "list",
            Self::Tuple(_) => "tuple",
            Self::Dict(_) => "dict",
            Self::View(View::Keys, _) => "dict_keys",
            Self::View(View::Values, _) => "dict_values",
            Self::View(View::Items, _) => "dict_items",
            Self::Range(..) => "range",
            Self::Stream(_) => "generator",
            Self::Namespace(_) => "Namespace",
            Self::Macro(_) => "Macro",
            Self::Loop(_) => "LoopContext",
            Self::Function(_) => "function",
            Self::Method(_) => "method",
            Self::Cycler(_) => "Cycler",
            Self::Joiner(_) => "Joiner",
        }
    }

    /// True if the value counts as true in a condition.
    pub fn is_true(&self) -> bool {
        match self {
            Self::Undefined(_) | Self::None => false,
            Self::Bool(value) => *value,
            Self::Int(value) => *value != 0,
            Self::Float(value) => *value != 0.0,
            Self::Str(text, _) => !text.is_empty(),
            Self::Stream(_) => true,
            _ => self.len().is_none_or(|length| length > 0),
        }
    }

    /// Returns the number of elements or characters, or `None` if the value has no length.
    pub fn len(&self) -> Option<usize> {
        match self {
            Self::Undefined(_) => Some(0),
            Self::Str(text, _) => Some(text.chars().count()),
            Self::List(items) | Self::Tuple(items) => Some(items.items.len()),
            Self::Dict(dict) | Self::View(_, dict) => Some(dict.entries.len()),
            Self::Range(start, end, step) => Some(range_len(*start, *end, *step)),
            _ => None,
        }
    }

    /// Returns the elements of the value: the keys of a mapping, the characters of a string, or the remaining values of
    /// a generator.
    pub fn iterate(&self, limits: &Limits) -> Outcome<Vec<Value>> {
        limits.step(1)?;
        if let Some(length) = self.len() {
            limits.step(length)?;
            limits.grow(length * ELEMENT)?;
        }
        Ok(match self {
            Self::Undefined(_) => Vec::new(),
            Self::Str(text, safe) => {
                text.chars().map(|letter| Self::Str(letter.encode_utf8(&mut [0; 4]).into(), *safe)).collect()
            }
            Self::List(items) | Self::Tuple(items) => items.items.clone(),
            Self::Dict(dict) | Self::View(View::Keys, dict) => {
                dict.entries.iter().map(|(key, _)| key.clone()).collect()
            }
            Self::View(View::Values, dict) => dict.entries.iter().map(|(_, value)| value.clone()).collect(),
            Self::View(View::Items, dict) => {
                let pairs =
                    dict.entries.iter().map(|(key, value)| Self::tuple(limits, vec![key.clone(), value.clone()]));
                pairs.collect::<Outcome<_>>()?
            }
            Self::Range(start, end, step) => {
                (0..range_len(*start, *end, *step)).map(|index| Self::Int(start + index as i128 * step)).collect()
            }
            Self::Stream(stream) => stream.left.borrow_mut().drain(..).collect(),
            Self::Loop(_) => return fault("a loop variable cannot be iterated"),
            other => return fault(format!("'{}' object is not iterable", other.type_name())),
        })
    }

    /// Converts the value to the form in which keys are compared. It is an error if the value cannot be a key.
    pub fn key(&self) -> Outcome<Key> {
        let mut left = LONGEST_KEY;
        self.key_within(&mut left)
    }

    fn key_within(&self, left: &mut usize) -> Outcome<Key> {
        let Some(less) = left.checked_sub(1) else {
            return fault(format!("a tuple of more than {LONGEST_KEY} elements is a key; use a text"));
        };
        *left = less;
        Ok(match self {
            Self::None => Key::None,
            Self::Bool(value) => Key::Int(i128::from(*value)),
            Self::Int(value) => Key::Int(*value),
            Self::Float(value) if value.fract() == 0.0 && value.abs() < 1e38 => Key::Int(*value as i128),
            Self::Float(value) => Key::Float(value.to_bits()),
            Self::Str(text, _) => Key::Str(text.clone()),
            Self::Tuple(items) => {
                Key::Tuple(items.items.iter().map(|item| item.key_within(left)).collect::<Outcome<_>>()?)
            }
            other => return fault(format!("unhashable type: '{}'", other.type_name())),
        })
    }

    /// Returns the value as an integer, as far as Python accepts it as one: an integer or a truth value. Otherwise
    /// returns `None`.
    pub fn as_int(&self) -> Option<i128> {
        match self {
            Self::Int(value) => Some(*value),
            Self::Bool(value) => Some(i128::from(*value)),
            _ => None,
        }
    }

    /// Returns a number as a float, or `None` if the value is not a number.
    pub fn as_float(&self) -> Option<f64> {
        match self {
            Self::Float(value) => Some(*value),
            other => other.as_int().map(|value| value as f64),
        }
    }

    /// Returns the value of a mapping's key; `None` if the key is missing or the value is not a mapping.
    pub fn field(&self, name: &str) -> Option<&Self> {
        match self {
            Self::Dict(dict) => dict.get_str(name),
            _ => None,
        }
    }

    /// Returns the string, or `None` if the value is not a string.
    pub fn as_str(&self) -> Option<&Arc<str>> {
        match self {
            Self::Str(text, _) => Some(text),
            _ => None,
        }
    }

    /// Returns the value itself, or an error if it is undefined.
    pub fn defined(&self) -> Outcome<&Self> {
        match self {
            Self::Undefined(reason) => fault(&**reason),
            value => Ok(value),
        }
    }
}

/// Number of elements of a range.
pub(super) fn range_len(start: i128, end: i128, step: i128) -> usize {
    let (from, to, by) = if step > 0 { (start, end, step) } else { (end, start, -step) };
    if to <= from { 0 } else { usize::try_from((to - from - 1) / by + 1).unwrap_or(usize::MAX) }
}

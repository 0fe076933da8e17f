//! Variables of a template: nested scopes, macros with their scopes, and loops.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;

use super::ast::{For, MacroNode};
use super::limits::Outcome;
use super::render::Renderer;
use super::value::{Items, Stream, Value};

/// The variables of a scope, which shadow those of the enclosing scope.
#[derive(Default)]
pub(crate) struct Scope {
    variables: RefCell<Vec<(Arc<str>, Value)>>,
    around: Option<Rc<Scope>>,
}

impl Scope {
    /// Creates a scope within another.
    pub fn within(around: &Rc<Scope>) -> Rc<Self> {
        Rc::new(Self { variables: RefCell::default(), around: Some(around.clone()) })
    }

    /// Returns the outermost scope around `scope`, that of the template itself.
    pub fn outermost(scope: &Rc<Scope>) -> Rc<Self> {
        let mut scope = scope;
        while let Some(around) = &scope.around {
            scope = around;
        }
        scope.clone()
    }

    pub fn set(&self, name: &Arc<str>, value: Value) {
        let mut variables = self.variables.borrow_mut();
        match variables.iter_mut().find(|(known, _)| known == name) {
            Some(variable) => variable.1 = value,
            None => variables.push((name.clone(), value)),
        }
    }

    pub fn get(&self, name: &str) -> Option<Value> {
        let mut scope = self;
        loop {
            if let Some((_, value)) = scope.variables.borrow().iter().find(|(known, _)| **known == *name) {
                return Some(value.clone());
            }
            scope = scope.around.as_deref()?;
        }
    }

    /// Number of variables in this scope.
    pub fn size(&self) -> usize {
        self.variables.borrow().len()
    }

    /// Drops all variables, including those that refer to the scope itself.
    pub fn clear(&self) {
        drop(self.variables.take());
    }
}

/// A macro, or the body of a call block.
pub(crate) struct Macro {
    pub node: Arc<MacroNode>,
    pub scope: Rc<Scope>,
}

/// A loop in progress.
pub(crate) struct Loop {
    pub node: Arc<For>,
    /// The enclosing scope.
    pub scope: Rc<Scope>,
    /// Number of recursive loops around this loop.
    pub depth0: usize,
    depth_of_items: usize,
    state: RefCell<State>,
}

struct State {
    source: Source,
    index0: i128,
    length: Option<usize>,
    before: Option<Value>,
    current: Option<Value>,
    /// The next item, if it was already fetched. `Some(None)` means that there is no next item.
    after: Option<Option<Value>>,
    changed: Option<Vec<Value>>,
}

enum Source {
    /// Items that have already passed the loop's condition.
    Passed(VecDeque<Value>),
    Items(Rc<Items>, usize),
    Stream(Rc<Stream>),
    Queue(VecDeque<Value>),
}

impl Source {
    fn next(&mut self) -> Option<Value> {
        match self {
            Self::Items(items, next) => {
                *next += 1;
                items.items.get(*next - 1).cloned()
            }
            Self::Stream(stream) => stream.left.borrow_mut().pop_front(),
            Self::Queue(queue) | Self::Passed(queue) => queue.pop_front(),
        }
    }
}

impl Loop {
    pub fn new(
        renderer: &Renderer<'_>,
        node: &Arc<For>,
        scope: &Rc<Scope>,
        over: &Value,
        depth0: usize,
    ) -> Outcome<Self> {
        let source = match over {
            Value::List(items) | Value::Tuple(items) => Source::Items(items.clone(), 0),
            Value::Stream(stream) => Source::Stream(stream.clone()),
            other => Source::Queue(other.iterate(renderer.limits)?.into()),
        };
        let length = if node.condition.is_none() { over.len() } else { None };
        let state = State { source, index0: -1, length, before: None, current: None, after: None, changed: None };
        let (node, scope) = (node.clone(), scope.clone());
        Ok(Self { node, scope, depth0, depth_of_items: 1 + over.depth(), state: RefCell::new(state) })
    }

    pub fn depth_of_items(&self) -> usize {
        self.depth_of_items
    }

    pub fn index0(&self) -> i128 {
        self.state.borrow().index0
    }

    pub fn known_length(&self) -> Option<usize> {
        self.state.borrow().length
    }

    /// Fetches the next item that passes the loop's condition, or `None` after the last item.
    fn pull(&self, renderer: &Renderer<'_>) -> Outcome<Option<Value>> {
        loop {
            renderer.limits.step(1)?;
            let (item, passed) = {
                let source = &mut self.state.borrow_mut().source;
                (source.next(), matches!(source, Source::Passed(_)))
            };
            let condition = self.node.condition.as_ref().filter(|_| !passed);
            let (Some(item), Some(condition)) = (&item, condition) else { return Ok(item) };
            let scope = Scope::within(&self.scope);
            renderer.assign(&self.node.target, item.clone(), &scope)?;
            if renderer.value(condition, &scope)?.is_true() {
                return Ok(Some(item.clone()));
            }
        }
    }

    /// Moves on to the next item and returns the item, or `None` after the last item.
    pub fn advance(&self, renderer: &Renderer<'_>) -> Outcome<Option<Value>> {
        let after = self.state.borrow_mut().after.take();
        let item = match after {
            Some(after) => after,
            None => self.pull(renderer)?,
        };
        let mut state = self.state.borrow_mut();
        if item.is_some() {
            state.index0 += 1;
            state.before = state.current.take();
            state.current.clone_from(&item);
        }
        Ok(item)
    }

    /// Returns the item after the current one, or `None` if the current item is the last.
    pub fn peek(&self, renderer: &Renderer<'_>) -> Outcome<Option<Value>> {
        if let Some(after) = &self.state.borrow().after {
            return Ok(after.clone());
        }
        let after = self.pull(renderer)?;
        self.state.borrow_mut().after = Some(after.clone());
        Ok(after)
    }

    /// Returns the number of items. To count the items of a filtered loop or a generator, all of them are fetched.
    pub fn length(&self, renderer: &Renderer<'_>) -> Outcome<usize> {
        if let Some(length) = self.known_length() {
            return Ok(length);
        }
        let mut queue = VecDeque::new();
        while let Some(item) = self.pull(renderer)? {
            renderer.limits.grow(super::value::ELEMENT)?;
            queue.push_back(item);
        }
        let mut state = self.state.borrow_mut();
        let looked_at = usize::from(matches!(state.after, Some(Some(_))));
        let length = queue.len() + usize::try_from(state.index0 + 1).unwrap_or(0) + looked_at;
        state.length = Some(length);
        state.source = Source::Passed(queue);
        Ok(length)
    }

    pub fn previous(&self) -> Option<Value> {
        self.state.borrow().before.clone()
    }

    /// True if the values differ from those of the last call, or if this is the first call.
    pub fn changed(&self, renderer: &Renderer<'_>, values: Vec<Value>) -> Outcome<bool> {
        let last = self.state.borrow_mut().changed.replace(values.clone());
        let Some(last) = last.filter(|last| last.len() == values.len()) else { return Ok(true) };
        for (a, b) in last.iter().zip(&values) {
            if !super::operators::equal(renderer.limits, a, b)? {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

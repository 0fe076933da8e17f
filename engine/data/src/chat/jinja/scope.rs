//! Variables of a template: scopes within each other, macros that remember theirs, and loops.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;

use super::ast::{For, MacroNode};
use super::limits::Outcome;
use super::render::Renderer;
use super::value::{Items, Stream, Value};

/// Variables, in front of those of the scope around them.
#[derive(Default)]
pub(crate) struct Scope {
    variables: RefCell<Vec<(Arc<str>, Value)>>,
    around: Option<Rc<Scope>>,
}

impl Scope {
    /// A scope within another.
    pub fn within(around: &Rc<Scope>) -> Rc<Self> {
        Rc::new(Self { variables: RefCell::default(), around: Some(around.clone()) })
    }

    /// The scope of the template.
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

    /// How many variables there are.
    pub fn size(&self) -> usize {
        self.variables.borrow().len()
    }

    /// Forgets all variables, those that refer to the scope itself among them.
    pub fn clear(&self) {
        drop(self.variables.take());
    }
}

/// A macro, or the body of a call block.
pub(crate) struct Macro {
    pub node: Arc<MacroNode>,
    pub scope: Rc<Scope>,
}

/// A loop that is under way.
pub(crate) struct Loop {
    pub node: Arc<For>,
    /// The scope around it.
    pub scope: Rc<Scope>,
    /// Recursive loops around it.
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
    /// The next item, where it was looked at already; nothing within is the end.
    after: Option<Option<Value>>,
    changed: Option<Vec<Value>>,
}

enum Source {
    /// What the condition has let pass already.
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

    /// The next item that the loop's condition lets pass.
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

    /// Goes on to the next item.
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

    /// The item behind the present one.
    pub fn peek(&self, renderer: &Renderer<'_>) -> Outcome<Option<Value>> {
        if let Some(after) = &self.state.borrow().after {
            return Ok(after.clone());
        }
        let after = self.pull(renderer)?;
        self.state.borrow_mut().after = Some(after.clone());
        Ok(after)
    }

    /// The number of items; of a filtered loop, and of one over a generator, all are looked at.
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

    /// Whether values are other ones than at the last call.
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

//! Renders the statements of a template.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

use super::access;
use super::ast::{Body, Expr, For, Kind, MacroNode, Target};
use super::call::Given;
use super::limits::{Fault, Limits, Outcome, fault};
use super::print::{Text, str_of, write_repr};
use super::scope::{Loop, Macro, Scope};
use super::value::{Dict, Namespace, Value};

/// A rendering in progress.
pub(crate) struct Renderer<'a> {
    pub limits: &'a Limits,
    out: RefCell<String>,
    /// Number of captures that the current output is inside of: macros, and `set`, `call` and `filter` blocks.
    captures: Cell<usize>,
    /// Length of the output in bytes when the outermost capture began.
    outermost: Cell<usize>,
    /// The captured texts of the filter and set blocks in progress.
    captured: RefCell<Vec<Value>>,
    answers: RefCell<Vec<Answer>>,
    /// Scopes that may refer to themselves. They are cleared at the end of the rendering, so that they are freed.
    scopes: RefCell<Vec<Rc<Scope>>>,
    /// Namespaces that may refer to themselves. They are cleared at the end of the rendering, so that they are freed.
    namespaces: RefCell<Vec<Rc<Namespace>>>,
}

/// The text of a generation block, and its position in the output.
pub(crate) struct Answer {
    pub start: usize,
    pub text: String,
}

/// The effect of a statement on the loop around it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Flow {
    On,
    Break,
    Continue,
}

impl<'a> Renderer<'a> {
    pub fn new(limits: &'a Limits) -> Self {
        Self {
            limits,
            out: RefCell::default(),
            captures: Cell::new(0),
            outermost: Cell::new(0),
            captured: RefCell::default(),
            answers: RefCell::default(),
            scopes: RefCell::default(),
            namespaces: RefCell::default(),
        }
    }

    /// Renders a template. Returns the text, and the answers within the text.
    pub fn run(&self, body: &Body, variables: Vec<(Arc<str>, Value)>) -> Outcome<(String, Vec<Answer>)> {
        let scope = Rc::new(Scope::default());
        variables.into_iter().for_each(|(name, value)| scope.set(&name, value));
        let result = self.body(body, &scope);
        self.scopes.take().iter().chain([&scope]).for_each(|scope| scope.clear());
        // All namespaces are kept alive until each is empty, so that a long chain of them is not dropped recursively.
        let namespaces = self.namespaces.take();
        namespaces.iter().for_each(|namespace| drop(namespace.take()));
        result?;
        Ok((self.out.take(), self.answers.take()))
    }

    fn write(&self, text: &str) -> Outcome<()> {
        self.limits.grow(text.len())?;
        self.out.borrow_mut().push_str(text);
        Ok(())
    }

    /// Calls `run` and returns the text that it has written.
    fn capture<T>(&self, run: impl FnOnce() -> Outcome<T>) -> Outcome<(String, T)> {
        let outer = self.out.take();
        if self.captures.get() == 0 {
            self.outermost.set(outer.len());
        }
        self.captures.set(self.captures.get() + 1);
        let result = run();
        self.captures.set(self.captures.get() - 1);
        let text = self.out.replace(outer);
        Ok((text, result?))
    }

    pub fn keep_scope(&self, scope: &Rc<Scope>) -> Outcome<()> {
        self.limits.grow(64)?;
        self.scopes.borrow_mut().push(scope.clone());
        Ok(())
    }

    /// Creates a namespace with these variables.
    pub fn namespace(&self, variables: Vec<(Arc<str>, Value)>) -> Outcome<Value> {
        self.limits.grow(64 * (1 + variables.len()))?;
        let namespace = Rc::new(RefCell::new(variables));
        self.namespaces.borrow_mut().push(namespace.clone());
        Ok(Value::Namespace(namespace))
    }

    fn body(&self, body: &Body, scope: &Rc<Scope>) -> Outcome<Flow> {
        for statement in body {
            let run = || self.limits.deeper(|| self.statement(&statement.kind, scope));
            let with_line = |fault: Fault| Fault { line: fault.line.or(Some(statement.line)), ..fault };
            match run().map_err(with_line)? {
                Flow::On => {}
                flow => return Ok(flow),
            }
        }
        Ok(Flow::On)
    }

    fn statement(&self, kind: &Kind, scope: &Rc<Scope>) -> Outcome<Flow> {
        self.limits.step(1)?;
        match kind {
            Kind::Text(text) => self.write(text)?,
            Kind::Print(value) => match self.value(value, scope)? {
                Value::Str(text, _) => self.write(&text)?,
                Value::Undefined(_) => {}
                value => {
                    let mut out = Text::new(self.limits);
                    write_repr(&mut out, &value)?;
                    self.write(&out.text)?;
                }
            },
            Kind::For(node) => {
                let over = self.value(&node.over, scope)?;
                if !node.is_recursive {
                    return self.for_loop(node, scope, &over, 0);
                }
                let text = self.capture(|| self.for_loop(node, scope, &over, 0))?.0;
                self.write(&text)?;
            }
            Kind::If(branches, otherwise) => {
                for (condition, body) in branches {
                    if self.value(condition, scope)?.is_true() {
                        return self.body(body, scope);
                    }
                }
                return self.body(otherwise, scope);
            }
            Kind::Set(target, value) => self.assign(target, self.value(value, scope)?, scope)?,
            Kind::SetBlock(target, filter, body) => {
                let text = self.capture(|| self.body(body, &Scope::within(scope)))?.0;
                let value = match filter {
                    Some(filter) => self.filtered(filter, text, scope)?,
                    None => Value::text(text),
                };
                self.assign(target, value, scope)?;
            }
            Kind::Macro(node) => {
                scope.set(&node.name, self.macro_value(node, scope)?);
            }
            Kind::Call(call, node) => {
                let caller = self.macro_value(node, scope)?;
                let value = self.call_with(call, scope, Some(caller))?;
                self.write(&str_of(self.limits, &value)?)?;
            }
            Kind::Filter(filter, body) => {
                let text = self.capture(|| self.body(body, &Scope::within(scope)))?.0;
                let value = self.filtered(filter, text, scope)?;
                self.write(&str_of(self.limits, &value)?)?;
            }
            Kind::With(values, body) => {
                let within = Scope::within(scope);
                for (target, value) in values {
                    self.assign(target, self.value(value, scope)?, &within)?;
                }
                return self.body(body, &within);
            }
            Kind::Block { is_scoped, body } => {
                let around = if *is_scoped { scope.clone() } else { Scope::outermost(scope) };
                self.body(body, &Scope::within(&around))?;
            }
            Kind::Generation(body) => {
                let (text, _) = self.capture(|| self.body(body, &Scope::within(scope)))?;
                let is_captured = self.captures.get() > 0;
                let start = if is_captured { self.outermost.get() } else { self.out.borrow().len() };
                self.write(&text)?;
                self.answers.borrow_mut().push(Answer { start, text });
            }
            Kind::Break => return Ok(Flow::Break),
            Kind::Continue => return Ok(Flow::Continue),
        }
        Ok(Flow::On)
    }

    /// Applies filters to a captured text.
    fn filtered(&self, filter: &Expr, text: String, scope: &Rc<Scope>) -> Outcome<Value> {
        self.captured.borrow_mut().push(Value::text(text));
        let value = self.value(filter, scope);
        self.captured.borrow_mut().pop();
        value
    }

    /// The captured text of the innermost filter or set block.
    pub fn captured(&self) -> Value {
        self.captured.borrow().last().cloned().expect("filters of a block have its text")
    }

    fn macro_value(&self, node: &Arc<MacroNode>, scope: &Rc<Scope>) -> Outcome<Value> {
        self.keep_scope(scope)?;
        Ok(Value::Macro(Rc::new(Macro { node: node.clone(), scope: scope.clone() })))
    }

    fn for_loop(&self, node: &Arc<For>, scope: &Rc<Scope>, over: &Value, depth0: usize) -> Outcome<Flow> {
        let state = Rc::new(Loop::new(self, node, scope, over, depth0)?);
        let name: Arc<str> = "loop".into();
        let mut any = false;
        while let Some(item) = state.advance(self)? {
            any = true;
            let within = Scope::within(scope);
            within.set(&name, Value::Loop(state.clone()));
            self.assign(&node.target, item, &within)?;
            if self.body(&node.body, &within)? == Flow::Break {
                break;
            }
        }
        if any { Ok(Flow::On) } else { self.body(&node.otherwise, &Scope::within(scope)) }
    }

    /// Calls a recursive loop with other items, and returns its text.
    pub fn call_loop(&self, running: &Loop, given: Given) -> Outcome<Value> {
        let [over] = given.require("loop", ["iterable"])?;
        if !running.node.is_recursive {
            return fault("The loop must have the 'recursive' marker to be called recursively.");
        }
        let text = self.capture(|| self.for_loop(&running.node, &running.scope, &over, running.depth0 + 1))?.0;
        Ok(Value::text(text))
    }

    /// Calls a macro, and returns its text.
    pub fn call_macro(&self, callee: &Macro, given: Given, caller: Option<Value>) -> Outcome<Value> {
        let MacroNode { name, parameters, body, uses } = &*callee.node;
        let Given { positional, mut named } = given;
        let scope = Scope::within(&callee.scope);
        let mut positional = positional.into_iter();
        for (parameter, default) in parameters {
            let by_name = named.iter().position(|(given, _)| given == parameter).map(|index| named.remove(index).1);
            let value = match (positional.next(), by_name, default) {
                (Some(_), Some(_), _) => return fault(format!("macro '{name}' got two values for '{parameter}'")),
                (Some(value), None, _) | (None, Some(value), _) => value,
                (None, None, Some(default)) => self.value(default, &scope)?,
                (None, None, None) => Value::undefined(format!("parameter '{parameter}' was not provided")),
            };
            scope.set(parameter, value);
        }
        let mut caller = caller;
        if let Some(index) = named.iter().position(|(name, _)| **name == *"caller") {
            caller = caller.or(Some(named.remove(index).1));
        }
        match caller {
            Some(caller) if uses.caller => scope.set(&"caller".into(), caller),
            Some(_) => return fault(format!("macro '{name}' takes no keyword argument 'caller'")),
            None if uses.caller => scope.set(&"caller".into(), Value::undefined("No caller defined")),
            None => {}
        }
        let rest: Vec<Value> = positional.collect();
        if uses.varargs {
            scope.set(&"varargs".into(), Value::tuple(self.limits, rest)?);
        } else if !rest.is_empty() {
            return fault(format!("macro '{name}' takes not more than {} argument(s)", parameters.len()));
        }
        if uses.kwargs {
            let entries = named.into_iter().map(|(name, value)| (Value::text(name), value));
            scope.set(&"kwargs".into(), Dict::of(self.limits, entries)?);
        } else if let Some((argument, _)) = named.first() {
            return fault(format!("macro '{name}' takes no keyword argument '{argument}'"));
        }
        Ok(Value::text(self.capture(|| self.body(body, &scope))?.0))
    }

    /// Assigns a value to a target.
    pub fn assign(&self, target: &Target, value: Value, scope: &Rc<Scope>) -> Outcome<()> {
        match target {
            Target::Name(name) => {
                self.limits.step(scope.size() / 8)?;
                scope.set(name, value);
            }
            Target::Attribute(name, attribute) => match scope.get(name) {
                Some(Value::Namespace(namespace)) => access::set(self.limits, &namespace, attribute, value)?,
                _ => return fault("cannot assign attribute on non-namespace object"),
            },
            Target::Tuple(targets) => {
                let items = value.defined()?.iterate(self.limits)?;
                if items.len() != targets.len() {
                    return fault(format!("{} values to unpack into {} variables", items.len(), targets.len()));
                }
                for (target, item) in targets.iter().zip(items) {
                    self.assign(target, item, scope)?;
                }
            }
        }
        Ok(())
    }
}

//! Evaluates expressions.

use std::rc::Rc;
use std::sync::Arc;

use super::ast::{Arguments, Comparison, Expr};
use super::call::Given;
use super::limits::{Outcome, PARAMETERS, fault};
use super::operators::{binary, compare, contains, equal, negative, positive};
use super::print::{Text, write_str};
use super::render::Renderer;
use super::scope::Scope;
use super::value::{Dict, Value};
use super::{access, filters, functions, tests};

impl Renderer<'_> {
    /// Evaluates an expression.
    pub fn value(&self, expr: &Expr, scope: &Rc<Scope>) -> Outcome<Value> {
        self.limits.step(1)?;
        self.limits.deeper(|| self.evaluate(expr, scope))
    }

    fn values(&self, exprs: &[Expr], scope: &Rc<Scope>) -> Outcome<Vec<Value>> {
        exprs.iter().map(|expr| self.value(expr, scope)).collect()
    }

    fn evaluate(&self, expr: &Expr, scope: &Rc<Scope>) -> Outcome<Value> {
        Ok(match expr {
            Expr::None => Value::None,
            Expr::Bool(value) => Value::Bool(*value),
            Expr::Int(value) => Value::Int(*value),
            Expr::Float(value) => Value::Float(*value),
            Expr::Str(text) => Value::text(text.clone()),
            Expr::Name(name) => self.variable(name, scope)?,
            Expr::Captured => self.captured(),
            Expr::List(items) => Value::list(self.limits, self.values(items, scope)?)?,
            Expr::Tuple(items) => Value::tuple(self.limits, self.values(items, scope)?)?,
            Expr::Dict(entries) => {
                let entries =
                    entries.iter().map(|(key, value)| Ok((self.value(key, scope)?, self.value(value, scope)?)));
                Dict::of(self.limits, entries.collect::<Outcome<Vec<_>>>()?)?
            }
            Expr::Attribute(target, name) => access::attribute(self, &self.value(target, scope)?, name)?,
            Expr::Item(target, item) => match &**item {
                Expr::Slice(parts) => {
                    let value = self.value(target, scope)?;
                    let part = |part: &Option<Expr>| part.as_ref().map(|part| self.value(part, scope)).transpose();
                    let [start, end, step] = &**parts;
                    access::slice(self, &value, [part(start)?, part(end)?, part(step)?])?
                }
                item => access::item(self, &self.value(target, scope)?, &self.value(item, scope)?)?,
            },
            Expr::Slice(_) => return fault("slices within a tuple of indices are not supported"),
            Expr::Call(..) => self.call_with(expr, scope, None)?,
            Expr::Filter(target, name, arguments) => {
                let value = self.value(target, scope)?;
                filters::apply(self, name, value, self.given(arguments, scope)?)?
            }
            Expr::Test(target, name, arguments) => {
                let value = self.value(target, scope)?;
                Value::Bool(tests::apply(self, name, &value, self.given(arguments, scope)?)?)
            }
            Expr::Not(value) => Value::Bool(!self.value(value, scope)?.is_true()),
            Expr::Negative(value) => negative(&self.value(value, scope)?)?,
            Expr::Positive(value) => positive(&self.value(value, scope)?)?,
            Expr::And(left, right) => {
                let left = self.value(left, scope)?;
                if left.is_true() { self.value(right, scope)? } else { left }
            }
            Expr::Or(left, right) => {
                let left = self.value(left, scope)?;
                if left.is_true() { left } else { self.value(right, scope)? }
            }
            Expr::Binary(operator, left, right) => {
                binary(self, *operator, &self.value(left, scope)?, &self.value(right, scope)?)?
            }
            Expr::Concat(parts) => {
                let mut out = Text::new(self.limits);
                for part in self.values(parts, scope)? {
                    write_str(&mut out, &part)?;
                }
                Value::text(out.text)
            }
            Expr::Compare(first, others) => {
                let mut left = self.value(first, scope)?;
                let mut holds = true;
                for (comparison, right) in others {
                    let right = self.value(right, scope)?;
                    holds = self.compared(*comparison, &left, &right)?;
                    if !holds {
                        break;
                    }
                    left = right;
                }
                Value::Bool(holds)
            }
            Expr::If(condition, value, otherwise) => match (self.value(condition, scope)?.is_true(), otherwise) {
                (true, _) => self.value(value, scope)?,
                (false, Some(otherwise)) => self.value(otherwise, scope)?,
                (false, None) => {
                    Value::undefined("the inline if-expression evaluated to false and no else section was defined.")
                }
            },
        })
    }

    /// Evaluates a comparison.
    pub fn compared(&self, comparison: Comparison, left: &Value, right: &Value) -> Outcome<bool> {
        match comparison {
            Comparison::Eq => equal(self.limits, left, right),
            Comparison::Ne => Ok(!equal(self.limits, left, right)?),
            Comparison::In => contains(self, right, left),
            Comparison::NotIn => Ok(!contains(self, right, left)?),
            Comparison::Lt => Ok(compare(self.limits, left, right, "<")?.is_some_and(|order| order.is_lt())),
            Comparison::Le => Ok(compare(self.limits, left, right, "<=")?.is_some_and(|order| order.is_le())),
            Comparison::Gt => Ok(compare(self.limits, left, right, ">")?.is_some_and(|order| order.is_gt())),
            Comparison::Ge => Ok(compare(self.limits, left, right, ">=")?.is_some_and(|order| order.is_ge())),
        }
    }

    fn variable(&self, name: &Arc<str>, scope: &Rc<Scope>) -> Outcome<Value> {
        self.limits.step(scope.size() / 8)?;
        match scope.get(name) {
            Some(value) => Ok(value),
            None if **name == *"self" => fault("blocks by name (self) are not supported"),
            None => Ok(functions::find(name)
                .map_or_else(|| Value::undefined(format!("'{name}' is undefined")), Value::Function)),
        }
    }

    fn given(&self, arguments: &Arguments, scope: &Rc<Scope>) -> Outcome<Given> {
        let mut positional = self.values(&arguments.positional, scope)?;
        let named = arguments.named.iter().map(|(name, value)| Ok((name.clone(), self.value(value, scope)?)));
        let mut named: Vec<(Arc<str>, Value)> = named.collect::<Outcome<_>>()?;
        if let Some(rest) = &arguments.rest {
            positional.extend(self.value(rest, scope)?.iterate(self.limits)?);
        }
        if let Some(rest) = &arguments.named_rest {
            let Value::Dict(dict) = self.value(rest, scope)? else {
                return fault("argument after ** must be a mapping");
            };
            if dict.entries.len() > PARAMETERS {
                return fault(format!("a call gets more than {PARAMETERS} named arguments"));
            }
            for (key, value) in &dict.entries {
                let Some(key) = key.as_str() else { return fault("keywords must be strings") };
                if named.iter().any(|(name, _)| name == key) {
                    return fault(format!("got multiple values for keyword argument '{key}'"));
                }
                named.push((key.clone(), value.clone()));
            }
        }
        Ok(Given { positional, named })
    }

    /// Calls a macro. In the macro, the variable `caller` has the given value.
    pub fn call_with(&self, call: &Expr, scope: &Rc<Scope>, caller: Option<Value>) -> Outcome<Value> {
        let Expr::Call(target, arguments) = call else { return fault("expected a call") };
        let callee = self.value(target, scope)?;
        let given = self.given(arguments, scope)?;
        match (callee.defined()?, caller) {
            (Value::Macro(macro_value), caller) => self.call_macro(macro_value, given, caller),
            (_, Some(_)) => fault("a call block takes a macro"),
            (Value::Loop(running), _) => self.call_loop(running, given),
            (Value::Function(name), _) => functions::call(self, name, given),
            (Value::Method(method), _) => access::call_method(self, &method.0, &method.1, given),
            (Value::Joiner(joiner), _) => {
                given.bind::<0>("joiner", [])?;
                Ok(Value::text(if joiner.1.replace(true) { joiner.0.clone() } else { "".into() }))
            }
            (other, _) => fault(format!("'{}' object is not callable", other.type_name())),
        }
    }
}

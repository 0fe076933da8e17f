//! Arguments of a call, and their binding to parameters.

use std::sync::Arc;

use super::limits::{Outcome, fault};
use super::value::Value;

/// Evaluated arguments.
#[derive(Clone, Default)]
pub(crate) struct Given {
    pub positional: Vec<Value>,
    pub named: Vec<(Arc<str>, Value)>,
}

impl Given {
    /// Returns the value of each parameter, or `None` for a parameter that was not given. It is an error if other
    /// arguments were given.
    pub fn bind<const N: usize>(self, function: &str, parameters: [&str; N]) -> Outcome<[Option<Value>; N]> {
        let count = self.positional.len();
        if count > N {
            return fault(format!("{function} takes at most {N} arguments ({count} given)"));
        }
        let mut values = [const { None }; N];
        for (slot, value) in values.iter_mut().zip(self.positional) {
            *slot = Some(value);
        }
        for (name, value) in self.named {
            match parameters.iter().position(|parameter| **parameter == *name) {
                None => return fault(format!("{function} got an unexpected keyword argument '{name}'")),
                Some(index) if index < count => {
                    return fault(format!("{function} got multiple values for argument '{name}'"));
                }
                Some(index) => values[index] = Some(value),
            }
        }
        Ok(values)
    }

    /// Returns the value of each parameter. It is an error if one was not given.
    pub fn require<const N: usize>(self, function: &str, parameters: [&str; N]) -> Outcome<[Value; N]> {
        let values = self.bind(function, parameters)?;
        match values.iter().position(Option::is_none) {
            Some(index) => fault(format!("{function} is missing the argument '{}'", parameters[index])),
            None => Ok(values.map(|value| value.expect("all are there"))),
        }
    }
}

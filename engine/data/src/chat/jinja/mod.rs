//! Jinja templates, as transformers renders them.
//!
//! In: the source of a template, and the variables that it is given, as JSON. Out: its text, to the character that of Jinja 3.1's
//! `ImmutableSandboxedEnvironment` with `trim_blocks`, `lstrip_blocks`, loop controls and transformers' own functions, and the parts
//! of it within `{% generation %}` blocks. Values are printed, compared and formatted as Python does it. Never: a rendering beyond the
//! [limits](limits::Limits) of work, memory and depth, nor another text where something is not supported, which is an error.
//!
//! | file | what |
//! |---|---|
//! | `lexer`, `parser`, `expressions`, `ast` | source to tokens to a tree |
//! | `render`, `eval`, `scope` | statements to text, expressions to values, variables |
//! | `value`, `operators`, `access` | values, and what can be done with all of them |
//! | `strings`, `format`, `numbers`, `print`, `json` | texts |
//! | `filters`, `sequences`, `tests`, `functions`, `call` | Jinja's own, by name, and their arguments |
//! | `limits` | what a rendering may take |

mod access;
mod ast;
mod call;
mod eval;
mod expressions;
mod filters;
mod format;
mod functions;
mod json;
mod lexer;
mod limits;
mod numbers;
mod operators;
mod parser;
mod print;
mod render;
mod scope;
mod sequences;
mod strings;
mod tests;
mod value;

use std::ops::Range;
use std::sync::Arc;
use std::thread;

use limits::{Fault, Limits, Outcome, STACK, fault};
use render::Renderer;

pub(crate) use value::Value;

/// Bytes of a template's source.
const LONGEST: usize = 1 << 20;

/// A template that was read.
#[derive(Debug)]
pub(crate) struct Template {
    body: ast::Body,
    /// Whether it has generation blocks.
    pub marks_answers: bool,
}

/// The variables of a rendering, from JSON texts.
pub(crate) struct Variables<'a> {
    limits: &'a Limits,
    variables: Vec<(Arc<str>, Value)>,
}

impl Variables<'_> {
    /// The value of a JSON text.
    pub fn parse(&self, json: &str) -> Result<Value, String> {
        json::parse(self.limits, json).map_err(|fault| fault.reason)
    }

    /// A list of these values.
    pub fn list(&self, items: Vec<Value>) -> Result<Value, String> {
        Value::list(self.limits, items).map_err(|fault| fault.reason)
    }

    /// A mapping of these entries, of which the last of each key counts.
    pub fn dict(&self, entries: impl IntoIterator<Item = (Value, Value)>) -> Result<Value, String> {
        value::Dict::of(self.limits, entries).map_err(|fault| fault.reason)
    }

    /// Sets a variable, in place of what it was.
    pub fn set(&mut self, name: &str, value: Value) {
        self.variables.retain(|(known, _)| **known != *name);
        self.variables.push((name.into(), value));
    }
}

impl Template {
    /// Reads a template's source.
    ///
    /// # Errors
    /// What Jinja refuses, and where.
    pub fn parse(source: &str) -> Result<Self, String> {
        if source.len() > LONGEST {
            return Err(format!("the template has {} bytes; at most {LONGEST} are read", source.len()));
        }
        on_own_stack(|| parser::parse(source)).map(|(body, marks_answers)| Self { body, marks_answers })
    }

    /// The text of the template, and the bytes of it that generation blocks have made.
    ///
    /// # Errors
    /// What the template raises; what it may not take; what is not supported.
    pub fn render(
        &self,
        input_bytes: usize,
        set: impl FnOnce(&mut Variables<'_>) -> Result<(), String> + Send,
    ) -> Result<(String, Vec<Range<usize>>), String> {
        on_own_stack(|| {
            let limits = Limits::new(input_bytes);
            let mut variables = Variables { limits: &limits, variables: Vec::new() };
            set(&mut variables).or_else(fault)?;
            let variables = variables.variables;
            let (text, answers) = Renderer::new(&limits).run(&self.body, variables)?;
            let mut spans = Vec::with_capacity(answers.len());
            for answer in answers {
                let span = answer.start..answer.start + answer.text.len();
                // Within a macro or a filter, only the start of what it makes is known.
                if text.get(span.clone()) != Some(&*answer.text) {
                    return fault(
                        "{% generation %} is inside a macro or a captured block, so the place of its text in the output is \
                         unknown; put it around the call",
                    );
                }
                spans.push(span);
            }
            Ok((text, spans))
        })
    }
}

/// Runs something on a stack that is large enough for the depths that [`limits`] allows.
fn on_own_stack<T: Send>(run: impl FnOnce() -> Outcome<T> + Send) -> Result<T, String> {
    let place = |fault: Fault| match fault.line {
        Some(line) => format!("line {line}: {}", fault.reason),
        None => fault.reason,
    };
    thread::scope(|scope| {
        let thread = thread::Builder::new().name("template".into()).stack_size(STACK).spawn_scoped(scope, run);
        let thread = thread.map_err(|error| format!("cannot start a thread to render on: {error}"))?;
        thread
            .join()
            .map_err(|_| "internal error of the renderer; please report the template".to_owned())?
            .map_err(place)
    })
}

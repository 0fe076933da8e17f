//! Jinja templates, rendered as transformers does.
//!
//! In: the source of a template, and its variables as JSON. Out: its text, and the parts of it within `{% generation
//! %}` blocks. The text equals, character for character, that of Jinja 3.1's `ImmutableSandboxedEnvironment` with
//! `trim_blocks`, `lstrip_blocks`, loop controls and transformers' own functions. Values are printed, compared and
//! formatted as in Python. Never: a rendering beyond the [limits](limits::Limits) of work, memory and depth, or a
//! different text because of an unsupported feature. An unsupported feature is an error.
//!
//! | file | what |
//! |---|---|
//! | `lexer`, `parser`, `expressions`, `ast` | from source to tokens to a tree |
//! | `render`, `eval`, `scope` | from statements to text and from expressions to values; variables |
//! | `value`, `operators`, `access` | values, and the operations that all of them share |
//! | `strings`, `format`, `numbers`, `print`, `json` | strings |
//! | `filters`, `sequences`, `tests`, `functions`, `call` | Jinja's own operations by name, and their arguments |
//! | `limits` | the limits of a rendering |

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

/// The most bytes of a template's source.
const LONGEST: usize = 1 << 20;

/// A parsed template.
#[derive(Debug)]
pub(crate) struct Template {
    body: ast::Body,
    /// True if the template contains generation blocks.
    pub marks_answers: bool,
}

/// The variables of a rendering, created from JSON.
pub(crate) struct Variables<'a> {
    limits: &'a Limits,
    variables: Vec<(Arc<str>, Value)>,
}

impl Variables<'_> {
    /// Parses a JSON text.
    pub fn parse(&self, json: &str) -> Result<Value, String> {
        json::parse(self.limits, json).map_err(|fault| fault.reason)
    }

    /// Creates a list of these values.
    pub fn list(&self, items: Vec<Value>) -> Result<Value, String> {
        Value::list(self.limits, items).map_err(|fault| fault.reason)
    }

    /// Creates a mapping of these entries. If several entries have one key, the last one counts.
    pub fn dict(&self, entries: impl IntoIterator<Item = (Value, Value)>) -> Result<Value, String> {
        value::Dict::of(self.limits, entries).map_err(|fault| fault.reason)
    }

    /// Sets a variable, replacing its old value.
    pub fn set(&mut self, name: &str, value: Value) {
        self.variables.retain(|(known, _)| **known != *name);
        self.variables.push((name.into(), value));
    }
}

impl Template {
    /// Parses a template's source.
    ///
    /// # Errors
    /// If Jinja would reject the template, returns the reason with the line number.
    pub fn parse(source: &str) -> Result<Self, String> {
        if source.len() > LONGEST {
            return Err(format!("the template has {} bytes; at most {LONGEST} are read", source.len()));
        }
        on_own_stack(|| parser::parse(source)).map(|(body, marks_answers)| Self { body, marks_answers })
    }

    /// Renders the template. Returns the text, and the byte ranges of it that generation blocks have written.
    ///
    /// # Errors
    /// Returns the reason if the template raises an error, exceeds a limit, or uses an unsupported feature.
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
                // Inside a macro or a filter, only the position at which the captured text starts is known. A filter
                // may change that text.
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

/// Calls `run` on a thread whose stack is large enough for the nesting that [`limits`] allows.
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

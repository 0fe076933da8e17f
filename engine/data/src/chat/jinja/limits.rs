//! What a rendering may take: work, memory and depth.
//!
//! Every evaluated expression, every element that a filter visits and every byte that a value takes is charged before it is spent, so
//! that a template of a hundred bytes cannot ask for more than its share. Bytes are those of all values that were made, whether they are
//! still alive or not: a simple upper bound of what is.

use std::cell::Cell;

/// Steps of a rendering, besides those that it may take for each byte of its input. A conversation of a hundred turns takes some ten
/// thousand.
const STEPS: u64 = 4_000_000;

/// Steps for each byte of the input.
const STEPS_PER_INPUT: u64 = 2;

/// Bytes of a rendering's values, besides those that it may take for each byte of its input.
const BYTES: usize = 64 << 20;

/// Bytes of values for each byte of the input: a template that collects the conversation in a string copies it once a turn.
const BYTES_PER_INPUT: usize = 64;

/// Expressions, statements and calls within each other.
const DEPTH: usize = 2_000;

/// Lists within lists; and expressions, blocks and brackets within each other in a template's source, as of CPython's own parser.
pub(crate) const NESTING: usize = 200;

/// Parameters of a macro, and named arguments of a call.
pub(crate) const PARAMETERS: usize = 1_000;

/// Bytes of the stack on which a template is parsed and rendered, which [`DEPTH`] and [`NESTING`] do not exceed in an unoptimized build.
pub(crate) const STACK: usize = 64 << 20;

/// Why a template was refused or its rendering ended.
#[derive(Debug)]
pub(crate) struct Fault {
    pub reason: String,
    /// The line of the template, once it is known.
    pub line: Option<u32>,
}

/// A value, or why there is none.
pub(crate) type Outcome<T> = Result<T, Fault>;

/// An error without a line yet.
pub(crate) fn fault<T>(reason: impl Into<String>) -> Outcome<T> {
    Err(Fault { reason: reason.into(), line: None })
}

/// What is left of a rendering's share.
#[derive(Debug)]
pub(crate) struct Limits {
    steps: Cell<u64>,
    most_steps: u64,
    bytes: Cell<usize>,
    most_bytes: usize,
    depth: Cell<usize>,
}

impl Limits {
    /// The share of a rendering with this many bytes of template and messages.
    pub fn new(input: usize) -> Self {
        let most_bytes = BYTES + BYTES_PER_INPUT * input;
        let most_steps = STEPS + STEPS_PER_INPUT * input as u64;
        let (steps, bytes) = (Cell::new(most_steps), Cell::new(most_bytes));
        Self { steps, most_steps, bytes, most_bytes, depth: Cell::new(0) }
    }

    /// Charges work.
    pub fn step(&self, count: usize) -> Outcome<()> {
        match self.steps.get().checked_sub(count as u64) {
            Some(left) => {
                self.steps.set(left);
                Ok(())
            }
            None => fault(format!("the rendering takes more than {} steps; simplify the template", self.most_steps)),
        }
    }

    /// Charges a look at every byte of a text.
    pub fn scan(&self, text: &str) -> Outcome<()> {
        self.step(1 + text.len() / 8)
    }

    /// Charges memory, before it is allocated.
    pub fn grow(&self, bytes: usize) -> Outcome<()> {
        match self.bytes.get().checked_sub(bytes) {
            Some(left) => {
                self.bytes.set(left);
                Ok(())
            }
            None => fault(format!(
                "the rendering makes more than {} MiB ({} bytes) of text and lists; simplify the template",
                self.most_bytes >> 20,
                self.most_bytes
            )),
        }
    }

    /// Runs something one level deeper.
    pub fn deeper<T>(&self, run: impl FnOnce() -> Outcome<T>) -> Outcome<T> {
        let depth = self.depth.get();
        if depth >= DEPTH {
            return fault(format!("calls and expressions are more than {DEPTH} deep; simplify the template"));
        }
        self.depth.set(depth + 1);
        let result = run();
        self.depth.set(depth);
        result
    }
}

//! Limits of a rendering: work, memory and depth.
//!
//! Costs are charged in advance: for every evaluated expression, every element that a filter visits, and every byte of
//! a value. So even a short template cannot exceed the limits. Bytes are counted for all values ever created, including
//! freed ones. The count is an upper bound on the memory in use.

use std::cell::Cell;

/// Steps that a rendering may take. Further steps are allowed for each byte of its input. A conversation of a hundred
/// turns takes about ten thousand steps.
const STEPS: u64 = 4_000_000;

/// Additional steps for each byte of the input.
const STEPS_PER_INPUT: u64 = 2;

/// Bytes of values that a rendering may create. Further bytes are allowed for each byte of its input.
const BYTES: usize = 64 << 20;

/// Additional bytes of values for each byte of the input. Templates that collect the conversation in a string copy that
/// string in every turn.
const BYTES_PER_INPUT: usize = 64;

/// The deepest nesting of expressions, statements and calls during a rendering.
const DEPTH: usize = 2_000;

/// The deepest nesting of lists, and of expressions, blocks and brackets in a template's source. CPython's parser has
/// the same limit.
pub(crate) const NESTING: usize = 200;

/// The most parameters of a macro, and the most named arguments of a call.
pub(crate) const PARAMETERS: usize = 1_000;

/// Stack size in bytes of the thread that parses and renders a template. It is enough for [`DEPTH`] and [`NESTING`] in
/// an unoptimized build.
pub(crate) const STACK: usize = 64 << 20;

/// The reason why a template was rejected or its rendering failed.
#[derive(Debug)]
pub(crate) struct Fault {
    pub reason: String,
    /// The line of the template; `None` until it is known.
    pub line: Option<u32>,
}

/// A value, or the reason why there is none.
pub(crate) type Outcome<T> = Result<T, Fault>;

/// Returns an error whose line is not known yet.
pub(crate) fn fault<T>(reason: impl Into<String>) -> Outcome<T> {
    Err(Fault { reason: reason.into(), line: None })
}

/// The remaining limits of a rendering.
#[derive(Debug)]
pub(crate) struct Limits {
    steps: Cell<u64>,
    most_steps: u64,
    bytes: Cell<usize>,
    most_bytes: usize,
    depth: Cell<usize>,
}

impl Limits {
    /// The limits of a rendering whose template and messages have `input` bytes together.
    pub fn new(input: usize) -> Self {
        let most_bytes = BYTES + BYTES_PER_INPUT * input;
        let most_steps = STEPS + STEPS_PER_INPUT * input as u64;
        let (steps, bytes) = (Cell::new(most_steps), Cell::new(most_bytes));
        Self { steps, most_steps, bytes, most_bytes, depth: Cell::new(0) }
    }

    /// Charges `count` steps of work.
    pub fn step(&self, count: usize) -> Outcome<()> {
        match self.steps.get().checked_sub(count as u64) {
            Some(left) => {
                self.steps.set(left);
                Ok(())
            }
            None => fault(format!("the rendering takes more than {} steps; simplify the template", self.most_steps)),
        }
    }

    /// Charges the work of reading every byte of a string.
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

    /// Calls `run` one level deeper. Returns an error if this level exceeds [`DEPTH`].
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

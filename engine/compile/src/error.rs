//! Errors of compiling a graph to instructions with addresses.

use gapless_alloc::draw::Bytes;

use crate::step::StepOptions;

/// `Result` with this crate's [`enum@Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Every error of compiling a step.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages name the fields")]
pub enum Error {
    #[error(transparent)]
    Graph(#[from] gapless_graph::Error),
    #[error("no tensor named {name:?}; nearest: {nearest}")]
    UnknownTensor { name: String, nearest: String },
    #[error("{name:?} takes {expected} elements, but {given} were given")]
    ElementCount { name: String, expected: usize, given: usize },
    #[error(
        "no recomputation fits the budget of {} ({budget} bytes); the smallest step found takes {} ({smallest} bytes){}",
        Bytes(*budget),
        Bytes(*smallest),
        what_helps(remedies)
    )]
    OverBudget { budget: u64, smallest: u64, remedies: Vec<&'static str> },
    #[error(
        "{program:?} would have {instructions} instructions, more than the maximum of {most}; use fewer micro-batches or more pipeline ranks"
    )]
    TooManyInstructions { program: String, instructions: usize, most: usize },
    #[error(
        "{program:?} cannot be compiled: {what}; compile the program as `lower` returns it, or correct the operation (Op) or the change that \
         caused this"
    )]
    Unsound { program: String, what: String },
    #[error(
        "{what} of {program:?} would bring its tensors to more than 2^60 bytes; use smaller shapes, or correct `Op::workspace` of {op:?}"
    )]
    TooLarge { program: String, what: String, op: String },
    #[error("internal error: the plan violates its own constraints: {what}")]
    BadPlan { what: String },
    #[error(transparent)]
    Alloc(#[from] gapless_alloc::Error),
    #[error(transparent)]
    Schedule(#[from] gapless_parallel::Error),
}

/// Returns the last line of a message about a step that is too large. It is empty if no remedy is known.
fn what_helps(remedies: &[&str]) -> String {
    if remedies.is_empty() { String::new() } else { format!("\nwhat helps: {}", remedies.join("; ")) }
}

impl Error {
    /// Adds to an error about a step that is too large the settings that would lower the step's memory
    /// on this target.
    pub(crate) fn with_remedies(self, options: &StepOptions) -> Self {
        match self {
            Self::OverBudget { budget, smallest, .. } => {
                Self::OverBudget { budget, smallest, remedies: options.remedies() }
            }
            other => other,
        }
    }

    /// Returns the error for a refused setting: the setting's name, the reason, and what to do instead.
    pub(crate) fn config(what: &'static str, why: impl Into<String>, remedy: &'static str) -> Self {
        gapless_graph::Error::config(what, why, remedy).into()
    }
}

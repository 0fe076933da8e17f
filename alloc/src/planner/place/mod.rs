//! Algorithms that place the items of a part without an earlier plan. A part is a set of items that can be planned
//! separately from the rest of the problem.

pub(crate) mod backtrack;
mod best_fit;
mod leap;
mod lots;
mod open_stack;
pub(crate) mod portfolio;
pub(crate) mod strips;
pub(crate) mod sweep;

//! Placements of a part from scratch.

pub(crate) mod backtrack;
mod leap;
mod lots;
mod open_stack;
pub(crate) mod portfolio;
pub(crate) mod strips;
pub(crate) mod sweep;

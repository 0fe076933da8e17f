//! Ways to place a part from scratch.

pub(crate) mod backtrack;
pub(crate) mod portfolio;
pub(crate) mod strips;
pub(crate) mod sweep;

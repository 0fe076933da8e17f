//! Smaller problems: parts that do not meet, and regions of the arena that keep to a few sizes.

pub(crate) mod parts;
pub(crate) mod regions;
pub(crate) mod timeline;

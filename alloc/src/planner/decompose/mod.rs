//! Smaller problems: parts that share no clique, and regions of the arena for items of a few sizes.

pub(crate) mod parts;
pub(crate) mod regions;
pub(crate) mod timeline;

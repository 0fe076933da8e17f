//! Requirements other than the lowest plan: groups whose members live differently, and earlier addresses.

pub(in crate::planner) mod groups;
pub(in crate::planner) mod warm_start;

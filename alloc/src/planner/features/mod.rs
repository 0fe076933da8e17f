//! What a problem may ask for beside the lowest plan.

pub(in crate::planner) mod groups;
pub(in crate::planner) mod warm_start;

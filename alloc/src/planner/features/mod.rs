//! Requirements besides the lowest height: groups whose members live differently, and addresses kept from an earlier
//! plan.

pub(in crate::planner) mod groups;
pub(in crate::planner) mod warm_start;

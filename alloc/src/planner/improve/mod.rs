//! Ways to lower a plan.

pub(crate) mod descent;
pub(crate) mod ejection;
pub(crate) mod squeaky_wheel;

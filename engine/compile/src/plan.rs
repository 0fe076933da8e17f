//! Plans that have passed the checker.

use gapless_alloc::{Options, Problem, Solution, check, plan};

use crate::error::{Error, Result};

/// A plan, and that it is one.
///
/// # Errors
/// [`Error::BadPlan`] if the planner is broken.
pub fn planned(problem: &Problem, options: &Options) -> Result<Solution> {
    let solution = plan(problem, options);
    check(problem, &solution.offsets, Some(solution.height)).map_err(|violations| Error::BadPlan {
        what: violations.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "),
    })?;
    Ok(solution)
}

/// The lowest plan that is found, unless that is above the capacity: then one that is looked for below it.
///
/// # Errors
/// As [`planned`].
pub(super) fn lowest_within(problem: &Problem, options: &Options) -> Result<Solution> {
    let lowest = planned(problem, &Options { capacity: None, ..options.clone() })?;
    match options.capacity {
        Some(capacity) if lowest.height > capacity => planned(problem, options),
        _ => Ok(lowest),
    }
}

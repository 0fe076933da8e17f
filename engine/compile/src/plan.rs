//! Plans that have passed the checker.

use gapless_alloc::{Options, Problem, Solution, check, plan};

use crate::error::{Error, Result};

/// Makes a plan and checks it.
///
/// # Errors
/// Returns [`Error::BadPlan`] if the plan does not pass the checker, which means that the planner has a bug.
pub fn planned(problem: &Problem, options: &Options) -> Result<Solution> {
    let solution = plan(problem, options);
    check(problem, &solution.offsets, Some(solution.height)).map_err(|violations| Error::BadPlan {
        what: violations.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "),
    })?;
    Ok(solution)
}

/// Returns the lowest plan found. If that plan exceeds the capacity, searches for a plan within the capacity, and
/// returns the result of that search.
///
/// # Errors
/// Returns the errors of [`planned`].
pub(super) fn lowest_within(problem: &Problem, options: &Options) -> Result<Solution> {
    let lowest = planned(problem, &Options { capacity: None, ..options.clone() })?;
    match options.capacity {
        Some(capacity) if lowest.height > capacity => planned(problem, options),
        _ => Ok(lowest),
    }
}

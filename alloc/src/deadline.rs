//! Until when a plan, or an explanation, may be sought.

use std::time::{Duration, Instant};

/// A moment, or none.
#[derive(Debug, Clone, Copy, Default)]
pub struct Deadline(Option<Instant>);

impl Deadline {
    /// So long from now; a time past what clocks count is none.
    pub fn after(limit: Option<Duration>) -> Self {
        Self(limit.and_then(|limit| Instant::now().checked_add(limit)))
    }

    /// Whether nothing is left.
    pub fn has_passed(self) -> bool {
        self.left().is_some_and(|left| left.is_zero())
    }

    /// What is left, if there is a limit.
    pub fn left(self) -> Option<Duration> {
        self.0.map(|at| at.saturating_duration_since(Instant::now()))
    }
}

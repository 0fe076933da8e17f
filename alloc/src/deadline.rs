//! The deadline of a plan or an explanation.

use std::time::{Duration, Instant};

/// A moment in time; `None` means no limit.
#[derive(Debug, Clone, Copy, Default)]
pub struct Deadline(Option<Instant>);

impl Deadline {
    /// A deadline `limit` from now. There is no deadline if `limit` is `None` or exceeds what the clock can represent.
    pub fn after(limit: Option<Duration>) -> Self {
        Self(limit.and_then(|limit| Instant::now().checked_add(limit)))
    }

    /// True once no time is left.
    pub fn has_passed(self) -> bool {
        self.left().is_some_and(|left| left.is_zero())
    }

    /// The time left; `None` if there is no limit.
    pub fn left(self) -> Option<Duration> {
        self.0.map(|at| at.saturating_duration_since(Instant::now()))
    }
}

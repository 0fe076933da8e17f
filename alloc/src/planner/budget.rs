//! The limits of a search: work, which is the same on every machine, and time, which is not.

use super::StopReason;
use crate::deadline::Deadline;

/// A budget of work with a deadline.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Budget {
    /// The most work that may be spent.
    pub work: u64,
    pub spent: u64,
    pub deadline: Deadline,
}

impl Budget {
    pub fn spend(&mut self, work: u64) {
        self.spent = self.spent.saturating_add(work);
    }

    pub fn left(&self) -> u64 {
        self.work.saturating_sub(self.spent)
    }

    /// True if the deadline has passed.
    pub fn is_late(&self) -> bool {
        self.deadline.has_passed()
    }

    /// Returns the reason to stop, or `None` if work and time are left.
    pub fn stopped(&self) -> Option<StopReason> {
        if self.is_late() {
            Some(StopReason::Deadline)
        } else if self.left() == 0 {
            Some(StopReason::Work)
        } else {
            None
        }
    }

    /// Returns a separate budget of at most `work`. Work spent from the new budget is not charged to this one.
    pub fn share(&self, work: u64) -> Self {
        Self { work: work.min(self.left()), spent: 0, ..*self }
    }

    /// Calls `run` with a budget of at most `work` out of what is left, and charges this budget for the work that was
    /// spent.
    pub fn within<T>(&mut self, work: u64, run: impl FnOnce(&mut Self) -> T) -> T {
        let mut share = self.share(work);
        let result = run(&mut share);
        self.spend(share.spent);
        result
    }
}

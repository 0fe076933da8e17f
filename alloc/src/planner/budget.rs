//! What may still be spent: work, which is the same on every machine, and time, which is not.

use super::StopReason;
use crate::deadline::Deadline;

/// A budget that is drawn down.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Budget {
    /// The most that may be spent.
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

    /// Whether the deadline has passed.
    pub fn is_late(&self) -> bool {
        self.deadline.has_passed()
    }

    /// Why to stop, if at all.
    pub fn stopped(&self) -> Option<StopReason> {
        if self.is_late() {
            Some(StopReason::Deadline)
        } else if self.left() == 0 {
            Some(StopReason::Work)
        } else {
            None
        }
    }

    /// A budget of its own of at most `work`, which is not taken from this one.
    pub fn share(&self, work: u64) -> Self {
        Self { work: work.min(self.left()), spent: 0, ..*self }
    }

    /// Runs what may spend at most `work` of what is left.
    pub fn within<T>(&mut self, work: u64, run: impl FnOnce(&mut Self) -> T) -> T {
        let mut share = self.share(work);
        let result = run(&mut share);
        self.spend(share.spent);
        result
    }
}

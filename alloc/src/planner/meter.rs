//! What may still be spent: work, which is the same on every machine, and time, which isn't.

use super::StopReason;
use crate::deadline::Deadline;

/// A budget that is drawn down.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Meter {
    pub work: u64,
    pub deadline: Deadline,
    pub spent: u64,
}

impl Meter {
    pub fn spend(&mut self, work: u64) {
        self.spent += work;
    }

    /// Whether the deadline has passed.
    pub fn late(&self) -> bool {
        self.deadline.has_passed()
    }

    /// Why to stop, if at all.
    pub fn stopped(&self) -> Option<StopReason> {
        if self.late() {
            Some(StopReason::Deadline)
        } else if self.spent >= self.work {
            Some(StopReason::Work)
        } else {
            None
        }
    }

    /// Work left.
    pub fn left(&self) -> u64 {
        self.work.saturating_sub(self.spent)
    }
}

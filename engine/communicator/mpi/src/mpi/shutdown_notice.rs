//! Shutdown notices. A rank that shuts down properly notifies all others. If another rank still waits for a message of
//! this rank, it learns from the notice that the message will not arrive.

use std::time::{Duration, Instant};

use gapless_communicator::Result;

use super::raw::{self, Outcome};

/// The shutdown notices: one empty message from each rank to every other.
pub(super) struct ShutdownNotices {
    comm: raw::Comm,
    rank: usize,
    /// The notice of each rank. This rank's own notice is never awaited.
    others: Vec<ShutdownNotice>,
    said: Vec<raw::Request>,
}

enum ShutdownNotice {
    Awaited(raw::Request),
    Heard(Instant),
    Own,
}

impl ShutdownNotices {
    /// Starts to receive the notices of all ranks. `comm` must only be used for these notices.
    pub(super) fn new(comm: raw::Comm, rank: usize, size: usize) -> Result<Self> {
        let others = (0..size).map(|other| match other == rank {
            true => Ok(ShutdownNotice::Own),
            // SAFETY: the message is empty.
            false => unsafe { raw::irecv(comm, nothing(), 0, other, 0) }.map(ShutdownNotice::Awaited),
        });
        Ok(Self { comm, rank, others: others.collect::<Result<_>>()?, said: Vec::new() })
    }

    /// Processes the notices that have arrived.
    pub(super) fn listen(&mut self) -> Result<()> {
        for other in &mut self.others {
            if let ShutdownNotice::Awaited(request) = other
                && matches!(raw::test(request)?, Outcome::Ended(_))
            {
                *other = ShutdownNotice::Heard(Instant::now());
            }
        }
        Ok(())
    }

    /// The world ranks whose notice arrived longer than `time` ago.
    pub(super) fn arrived_before(&self, time: Duration) -> impl Iterator<Item = usize> {
        let heard = move |other: &ShutdownNotice| matches!(other, ShutdownNotice::Heard(at) if at.elapsed() > time);
        self.others.iter().enumerate().filter(move |(_, other)| heard(other)).map(|(rank, _)| rank)
    }

    /// Sends the notice to all other ranks.
    pub(super) fn say(&mut self) -> Result<()> {
        for other in (0..self.others.len()).filter(|other| *other != self.rank) {
            // SAFETY: the message is empty.
            self.said.push(unsafe { raw::isend(self.comm, nothing(), 0, other, 0) }?);
        }
        Ok(())
    }

    /// True if the notices of all ranks, and this rank's notices to all others, have arrived. The process may then shut
    /// MPI down.
    pub(super) fn all_arrived(&mut self) -> Result<bool> {
        self.listen()?;
        while let Some(request) = self.said.last_mut() {
            match raw::test(request)? {
                Outcome::UnderWay => return Ok(false),
                _ => self.said.pop(),
            };
        }
        Ok(!self.others.iter().any(|other| matches!(other, ShutdownNotice::Awaited(_))))
    }
}

fn nothing() -> *mut u8 {
    std::ptr::NonNull::dangling().as_ptr()
}

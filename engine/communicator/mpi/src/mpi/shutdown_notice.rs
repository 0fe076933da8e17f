//! Who has left. A rank that leaves in order says so to all others: whoever still waits for it then waits in vain.

use std::time::{Duration, Instant};

use gapless_communicator::Result;

use super::raw::{self, Outcome};

/// One empty message from each rank to each other, when it leaves.
pub(super) struct Farewells {
    comm: raw::Comm,
    rank: usize,
    /// By rank; this one's own is never waited for.
    others: Vec<ShutdownNotice>,
    said: Vec<raw::Request>,
}

enum ShutdownNotice {
    Awaited(raw::Request),
    Heard(Instant),
    Own,
}

impl Farewells {
    /// Listens to all ranks of a communicator that carries nothing else.
    pub(super) fn new(comm: raw::Comm, rank: usize, size: usize) -> Result<Self> {
        let others = (0..size).map(|other| match other == rank {
            true => Ok(ShutdownNotice::Own),
            // SAFETY: the message is empty.
            false => unsafe { raw::irecv(comm, nothing(), 0, other, 0) }.map(ShutdownNotice::Awaited),
        });
        Ok(Self { comm, rank, others: others.collect::<Result<_>>()?, said: Vec::new() })
    }

    /// Hears what has come.
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

    /// The ranks of the world that said it longer ago.
    pub(super) fn longer_ago_than(&self, time: Duration) -> impl Iterator<Item = usize> {
        let heard = move |other: &ShutdownNotice| matches!(other, ShutdownNotice::Heard(at) if at.elapsed() > time);
        self.others.iter().enumerate().filter(move |(_, other)| heard(other)).map(|(rank, _)| rank)
    }

    /// Says it to all others.
    pub(super) fn say(&mut self) -> Result<()> {
        for other in (0..self.others.len()).filter(|other| *other != self.rank) {
            // SAFETY: the message is empty.
            self.said.push(unsafe { raw::isend(self.comm, nothing(), 0, other, 0) }?);
        }
        Ok(())
    }

    /// Whether all have said it to all. MPI may then be left.
    pub(super) fn all_said(&mut self) -> Result<bool> {
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

//! The connection between the MPI thread and the threads that compute. Commands go to the MPI thread, which sends back
//! the outcomes.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use gapless_communicator::{Awaited, CommunicatorError};

use super::thread::Command;

/// The time in which MPI must end the job. If the job still runs after this time, the process ends itself.
const PATIENCE: Duration = Duration::from_secs(5);

#[derive(Default)]
pub(super) struct Link {
    inner: Mutex<Inner>,
    /// Signalled when a command was sent.
    command: Condvar,
    /// Signalled when an operation has ended.
    ended: Condvar,
}

#[derive(Default)]
struct Inner {
    commands: VecDeque<Command>,
    slots: Vec<Slot>,
    /// Number of communicators in use.
    handles: usize,
    /// True if the process has left MPI or is leaving it.
    over: bool,
}

struct Slot {
    group: usize,
    status: Status,
}

enum Status {
    Free,
    UnderWay(Awaited),
    Ended,
}

impl Link {
    /// Starts an operation: opens a slot, sends the command for that slot, and returns the slot.
    pub(super) fn start(
        &self,
        group: usize,
        awaited: Awaited,
        command: impl FnOnce(usize, Awaited) -> Command,
    ) -> usize {
        let mut inner = self.lock();
        let free = inner.slots.iter().position(|slot| matches!(slot.status, Status::Free));
        let index = free.unwrap_or_else(|| {
            inner.slots.push(Slot { group, status: Status::Free });
            inner.slots.len() - 1
        });
        inner.slots[index] = Slot { group, status: Status::UnderWay(awaited.clone()) };
        inner.commands.push_back(command(index, awaited));
        self.command.notify_one();
        index
    }

    /// Sends a command without a slot.
    pub(super) fn send(&self, command: Command) {
        self.lock().commands.push_back(command);
        self.command.notify_one();
    }

    /// Waits for an operation to end. Ends all processes if the wait takes longer than the timeout.
    pub(super) fn wait(&self, rank: usize, slot: usize, timeout: Duration) {
        let deadline = Instant::now().checked_add(timeout);
        let mut inner = self.lock();
        while let Status::UnderWay(awaited) = &inner.slots[slot].status {
            let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) {
                let error = CommunicatorError::Timeout { rank, awaited: awaited.clone(), after: timeout };
                drop(inner);
                self.end_job(error.to_string(), Some(slot));
            }
            inner = match left {
                Some(left) => self.ended.wait_timeout(inner, left).unwrap_or_else(PoisonError::into_inner).0,
                None => self.ended.wait(inner).unwrap_or_else(PoisonError::into_inner),
            };
        }
        inner.slots[slot].status = Status::Free;
    }

    /// Counts a new communicator.
    pub(super) fn open(&self) {
        self.lock().handles += 1;
    }

    /// Closes a group's communicator. Returns true if this was the process's last communicator.
    ///
    /// Ends all processes if the communicator has operations in progress, because the other ranks would wait for this
    /// rank.
    pub(super) fn close(&self, rank: usize, group: usize) -> bool {
        let mut inner = self.lock();
        let under_way = |slot: &&Slot| slot.group == group && matches!(slot.status, Status::UnderWay(_));
        let under_way = inner.slots.iter().filter(under_way).count();
        if under_way > 0 {
            drop(inner);
            self.end_job(format!("rank {rank} dropped its communicator with {under_way} operation(s) under way"), None);
        }
        inner.handles -= 1;
        inner.over = inner.handles == 0;
        inner.over
    }

    /// Ends all processes through MPI. If the MPI thread does not respond, ends only this process.
    pub(super) fn end_job(&self, text: String, slot: Option<usize>) -> ! {
        let deadline = Instant::now() + PATIENCE;
        let mut command = Some(Command::Abort { text: text.clone(), slot });
        while Instant::now() < deadline {
            // `lock` could block forever, since a thread that panics may hold the lock.
            let free = match self.inner.try_lock() {
                Ok(inner) => Some(inner),
                Err(TryLockError::Poisoned(inner)) => Some(inner.into_inner()),
                Err(TryLockError::WouldBlock) => None,
            };
            if let Some(mut inner) = free
                && let Some(command) = command.take()
            {
                inner.commands.push_front(command);
                self.command.notify_one();
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        super::say(&format!("{text}; MPI does not respond, so this process ends itself"));
        std::process::abort();
    }

    /// True if the process has left MPI or is leaving it.
    pub(super) fn is_over(&self) -> bool {
        match self.inner.try_lock() {
            Ok(inner) => inner.over,
            Err(_) => false,
        }
    }

    /// Moves new commands to `into`. If `nothing_to_do`, waits until there is a command; otherwise waits for at most
    /// `rest`. Called by the MPI thread.
    pub(super) fn take(&self, into: &mut Vec<Command>, nothing_to_do: bool, rest: Option<Duration>) {
        let mut inner = self.lock();
        while nothing_to_do && inner.commands.is_empty() {
            inner = self.command.wait(inner).unwrap_or_else(PoisonError::into_inner);
        }
        if let Some(rest) = rest
            && inner.commands.is_empty()
        {
            inner = self.command.wait_timeout(inner, rest).unwrap_or_else(PoisonError::into_inner).0;
        }
        into.extend(inner.commands.drain(..));
    }

    /// Records that an operation has ended. Called by the MPI thread.
    pub(super) fn end(&self, slot: usize) {
        self.lock().slots[slot].status = Status::Ended;
        self.ended.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

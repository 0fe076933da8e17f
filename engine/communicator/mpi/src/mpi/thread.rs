//! The thread that owns MPI. It makes all MPI calls, so that operations progress while the other threads compute.

use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Duration;

use gapless_communicator::{Awaited, Collective, CommunicatorError, Result};
use mpi::Threading;
use mpi::environment::Universe;

use super::link::Link;
use super::operation::{Group, Operation};
use super::raw;
use super::shutdown_notice::ShutdownNotices;

/// A command to the thread.
pub(super) enum Command {
    /// Start a message.
    Message {
        slot: usize,
        group: usize,
        sends: bool,
        address: *mut u8,
        len: usize,
        peer: usize,
        tag: i32,
        awaited: Awaited,
    },
    /// Start a collective.
    Collective { slot: usize, group: usize, collective: Collective, awaited: Awaited },
    /// Create a communicator of the ranks of one color, and send the index of the new group to `answer`.
    Split { group: usize, color: usize, key: usize, members: Arc<[usize]>, answer: Sender<usize> },
    /// End all processes. `slot` is the operation whose wait exceeded the timeout, if any.
    Abort { text: String, slot: Option<usize> },
    /// Shut MPI down, together with the other ranks.
    Finish,
}

// SAFETY: the addresses stay lent until their operation has ended, by the contract of the function that sends the
// command.
unsafe impl Send for Command {}

/// The properties of the world, known once MPI has started.
pub(super) struct Started {
    pub(super) rank: usize,
    pub(super) size: usize,
    pub(super) largest_tag: u64,
}

/// Number of polls without sleeping after the last progress. Further polls are separated by an interval. While the
/// thread sleeps, its core is free for the threads that compute. The interval bounds the delay of a message.
const EAGER_POLLS: u32 = 2000;
const INTERVAL: Duration = Duration::from_micros(50);

/// The time for which messages of a rank that has shut down may still be in transit.
const GRACE: Duration = Duration::from_secs(2);

/// Runs the MPI thread. Any failure in this thread ends all processes, because MPI may still access lent memory, so the
/// memory cannot be returned to its owner.
pub(super) fn run(link: &Link, started: &Sender<Result<Started>>) {
    let ((world, mut farewells, place), universe) = match begin() {
        Ok(begun) => begun,
        Err(error) => {
            let _ = started.send(Err(error));
            return;
        }
    };
    let me = place.rank;
    let _ = started.send(Ok(place));
    let mut groups = vec![world];
    let mut operations: Vec<Operation> = Vec::new();
    let mut commands = Vec::new();
    let mut idle_polls = 0;
    loop {
        let rest = (idle_polls > EAGER_POLLS).then_some(INTERVAL);
        link.take(&mut commands, operations.is_empty(), rest);
        idle_polls += 1;
        for command in commands.drain(..) {
            idle_polls = 0;
            match command {
                Command::Message { slot, group, sends, address, len, peer, tag, awaited } => {
                    let at = (group, &groups[group]);
                    // SAFETY: the memory is lent, by the contract of `isend` and `irecv`.
                    let message = unsafe { Operation::message(slot, at, (sends, address, len), (peer, tag), awaited) };
                    operations.push(or_end_job(me, message));
                }
                Command::Collective { slot, group, collective, awaited } => {
                    let at = (group, &mut groups[group]);
                    // SAFETY: the memory is lent, by the contract of `start`.
                    let collective = unsafe { Operation::collective(slot, at, collective, awaited) };
                    operations.push(or_end_job(me, collective));
                }
                Command::Split { group, color, key, members, answer } => {
                    groups.push(or_end_job(me, split(&groups[group], color, key, members)));
                    let _ = answer.send(groups.len() - 1);
                }
                Command::Abort { text, slot } => {
                    let operation = operations.iter().find(|operation| Some(operation.slot) == slot);
                    match operation.map(|operation| operation.missing(&groups[operation.group])) {
                        Some(ranks) => end_job(&format!("{text}; nothing came from rank(s) {ranks:?}")),
                        None => end_job(&text),
                    }
                }
                Command::Finish => {
                    or_end_job(me, farewells.say());
                    while !or_end_job(me, farewells.all_arrived()) {
                        std::thread::sleep(INTERVAL);
                    }
                    drop(universe);
                    return;
                }
            }
        }
        operations.retain_mut(|operation| {
            let ended = or_end_job(me, operation.advance(&groups[operation.group]));
            if ended {
                idle_polls = 0;
                link.end(operation.slot);
            }
            !ended
        });
        if operations.is_empty() {
            continue;
        }
        or_end_job(me, farewells.listen());
        for rank in farewells.arrived_before(GRACE) {
            if let Some(operation) = operations.iter().find(|o| o.waits_for(rank, &groups[o.group])) {
                end_job(&format!("rank {rank} dropped its communicator while rank {me} was {}", operation.awaited));
            }
        }
        std::thread::yield_now();
    }
}

fn or_end_job<T>(rank: usize, result: Result<T>) -> T {
    result.unwrap_or_else(|error| end_job(&format!("rank {rank} failed: {error}")))
}

fn end_job(text: &str) -> ! {
    super::say(text);
    raw::abort()
}

/// Starts MPI. Returns the world, on communicators of its own, so that messages of other libraries are not received.
fn begin() -> Result<((Group, ShutdownNotices, Started), Universe)> {
    let (universe, threading) =
        mpi::initialize_with_threading(Threading::Funneled).ok_or(CommunicatorError::StartedTwice)?;
    if threading < Threading::Funneled {
        return Err(CommunicatorError::Unsupported {
            what: "a program with several threads over this MPI library",
            remedy: "use an MPI library that was built with threads",
        });
    }
    let world = raw::world()?;
    let (rank, size) = raw::place(world)?;
    let group = Group {
        messages: raw::duplicate(world)?,
        collectives: raw::duplicate(world)?,
        rank,
        members: (0..size).collect(),
        started: 0,
    };
    let farewells = ShutdownNotices::new(raw::duplicate(world)?, rank, size)?;
    Ok(((group, farewells, Started { rank, size, largest_tag: raw::largest_tag(world)? }), universe))
}

fn split(group: &Group, color: usize, key: usize, members: Arc<[usize]>) -> Result<Group> {
    let messages = raw::split(group.messages, color, key)?;
    let (rank, _) = raw::place(messages)?;
    Ok(Group { messages, collectives: raw::duplicate(messages)?, rank, members, started: 0 })
}

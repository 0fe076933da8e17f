//! The thread that owns MPI: all calls are made here, and operations go on while the other threads compute.

use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Duration;

use super::super::{Awaited, Collective, CommunicatorError, Result};
use super::link::Link;
use super::operation::{Group, Operation};
use super::raw;

/// What the thread is asked to do.
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
    /// Make a communicator of the ranks of one color. Answers with its number.
    Split { group: usize, color: usize, key: usize, members: Arc<[usize]>, answer: Sender<Result<usize>> },
    /// End all processes. The slot is the operation whose wait took too long.
    Abort { text: String, slot: Option<usize> },
    /// Leave MPI in order.
    Finish,
}

// SAFETY: addresses are lent until their operation has ended, by the contract of whoever sends the command.
unsafe impl Send for Command {}

/// What a world is, once MPI has started.
pub(super) struct Started {
    pub(super) rank: usize,
    pub(super) size: usize,
    pub(super) largest_tag: u64,
}

/// Polls without rest this often after the last progress, and then at an interval. The rest leaves the core to whoever
/// computes; the interval bounds what it adds to a message's time.
const EAGER_POLLS: u32 = 2000;
const INTERVAL: Duration = Duration::from_micros(50);

/// The thread's life.
pub(super) fn run(link: &Link, started: &Sender<Result<Started>>) {
    let Some((universe, _)) = mpi::initialize_with_threading(mpi::Threading::Funneled) else {
        let _ = started.send(Err(CommunicatorError::StartedTwice));
        return;
    };
    let mut groups = match begin() {
        Ok((world, place)) => {
            let _ = started.send(Ok(place));
            vec![world]
        }
        Err(error) => {
            let _ = started.send(Err(error));
            return;
        }
    };
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
                    begun(link, &mut operations, slot, message);
                }
                Command::Collective { slot, group, collective, awaited } => {
                    let at = (group, &mut groups[group]);
                    // SAFETY: the memory is lent, by the contract of `start`.
                    let collective = unsafe { Operation::collective(slot, at, collective, awaited) };
                    begun(link, &mut operations, slot, collective);
                }
                Command::Split { group, color, key, members, answer } => {
                    let part = split(&groups[group], color, key, members).map(|part| {
                        groups.push(part);
                        groups.len() - 1
                    });
                    let _ = answer.send(part);
                }
                Command::Abort { text, slot } => {
                    let operation = operations.iter().find(|operation| Some(operation.slot) == slot);
                    let missing = operation.map(|operation| operation.missing(&groups[operation.group]));
                    match missing {
                        Some(ranks) => eprintln!("gapless: {text}; nothing came from rank(s) {ranks:?}"),
                        None => eprintln!("gapless: {text}"),
                    }
                    raw::abort();
                }
                Command::Finish => {
                    drop(universe);
                    return;
                }
            }
        }
        operations.retain_mut(|operation| {
            let outcome = match operation.advance(&groups[operation.group]) {
                Ok(false) => return true,
                Ok(true) => Ok(()),
                Err(error) => Err(error),
            };
            idle_polls = 0;
            link.end(operation.slot, outcome);
            false
        });
        if !operations.is_empty() {
            std::thread::yield_now();
        }
    }
}

/// The world, duplicated, so that nobody else's messages meet these.
fn begin() -> Result<(Group, Started)> {
    let world = raw::world()?;
    let (rank, size) = raw::place(world)?;
    let group = Group {
        messages: raw::duplicate(world)?,
        collectives: raw::duplicate(world)?,
        rank,
        members: (0..size).collect(),
        started: 0,
    };
    Ok((group, Started { rank, size, largest_tag: raw::largest_tag(world)? }))
}

fn split(group: &Group, color: usize, key: usize, members: Arc<[usize]>) -> Result<Group> {
    let messages = raw::split(group.messages, color, key)?;
    let (rank, _) = raw::place(messages)?;
    Ok(Group { messages, collectives: raw::duplicate(messages)?, rank, members, started: 0 })
}

fn begun(link: &Link, operations: &mut Vec<Operation>, slot: usize, operation: Result<Operation>) {
    match operation {
        Ok(operation) => operations.push(operation),
        Err(error) => link.end(slot, Err(error)),
    }
}

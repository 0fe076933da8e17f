//! Ranks that are processes, on one host or many, using MPI.
//!
//! One dedicated thread makes all MPI calls (`thread`). So messages and collectives progress while the rank computes,
//! and MPI need not be thread-safe. Collectives are composed of messages (`operation`). MPI's own collectives are not
//! used, because MPI guarantees no order of summation, and its non-blocking sums make no progress by themselves.
//!
//! A failure ends all processes by `MPI_Abort`, after the failing rank is named on its standard error. Failures are:
//! - a panic on any thread
//! - a wait that exceeds its timeout
//! - a message of another size than expected
//! - [`Communicator::abort`]
//! - a communicator dropped with operations in progress
//! - an orderly exit while another rank still waits for this rank
//!
//! So the only error that a wait can return is that the request is unknown. If a rank is killed, `mpirun` ends the
//! others.

mod link;
mod operation;
mod raw;
mod shutdown_notice;
mod thread;

use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use gapless_communicator::backend::{Owner, places, world_rank};
use gapless_communicator::{
    Awaited, Collective, Communicator, CommunicatorError, Direction, Memory, Request, Result, Tag, default_timeout,
};
use gapless_parallel::World;

use self::link::Link;
use self::thread::{Command, Started};

/// A rank that is a process under `mpirun`. [`Mpi::world`] creates it, at most once per process.
pub struct Mpi {
    shared: Arc<Shared>,
    owner: Owner,
    /// The MPI thread's index of the group.
    group: usize,
    /// World ranks of the members.
    members: Arc<[usize]>,
    rank: usize,
    timeout: Duration,
}

impl std::fmt::Debug for Mpi {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Mpi").field("rank", &self.rank).field("members", &self.members).finish_non_exhaustive()
    }
}

/// The state that a process's communicators share.
struct Shared {
    link: Arc<Link>,
    thread: Mutex<Option<JoinHandle<()>>>,
    largest_tag: u64,
}

impl Mpi {
    /// Starts MPI and returns the world. From then on, a panic on any thread ends all processes. When the last
    /// communicator is dropped, the process shuts MPI down. For that it waits until all other ranks shut MPI down too.
    ///
    /// # Errors
    /// Returns an error if MPI was started before, or if variables of another launcher (`RANK`, …) give this process
    /// another rank.
    pub fn world() -> Result<Self> {
        let timeout = default_timeout()?;
        let link = Arc::new(Link::default());
        let (started, place) = mpsc::channel();
        let thread = {
            let link = link.clone();
            let builder = std::thread::Builder::new().name("gapless-mpi".into());
            builder.spawn(move || thread::run(&link, &started)).map_err(|e| CommunicatorError::Thread(e.to_string()))?
        };
        let Started { rank, size, largest_tag } =
            place.recv().map_err(|_| CommunicatorError::Thread("it ended while MPI was starting".into()))??;
        // It is an error if variables in the environment contradict MPI. The process then ends without MPI's shutdown,
        // which would wait for the other ranks. The launcher ends the job when a process ends in this way.
        if let Some(found) = World::discover()? {
            found.agree_with_mpi(rank, size)?;
        }
        end_job_on_panic(link.clone(), rank);
        link.open();
        let shared = Arc::new(Shared { link, thread: Mutex::new(Some(thread)), largest_tag });
        Ok(Self { shared, owner: Owner::unique(), group: 0, members: (0..size).collect(), rank, timeout })
    }

    /// This rank's index in the world.
    fn me(&self) -> usize {
        self.members[self.rank]
    }

    fn message(&mut self, sends: bool, address: *mut u8, len: usize, peer: usize, tag: Tag) -> Result<Request> {
        let in_world = world_rank(&self.members, peer)?;
        let number = encode_tag(tag, self.shared.largest_tag)?;
        let awaited = match sends {
            true => Awaited::Taken { to: in_world, tag },
            false => Awaited::Message { from: in_world, tag },
        };
        let group = self.group;
        let message = |slot, awaited| Command::Message { slot, group, sends, address, len, peer, tag: number, awaited };
        Ok(self.owner.request(self.shared.link.start(group, awaited, message)))
    }
}

// SAFETY: once the outcome of an operation is available, its memory is not accessed any more. `wait` only returns with
// that outcome. Dropping a communicator with operations in progress ends the process.
unsafe impl Communicator for Mpi {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.members.len()
    }

    fn memory(&self) -> Memory {
        Memory::Host
    }

    fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }

    unsafe fn isend(&mut self, bytes: *const u8, len: usize, to: usize, tag: Tag) -> Result<Request> {
        self.message(true, bytes.cast_mut(), len, to, tag)
    }

    unsafe fn irecv(&mut self, bytes: *mut u8, len: usize, from: usize, tag: Tag) -> Result<Request> {
        self.message(false, bytes, len, from, tag)
    }

    unsafe fn start(&mut self, collective: Collective) -> Result<Request> {
        if let Collective::Broadcast { root, .. } = collective {
            world_rank(&self.members, root)?;
        }
        let group = self.group;
        let awaited = Awaited::Collective { what: collective.to_string(), missing: Vec::new() };
        let command = |slot, awaited| Command::Collective { slot, group, collective, awaited };
        Ok(self.owner.request(self.shared.link.start(group, awaited, command)))
    }

    fn wait(&mut self, request: Request) -> Result<()> {
        self.shared.link.wait(self.me(), self.owner.slot(request)?, self.timeout);
        Ok(())
    }

    fn split(&mut self, color: usize, key: usize) -> Result<Box<dyn Communicator>> {
        let places = places(self, color, key)?;
        let members: Arc<[usize]> = places.members.iter().map(|rank| self.members[*rank]).collect();
        let (answer, answered) = mpsc::channel();
        let (group, color, key) = (self.group, places.color, places.rank);
        self.shared.link.send(Command::Split { group, color, key, members: members.clone(), answer });
        let group = answered.recv_timeout(self.timeout).unwrap_or_else(|_| {
            let seconds = self.timeout.as_secs_f64();
            self.shared.link.end_job(format!("rank {} gave up after {seconds} s waiting for a split", self.me()), None)
        });
        self.shared.link.open();
        Ok(Box::new(Self {
            shared: self.shared.clone(),
            owner: Owner::unique(),
            group,
            members,
            rank: places.rank,
            timeout: self.timeout,
        }))
    }

    fn abort(&mut self, reason: &str) {
        self.shared.link.end_job(format!("rank {} ends the job: {reason}", self.me()), None)
    }
}

impl Drop for Mpi {
    fn drop(&mut self) {
        if self.shared.link.close(self.me(), self.group) {
            self.shared.link.send(Command::Finish);
            let thread = self.shared.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some(thread) = thread {
                let _ = thread.join();
            }
        }
    }
}

/// Makes a panic on any thread end the job, because the other ranks would wait for this rank.
fn end_job_on_panic(link: Arc<Link>, rank: usize) {
    let previous = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        previous(info);
        if link.is_over() {
            return;
        }
        if std::thread::current().name() == Some("gapless-mpi") {
            say(&format!("rank {rank} panicked"));
            raw::abort();
        }
        link.end_job(format!("rank {rank} panicked"), None)
    }));
}

/// Encodes a tag as an integer for MPI.
fn encode_tag(tag: Tag, largest: u64) -> Result<i32> {
    let Tag { direction, stage, micro_batch, tensor } = tag;
    // Tensors of the update have no micro-batch, so the bits of the micro-batch hold a part of the tensor's index.
    let (micro_batch, tensor) = match direction {
        Direction::Update => (tensor >> 5, tensor & 31),
        Direction::Forward | Direction::Backward => (micro_batch, tensor),
    };
    if stage >= 1 << 11 || micro_batch >= 1 << 13 || tensor >= 1 << 5 {
        return Err(CommunicatorError::Tag { tag, largest });
    }
    let number = stage << 20 | micro_batch << 7 | tensor << 2 | direction as u32;
    if u64::from(number) > largest {
        return Err(CommunicatorError::Tag { tag, largest });
    }
    Ok(number as i32)
}

/// Writes a line to standard error in a single write, because the launcher interleaves the output of processes with
/// MPI's.
fn say(text: &str) {
    let _ = std::io::Write::write_all(&mut std::io::stderr(), format!("gapless: {text}\n").as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_have_numbers_of_their_own_below_the_largest() {
        let encoded = |direction, stage, micro_batch, tensor| {
            encode_tag(Tag { direction, stage, micro_batch, tensor }, i32::MAX as u64).ok()
        };
        let mut seen = std::collections::HashSet::new();
        for direction in [Direction::Forward, Direction::Backward] {
            for stage in [0, 1, 2, 2047] {
                for micro_batch in [0, 1, 2, 8191] {
                    for tensor in [0, 1, 31] {
                        assert!(seen.insert(encoded(direction, stage, micro_batch, tensor).expect("it fits")));
                    }
                }
            }
        }
        for (stage, micro_batch, tensor) in [(2048, 0, 0), (0, 8192, 0), (0, 0, 32)] {
            assert_eq!(encoded(Direction::Forward, stage, micro_batch, tensor), None);
        }
        assert!(encode_tag(Tag { stage: 1, ..Tag::default() }, 32_767).is_err(), "beyond what this MPI takes");
    }
}

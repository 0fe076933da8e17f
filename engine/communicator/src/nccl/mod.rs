//! Ranks that are NVIDIA GPUs, through NCCL.
//!
//! Messages and collectives are of device memory, and run on a stream of their own beside what the rank computes. The
//! ranks find each other over another communicator of the host, which also carries everything that is not a tensor:
//! agreements, the news that a rank has failed.
//!
//! NCCL knows no tags. So before a program is run, its ranks agree on one order of all their messages
//! ([`launch_order`](super::launch_order)), and every run begins with [`Nccl::follow`]:
//!
//! ```no_run
//! use gapless_communicator::{Communicator, Nccl, Request, Result, Tag, launch_order::{Call, Start}};
//!
//! # fn run(control: Box<dyn Communicator>, bytes: *mut u8) -> gapless_communicator::Result<()> {
//! let mut rank = Nccl::on_device(control, 0)?;               // under mpirun, `gapless_mpi::world()`: each process sees one GPU
//! let (tag, len) = (Tag::default(), 1 << 20);
//! let start = match rank.rank() {
//!     0 => Start::Send { to: 1, tag, len },
//!     _ => Start::Receive { from: 0, tag, len },
//! };
//! let order = rank.agree(&[Call::Start(start), Call::Wait(0)])?.expect("NCCL needs one");
//! for _step in 0..10 {
//!     rank.follow(&order)?;
//!     // SAFETY: the bytes are device memory that is left alone until the wait.
//!     let request = unsafe {
//!         match rank.rank() {
//!             0 => rank.isend(bytes, len, 1, tag)?,
//!             _ => rank.irecv(bytes, len, 0, tag)?,
//!         }
//!     };
//!     rank.wait(request)?;
//! }
//! # Ok(())
//! # }
//! ```
//!
//! `library` finds NCCL, `raw` calls it, `operation` is one operation's way through it, `communicator` what a rank asks for,
//! `join` how a rank joins them, `family` what ends together.

mod communicator;
mod family;
mod join;
mod library;
mod operation;
mod raw;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::{CudaSlice, CudaStream};

use self::family::Family;
use self::operation::{Operation, Slot, Status, cuda};
use self::raw::Comm;
use crate::backend::Owner;
use crate::launch_order::{Launch, LaunchQueue, Start};
use crate::{Awaited, Communicator, CommunicatorError, Request, Result, Tag};

/// Looks at the device without rest this often, and then at an interval.
const EAGER_POLLS: u32 = 2000;
const INTERVAL: Duration = Duration::from_micros(20);

/// How often a rank that waits asks whether another has failed.
const HEARTBEAT: Duration = Duration::from_millis(100);

/// Operations that a device may wait for while the host goes on.
const MOST_LEFT: usize = 64;

/// In which order f32 are added up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Sums {
    /// In the order of ranks, as [`Collective`](crate::Collective) promises. Of two ranks there is but one order; sums over more are refused.
    #[default]
    InOrder,
    /// In NCCL's, which depends on the topology, the algorithm and the size: the same bits on all ranks, but other bits than
    /// elsewhere, and perhaps than on another day.
    AnyOrder,
}

/// A rank that is a GPU. Made by [`Nccl::on_device`] or [`Nccl::over`], by all ranks of a communicator of the host.
///
/// An operation begins when the stream that was given has come to where it was at the operation's start, so memory may be
/// lent that is still being computed. What is lent is device memory of this rank's GPU, except for the sizes of
/// [`Collective::AllToAllV`](crate::Collective::AllToAllV), which are the host's. [`wait`](Communicator::wait) blocks the host.
///
/// Unlike the other backends' a start may wait for another rank, the first time that all ranks, or two, exchange anything in this
/// way; making the communicator and [`agree`](Communicator::agree) get the first times over with that they can foresee. What two
/// communicators of one rank launch runs side by side on the device, so the ranks must start operations of different
/// communicators in orders that do not wait for each other in a circle: in one order, say. All ranks drop their communicators in the same order.
pub struct Nccl {
    /// The same ranks, over the host.
    control: Box<dyn Communicator>,
    owner: Owner,
    /// The ranks' numbers in the world.
    members: Arc<[usize]>,
    comm: Arc<Comm>,
    /// With those that it was split from or into.
    family: Arc<Family>,
    /// Makes what is sent, and reads what was received.
    compute: Arc<CudaStream>,
    /// Runs what was launched.
    stream: Arc<CudaStream>,
    /// Elements of the device, two at least, for what has no memory of its own, and the address of the first.
    scratch: (CudaSlice<f32>, u64),
    slots: Vec<Slot>,
    /// Slots whose ends the device waits for, from the first on.
    left: VecDeque<usize>,
    /// The run under way.
    run: Option<LaunchQueue>,
    /// Slots of the run's starts, in order.
    started: Vec<usize>,
    sums: Sums,
    timeout: Duration,
    failure: Option<CommunicatorError>,
}

impl Nccl {
    /// The stream that computes.
    pub fn compute(&self) -> &Arc<CudaStream> {
        &self.compute
    }

    /// Allows sums in another order than that of ranks, or forbids them again.
    pub fn set_sums(&mut self, sums: Sums) {
        self.sums = sums;
    }

    /// This rank in the world.
    fn me(&self) -> usize {
        self.members[self.control.rank()]
    }

    /// Refuses to go on after a failure.
    fn expect_well(&self) -> Result<()> {
        self.failure.clone().map_or(Ok(()), Err)
    }

    /// Makes the GPU this thread's.
    fn bind(&self) -> Result<()> {
        self.compute.context().bind_to_thread().map_err(cuda("cuCtxSetCurrent"))
    }

    /// Starts an operation, and launches whatever has its turn.
    ///
    /// # Safety
    /// Its memory is lent until the request was waited for.
    unsafe fn begin(&mut self, operation: Operation) -> Result<Request> {
        self.expect_well()?;
        self.bind()?;
        // SAFETY: an all-to-all has one size per rank.
        unsafe { operation.expect_on_device(self.members.len(), self.compute.context()) }?;
        let start = operation.start();
        let me = self.me();
        match self.run.as_mut().map(|queue| queue.start(me, start)) {
            Some(Ok(_)) => {}
            Some(Err(error)) => return Err(self.fail(error)),
            None if matches!(start, Start::Collective(_)) => {}
            None => {
                return Err(CommunicatorError::Unsupported {
                    what: "an NCCL message without an agreed order",
                    remedy: "agree on the order of the program's messages, and begin each run with follow",
                });
            }
        }
        let slot = self.open(operation)?;
        // SAFETY: the caller's promise, now and for what was held before.
        unsafe {
            if self.run.is_some() {
                self.started.push(slot);
                self.launch_all()?;
            } else {
                self.launch(slot)?;
            }
        }
        Ok(self.owner.request(slot))
    }

    /// Takes a slot for an operation.
    fn open(&mut self, operation: Operation) -> Result<usize> {
        let free = self.slots.iter().position(|slot| slot.status == Status::Free);
        let index = match free {
            Some(index) => index,
            None => {
                let slot = Slot::new(self.compute.context(), operation).map_err(|error| self.fail(error))?;
                self.slots.push(slot);
                self.slots.len() - 1
            }
        };
        self.slots[index].hold(operation, &self.compute).map_err(|error| self.fail(error))?;
        Ok(index)
    }

    /// Launches what has its turn in the run.
    ///
    /// # Safety
    /// The memory of all that is held is lent.
    unsafe fn launch_all(&mut self) -> Result<()> {
        while let Some(launch) = self.run.as_mut().and_then(LaunchQueue::launch) {
            // SAFETY: the caller's promise.
            unsafe {
                match launch {
                    Launch::One(start) => self.launch(self.started[start])?,
                    Launch::Oneself { send, receive } => self.copy(self.started[send], self.started[receive])?,
                }
            }
        }
        if self.run.as_ref().is_some_and(LaunchQueue::is_over) {
            self.run = None;
        }
        Ok(())
    }

    /// # Safety
    /// The memory of the slot's operation is lent.
    unsafe fn launch(&mut self, index: usize) -> Result<()> {
        let word = self.scratch.1 as *mut f32;
        // SAFETY: the caller's promise; the word is this communicator's.
        let launched = unsafe { self.slots[index].launch(&self.comm, self.members.len(), &self.stream, word) };
        launched.map_err(|error| self.fail(error))?;
        self.until(|this| this.slots[index].operation.awaited(&this.members), |_| Ok(true))?;
        self.slots[index].launched(&self.stream).map_err(|error| self.fail(error))
    }

    /// # Safety
    /// The memory of both slots' operations is lent.
    unsafe fn copy(&mut self, send: usize, receive: usize) -> Result<()> {
        // SAFETY: the caller's promise.
        let copied = unsafe { self.slots[send].copy_to(&self.slots[receive], &self.stream) };
        copied.map_err(|error| self.fail(error))?;
        for index in [send, receive] {
            self.slots[index].launched(&self.stream).map_err(|error| self.fail(error))?;
        }
        Ok(())
    }

    /// The slot of an operation that is waited for, which is launched by then.
    fn launched(&mut self, request: Request) -> Result<usize> {
        let index = self.owner.slot(request)?;
        self.bind().map_err(|error| self.fail(error))?;
        let error = match (&self.failure, self.slots[index].status) {
            (Some(failure), _) => failure.clone(),
            (None, Status::Held) => {
                // A program that was agreed on does not come here.
                let expected = self.run.as_ref().and_then(LaunchQueue::held_back_by).map(ToString::to_string);
                self.fail(CommunicatorError::NotAsAgreed {
                    rank: self.me(),
                    number: self.started.len(),
                    started: format!("to wait for {}", self.slots[index].operation.start()),
                    expected: expected.unwrap_or_default(),
                })
            }
            (None, _) => return Ok(index),
        };
        self.slots[index].status = Status::Free;
        Err(error)
    }

    /// Waits for the ends that the device was left to wait for, up to the last so many.
    fn settle_to(&mut self, most: usize) -> Result<()> {
        while self.left.len() > most {
            let index = self.left.pop_front().expect("there are more");
            self.end_of(index)?;
        }
        Ok(())
    }

    /// Waits for the end of what was launched, and frees its slot.
    fn end_of(&mut self, index: usize) -> Result<()> {
        let ended =
            self.until(|this| this.slots[index].operation.awaited(&this.members), |this| this.slots[index].is_done());
        self.slots[index].status = Status::Free;
        ended
    }

    /// Waits until NCCL is through with what it was called for, and something more; or fails.
    fn until(&mut self, awaited: impl Fn(&Self) -> Awaited, and: impl FnMut(&Self) -> Result<bool>) -> Result<()> {
        self.poll(awaited, and).map_err(|error| self.fail(error))
    }

    fn poll(&mut self, awaited: impl Fn(&Self) -> Awaited, mut and: impl FnMut(&Self) -> Result<bool>) -> Result<()> {
        let begun = Instant::now();
        let mut asked = begun;
        let mut polls = 0;
        while !(self.comm.is_settled()? && and(self)?) {
            polls += 1;
            if polls < EAGER_POLLS {
                std::hint::spin_loop();
                continue;
            }
            std::thread::sleep(INTERVAL);
            if begun.elapsed() >= self.timeout {
                let (rank, awaited) = (self.me(), awaited(self));
                return Err(CommunicatorError::Timeout { rank, awaited, after: self.timeout });
            }
            if asked.elapsed() >= HEARTBEAT {
                asked = Instant::now();
                self.family.check()?;
                heartbeat(&mut *self.control).map_err(|error| match error {
                    CommunicatorError::PeerGone { rank, why, by, .. } => {
                        CommunicatorError::PeerGone { rank, why, by, awaited: awaited(self) }
                    }
                    error => error,
                })?;
            }
        }
        Ok(())
    }

    /// Tells the others, and ends everything of this rank. Nothing touches lent memory afterwards.
    fn fail(&mut self, error: CommunicatorError) -> CommunicatorError {
        if self.failure.is_none() {
            self.failure = Some(error.clone());
            self.control.abort(&error.to_string());
            self.end();
        }
        error
    }

    fn end(&mut self) {
        self.family.abort();
        // What was launched ends with the communicators. There is nothing to be done about a stream that does not answer.
        let _ = self.stream.synchronize();
    }

    /// Leaves in order, together with the others. If they don't come, they are not told: nothing is under way here.
    fn leave(&mut self) -> Result<()> {
        self.bind()?;
        self.comm.finalize()?;
        self.poll(|_| all("NCCL's shutdown"), |_| Ok(true))?;
        self.comm.destroy()
    }
}

impl Drop for Nccl {
    fn drop(&mut self) {
        let under_way = self.slots.iter().filter(|slot| slot.status != Status::Free).count();
        if self.failure.is_some() {
            self.end();
        } else if std::thread::panicking() {
            self.abort("its thread panicked");
        } else if under_way > 0 {
            self.abort(&format!("it dropped its communicator with {under_way} operation(s) under way"));
        } else if let Err(error) = self.leave() {
            self.comm.abort();
            tracing::warn!("rank {} cannot shut NCCL down: {error}", self.me());
        }
    }
}

impl fmt::Debug for Nccl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let device = self.compute.context().ordinal();
        let (rank, members) = (self.control.rank(), &self.members);
        f.debug_struct("Nccl")
            .field("rank", &rank)
            .field("members", members)
            .field("device", &device)
            .finish_non_exhaustive()
    }
}

/// What all ranks take part in.
fn all(what: &str) -> Awaited {
    Awaited::Collective { what: what.into(), missing: Vec::new() }
}

/// Hears whether a rank has failed: by a message to oneself, which fails if one has.
fn heartbeat(control: &mut dyn Communicator) -> Result<()> {
    let (me, tag) = (control.rank(), Tag::default());
    let nothing = std::ptr::NonNull::<u8>::dangling().as_ptr();
    // SAFETY: the message is empty.
    let requests = unsafe { [control.isend(nothing, 0, me, tag)?, control.irecv(nothing, 0, me, tag)?] };
    requests.into_iter().try_for_each(|request| control.wait(request))
}

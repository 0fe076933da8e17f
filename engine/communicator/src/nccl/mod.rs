//! Ranks that are NVIDIA GPUs, using NCCL.
//!
//! Messages and collectives are between device memory, and run on a stream of their own, concurrently with the rank's
//! computation. The ranks find each other over a second communicator, on the host. That communicator also carries
//! everything that is not a tensor: agreements, and the notice that a rank has failed.
//!
//! NCCL has no tags. So before a program runs, its ranks agree on one order of all their messages
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
//!     // SAFETY: the bytes are device memory that nothing else accesses until the wait.
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
//! `library` finds NCCL, `raw` calls it, `operation` executes one operation, `communicator` implements the rank's
//! interface, `join` connects a rank, `family` groups communicators that fail together.

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

/// Number of polls of the device without sleeping. Further polls are separated by an interval.
const EAGER_POLLS: u32 = 2000;
const INTERVAL: Duration = Duration::from_micros(20);

/// Time between two checks of a waiting rank for failures of other ranks.
const HEARTBEAT: Duration = Duration::from_millis(100);

/// Maximum number of operations for which the device may wait while the host continues.
const MAX_LEFT_TO_DEVICE: usize = 64;

/// The order in which f32 are summed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Sums {
    /// The order of ranks, as [`Collective`](crate::Collective) guarantees. NCCL's order is this order over two ranks
    /// only, so sums over more ranks are refused.
    #[default]
    InOrder,
    /// NCCL's order, which depends on the topology, the algorithm and the size. All ranks get the same bits. The bits
    /// may differ between runs, and they differ from those of other backends.
    AnyOrder,
}

/// A rank that is a GPU. All ranks of a host communicator create it together, by [`Nccl::on_device`] or [`Nccl::over`].
///
/// - An operation begins when the device has done all work that was on the compute stream when the operation was
///   started. So memory may be lent while its contents are still being computed.
/// - Lent memory is device memory of this rank's GPU, except for the sizes of
///   [`Collective::AllToAllV`](crate::Collective::AllToAllV), which are host memory.
/// - [`wait`](Communicator::wait) blocks the host.
/// - Unlike with other backends, a start may wait for another rank. This happens when all ranks, or two of them, use a
///   kind of exchange for the first time. Creating the communicator and [`agree`](Communicator::agree) perform the
///   first exchanges that can be foreseen.
/// - The launches of two communicators of one rank run concurrently on the device. So ranks must start operations of
///   different communicators in orders that cannot deadlock, for example in the same order.
/// - All ranks must drop their communicators in the same order.
pub struct Nccl {
    /// The host communicator of the same ranks.
    control: Box<dyn Communicator>,
    owner: Owner,
    /// World ranks of the members.
    members: Arc<[usize]>,
    comm: Arc<Comm>,
    /// The communicators that fail together with this one: all that descend from the same first communicator by splits.
    family: Arc<Family>,
    /// The stream that computes the values to send, and reads the received ones.
    compute: Arc<CudaStream>,
    /// The stream on which operations run.
    stream: Arc<CudaStream>,
    /// Device memory of at least two elements, and its address. It is for operations that need device memory of their
    /// own.
    scratch: (CudaSlice<f32>, u64),
    slots: Vec<Slot>,
    /// Slots of the operations for which the device waits instead of the host, oldest first.
    left: VecDeque<usize>,
    /// The run in progress.
    run: Option<LaunchQueue>,
    /// The slot of each operation that the run has started.
    started: Vec<usize>,
    sums: Sums,
    timeout: Duration,
    failure: Option<CommunicatorError>,
}

impl Nccl {
    /// The compute stream.
    pub fn compute(&self) -> &Arc<CudaStream> {
        &self.compute
    }

    /// Sets the order in which f32 are summed.
    pub fn set_sums(&mut self, sums: Sums) {
        self.sums = sums;
    }

    /// This rank's index in the world.
    fn me(&self) -> usize {
        self.members[self.control.rank()]
    }

    /// Returns the recorded failure as an error, if there is one.
    fn check_failure(&self) -> Result<()> {
        self.failure.clone().map_or(Ok(()), Err)
    }

    /// Makes the GPU's context current on this thread.
    fn bind(&self) -> Result<()> {
        self.compute.context().bind_to_thread().map_err(cuda("cuCtxSetCurrent"))
    }

    /// Starts an operation, and launches all operations whose turn it is in the agreed order.
    ///
    /// # Safety
    /// The operation's memory must stay lent until the wait for the request has returned.
    unsafe fn begin(&mut self, operation: Operation) -> Result<Request> {
        self.check_failure()?;
        self.bind()?;
        // SAFETY: by this function's contract, the sizes of an all-to-all are valid, one per rank.
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
        // SAFETY: the memory of every held operation is lent. The caller of `begin` has promised this for the new
        // operation, and the callers of earlier `begin`s for the operations that are still held.
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

    /// Opens a slot for an operation.
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

    /// Launches the operations of the run whose turn it is.
    ///
    /// # Safety
    /// The memory of all held operations must be lent.
    unsafe fn launch_all(&mut self) -> Result<()> {
        while let Some(launch) = self.run.as_mut().and_then(LaunchQueue::launch) {
            // SAFETY: by this function's contract.
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
    /// The memory of the slot's operation must be lent.
    unsafe fn launch(&mut self, index: usize) -> Result<()> {
        let word = self.scratch.1 as *mut f32;
        // SAFETY: by this function's contract; `word` belongs to this communicator.
        let launched = unsafe { self.slots[index].launch(&self.comm, self.members.len(), &self.stream, word) };
        launched.map_err(|error| self.fail(error))?;
        self.until(|this| this.slots[index].operation.awaited(&this.members), |_| Ok(true))?;
        self.slots[index].launched(&self.stream).map_err(|error| self.fail(error))
    }

    /// # Safety
    /// The memory of both slots' operations must be lent.
    unsafe fn copy(&mut self, send: usize, receive: usize) -> Result<()> {
        // SAFETY: by this function's contract.
        let copied = unsafe { self.slots[send].copy_to(&self.slots[receive], &self.stream) };
        copied.map_err(|error| self.fail(error))?;
        for index in [send, receive] {
            self.slots[index].launched(&self.stream).map_err(|error| self.fail(error))?;
        }
        Ok(())
    }

    /// Returns the slot of an operation to wait for, which must have been launched.
    fn launched(&mut self, request: Request) -> Result<usize> {
        let index = self.owner.slot(request)?;
        self.bind().map_err(|error| self.fail(error))?;
        let error = match (&self.failure, self.slots[index].status) {
            (Some(failure), _) => failure.clone(),
            (None, Status::Held) => {
                // A program that follows its agreed order never waits for an operation that was not launched.
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

    /// Blocks the host until at most `most` of the operations that were passed to `wait_on_device` are still pending.
    /// Waits for the oldest operation first.
    fn wait_until_at_most(&mut self, most: usize) -> Result<()> {
        while self.left.len() > most {
            let index = self.left.pop_front().expect("there are more");
            self.end_of(index)?;
        }
        Ok(())
    }

    /// Waits for the end of a launched operation, and frees its slot.
    fn end_of(&mut self, index: usize) -> Result<()> {
        let ended =
            self.until(|this| this.slots[index].operation.awaited(&this.members), |this| this.slots[index].is_done());
        self.slots[index].status = Status::Free;
        ended
    }

    /// Waits until NCCL has completed its calls and `and` returns true. An error fails the rank.
    fn until(&mut self, awaited: impl Fn(&Self) -> Awaited, and: impl FnMut(&Self) -> Result<bool>) -> Result<()> {
        self.poll(awaited, and).map_err(|error| self.fail(error))
    }

    fn poll(&mut self, awaited: impl Fn(&Self) -> Awaited, mut and: impl FnMut(&Self) -> Result<bool>) -> Result<()> {
        let begun = Instant::now();
        let mut asked = begun;
        let mut polls = 0;
        while !(self.comm.is_call_complete()? && and(self)?) {
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

    /// Reports a failure to the other ranks, and ends all operations of this rank. Afterwards lent memory is not
    /// accessed any more. Returns the error to return to the caller.
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
        // Launched operations end when their communicators are aborted. If the stream does not respond, nothing more
        // can be done.
        let _ = self.stream.synchronize();
    }

    /// Shuts the communicator down, together with the other ranks. If the other ranks do not respond, no failure is
    /// reported to them, because no operation is in progress.
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

/// The wait for an operation that all ranks take part in.
fn all(what: &str) -> Awaited {
    Awaited::Collective { what: what.into(), missing: Vec::new() }
}

/// Checks whether any rank has failed. The check is a message from this rank to itself on the host, which returns an
/// error after a failure.
fn heartbeat(control: &mut dyn Communicator) -> Result<()> {
    let (me, tag) = (control.rank(), Tag::default());
    let nothing = std::ptr::NonNull::<u8>::dangling().as_ptr();
    // SAFETY: the message is empty.
    let requests = unsafe { [control.isend(nothing, 0, me, tag)?, control.irecv(nothing, 0, me, tag)?] };
    requests.into_iter().try_for_each(|request| control.wait(request))
}

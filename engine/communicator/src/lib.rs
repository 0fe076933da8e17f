//! Exchange of tensors between ranks: messages between two ranks, and collectives over all of them.
//!
//! A [`Communicator`] is one rank's end of a group of ranks. In: ranges of memory, mostly planned ranges of an arena.
//! Out: the same ranges, filled. This crate does not depend on tensors or schedules. It never buffers messages: the
//! caller lends memory to an operation from the operation's start to the matching wait.
//!
//! ```
//! use gapless_communicator::{Communicator, InProcess, Tag};
//!
//! let sums: Vec<f32> = std::thread::scope(|scope| {
//!     let ranks = InProcess::world(3).into_iter().map(|mut rank| {
//!         scope.spawn(move || {
//!             let mut values = [rank.rank() as f32 + 1.0];
//!             rank.all_reduce(&mut values)?;
//!             Ok::<_, gapless_communicator::CommunicatorError>(values[0])
//!         })
//!     });
//!     ranks.collect::<Vec<_>>().into_iter().map(|rank| rank.join().unwrap().unwrap()).collect()
//! });
//! assert_eq!(sums, [6.0, 6.0, 6.0]);
//! ```
//!
//! ```text
//! rank 0   isend ─────────── compute ───────── wait      memory lent ├──────────────────────────┤
//!                 ╲
//! rank 1   irecv ── compute ─╲── wait ── use             memory lent ├───────────────┤
//! ```

pub mod backend;
mod error;
mod in_process;
pub mod launch_order;
#[cfg(feature = "cuda")]
mod nccl;
mod tag;
mod threads;

use std::ffi::OsStr;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

pub use backend::Request;
pub use error::{Awaited, CommunicatorError, MissingLibrary, Result};
pub use in_process::InProcess;
#[cfg(feature = "cuda")]
pub use nccl::{Nccl, Sums};
pub use tag::{Direction, Tag};
pub use threads::{RankError, on_threads};

use self::launch_order::{Call, LaunchOrder};

/// The memory to which a backend's addresses refer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Memory {
    /// This process's memory.
    Host,
    /// The memory of the backend's device.
    Device,
}

/// A collective operation as one rank starts it: the kind of operation, and this rank's memory.
///
/// n is the size of the communicator. Sums are computed in f32 and add rank 0's value first, then rank 1's and so on.
/// So they do not depend on timing and are the same on all ranks. `f32` addresses are aligned to 4 bytes.
#[derive(Debug, Clone, Copy)]
pub enum Collective {
    /// `values[i]` ← Σ over ranks of `values[i]`.
    AllReduce {
        /// The elements of this rank, which are replaced by the sums.
        values: *mut f32,
        /// Number of elements, the same on all ranks.
        count: usize,
    },
    /// `receive` ← this rank's part of the sum over ranks of `send`.
    ReduceScatter {
        /// n parts of `count` elements.
        send: *const f32,
        /// `count` elements. This may be this rank's own part of `send`; any other overlap is forbidden.
        receive: *mut f32,
        /// Number of elements of a part, the same on all ranks.
        count: usize,
    },
    /// Part r of `receive` ← `send` of rank r.
    AllGather {
        /// `len` bytes. This may be this rank's own part of `receive`; any other overlap is forbidden.
        send: *const u8,
        /// n parts of `len` bytes.
        receive: *mut u8,
        /// Size of a part in bytes, the same on all ranks.
        len: usize,
    },
    /// Part r of `receive` ← this rank's part of rank r's `send`. Parts are stored one after another, in the order of
    /// ranks.
    AllToAllV {
        /// Σ `send_lens` bytes.
        send: *const u8,
        /// n sizes in bytes: entry r is the size of the part for rank r. These sizes are lent like the other memory.
        send_lens: *const usize,
        /// Σ `receive_lens` bytes.
        receive: *mut u8,
        /// n sizes in bytes: entry r is the size that rank r sends to this rank. These sizes are lent like the other
        /// memory.
        receive_lens: *const usize,
    },
    /// `bytes` ← `bytes` of rank `root`.
    Broadcast {
        /// The bytes, which are read on `root` and written on the other ranks.
        bytes: *mut u8,
        /// Size in bytes, the same on all ranks.
        len: usize,
        /// The rank whose bytes are sent.
        root: usize,
    },
    /// No data: the operation ends once all ranks have started it.
    Barrier,
}

impl fmt::Display for Collective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.kind().fmt(f)
    }
}

/// One rank's end of a group of ranks. One thread at a time may use it.
///
/// - Starting an operation never waits for another rank. The only exceptions are the first starts over NCCL.
/// - An operation that all of its ranks have started will end, whatever these ranks do meanwhile. So a rank that waits
///   for an operation does not depend on the waits of other ranks.
/// - Two messages between the same ranks with the same tag arrive in the order in which they were sent.
/// - All ranks of a communicator must start collectives in the same order. Collectives and messages may be waited for
///   in any order.
/// - Messages of 0 bytes, messages from a rank to itself and communicators of one rank are allowed.
/// - Ranks in errors are world ranks, not those of the group that [`split`](Self::split) returned.
///
/// # Errors
/// Once a rank of the world has failed, every method that returns a [`Result`] returns an error that names this rank. A
/// rank fails when it aborts or panics, when it drops its communicator with an operation in progress, or when one of
/// these methods returns an error that is not due to another rank. The world cannot be used after that. Ranks that are
/// processes end instead of returning such an error.
///
/// # Safety
/// An implementation must stop accessing the lent memory of an operation
/// - when [`wait`](Self::wait) returns for its request, *even with an error*,
/// - when the communicator is dropped, and
/// - after [`wait_on_device`](Self::wait_on_device), as soon as the device starts work that was launched after the
///   call. If the call returns an error, the implementation must stop before the call returns.
///
/// [`memory`](Self::memory) may only return [`Memory::Host`] if the communicator's addresses are those of this process.
/// The blocking methods over slices rely on these guarantees.
pub unsafe trait Communicator: Send + std::fmt::Debug {
    /// This rank's index, from 0.
    fn rank(&self) -> usize;

    /// Number of ranks.
    fn size(&self) -> usize;

    /// The memory to which addresses refer.
    fn memory(&self) -> Memory;

    /// Sets how long a wait may take. The default is the value of `GAPLESS_TIMEOUT_SECONDS`, or else ten minutes.
    fn set_timeout(&mut self, timeout: Duration);

    /// Starts to send `len` bytes. The wait for this operation ends when the bytes have been read. The receiver may not
    /// have them yet at that time.
    ///
    /// # Safety
    /// `bytes` must be valid for reads of `len` bytes. The bytes must not be written until the wait for the request has
    /// returned or the communicator was dropped.
    unsafe fn isend(&mut self, bytes: *const u8, len: usize, to: usize, tag: Tag) -> Result<Request>;

    /// Starts to receive a message of exactly `len` bytes.
    ///
    /// # Safety
    /// `bytes` must be valid for writes of `len` bytes. The caller must not access the bytes until the wait for the
    /// request has returned or the communicator was dropped.
    unsafe fn irecv(&mut self, bytes: *mut u8, len: usize, from: usize, tag: Tag) -> Result<Request>;

    /// Starts a collective.
    ///
    /// # Safety
    /// The collective's memory must be valid for its reads and writes. Until the wait for the request has returned or
    /// the communicator was dropped, the caller must not write memory that the collective reads, and must not access
    /// memory that it writes. Operands may overlap only as [`Collective`] allows.
    unsafe fn start(&mut self, collective: Collective) -> Result<Request>;

    /// Waits until an operation has ended, and ends the loan of its memory.
    ///
    /// # Errors
    /// Returns an error if
    /// - another rank has failed,
    /// - the message has another size than expected,
    /// - ranks have started different collectives,
    /// - the operation takes longer than the timeout, or
    /// - the request belongs to another communicator. In this case, the operation's memory stays lent until that
    ///   communicator is dropped.
    fn wait(&mut self, request: Request) -> Result<()>;

    /// Agrees with all ranks on the order in which a program's messages are launched ([`launch_order`]). Each run of
    /// the program must begin with [`follow`](Self::follow). Returns `None` if the backend distinguishes messages by
    /// their tags and needs no order. This is a collective operation, to be called once per program.
    ///
    /// # Errors
    /// Returns an error in the same cases as [`LaunchOrder::agree`].
    fn agree(&mut self, _program: &[Call]) -> Result<Option<Arc<LaunchOrder>>> {
        Ok(None)
    }

    /// Begins a run of a program with the order that was agreed on. The run is over when all operations of the program
    /// have been started.
    ///
    /// # Errors
    /// Returns an error if another run is in progress.
    fn follow(&mut self, _order: &Arc<LaunchOrder>) -> Result<()> {
        Ok(())
    }

    /// Makes this rank's later computation wait for an operation. On a device, the device waits while the host
    /// continues. Work that is launched on the device afterwards may use the operation's memory. The host may use it
    /// only after [`settle`](Self::settle).
    ///
    /// # Errors
    /// Returns an error in the same cases as [`wait`](Self::wait). Some of these errors are only returned by
    /// [`settle`](Self::settle).
    fn wait_on_device(&mut self, request: Request) -> Result<()> {
        self.wait(request)
    }

    /// Waits until all operations that were passed to [`wait_on_device`](Self::wait_on_device) have ended.
    ///
    /// # Errors
    /// Returns an error in the same cases as [`wait`](Self::wait).
    fn settle(&mut self) -> Result<()> {
        Ok(())
    }

    /// Splits the group into one communicator per `color`, and returns the one for the caller's color. Its ranks are
    /// ordered by `key`, then by their rank in this group. This is a collective operation: all ranks must call it, in
    /// the same order relative to other collectives. For a mesh, call this once per axis, with a color that identifies
    /// the rank's coordinates along the other axes.
    fn split(&mut self, color: usize, key: usize) -> Result<Box<dyn Communicator>>;

    /// Ends the work of all ranks. The waits of the other ranks return an error with this rank and the reason. Over
    /// MPI, all processes end.
    fn abort(&mut self, reason: &str);

    /// Sends a message, and waits until `bytes` can be reused.
    fn send(&mut self, bytes: &[u8], to: usize, tag: Tag) -> Result<()> {
        on_host(self.memory())?;
        // SAFETY: the slice is borrowed until the wait is over.
        let request = unsafe { self.isend(bytes.as_ptr(), bytes.len(), to, tag) }?;
        self.wait(request)
    }

    /// Receives a message of exactly `bytes.len()` bytes, and waits for it.
    fn receive(&mut self, bytes: &mut [u8], from: usize, tag: Tag) -> Result<()> {
        on_host(self.memory())?;
        // SAFETY: the slice is borrowed until the wait is over.
        let request = unsafe { self.irecv(bytes.as_mut_ptr(), bytes.len(), from, tag) }?;
        self.wait(request)
    }

    /// Starts a [`Collective::AllReduce`] and waits for it.
    fn all_reduce(&mut self, values: &mut [f32]) -> Result<()> {
        on_host(self.memory())?;
        let collective = Collective::AllReduce { values: values.as_mut_ptr(), count: values.len() };
        // SAFETY: the slice is borrowed until the wait is over.
        let request = unsafe { self.start(collective) }?;
        self.wait(request)
    }

    /// Starts a [`Collective::ReduceScatter`] and waits for it. `send` must hold one part of `receive.len()` elements
    /// per rank.
    fn reduce_scatter(&mut self, send: &[f32], receive: &mut [f32]) -> Result<()> {
        on_host(self.memory())?;
        fits("reduce_scatter's send", send.len(), receive.len() * self.size())?;
        let (send, count) = (send.as_ptr(), receive.len());
        let collective = Collective::ReduceScatter { send, receive: receive.as_mut_ptr(), count };
        // SAFETY: the slices are borrowed until the wait is over, and do not overlap.
        let request = unsafe { self.start(collective) }?;
        self.wait(request)
    }

    /// Starts a [`Collective::AllGather`] and waits for it. `receive` must hold one part of `send.len()` bytes per
    /// rank.
    fn all_gather(&mut self, send: &[u8], receive: &mut [u8]) -> Result<()> {
        on_host(self.memory())?;
        fits("all_gather's receive", receive.len(), send.len() * self.size())?;
        let (len, receive) = (send.len(), receive.as_mut_ptr());
        // SAFETY: the slices are borrowed until the wait is over, and do not overlap.
        let request = unsafe { self.start(Collective::AllGather { send: send.as_ptr(), receive, len }) }?;
        self.wait(request)
    }

    /// Starts a [`Collective::AllToAllV`] and waits for it. Sizes are in bytes, one per rank.
    fn all_to_all_v(
        &mut self,
        send: &[u8],
        send_lens: &[usize],
        receive: &mut [u8],
        receive_lens: &[usize],
    ) -> Result<()> {
        on_host(self.memory())?;
        fits("all_to_all_v's send_lens", send_lens.len(), self.size())?;
        fits("all_to_all_v's receive_lens", receive_lens.len(), self.size())?;
        fits("all_to_all_v's send", send.len(), total(send_lens))?;
        fits("all_to_all_v's receive", receive.len(), total(receive_lens))?;
        let collective = Collective::AllToAllV {
            send: send.as_ptr(),
            send_lens: send_lens.as_ptr(),
            receive: receive.as_mut_ptr(),
            receive_lens: receive_lens.as_ptr(),
        };
        // SAFETY: the slices are borrowed until the wait is over, and do not overlap.
        let request = unsafe { self.start(collective) }?;
        self.wait(request)
    }

    /// Starts a [`Collective::Broadcast`] and waits for it.
    fn broadcast(&mut self, bytes: &mut [u8], root: usize) -> Result<()> {
        on_host(self.memory())?;
        // SAFETY: the slice is borrowed until the wait is over.
        let request =
            unsafe { self.start(Collective::Broadcast { bytes: bytes.as_mut_ptr(), len: bytes.len(), root }) }?;
        self.wait(request)
    }

    /// Starts a [`Collective::Barrier`] and waits for it.
    fn barrier(&mut self) -> Result<()> {
        // SAFETY: no memory is lent.
        let request = unsafe { self.start(Collective::Barrier) }?;
        self.wait(request)
    }
}

/// Returns the timeout of a new world: the value of `GAPLESS_TIMEOUT_SECONDS`, or else ten minutes.
///
/// # Errors
/// Returns an error if the variable is not a positive number.
pub fn default_timeout() -> Result<Duration> {
    timeout(std::env::var_os(TIMEOUT_VARIABLE).as_deref())
}

const TIMEOUT_VARIABLE: &str = "GAPLESS_TIMEOUT_SECONDS";

fn timeout(value: Option<&OsStr>) -> Result<Duration> {
    let Some(value) = value else { return Ok(Duration::from_secs(600)) };
    let seconds = value.to_str().and_then(|text| text.trim().parse::<f64>().ok()).filter(|s| *s > 0.0);
    seconds.and_then(|s| Duration::try_from_secs_f64(s).ok()).ok_or_else(|| CommunicatorError::Setting {
        variable: TIMEOUT_VARIABLE,
        value: value.to_string_lossy().into_owned(),
        expected: "a positive number of seconds",
    })
}

fn on_host(memory: Memory) -> Result<()> {
    match memory {
        Memory::Host => Ok(()),
        Memory::Device => Err(CommunicatorError::Unsupported {
            what: "a message in host memory over this backend",
            remedy: "pass device addresses to isend, irecv and start",
        }),
    }
}

fn fits(what: &'static str, given: usize, expected: usize) -> Result<()> {
    if given == expected { Ok(()) } else { Err(CommunicatorError::Length { what, given, expected }) }
}

/// Returns the sum, or `usize::MAX` if the sum overflows. No slice has the length `usize::MAX`, so the caller's length
/// check fails.
fn total(lens: &[usize]) -> usize {
    lens.iter().try_fold(0usize, |sum, len| sum.checked_add(*len)).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_are_positive_seconds() {
        for (value, expected) in [(None, 600.0), (Some("2"), 2.0), (Some(" 0.5 "), 0.5)] {
            assert_eq!(timeout(value.map(OsStr::new)).unwrap().as_secs_f64(), expected);
        }
        for value in ["", "x", "0", "-1", "inf", "nan", "1e300"] {
            let text = timeout(Some(OsStr::new(value))).expect_err(value).to_string();
            assert_eq!(text, format!("GAPLESS_TIMEOUT_SECONDS={value:?} is not a positive number of seconds"));
        }
    }
}

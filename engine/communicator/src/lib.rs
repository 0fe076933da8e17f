//! Exchange of tensors between ranks: messages between two ranks, and collectives over all of them.
//!
//! A [`Communicator`] is one rank's end of a group of ranks. In: ranges of memory, mostly planned ranges of an arena.
//! Out: the same ranges, filled. It knows neither tensors nor schedules, and never buffers a message itself: memory is
//! lent to it from an operation's start to the matching wait.
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

/// The memory that a backend's addresses refer to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Memory {
    /// This process's memory.
    Host,
    /// The memory of the backend's device.
    Device,
}

/// A collective operation as one rank starts it: the kind of operation, and this rank's memory.
///
/// n is the size of the communicator. Sums add rank 0's value first, then rank 1's and so on, in f32, so they do not
/// depend on timing and are the same on all ranks. `f32` addresses are aligned to 4 bytes.
#[derive(Debug, Clone, Copy)]
pub enum Collective {
    /// `values[i]` ← Σ over ranks of `values[i]`.
    AllReduce {
        /// Summed in place.
        values: *mut f32,
        /// Elements, the same on all ranks.
        count: usize,
    },
    /// `receive` ← this rank's part of the sum over ranks of `send`.
    ReduceScatter {
        /// n parts of `count` elements.
        send: *const f32,
        /// `count` elements. May be this rank's own part of `send`; any other overlap is forbidden.
        receive: *mut f32,
        /// Elements of a part, the same on all ranks.
        count: usize,
    },
    /// Part r of `receive` ← `send` of rank r.
    AllGather {
        /// `len` bytes. May be this rank's own part of `receive`; any other overlap is forbidden.
        send: *const u8,
        /// n parts of `len` bytes.
        receive: *mut u8,
        /// Bytes of a part, the same on all ranks.
        len: usize,
    },
    /// Part r of `receive` ← this rank's part of rank r's `send`. Parts are stored one after another, in the order of
    /// ranks.
    AllToAllV {
        /// Σ `send_lens` bytes.
        send: *const u8,
        /// n sizes in bytes, lent like the rest.
        send_lens: *const usize,
        /// Σ `receive_lens` bytes.
        receive: *mut u8,
        /// n sizes in bytes, lent like the rest; entry r is the size that rank r sends to this one.
        receive_lens: *const usize,
    },
    /// `bytes` ← `bytes` of rank `root`.
    Broadcast {
        /// Read on `root`, written on the other ranks.
        bytes: *mut u8,
        /// Size in bytes, the same on all ranks.
        len: usize,
        /// The rank whose bytes are sent.
        root: usize,
    },
    /// Ends once all ranks have started it.
    Barrier,
}

impl fmt::Display for Collective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.kind().fmt(f)
    }
}

/// One rank's end of a group of ranks. Used by one thread at a time.
///
/// - A start never waits for another rank, except for the first ones over NCCL.
/// - Once all its ranks have started an operation, it ends, whatever the ranks do meanwhile. A rank that waits for it
///   does not need the others to wait too.
/// - Two messages between the same ranks with the same tag arrive in the order in which they were sent.
/// - All ranks of a communicator must start collectives in the same order. Collectives and messages may be waited for
///   in any order.
/// - Messages of 0 bytes, messages from a rank to itself and communicators of one rank are allowed like any other.
/// - Ranks in errors are those of the world, not of the group that [`split`](Self::split) returned.
///
/// # Errors
/// Every method that returns a [`Result`] fails once a rank of the world has failed, and names that rank. A rank has
/// failed when it aborted or panicked, dropped its communicator with an operation in progress, or got an error of its
/// own from one of these methods. The world cannot be used after that. Ranks that are processes end instead of
/// returning such an error.
///
/// # Safety
/// An implementation must not access lent memory any more
/// - once [`wait`](Self::wait) has returned for its request, *also with an error*,
/// - once the communicator has been dropped, or
/// - after [`wait_on_device`](Self::wait_on_device), once the device runs what is launched after it; with an error, at
///   once.
///
/// [`memory`](Self::memory) may only be [`Memory::Host`] if addresses are those of this process. The blocking methods
/// over slices rely on both.
pub unsafe trait Communicator: Send + std::fmt::Debug {
    /// This rank's index, from 0.
    fn rank(&self) -> usize;

    /// Number of ranks.
    fn size(&self) -> usize;

    /// The memory that addresses refer to.
    fn memory(&self) -> Memory;

    /// Sets how long a wait may take. The default is ten minutes, or `GAPLESS_TIMEOUT_SECONDS`.
    fn set_timeout(&mut self, timeout: Duration);

    /// Starts to send `len` bytes. The wait for it ends when they have been read from this memory, not when they have
    /// arrived.
    ///
    /// # Safety
    /// `bytes` must be valid for reads of `len` bytes, and must not be written until the request was waited for or the
    /// communicator dropped.
    unsafe fn isend(&mut self, bytes: *const u8, len: usize, to: usize, tag: Tag) -> Result<Request>;

    /// Starts to receive a message of exactly `len` bytes.
    ///
    /// # Safety
    /// `bytes` must be valid for writes of `len` bytes, and must not be accessed by others until the request was waited
    /// for or the communicator dropped.
    unsafe fn irecv(&mut self, bytes: *mut u8, len: usize, from: usize, tag: Tag) -> Result<Request>;

    /// Starts a collective.
    ///
    /// # Safety
    /// The collective's memory must be valid for its reads and writes. Until the request was waited for or the
    /// communicator dropped, what it reads must not be written, and what it writes must not be accessed. Operands may
    /// overlap only as [`Collective`] says.
    unsafe fn start(&mut self, collective: Collective) -> Result<Request>;

    /// Waits until an operation has ended, and ends the loan of its memory.
    ///
    /// # Errors
    /// Returns an error if
    /// - another rank has failed,
    /// - the message has another size than expected,
    /// - ranks have started different collectives,
    /// - the operation takes longer than the timeout, or
    /// - the request belongs to another communicator; its memory then stays lent until that one is dropped.
    fn wait(&mut self, request: Request) -> Result<()>;

    /// Agrees with all ranks on the order in which a program's messages are launched ([`launch_order`]); each run of
    /// the program must begin with [`follow`](Self::follow). Returns `None` if the backend distinguishes messages by
    /// their tags. A collective operation, once per program.
    ///
    /// # Errors
    /// Returns an error like [`LaunchOrder::agree`].
    fn agree(&mut self, _program: &[Call]) -> Result<Option<Arc<LaunchOrder>>> {
        Ok(None)
    }

    /// Begins a run of a program whose order was agreed on. The run is over when all of its operations have been
    /// started.
    ///
    /// # Errors
    /// Returns an error if another run is in progress.
    fn follow(&mut self, _order: &Arc<LaunchOrder>) -> Result<()> {
        Ok(())
    }

    /// Makes the rank's following computation wait for an operation. On a device, the device waits while the host
    /// continues. The operation's memory can then be used by what is launched afterwards on the device, but by the host
    /// only once everything is [settled](Self::settle).
    ///
    /// # Errors
    /// Returns an error like [`wait`](Self::wait), though some errors only appear when it is settled.
    fn wait_on_device(&mut self, request: Request) -> Result<()> {
        self.wait(request)
    }

    /// Waits until all operations have ended that were passed to [`wait_on_device`](Self::wait_on_device).
    ///
    /// # Errors
    /// Returns an error like [`wait`](Self::wait).
    fn settle(&mut self) -> Result<()> {
        Ok(())
    }

    /// Splits the group into one communicator per `color` and returns the caller's. Ranks are ordered by `key`, then by
    /// their rank here. A collective operation: all ranks must call it, in the same order relative to other
    /// collectives. For a mesh, call it once per axis, with the other coordinates as the color.
    fn split(&mut self, color: usize, key: usize) -> Result<Box<dyn Communicator>>;

    /// Ends the work of all ranks: their waits fail, naming this rank and the reason. With MPI, ends the processes.
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

    /// Starts a [`Collective::ReduceScatter`] and waits for it. `send` holds one part of `receive.len()` elements per
    /// rank.
    fn reduce_scatter(&mut self, send: &[f32], receive: &mut [f32]) -> Result<()> {
        on_host(self.memory())?;
        fits("reduce_scatter's send", send.len(), receive.len() * self.size())?;
        let (send, count) = (send.as_ptr(), receive.len());
        let collective = Collective::ReduceScatter { send, receive: receive.as_mut_ptr(), count };
        // SAFETY: the slices are borrowed until the wait is over, and do not overlap.
        let request = unsafe { self.start(collective) }?;
        self.wait(request)
    }

    /// Starts a [`Collective::AllGather`] and waits for it. `receive` holds one part of `send.len()` bytes per rank.
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

/// The timeout of a new world: `GAPLESS_TIMEOUT_SECONDS`, or ten minutes.
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

/// The sum, or `usize::MAX` if it overflows, which no slice's length equals.
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

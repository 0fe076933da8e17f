//! How ranks exchange tensors: messages between two ranks, collectives over all of them.
//!
//! A [`Communicator`] is one rank's end of a group of ranks. What comes in are ranges of memory, planned ranges of an
//! arena for the most part; what goes out is the same ranges, filled. It knows neither tensors nor schedules, and never
//! buffers a message of its own accord: memory is lent to it from a start to the matching wait.
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

/// Where the addresses of a backend's messages point to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Memory {
    /// This process's memory.
    Host,
    /// The memory of the backend's device.
    Device,
}

/// A collective operation of one rank: what it does, and this rank's memory.
///
/// n is the size of the communicator. Sums add rank 0's value first, then rank 1's and so on, in f32: they do not depend
/// on timing, and are the same on all ranks. `f32` addresses are aligned to 4 bytes.
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
    /// Part r of `receive` ← this rank's part of rank r's `send`. Parts lie one after another, in the order of ranks.
    AllToAllV {
        /// Σ `send_lens` bytes.
        send: *const u8,
        /// n sizes in bytes. Lent like the rest.
        send_lens: *const usize,
        /// Σ `receive_lens` bytes.
        receive: *mut u8,
        /// n sizes in bytes; entry r is what rank r sends here. Lent like the rest.
        receive_lens: *const usize,
    },
    /// `bytes` ← `bytes` of rank `root`.
    Broadcast {
        /// Read on `root`, written elsewhere.
        bytes: *mut u8,
        /// The same on all ranks.
        len: usize,
        /// Whose bytes.
        root: usize,
    },
    /// Ends when all ranks have started it.
    Barrier,
}

impl fmt::Display for Collective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.kind().fmt(f)
    }
}

/// One rank's end of a group of ranks. Used by one thread at a time.
///
/// Starting never waits for another rank (over NCCL the first one may). An operation that all its ranks have started ends, whatever the ranks do
/// meanwhile; who waits for it need not be waited for. Two messages between the same ranks with the same tag arrive in
/// the order in which they were sent. Collectives are started in the same order by all ranks of a communicator; they and
/// messages may be waited for in any order. Messages of 0 bytes, messages to oneself and communicators of one rank are
/// nothing special. Ranks in errors are those of the world, not of the part that [`split`](Self::split) gave.
///
/// # Errors
/// Every method that returns a [`Result`] fails once a rank of the world has failed, naming that rank. A rank has failed
/// when it aborted, panicked, went away with an operation under way, or had an error of its own out of these methods.
/// There is no going on after that. Ranks that are processes end instead of returning such an error.
///
/// # Safety
/// An implementation leaves lent memory alone once [`wait`](Self::wait) has returned for its request, *also with an
/// error*, and once the communicator is dropped; after [`wait_on_device`](Self::wait_on_device), once the device comes to what
/// is launched behind it, and with an error at once. [`memory`](Self::memory) is [`Memory::Host`] only if addresses are those
/// of this process: the blocking methods over slices rest on both.
pub unsafe trait Communicator: Send + std::fmt::Debug {
    /// This rank, from 0.
    fn rank(&self) -> usize;

    /// Number of ranks.
    fn size(&self) -> usize;

    /// What addresses mean.
    fn memory(&self) -> Memory;

    /// How long a wait may take. Ten minutes by default, or `GAPLESS_TIMEOUT_SECONDS`.
    fn set_timeout(&mut self, timeout: Duration);

    /// Starts to send `len` bytes. The wait ends when they are out of this memory, not when they have arrived.
    ///
    /// # Safety
    /// `bytes` is valid for reads of `len` bytes and nobody writes them, until the request was waited for or the
    /// communicator dropped.
    unsafe fn isend(&mut self, bytes: *const u8, len: usize, to: usize, tag: Tag) -> Result<Request>;

    /// Starts to receive a message of exactly `len` bytes.
    ///
    /// # Safety
    /// `bytes` is valid for writes of `len` bytes and nobody else reads or writes them, until the request was waited for
    /// or the communicator dropped.
    unsafe fn irecv(&mut self, bytes: *mut u8, len: usize, from: usize, tag: Tag) -> Result<Request>;

    /// Starts a collective.
    ///
    /// # Safety
    /// The collective's memory is valid for its reads and writes; nobody writes what it reads, or touches what it
    /// writes, until the request was waited for or the communicator dropped. Overlaps are as [`Collective`] says.
    unsafe fn start(&mut self, collective: Collective) -> Result<Request>;

    /// Waits until an operation has ended, and gives its memory back.
    ///
    /// # Errors
    /// When another rank has failed, when the message has another size than expected, when ranks disagree on what
    /// collective this is, or when it takes longer than the timeout. Also when the request is another communicator's, whose
    /// memory then stays lent until that one is dropped.
    fn wait(&mut self, request: Request) -> Result<()>;

    /// Agrees with all ranks on the order in which a program's messages are launched ([`launch_order`]), which [`follow`](Self::follow)
    /// begins a run of. None where messages are told apart by their tags. A collective operation, once per program.
    ///
    /// # Errors
    /// As [`LaunchOrder::agree`].
    fn agree(&mut self, _program: &[Call]) -> Result<Option<Arc<LaunchOrder>>> {
        Ok(None)
    }

    /// Begins a run of a program that an order was agreed on for. It is over when everything was started that belongs to it.
    ///
    /// # Errors
    /// When another run is under way.
    fn follow(&mut self, _order: &Arc<LaunchOrder>) -> Result<()> {
        Ok(())
    }

    /// Has what the rank computes from now on wait for an operation. Where memory is a device's, the device waits and the host goes on:
    /// the operation's memory is the device's again for what is launched from now on, and the host's once all is
    /// [settled](Self::settle).
    ///
    /// # Errors
    /// As [`wait`](Self::wait), some of them not before it is settled.
    fn wait_on_device(&mut self, request: Request) -> Result<()> {
        self.wait(request)
    }

    /// Waits until all has ended that was left to the device to wait for.
    ///
    /// # Errors
    /// As [`wait`](Self::wait).
    fn settle(&mut self) -> Result<()> {
        Ok(())
    }

    /// Cuts the group into one communicator per `color`, of which the caller gets its own. Ranks are in the order of
    /// `key`, then of the rank here. A collective operation: all ranks call it, in the order of the other collectives.
    /// For a mesh, once per axis, with the other coordinates as the color.
    fn split(&mut self, color: usize, key: usize) -> Result<Box<dyn Communicator>>;

    /// Ends the work of all ranks: their waits fail, naming this rank and the reason. On MPI it ends the processes.
    fn abort(&mut self, reason: &str);

    /// Sends and waits until the bytes are on their way.
    fn send(&mut self, bytes: &[u8], to: usize, tag: Tag) -> Result<()> {
        on_host(self.memory())?;
        // SAFETY: the slice is borrowed until the wait is over.
        let request = unsafe { self.isend(bytes.as_ptr(), bytes.len(), to, tag) }?;
        self.wait(request)
    }

    /// Receives a message of exactly `bytes.len()` bytes.
    fn receive(&mut self, bytes: &mut [u8], from: usize, tag: Tag) -> Result<()> {
        on_host(self.memory())?;
        // SAFETY: the slice is borrowed until the wait is over.
        let request = unsafe { self.irecv(bytes.as_mut_ptr(), bytes.len(), from, tag) }?;
        self.wait(request)
    }

    /// [`Collective::AllReduce`], to its end.
    fn all_reduce(&mut self, values: &mut [f32]) -> Result<()> {
        on_host(self.memory())?;
        let collective = Collective::AllReduce { values: values.as_mut_ptr(), count: values.len() };
        // SAFETY: the slice is borrowed until the wait is over.
        let request = unsafe { self.start(collective) }?;
        self.wait(request)
    }

    /// [`Collective::ReduceScatter`], to its end. `send` holds one part of `receive.len()` elements per rank.
    fn reduce_scatter(&mut self, send: &[f32], receive: &mut [f32]) -> Result<()> {
        on_host(self.memory())?;
        fits("reduce_scatter's send", send.len(), receive.len() * self.size())?;
        let (send, count) = (send.as_ptr(), receive.len());
        let collective = Collective::ReduceScatter { send, receive: receive.as_mut_ptr(), count };
        // SAFETY: the slices are borrowed until the wait is over, and do not overlap.
        let request = unsafe { self.start(collective) }?;
        self.wait(request)
    }

    /// [`Collective::AllGather`], to its end. `receive` holds one part of `send.len()` bytes per rank.
    fn all_gather(&mut self, send: &[u8], receive: &mut [u8]) -> Result<()> {
        on_host(self.memory())?;
        fits("all_gather's receive", receive.len(), send.len() * self.size())?;
        let (len, receive) = (send.len(), receive.as_mut_ptr());
        // SAFETY: the slices are borrowed until the wait is over, and do not overlap.
        let request = unsafe { self.start(Collective::AllGather { send: send.as_ptr(), receive, len }) }?;
        self.wait(request)
    }

    /// [`Collective::AllToAllV`], to its end. Sizes are in bytes, one per rank.
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

    /// [`Collective::Broadcast`], to its end.
    fn broadcast(&mut self, bytes: &mut [u8], root: usize) -> Result<()> {
        on_host(self.memory())?;
        // SAFETY: the slice is borrowed until the wait is over.
        let request =
            unsafe { self.start(Collective::Broadcast { bytes: bytes.as_mut_ptr(), len: bytes.len(), root }) }?;
        self.wait(request)
    }

    /// [`Collective::Barrier`], to its end.
    fn barrier(&mut self) -> Result<()> {
        // SAFETY: no memory is lent.
        let request = unsafe { self.start(Collective::Barrier) }?;
        self.wait(request)
    }
}

/// The timeout of a new world: `GAPLESS_TIMEOUT_SECONDS`, or ten minutes.
///
/// # Errors
/// When the variable is set to something that is not a positive number.
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

/// The sum, or a number that no slice's length equals.
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

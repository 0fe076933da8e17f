//! In which order a backend that knows no tags launches messages: one order for all ranks, agreed on beforehand.
//!
//! NCCL pairs messages by position: the third send to a peer is what the peer's third receive gets. Besides, what a rank
//! has launched runs one after the other, and each message holds up all behind it until its peer has come to it. Programs
//! promise neither order: a sender sends when a value is made, a receiver receives when it needs one, and a tag tells them
//! which is which. So a start is one thing, a launch another:
//!
//! > **The launches of all ranks are subsequences of one list of messages and collectives.**
//!
//! Then nothing is confused, for both ends of a pair see its messages in the order of the list; and nothing hangs, for of
//! all that is not through yet, the first on the list is the next at each of its ends.
//!
//! In: what every rank will start, wait for and compute, in its program's order ([`Call`]s). Out: for each rank, in which
//! order it launches what it starts ([`LaunchOrder`]). The list is the order in which messages find both their ends
//! started when all programs are walked through together (`matching`), so a rank never has to launch what its program
//! starts only after waiting for something behind it. In effect, sends are held back until the receiver has come near
//! them; their memory is lent until then anyway.
//!
//! ```text
//! rank 0   send a, send b            rank 0 launches   send b, send a
//! rank 1   receive b, receive a      rank 1 launches   receive b, receive a
//! ```
//!
//! ```
//! use gapless_communicator::{Tag, launch_order::{Call, Launch, LaunchOrder, Start}};
//!
//! let tag = |micro_batch| Tag { micro_batch, ..Tag::default() };
//! let send = |m| Call::Start(Start::Send { to: 1, tag: tag(m), len: 8 });
//! let receive = |m| Call::Start(Start::Receive { from: 0, tag: tag(m), len: 8 });
//! let zero = vec![send(0), send(1), Call::Wait(0), Call::Wait(1)];
//! let one = vec![receive(1), Call::Wait(0), receive(0), Call::Wait(1)];
//! let orders = LaunchOrder::of(&[zero, one])?;
//! assert_eq!(orders[0].launches(), [Launch::One(1), Launch::One(0)]);
//! # Ok::<(), gapless_communicator::CommunicatorError>(())
//! ```

#[cfg(any(test, feature = "testing"))]
#[doc(hidden)]
pub mod judge;
mod matching;
mod queue;
#[cfg(test)]
mod tests;

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{Collective, Communicator, CommunicatorError, Result, Tag};
pub use queue::LaunchQueue;

/// One thing that a rank's program does with a communicator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Call {
    /// Starts an operation.
    Start(Start),
    /// Waits for the program's start of this number, from 0.
    Wait(usize),
    /// Computes for so long, in any unit that is the same on all ranks. Makes the order a good one; any is a right one.
    Compute(u64),
}

/// The start of an operation, without its addresses. Sizes are in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names say it")]
pub enum Start {
    Send { to: usize, tag: Tag, len: usize },
    Receive { from: usize, tag: Tag, len: usize },
    Collective(Kind),
}

/// What a collective does, without its addresses: what all ranks have to agree on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "as in `Collective`")]
pub enum Kind {
    AllReduce { count: usize },
    ReduceScatter { count: usize },
    AllGather { len: usize },
    AllToAllV,
    Broadcast { len: usize, root: usize },
    Barrier,
}

/// The order in which one rank launches what its program starts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LaunchOrder {
    /// What the program starts, in its order.
    starts: Vec<Start>,
    launches: Vec<Launch>,
}

/// What is launched at once. Numbers are those of starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Launch {
    /// One end of a message, or a part in a collective.
    One(usize),
    /// Both ends of a message to oneself.
    Oneself {
        /// From here,
        send: usize,
        /// to here.
        receive: usize,
    },
}

impl LaunchOrder {
    /// The orders of all ranks, given what each will do.
    ///
    /// # Errors
    /// When a message has one end only, or ends that differ in size; when ranks start different collectives; when ranks
    /// wait for each other in a circle; when a program waits for what it has not started.
    pub fn of(programs: &[Vec<Call>]) -> Result<Vec<Self>> {
        matching::orders(programs)
    }

    /// This rank's order, given what it will do. A collective operation over any communicator of the same ranks in the host's
    /// memory. Every rank works out the whole order from all programs, and all get the same errors as of [`Self::of`].
    ///
    /// # Errors
    /// As [`Self::of`], and what the exchange may fail with.
    pub fn agree(over: &mut dyn Communicator, program: &[Call]) -> Result<Self> {
        let text = serde_json::to_vec(program).expect("calls are plain data");
        let programs = gather(over, &text)?.into_iter().map(|text| {
            serde_json::from_slice(&text).map_err(|_| CommunicatorError::Unsupported {
                what: "the program description of another rank",
                remedy: "run the same build on all ranks",
            })
        });
        let mut orders = Self::of(&programs.collect::<Result<Vec<_>>>()?)?;
        Ok(orders.swap_remove(over.rank()))
    }

    /// Everything launched as it is started: what the judge is to find wrong.
    #[cfg(any(test, feature = "testing"))]
    #[doc(hidden)]
    pub fn as_started(&self) -> Self {
        Self { starts: self.starts.clone(), launches: (0..self.starts.len()).map(Launch::One).collect() }
    }

    /// What the program starts, in its order.
    pub fn starts(&self) -> &[Start] {
        &self.starts
    }

    /// What is launched, in order.
    pub fn launches(&self) -> &[Launch] {
        &self.launches
    }
}

/// The bytes of all ranks, of any length each.
fn gather(over: &mut dyn Communicator, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
    const WORD: usize = size_of::<u64>();
    let mut lens = vec![0; WORD * over.size()];
    over.all_gather(&(bytes.len() as u64).to_le_bytes(), &mut lens)?;
    let lens =
        lens.chunks_exact(WORD).map(|word| u64::from_le_bytes(word.try_into().expect("a word's bytes")) as usize);
    let lens: Vec<usize> = lens.collect();
    let longest = lens.iter().copied().max().unwrap_or(0);
    let mut padded = bytes.to_vec();
    padded.resize(longest, 0);
    let mut all = vec![0; longest * over.size()];
    over.all_gather(&padded, &mut all)?;
    Ok(lens.iter().enumerate().map(|(rank, len)| all[rank * longest..][..*len].to_vec()).collect())
}

impl Collective {
    /// It without its addresses.
    pub fn kind(&self) -> Kind {
        match *self {
            Self::AllReduce { count, .. } => Kind::AllReduce { count },
            Self::ReduceScatter { count, .. } => Kind::ReduceScatter { count },
            Self::AllGather { len, .. } => Kind::AllGather { len },
            Self::AllToAllV { .. } => Kind::AllToAllV,
            Self::Broadcast { len, root, .. } => Kind::Broadcast { len, root },
            Self::Barrier => Kind::Barrier,
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AllReduce { count } => write!(f, "all_reduce of {count} elements"),
            Self::ReduceScatter { count } => write!(f, "reduce_scatter into parts of {count} elements"),
            Self::AllGather { len } => write!(f, "all_gather of parts of {len} bytes"),
            Self::AllToAllV => f.write_str("all_to_all_v"),
            Self::Broadcast { len, root } => write!(f, "broadcast of {len} bytes, root {root}"),
            Self::Barrier => f.write_str("barrier"),
        }
    }
}

impl fmt::Display for Start {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Send { to, tag, len } => write!(f, "a send of {tag}, {len} bytes, to rank {to}"),
            Self::Receive { from, tag, len } => write!(f, "a receive of {tag}, {len} bytes, from rank {from}"),
            Self::Collective(kind) => kind.fmt(f),
        }
    }
}

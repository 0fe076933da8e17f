//! The order in which a backend without tags launches messages: one order for all ranks, agreed on beforehand.
//!
//! NCCL pairs messages by position: a peer's third receive gets the third message that was sent to that peer. Moreover,
//! the operations that a rank has launched run one after another, and each message blocks the rank's later operations
//! until the peer has launched the message too. In programs, however, a sender sends when a value is computed, a
//! receiver receives when it needs the value, and only the tag identifies the message. So starting an operation and
//! launching it are two different things, and the launches follow a rule:
//!
//! > **The launches of all ranks are subsequences of one list of messages and collectives.**
//!
//! Then messages cannot be confused, because both ends of a pair see their messages in the order of the list. Launches
//! cannot deadlock either: of all operations that have not completed, the first on the list is the next launch at each
//! of its ends.
//!
//! In: for each rank, the operations that it will start, wait for and compute, in the order of its program ([`Call`]s).
//! Out: for each rank, the order in which it launches the operations it starts ([`LaunchOrder`]). The list comes from a
//! simulation of all programs together (`matching`): an operation is listed when all of its ends have been started. So
//! when a program waits for an operation, it has already started all of its own operations that are earlier on the
//! list. In effect, a send is held back until the receiver is about to need the message. The memory of the send is lent
//! until then anyway.
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

/// One call of a rank's program to its communicator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Call {
    /// Starts an operation.
    Start(Start),
    /// Waits for the program's start with this index.
    Wait(usize),
    /// A computation of this duration, in any unit that all ranks share. Accurate durations give a better order, but
    /// the order is correct with any durations.
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

/// The kind of a collective and its sizes, without addresses. All ranks must start the collective with the same kind
/// and sizes.
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

/// The order in which one rank launches the operations that its program starts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LaunchOrder {
    /// The starts of the program, in program order.
    starts: Vec<Start>,
    launches: Vec<Launch>,
}

/// A single launch. Indices count the starts of the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Launch {
    /// One end of a message, or this rank's share in a collective.
    One(usize),
    /// Both ends of a message that a rank sends to itself.
    Oneself {
        /// The index of the message's send.
        send: usize,
        /// The index of the message's receive.
        receive: usize,
    },
}

impl LaunchOrder {
    /// Determines the orders of all ranks from their programs.
    ///
    /// # Errors
    /// Returns an error if
    /// - only one end of a message is started, or the two ends differ in size,
    /// - ranks start different collectives,
    /// - ranks wait for each other in a cycle, or
    /// - a program waits for an operation that it has not started.
    pub fn of(programs: &[Vec<Call>]) -> Result<Vec<Self>> {
        matching::orders(programs)
    }

    /// Determines this rank's order from its program. This is a collective operation over any communicator of the same
    /// ranks in host memory. Every rank computes the orders from the programs of all ranks, so all ranks get the same
    /// errors.
    ///
    /// # Errors
    /// Returns an error in the same cases as [`Self::of`], or if the exchange fails.
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

    /// Returns an order in which every operation is launched when it is started. It serves to test the checker.
    #[cfg(any(test, feature = "testing"))]
    #[doc(hidden)]
    pub fn as_started(&self) -> Self {
        Self { starts: self.starts.clone(), launches: (0..self.starts.len()).map(Launch::One).collect() }
    }

    /// The starts of the program, in program order.
    pub fn starts(&self) -> &[Start] {
        &self.starts
    }

    /// The launches, in order.
    pub fn launches(&self) -> &[Launch] {
        &self.launches
    }
}

/// Gathers bytes from all ranks, whose lengths may differ.
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
    /// Returns the kind and the sizes of the collective, without its addresses.
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

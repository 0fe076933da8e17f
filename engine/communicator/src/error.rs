//! The errors of communicators.

use std::fmt;
use std::time::Duration;

use crate::Tag;

/// `Result` with [`CommunicatorError`].
pub type Result<T, E = CommunicatorError> = std::result::Result<T, E>;

/// An error of a communicator. All ranks in the error are world ranks.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages name the fields")]
pub enum CommunicatorError {
    #[error("rank {rank} is gone: {why} (seen by rank {by}, {awaited})")]
    PeerGone { rank: usize, why: String, by: usize, awaited: Awaited },
    #[error(
        "rank {rank} gave up after {} s {awaited}; check that all ranks run, with the same schedule, or set a longer wait in \
         GAPLESS_TIMEOUT_SECONDS", .after.as_secs_f64()
    )]
    Timeout { rank: usize, awaited: Awaited, after: Duration },
    #[error(
        "{what} from rank {from} to rank {to}: {sent} bytes were sent, {expected} are expected; \
         the two ranks run different programs: start both with the same model and batch"
    )]
    SizeMismatch { what: String, from: usize, to: usize, sent: usize, expected: usize },
    #[error(
        "rank {rank} started {started} where rank {other} started {other_started}; \
         start the same collectives in the same order on all ranks of a communicator"
    )]
    CollectiveMismatch { rank: usize, started: String, other: usize, other_started: String },
    #[error("there is no rank {rank} in a communicator of {size} ranks")]
    NoSuchRank { rank: usize, size: usize },
    #[error("{what} has length {given}, not {expected}")]
    Length { what: &'static str, given: usize, expected: usize },
    #[error("the request was not made by this communicator, or was waited for before; wait for each request once")]
    UnknownRequest,
    #[error("{variable}={value:?} is not {expected}")]
    Setting { variable: &'static str, value: String, expected: &'static str },
    #[error(
        "{tag}: its number is too large for MPI; the largest are stage 2047, micro-batch 8191 and tensor 31, \
         and this MPI library's tags end at {largest}"
    )]
    Tag { tag: Tag, largest: u64 },
    #[error("{call} failed: {what}")]
    Mpi { call: &'static str, what: String },
    #[error("MPI was started before in this process; start it once")]
    StartedTwice,
    #[error(
        "cannot start a thread for rank {rank}: {why}; use fewer ranks, or raise the limit of processes (ulimit -u) or of memory \
         (ulimit -v)"
    )]
    NoThread { rank: usize, why: String },
    #[error("cannot start the thread for MPI: {0}")]
    Thread(String),
    #[error(
        "the ranks' programs deadlock: {}; start every message on both sides, and let no ranks wait for each other", Stuck(.ranks)
    )]
    Stuck { ranks: Vec<(usize, Awaited)> },
    #[error(
        "rank {rank} started {started} as operation {number} of a run, where the program that the ranks agreed on has \
         {expected}; agree on the order of the program that runs"
    )]
    NotAsAgreed { rank: usize, number: usize, started: String, expected: String },
    #[error("ranks on GPUs cannot run here: there is no {}", Missing(.libraries))]
    Missing { libraries: Vec<MissingLibrary> },
    #[error("{call} failed: {what}")]
    Nccl { call: &'static str, what: String },
    #[error("{call} failed: {what}")]
    Cuda { call: &'static str, what: String },
    #[error(
        "{len} bytes at {address:#x} are not memory of GPU {device}, but {found}; give NCCL memory of the \
         communicator's own GPU"
    )]
    NotOnDevice { address: usize, len: usize, device: usize, found: String },
    #[error(transparent)]
    World(#[from] gapless_parallel::WorldError),
    #[error("{what} is not supported; {remedy}")]
    Unsupported { what: &'static str, remedy: &'static str },
}

/// A library that is required at run time but missing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MissingLibrary {
    /// The missing library, for messages.
    pub what: &'static str,
    /// The file names that were tried, and the reason why each failed.
    pub tried: Vec<(String, String)>,
    /// The remedy.
    pub remedy: &'static str,
}

impl fmt::Display for MissingLibrary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (looked for ", self.what)?;
        for (i, (name, why)) in self.tried.iter().enumerate() {
            write!(f, "{}{name}", if i == 0 { "" } else { ", " })?;
            if !why.is_empty() {
                write!(f, ": {why}")?;
            }
        }
        write!(f, "): {}", self.remedy)
    }
}

/// Displays missing libraries.
struct Missing<'a>(&'a [MissingLibrary]);

impl fmt::Display for Missing<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, library) in self.0.iter().enumerate() {
            write!(f, "{}{library}", if i == 0 { "" } else { "; and no " })?;
        }
        Ok(())
    }
}

/// Displays ranks and the operations that they wait for.
struct Stuck<'a>(&'a [(usize, Awaited)]);

impl fmt::Display for Stuck<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, (rank, awaited)) in self.0.iter().enumerate() {
            write!(f, "{}rank {rank} is {awaited}", if i == 0 { "" } else { ", " })?;
        }
        Ok(())
    }
}

/// The operation that a rank was waiting for.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs, reason = "the text names the fields")]
pub enum Awaited {
    /// The start of an operation. The rank was not waiting yet.
    Start,
    /// The arrival of a message.
    Message { from: usize, tag: Tag },
    /// The receipt of a message by its receiver.
    Taken { to: usize, tag: Tag },
    /// The other ranks of a collective. `missing` are those that have not started it, as far as the backend knows.
    Collective { what: String, missing: Vec<usize> },
}

impl fmt::Display for Awaited {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Start => f.write_str("starting an operation"),
            Self::Message { from, tag } => write!(f, "waiting for {tag} from rank {from}"),
            Self::Taken { to, tag } => write!(f, "waiting for rank {to} to receive {tag}"),
            Self::Collective { what, missing } if missing.is_empty() => write!(f, "waiting for {what} to end"),
            Self::Collective { what, missing } => {
                write!(f, "waiting for rank{} ", if missing.len() == 1 { "" } else { "s" })?;
                for (i, rank) in missing.iter().enumerate() {
                    write!(f, "{}{rank}", if i == 0 { "" } else { ", " })?;
                }
                write!(f, " to start {what}")
            }
        }
    }
}

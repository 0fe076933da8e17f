//! Errors of problems, tables and arenas.

use std::fmt;

/// Every error of this crate.
#[derive(Debug)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages name the fields")]
pub enum Error {
    EmptyLifetime { buffer: usize, start: u64, end: u64 },
    ZeroAlignment { buffer: usize },
    AlignmentsTooLarge { buffer: usize, alignment: u64 },
    Misaligned { buffer: usize, offset: u64, alignment: u64 },
    TooLarge { bytes: u128, tick: u64 },
    TooManyBuffers { buffers: usize },
    NotOnePerBuffer { table: &'static str, entries: usize, buffers: usize },
    OutOfAddressSpace { buffer: usize, offset: u64, bytes: u64 },
    EmptyMark { name: String, start: u64, end: u64 },
    PinsOverlap { first: usize, second: usize },
    PinnedOnForbidden { buffer: usize, start: u64, end: u64 },
    Group { group: usize, buffer: usize, what: &'static str },
    Apart { first: usize, second: usize, what: &'static str },
    Gap { buffer: usize, what: &'static str },
    Request { request: usize, tensor: String, what: &'static str },
    Factor { factor: f64 },
    ReserveInside { base: u64, height: u64 },
    NoRoom,
    Csv { line: u64, what: String },
    Io(std::io::Error),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::EmptyLifetime { buffer, start, end } => {
                write!(f, "buffer {buffer}: lifetime [{start}, {end}) is empty; a buffer must end after it starts")
            }
            Self::ZeroAlignment { buffer } => write!(f, "buffer {buffer}: alignment 0; the smallest alignment is 1"),
            Self::AlignmentsTooLarge { buffer, alignment } => write!(
                f,
                "buffer {buffer}: alignment {alignment} is too large: with the padding that alignments may need, addresses would exceed 2^64"
            ),
            Self::Misaligned { buffer, offset, alignment } => write!(
                f,
                "buffer {buffer}: pinned at offset {offset}, which is not a multiple of its alignment {alignment}"
            ),
            Self::TooLarge { bytes, tick } => {
                write!(f, "{bytes} bytes are alive at tick {tick}, more than an address space has (2^64 - 1 bytes)")
            }
            Self::TooManyBuffers { buffers } => {
                write!(f, "{buffers} buffers are too many; at most 2^32 - 1 can be planned")
            }
            Self::NotOnePerBuffer { table, entries, buffers } => {
                write!(f, "{entries} {table} for {buffers} buffers; a memory map needs one per buffer")
            }
            Self::OutOfAddressSpace { buffer, offset, bytes } => write!(
                f,
                "buffer {buffer}: {bytes} bytes at offset {offset} end past the address space (2^64 - 1 bytes)"
            ),
            Self::EmptyMark { name, start, end } => {
                write!(f, "mark {name:?}: ticks [{start}, {end}) are empty; a phase must end after it starts")
            }
            Self::PinsOverlap { first, second } => write!(
                f,
                "buffers {first} and {second} are alive together and pinned onto each other; move or shorten one"
            ),
            Self::PinnedOnForbidden { buffer, start, end } => {
                write!(f, "buffer {buffer} is pinned onto the forbidden range [{start}, {end}); pin it elsewhere")
            }
            Self::Group { group, buffer, what } => write!(f, "group {group}: buffer {buffer} {what}"),
            Self::Apart { first, second, what } => {
                write!(f, "buffers {first} and {second}, which are to be kept apart, {what}")
            }
            Self::Gap { buffer, what } => write!(f, "buffer {buffer} {what}"),
            Self::Request { request, tensor, what } => write!(f, "request {request} ({tensor}) {what}"),
            Self::Factor { factor } => {
                write!(f, "the reserve's factor of the balanced sizes is {factor}; it must be finite and at least 0")
            }
            Self::ReserveInside { base, height } => write!(
                f,
                "the arena's reserve begins at byte {base}, inside the static plan, which ends at byte {height}"
            ),
            Self::NoRoom => {
                write!(f, "the sizes that the arena promises exceed the address space (2^64 - 1 bytes); promise less")
            }
            Self::Csv { line, what } => write!(f, "line {line}: {what}"),
            Self::Io(_) => write!(f, "cannot read or write the table"),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Io(error) => Some(error),
            _ => None,
        }
    }
}

impl From<std::io::Error> for Error {
    fn from(error: std::io::Error) -> Self {
        Self::Io(error)
    }
}

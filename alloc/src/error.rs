//! What can be wrong with a problem or a table of one.

/// Every error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages name the fields")]
pub enum Error {
    #[error("buffer {buffer}: lifetime [{start}, {end}) is empty; a buffer must end after it starts")]
    EmptyLifetime { buffer: usize, start: u64, end: u64 },
    #[error("buffer {buffer}: alignment 0; the smallest alignment is 1")]
    ZeroAlignment { buffer: usize },
    #[error(
        "buffer {buffer}: alignment {alignment}; with the gaps that all alignments may ask for, addresses would exceed 2^64"
    )]
    AlignmentsTooLarge { buffer: usize, alignment: u64 },
    #[error("buffer {buffer}: pinned at offset {offset}, which is not a multiple of its alignment {alignment}")]
    Misaligned { buffer: usize, offset: u64, alignment: u64 },
    #[error("{bytes} bytes are alive at tick {tick}, more than an address space has (2^64 - 1 bytes)")]
    TooLarge { bytes: u128, tick: u64 },
    #[error("{buffers} buffers; at most 2^32 - 1 can be planned")]
    TooManyBuffers { buffers: usize },
    #[error("{entries} {table} for {buffers} buffers; a memory map needs one per buffer")]
    NotOnePerBuffer { table: &'static str, entries: usize, buffers: usize },
    #[error("buffer {buffer}: {bytes} bytes at offset {offset} end past the address space (2^64 - 1 bytes)")]
    OutOfAddressSpace { buffer: usize, offset: u64, bytes: u64 },
    #[error("mark {name:?}: ticks [{start}, {end}) are empty; a phase must end after it starts")]
    EmptyMark { name: String, start: u64, end: u64 },
    #[error("buffers {first} and {second} are alive together and pinned onto each other; move or shorten one")]
    PinsOverlap { first: usize, second: usize },
    #[error("buffer {buffer} is pinned onto the forbidden range [{start}, {end})")]
    PinnedOnForbidden { buffer: usize, start: u64, end: u64 },
    #[error("group {group}: buffer {buffer} {what}")]
    Group { group: usize, buffer: usize, what: &'static str },
    #[error("request {request} ({tensor}) {what}")]
    Request { request: usize, tensor: String, what: &'static str },
    #[error("a reserve of {factor} times the balanced sizes; the factor must be a finite number from 0 on")]
    Factor { factor: f64 },
    #[error("the arena's reserve at byte {base} begins inside of the static plan, which ends at byte {height}")]
    ReserveInside { base: u64, height: u64 },
    #[error("no place within 2^64 - 1 bytes for what the arena promises; promise less")]
    NoRoom,
    #[error("line {line}: {what}")]
    Csv { line: u64, what: String },
    #[error("cannot read or write the table")]
    Io(#[from] std::io::Error),
}

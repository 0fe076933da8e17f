//! The interface of allocators: blocks for requests, and statistics of the memory and driver calls that the requests
//! cost.

use std::fmt;

use crate::DriverCalls;

/// A queue of device work. A block that was freed on a stream is reused on the same stream only.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Stream(pub u32);

/// Memory handed out by an [`Allocator`]. A block cannot be copied, so it cannot be freed twice. It must be returned to
/// the allocator that it came from.
#[derive(Debug, PartialEq, Eq)]
pub struct Block {
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    pub(crate) slot: u32,
}

impl Block {
    /// Creates a block of `bytes` bytes at `address`, for allocators outside of this crate.
    pub fn new(address: u64, bytes: u64) -> Self {
        Self { address, bytes, slot: 0 }
    }

    /// First byte, in the address space of the allocator's device.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Size in bytes, which may exceed the requested size.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// A request that could not be served, after everything that the allocator tries before it gives up.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{allocator}: out of memory on a device of {capacity} bytes: {requested} bytes requested, {allocated} allocated, \
     {reserved} reserved; lower the live bytes (a smaller micro-batch, recompute) or give the device more memory"
)]
#[allow(missing_docs, reason = "the message names the fields")]
pub struct OutOfMemory {
    pub allocator: &'static str,
    pub requested: u64,
    pub allocated: u64,
    pub reserved: u64,
    pub capacity: u64,
}

impl OutOfMemory {
    pub(crate) fn new(allocator: &'static str, requested: u64, statistics: &Statistics, capacity: u64) -> Self {
        let (allocated, reserved) = (statistics.allocated.current, statistics.reserved.current);
        Self { allocator, requested, allocated, reserved, capacity }
    }
}

/// A number of bytes that rises and falls.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Gauge {
    /// The current value.
    pub current: u64,
    /// The highest value so far.
    pub peak: u64,
}

impl Gauge {
    /// Adds to the current value.
    pub fn rise(&mut self, by: u64) {
        self.current += by;
        self.peak = self.peak.max(self.current);
    }

    /// Subtracts from the current value.
    pub fn fall(&mut self, by: u64) {
        self.current = self.current.checked_sub(by).expect("what falls has risen before");
    }
}

/// The activity of an allocator so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Bytes of the blocks that the program holds, as the allocator rounds them.
    pub allocated: Gauge,
    /// Bytes taken from the device.
    pub reserved: Gauge,
    /// Current number of contiguous ranges of reserved memory.
    pub segments: u64,
    /// Number of times that the allocator took memory from the device. Growing a mapped range counts once.
    pub device_allocations: u64,
    /// Number of times that the allocator returned memory to the device.
    pub device_frees: u64,
    /// Requests that were served only after cached memory was returned to the device.
    pub retries: u64,
    /// Driver calls by kind.
    pub driver: DriverCalls,
}

impl Statistics {
    /// Number of device allocations and frees.
    pub fn device_calls(&self) -> u64 {
        self.device_allocations + self.device_frees
    }
}

/// A piece of reserved memory, for pictures.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// First byte.
    pub address: u64,
    /// Size in bytes.
    pub bytes: u64,
    /// True if the program holds this memory; otherwise it is a hole.
    pub in_use: bool,
}

/// The extents of one range. The `used` pieces (disjoint, by ascending address) are in use, and the rest are holes.
pub(crate) fn with_holes(start: u64, bytes: u64, used: impl Iterator<Item = (u64, u64)>) -> Vec<Extent> {
    let mut extents = Vec::new();
    let mut floor = start;
    for (address, bytes) in used {
        if address > floor {
            extents.push(Extent { address: floor, bytes: address - floor, in_use: false });
        }
        extents.push(Extent { address, bytes, in_use: true });
        floor = address + bytes;
    }
    if floor < start + bytes {
        extents.push(Extent { address: floor, bytes: start + bytes - floor, in_use: false });
    }
    extents
}

/// Serves requests for memory out of a modelled device.
pub trait Allocator: fmt::Debug {
    /// The name of the allocator in tables: lower case, words joined by a dash.
    fn name(&self) -> &'static str;

    /// Serves a request of at least one byte.
    ///
    /// # Errors
    /// Returns [`OutOfMemory`] if the device cannot hold the block, even after the allocator has returned all memory
    /// that it can.
    fn allocate(&mut self, bytes: u64, stream: Stream) -> Result<Block, OutOfMemory>;

    /// Takes a block back.
    ///
    /// # Panics
    /// Panics if the block came from another allocator, which is an error in the caller's own code.
    fn free(&mut self, block: Block);

    /// Records that `stream` uses a block that belongs to another stream. After [`free`](Self::free), the block is not
    /// reused until [`synchronize`](Self::synchronize). Allocators without streams ignore this call.
    fn record_use(&mut self, _block: &Block, _stream: Stream) {}

    /// Reports that all work queued on `stream` so far has finished.
    fn synchronize(&mut self, _stream: Stream) {}

    /// Returns the statistics of everything so far.
    fn statistics(&self) -> Statistics;

    /// All reserved memory, by ascending address.
    fn extents(&self) -> Vec<Extent>;

    /// Bytes currently taken from the device.
    fn reserved(&self) -> u64 {
        self.statistics().reserved.current
    }

    /// Bytes currently held by the program.
    fn allocated(&self) -> u64 {
        self.statistics().allocated.current
    }

    /// Current number of contiguous ranges of reserved memory.
    fn segments(&self) -> u64 {
        self.statistics().segments
    }
}

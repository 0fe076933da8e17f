//! What an allocator is: blocks for requests, and what it cost to serve them.

use std::fmt;

use crate::DriverCalls;

/// A queue of device work. Blocks freed on one stream are reused on that stream alone.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Stream(pub u32);

/// Memory handed out by an [`Allocator`]. It cannot be copied, so it cannot be freed twice; it must go back to the
/// allocator that it came from.
#[derive(Debug, PartialEq, Eq)]
pub struct Block {
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    pub(crate) slot: u32,
}

impl Block {
    /// What an allocator of one's own gives for a request: at this address so many bytes.
    pub fn new(address: u64, bytes: u64) -> Self {
        Self { address, bytes, slot: 0 }
    }

    /// First byte, in the address space of the allocator's device.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// What the allocator gave, in bytes: at least what was asked for.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// A request that could not be served, after all that the allocator does before it gives up.
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
    /// Now.
    pub current: u64,
    /// The most there has been.
    pub peak: u64,
}

impl Gauge {
    /// Adds to the current value.
    pub fn rise(&mut self, by: u64) {
        self.current += by;
        self.peak = self.peak.max(self.current);
    }

    /// Takes from the current value.
    pub fn fall(&mut self, by: u64) {
        self.current = self.current.checked_sub(by).expect("what falls has risen before");
    }
}

/// What an allocator did so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Bytes of blocks in the program's hands, as the allocator rounds them.
    pub allocated: Gauge,
    /// Bytes taken from the device.
    pub reserved: Gauge,
    /// Contiguous ranges of reserved memory, now.
    pub segments: u64,
    /// Times the allocator got memory from the device (growing a mapped range counts once).
    pub device_allocations: u64,
    /// Times it gave memory back.
    pub device_frees: u64,
    /// Requests that were served only after cached memory went back to the device.
    pub retries: u64,
    /// Calls of the driver, by kind.
    pub driver: DriverCalls,
}

impl Statistics {
    /// Trips to the device, there and back.
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
    /// Whether the program holds it; what it does not hold is a hole.
    pub in_use: bool,
}

/// The extents of one range in which `used` pieces (by ascending address, disjoint) are in use and the rest is not.
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
    /// The name in tables: lower case, words joined by a dash.
    fn name(&self) -> &'static str;

    /// Serves a request of at least one byte.
    ///
    /// # Errors
    /// [`OutOfMemory`] when the device cannot hold it, after freeing all that the allocator would free.
    fn allocate(&mut self, bytes: u64, stream: Stream) -> Result<Block, OutOfMemory>;

    /// Takes a block back.
    ///
    /// # Panics
    /// When the block came from another allocator, which is an error of the caller's own code.
    fn free(&mut self, block: Block);

    /// Notes that `stream` works on a block that belongs to another stream: after [`free`](Self::free) the block stays
    /// out of reuse until [`synchronize`](Self::synchronize). Allocators that know no streams ignore it.
    fn record_use(&mut self, _block: &Block, _stream: Stream) {}

    /// All work queued on `stream` so far is done.
    fn synchronize(&mut self, _stream: Stream) {}

    /// What happened so far.
    fn statistics(&self) -> Statistics;

    /// All reserved memory, by ascending address.
    fn extents(&self) -> Vec<Extent>;

    /// Bytes taken from the device, now.
    fn reserved(&self) -> u64 {
        self.statistics().reserved.current
    }

    /// Bytes in the program's hands, now.
    fn allocated(&self) -> u64 {
        self.statistics().allocated.current
    }

    /// Contiguous ranges of reserved memory, now.
    fn segments(&self) -> u64 {
        self.statistics().segments
    }
}

//! A device as allocators see it: so many bytes, addresses, and a driver whose calls are counted.
//!
//! In: the driver calls of an allocator. Out: addresses, or a refusal when the bytes are spent. Never: an
//! address twice, as if there were no end to them; a program that spends 2^64 of them has run out of memory.

/// Calls of the driver, by kind. One call each on NVIDIA devices: `cudaMalloc`, `cudaFree`, `cuMemAddressReserve`,
/// `cuMemCreate`, `cuMemRelease`, `cuMemMap`, `cuMemUnmap`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[allow(missing_docs, reason = "named in the type's own words")]
pub struct DriverCalls {
    pub mallocs: u64,
    pub frees: u64,
    pub reserves: u64,
    pub creates: u64,
    pub releases: u64,
    pub maps: u64,
    pub unmaps: u64,
}

impl DriverCalls {
    /// All of them.
    pub fn total(&self) -> u64 {
        let Self { mallocs, frees, reserves, creates, releases, maps, unmaps } = self;
        mallocs + frees + reserves + creates + releases + maps + unmaps
    }
}

/// Physical memory of one size and an address space without end.
#[derive(Debug, Clone)]
pub struct Device {
    capacity: u64,
    used: u64,
    next_address: u64,
    calls: DriverCalls,
}

impl Device {
    /// Devices that are larger than this behave as if they had this size, so that addresses last for long.
    pub const LARGEST: u64 = 1 << 48;

    /// A device of 80 GiB, the size that the recordings were made with.
    pub const DEFAULT_CAPACITY: u64 = 80 << 30;

    /// An empty device of `capacity` bytes.
    pub fn new(capacity: u64) -> Self {
        Self { capacity: capacity.min(Self::LARGEST), used: 0, next_address: 1 << 40, calls: DriverCalls::default() }
    }

    /// Its size in bytes.
    pub fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Bytes that nobody holds.
    pub fn free_bytes(&self) -> u64 {
        self.capacity - self.used
    }

    /// Calls so far.
    pub fn calls(&self) -> DriverCalls {
        self.calls
    }

    /// Mapped memory in one call; `None` when the bytes are not there.
    pub(super) fn malloc(&mut self, bytes: u64) -> Option<u64> {
        self.calls.mallocs += 1;
        if bytes > self.free_bytes() {
            return None;
        }
        let address = self.addresses(bytes)?;
        self.used += bytes;
        Some(address)
    }

    /// Gives back what [`malloc`](Self::malloc) gave.
    pub(super) fn free(&mut self, bytes: u64) {
        self.calls.frees += 1;
        self.used -= bytes;
    }

    /// Address space with nothing behind it; `None` when there is no more.
    pub(super) fn reserve(&mut self, bytes: u64) -> Option<u64> {
        self.calls.reserves += 1;
        self.addresses(bytes)
    }

    /// `count` pieces of physical memory of `bytes` each, mapped one after another; nothing at all when they do not
    /// all fit (pieces created before the refusal are released again, and all calls are counted).
    pub(super) fn create_and_map(&mut self, count: u64, bytes: u64) -> bool {
        let there = count.min(self.free_bytes() / bytes);
        if there < count {
            self.calls.creates += there + 1;
            self.calls.releases += there;
            return false;
        }
        self.calls.creates += count;
        self.calls.maps += count;
        self.used += count * bytes;
        true
    }

    /// Unmaps and releases `count` pieces of `bytes` each.
    pub(super) fn unmap_and_release(&mut self, count: u64, bytes: u64) {
        self.calls.unmaps += count;
        self.calls.releases += count;
        self.used -= count * bytes;
    }

    /// A second range of addresses for `count` pieces of physical memory that are mapped elsewhere already.
    pub(super) fn stitch(&mut self, count: u64, bytes: u64) -> Option<u64> {
        self.calls.maps += count;
        self.reserve(count * bytes)
    }

    /// Undoes [`stitch`](Self::stitch).
    pub(super) fn unstitch(&mut self, count: u64) {
        self.calls.unmaps += count;
    }

    fn addresses(&mut self, bytes: u64) -> Option<u64> {
        const PAGE: u64 = 2 << 20;
        let address = self.next_address;
        // A page between two ranges keeps neighbours apart: no two segments may look like one.
        self.next_address = bytes.checked_next_multiple_of(PAGE)?.checked_add(PAGE)?.checked_add(address)?;
        Some(address)
    }
}

//! A device as allocators use it: a capacity, addresses, and a driver whose calls are counted.
//!
//! In: an allocator's driver calls. Out: addresses, or a refusal when no bytes are left. Never: the same address twice.
//! A program that has used 2^64 addresses is out of memory.

/// Driver calls by kind. On NVIDIA devices, each counts one of `cudaMalloc`, `cudaFree`, `cuMemAddressReserve`,
/// `cuMemCreate`, `cuMemRelease`, `cuMemMap` and `cuMemUnmap`.
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
    /// Number of all calls.
    pub fn total(&self) -> u64 {
        let Self { mallocs, frees, reserves, creates, releases, maps, unmaps } = self;
        mallocs + frees + reserves + creates + releases + maps + unmaps
    }
}

/// Physical memory of a given size, and an address space. Addresses are never reused.
#[derive(Debug, Clone)]
pub struct Device {
    capacity: u64,
    used: u64,
    next_address: u64,
    calls: DriverCalls,
}

impl Device {
    /// The largest capacity. A larger device is treated as one of this size, so that there are always enough addresses.
    pub const LARGEST: u64 = 1 << 48;

    /// 80 GiB, the size of the device on which the recordings were made.
    pub const DEFAULT_CAPACITY: u64 = 80 << 30;

    /// An empty device of `capacity` bytes.
    pub fn new(capacity: u64) -> Self {
        Self { capacity: capacity.min(Self::LARGEST), used: 0, next_address: 1 << 40, calls: DriverCalls::default() }
    }

    /// Size of the device in bytes.
    pub fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Bytes that are not in use.
    pub fn free_bytes(&self) -> u64 {
        self.capacity - self.used
    }

    /// Driver calls so far.
    pub fn calls(&self) -> DriverCalls {
        self.calls
    }

    /// Allocates mapped memory in one call and returns its address, or `None` if the device has too few bytes left.
    pub(super) fn malloc(&mut self, bytes: u64) -> Option<u64> {
        self.calls.mallocs += 1;
        if bytes > self.free_bytes() {
            return None;
        }
        let address = self.addresses(bytes)?;
        self.used += bytes;
        Some(address)
    }

    /// Frees memory that came from [`malloc`](Self::malloc).
    pub(super) fn free(&mut self, bytes: u64) {
        self.calls.frees += 1;
        self.used -= bytes;
    }

    /// Reserves address space without memory and returns its address, or `None` if no addresses are left.
    pub(super) fn reserve(&mut self, bytes: u64) -> Option<u64> {
        self.calls.reserves += 1;
        self.addresses(bytes)
    }

    /// Creates `count` pieces of physical memory of `bytes` each and maps them one after another. If they do not all
    /// fit, releases the pieces created so far and returns false. All calls are counted in either case.
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

    /// Maps `count` pieces of physical memory a second time, at a new range of addresses. Returns the first address of
    /// this range, or `None` if no addresses are left.
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
        // A page between two ranges keeps segments apart, so that two segments never look like one.
        self.next_address = bytes.checked_next_multiple_of(PAGE)?.checked_add(PAGE)?.checked_add(address)?;
        Some(address)
    }
}

//! Physical memory in pages, and the progress of streams: what the allocator needs from a device.
//!
//! - In: ranges of addresses, and streams.
//! - Out: mapped pages, and events that tell when work on a stream is complete.
//! - Never: a decision about which tensor lies where.

use std::collections::BTreeSet;

/// A CUDA stream's handle as a number. The default stream is 0.
pub type StreamHandle = u64;

/// A stream of one device, by the order in which the allocator met them. So equal runs have equal numbers.
pub type Stream = u64;

/// A point in a stream's work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Event(pub u64);

/// A failed call of the device's driver.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PagesError {
    /// The device has too little free memory for the pages.
    #[error("the device has too little free memory")]
    OutOfMemory,
    /// Another error of the driver.
    #[error("{call} failed with CUDA error {code}")]
    Driver {
        /// The driver's function.
        call: &'static str,
        /// The function's return value.
        code: u32,
    },
    /// The driver's library or one of its functions is missing.
    #[error("the CUDA driver is not available: {0}")]
    Missing(String),
}

/// A device's pages and streams. Addresses and sizes are multiples of [`page`](Self::page), in bytes.
pub trait Pages: Send {
    /// The size of a page in bytes.
    fn page(&self) -> u64;

    /// Reserves a range of addresses without memory, and returns its first address.
    ///
    /// # Errors
    /// Returns the driver's error.
    fn reserve(&mut self, bytes: u64) -> Result<u64, PagesError>;

    /// Maps memory to a reserved range. Maps nothing if it fails. Pages that [`unmap`](Self::unmap) set aside are used
    /// before new ones.
    ///
    /// # Errors
    /// Returns [`PagesError::OutOfMemory`], or another error of the driver.
    fn map(&mut self, address: u64, bytes: u64) -> Result<(), PagesError>;

    /// Unmaps a range whose work is complete, and sets the pages aside.
    fn unmap(&mut self, address: u64, bytes: u64);

    /// Returns the pages that were set aside to the device.
    fn trim(&mut self);

    /// The device's free memory and all of its memory, in bytes.
    fn memory(&self) -> (u64, u64);

    /// Records an event after all work that the stream has so far.
    fn record(&mut self, stream: StreamHandle) -> Event;

    /// Returns true if the work before the event is complete. The event must not be used again after that.
    fn is_done(&mut self, event: Event) -> bool;

    /// Gives up an event that was not done.
    fn forget(&mut self, event: Event);

    /// Waits until the work before the event is complete. The event must not be used again.
    fn wait(&mut self, event: Event);
}

/// A device without memory, which only counts. Its work is complete at once. For tests and rehearsals.
#[derive(Debug, Clone)]
pub struct CountedPages {
    capacity: u64,
    next_address: u64,
    mapped: BTreeSet<u64>,
    spare: u64,
    /// The most pages that the device had in use at once.
    most: u64,
    /// Calls of `map` and `unmap`.
    calls: u64,
}

impl CountedPages {
    const PAGE: u64 = 2 << 20;

    /// A device with a memory of `capacity` bytes.
    pub fn new(capacity: u64) -> Self {
        Self { capacity, next_address: 1 << 40, mapped: BTreeSet::new(), spare: 0, most: 0, calls: 0 }
    }

    /// The same device with other addresses, so that those of several devices differ.
    pub fn from_address(self, next_address: u64) -> Self {
        Self { next_address, ..self }
    }

    /// The most bytes that were in use at once.
    pub fn most_bytes(&self) -> u64 {
        self.most * Self::PAGE
    }

    /// Number of calls that mapped or unmapped pages.
    pub fn calls(&self) -> u64 {
        self.calls
    }

    /// True if all bytes of the range are mapped.
    pub fn is_mapped(&self, address: u64, bytes: u64) -> bool {
        (address / Self::PAGE..(address + bytes).div_ceil(Self::PAGE)).all(|page| self.mapped.contains(&page))
    }

    fn in_use(&self) -> u64 {
        self.mapped.len() as u64 + self.spare
    }
}

impl Pages for CountedPages {
    fn page(&self) -> u64 {
        Self::PAGE
    }

    fn reserve(&mut self, bytes: u64) -> Result<u64, PagesError> {
        let address = self.next_address;
        self.next_address += bytes;
        Ok(address)
    }

    fn map(&mut self, address: u64, bytes: u64) -> Result<(), PagesError> {
        self.calls += 1;
        let (first, count) = (address / Self::PAGE, bytes / Self::PAGE);
        let new = count.saturating_sub(self.spare);
        if (self.in_use() + new) * Self::PAGE > self.capacity {
            return Err(PagesError::OutOfMemory);
        }
        self.spare -= count - new;
        for page in first..first + count {
            assert!(self.mapped.insert(page), "page {page} is mapped twice");
        }
        self.most = self.most.max(self.in_use());
        Ok(())
    }

    fn unmap(&mut self, address: u64, bytes: u64) {
        self.calls += 1;
        for page in address / Self::PAGE..(address + bytes) / Self::PAGE {
            assert!(self.mapped.remove(&page), "page {page} is not mapped");
            self.spare += 1;
        }
    }

    fn trim(&mut self) {
        self.spare = 0;
    }

    fn memory(&self) -> (u64, u64) {
        (self.capacity - self.in_use() * Self::PAGE, self.capacity)
    }

    fn record(&mut self, _: StreamHandle) -> Event {
        Event(0)
    }

    fn is_done(&mut self, _: Event) -> bool {
        true
    }

    fn forget(&mut self, _: Event) {}

    fn wait(&mut self, _: Event) {}
}

//! The lower end of the comparison: an allocator that reserves exactly the live bytes, as if moving memory were free.

use std::collections::BTreeMap;

use crate::{Allocator, Block, Extent, OutOfMemory, Statistics, Stream};

/// The max-live bound as an allocator. No allocator can reserve less.
#[derive(Debug)]
pub struct Ideal {
    capacity: u64,
    /// Live blocks in order of birth. Pictures show them without gaps.
    live: BTreeMap<u32, u64>,
    next: u32,
    statistics: Statistics,
}

impl Ideal {
    /// An empty allocator that may hold `capacity` bytes.
    pub fn new(capacity: u64) -> Self {
        Self { capacity, live: BTreeMap::new(), next: 0, statistics: Statistics::default() }
    }
}

impl Allocator for Ideal {
    fn name(&self) -> &'static str {
        "ideal"
    }

    fn allocate(&mut self, bytes: u64, _stream: Stream) -> Result<Block, OutOfMemory> {
        let Statistics { allocated, reserved, .. } = &mut self.statistics;
        if bytes > self.capacity - reserved.current {
            return Err(OutOfMemory::new(self.name(), bytes, &self.statistics, self.capacity));
        }
        allocated.rise(bytes);
        reserved.rise(bytes);
        self.statistics.segments = 1;
        let slot = self.next;
        self.next = self.next.wrapping_add(1);
        self.live.insert(slot, bytes);
        Ok(Block { address: 0, bytes, slot })
    }

    fn free(&mut self, block: Block) {
        self.live.remove(&block.slot).expect("a block goes back to the allocator it came from");
        self.statistics.allocated.fall(block.bytes);
        self.statistics.reserved.fall(block.bytes);
        self.statistics.segments = u64::from(!self.live.is_empty());
    }

    fn statistics(&self) -> Statistics {
        self.statistics
    }

    fn extents(&self) -> Vec<Extent> {
        let mut address = 0;
        let extent = |&bytes: &u64| {
            address += bytes;
            Extent { address: address - bytes, bytes, in_use: true }
        };
        self.live.values().map(extent).collect()
    }
}

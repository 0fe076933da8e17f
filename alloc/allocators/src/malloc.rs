//! One driver call per tensor and one more when the tensor dies, as in frameworks without an allocator of their own.
//!
//! This allocator reserves only the live bytes, rounded to 512 bytes, but each driver call is a round trip, and each
//! free waits for the device. How a driver packs small requests into its pages is not modelled.

use std::collections::BTreeMap;

use crate::{Allocator, Block, Device, Extent, OutOfMemory, Statistics, Stream};

const GRAIN: u64 = 512;

/// `cudaMalloc` and `cudaFree` per tensor.
#[derive(Debug)]
pub struct Malloc {
    device: Device,
    /// Bytes of each live block, by address.
    live: BTreeMap<u64, u64>,
    statistics: Statistics,
}

impl Malloc {
    /// An allocator on an empty device.
    pub fn new(device: Device) -> Self {
        Self { device, live: BTreeMap::new(), statistics: Statistics::default() }
    }
}

impl Allocator for Malloc {
    fn name(&self) -> &'static str {
        "malloc"
    }

    fn allocate(&mut self, bytes: u64, _stream: Stream) -> Result<Block, OutOfMemory> {
        let rounded = bytes.checked_next_multiple_of(GRAIN);
        let Some((rounded, address)) = rounded.and_then(|bytes| Some((bytes, self.device.malloc(bytes)?))) else {
            return Err(OutOfMemory::new(self.name(), bytes, &self.statistics, self.device.capacity()));
        };
        self.live.insert(address, rounded);
        self.statistics.allocated.rise(rounded);
        self.statistics.reserved.rise(rounded);
        self.statistics.segments += 1;
        self.statistics.device_allocations += 1;
        Ok(Block { address, bytes: rounded, slot: 0 })
    }

    fn free(&mut self, block: Block) {
        self.live.remove(&block.address).expect("a block goes back to the allocator it came from");
        self.device.free(block.bytes);
        self.statistics.allocated.fall(block.bytes);
        self.statistics.reserved.fall(block.bytes);
        self.statistics.segments -= 1;
        self.statistics.device_frees += 1;
    }

    fn statistics(&self) -> Statistics {
        Statistics { driver: self.device.calls(), ..self.statistics }
    }

    fn extents(&self) -> Vec<Extent> {
        self.live.iter().map(|(&address, &bytes)| Extent { address, bytes, in_use: true }).collect()
    }
}

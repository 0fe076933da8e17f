//! An allocator of your own. Its segments have sizes that are powers of two, and each segment holds one tensor at a
//! time. After the tensor is freed, the segment is kept for the next tensor that needs a segment of this size.

use std::collections::BTreeMap;

use anyhow::Result;
use gapless::allocators::{
    Allocator, Block, Comparison, Extent, Kind, OutOfMemory, Requests, Statistics, Stream, compare,
};
use gapless::step::Step;

#[derive(Debug, Default)]
struct PowersOfTwo {
    /// Addresses of the free segments, by size.
    idle: BTreeMap<u64, Vec<u64>>,
    end: u64,
    statistics: Statistics,
}

impl Allocator for PowersOfTwo {
    fn name(&self) -> &'static str {
        "powers-of-two"
    }

    fn allocate(&mut self, bytes: u64, _stream: Stream) -> Result<Block, OutOfMemory> {
        let bytes = bytes.next_power_of_two();
        let address = self.idle.get_mut(&bytes).and_then(Vec::pop).unwrap_or_else(|| {
            self.statistics.reserved.rise(bytes);
            self.statistics.segments += 1;
            self.statistics.device_allocations += 1;
            self.end += bytes;
            self.end - bytes
        });
        self.statistics.allocated.rise(bytes);
        Ok(Block::new(address, bytes))
    }

    fn free(&mut self, block: Block) {
        self.statistics.allocated.fall(block.bytes());
        self.idle.entry(block.bytes()).or_default().push(block.address());
    }

    fn statistics(&self) -> Statistics {
        self.statistics
    }

    fn extents(&self) -> Vec<Extent> {
        vec![Extent { address: 0, bytes: self.end, in_use: true }]
    }
}

/// Registers this allocator, and compares it with all others on the requests of an eager framework.
pub fn run(step: &Step) -> Result<()> {
    // The model has no limit: it ignores the capacity of the device.
    Kind::register("powers-of-two", false, |_| Box::new(PowersOfTwo::default()))?;
    let problem = step.eager(&step.record()?, 0)?;
    let comparison = Comparison { iterations: 3, ..Comparison::default() };
    print!("{}", compare(&problem, &Requests::new(&problem), &comparison));
    Ok(())
}

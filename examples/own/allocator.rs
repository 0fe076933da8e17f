//! An allocator of your own. Its segments have sizes that are powers of two, and each segment holds one tensor at a
//! time. After the tensor is freed, the segment is kept for the next tensor that needs a segment of this size.

use std::collections::BTreeMap;

use anyhow::Result;
use gapless::allocators::{Allocator, Block, Extent, Kind, OutOfMemory, Requests, Statistics, Stream, replay};
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

/// Compares this allocator with PyTorch's allocator on the requests of an eager framework.
pub fn run(step: &Step) -> Result<()> {
    let problem = step.eager(&step.record()?, 0)?;
    let requests = Requests::new(&problem);
    for mut allocator in [Box::new(PowersOfTwo::default()), Kind::PyTorch.build(80 << 30, &problem, &requests)] {
        let report = replay(&requests, &mut *allocator, 3)?;
        println!("{}: {} bytes of {} live", report.allocator, report.peak_reserved(), requests.peak_live());
    }
    Ok(())
}

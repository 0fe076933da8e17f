//! GMLake (ASPLOS '24; glake's fork of PyTorch's allocator): free blocks stitched by virtual memory.
//!
//! Requests up to 1 MiB are served like in PyTorch's small pool. Larger requests are rounded to chunks of 2 MiB, each
//! of which is one piece of physical memory. A *primitive* block is a run of chunks that were mapped together. A
//! *stitched* block maps chunks of several free primitive blocks a second time, under one range of addresses.
//!
//! For a large request, the allocator tries in this order:
//!
//! 1. the best-fitting free primitive block, which is split if a chunk or more is left over;
//! 2. a free stitched block of at most ten times the size;
//! 3. if the request has at least the size of the fragmentation limit, a new stitched block from the largest free
//!    primitive blocks, as many as needed (the last of them is split);
//! 4. new chunks from the device;
//! 5. new chunks again, after the cached blocks were returned to the device.
//!
//! Stitched blocks are kept for reuse as long as their chunks exist, up to a limit of mapped addresses.

mod blocks;
#[cfg(test)]
mod tests;

use blocks::Blocks;

use crate::pytorch::PyTorchOptions;
use crate::{Allocator, Block, Device, Extent, OutOfMemory, PyTorch, Statistics, Stream};

const CHUNK: u64 = 2 << 20;
const SMALL_REQUEST: u64 = 1 << 20;
const LARGE_REQUEST: u64 = 10 << 20;
const LARGE_SEGMENT: u64 = 20 << 20;
/// Most chunks that can ever exist. One bit of a block's slot marks stitched blocks, and the others hold the block's
/// first chunk.
const MAX_CHUNKS: u32 = 1 << 31;

/// The settings that GMLake reads from environment variables.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GmLakeOptions {
    /// `fragLimit`, in bytes: requests smaller than this limit are never stitched.
    pub fragmentation_limit: u64,
    /// `reuseLimit`: a stitched block serves no request that is smaller than the block's size divided by this limit.
    pub reuse_limit: f64,
    /// `autoGC`: stitched blocks that are not in use are dropped once more than this many bytes of addresses are
    /// stitched.
    pub stitched_limit: u64,
}

impl Default for GmLakeOptions {
    fn default() -> Self {
        Self { fragmentation_limit: 512 << 20, reuse_limit: 10.0, stitched_limit: 1000 << 30 }
    }
}

/// GMLake on one device.
#[derive(Debug)]
pub struct GmLake {
    options: GmLakeOptions,
    /// The small pool, which also holds the device.
    small: PyTorch,
    /// The blocks of larger requests.
    blocks: Blocks,
    large: Statistics,
    /// Statistics of both pools together. The sums are recorded while requests are served, since the peaks of the two
    /// pools do not add up.
    statistics: Statistics,
}

impl GmLake {
    /// An empty allocator.
    pub fn new(device: Device, options: GmLakeOptions) -> Self {
        Self {
            options,
            small: PyTorch::new(device, PyTorchOptions::default()),
            blocks: Blocks::default(),
            large: Statistics::default(),
            statistics: Statistics::default(),
        }
    }

    fn allocate_large(&mut self, bytes: u64, stream: Stream) -> Option<Block> {
        let chunks = u32::try_from(bytes.div_ceil(CHUNK)).ok().filter(|&chunks| chunks <= MAX_CHUNKS)?;
        if let Some(block) = self.blocks.take_primitive(chunks, stream) {
            return Some(block);
        }
        if let Some(block) = self.blocks.take_stitched(chunks, stream, self.options.reuse_limit) {
            return Some(block);
        }
        if let Some(block) = self.stitch(chunks, stream) {
            return Some(block);
        }
        let segment = if bytes < LARGE_REQUEST { (LARGE_SEGMENT / CHUNK) as u32 } else { chunks };
        if !self.create_segment(segment, stream) {
            self.release_cached();
            self.large.retries += 1;
            if !self.create_segment(segment, stream) {
                return self.stitch(chunks, stream);
            }
        }
        self.blocks.take_primitive(chunks, stream)
    }

    /// Stitches the largest free primitive blocks into one block of `chunks`. Returns `None` if the request is below
    /// the fragmentation limit, or if the blocks or the addresses do not suffice.
    fn stitch(&mut self, chunks: u32, stream: Stream) -> Option<Block> {
        if u64::from(chunks) * CHUNK < self.options.fragmentation_limit {
            return None;
        }
        let picked = self.blocks.pick(chunks, stream)?;
        let address = self.small.device_mut().stitch(u64::from(chunks), CHUNK)?;
        let number = self.blocks.stitch(picked, stream, address);
        self.large.device_allocations += 1;
        let block = self.blocks.hold_stitched(number, chunks);
        if self.blocks.stitched_bytes > self.options.stitched_limit {
            let idle = self.blocks.stitched.iter().filter(|(_, s)| s.used_chunks == 0);
            let idle: Vec<u32> = idle.map(|(&n, _)| n).collect();
            idle.into_iter().for_each(|number| self.drop_stitched(number));
        }
        Some(block)
    }

    /// Takes new chunks from the device as one free primitive block. Returns false if the device has too few bytes
    /// left.
    fn create_segment(&mut self, chunks: u32, stream: Stream) -> bool {
        let device = self.small.device_mut();
        if chunks > MAX_CHUNKS - self.blocks.count() {
            return false;
        }
        let Some(address) = device.reserve(u64::from(chunks) * CHUNK) else { return false };
        if !device.create_and_map(u64::from(chunks), CHUNK) {
            return false;
        }
        self.blocks.add_segment(address, chunks, stream);
        self.large.reserved.rise(u64::from(chunks) * CHUNK);
        self.large.segments += 1;
        self.large.device_allocations += 1;
        true
    }

    /// Returns the small pool's cache, and all free primitive blocks that are whole segments, to the device.
    fn release_cached(&mut self) {
        for (first, chunks) in self.blocks.free_segments() {
            for number in self.blocks.remove_segment(first) {
                // The program holds the front chunks of a stitched block that is in use. None of these chunks is
                // released here.
                match self.blocks.stitched[&number].used_chunks {
                    0 => self.drop_stitched(number),
                    keep => self.shorten(number, keep),
                }
            }
            self.small.device_mut().unmap_and_release(u64::from(chunks), CHUNK);
            self.large.reserved.fall(u64::from(chunks) * CHUNK);
            self.large.segments -= 1;
            self.large.device_frees += 1;
        }
        self.small.empty_cache();
    }

    /// Removes a stitched block that is not in use.
    fn drop_stitched(&mut self, number: u32) {
        self.shorten(number, 0);
        self.blocks.stitched.remove(&number);
    }

    /// Unmaps the chunks of a stitched block, from number `keep` on.
    fn shorten(&mut self, number: u32, keep: u32) {
        let unmapped = self.blocks.shorten(number, keep);
        self.small.device_mut().unstitch(unmapped);
    }

    /// Updates the sums over both pools, and the peaks of these sums.
    fn account(&mut self) {
        let small = self.small.statistics();
        let gauge = |gauge: &mut crate::Gauge, now: u64| {
            gauge.current = now;
            gauge.peak = gauge.peak.max(now);
        };
        gauge(&mut self.statistics.allocated, small.allocated.current + self.large.allocated.current);
        gauge(&mut self.statistics.reserved, small.reserved.current + self.large.reserved.current);
        self.statistics.segments = small.segments + self.large.segments;
        self.statistics.device_allocations = small.device_allocations + self.large.device_allocations;
        self.statistics.device_frees = small.device_frees + self.large.device_frees;
        self.statistics.retries = small.retries + self.large.retries;
        self.statistics.driver = small.driver;
    }
}

impl Allocator for GmLake {
    fn name(&self) -> &'static str {
        "gmlake"
    }

    fn allocate(&mut self, bytes: u64, stream: Stream) -> Result<Block, OutOfMemory> {
        let block = if bytes <= SMALL_REQUEST {
            self.small.allocate(bytes, stream).ok().or_else(|| {
                self.release_cached();
                self.small.allocate(bytes, stream).ok()
            })
        } else {
            let block = self.allocate_large(bytes, stream);
            self.large.allocated.rise(block.as_ref().map_or(0, |block| block.bytes));
            block
        };
        self.account();
        let capacity = self.small.device_mut().capacity();
        block.ok_or_else(|| OutOfMemory::new(self.name(), bytes, &self.statistics, capacity))
    }

    fn free(&mut self, block: Block) {
        if block.bytes <= SMALL_REQUEST {
            self.small.free(block);
        } else {
            self.large.allocated.fall(block.bytes);
            self.blocks.free(&block);
        }
        self.account();
    }

    fn statistics(&self) -> Statistics {
        self.statistics
    }

    fn extents(&self) -> Vec<Extent> {
        let mut extents: Vec<Extent> = self.blocks.extents().chain(self.small.extents()).collect();
        extents.sort_unstable_by_key(|extent| extent.address);
        extents
    }
}

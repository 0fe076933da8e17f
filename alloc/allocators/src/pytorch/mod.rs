//! PyTorch's caching allocator (`c10/cuda/CUDACachingAllocator.cpp`, 2.15).
//!
//! Requests are rounded to 512 bytes and served by the best-fitting free block of their stream and pool. Requests of at
//! most 1 MiB belong to the small pool, and all others to the large pool. The block is split if the rest is large
//! enough. If no block fits, a segment is taken from the device. A segment has 2 MiB for small requests and 20 MiB for
//! requests from 1 to 10 MiB. For larger requests, the segment has the size of the request, rounded to 2 MiB. Freed
//! blocks join their free neighbours and stay cached. When the device is full, unsplit cached blocks are returned to
//! it, and the request is tried again.

mod blocks;
mod expandable;
mod options;

use std::collections::{BTreeMap, VecDeque};

use blocks::{BlockId, BlockState, Blocks, PoolKind};
use expandable::ExpandableSegments;
pub use options::{OptionsError, PyTorchOptions};

use crate::{Allocator, Block, Device, Extent, OutOfMemory, Statistics, Stream};

const SMALLEST: u64 = 512;
const SMALL_REQUEST: u64 = 1 << 20;
const SMALL_SEGMENT: u64 = 2 << 20;
const LARGE_REQUEST: u64 = 10 << 20;
const ROUND_LARGE: u64 = 2 << 20;
/// Requests above an exbibyte are refused at once.
const LARGEST_REQUEST: u64 = 1 << 60;

/// PyTorch's caching allocator on one device.
#[derive(Debug)]
pub struct PyTorch {
    options: PyTorchOptions,
    device: Device,
    blocks: Blocks,
    expandable: ExpandableSegments,
    /// Freed blocks that other streams may still use, by stream, in the order in which the stream finishes with them.
    events: BTreeMap<Stream, VecDeque<BlockId>>,
    /// For each stream, the number of events at the front of its queue that are done but not processed yet.
    done: BTreeMap<Stream, usize>,
    statistics: Statistics,
}

impl PyTorch {
    /// An empty allocator.
    pub fn new(device: Device, options: PyTorchOptions) -> Self {
        Self {
            options,
            device,
            blocks: Blocks::default(),
            expandable: ExpandableSegments::default(),
            events: BTreeMap::new(),
            done: BTreeMap::new(),
            statistics: Statistics::default(),
        }
    }

    /// Returns all cached memory to the device as far as possible, like `torch.cuda.empty_cache()`.
    pub fn empty_cache(&mut self) {
        for stream in self.events.keys().copied().collect::<Vec<_>>() {
            self.synchronize(stream);
        }
        self.process_events();
        self.release_free_blocks(PoolKind::Large);
        self.release_free_blocks(PoolKind::Small);
    }

    /// The device, for an allocator that shares the device with this one.
    pub(super) fn device_mut(&mut self) -> &mut Device {
        &mut self.device
    }

    /// Searches for a block in all ways that the allocator has, in order. Returns `None` if all of them fail.
    fn find_block(&mut self, request: &Request) -> Option<BlockId> {
        if let Some(block) = self.take_free_block(request) {
            return Some(block);
        }
        self.collect_garbage();
        if let Some(block) = self.take_new_block(request) {
            return Some(block);
        }
        if self.release_oversized(request)
            && let Some(block) = self.take_new_block(request)
        {
            return Some(block);
        }
        self.empty_cache();
        self.statistics.retries += 1;
        self.take_new_block(request)
    }

    fn take_free_block(&mut self, request: &Request) -> Option<BlockId> {
        if self.collects_garbage() {
            self.blocks.pool_mut(request.pool).searches += 1;
        }
        let found = self.best_fit(request)?;
        let bytes = self.blocks.get(found).bytes;
        let limit = self.options.max_split_bytes;
        let oversized = if request.bytes < limit {
            bytes >= limit
        } else {
            bytes >= request.bytes.saturating_add(self.options.max_non_split_rounding_bytes)
        };
        if oversized {
            return None;
        }
        self.blocks.remove_free(found);
        Some(found)
    }

    fn best_fit(&self, request: &Request) -> Option<BlockId> {
        let mut fitting = self.blocks.fitting(request.pool, request.stream, request.bytes);
        let mut found = fitting.next()?;
        if self.options.expandable_segments {
            // A free block at the mapped end of a segment counts with the size to which it could grow. So a larger
            // block that cannot grow is taken before the only block that can.
            let growable = |id: BlockId| {
                let block = self.blocks.get(id);
                let next = block.next.map(|next| self.blocks.get(next)).filter(|next| !next.mapped);
                block.bytes + next.map_or(0, |next| next.bytes)
            };
            for next in fitting {
                if growable(next) >= growable(found) {
                    break;
                }
                found = next;
            }
        }
        Some(found)
    }

    fn take_new_block(&mut self, request: &Request) -> Option<BlockId> {
        if self.allowed().is_some_and(|allowed| self.statistics.reserved.current + request.segment_bytes > allowed) {
            return None;
        }
        if self.options.expandable_segments {
            return self.expand(request);
        }
        let address = self.device.malloc(request.segment_bytes)?;
        self.statistics.reserved.rise(request.segment_bytes);
        self.statistics.segments += 1;
        self.statistics.device_allocations += 1;
        Some(self.blocks.create_segment(request.stream, request.pool, address, request.segment_bytes))
    }

    /// True if the rest of a block is split off; otherwise the whole block is handed out.
    fn splits(&self, request: &Request, found: BlockId) -> bool {
        let remaining = self.blocks.get(found).bytes - request.bytes;
        if request.pool == PoolKind::Small || self.options.expandable_segments {
            remaining >= SMALLEST
        } else {
            request.bytes < self.options.max_split_bytes && remaining > SMALL_REQUEST
        }
    }

    /// Makes a block that is no longer in use available again.
    fn recycle(&mut self, id: BlockId) {
        let (previous, next) = (self.blocks.get(id).previous, self.blocks.get(id).next);
        self.blocks.merge(id, previous);
        self.blocks.merge(id, next);
        self.blocks.insert_free(id);
    }

    /// Recycles the blocks whose last event has completed.
    fn process_events(&mut self) {
        for (stream, count) in std::mem::take(&mut self.done) {
            let Some(queue) = self.events.get_mut(&stream) else { continue };
            let done: Vec<BlockId> = queue.drain(..count.min(queue.len())).collect();
            if queue.is_empty() {
                self.events.remove(&stream);
            }
            for id in done {
                let block = self.blocks.get_mut(id);
                block.pending_events -= 1;
                if block.pending_events == 0 {
                    self.recycle(id);
                }
            }
        }
    }

    /// If `max_split_size_mb` is set, frees one oversized block that is large enough for the request. If no block is
    /// that large, frees as many of the largest oversized blocks as needed. Returns true if enough was freed, and false
    /// if the option is not set.
    fn release_oversized(&mut self, request: &Request) -> bool {
        let limit = self.options.max_split_bytes;
        if limit == u64::MAX {
            return false;
        }
        let wanted = request.bytes.max(limit);
        let fitting = self.blocks.fitting(request.pool, request.stream, wanted).next();
        if let Some(id) = fitting.filter(|&id| self.blocks.get(id).expandable.is_none()) {
            self.release(id);
            return true;
        }
        let below = self.blocks.fitting(request.pool, request.stream, limit);
        let oversized: Vec<BlockId> = below.take_while(|&id| self.blocks.get(id).bytes < wanted).collect();
        let mut released = 0;
        for &id in oversized.iter().rev() {
            if released >= wanted {
                break;
            }
            if self.blocks.get(id).expandable.is_none() {
                released += self.blocks.get(id).bytes;
                self.release(id);
            }
        }
        released >= wanted
    }

    /// Returns an unsplit free block to the device.
    fn release(&mut self, id: BlockId) {
        let bytes = self.blocks.get(id).bytes;
        self.blocks.remove_free(id);
        self.blocks.destroy(id);
        self.device.free(bytes);
        self.statistics.reserved.fall(bytes);
        self.statistics.segments -= 1;
        self.statistics.device_frees += 1;
    }

    fn release_free_blocks(&mut self, pool: PoolKind) {
        let (in_expandable, whole): (Vec<_>, Vec<_>) =
            self.blocks.free_blocks(pool).into_iter().partition(|&id| self.blocks.get(id).expandable.is_some());
        for id in whole {
            if !self.blocks.get(id).is_split() {
                self.release(id);
            }
        }
        for id in in_expandable {
            self.unmap(id);
        }
    }

    /// Returns the most bytes that may be reserved, or `None` if the options set no fraction of the device.
    fn allowed(&self) -> Option<u64> {
        self.options.memory_fraction.map(|fraction| (fraction * self.device.capacity() as f64) as u64)
    }

    fn collects_garbage(&self) -> bool {
        self.options.memory_fraction.is_some() && self.options.garbage_collection_threshold.is_some()
    }

    /// Frees cached large blocks that have been unused for longer than average, until the reserved memory is below the
    /// threshold.
    fn collect_garbage(&mut self) {
        let (Some(allowed), Some(threshold)) = (self.allowed(), self.options.garbage_collection_threshold) else {
            return;
        };
        let limit = (threshold * allowed as f64) as u64;
        let Some(excess) = self.statistics.reserved.current.checked_sub(limit).filter(|&excess| excess > 0) else {
            return;
        };
        let searches = self.blocks.pool(PoolKind::Large).searches;
        let mut unsplit: Vec<(BlockId, u64)> = self
            .blocks
            .free_blocks(PoolKind::Large)
            .into_iter()
            .filter(|&id| !self.blocks.get(id).is_split())
            .map(|id| (id, searches - self.blocks.get(id).searches_when_freed))
            .collect();
        let mut total_age: u64 = unsplit.iter().map(|(_, age)| age).sum();
        let mut collected = 0;
        while collected < excess && !unsplit.is_empty() {
            let oldest = total_age as f64 / unsplit.len() as f64;
            let before = unsplit.len();
            unsplit.retain(|&(id, age)| {
                let collect = age as f64 >= oldest && self.blocks.get(id).expandable.is_none();
                if collect {
                    collected += self.blocks.get(id).bytes;
                    total_age -= age;
                    self.release(id);
                }
                !collect
            });
            if unsplit.len() == before {
                break;
            }
        }
    }
}

impl Allocator for PyTorch {
    fn name(&self) -> &'static str {
        if self.options.expandable_segments { "pytorch-expandable" } else { "pytorch" }
    }

    fn allocate(&mut self, bytes: u64, stream: Stream) -> Result<Block, OutOfMemory> {
        self.process_events();
        let found = (bytes <= LARGEST_REQUEST)
            .then(|| Request::new(&self.options, bytes, stream))
            .and_then(|request| self.find_block(&request).map(|found| (request, found)));
        let Some((request, found)) = found else {
            return Err(OutOfMemory::new(self.name(), bytes, &self.statistics, self.device.capacity()));
        };
        let id = if self.splits(&request, found) {
            let front = self.blocks.split_front(found, request.bytes);
            self.blocks.insert_free(found);
            front
        } else {
            found
        };
        let block = self.blocks.get_mut(id);
        block.allocated = true;
        self.statistics.allocated.rise(block.bytes);
        Ok(Block { address: block.address, bytes: block.bytes, slot: id.0 })
    }

    fn free(&mut self, block: Block) {
        let id = BlockId(block.slot);
        let state = self.blocks.get_mut(id);
        assert!(state.allocated && state.address == block.address, "a block goes back to the allocator it came from");
        state.allocated = false;
        self.statistics.allocated.fall(block.bytes);
        let used_by = std::mem::take(&mut state.used_by);
        if used_by.is_empty() {
            return self.recycle(id);
        }
        state.pending_events = used_by.len() as u32;
        for stream in used_by {
            self.events.entry(stream).or_default().push_back(id);
        }
    }

    fn record_use(&mut self, block: &Block, stream: Stream) {
        let state = self.blocks.get_mut(BlockId(block.slot));
        if stream != state.stream && !state.used_by.contains(&stream) {
            state.used_by.push(stream);
        }
    }

    fn synchronize(&mut self, stream: Stream) {
        if let Some(queue) = self.events.get(&stream) {
            self.done.insert(stream, queue.len());
        }
    }

    fn statistics(&self) -> Statistics {
        Statistics { driver: self.device.calls(), ..self.statistics }
    }

    fn extents(&self) -> Vec<Extent> {
        let mapped = self.blocks.all().filter(|block| block.mapped);
        let extent = |b: &BlockState| Extent { address: b.address, bytes: b.bytes, in_use: !b.is_idle() };
        let mut extents: Vec<Extent> = mapped.map(extent).collect();
        extents.sort_unstable_by_key(|extent| extent.address);
        extents
    }
}

/// A request with its rounded size.
#[derive(Debug)]
struct Request {
    bytes: u64,
    stream: Stream,
    pool: PoolKind,
    /// Bytes to take from the device if no free block fits.
    segment_bytes: u64,
}

impl Request {
    fn new(options: &PyTorchOptions, bytes: u64, stream: Stream) -> Self {
        let bytes = options.round(bytes);
        let (pool, segment_bytes) = match bytes {
            small if small <= SMALL_REQUEST => (PoolKind::Small, SMALL_SEGMENT),
            medium if medium < LARGE_REQUEST => (PoolKind::Large, options.large_segment_bytes),
            _ => (PoolKind::Large, bytes.next_multiple_of(ROUND_LARGE)),
        };
        Self { bytes, stream, pool, segment_bytes }
    }
}

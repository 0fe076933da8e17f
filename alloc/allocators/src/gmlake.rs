//! GMLake (ASPLOS '24; glake's fork of PyTorch's allocator): free blocks stitched by virtual memory.
//!
//! Requests up to 1 MiB go the way of PyTorch's small pool. Larger ones are rounded to chunks of 2 MiB, each one piece of
//! physical memory. A *primitive* block is a run of chunks that were mapped together; a *stitched* block maps chunks of
//! several free primitive blocks a second time, under one range of addresses. The order of attempts: the best-fitting
//! free primitive block (split, if a chunk or more is left over); a free stitched block of at most ten times the size;
//! stitching, for requests of at least the fragmentation limit, the largest free primitive blocks until they are enough,
//! the last one split; new chunks; after giving the cached blocks back, new chunks again. Stitched blocks are kept for
//! reuse as long as their chunks exist, up to a limit of mapped addresses.

use std::collections::{BTreeMap, BTreeSet};

use crate::pytorch::PyTorchOptions;
use crate::{Allocator, Block, Device, Extent, OutOfMemory, PyTorch, Statistics, Stream};

const CHUNK: u64 = 2 << 20;
const SMALL_REQUEST: u64 = 1 << 20;
const LARGE_REQUEST: u64 = 10 << 20;
const LARGE_SEGMENT: u64 = 20 << 20;
/// The model keeps a table of all chunks there ever were and takes no more: 64 TiB.
const MOST_CHUNKS: usize = 1 << 25;
/// Slots of stitched blocks carry this bit, those of primitive ones do not.
const STITCHED: u32 = 1 << 31;

/// GMLake's environment variables.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GmLakeOptions {
    /// `fragLimit`: smaller requests are never stitched, in bytes.
    pub fragmentation_limit: u64,
    /// `reuseLimit`: a stitched block serves requests down to its size divided by this.
    pub reuse_limit: f64,
    /// `autoGC`: stitched blocks that are not in use are dropped when more than this many bytes of addresses are stitched.
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
    /// The small pool, and with it the device.
    small: PyTorch,
    chunks: Vec<Chunk>,
    /// Runs of chunks by the number of their first. Neighbours in one segment are neighbours in number.
    primitives: BTreeMap<u32, Primitive>,
    /// By stream, then chunks, then first chunk.
    free_primitives: BTreeSet<(Stream, u32, u32)>,
    stitched: BTreeMap<u32, Stitched>,
    /// Those of which every chunk is free: by stream, then chunks, then number.
    free_stitched: BTreeSet<(Stream, u32, u32)>,
    next_stitched: u32,
    stitched_bytes: u64,
    segments: u32,
    large: Statistics,
    /// Both pools together: peaks do not add up.
    statistics: Statistics,
}

/// 2 MiB of physical memory.
#[derive(Debug)]
struct Chunk {
    address: u64,
    free: bool,
    /// Stitched blocks that map it.
    mapped_by: Vec<u32>,
}

#[derive(Debug, Clone, Copy)]
struct Primitive {
    chunks: u32,
    stream: Stream,
    segment: u32,
    free: bool,
}

#[derive(Debug)]
struct Stitched {
    stream: Stream,
    address: u64,
    chunks: Vec<u32>,
    /// How many of them are free.
    free_chunks: u32,
    /// How many, from the front, the program holds; 0 while it is not in use.
    used_chunks: u32,
}

impl GmLake {
    /// An empty allocator.
    pub fn new(device: Device, options: GmLakeOptions) -> Self {
        Self {
            options,
            small: PyTorch::new(device, PyTorchOptions::default()),
            chunks: Vec::new(),
            primitives: BTreeMap::new(),
            free_primitives: BTreeSet::new(),
            stitched: BTreeMap::new(),
            free_stitched: BTreeSet::new(),
            next_stitched: 0,
            stitched_bytes: 0,
            segments: 0,
            large: Statistics::default(),
            statistics: Statistics::default(),
        }
    }

    fn allocate_large(&mut self, bytes: u64, stream: Stream) -> Option<Block> {
        let chunks = u32::try_from(bytes.div_ceil(CHUNK)).ok().filter(|&chunks| chunks as usize <= MOST_CHUNKS)?;
        if let Some(block) = self.take_primitive(chunks, stream) {
            return Some(block);
        }
        if let Some(block) = self.take_stitched(chunks, stream) {
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
        self.take_primitive(chunks, stream)
    }

    fn take_primitive(&mut self, chunks: u32, stream: Stream) -> Option<Block> {
        let &(found_stream, size, first) = self.free_primitives.range((stream, chunks, 0)..).next()?;
        if found_stream != stream {
            return None;
        }
        self.free_primitives.remove(&(stream, size, first));
        self.cut(first, chunks);
        self.primitives.get_mut(&first).expect("just cut").free = false;
        self.use_chunks(first..first + chunks);
        Some(Block { address: self.chunks[first as usize].address, bytes: u64::from(chunks) * CHUNK, slot: first })
    }

    fn take_stitched(&mut self, chunks: u32, stream: Stream) -> Option<Block> {
        let &(found_stream, size, number) = self.free_stitched.range((stream, chunks, 0)..).next()?;
        if found_stream != stream || f64::from(size) > f64::from(chunks) * self.options.reuse_limit {
            return None;
        }
        let held: Vec<u32> = self.stitched[&number].chunks[..chunks as usize].to_vec();
        for &chunk in &held {
            self.isolate(chunk, &held);
        }
        Some(self.hold_stitched(number, chunks))
    }

    /// Marks a stitched block and its first `chunks` as in use.
    fn hold_stitched(&mut self, number: u32, chunks: u32) -> Block {
        let held: Vec<u32> = self.stitched[&number].chunks[..chunks as usize].to_vec();
        self.use_chunks(held);
        let stitched = self.stitched.get_mut(&number).expect("the caller's number is one of ours");
        stitched.used_chunks = chunks;
        Block { address: stitched.address, bytes: u64::from(chunks) * CHUNK, slot: STITCHED | number }
    }

    /// Stitches the largest free primitive blocks into one of `chunks`.
    fn stitch(&mut self, chunks: u32, stream: Stream) -> Option<Block> {
        if u64::from(chunks) * CHUNK < self.options.fragmentation_limit {
            return None;
        }
        let mut picked = Vec::new();
        let mut missing = chunks;
        for &(_, size, first) in self.free_primitives.range((stream, 0, 0)..=(stream, u32::MAX, u32::MAX)).rev() {
            let take = size.min(missing);
            picked.push((first, size, take));
            missing -= take;
            if missing == 0 {
                break;
            }
        }
        // One block alone would be a primitive fit; the original asks for two at least.
        if missing > 0 || picked.len() < 2 {
            return None;
        }
        let address = self.small.device_mut().stitch(u64::from(chunks), CHUNK)?;
        let mut stitched = Vec::with_capacity(chunks as usize);
        for (first, size, take) in picked {
            self.free_primitives.remove(&(stream, size, first));
            self.cut(first, take);
            self.primitives.get_mut(&first).expect("just cut").free = false;
            stitched.extend(first..first + take);
        }
        let number = self.next_stitched;
        self.next_stitched += 1;
        for &chunk in &stitched {
            self.chunks[chunk as usize].mapped_by.push(number);
        }
        let block = Stitched { stream, address, chunks: stitched, free_chunks: chunks, used_chunks: 0 };
        self.stitched.insert(number, block);
        self.stitched_bytes += u64::from(chunks) * CHUNK;
        self.large.device_allocations += 1;
        let block = self.hold_stitched(number, chunks);
        if self.stitched_bytes > self.options.stitched_limit {
            let idle: Vec<u32> = self.stitched.iter().filter(|(_, s)| s.used_chunks == 0).map(|(&n, _)| n).collect();
            idle.into_iter().for_each(|number| self.drop_stitched(number));
        }
        Some(block)
    }

    /// New chunks from the device, as one free primitive block. Returns whether the device had them.
    fn create_segment(&mut self, chunks: u32, stream: Stream) -> bool {
        let device = self.small.device_mut();
        if self.chunks.len() + chunks as usize > MOST_CHUNKS {
            return false;
        }
        let Some(address) = device.reserve(u64::from(chunks) * CHUNK) else { return false };
        if !device.create_and_map(u64::from(chunks), CHUNK) {
            return false;
        }
        let first = u32::try_from(self.chunks.len()).expect("fewer than 2^32 chunks of 2 MiB");
        let chunk = |i| Chunk { address: address + u64::from(i) * CHUNK, free: true, mapped_by: Vec::new() };
        self.chunks.extend((0..chunks).map(chunk));
        self.primitives.insert(first, Primitive { chunks, stream, segment: self.segments, free: true });
        self.free_primitives.insert((stream, chunks, first));
        self.segments += 1;
        self.large.reserved.rise(u64::from(chunks) * CHUNK);
        self.large.segments += 1;
        self.large.device_allocations += 1;
        true
    }

    /// Gives all free primitive blocks that are whole segments back to the device, and the small pool's cache.
    fn release_cached(&mut self) {
        for (stream, chunks, first) in self.free_primitives.clone() {
            if self.is_split(first) {
                continue;
            }
            self.free_primitives.remove(&(stream, chunks, first));
            self.primitives.remove(&first);
            let mapped_by = |chunk| std::mem::take(&mut self.chunks[chunk as usize].mapped_by);
            let stitched: BTreeSet<u32> = (first..first + chunks).flat_map(mapped_by).collect();
            for number in stitched {
                // One that is in use holds other chunks than these, from its front.
                let block = self.stitched.get_mut(&number).expect("chunks know living stitched blocks only");
                let keep = block.used_chunks as usize;
                if keep == 0 {
                    self.drop_stitched(number);
                } else {
                    self.shorten(number, keep);
                }
            }
            self.small.device_mut().unmap_and_release(u64::from(chunks), CHUNK);
            self.large.reserved.fall(u64::from(chunks) * CHUNK);
            self.large.segments -= 1;
            self.large.device_frees += 1;
        }
        self.small.empty_cache();
    }

    fn is_split(&self, first: u32) -> bool {
        let primitive = self.primitives[&first];
        let same = |other: Option<(&u32, &Primitive)>| other.is_some_and(|(_, o)| o.segment == primitive.segment);
        same(self.primitives.range(..first).next_back()) || same(self.primitives.range(first + 1..).next())
    }

    /// Forgets a stitched block that is not in use.
    fn drop_stitched(&mut self, number: u32) {
        self.shorten(number, 0);
        let block = self.stitched.remove(&number).expect("dropped once");
        self.small.device_mut().unstitch(block.chunks.len() as u64);
    }

    /// Takes the chunks from `keep` on out of a stitched block.
    fn shorten(&mut self, number: u32, keep: usize) {
        self.remove_free_stitched(number);
        let block = self.stitched.get_mut(&number).expect("the caller's number is one of ours");
        for chunk in block.chunks.drain(keep..) {
            let chunk = &mut self.chunks[chunk as usize];
            chunk.mapped_by.retain(|&n| n != number);
            block.free_chunks -= u32::from(chunk.free);
            self.stitched_bytes -= CHUNK;
        }
    }

    /// Splits a primitive block in no set after `chunks`; the rest becomes a free block of its own.
    fn cut(&mut self, first: u32, chunks: u32) {
        let whole = self.primitives[&first];
        if whole.chunks > chunks {
            let rest = Primitive { chunks: whole.chunks - chunks, ..whole };
            self.primitives.insert(first, Primitive { chunks, ..whole });
            self.primitives.insert(first + chunks, Primitive { free: true, ..rest });
            self.free_primitives.insert((rest.stream, rest.chunks, first + chunks));
        }
    }

    /// Cuts the free primitive block around `chunk` so that the longest run of `held` chunks from there on is a block
    /// of its own, not free any more. Does nothing when that has happened.
    fn isolate(&mut self, chunk: u32, held: &[u32]) {
        let (&first, &whole) =
            self.primitives.range(..=chunk).next_back().expect("every chunk is in a primitive block");
        if !whole.free {
            return;
        }
        let end = first + whole.chunks;
        let mut inside: Vec<u32> = held.iter().copied().filter(|c| (first..end).contains(c)).collect();
        inside.sort_unstable();
        self.free_primitives.remove(&(whole.stream, whole.chunks, first));
        self.primitives.remove(&first);
        let mut add = |from: u32, to: u32, free: bool| {
            if from < to {
                self.primitives.insert(from, Primitive { chunks: to - from, free, ..whole });
                if free {
                    self.free_primitives.insert((whole.stream, to - from, from));
                }
            }
        };
        let mut floor = first;
        for run in inside.chunk_by(|a, b| a + 1 == *b) {
            add(floor, run[0], true);
            add(run[0], run[0] + run.len() as u32, false);
            floor = run[0] + run.len() as u32;
        }
        add(floor, end, true);
    }

    /// Marks chunks as in use, and every stitched block that maps them as not free.
    fn use_chunks(&mut self, chunks: impl IntoIterator<Item = u32>) {
        for chunk in chunks {
            debug_assert!(self.chunks[chunk as usize].free, "a chunk is used by one block at a time");
            self.chunks[chunk as usize].free = false;
            for number in self.chunks[chunk as usize].mapped_by.clone() {
                self.remove_free_stitched(number);
                self.stitched.get_mut(&number).expect("chunks know living stitched blocks only").free_chunks -= 1;
            }
        }
    }

    /// The reverse of [`use_chunks`](Self::use_chunks).
    fn free_chunks(&mut self, chunks: impl IntoIterator<Item = u32>) {
        for chunk in chunks {
            self.chunks[chunk as usize].free = true;
            for &number in &self.chunks[chunk as usize].mapped_by {
                let block = self.stitched.get_mut(&number).expect("chunks know living stitched blocks only");
                block.free_chunks += 1;
                if block.free_chunks as usize == block.chunks.len() && block.used_chunks == 0 {
                    self.free_stitched.insert((block.stream, block.free_chunks, number));
                }
            }
        }
    }

    fn remove_free_stitched(&mut self, number: u32) {
        let block = &self.stitched[&number];
        self.free_stitched.remove(&(block.stream, block.chunks.len() as u32, number));
    }

    /// Makes a primitive block free, joined with its free neighbours in the segment.
    fn free_primitive(&mut self, mut first: u32) {
        let mut block = self.primitives.remove(&first).expect("the caller's number is one of ours");
        if let Some((&previous, &other)) = self.primitives.range(..first).next_back()
            && other.segment == block.segment
            && other.free
        {
            self.primitives.remove(&previous);
            self.free_primitives.remove(&(other.stream, other.chunks, previous));
            block.chunks += other.chunks;
            first = previous;
        }
        let next = first + block.chunks;
        if let Some(&other) = self.primitives.get(&next)
            && other.segment == block.segment
            && other.free
        {
            self.primitives.remove(&next);
            self.free_primitives.remove(&(other.stream, other.chunks, next));
            block.chunks += other.chunks;
        }
        self.primitives.insert(first, Primitive { free: true, ..block });
        self.free_primitives.insert((block.stream, block.chunks, first));
    }

    /// Both pools' sums, and the peaks of the sums.
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
            if block.slot & STITCHED == 0 {
                let chunks = (block.bytes / CHUNK) as u32;
                self.free_chunks(block.slot..block.slot + chunks);
                self.free_primitive(block.slot);
            } else {
                let number = block.slot & !STITCHED;
                let stitched = self.stitched.get_mut(&number).expect("a block goes back to the allocator it came from");
                let held = stitched.chunks[..std::mem::take(&mut stitched.used_chunks) as usize].to_vec();
                self.free_chunks(held.iter().copied());
                for chunk in held {
                    let (&first, primitive) = self.primitives.range(..=chunk).next_back().expect("chunks have blocks");
                    if !primitive.free {
                        self.free_primitive(first);
                    }
                }
            }
        }
        self.account();
    }

    fn statistics(&self) -> Statistics {
        self.statistics
    }

    fn extents(&self) -> Vec<Extent> {
        let large = self.primitives.iter().map(|(&first, primitive)| Extent {
            address: self.chunks[first as usize].address,
            bytes: u64::from(primitive.chunks) * CHUNK,
            in_use: !primitive.free,
        });
        let mut extents: Vec<Extent> = large.chain(self.small.extents()).collect();
        extents.sort_unstable_by_key(|extent| extent.address);
        extents
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn allocator(fragmentation_limit: u64, capacity: u64) -> GmLake {
        GmLake::new(Device::new(capacity), GmLakeOptions { fragmentation_limit, ..GmLakeOptions::default() })
    }

    fn allocate<const N: usize>(allocator: &mut GmLake, sizes: [u64; N]) -> [Block; N] {
        sizes.map(|size| allocator.allocate(size * MIB, Stream::default()).unwrap())
    }

    #[test]
    fn free_blocks_are_stitched_from_the_limit_on() {
        let check = |limit: u64, expected: u64| {
            let mut allocator = allocator(limit * MIB, 1 << 40);
            let [a, keep, b] = allocate(&mut allocator, [30, 2, 40]);
            allocator.free(a);
            allocator.free(b);
            let [block] = allocate(&mut allocator, [60]);
            assert_eq!((block.bytes(), allocator.reserved()), (60 * MIB, expected * MIB), "limit {limit}");
            allocator.free(keep);
        };
        // 30 + 20 (the smallest large segment) + 40.
        check(61, 30 + 20 + 40 + 60);
        check(60, 30 + 20 + 40);
    }

    #[test]
    fn a_stitched_block_is_kept_and_its_parts_are_used() {
        let mut allocator = allocator(4 * MIB, 1 << 40);
        let [a, b] = allocate(&mut allocator, [30, 40]);
        allocator.free(a);
        allocator.free(b);
        let [stitched] = allocate(&mut allocator, [60]); // all of b and 20 MiB of a
        let trips = allocator.statistics().device_calls();
        let [rest] = allocate(&mut allocator, [10]); // what was left of a
        assert_eq!(allocator.reserved(), 70 * MIB);
        allocator.free(stitched);
        let [again] = allocate(&mut allocator, [50]);
        assert_eq!((allocator.reserved(), allocator.statistics().device_calls()), (70 * MIB, trips));
        let [tail] = allocate(&mut allocator, [10]); // the part of the stitched block that is not held
        assert_eq!(allocator.reserved(), 70 * MIB);
        [rest, again, tail].into_iter().for_each(|block| allocator.free(block));
        assert_eq!(allocator.allocated(), 0);
    }

    #[test]
    fn a_stitched_block_serves_down_to_a_tenth() {
        let mut allocator = allocator(4 * MIB, 1 << 40);
        let [a, b] = allocate(&mut allocator, [100, 100]);
        allocator.free(a);
        allocator.free(b);
        let [stitched] = allocate(&mut allocator, [200]);
        allocator.free(stitched);
        let [primitive] = allocate(&mut allocator, [100]); // a primitive block that fits comes first
        let [other] = allocate(&mut allocator, [100]);
        assert_eq!(allocator.reserved(), 200 * MIB);
        [primitive, other].into_iter().for_each(|block| allocator.free(block));
    }

    #[test]
    fn cached_segments_go_back_with_what_was_stitched_of_them() {
        let mut allocator = allocator(4 * MIB, 220 * MIB);
        let [a, b] = allocate(&mut allocator, [100, 100]);
        allocator.free(a);
        allocator.free(b);
        let [stitched] = allocate(&mut allocator, [150]);
        allocator.free(stitched);
        // 204 MiB are more than the 200 at hand: both segments go.
        let [large] = allocate(&mut allocator, [204]);
        assert_eq!((allocator.reserved(), allocator.statistics().retries), (204 * MIB, 1));
        assert!(allocator.allocate(18 * MIB, Stream::default()).is_err());
        allocator.free(large);
        assert_eq!((allocator.stitched.len(), allocator.stitched_bytes), (0, 0));
    }
}

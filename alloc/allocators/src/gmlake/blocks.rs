//! The blocks of large requests. A primitive block is a run of chunks that were mapped together. A stitched block maps
//! some of these chunks a second time.
//!
//! In: chunks that the device has created; blocks to cut, stitch, take and free. Out: the best-fitting free block.
//! Never: a device call.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::slice::from_ref;

use super::CHUNK;
use crate::{Block, Extent, Stream};

/// Bit that is set in the slots of stitched blocks, and of no other blocks.
const STITCHED: u32 = 1 << 31;

/// All chunks and the blocks that map them. The work on a block grows with the number of runs into which the block is
/// cut, not with the number of chunks.
#[derive(Debug, Default)]
pub(super) struct Blocks {
    /// All chunks that ever existed, as runs, keyed by the number of each run's first chunk.
    runs: BTreeMap<u32, Run>,
    count: u32,
    /// Primitive blocks, keyed by the number of their first chunk. Neighbours in one segment have consecutive numbers.
    primitives: BTreeMap<u32, Primitive>,
    /// Free primitive blocks by stream, then number of chunks, then first chunk.
    free_primitives: BTreeSet<(Stream, u32, u32)>,
    pub stitched: BTreeMap<u32, Stitched>,
    /// Stitched blocks whose chunks are all free, by stream, then number of chunks, then block number.
    free_stitched: BTreeSet<(Stream, u32, u32)>,
    next_stitched: u32,
    pub stitched_bytes: u64,
    segments: u32,
}

/// Consecutive chunks of 2 MiB of physical memory that have the same use and the same mappings.
#[derive(Debug)]
struct Run {
    chunks: u32,
    /// Address of the first chunk.
    address: u64,
    free: bool,
    /// Stitched blocks that map these chunks.
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
pub(super) struct Stitched {
    stream: Stream,
    address: u64,
    /// The numbers of the block's chunks, in the order of their addresses.
    ranges: Vec<Range<u32>>,
    /// Number of chunks in the block.
    chunks: u32,
    /// Number of the block's chunks that are free.
    free_chunks: u32,
    /// Number of chunks, from the front, that the program holds; 0 if the block is not in use.
    pub used_chunks: u32,
}

impl Blocks {
    /// Number of chunks that ever existed.
    pub fn count(&self) -> u32 {
        self.count
    }

    /// Number of runs of chunks.
    #[cfg(test)]
    pub fn runs(&self) -> usize {
        self.runs.len()
    }

    /// Adds new chunks from `address` on as one free primitive block.
    pub fn add_segment(&mut self, address: u64, chunks: u32, stream: Stream) {
        let first = self.count;
        self.count += chunks;
        self.runs.insert(first, Run { chunks, address, free: true, mapped_by: Vec::new() });
        self.primitives.insert(first, Primitive { chunks, stream, segment: self.segments, free: true });
        self.free_primitives.insert((stream, chunks, first));
        self.segments += 1;
    }

    /// The free primitive blocks that are whole segments, as first chunk and number of chunks.
    pub fn free_segments(&self) -> Vec<(u32, u32)> {
        let whole = self.free_primitives.iter().filter(|(_, _, first)| !self.is_split(*first));
        whole.map(|&(_, chunks, first)| (first, chunks)).collect()
    }

    /// Removes the free segment whose first chunk is `first`. Returns the numbers of the stitched blocks that map
    /// chunks of this segment.
    pub fn remove_segment(&mut self, first: u32) -> BTreeSet<u32> {
        let Primitive { chunks, stream, .. } =
            self.primitives.remove(&first).expect("the caller's number is one of ours");
        self.free_primitives.remove(&(stream, chunks, first));
        self.runs_of(first..first + chunks).flat_map(|run| std::mem::take(&mut run.mapped_by)).collect()
    }

    /// Takes the best-fitting free primitive block, cut to `chunks`. Returns `None` if no free block is large enough.
    pub fn take_primitive(&mut self, chunks: u32, stream: Stream) -> Option<Block> {
        let &(found_stream, size, first) = self.free_primitives.range((stream, chunks, 0)..).next()?;
        if found_stream != stream {
            return None;
        }
        self.free_primitives.remove(&(stream, size, first));
        self.cut(first, chunks);
        self.primitives.get_mut(&first).expect("just cut").free = false;
        self.use_chunks(from_ref(&(first..first + chunks)));
        Some(Block { address: self.address(first), bytes: u64::from(chunks) * CHUNK, slot: first })
    }

    /// Takes the best-fitting free stitched block, which may be at most `reuse_limit` times as large as the request.
    /// Returns `None` if there is no such block.
    pub fn take_stitched(&mut self, chunks: u32, stream: Stream, reuse_limit: f64) -> Option<Block> {
        let &(found_stream, size, number) = self.free_stitched.range((stream, chunks, 0)..).next()?;
        if found_stream != stream || f64::from(size) > f64::from(chunks) * reuse_limit {
            return None;
        }
        let (held, _) = split(&self.stitched[&number].ranges, chunks);
        for range in &held {
            let mut chunk = range.start;
            while chunk < range.end {
                chunk = self.isolate(chunk, &held);
            }
        }
        Some(self.hold_stitched(number, chunks))
    }

    /// Marks a stitched block and its first `chunks` as in use.
    pub fn hold_stitched(&mut self, number: u32, chunks: u32) -> Block {
        let (held, _) = split(&self.stitched[&number].ranges, chunks);
        self.use_chunks(&held);
        let stitched = self.stitched.get_mut(&number).expect("the caller's number is one of ours");
        stitched.used_chunks = chunks;
        Block { address: stitched.address, bytes: u64::from(chunks) * CHUNK, slot: STITCHED | number }
    }

    /// Picks free primitive blocks, the largest first, until the picked blocks have `chunks` together. For each block,
    /// returns the first chunk, the size, and the number of chunks taken. Returns `None` if all free blocks do not
    /// suffice, or if fewer than two are needed.
    pub fn pick(&self, chunks: u32, stream: Stream) -> Option<Vec<(u32, u32, u32)>> {
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
        // A single block would have been found as a primitive block; the original requires at least two.
        (missing == 0 && picked.len() >= 2).then_some(picked)
    }

    /// Creates a stitched block from [picked](Self::pick) blocks and returns its number. The new block is not in use
    /// yet.
    pub fn stitch(&mut self, picked: Vec<(u32, u32, u32)>, stream: Stream, address: u64) -> u32 {
        let mut ranges = Vec::new();
        for (first, size, take) in picked {
            self.free_primitives.remove(&(stream, size, first));
            self.cut(first, take);
            self.primitives.get_mut(&first).expect("just cut").free = false;
            ranges.push(first..first + take);
        }
        let number = self.next_stitched;
        self.next_stitched += 1;
        for range in &ranges {
            self.runs_of(range.clone()).for_each(|run| run.mapped_by.push(number));
        }
        let chunks = ranges.iter().map(|range| range.end - range.start).sum();
        self.stitched.insert(number, Stitched { stream, address, ranges, chunks, free_chunks: chunks, used_chunks: 0 });
        self.stitched_bytes += u64::from(chunks) * CHUNK;
        number
    }

    /// Frees a block that was taken.
    pub fn free(&mut self, block: &Block) {
        if block.slot & STITCHED == 0 {
            let chunks = (block.bytes / CHUNK) as u32;
            self.free_chunks(from_ref(&(block.slot..block.slot + chunks)));
            self.free_primitive(block.slot);
            return;
        }
        let number = block.slot & !STITCHED;
        let stitched = self.stitched.get_mut(&number).expect("a block goes back to the allocator it came from");
        let (held, _) = split(&stitched.ranges, std::mem::take(&mut stitched.used_chunks));
        self.free_chunks(&held);
        for range in held {
            let mut chunk = range.start;
            while chunk < range.end {
                let (first, primitive) = self.primitive_of(chunk);
                if !primitive.free {
                    self.free_primitive(first);
                }
                chunk = first + primitive.chunks;
            }
        }
    }

    /// The address ranges of the primitive blocks.
    pub fn extents(&self) -> impl Iterator<Item = Extent> {
        self.primitives.iter().map(|(&first, primitive)| Extent {
            address: self.address(first),
            bytes: u64::from(primitive.chunks) * CHUNK,
            in_use: !primitive.free,
        })
    }

    fn is_split(&self, first: u32) -> bool {
        let primitive = self.primitives[&first];
        let same = |other: Option<(&u32, &Primitive)>| other.is_some_and(|(_, o)| o.segment == primitive.segment);
        same(self.primitives.range(..first).next_back()) || same(self.primitives.range(first + 1..).next())
    }

    /// Removes the chunks from number `keep` on from a stitched block. Returns the number of chunks removed.
    pub fn shorten(&mut self, number: u32, keep: u32) -> u64 {
        let block = self.stitched.get_mut(&number).expect("the caller's number is one of ours");
        self.free_stitched.remove(&(block.stream, block.chunks, number));
        let (kept, dropped) = split(&block.ranges, keep);
        let taken = block.chunks.saturating_sub(keep);
        (block.ranges, block.chunks) = (kept, block.chunks - taken);
        let mut free = 0;
        for range in dropped {
            for run in self.runs_of(range) {
                run.mapped_by.retain(|&n| n != number);
                free += if run.free { run.chunks } else { 0 };
            }
        }
        self.stitched.get_mut(&number).expect("it was there").free_chunks -= free;
        self.stitched_bytes -= u64::from(taken) * CHUNK;
        u64::from(taken)
    }

    /// Splits a primitive block, which must be in no set, after `chunks`. The rest becomes a free block.
    fn cut(&mut self, first: u32, chunks: u32) {
        let whole = self.primitives[&first];
        if whole.chunks > chunks {
            let rest = Primitive { chunks: whole.chunks - chunks, ..whole };
            self.primitives.insert(first, Primitive { chunks, ..whole });
            self.primitives.insert(first + chunks, Primitive { free: true, ..rest });
            self.free_primitives.insert((rest.stream, rest.chunks, first + chunks));
        }
    }

    /// Cuts the free primitive block around `chunk` so that the longest runs of `held` chunks in it become blocks of
    /// their own. These new blocks are then no longer free. Does nothing if the block around `chunk` is not free,
    /// because it was cut before. Returns the end of the original block.
    fn isolate(&mut self, chunk: u32, held: &[Range<u32>]) -> u32 {
        let (first, whole) = self.primitive_of(chunk);
        let end = first + whole.chunks;
        if !whole.free {
            return end;
        }
        let inside = held.iter().map(|range| range.start.max(first)..range.end.min(end));
        let mut inside: Vec<Range<u32>> = inside.filter(|range| range.start < range.end).collect();
        inside.sort_unstable_by_key(|range| range.start);
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
        for run in inside.chunk_by(|a, b| a.end == b.start) {
            let (start, end) = (run[0].start, run[run.len() - 1].end);
            add(floor, start, true);
            add(start, end, false);
            floor = end;
        }
        add(floor, end, true);
        end
    }

    /// Returns the primitive block that contains a chunk, and the number of the block's first chunk.
    fn primitive_of(&self, chunk: u32) -> (u32, Primitive) {
        let (&first, &primitive) =
            self.primitives.range(..=chunk).next_back().expect("every chunk is in a primitive block");
        (first, primitive)
    }

    /// The address of a chunk.
    fn address(&self, chunk: u32) -> u64 {
        let (first, run) = self.runs.range(..=chunk).next_back().expect("every chunk is in a run");
        run.address + u64::from(chunk - first) * CHUNK
    }

    /// The runs within a range. Runs that cross the ends of the range are cut there.
    fn runs_of(&mut self, range: Range<u32>) -> impl Iterator<Item = &mut Run> {
        for at in [range.start, range.end] {
            if let Some((first, run)) = self.runs.range_mut(..at).next_back()
                && run.chunks > at - first
            {
                let (before, address) = (at - first, run.address + u64::from(at - first) * CHUNK);
                let rest = Run { chunks: run.chunks - before, address, mapped_by: run.mapped_by.clone(), ..*run };
                run.chunks = before;
                self.runs.insert(at, rest);
            }
        }
        self.runs.range_mut(range).map(|(_, run)| run)
    }

    /// Marks chunks as in use, and every stitched block that maps them as not free.
    fn use_chunks(&mut self, ranges: &[Range<u32>]) {
        let mut mapped = Vec::new();
        for range in ranges {
            for run in self.runs_of(range.clone()) {
                debug_assert!(run.free, "a chunk is used by one block at a time");
                run.free = false;
                mapped.extend(run.mapped_by.iter().map(|&number| (number, run.chunks)));
            }
        }
        for (number, chunks) in mapped {
            let block = self.stitched.get_mut(&number).expect("chunks know living stitched blocks only");
            self.free_stitched.remove(&(block.stream, block.chunks, number));
            block.free_chunks -= chunks;
        }
    }

    /// Undoes [`use_chunks`](Self::use_chunks).
    fn free_chunks(&mut self, ranges: &[Range<u32>]) {
        let mut mapped = Vec::new();
        for range in ranges {
            for run in self.runs_of(range.clone()) {
                run.free = true;
                mapped.extend(run.mapped_by.iter().map(|&number| (number, run.chunks)));
            }
        }
        for (number, chunks) in mapped {
            let block = self.stitched.get_mut(&number).expect("chunks know living stitched blocks only");
            block.free_chunks += chunks;
            if block.free_chunks == block.chunks && block.used_chunks == 0 {
                self.free_stitched.insert((block.stream, block.chunks, number));
            }
        }
    }

    /// Marks a primitive block as free and joins it with its free neighbours in the segment.
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
}

/// Splits ranges into their first `count` chunks and the others.
fn split(ranges: &[Range<u32>], count: u32) -> (Vec<Range<u32>>, Vec<Range<u32>>) {
    let (mut first, mut others, mut left) = (Vec::new(), Vec::new(), count);
    for range in ranges {
        let middle = range.start + left.min(range.end - range.start);
        left -= middle - range.start;
        first.extend((range.start < middle).then_some(range.start..middle));
        others.extend((middle < range.end).then_some(middle..range.end));
    }
    (first, others)
}

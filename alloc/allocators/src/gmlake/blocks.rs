//! The blocks of large requests: primitive ones, each a run of chunks that were mapped together, and stitched ones, which map some
//! of these chunks a second time.
//!
//! In: chunks that the device has made, blocks to cut, stitch, take and free. Out: the best-fitting free block. Never: a call of the
//! device.

use std::collections::{BTreeMap, BTreeSet};

use super::CHUNK;
use crate::{Block, Extent, Stream};

/// Slots of stitched blocks carry this bit, those of primitive ones do not.
const STITCHED: u32 = 1 << 31;

/// All chunks and the blocks that map them.
#[derive(Debug, Default)]
pub(super) struct Blocks {
    chunks: Vec<Chunk>,
    /// Runs of chunks by the number of their first. Neighbours in one segment are neighbours in number.
    primitives: BTreeMap<u32, Primitive>,
    /// By stream, then chunks, then first chunk.
    free_primitives: BTreeSet<(Stream, u32, u32)>,
    pub stitched: BTreeMap<u32, Stitched>,
    /// Those of which every chunk is free: by stream, then chunks, then number.
    free_stitched: BTreeSet<(Stream, u32, u32)>,
    next_stitched: u32,
    pub stitched_bytes: u64,
    segments: u32,
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
pub(super) struct Stitched {
    stream: Stream,
    address: u64,
    pub chunks: Vec<u32>,
    /// How many of them are free.
    free_chunks: u32,
    /// How many, from the front, the program holds; 0 while it is not in use.
    pub used_chunks: u32,
}

impl Blocks {
    /// Chunks that there ever were.
    pub fn count(&self) -> usize {
        self.chunks.len()
    }

    /// New chunks from `address` on, as one free primitive block.
    pub fn add_segment(&mut self, address: u64, chunks: u32, stream: Stream) {
        let first = u32::try_from(self.chunks.len()).expect("fewer than 2^32 chunks of 2 MiB");
        let chunk = |i| Chunk { address: address + u64::from(i) * CHUNK, free: true, mapped_by: Vec::new() };
        self.chunks.extend((0..chunks).map(chunk));
        self.primitives.insert(first, Primitive { chunks, stream, segment: self.segments, free: true });
        self.free_primitives.insert((stream, chunks, first));
        self.segments += 1;
    }

    /// Free primitive blocks that are whole segments: the first chunk of each, and how many it has.
    pub fn free_segments(&self) -> Vec<(u32, u32)> {
        let whole = self.free_primitives.iter().filter(|(_, _, first)| !self.is_split(*first));
        whole.map(|&(_, chunks, first)| (first, chunks)).collect()
    }

    /// Forgets a free segment. Returns the stitched blocks that map chunks of it.
    pub fn remove_segment(&mut self, first: u32) -> BTreeSet<u32> {
        let Primitive { chunks, stream, .. } =
            self.primitives.remove(&first).expect("the caller's number is one of ours");
        self.free_primitives.remove(&(stream, chunks, first));
        let mapped_by = |chunk| std::mem::take(&mut self.chunks[chunk as usize].mapped_by);
        (first..first + chunks).flat_map(mapped_by).collect()
    }

    /// Takes the best-fitting free primitive block, cut to size.
    pub fn take_primitive(&mut self, chunks: u32, stream: Stream) -> Option<Block> {
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

    /// Takes the best-fitting free stitched block of at most `reuse_limit` times the size.
    pub fn take_stitched(&mut self, chunks: u32, stream: Stream, reuse_limit: f64) -> Option<Block> {
        let &(found_stream, size, number) = self.free_stitched.range((stream, chunks, 0)..).next()?;
        if found_stream != stream || f64::from(size) > f64::from(chunks) * reuse_limit {
            return None;
        }
        let held: Vec<u32> = self.stitched[&number].chunks[..chunks as usize].to_vec();
        for &chunk in &held {
            self.isolate(chunk, &held);
        }
        Some(self.hold_stitched(number, chunks))
    }

    /// Marks a stitched block and its first `chunks` as in use.
    pub fn hold_stitched(&mut self, number: u32, chunks: u32) -> Block {
        let held: Vec<u32> = self.stitched[&number].chunks[..chunks as usize].to_vec();
        self.use_chunks(held);
        let stitched = self.stitched.get_mut(&number).expect("the caller's number is one of ours");
        stitched.used_chunks = chunks;
        Block { address: stitched.address, bytes: u64::from(chunks) * CHUNK, slot: STITCHED | number }
    }

    /// The largest free primitive blocks that have `chunks` together: of each its first chunk, its size, and how much of it is taken.
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
        // One block alone would be a primitive fit; the original asks for two at least.
        (missing == 0 && picked.len() >= 2).then_some(picked)
    }

    /// A stitched block, not in use yet, of what was [picked](Self::pick). Returns its number.
    pub fn stitch(&mut self, picked: Vec<(u32, u32, u32)>, stream: Stream, address: u64) -> u32 {
        let mut stitched = Vec::new();
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
        let chunks = stitched.len() as u32;
        let block = Stitched { stream, address, chunks: stitched, free_chunks: chunks, used_chunks: 0 };
        self.stitched.insert(number, block);
        self.stitched_bytes += u64::from(chunks) * CHUNK;
        number
    }

    /// The reverse of taking a block.
    pub fn free(&mut self, block: &Block) {
        if block.slot & STITCHED == 0 {
            let chunks = (block.bytes / CHUNK) as u32;
            self.free_chunks(block.slot..block.slot + chunks);
            self.free_primitive(block.slot);
            return;
        }
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

    /// The ranges of addresses that primitive blocks have.
    pub fn extents(&self) -> impl Iterator<Item = Extent> {
        self.primitives.iter().map(|(&first, primitive)| Extent {
            address: self.chunks[first as usize].address,
            bytes: u64::from(primitive.chunks) * CHUNK,
            in_use: !primitive.free,
        })
    }

    fn is_split(&self, first: u32) -> bool {
        let primitive = self.primitives[&first];
        let same = |other: Option<(&u32, &Primitive)>| other.is_some_and(|(_, o)| o.segment == primitive.segment);
        same(self.primitives.range(..first).next_back()) || same(self.primitives.range(first + 1..).next())
    }

    /// Takes the chunks from `keep` on out of a stitched block. Returns how many those were.
    pub fn shorten(&mut self, number: u32, keep: usize) -> u64 {
        self.remove_free_stitched(number);
        let block = self.stitched.get_mut(&number).expect("the caller's number is one of ours");
        let taken = block.chunks.len().saturating_sub(keep) as u64;
        for chunk in block.chunks.drain(keep..) {
            let chunk = &mut self.chunks[chunk as usize];
            chunk.mapped_by.retain(|&n| n != number);
            block.free_chunks -= u32::from(chunk.free);
            self.stitched_bytes -= CHUNK;
        }
        taken
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
}

//! Memory for what the arena could not serve, until the arena has grown.
//!
//! In: refused requests. Out: a block each, at addresses that go on behind the arena's. Never: used by a step that finds room.

use std::cell::UnsafeCell;
use std::ops::Range;

/// What kernels rely on: a cache line, aligned to it.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; 64]);

const LINE: u64 = size_of::<Line>() as u64;

/// The blocks of the run under way.
#[derive(Debug, Default)]
pub struct OverflowHeap {
    blocks: Vec<Block>,
    /// Where the arena ends.
    start: u64,
    /// Where the next block begins. No address is used twice in a run, so that a checker can tell blocks apart.
    end: u64,
    /// Bytes of all blocks.
    live: u64,
}

#[derive(Debug)]
struct Block {
    /// Number of the request that it serves.
    request: u32,
    start: u64,
    /// Written through the addresses that [`OverflowHeap::find`] gives.
    lines: Box<[UnsafeCell<Line>]>,
}

impl OverflowHeap {
    /// Nothing yet, behind an arena of so many bytes.
    pub fn begin(&mut self, arena_bytes: u64) {
        self.blocks.clear();
        let start = arena_bytes.next_multiple_of(LINE) + LINE;
        (self.start, self.end, self.live) = (start, start, 0);
    }

    /// A block for a request, and its offset; none when the system has no memory.
    pub fn serve(&mut self, request: u32, bytes: u64) -> Option<u64> {
        let count = usize::try_from(bytes.div_ceil(LINE)).ok()?;
        let mut lines = Vec::new();
        lines.try_reserve_exact(count).ok()?;
        lines.resize_with(count, || UnsafeCell::new(Line([0; LINE as usize])));
        let start = self.end;
        self.end += count as u64 * LINE;
        self.live += count as u64 * LINE;
        self.blocks.push(Block { request, start, lines: lines.into() });
        Some(start)
    }

    /// Takes a request's block back. Whether there was one.
    pub fn release(&mut self, request: u32) -> bool {
        let found = self.blocks.iter().position(|block| block.request == request);
        if let Some(block) = found.map(|index| self.blocks.swap_remove(index)) {
            self.live -= block.lines.len() as u64 * LINE;
        }
        found.is_some()
    }

    /// The first byte of the block at an offset, if it is one.
    pub fn find(&self, offset: u64) -> Option<*mut u8> {
        if offset < self.start {
            return None;
        }
        let block = self.blocks.iter().find(|block| block.start == offset)?;
        Some(UnsafeCell::raw_get(block.lines.as_ptr()).cast())
    }

    /// Offsets of all blocks of this run.
    pub fn range(&self) -> Range<u64> {
        self.start..self.end
    }

    /// Bytes of all blocks.
    pub fn live(&self) -> u64 {
        self.live
    }
}

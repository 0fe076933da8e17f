//! Memory outside of the arena, for dynamic buffers that find no room in the arena. After a step that uses such memory,
//! the arena grows.
//!
//! In: refused requests. Out: one block per request, at offsets beyond the arena's end. Never: an allocation in a
//! step whose buffers all find room in the arena.

use std::cell::UnsafeCell;
use std::ops::Range;

/// The unit of allocation: a cache line, aligned as kernels require.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; 64]);

const LINE: u64 = size_of::<Line>() as u64;

/// The blocks of memory outside of the arena that the current run uses.
#[derive(Debug, Default)]
pub struct OverflowHeap {
    blocks: Vec<Block>,
    /// The first offset beyond the arena.
    start: u64,
    /// The highest end offset of all blocks that this run has used so far.
    end: u64,
    /// Bytes of all live blocks.
    live: u64,
    /// True if only offsets are managed here, and the caller provides memory at these offsets.
    is_elsewhere: bool,
}

#[derive(Debug)]
struct Block {
    /// The request whose buffer this block holds.
    request: u32,
    /// Its range of offsets.
    range: Range<u64>,
    /// The memory, written through the addresses that [`OverflowHeap::find`] returns.
    lines: Box<[UnsafeCell<Line>]>,
}

impl OverflowHeap {
    /// Creates a heap that only manages offsets. The caller must provide memory at these offsets.
    pub fn elsewhere() -> Self {
        Self { is_elsewhere: true, ..Self::default() }
    }

    /// Starts a run without blocks. The arena has `arena_bytes` bytes, and the blocks' offsets begin after its end.
    pub fn begin(&mut self, arena_bytes: u64) {
        self.blocks.clear();
        let start = arena_bytes.next_multiple_of(LINE) + LINE;
        (self.start, self.end, self.live) = (start, start, 0);
    }

    /// Allocates a block for a request at the lowest free offset, and returns that offset. Returns `None` if the
    /// system has no memory.
    pub fn serve(&mut self, request: u32, bytes: u64) -> Option<u64> {
        // A block without rows also gets an offset of its own.
        let count = bytes.div_ceil(LINE).max(1);
        let mut lines = Vec::new();
        if !self.is_elsewhere {
            let count = usize::try_from(count).ok()?;
            lines.try_reserve_exact(count).ok()?;
            lines.resize_with(count, || UnsafeCell::new(Line([0; LINE as usize])));
        }
        let bytes = count.checked_mul(LINE)?;
        let is_free = |range: &Range<u64>| {
            self.blocks.iter().all(|block| block.range.end <= range.start || range.end <= block.range.start)
        };
        let candidates = std::iter::once(self.start).chain(self.blocks.iter().map(|block| block.range.end));
        let ranges = candidates.filter_map(|start| Some(start..start.checked_add(bytes)?));
        let range = ranges.filter(is_free).min_by_key(|range| range.start)?;
        self.end = self.end.max(range.end);
        self.live += bytes;
        self.blocks.push(Block { request, range: range.clone(), lines: lines.into() });
        Some(range.start)
    }

    /// Frees a request's block. Returns true if the request had a block.
    pub fn release(&mut self, request: u32) -> bool {
        let found = self.blocks.iter().position(|block| block.request == request);
        if let Some(block) = found.map(|index| self.blocks.swap_remove(index)) {
            self.live -= block.range.end - block.range.start;
        }
        found.is_some()
    }

    /// Returns the first byte of the block at an offset, or `None` if no block begins there.
    pub fn find(&self, offset: u64) -> Option<*mut u8> {
        if offset < self.start {
            return None;
        }
        let block = self.blocks.iter().find(|block| block.range.start == offset)?;
        Some(UnsafeCell::raw_get(block.lines.as_ptr()).cast())
    }

    /// Returns the range of offsets that the blocks of this run have used.
    pub fn range(&self) -> Range<u64> {
        self.start..self.end
    }

    /// Bytes of all live blocks.
    pub fn live(&self) -> u64 {
        self.live
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_take_the_lowest_addresses_that_are_free() {
        for (mut heap, has_memory) in [(OverflowHeap::default(), true), (OverflowHeap::elsewhere(), false)] {
            heap.begin(1000);
            let start = heap.range().start;
            assert!(start > 1000 && heap.range().is_empty());
            let offsets =
                [(0, 65), (1, 64), (2, 1), (3, 0)].map(|(request, bytes)| heap.serve(request, bytes).unwrap());
            assert_eq!(offsets, [0, 128, 192, 256].map(|offset| start + offset), "whole lines, one even of nothing");
            assert!(heap.release(1) && heap.release(0) && !heap.release(0));
            assert_eq!([heap.serve(4, 100), heap.serve(5, 100)], [Some(start), Some(start + 320)]);
            assert_eq!((heap.live(), heap.range()), (64 * 6, start..start + 448));
            assert_eq!(
                [u64::MAX, u64::MAX - 64].map(|bytes| heap.serve(6, bytes)),
                [None; 2],
                "beyond the address space"
            );
            // An offset that is not a block's start is not found.
            assert!(heap.find(start).is_some() && heap.find(start + 64).is_none() && heap.find(0).is_none());
            if has_memory {
                // SAFETY: the block has as many bytes as the slice, which is the only slice of this block.
                unsafe { std::slice::from_raw_parts_mut(heap.find(start + 320).unwrap(), 100) }.fill(1);
            }
        }
    }
}

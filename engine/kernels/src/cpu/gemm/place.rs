//! The placement of packed operands in scratch, and the sizes that are packed at once.

use std::ops::Range;

use super::kernel::{COLUMN_STRIDE, Layout, ROW_STRIDE};
use super::{Gemm, Strides};
use crate::cpu::scratch::{PartLayout, Scratch};

/// Maximum number of lines of a k block. The widest panel of that length takes 48 KiB. If k is no larger, as in a model
/// of this width, C is computed in one pass.
pub const BLOCK_K: usize = 384;
/// Maximum number of rows of A packed at once. These rows take 150 KiB. Together with [`BLOCK_COLUMNS`] columns of B,
/// they fit a level-2 cache of 1 MiB.
pub(super) const BLOCK_ROWS: usize = 96;
/// Number of columns of B that are multiplied by one block of A before the next block of A is used. These columns take
/// 384 KiB.
pub(super) const BLOCK_COLUMNS: usize = 256;
/// Maximum number of columns of B that are packed together.
pub(super) const CHUNK_COLUMNS: usize = 2048;
/// Maximum number of floats of B that are packed together, unless a single k block is larger.
const CHUNK_LEN: usize = 1 << 20;
/// Number of rows of a part of A. It is a multiple of the height of every level's tallest micro-kernel, so that no
/// micro-kernel reads from two parts.
pub(super) const PART_ROWS: usize = COLUMN_STRIDE;
/// Number of columns of a part of B: a multiple of every level's panel width.
const PART_COLUMNS: usize = 32;
/// Number of columns of the narrowest panel of any level: two vectors of four lanes.
pub(super) const NARROWEST_PANEL: usize = 8;
/// Maximum number of rows for which each thread packs B itself. For so few rows, packing B together would save less
/// time than threads spend waiting for each other.
const FEW_ROWS: usize = 64;
/// Number of rows of a tile if each thread packs B itself.
pub(super) const PRIVATE_ROWS: usize = 384;
/// Number of tiles per thread that balances threads of different speed.
pub(super) const TASKS_PER_THREAD: usize = 4;
const _: () = assert!(BLOCK_K <= ROW_STRIDE && BLOCK_ROWS.is_multiple_of(PART_ROWS));
const _: () = assert!(BLOCK_COLUMNS.is_multiple_of(PART_COLUMNS) && CHUNK_COLUMNS.is_multiple_of(PART_COLUMNS));

/// The places of a product's packed operands in its scratch. The places take no more bytes than the product needs,
/// because scratch dominates the memory of small models. Each place is split into parts, so that the scratch of a small
/// model fits between the model's tensors.
#[derive(Debug, Clone, Copy)]
pub(super) struct Packing {
    a: PartLayout,
    b: PartLayout,
    /// Number of parts of one thread's packed A.
    a_parts: usize,
    /// Number of parts of one thread's packed B, or of the shared B if all threads pack it together.
    b_parts: usize,
    /// Maximum number of lines of B along k that are packed at once.
    pub depth: usize,
    /// True if B is packed once, by all threads together.
    pub together: bool,
}

impl Packing {
    pub fn new(job: &Gemm, threads: usize) -> Self {
        // If one tile has all rows, and all threads have whole tiles, each panel is packed once too, and the thread
        // that reads it has it in its own cache.
        let has_tiles = job.m <= PRIVATE_ROWS && job.n >= TASKS_PER_THREAD * threads * BLOCK_COLUMNS;
        Self::of(job, threads, job.batch.count == 1 && job.m > FEW_ROWS && !has_tiles)
    }

    /// Returns the packing for groups that are at most as large as `most`. Each thread packs the columns of a group's
    /// B that it needs.
    pub fn of_groups(most: &Gemm, threads: usize) -> Self {
        Self::of(most, threads, false)
    }

    fn of(job: &Gemm, threads: usize, together: bool) -> Self {
        // If k is 0, there is one empty block.
        let k = job.k.max(1);
        let a_parts = BLOCK_ROWS.min(job.m).div_ceil(PART_ROWS);
        let a_len = match layout_of(job.a) {
            Layout::Columns => BLOCK_K.min(k) * COLUMN_STRIDE,
            _ => PART_ROWS.min(job.m) * ROW_STRIDE,
        };
        let (columns, longest, sharing) = match together {
            true => (CHUNK_COLUMNS, CHUNK_LEN, 1),
            false => (BLOCK_COLUMNS, 0, threads),
        };
        let b_parts = columns.min(job.n).div_ceil(PART_COLUMNS);
        let depth = k.min(BLOCK_K.max(longest / (b_parts * PART_COLUMNS).max(1)));
        let a = PartLayout::new(0, threads * a_parts, a_len);
        let b = PartLayout::new(a.end(), sharing * b_parts, PART_COLUMNS * depth);
        Self { a, b, a_parts, b_parts, depth, together }
    }

    /// Returns the sizes in bytes of the pieces of scratch.
    pub fn bytes(&self) -> impl Iterator<Item = u64> {
        self.a.bytes().chain(self.b.bytes())
    }

    /// Returns the scratch in which one thread packs rows of A.
    pub fn a(&self, scratch: &Scratch<'_>, slot: usize) -> PackedA {
        let part = |i: usize| match i < self.a_parts {
            true => self.a.start(scratch, slot * self.a_parts + i),
            false => std::ptr::null_mut(),
        };
        PackedA(std::array::from_fn(part))
    }

    /// Returns the scratch for some of the lines of B that are packed at once. `slot` is the thread's own if each
    /// thread packs for itself, or 0 if all pack together.
    pub fn b<'s>(&self, scratch: &'s Scratch<'s>, slot: usize, lines: Range<usize>) -> PackedB<'s> {
        let (offset, lines) = (lines.start * PART_COLUMNS, lines.len());
        PackedB { scratch, parts: self.b, first: slot * self.b_parts, offset, lines }
    }
}

/// The scratch for a block of rows of A, split into parts.
#[derive(Clone, Copy)]
pub struct PackedA([*mut f32; BLOCK_ROWS / PART_ROWS]);

impl PackedA {
    /// Returns the scratch for a block that fits into a single part.
    pub fn of(part: *mut f32) -> Self {
        let mut parts = [std::ptr::null_mut(); BLOCK_ROWS / PART_ROWS];
        parts[0] = part;
        Self(parts)
    }

    /// Returns the addresses of the parts; null for parts after the last row.
    pub fn parts(&self) -> &[*mut f32] {
        &self.0
    }

    /// Returns the same scratch without its first lines.
    pub fn from_line(self, line: usize, layout: Layout) -> Self {
        Self(self.0.map(|part| part.wrapping_add(line * layout.line())))
    }

    /// Returns the address of the first element of a row.
    #[inline]
    pub fn row(&self, row: usize, layout: Layout) -> *mut f32 {
        self.0[row / PART_ROWS].wrapping_add(row % PART_ROWS * layout.row())
    }
}

/// The scratch for a k block of B's panels, with [`PART_COLUMNS`] columns in each part. Within a part, blocks follow
/// one another.
#[derive(Clone, Copy)]
pub(super) struct PackedB<'s> {
    scratch: &'s Scratch<'s>,
    parts: PartLayout,
    /// The index of the part that holds column 0.
    first: usize,
    /// Number of floats of the preceding blocks in each part.
    offset: usize,
    lines: usize,
}

impl PackedB<'_> {
    /// Returns the address of the panel that begins at a column, counted from the first packed one.
    #[inline]
    pub fn panel(&self, column: usize) -> *mut f32 {
        let part = self.parts.start(self.scratch, self.first + column / PART_COLUMNS);
        part.wrapping_add(self.offset + column % PART_COLUMNS * self.lines)
    }
}

/// Returns the layout into which A is packed fastest: the dimension along which A is contiguous stays contiguous.
pub(super) fn layout_of(a: Strides) -> Layout {
    if a.row == 1 && a.column != 1 { Layout::Columns } else { Layout::Rows }
}

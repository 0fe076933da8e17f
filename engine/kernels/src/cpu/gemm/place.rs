//! Where packed operands lie in scratch, and how much of them is packed at once.

use std::ops::Range;

use super::kernel::{COLUMN_STRIDE, Layout, ROW_STRIDE};
use super::{Gemm, Strides};
use crate::cpu::scratch::{Parts, Scratch};

/// Lines of the longest k block: the widest of its panels takes 48 KiB, and a model of this width needs no second pass over C.
pub const BLOCK_K: usize = 384;
/// Most rows of A packed at once, 150 KiB: with a [`BLOCK_COLUMNS`] block of B it fits a level-2 cache of 1 MiB.
pub(super) const BLOCK_ROWS: usize = 96;
/// Columns of B that are multiplied by a block of A before going on, 384 KiB.
pub(super) const BLOCK_COLUMNS: usize = 256;
/// Most columns of B that are packed together.
pub(super) const CHUNK_COLUMNS: usize = 2048;
/// Most floats of B that are packed together, except that a chunk holds at least one k block.
const CHUNK_LEN: usize = 1 << 20;
/// Rows of a part of A: of every level's tallest micro-kernels, so that none reads two parts.
pub(super) const PART_ROWS: usize = COLUMN_STRIDE;
/// Columns of a part of B: of every level's panels.
const PART_COLUMNS: usize = 32;
/// Up to here, packing B together isn't worth making threads wait for each other.
const FEW_ROWS: usize = 64;
const _: () = assert!(BLOCK_K <= ROW_STRIDE && BLOCK_ROWS.is_multiple_of(PART_ROWS));
const _: () = assert!(BLOCK_COLUMNS.is_multiple_of(PART_COLUMNS) && CHUNK_COLUMNS.is_multiple_of(PART_COLUMNS));

/// Where the packed operands of a job lie in its scratch: no more than the job has, as small models are mostly scratch
/// otherwise, and in parts, so that a small model's scratch fits between its tensors.
#[derive(Debug, Clone, Copy)]
pub(super) struct Packing {
    a: Parts,
    b: Parts,
    /// Parts of a thread's A.
    a_parts: usize,
    /// Parts of a thread's B, or of all threads' where they pack together.
    b_parts: usize,
    /// Most lines of k of B that are packed at once.
    pub depth: usize,
    /// Whether B is packed once, by all threads together.
    pub together: bool,
}

impl Packing {
    pub fn new(job: &Gemm, threads: usize) -> Self {
        Self::of(job, threads, job.batch.count == 1 && job.m > FEW_ROWS)
    }

    /// That of groups, of which none is larger than `most`: each thread packs what it needs of a group's B.
    pub fn of_groups(most: &Gemm, threads: usize) -> Self {
        Self::of(most, threads, false)
    }

    fn of(job: &Gemm, threads: usize, together: bool) -> Self {
        // An empty k is one empty block.
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
        let a = Parts::new(0, threads * a_parts, a_len);
        let b = Parts::new(a.end(), sharing * b_parts, PART_COLUMNS * depth);
        Self { a, b, a_parts, b_parts, depth, together }
    }

    /// Bytes of each piece of scratch.
    pub fn bytes(&self) -> impl Iterator<Item = u64> {
        self.a.bytes().chain(self.b.bytes())
    }

    /// A thread's room for rows of A.
    pub fn a(&self, scratch: &Scratch<'_>, slot: usize) -> PackedA {
        let part = |i: usize| match i < self.a_parts {
            true => self.a.start(scratch, slot * self.a_parts + i),
            false => std::ptr::null_mut(),
        };
        PackedA(std::array::from_fn(part))
    }

    /// Room for some lines of B, of those that are packed at once. `slot` is the thread's if each packs by itself, 0 if all pack together.
    pub fn b<'s>(&self, scratch: &'s Scratch<'s>, slot: usize, lines: Range<usize>) -> PackedB<'s> {
        let (offset, lines) = (lines.start * PART_COLUMNS, lines.len());
        PackedB { scratch, parts: self.b, first: slot * self.b_parts, offset, lines }
    }
}

/// Room for a block of rows of A, or for as many as there are, by parts.
#[derive(Clone, Copy)]
pub struct PackedA([*mut f32; BLOCK_ROWS / PART_ROWS]);

impl PackedA {
    /// A single part.
    pub fn of(part: *mut f32) -> Self {
        let mut parts = [std::ptr::null_mut(); BLOCK_ROWS / PART_ROWS];
        parts[0] = part;
        Self(parts)
    }

    /// The parts; those beyond the rows that there are, null.
    pub fn parts(&self) -> &[*mut f32] {
        &self.0
    }

    /// The first element of a row.
    #[inline]
    pub fn row(&self, row: usize, layout: Layout) -> *mut f32 {
        self.0[row / PART_ROWS].wrapping_add(row % PART_ROWS * layout.row())
    }
}

/// Room for a k block of B's panels, [`PART_COLUMNS`] columns to a part. The blocks of a part lie behind each other.
#[derive(Clone, Copy)]
pub(super) struct PackedB<'s> {
    scratch: &'s Scratch<'s>,
    parts: Parts,
    /// The part of column 0.
    first: usize,
    /// Floats of the blocks before this one in each part.
    offset: usize,
    lines: usize,
}

impl PackedB<'_> {
    /// The panel that begins with a column, counted from the first that is packed.
    #[inline]
    pub fn panel(&self, column: usize) -> *mut f32 {
        let part = self.parts.start(self.scratch, self.first + column / PART_COLUMNS);
        part.wrapping_add(self.offset + column % PART_COLUMNS * self.lines)
    }
}

/// The layout in which A is packed fastest: whichever of its directions is contiguous stays so.
pub(super) fn layout_of(a: Strides) -> Layout {
    if a.row == 1 && a.column != 1 { Layout::Columns } else { Layout::Rows }
}

//! Which thread computes what, and when panels are packed.
//!
//! Work is cut into tiles of C, and a tile belongs to one thread for all of its k. What differs between the two schemes
//! is only who packs B, so their bits are equal.

use std::ops::Range;

use super::kernel::{COLUMN_STRIDE, Kernels, Layout, ROW_STRIDE, Tile};
use super::pack::{self, Source};
use super::{Gemm, Mode, RawEpilogue};
use crate::cpu::tasks::{for_each, slot};

/// Longest k block: the widest of its panels takes 48 KiB, and a model of this width needs no second pass over C.
pub const BLOCK_K: usize = 384;
/// Most rows of A packed at once, 150 KiB: with a [`BLOCK_COLUMNS`] block of B it fits a level-2 cache of 1 MiB.
const BLOCK_ROWS: usize = 96;
/// Columns of B that are multiplied by a block of A before going on, 384 KiB.
const BLOCK_COLUMNS: usize = 256;
/// Most columns of B that are packed together.
const CHUNK_COLUMNS: usize = 2048;
/// Most floats of B that are packed together, except that a chunk holds at least one k block.
const CHUNK_LEN: usize = 1 << 20;
/// Panels of every level divide this.
const WIDEST_PANEL: usize = 32;
/// Up to here, packing B together isn't worth making threads wait for each other.
const FEW_ROWS: usize = 64;
/// Rows of a tile when each thread packs B by itself for one of several matrices.
const PRIVATE_ROWS: usize = 384;

/// Floats of packed A per thread: no more than the job has, as small models are mostly scratch otherwise.
fn packed_a_len(job: &Gemm) -> usize {
    match pack::layout_of(job.a) {
        Layout::Columns => BLOCK_K.min(job.k) * COLUMN_STRIDE,
        _ => BLOCK_ROWS.min(job.m) * ROW_STRIDE,
    }
}
const _: () = assert!(BLOCK_K <= ROW_STRIDE && BLOCK_ROWS <= COLUMN_STRIDE);

/// Whether B is packed once, by all threads together.
fn packs_together(job: &Gemm) -> bool {
    job.batch.count == 1 && job.m > FEW_ROWS
}

pub(super) fn scratch_len(job: &Gemm, threads: usize) -> usize {
    let columns = job.n.next_multiple_of(WIDEST_PANEL);
    let block_k = BLOCK_K.min(job.k);
    if packs_together(job) {
        let columns = columns.min(CHUNK_COLUMNS);
        let len = columns.saturating_mul(job.k).min(CHUNK_LEN.max(columns * block_k));
        len + threads * packed_a_len(job)
    } else {
        threads * (columns.min(BLOCK_COLUMNS) * block_k + packed_a_len(job))
    }
}

/// The operands' addresses, shared by the tasks of one call.
#[derive(Clone, Copy)]
struct Operands {
    a: *const f32,
    b: *const f32,
    c: *mut f32,
    accumulate: bool,
    epilogue: RawEpilogue,
    scratch: *mut f32,
}

// SAFETY: tasks read A and B, write disjoint tiles of C, and write scratch only in their own thread's slot, or, for
// panels of B, one task per panel, before a barrier after which they're read.
unsafe impl Send for Operands {}
// SAFETY: as above.
unsafe impl Sync for Operands {}

impl Operands {
    /// What a k block does to C from an element on; A, B and the columns are still to be named.
    ///
    /// # Safety
    /// The element exists.
    unsafe fn tile(&self, job: &Gemm, row: usize, column: usize, block: &Range<usize>) -> Tile {
        let at = row * job.c_row + column;
        let RawEpilogue { mut bias, mut residual } = if block.end == job.k { self.epilogue } else { RawEpilogue::NONE };
        // SAFETY: the caller's promise; bias and residual reach as far as C does.
        unsafe {
            if !bias.is_null() {
                bias = bias.add(column);
            }
            if !residual.is_null() {
                residual = residual.add(at);
            }
            Tile {
                a: std::ptr::null(),
                b: std::ptr::null(),
                k: block.len(),
                c: self.c.add(at),
                c_row: job.c_row,
                columns: 0,
                accumulate: self.accumulate || block.start > 0,
                bias,
                residual,
            }
        }
    }
}

/// # Safety
/// As [`Gemm::run_raw`].
#[expect(clippy::too_many_arguments, reason = "the operands of a product")]
pub(super) unsafe fn run(
    job: &Gemm,
    kernels: &Kernels,
    a: *const f32,
    b: *const f32,
    c: *mut f32,
    mode: Mode,
    epilogue: RawEpilogue,
    scratch: *mut f32,
) {
    let nothing_to_add = epilogue.bias.is_null() && epilogue.residual.is_null();
    let accumulate = mode == Mode::Accumulate;
    if job.m == 0 || job.n == 0 || job.batch.count == 0 || (job.k == 0 && accumulate && nothing_to_add) {
        return;
    }
    let operands = Operands { a, b, c, accumulate, epilogue, scratch };
    // SAFETY: the caller's promise.
    unsafe {
        if packs_together(job) {
            run_together(job, kernels, operands);
        } else {
            run_privately(job, kernels, operands);
        }
    }
}

/// The k blocks that begin in `range`, in order. An empty k is one empty block, so that C is written.
fn blocks(job: &Gemm, range: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let segment = job.k_segment;
    let mut next = Some(range.start);
    std::iter::from_fn(move || {
        let start = next?;
        let segment_end = (start / segment).saturating_add(1).saturating_mul(segment);
        let end = (start + BLOCK_K).min(segment_end).min(range.end);
        next = (end < range.end).then_some(end);
        Some(start..end)
    })
}

/// Alternates between packing a chunk of B on all threads and multiplying by it on all threads.
unsafe fn run_together(job: &Gemm, kernels: &Kernels, operands: Operands) {
    let threads = rayon::current_num_threads();
    let packed_b_len = scratch_len(job, threads) - threads * packed_a_len(job);
    let width = kernels.columns;
    // Enough tasks to even out the threads' speeds, of whole micro-kernels.
    let rows_per_task = job.m.div_ceil(4 * threads).next_multiple_of(kernels.rows()).min(BLOCK_ROWS);

    for first_column in (0..job.n).step_by(CHUNK_COLUMNS) {
        let columns = first_column..job.n.min(first_column + CHUNK_COLUMNS);
        let panels = columns.len().div_ceil(width);
        let mut k_start = 0;
        loop {
            // As many whole blocks as the scratch holds.
            let mut k_end = k_start;
            for block in blocks(job, k_start..job.k) {
                if k_end > k_start && (block.end - k_start) * panels * width > packed_b_len {
                    break;
                }
                k_end = block.end;
            }
            let chunk = k_start..k_end;

            for_each(panels, |panel| {
                let start = columns.start + panel * width;
                let width_here = width.min(columns.end - start);
                for block in blocks(job, chunk.clone()) {
                    let to = (block.start - chunk.start) * panels * width + panel * width * block.len();
                    // SAFETY: this panel is this task's alone, and lies within `packed_b_len`.
                    unsafe {
                        let operands = &operands;
                        let from = offset(operands.b, block.start, start, job.b.row, job.b.column);
                        let source = Source { start: from, strides: job.b };
                        (kernels.pack_panel)(&source, block.len(), width_here, operands.scratch.add(to));
                    }
                }
            });
            for_each(job.m.div_ceil(rows_per_task), |task| {
                let rows = task * rows_per_task..job.m.min((task + 1) * rows_per_task);
                let slot = slot();
                // SAFETY: rows are this task's alone; the panels are packed and only read now.
                unsafe {
                    let operands = &operands;
                    let packed_a = operands.scratch.add(packed_b_len + slot * packed_a_len(job));
                    for block in blocks(job, chunk.clone()) {
                        let packed_b = operands.scratch.add((block.start - chunk.start) * panels * width);
                        let part = Part { rows: rows.clone(), columns: columns.clone(), block };
                        multiply(job, kernels, *operands, part, packed_a, packed_b);
                    }
                }
            });
            k_start = k_end;
            if k_start >= job.k {
                break;
            }
        }
    }
}

/// Each task computes a tile of one of the batch's matrices, packing all it needs by itself.
unsafe fn run_privately(job: &Gemm, kernels: &Kernels, operands: Operands) {
    let threads = rayon::current_num_threads();
    let slot_len = scratch_len(job, threads) / threads;
    let width = kernels.columns;
    let row_tiles = job.m.div_ceil(PRIVATE_ROWS);
    // With few matrices, narrower tiles keep all threads busy.
    let wanted = (4 * threads).div_ceil(job.batch.count * row_tiles);
    let tile_columns = job.n.div_ceil(wanted).next_multiple_of(width).min(BLOCK_COLUMNS);
    let column_tiles = job.n.div_ceil(tile_columns);

    for_each(job.batch.count * row_tiles * column_tiles, |task| {
        let (matrix, tile) = (task / (row_tiles * column_tiles), task % (row_tiles * column_tiles));
        let (row_tile, column_tile) = (tile / column_tiles, tile % column_tiles);
        let rows = row_tile * PRIVATE_ROWS..job.m.min((row_tile + 1) * PRIVATE_ROWS);
        let columns = column_tile * tile_columns..job.n.min((column_tile + 1) * tile_columns);
        let slot = slot();
        // SAFETY: the tile of C is this task's alone, the slot this thread's.
        unsafe {
            let mut operands = operands;
            operands.a = operands.a.add(matrix * job.batch.a);
            operands.b = operands.b.add(matrix * job.batch.b);
            operands.c = operands.c.add(matrix * job.batch.c);
            if !operands.epilogue.residual.is_null() {
                operands.epilogue.residual = operands.epilogue.residual.add(matrix * job.batch.c);
            }
            let packed_a = operands.scratch.add(slot * slot_len);
            let packed_b = packed_a.add(packed_a_len(job));
            for block in blocks(job, 0..job.k) {
                if job.m == 1 && job.b.row == 1 {
                    multiply_row(job, kernels, operands, columns.clone(), block, packed_a);
                    continue;
                }
                for start in columns.clone().step_by(width) {
                    let from = offset(operands.b, block.start, start, job.b.row, job.b.column);
                    let to = packed_b.add((start - columns.start) * block.len());
                    let source = Source { start: from, strides: job.b };
                    (kernels.pack_panel)(&source, block.len(), width.min(columns.end - start), to);
                }
                let part = Part { rows: rows.clone(), columns: columns.clone(), block };
                multiply(job, kernels, operands, part, packed_a, packed_b);
            }
        }
    });
}

/// A tile of C and one k block.
struct Part {
    rows: Range<usize>,
    columns: Range<usize>,
    block: Range<usize>,
}

/// Adds one k block to one tile of C.
///
/// # Safety
/// The tile is the caller's alone, `packed_a` has [`packed_a_len`] floats, `packed_b` holds the part's panels of B.
unsafe fn multiply(
    job: &Gemm,
    kernels: &Kernels,
    operands: Operands,
    part: Part,
    packed_a: *mut f32,
    packed_b: *const f32,
) {
    let Part { rows, columns, block } = part;
    let width = kernels.columns;
    let k = block.len();
    let layout = pack::layout_of(job.a);

    // SAFETY: every address below is that of an element of the tile or of the packed blocks.
    unsafe {
        for first_row in rows.clone().step_by(BLOCK_ROWS) {
            let height = BLOCK_ROWS.min(rows.end - first_row);
            let from = offset(operands.a, first_row, block.start, job.a.row, job.a.column);
            pack::rows(&Source { start: from, strides: job.a }, height, k, layout, packed_a);
            for first_column in columns.clone().step_by(BLOCK_COLUMNS) {
                let end_column = columns.end.min(first_column + BLOCK_COLUMNS);
                for row in (0..height).step_by(kernels.rows()) {
                    let height = kernels.rows().min(height - row);
                    for column in (first_column..end_column).step_by(width) {
                        let tile = Tile {
                            a: packed_a.add(row * layout.row()),
                            b: packed_b.add((column - columns.start) * k),
                            columns: width.min(end_column - column),
                            ..operands.tile(job, first_row + row, column, &block)
                        };
                        kernels.panel(layout, height, tile);
                    }
                }
            }
        }
    }
}

/// Adds one k block to some columns of a single row, B's k being neighbours.
///
/// # Safety
/// The columns are the caller's alone, `packed_a` has [`packed_a_len`] floats.
unsafe fn multiply_row(
    job: &Gemm,
    kernels: &Kernels,
    operands: Operands,
    columns: Range<usize>,
    block: Range<usize>,
    packed_a: *mut f32,
) {
    // SAFETY: every address below is that of an element of the row or of B's columns.
    unsafe {
        let from = offset(operands.a, 0, block.start, job.a.row, job.a.column);
        pack::rows(&Source { start: from, strides: job.a }, 1, block.len(), Layout::Rows, packed_a);
        for column in columns.clone().step_by(kernels.columns) {
            let tile = Tile {
                a: packed_a,
                b: offset(operands.b, block.start, column, job.b.row, job.b.column),
                columns: kernels.columns.min(columns.end - column),
                ..operands.tile(job, 0, column, &block)
            };
            (kernels.row)(&tile, job.b.column);
        }
    }
}

/// Address of an element of a matrix.
///
/// # Safety
/// The element exists.
unsafe fn offset(start: *const f32, row: usize, column: usize, row_stride: usize, column_stride: usize) -> *const f32 {
    // SAFETY: the caller's promise.
    unsafe { start.add(row * row_stride + column * column_stride) }
}

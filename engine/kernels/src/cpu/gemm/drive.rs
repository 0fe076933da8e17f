//! Which thread computes what, and when panels are packed.
//!
//! Work is cut into tiles of C, and a tile belongs to one thread for all of its k. What differs between the two schemes
//! is only who packs B, so their bits are equal.

use std::ops::Range;

use super::kernel::{Factor, InPlace, Kernels, Tile};
use super::pack::Source;
use super::place::{BLOCK_COLUMNS, BLOCK_K, BLOCK_ROWS, CHUNK_COLUMNS, PackedA, PackedB, Packing, layout_of};
use super::{Gemm, Mode, RawEpilogue};
use crate::cpu::scratch::Scratch;
use crate::cpu::tasks::{for_each, slot};

/// Rows of a tile when each thread packs B by itself for one of several matrices.
const PRIVATE_ROWS: usize = 384;

/// The operands' addresses, shared by the tasks of one call.
struct Operands<'s, A, B> {
    a: *const A,
    b: *const B,
    c: *mut f32,
    accumulate: bool,
    epilogue: RawEpilogue,
    scratch: &'s Scratch<'s>,
    packing: Packing,
    /// As [`Gemm::run_within`] has them.
    cuts: &'s [u32],
}

impl<A, B> Clone for Operands<'_, A, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<A, B> Copy for Operands<'_, A, B> {}

// SAFETY: tasks read A and B, write disjoint tiles of C, and write scratch only in their own thread's slot, or, for
// panels of B, one task per panel, before a barrier after which they're read.
unsafe impl<A, B> Send for Operands<'_, A, B> {}
// SAFETY: as above.
unsafe impl<A, B> Sync for Operands<'_, A, B> {}

impl<A, B> Operands<'_, A, B> {
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
/// As [`Gemm::run_raw`]; the scratch has the pieces of `packing`, which is for this product or a larger one.
#[expect(clippy::too_many_arguments, reason = "the operands of a product")]
pub(super) unsafe fn run<A: Factor, B: Factor>(
    job: &Gemm,
    packing: Packing,
    kernels: &Kernels,
    a: *const A,
    b: *const B,
    c: *mut f32,
    mode: Mode,
    epilogue: RawEpilogue,
    cuts: &[u32],
    scratch: &Scratch<'_>,
) {
    let nothing_to_add = epilogue.bias.is_null() && epilogue.residual.is_null();
    let accumulate = mode == Mode::Accumulate;
    if job.m == 0 || job.n == 0 || job.batch.count == 0 || (job.k == 0 && accumulate && nothing_to_add) {
        return;
    }
    let operands = Operands { a, b, c, accumulate, epilogue, scratch, packing, cuts };
    // SAFETY: the caller's promise.
    unsafe {
        if packing.together {
            run_together(job, kernels, operands);
        } else {
            run_privately(job, kernels, operands);
        }
    }
}

impl<A, B> Operands<'_, A, B> {
    /// The k blocks that begin in `range`, in order, each with the number of packed lines in front of it. An empty k is one empty block,
    /// so that C is written.
    fn blocks(
        &self,
        job: &Gemm,
        kernels: &Kernels,
        range: Range<usize>,
    ) -> impl Iterator<Item = (usize, Range<usize>)> {
        let (segment, longest, cuts) = (job.k_segment, BLOCK_K * kernels.k_of_line, self.cuts);
        let mut next = Some((0, range.start));
        std::iter::from_fn(move || {
            let (line, start) = next?;
            let segment_end = (start / segment).saturating_add(1).saturating_mul(segment);
            let mut end = (start + longest).min(segment_end).min(range.end);
            if let [first, cuts @ ..] = cuts {
                let cut = |cut: u32| (cut - first) as usize;
                let behind = cuts.partition_point(|&at| cut(at) <= start);
                end = cuts.get(behind).map_or(end, |&at| end.min(cut(at)));
            }
            next = (end < range.end).then_some((line + kernels.lines(end - start), end));
            Some((line, start..end))
        })
    }
}

/// Alternates between packing a chunk of B on all threads and multiplying by it on all threads.
unsafe fn run_together<A: Factor, B: Factor>(job: &Gemm, kernels: &Kernels, operands: Operands<'_, A, B>) {
    let threads = rayon::current_num_threads();
    let Packing { depth, .. } = operands.packing;
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
            for (line, block) in operands.blocks(job, kernels, k_start..job.k) {
                if k_end > k_start && line + kernels.lines(block.len()) > depth {
                    break;
                }
                k_end = block.end;
            }
            let chunk = k_start..k_end;

            for_each(panels, &|panel| {
                let start = columns.start + panel * width;
                let width_here = width.min(columns.end - start);
                for (line, block) in operands.blocks(job, kernels, chunk.clone()) {
                    let operands = &operands;
                    let lines = line..line + kernels.lines(block.len());
                    let to = operands.packing.b(operands.scratch, 0, lines).panel(panel * width);
                    // SAFETY: this panel is this task's alone, and the chunk is no deeper than its part.
                    unsafe {
                        let from = offset(operands.b, block.start, start, job.b.row, job.b.column);
                        let source = Source { start: from, strides: job.b };
                        B::pack_panel(kernels, &source, block.len(), width_here, to);
                    }
                }
            });
            for_each(job.m.div_ceil(rows_per_task), &|task| {
                let rows = task * rows_per_task..job.m.min((task + 1) * rows_per_task);
                let operands = &operands;
                let packed_a = operands.packing.a(operands.scratch, slot());
                for (line, block) in operands.blocks(job, kernels, chunk.clone()) {
                    let lines = line..line + kernels.lines(block.len());
                    let packed_b = operands.packing.b(operands.scratch, 0, lines);
                    let part = Part { rows: rows.clone(), columns: columns.clone(), block };
                    // SAFETY: rows are this task's alone; the panels are packed and only read now.
                    unsafe { multiply(job, kernels, *operands, part, &packed_a, packed_b) };
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
unsafe fn run_privately<A: Factor, B: Factor>(job: &Gemm, kernels: &Kernels, operands: Operands<'_, A, B>) {
    let threads = rayon::current_num_threads();
    let width = kernels.columns;
    let row_tiles = job.m.div_ceil(PRIVATE_ROWS);
    // With few matrices, narrower tiles keep all threads busy.
    let wanted = (4 * threads).div_ceil(job.batch.count * row_tiles);
    let tile_columns = job.n.div_ceil(wanted).next_multiple_of(width).min(BLOCK_COLUMNS);
    let column_tiles = job.n.div_ceil(tile_columns);

    for_each(job.batch.count * row_tiles * column_tiles, &|task| {
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
            if let (Some(a), Some(b)) = (A::as_f32(operands.a), B::as_f32(operands.b))
                && job.m <= kernels.rows()
                && (job.a.column, job.b.row) == (1, 1)
            {
                multiply_in_place(job, kernels, operands, (a, b), columns);
                return;
            }
            let packed_a = operands.packing.a(operands.scratch, slot);
            for (_, block) in operands.blocks(job, kernels, 0..job.k) {
                let packed_b = operands.packing.b(operands.scratch, slot, 0..kernels.lines(block.len()));
                for start in columns.clone().step_by(width) {
                    let from = offset(operands.b, block.start, start, job.b.row, job.b.column);
                    let to = packed_b.panel(start - columns.start);
                    let source = Source { start: from, strides: job.b };
                    B::pack_panel(kernels, &source, block.len(), width.min(columns.end - start), to);
                }
                let part = Part { rows: rows.clone(), columns: columns.clone(), block };
                multiply(job, kernels, operands, part, &packed_a, packed_b);
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
/// The tile is the caller's alone, and so is `packed_a`; `packed_b` holds the part's panels of B.
unsafe fn multiply<A: Factor, B: Factor>(
    job: &Gemm,
    kernels: &Kernels,
    operands: Operands<'_, A, B>,
    part: Part,
    packed_a: &PackedA,
    packed_b: PackedB<'_>,
) {
    let Part { rows, columns, block } = part;
    let width = kernels.columns;
    let k = block.len();
    let layout = layout_of(job.a);

    // SAFETY: every address below is that of an element of the tile or of the packed blocks.
    unsafe {
        for first_row in rows.clone().step_by(BLOCK_ROWS) {
            let height = BLOCK_ROWS.min(rows.end - first_row);
            let from = offset(operands.a, first_row, block.start, job.a.row, job.a.column);
            A::pack_rows(kernels, &Source { start: from, strides: job.a }, height, k, layout, packed_a);
            for first_column in columns.clone().step_by(BLOCK_COLUMNS) {
                let end_column = columns.end.min(first_column + BLOCK_COLUMNS);
                for row in (0..height).step_by(kernels.rows()) {
                    let height = kernels.rows().min(height - row);
                    for column in (first_column..end_column).step_by(width) {
                        let tile = Tile {
                            a: packed_a.row(row, layout),
                            b: packed_b.panel(column - columns.start),
                            k: kernels.lines(k),
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

/// All of k for some columns of a few rows, by factors whose k are neighbours, which are read as they lie in memory. A vector of
/// columns is read to its end before the next: that is the order of memory, in which what is next is asked for.
///
/// # Safety
/// The columns are the caller's alone; there are no more rows than the tallest micro-kernel has.
unsafe fn multiply_in_place<A: Factor, B: Factor>(
    job: &Gemm,
    kernels: &Kernels,
    operands: Operands<'_, A, B>,
    (a, b): (*const f32, *const f32),
    columns: Range<usize>,
) {
    let width = kernels.columns / 2;
    for column in columns.clone().step_by(width) {
        for (_, block) in operands.blocks(job, kernels, 0..job.k) {
            // SAFETY: every address below is that of an element of the rows or of B's columns, but for `next`.
            unsafe {
                let b = offset(b, block.start, column, job.b.row, job.b.column);
                let tile = Tile {
                    a: offset(a, 0, block.start, job.a.row, job.a.column),
                    b,
                    columns: width.min(columns.end - column),
                    ..operands.tile(job, 0, column, &block)
                };
                let next = b.wrapping_add(width * job.b.column + (width - 1) * block.start);
                kernels.in_place(job.m, &InPlace { tile, a_row: job.a.row, b_column: job.b.column, next });
            }
        }
    }
}

/// Address of an element of a matrix.
///
/// # Safety
/// The element exists.
unsafe fn offset<T>(start: *const T, row: usize, column: usize, row_stride: usize, column_stride: usize) -> *const T {
    // SAFETY: the caller's promise.
    unsafe { start.add(row * row_stride + column * column_stride) }
}

//! Distributes a product over threads, and decides when panels are packed.
//!
//! C is cut into tiles, and one thread computes a tile for all of k. There are two schemes: all threads pack B
//! together, or each thread packs the columns of B that it needs. Both give the same bits.

use std::ops::Range;

use super::finish::RawEpilogue;
use super::kernel::{Factor, InPlace, Kernels, ROW_STRIDE, Tile};
use super::pack::Source;
use super::place::{
    BLOCK_COLUMNS, BLOCK_K, BLOCK_ROWS, CHUNK_COLUMNS, NARROWEST_PANEL, PRIVATE_ROWS, PackedA, PackedB, Packing,
    TASKS_PER_THREAD, layout_of,
};
use super::{Batch, Gemm};
use crate::cpu::scratch::Scratch;
use crate::cpu::tasks::{for_each, slot};

/// The operands' addresses, shared by the tasks of one call.
pub(super) struct Operands<'s, A, B> {
    pub a: *const A,
    pub b: *const B,
    pub c: *mut f32,
    pub accumulate: bool,
    pub epilogue: RawEpilogue,
    pub scratch: &'s Scratch<'s>,
    pub packing: Packing,
    /// Additional positions in k at which the order of summation restarts, in ascending order. The positions are
    /// relative to the first entry.
    pub restarts: &'s [u32],
}

impl<A, B> Clone for Operands<'_, A, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<A, B> Copy for Operands<'_, A, B> {}

// SAFETY: tasks read A and B, write disjoint tiles of C, and write scratch only in the slot of their own thread. Each
// panel of B is written by one task. After a barrier, panels are only read.
unsafe impl<A, B> Send for Operands<'_, A, B> {}
// SAFETY: as above.
unsafe impl<A, B> Sync for Operands<'_, A, B> {}

impl<A, B> Operands<'_, A, B> {
    /// Returns the tile of C that begins at an element, for one run of k. The caller still has to set A, B and the number
    /// of columns.
    ///
    /// # Safety
    /// The element must exist.
    unsafe fn tile(&self, job: &Gemm, row: usize, column: usize, run: &Range<usize>) -> Tile {
        let at = row * job.c_row + column;
        let epilogue = if run.end == job.k { self.epilogue } else { RawEpilogue::NONE };
        Tile {
            a: std::ptr::null(),
            a_row: ROW_STRIDE,
            b: std::ptr::null(),
            k: run.len(),
            // SAFETY: by this function's contract.
            c: unsafe { self.c.add(at) },
            c_row: job.c_row,
            columns: 0,
            accumulate: self.accumulate || run.start > 0,
            epilogue: epilogue.from(at, column),
        }
    }
}

/// # Safety
/// - Every element that the shape and strides address must be readable in A, B, bias and residual, and writable in C
///   and its rounded form.
/// - Different operands must not overlap. An operand must not overlap itself beyond what [`Gemm::run`] allows.
/// - During the call, no other code may write an operand.
/// - The scratch must have the pieces of `operands.packing`, which must have been created for this product.
/// - `operands.restarts` must be empty.
pub(super) unsafe fn run<A: Factor, B: Factor>(job: &Gemm, kernels: &Kernels, operands: Operands<'_, A, B>) {
    let is_nothing = job.k == 0 && operands.accumulate && operands.epilogue.is_none();
    if job.m == 0 || job.n == 0 || job.batch.count == 0 || is_nothing {
        return;
    }
    // SAFETY: by this function's contract.
    unsafe {
        if operands.packing.together {
            run_shared_b(job, kernels, operands);
        } else {
            run_privately(job, kernels, operands);
        }
    }
}

impl<A, B> Operands<'_, A, B> {
    /// Returns the runs of k that begin in `range`, in order: the order of summation restarts at the start of each. If
    /// k is 0, there is one empty run, so that C is written.
    fn runs(&self, job: &Gemm, kernels: &Kernels, range: Range<usize>) -> impl Iterator<Item = Range<usize>> {
        let (segment, longest, cuts) = (job.k_segment, BLOCK_K * kernels.k_of_line, self.restarts);
        let mut next = Some(range.start);
        std::iter::from_fn(move || {
            let start = next?;
            let segment_end = (start / segment).saturating_add(1).saturating_mul(segment);
            let mut end = (start + longest).min(segment_end).min(range.end);
            if let [first, cuts @ ..] = cuts {
                let cut = |cut: u32| (cut - first) as usize;
                let behind = cuts.partition_point(|&at| cut(at) <= start);
                end = cuts.get(behind).map_or(end, |&at| end.min(cut(at)));
            }
            next = (end < range.end).then_some(end);
            Some(start..end)
        })
    }

    /// Returns the k blocks that begin in `range`, in order. Each block has as many whole runs as [`BLOCK_K`] lines
    /// hold, and comes with the packed lines that it takes, counted from the first of `range`.
    fn blocks(
        &self,
        job: &Gemm,
        kernels: &Kernels,
        range: Range<usize>,
    ) -> impl Iterator<Item = (Range<usize>, Range<usize>)> {
        let mut runs = self.runs(job, kernels, range).peekable();
        let mut line = 0;
        std::iter::from_fn(move || {
            let (first_line, mut block) = (line, runs.next()?);
            line += kernels.lines(block.len());
            while let Some(run) = runs.next_if(|run| line + kernels.lines(run.len()) <= first_line + BLOCK_K) {
                line += kernels.lines(run.len());
                block.end = run.end;
            }
            Some((first_line..line, block))
        })
    }

    /// Returns the range of k blocks from `start` on that fit into the packed buffer together. A block always fits.
    fn chunk(&self, job: &Gemm, kernels: &Kernels, start: usize) -> Range<usize> {
        let fitting = self.blocks(job, kernels, start..job.k).take_while(|(lines, _)| lines.end <= self.packing.depth);
        start..fitting.last().map_or(start, |(_, block)| block.end)
    }

    /// Packs a k block of a panel's columns.
    ///
    /// # Safety
    /// The columns must exist, and no other code may access their panel `to` during the call.
    unsafe fn pack(&self, job: &Gemm, kernels: &Kernels, block: Range<usize>, columns: Range<usize>, mut to: *mut f32)
    where
        B: Factor,
    {
        for run in self.runs(job, kernels, block) {
            // SAFETY: by this function's contract.
            unsafe {
                let from = offset(self.b, run.start, columns.start, job.b.row, job.b.column);
                B::pack_panel(kernels, &Source { start: from, strides: job.b }, run.len(), columns.len(), to);
                to = to.add(kernels.lines(run.len()) * kernels.columns);
            }
        }
    }
}

/// Alternates between packing a chunk of B on all threads and multiplying by it on all threads.
unsafe fn run_shared_b<A: Factor, B: Factor>(job: &Gemm, kernels: &Kernels, operands: Operands<'_, A, B>) {
    let threads = rayon::current_num_threads();
    let width = kernels.columns;
    // There are enough tasks to balance threads of different speed. Each task consists of whole micro-kernels, and all
    // threads get the same number of these if they take equally many tasks.
    let strips = job.m.div_ceil(kernels.rows());
    let tasks = strips
        .div_ceil(BLOCK_ROWS / kernels.rows())
        .max(TASKS_PER_THREAD * threads)
        .next_multiple_of(threads)
        .min(strips);
    let first_row = |task: usize| job.m.min(task * strips / tasks * kernels.rows());

    for first_column in (0..job.n).step_by(CHUNK_COLUMNS) {
        let columns = first_column..job.n.min(first_column + CHUNK_COLUMNS);
        let panels = columns.len().div_ceil(width);
        let mut k_start = 0;
        loop {
            let chunk = operands.chunk(job, kernels, k_start);

            for_each(panels, &|panel| {
                let start = columns.start + panel * width;
                let here = start..columns.end.min(start + width);
                let operands = &operands;
                for (lines, block) in operands.blocks(job, kernels, chunk.clone()) {
                    let to = operands.packing.b(operands.scratch, 0, lines).panel(panel * width);
                    // SAFETY: this panel belongs to this task alone. The chunk fits into its part of the scratch.
                    unsafe { operands.pack(job, kernels, block, here.clone(), to) };
                }
            });
            for_each(tasks, &|task| {
                let rows = first_row(task)..first_row(task + 1);
                let operands = &operands;
                let packed_a = operands.packing.a(operands.scratch, slot());
                for (lines, block) in operands.blocks(job, kernels, chunk.clone()) {
                    let packed_b = operands.packing.b(operands.scratch, 0, lines);
                    let part = TileBlock { rows: rows.clone(), columns: columns.clone(), block };
                    // SAFETY: the rows belong to this task alone. From here on, the packed panels are only read.
                    unsafe { multiply(job, kernels, *operands, part, &packed_a, packed_b) };
                }
            });
            k_start = chunk.end;
            if k_start >= job.k {
                break;
            }
        }
    }
}

/// Computes tiles of the batch's matrices as independent tasks, each of which packs its own operands.
unsafe fn run_privately<A: Factor, B: Factor>(job: &Gemm, kernels: &Kernels, operands: Operands<'_, A, B>) {
    let Batch { count, a, b, c } = job.batch;
    let matrix = |index: usize| Group { m: job.m, k: job.k, a: index * a, b: index * b, c: index * c, cuts: None };
    // SAFETY: by the contract of [`run`].
    unsafe { run_groups(job, kernels, operands, count, TASKS_PER_THREAD * rayon::current_num_threads(), &matrix) };
}

/// One of several products that differ only in their rows and their k.
pub(super) struct Group<'s> {
    pub m: usize,
    pub k: usize,
    /// Distance in elements from the first element of A to the first of this product's A.
    pub a: usize,
    /// Distance in elements from the first element of B to the first of this product's B.
    pub b: usize,
    /// Distance in elements from the first element of C to the first of this product's C.
    pub c: usize,
    /// This product's [`Operands::restarts`]. If they are given and the call does not accumulate, C is first set to zero,
    /// even if k is 0.
    pub cuts: Option<&'s [u32]>,
}

/// Runs the tiles of all groups as one list of tasks, each of which packs its own operands. If C is wide enough,
/// there are at least about `wanted` tasks.
///
/// # Safety
/// The contract of [`run`] must hold for each of `count` groups. The packing and its scratch must have been created for
/// the largest group. The groups' C must not overlap.
pub(super) unsafe fn run_groups<'s, A: Factor, B: Factor>(
    most: &Gemm,
    kernels: &Kernels,
    operands: Operands<'s, A, B>,
    count: usize,
    wanted: usize,
    group: &(dyn Fn(usize) -> Group<'s> + Sync),
) {
    let row_tiles = (0..count).map(|index| group(index).m).max().unwrap_or(0).div_ceil(PRIVATE_ROWS);
    if row_tiles == 0 || most.n == 0 {
        return;
    }
    // If there are few matrices, they are cut into narrower tiles, so that all threads have work.
    let wanted = wanted.div_ceil(count * row_tiles).max(most.n.div_ceil(BLOCK_COLUMNS));
    let tile_columns = most.n.div_ceil(wanted).next_multiple_of(kernels.columns).min(BLOCK_COLUMNS);
    let column_tiles = most.n.div_ceil(tile_columns);

    for_each(count * row_tiles * column_tiles, &|task| {
        let (index, tile) = (task / (row_tiles * column_tiles), task % (row_tiles * column_tiles));
        let (row_tile, column_tile) = (tile / column_tiles, tile % column_tiles);
        let group = group(index);
        let rows = row_tile * PRIVATE_ROWS..group.m.min((row_tile + 1) * PRIVATE_ROWS);
        let columns = column_tile * tile_columns..most.n.min((column_tile + 1) * tile_columns);
        if rows.is_empty() {
            return;
        }
        let job = Gemm { m: group.m, k: group.k, ..*most };
        // SAFETY: the tile of C belongs to this task alone.
        unsafe {
            let mut operands = operands;
            operands.a = operands.a.add(group.a);
            operands.b = operands.b.add(group.b);
            operands.c = operands.c.add(group.c);
            operands.epilogue = operands.epilogue.from(group.c, 0);
            if let Some(cuts) = group.cuts {
                operands.restarts = cuts;
                if !operands.accumulate {
                    operands.accumulate = true;
                    let line = |row| operands.c.add(row * job.c_row + columns.start);
                    rows.clone().for_each(|row| line(row).write_bytes(0, columns.len()));
                }
                if job.k == 0 {
                    return;
                }
            }
            tile_privately(&job, kernels, operands, rows, columns);
        }
    });
}

/// Computes a tile of C on one thread, which packs its own operands.
///
/// # Safety
/// The tile must belong to the caller alone. The requirements of [`run_groups`] apply too.
unsafe fn tile_privately<A: Factor, B: Factor>(
    job: &Gemm,
    kernels: &Kernels,
    operands: Operands<'_, A, B>,
    rows: Range<usize>,
    columns: Range<usize>,
) {
    let (width, slot) = (kernels.columns, slot());
    // SAFETY: the tile belongs to the caller, and the slot to this thread.
    unsafe {
        if let (Some(a), Some(b)) = (A::as_f32(operands.a), B::as_f32(operands.b))
            && job.m <= kernels.rows()
            && (job.a.column, job.b.row) == (1, 1)
        {
            multiply_in_place(job, kernels, operands, (a, b), columns);
            return;
        }
        let packed_a = operands.packing.a(operands.scratch, slot);
        for (lines, block) in operands.blocks(job, kernels, 0..job.k) {
            let packed_b = operands.packing.b(operands.scratch, slot, 0..lines.len());
            for start in columns.clone().step_by(width) {
                let to = packed_b.panel(start - columns.start);
                operands.pack(job, kernels, block.clone(), start..columns.end.min(start + width), to);
            }
            for first_row in rows.clone().step_by(BLOCK_ROWS) {
                let rows = first_row..rows.end.min(first_row + BLOCK_ROWS);
                let part = TileBlock { rows, columns: columns.clone(), block: block.clone() };
                multiply(job, kernels, operands, part, &packed_a, packed_b);
            }
        }
    }
}

/// A tile of C with at most [`BLOCK_ROWS`] rows, and one k block.
struct TileBlock {
    rows: Range<usize>,
    columns: Range<usize>,
    block: Range<usize>,
}

/// Adds one k block to one tile of C.
///
/// # Safety
/// The tile and `packed_a` must belong to the caller alone. `packed_b` must hold the part's panels of B.
unsafe fn multiply<A: Factor, B: Factor>(
    job: &Gemm,
    kernels: &Kernels,
    operands: Operands<'_, A, B>,
    part: TileBlock,
    packed_a: &PackedA,
    packed_b: PackedB<'_>,
) {
    let TileBlock { rows, columns, block } = part;
    let (width, height) = (kernels.columns, rows.len());
    let layout = layout_of(job.a);
    let (mut ends, mut count, mut line) = ([0; BLOCK_K], 0, 0);
    let mut in_place = None;

    // SAFETY: every address below is that of an element of the tile or of the packed blocks. Only the single run of an
    // empty block has no lines, so a block has at most `BLOCK_K` runs.
    unsafe {
        for run in operands.runs(job, kernels, block.clone()) {
            let from = offset(operands.a, rows.start, run.start, job.a.row, job.a.column);
            let source = Source { start: from, strides: job.a };
            in_place = A::rows_in_place(kernels, &source, run.len()).filter(|_| run == block);
            if in_place.is_none() {
                let to = packed_a.from_line(line, layout);
                A::pack_rows(kernels, &source, height, run.len(), layout, &to);
            }
            line += kernels.lines(run.len());
            ends[count] = run.end;
            count += 1;
        }
        for first_column in columns.clone().step_by(BLOCK_COLUMNS) {
            let end_column = columns.end.min(first_column + BLOCK_COLUMNS);
            let mut panels = [std::ptr::null_mut(); BLOCK_COLUMNS / NARROWEST_PANEL];
            for (column, panel) in (first_column..end_column).step_by(width).zip(&mut panels) {
                *panel = packed_b.panel(column - columns.start);
            }
            for row in (0..height).step_by(kernels.rows()) {
                let height = kernels.rows().min(height - row);
                let (first, a_row) = match in_place {
                    Some((rows, stride)) => (rows.wrapping_add(row * stride), stride),
                    None => (packed_a.row(row, layout).cast_const(), ROW_STRIDE),
                };
                for (column, &panel) in (first_column..end_column).step_by(width).zip(&panels) {
                    // The tile stays in the first-level cache for all of its runs.
                    let (mut start, mut a, mut b) = (block.start, first, panel);
                    let columns = width.min(end_column - column);
                    for &end in &ends[..count] {
                        let k = kernels.lines(end - start);
                        let tile = operands.tile(job, rows.start + row, column, &(start..end));
                        kernels.panel(layout, height, Tile { a, a_row, b, k, columns, ..tile });
                        (start, a, b) = (end, a.wrapping_add(k * layout.line()), b.wrapping_add(k * width));
                    }
                }
            }
        }
    }
}

/// Computes some columns of a few rows of C for all of k. Both operands are contiguous along k and are read in place.
/// Each vector of columns is finished before the next one begins, so that B is read, and prefetched, in memory order.
///
/// # Safety
/// The columns must belong to the caller alone. There must be at most as many rows as the tallest micro-kernel has.
unsafe fn multiply_in_place<A: Factor, B: Factor>(
    job: &Gemm,
    kernels: &Kernels,
    operands: Operands<'_, A, B>,
    (a, b): (*const f32, *const f32),
    columns: Range<usize>,
) {
    let width = kernels.columns / 2;
    for column in columns.clone().step_by(width) {
        for run in operands.runs(job, kernels, 0..job.k) {
            // SAFETY: every address below is that of an element of the rows or of B's columns, except `next`, which is
            // only prefetched.
            unsafe {
                let b = offset(b, run.start, column, job.b.row, job.b.column);
                let tile = Tile {
                    a: offset(a, 0, run.start, job.a.row, job.a.column),
                    b,
                    columns: width.min(columns.end - column),
                    ..operands.tile(job, 0, column, &run)
                };
                let next = b.wrapping_add(width * job.b.column + (width - 1) * run.start);
                kernels.in_place(job.m, &InPlace { tile, a_row: job.a.row, b_column: job.b.column, next });
            }
        }
    }
}

/// Returns the address of an element of a matrix.
///
/// # Safety
/// The element must exist.
unsafe fn offset<T>(start: *const T, row: usize, column: usize, row_stride: usize, column_stride: usize) -> *const T {
    // SAFETY: by this function's contract.
    unsafe { start.add(row * row_stride + column * column_stride) }
}

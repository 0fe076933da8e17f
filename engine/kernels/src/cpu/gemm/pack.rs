//! Packing: copying A and B into the order in which the micro-kernels read them.

use super::Strides;
use super::kernel::{COLUMN_STRIDE, Factor, Layout};
use super::place::PART_ROWS;
pub use super::place::PackedA;
use crate::cpu::Float;
use crate::cpu::simd::{Vector, prefetch, prefetch_row};

use half::bf16;

/// A block of a matrix: the address of its first element, and its strides.
#[derive(Clone, Copy)]
pub struct Source<T = f32> {
    /// The first element.
    pub start: *const T,
    /// Distances between rows and between columns.
    pub strides: Strides,
}

/// Number of rows by which prefetches of B are ahead of the copy. The hardware does not prefetch rows that are far
/// apart, such as those of a head in a packed `qkv`.
const AHEAD: usize = 16;

/// Packs `k` × `columns` of B as `k` lines of two vectors. Missing columns are filled with zeros.
///
/// # Safety
/// `source` must have `k` rows and `columns` columns, at most 2 × lanes. `to` must have room for `k` × 2 × lanes
/// floats.
#[inline(always)]
pub(super) unsafe fn panel<V: Vector>(source: &Source, k: usize, columns: usize, to: *mut f32) {
    let Strides { row, column } = source.strides;
    let width = 2 * V::LANES;
    // SAFETY: rows are below `k`, columns below `columns`, and lines have `width` floats, as in this function's
    // contract.
    unsafe {
        if columns == width && column == 1 {
            for i in 0..k {
                let from = source.start.add(i * row);
                prefetch(from.wrapping_add(AHEAD * row));
                prefetch(from.wrapping_add(AHEAD * row + V::LANES));
                V::load(from).store(to.add(i * width));
                V::load(from.add(V::LANES)).store(to.add(i * width + V::LANES));
            }
            return;
        }
        clear_behind(to, k, columns, width);
        // Square blocks are transposed in registers, and the edges are copied float by float.
        let whole = |length: usize| if row == 1 { length - length % V::LANES } else { 0 };
        let (whole_k, whole_columns) = (whole(k), whole(columns));
        for j in (0..whole_columns).step_by(V::LANES) {
            for i in (0..whole_k).step_by(V::LANES) {
                for line in 0..V::LANES {
                    prefetch(source.start.wrapping_add(i + (j + V::LANES + line) * column));
                }
                V::transpose(source.start.add(i + j * column), column, |line, register| {
                    register.store(to.add((i + line) * width + j));
                });
            }
        }
        for j in 0..columns {
            let done = if j < whole_columns { whole_k } else { 0 };
            for i in done..k {
                *to.add(i * width + j) = *source.start.add(i * row + j * column);
            }
        }
    }
}

/// Fills the columns from `columns` on with zeros.
///
/// # Safety
/// `to` must have `k` lines of `width` floats.
#[inline(always)]
unsafe fn clear_behind(to: *mut f32, k: usize, columns: usize, width: usize) {
    for i in 0..k {
        for j in columns..width {
            // SAFETY: by this function's contract.
            unsafe { *to.add(i * width + j) = 0.0 };
        }
    }
}

/// Like [`panel`], for bf16. The elements are widened to f32, or two rows of B are packed into a line if the vectors
/// hold pairs.
///
/// # Safety
/// The requirements of [`panel`] apply.
#[inline(always)]
pub(super) unsafe fn panel_bf16<V: Vector>(source: &Source<bf16>, k: usize, columns: usize, to: *mut f32) {
    if V::IS_PAIRS {
        // SAFETY: by this function's contract.
        return unsafe { panel_of_pairs::<V>(source, k, columns, to) };
    }
    let Strides { row, column } = source.strides;
    let width = 2 * V::LANES;
    // SAFETY: rows are below `k`, columns below `columns`, and lines have `width` floats, as in this function's
    // contract.
    unsafe {
        if columns == width && column == 1 {
            for i in 0..k {
                bf16::load_all(source.start.add(i * row), to.add(i * width), width);
            }
            return;
        }
        clear_behind(to, k, columns, width);
        // Square blocks are widened into a buffer and transposed in registers. The edges are copied value by value.
        let whole = |length: usize| if row == 1 { length - length % V::LANES } else { 0 };
        let (whole_k, whole_columns) = (whole(k), whole(columns));
        let mut block = [[0.0f32; 16]; 16];
        for j in (0..whole_columns).step_by(V::LANES) {
            for i in (0..whole_k).step_by(V::LANES) {
                for (line, block) in block.iter_mut().enumerate().take(V::LANES) {
                    bf16::load_all(source.start.add(i + (j + line) * column), block.as_mut_ptr(), V::LANES);
                }
                V::transpose(block.as_ptr().cast(), 16, |line, register| {
                    register.store(to.add((i + line) * width + j));
                });
            }
        }
        for j in 0..columns {
            let done = if j < whole_columns { whole_k } else { 0 };
            for i in done..k {
                *to.add(i * width + j) = (*source.start.add(i * row + j * column)).load();
            }
        }
    }
}

/// Returns two values that are adjacent along k as one lane, with the first in the lower half. A missing second value
/// is 0.
#[inline(always)]
fn pair(first: bf16, second: Option<bf16>) -> u32 {
    u32::from(first.to_bits()) | u32::from(second.map_or(0, bf16::to_bits)) << 16
}

/// Writes the [`pair`]s of two lines of `len` contiguous values.
///
/// # Safety
/// `first`, and `second` if there is one, must be readable and `to` writable for `len` values.
#[inline(always)]
unsafe fn pairs(first: *const bf16, second: Option<*const bf16>, len: usize, to: *mut u32) {
    let mut done = 0;
    // SAFETY: by this function's contract.
    unsafe {
        while done + 16 <= len {
            some_pairs::<16>(first, second, done, to);
            done += 16;
        }
        while done + 8 <= len {
            some_pairs::<8>(first, second, done, to);
            done += 8;
        }
        while done < len {
            some_pairs::<1>(first, second, done, to);
            done += 1;
        }
    }
}

/// Writes `N` of the pairs of [`pairs`], from `at` on. All values are read before the first pair is written, so that the
/// compiler can use vectors although it does not know that the lines are apart.
///
/// # Safety
/// As for [`pairs`], for `at` + `N` values.
#[inline(always)]
unsafe fn some_pairs<const N: usize>(first: *const bf16, second: Option<*const bf16>, at: usize, to: *mut u32) {
    // SAFETY: by this function's contract.
    unsafe {
        let load = |line: *const bf16| line.add(at).cast::<[u16; N]>().read_unaligned();
        let (low, high) = (load(first), second.map_or([0; N], load));
        let mut lanes = [0u32; N];
        for i in 0..N {
            lanes[i] = u32::from(low[i]) | u32::from(high[i]) << 16;
        }
        to.add(at).cast::<[u32; N]>().write_unaligned(lanes);
    }
}

/// Like [`panel`], for bf16 with two rows of B in a line.
///
/// # Safety
/// The requirements of [`panel`] apply.
#[inline(always)]
unsafe fn panel_of_pairs<V: Vector>(source: &Source<bf16>, k: usize, columns: usize, to: *mut f32) {
    let Strides { row, column } = source.strides;
    let (width, lines) = (2 * V::LANES, k.div_ceil(2));
    let lanes = to.cast::<u32>();
    // SAFETY: rows are below `k`, columns below `columns`, and lines have `width` lanes, as in this function's
    // contract.
    unsafe {
        let at = |i: usize, j: usize| source.start.add(i * row + j * column);
        if columns == width && column == 1 {
            for line in 0..lines {
                let ahead = source.start.wrapping_add((2 * line + AHEAD) * row);
                prefetch(ahead.cast());
                prefetch(ahead.wrapping_add(row).cast());
                let second = (2 * line + 1 < k).then(|| at(2 * line + 1, 0));
                pairs(at(2 * line, 0), second, width, lanes.add(line * width));
            }
            return;
        }
        clear_behind(to, lines, columns, width);
        // If B is contiguous along k, two adjacent values in memory already form a lane.
        let whole = |length: usize| if row == 1 { length - length % V::LANES } else { 0 };
        let (whole_lines, whole_columns) = (whole(k / 2), whole(columns));
        for j in (0..whole_columns).step_by(V::LANES) {
            for line in (0..whole_lines).step_by(V::LANES) {
                // The rows are copied first, because rows of bf16 may begin at addresses that are not aligned for
                // floats.
                let mut block = [[0u32; 16]; 16];
                for (i, block) in block.iter_mut().enumerate().take(V::LANES) {
                    prefetch(source.start.wrapping_add(2 * line + (j + V::LANES + i) * column).cast());
                    std::ptr::copy_nonoverlapping(at(2 * line, j + i), block.as_mut_ptr().cast(), 2 * V::LANES);
                }
                V::transpose(block.as_ptr().cast(), 16, |i, register| {
                    register.store(to.add((line + i) * width + j));
                });
            }
        }
        for j in 0..columns {
            let done = if j < whole_columns { whole_lines } else { 0 };
            for line in done..lines {
                let second = (2 * line + 1 < k).then(|| *at(2 * line + 1, j));
                *lanes.add(line * width + j) = pair(*at(2 * line, j), second);
            }
        }
    }
}

/// Copies `len` lanes of four bytes. For rows as short as those of a head, this is faster than a call of `memcpy`.
///
/// # Safety
/// `from` must be readable and `to` writable for `len` lanes.
#[inline(always)]
unsafe fn copy_row<T: Copy>(from: *const T, to: *mut T, len: usize) {
    const CHUNK: usize = 16;
    let whole = len - len % CHUNK;
    // SAFETY: by this function's contract.
    unsafe {
        for i in (0..whole).step_by(CHUNK) {
            to.add(i).cast::<[T; CHUNK]>().write_unaligned(from.add(i).cast::<[T; CHUNK]>().read_unaligned());
        }
        for i in whole..len {
            to.add(i).write_unaligned(from.add(i).read_unaligned());
        }
    }
}

/// Like [`rows`], for bf16 with two columns of A in a line.
///
/// # Safety
/// The requirements of [`rows`] apply.
#[inline(always)]
pub(super) unsafe fn rows_of_pairs(source: &Source<bf16>, rows: usize, k: usize, layout: Layout, to: &PackedA) {
    let Strides { row, column } = source.strides;
    // SAFETY: rows are below `rows` and columns below `k`, in the source and in `to`.
    unsafe {
        let at = |i: usize, p: usize| source.start.add(i * row + p * column);
        let second = |i: usize, line: usize| (2 * line + 1 < k).then(|| at(i, 2 * line + 1));
        match layout {
            Layout::Rows | Layout::WideColumns => {
                for i in 0..rows {
                    let lanes = to.row(i, Layout::Rows).cast::<u32>();
                    let copied = if column == 1 { k / 2 } else { 0 };
                    copy_row(at(i, 0).cast::<u32>(), lanes, copied);
                    for line in copied..k.div_ceil(2) {
                        *lanes.add(line) = pair(*at(i, 2 * line), second(i, line).map(|second| *second));
                    }
                }
            }
            Layout::Columns => {
                let (whole, rest) = (rows / PART_ROWS, rows % PART_ROWS);
                for line in 0..k.div_ceil(2) {
                    prefetch_row(at(0, 2 * line), AHEAD * column, rows);
                    prefetch_row(at(0, 2 * line), (AHEAD + 1) * column, rows);
                    for (i, part) in to.parts().iter().enumerate().take(rows.div_ceil(PART_ROWS)) {
                        let (first, lanes) = (i * PART_ROWS, part.add(line * COLUMN_STRIDE).cast());
                        let (from, second) = (at(first, 2 * line), second(first, line));
                        match i < whole {
                            true => pairs(from, second, PART_ROWS, lanes),
                            false => pairs(from, second, rest, lanes),
                        }
                    }
                }
            }
        }
    }
}

/// Packs `rows` × `k` of A in `layout`, which must be [`Layout::Rows`] or [`Layout::Columns`]. Each part of `to`
/// receives [`PART_ROWS`] rows.
///
/// # Safety
/// `source` must have `rows` rows and `k` columns. `to` must have parts for all rows, and `k` and `rows` must fit the
/// strides of the layout.
pub(super) unsafe fn rows<T: Factor>(source: &Source<T>, rows: usize, k: usize, layout: Layout, to: &PackedA) {
    let Strides { row, column } = source.strides;
    // SAFETY: rows are below `rows` and columns below `k`, in the source and in `to`.
    unsafe {
        match layout {
            Layout::Rows if column == 1 => {
                for i in 0..rows {
                    let (from, line) = (source.start.add(i * row), to.row(i, layout));
                    match T::as_f32(from) {
                        Some(from) => copy_row(from, line, k),
                        None => T::load_all(from, line, k),
                    }
                }
            }
            Layout::Rows | Layout::WideColumns => {
                for i in 0..rows {
                    let line = to.row(i, Layout::Rows);
                    for p in 0..k {
                        *line.add(p) = (*source.start.add(i * row + p * column)).load();
                    }
                }
            }
            Layout::Columns => {
                // Whole parts are copied with a constant length, so that the compiler can unroll the loop.
                let (whole, rest) = (rows / PART_ROWS, rows % PART_ROWS);
                for p in 0..k {
                    let from = source.start.add(p * column);
                    prefetch_row(from, AHEAD * column, rows);
                    for (i, part) in to.parts()[..whole].iter().enumerate() {
                        let from = from.add(i * PART_ROWS);
                        T::load_all(from, part.add(p * COLUMN_STRIDE), PART_ROWS);
                    }
                    if rest > 0 {
                        let from = from.add(whole * PART_ROWS);
                        T::load_all(from, to.parts()[whole].add(p * COLUMN_STRIDE), rest);
                    }
                }
            }
        }
    }
}

//! Copies of A and B in the order in which the micro-kernels read them.

use super::Strides;
use super::kernel::{COLUMN_STRIDE, Layout};
use super::place::{PART_ROWS, PackedA};
use crate::cpu::Float;
use crate::cpu::simd::{Vector, prefetch};

use half::bf16;

/// A block of a matrix: where it begins and how to walk it.
#[derive(Clone, Copy)]
pub struct Source<T = f32> {
    /// The first element.
    pub start: *const T,
    /// Steps between rows and between columns.
    pub strides: Strides,
}

/// Rows of B that are asked for ahead of those being copied: rows that are far apart (a head's, in a packed `qkv`) are
/// beyond what processors guess.
const AHEAD: usize = 16;

/// Packs `k` × `columns` of B as `k` lines of two vectors, the missing columns as zeros.
///
/// # Safety
/// `source` has `k` rows and `columns` ≤ 2 × lanes columns; `to` has room for `k` × 2 × lanes floats.
#[inline(always)]
pub(super) unsafe fn panel<V: Vector>(source: &Source, k: usize, columns: usize, to: *mut f32) {
    let Strides { row, column } = source.strides;
    let width = 2 * V::LANES;
    // SAFETY: rows below `k`, columns below `columns`, lines of `width` floats: all within the caller's promise.
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
        // Square blocks are transposed in registers; whatever is left at the edges goes float by float.
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

/// Zeros the columns that do not exist.
///
/// # Safety
/// `to` has `k` lines of `width` floats.
#[inline(always)]
unsafe fn clear_behind(to: *mut f32, k: usize, columns: usize, width: usize) {
    for i in 0..k {
        for j in columns..width {
            // SAFETY: by the caller's promise.
            unsafe { *to.add(i * width + j) = 0.0 };
        }
    }
}

/// [`panel`] of bf16, as the f32 that they are.
///
/// # Safety
/// As of [`panel`].
#[inline(always)]
pub(super) unsafe fn panel_bf16<V: Vector>(source: &Source<bf16>, k: usize, columns: usize, to: *mut f32) {
    let Strides { row, column } = source.strides;
    let width = 2 * V::LANES;
    // SAFETY: rows below `k`, columns below `columns`, lines of `width` floats: all within the caller's promise.
    unsafe {
        if columns == width && column == 1 {
            for i in 0..k {
                bf16::load_all(source.start.add(i * row), to.add(i * width), width);
            }
            return;
        }
        clear_behind(to, k, columns, width);
        // Square blocks are widened beside, and transposed in registers; whatever is left at the edges goes float by float.
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

/// Packs `rows` × `k` of A in `layout`, which is [`Layout::Rows`] or [`Layout::Columns`], [`PART_ROWS`] rows to a part.
///
/// # Safety
/// `source` has that many rows and columns; `to` has a part for all rows, with room for them; `k` and `rows` fit the strides
/// of the layout.
pub(super) unsafe fn rows<T: Float>(source: &Source<T>, rows: usize, k: usize, layout: Layout, to: &PackedA) {
    let Strides { row, column } = source.strides;
    // SAFETY: rows below `rows` and columns below `k` of both sides.
    unsafe {
        match layout {
            Layout::Rows if column == 1 => {
                for i in 0..rows {
                    T::load_all(source.start.add(i * row), to.row(i, layout), k);
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
                // Whole parts in copies of a length that the compiler knows.
                let (whole, rest) = (rows / PART_ROWS, rows % PART_ROWS);
                for p in 0..k {
                    let from = source.start.add(p * column);
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

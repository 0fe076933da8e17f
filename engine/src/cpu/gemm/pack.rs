//! Copies of A and B in the order in which the micro-kernels read them.

use super::Strides;
use super::kernel::{COLUMN_STRIDE, Layout, ROW_STRIDE};
use crate::cpu::simd::{Vector, prefetch};

/// A block of a matrix: where it begins and how to walk it.
#[derive(Clone, Copy)]
pub(crate) struct Source {
    pub start: *const f32,
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
        if columns < width {
            for i in 0..k {
                for j in columns..width {
                    *to.add(i * width + j) = 0.0;
                }
            }
        }
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

/// Packs `rows` × `k` of A in `layout`, which is [`Layout::Rows`] or [`Layout::Columns`].
///
/// # Safety
/// `source` has that many rows and columns; `to` has room for a block of the layout; `k` and `rows` fit its stride.
pub(super) unsafe fn rows(source: &Source, rows: usize, k: usize, layout: Layout, to: *mut f32) {
    let Strides { row, column } = source.strides;
    // SAFETY: rows below `rows` and columns below `k` of both sides.
    unsafe {
        match layout {
            Layout::Rows if column == 1 => {
                for i in 0..rows {
                    std::ptr::copy_nonoverlapping(source.start.add(i * row), to.add(i * ROW_STRIDE), k);
                }
            }
            Layout::Rows | Layout::WideColumns => {
                for i in 0..rows {
                    for p in 0..k {
                        *to.add(i * ROW_STRIDE + p) = *source.start.add(i * row + p * column);
                    }
                }
            }
            Layout::Columns => {
                for p in 0..k {
                    std::ptr::copy_nonoverlapping(source.start.add(p * column), to.add(p * COLUMN_STRIDE), rows);
                }
            }
        }
    }
}

/// The layout in which A is packed fastest: whichever of its directions is contiguous stays so.
pub(super) fn layout_of(a: Strides) -> Layout {
    if a.row == 1 && a.column != 1 { Layout::Columns } else { Layout::Rows }
}

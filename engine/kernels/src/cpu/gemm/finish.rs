//! The end of a tile. Once the products of a k block are summed, the sums of earlier blocks, the bias and the
//! residual are added. The result is stored, and optionally rounded.

use half::bf16;

use super::Epilogue;
use super::kernel::Tile;
use crate::cpu::simd::Vector;

/// An [`Epilogue`] as addresses. An address is null if the epilogue has no such operand.
#[derive(Clone, Copy)]
pub struct RawEpilogue {
    bias: *const f32,
    residual: *const f32,
    rounded: *mut bf16,
}

impl RawEpilogue {
    /// An epilogue that does nothing.
    pub const NONE: Self = Self { bias: std::ptr::null(), residual: std::ptr::null(), rounded: std::ptr::null_mut() };

    pub fn of(epilogue: Epilogue<'_>) -> Self {
        Self {
            bias: epilogue.bias.map_or(std::ptr::null(), <[f32]>::as_ptr),
            residual: epilogue.residual.map_or(std::ptr::null(), <[f32]>::as_ptr),
            rounded: epilogue.rounded.map_or(std::ptr::null_mut(), <[bf16]>::as_mut_ptr),
        }
    }

    pub fn is_none(self) -> bool {
        self.bias.is_null() && self.residual.is_null() && self.rounded.is_null()
    }

    /// Returns the address of the rounded result, which is null if there is none.
    pub fn rounded(self) -> *mut bf16 {
        self.rounded
    }

    /// Returns the epilogue of a tile that begins `at` elements after the first of C, in a column `columns` after the
    /// first.
    pub fn from(mut self, at: usize, columns: usize) -> Self {
        if !self.bias.is_null() {
            self.bias = self.bias.wrapping_add(columns);
        }
        if !self.residual.is_null() {
            self.residual = self.residual.wrapping_add(at);
        }
        if !self.rounded.is_null() {
            self.rounded = self.rounded.wrapping_add(at);
        }
        self
    }
}

/// Finishes a tile that consists of whole vectors.
///
/// # Safety
/// The tile's addresses must be valid for `ROWS` rows of `VECTORS` vectors.
#[inline(always)]
#[expect(clippy::needless_range_loop, reason = "indexing by a constant range unrolls into registers")]
pub(super) unsafe fn finish<V: Vector, const ROWS: usize, const VECTORS: usize>(
    tile: &Tile,
    mut sums: [[V; VECTORS]; ROWS],
) {
    let RawEpilogue { bias, residual, rounded } = tile.epilogue;
    // SAFETY: by this function's contract.
    unsafe {
        // Each addition has a short loop of its own, which the compiler unrolls. It would not unroll a single loop with
        // all additions, and would then keep the sums in memory.
        if tile.accumulate {
            for row in 0..ROWS {
                let c = tile.c.add(row * tile.c_row);
                for i in 0..VECTORS {
                    sums[row][i] = V::load(c.add(i * V::LANES)).add(sums[row][i]);
                }
            }
        }
        if !bias.is_null() {
            for i in 0..VECTORS {
                let bias = V::load(bias.add(i * V::LANES));
                for row in 0..ROWS {
                    sums[row][i] = sums[row][i].add(bias);
                }
            }
        }
        if !residual.is_null() {
            for row in 0..ROWS {
                let residual = residual.add(row * tile.c_row);
                for i in 0..VECTORS {
                    sums[row][i] = sums[row][i].add(V::load(residual.add(i * V::LANES)));
                }
            }
        }
        if !rounded.is_null() {
            if V::IS_PAIRS {
                for row in 0..ROWS {
                    let rounded = rounded.add(row * tile.c_row);
                    for i in 0..VECTORS {
                        sums[row][i].store_rounded(rounded.add(i * V::LANES));
                    }
                }
                return;
            }
            // Rounding takes several instructions, so the compiler does not unroll this loop. It reads a copy, so that the
            // sums need not be in memory for it.
            for (row, line) in lines_of(&sums).0.iter().enumerate() {
                let rounded = rounded.add(row * tile.c_row);
                for i in 0..VECTORS {
                    V::load(line[i * V::LANES..].as_ptr()).store_rounded(rounded.add(i * V::LANES));
                }
            }
            return;
        }
        for row in 0..ROWS {
            let c = tile.c.add(row * tile.c_row);
            for i in 0..VECTORS {
                sums[row][i].store(c.add(i * V::LANES));
            }
        }
    }
}

/// Sums as rows of floats, aligned for the widest vectors.
#[repr(align(64))]
pub(super) struct Lines<const ROWS: usize>(pub [[f32; 32]; ROWS]);

/// Stores the sums as rows of floats.
///
/// # Safety
/// The caller must have the level's features.
#[inline(always)]
pub(super) unsafe fn lines_of<V: Vector, const ROWS: usize, const VECTORS: usize>(
    sums: &[[V; VECTORS]; ROWS],
) -> Lines<ROWS> {
    let mut lines = Lines([[0.0; 32]; ROWS]);
    for (line, sums) in lines.0.iter_mut().zip(sums) {
        for (i, sum) in sums.iter().enumerate() {
            // SAFETY: a line has room for two of the widest vectors.
            unsafe { sum.store(line[i * V::LANES..].as_mut_ptr()) };
        }
    }
    lines
}

/// Finishes a tile at C's right edge. Writes only the columns that exist, with the order of additions of [`finish`].
pub(super) unsafe fn finish_narrow<V: Vector>(tile: &Tile, lines: &[[f32; 32]]) {
    let RawEpilogue { bias, residual, rounded } = tile.epilogue;
    for (row, line) in lines.iter().enumerate() {
        for (column, &sum) in line[..tile.columns].iter().enumerate() {
            let at = row * tile.c_row + column;
            let mut value = sum;
            // SAFETY: the tile's addresses are valid for columns below `tile.columns`.
            unsafe {
                if tile.accumulate {
                    value += *tile.c.add(at);
                }
                if !bias.is_null() {
                    value += *bias.add(column);
                }
                if !residual.is_null() {
                    value += *residual.add(at);
                }
                match rounded.is_null() {
                    true => *tile.c.add(at) = value,
                    false => *rounded.add(at) = V::round(value),
                }
            }
        }
    }
}

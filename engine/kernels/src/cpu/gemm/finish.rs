//! What happens to a tile of C once its block of k is summed: sums of blocks before, bias and residual are added, and it is stored,
//! rounded if asked for.

use half::bf16;

use super::Epilogue;
use super::kernel::Tile;
use crate::cpu::bf16::rounded;
use crate::cpu::simd::Vector;

/// [`Epilogue`] as addresses; null for none.
#[derive(Clone, Copy)]
pub struct RawEpilogue {
    bias: *const f32,
    residual: *const f32,
    rounded: *mut bf16,
}

impl RawEpilogue {
    /// Nothing happens.
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

    /// That of a tile which begins `at` elements of C further on, and so many columns.
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

/// Writes whole vectors of a tile.
///
/// # Safety
/// The tile's promise, for `ROWS` rows of `VECTORS` vectors.
#[inline(always)]
#[expect(clippy::needless_range_loop, reason = "indexing by a constant range unrolls into registers")]
pub(super) unsafe fn finish<V: Vector, const ROWS: usize, const VECTORS: usize>(
    tile: &Tile,
    mut sums: [[V; VECTORS]; ROWS],
) {
    let RawEpilogue { bias, residual, rounded } = tile.epilogue;
    // SAFETY: by this function's contract.
    unsafe {
        // One short loop for each addition: a longer body would not be unrolled, and then the sums would live in
        // memory.
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
            for row in 0..ROWS {
                let rounded = rounded.add(row * tile.c_row);
                for i in 0..VECTORS {
                    sums[row][i].store_rounded(rounded.add(i * V::LANES));
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

/// Sums as rows of floats.
///
/// # Safety
/// The caller has the level's features.
#[inline(always)]
pub(super) unsafe fn lines_of<V: Vector, const ROWS: usize, const VECTORS: usize>(
    sums: &[[V; VECTORS]; ROWS],
) -> [[f32; 32]; ROWS] {
    let mut lines = [[0.0; 32]; ROWS];
    for (line, sums) in lines.iter_mut().zip(sums) {
        for (i, sum) in sums.iter().enumerate() {
            // SAFETY: a line holds two of the widest vectors.
            unsafe { sum.store(line[i * V::LANES..].as_mut_ptr()) };
        }
    }
    lines
}

/// Writes the columns that exist of a tile at C's right edge, adding in the same order as the full width does.
pub(super) unsafe fn finish_narrow(tile: &Tile, lines: &[[f32; 32]]) {
    let RawEpilogue { bias, residual, rounded: stored } = tile.epilogue;
    for (row, line) in lines.iter().enumerate() {
        for (column, &sum) in line[..tile.columns].iter().enumerate() {
            let at = row * tile.c_row + column;
            let mut value = sum;
            // SAFETY: the tile's promise, for columns below `tile.columns`.
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
                match stored.is_null() {
                    true => *tile.c.add(at) = value,
                    false => *stored.add(at) = rounded(value),
                }
            }
        }
    }
}

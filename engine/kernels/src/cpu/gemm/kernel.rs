//! The innermost product: a few rows of C by one panel of B, in registers.
//!
//! In: one k block of A (rows in one of two fixed layouts) and of B (a packed panel). Out: a tile of C. Never: a second
//! accumulator per element, which would change the order of summation.

#[cfg(target_arch = "aarch64")]
use std::arch::aarch64::float32x4_t;
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{__m256, __m512};

use half::bf16;

use super::finish::{RawEpilogue, finish, finish_narrow, lines_of};
use super::pack;
use super::place::PackedA;
use crate::cpu::Float;
use crate::cpu::simd::{Lanes, Level, Vector, prefetch_far};
#[cfg(target_arch = "x86_64")]
use crate::cpu::simd::{Pairs, multiplies_bf16};

/// Distance between rows of A in [`Layout::Rows`]. Not a multiple of 1024, or the rows would share cache sets.
pub const ROW_STRIDE: usize = 400;
/// Distance between successive k of A in [`Layout::Columns`]: the rows of two of the tallest micro-kernels.
pub const COLUMN_STRIDE: usize = 24;

/// How a k block of A lies in scratch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// A row's k are neighbours; rows are [`ROW_STRIDE`] apart.
    Rows,
    /// The rows of one k are neighbours; successive k are [`COLUMN_STRIDE`] apart.
    Columns,
    /// The rows of one k are neighbours; successive k are [`ROW_STRIDE`] apart: [`Layout::Rows`] seen transposed.
    WideColumns,
}

impl Layout {
    /// Distance from one row to the next.
    pub fn row(self) -> usize {
        if self == Self::Rows { ROW_STRIDE } else { 1 }
    }
}

/// One call's operands.
pub struct Tile {
    /// First row of A's block, in the layout of the micro-kernel called.
    pub a: *const f32,
    /// The packed panel: `k` × [`Kernels::columns`] floats.
    pub b: *const f32,
    /// Lines of the k block.
    pub k: usize,
    /// The tile of C.
    pub c: *mut f32,
    /// Distance between rows of C and of `residual`.
    pub c_row: usize,
    /// Columns of C that exist, at most [`Kernels::columns`].
    pub columns: usize,
    /// Whether C's values are added to.
    pub accumulate: bool,
    /// What happens in the end, from the tile's first element on.
    pub epilogue: RawEpilogue,
}

/// What products have factors of.
pub trait Factor: Float {
    /// Whether it is bf16.
    const IS_BF16: bool;

    /// Packs rows of A.
    ///
    /// # Safety
    /// `source` has that many rows and columns; `to` has a part for all rows, with room for them; `k` and `rows` fit the strides of
    /// the layout.
    unsafe fn pack_rows(
        kernels: &Kernels,
        source: &pack::Source<Self>,
        rows: usize,
        k: usize,
        layout: Layout,
        to: &PackedA,
    );

    /// Packs a panel of B.
    ///
    /// # Safety
    /// As of [`Kernels::pack_panel`].
    unsafe fn pack_panel(kernels: &Kernels, source: &pack::Source<Self>, k: usize, columns: usize, to: *mut f32);

    /// Factors as the f32 that they are, if they are.
    fn as_f32(factors: *const Self) -> Option<*const f32>;
}

impl Factor for f32 {
    const IS_BF16: bool = false;

    #[inline]
    unsafe fn pack_rows(_: &Kernels, source: &pack::Source, rows: usize, k: usize, layout: Layout, to: &PackedA) {
        // SAFETY: the caller's promise.
        unsafe { pack::rows(source, rows, k, layout, to) }
    }

    #[inline]
    unsafe fn pack_panel(kernels: &Kernels, source: &pack::Source<Self>, k: usize, columns: usize, to: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { (kernels.pack_panel)(source, k, columns, to) }
    }

    #[inline]
    fn as_f32(factors: *const Self) -> Option<*const f32> {
        Some(factors)
    }
}

impl Factor for bf16 {
    const IS_BF16: bool = true;

    #[inline]
    unsafe fn pack_rows(
        kernels: &Kernels,
        source: &pack::Source<Self>,
        rows: usize,
        k: usize,
        layout: Layout,
        to: &PackedA,
    ) {
        // SAFETY: the caller's promise.
        unsafe { (kernels.pack_rows_bf16)(source, rows, k, layout, to) }
    }

    #[inline]
    unsafe fn pack_panel(kernels: &Kernels, source: &pack::Source<Self>, k: usize, columns: usize, to: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { (kernels.pack_panel_bf16)(source, k, columns, to) }
    }

    #[inline]
    fn as_f32(_: *const Self) -> Option<*const f32> {
        None
    }
}

/// A few rows of A by columns of B, both as they lie in memory, where their k are neighbours.
pub struct InPlace {
    /// The operands: A and B at the k block's first k, and no more columns than a vector has lanes.
    pub tile: Tile,
    /// Distance between rows of A.
    pub a_row: usize,
    /// Distance between columns of B.
    pub b_column: usize,
    /// What is read after these columns, for as many bytes; any address will do.
    pub next: *const f32,
}

/// Floats of a cache line.
const LINE: usize = 16;

type Micro = unsafe fn(&Tile);

/// The kernels of one [`Level`].
pub struct Kernels {
    /// Columns of a panel of B.
    pub columns: usize,
    /// How many k a line of packed factors has: 1, or 2 of bf16.
    pub k_of_line: usize,
    /// Micro-kernels by layout of A and by number of rows − 1.
    micro: [&'static [Micro]; 3],
    /// Packs a panel of one of the factors.
    pub pack_panel: unsafe fn(&pack::Source, usize, usize, *mut f32),
    /// The same of bf16.
    pub pack_panel_bf16: unsafe fn(&pack::Source<bf16>, usize, usize, *mut f32),
    /// Packs rows of A of bf16.
    pub pack_rows_bf16: unsafe fn(&pack::Source<bf16>, usize, usize, Layout, &PackedA),
    /// Kernels of operands as they lie in memory, by number of rows − 1.
    in_place: &'static [unsafe fn(&InPlace)],
}

impl Kernels {
    /// The kernels of a level that [is available](Level::is_available).
    pub fn of(level: Level) -> &'static Self {
        assert!(level.is_available(), "kernels of {level:?} asked for on a machine without it");
        match level {
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => &avx512::KERNELS,
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => &avx2::KERNELS,
            #[cfg(target_arch = "aarch64")]
            Level::Neon => &neon::KERNELS,
            _ => &portable::KERNELS,
        }
    }

    /// Those for two factors of bf16.
    pub fn of_bf16(level: Level) -> &'static Self {
        match level {
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 if multiplies_bf16() => &avx512_bf16::KERNELS,
            _ => Self::of(level),
        }
    }

    /// Rows of the tallest micro-kernel.
    pub fn rows(&self) -> usize {
        self.micro[0].len()
    }

    /// Lines of so many k, packed.
    pub fn lines(&self, k: usize) -> usize {
        k.div_ceil(self.k_of_line)
    }

    /// Computes `rows` rows of one panel, tall micro-kernels first.
    ///
    /// # Safety
    /// `tile` describes memory that exists for `rows` rows, and no other thread touches its part of C.
    #[inline]
    pub unsafe fn panel(&self, layout: Layout, rows: usize, mut tile: Tile) {
        let micro = self.micro[layout as usize];
        let mut left = rows;
        while left > 0 {
            let height = left.min(micro.len());
            // SAFETY: the level was checked when this table was handed out; the tile is the caller's promise.
            unsafe { micro[height - 1](&tile) };
            tile.a = tile.a.wrapping_add(height * layout.row());
            tile.c = tile.c.wrapping_add(height * tile.c_row);
            tile.epilogue = tile.epilogue.from(height * tile.c_row, 0);
            left -= height;
        }
    }

    /// Computes `rows` rows, no more than of the tallest micro-kernel, of one vector of columns at most.
    ///
    /// # Safety
    /// As [`Kernels::panel`].
    #[inline]
    pub unsafe fn in_place(&self, rows: usize, job: &InPlace) {
        // SAFETY: the caller's promise.
        unsafe { self.in_place[rows - 1](job) };
    }

    /// C (+)= A·B for `rows` × `product.columns` of C, without bias or residual.
    ///
    /// # Safety
    /// As [`Kernels::panel`], for all panels of `product`.
    pub unsafe fn block(&self, layout: Layout, rows: usize, product: &Product) {
        for column in (0..product.columns).step_by(self.columns) {
            let tile = Tile {
                a: product.a,
                b: product.b.wrapping_add(column * product.depth),
                k: product.k,
                c: product.c.wrapping_add(column),
                c_row: product.c_row,
                columns: self.columns.min(product.columns - column),
                accumulate: product.accumulate,
                epilogue: RawEpilogue::NONE,
            };
            // SAFETY: the caller's promise.
            unsafe { self.panel(layout, rows, tile) };
        }
    }
}

/// A small product from packed operands, for [`Kernels::block`].
pub struct Product {
    /// First row of A, in the layout named in the call.
    pub a: *const f32,
    /// First line of the first packed panel that takes part.
    pub b: *const f32,
    /// Lines of a packed panel, those that take no part included.
    pub depth: usize,
    /// Lines that take part.
    pub k: usize,
    /// First element of C.
    pub c: *mut f32,
    /// Distance between rows of C.
    pub c_row: usize,
    /// Columns of C.
    pub columns: usize,
    /// Whether C's values are added to.
    pub accumulate: bool,
}

/// `ROWS` × 2 vectors of C. Fused multiply-adds in the order of k, or of pairs of k, one accumulator per element.
#[inline(always)]
#[expect(clippy::needless_range_loop, reason = "indexing by a constant range unrolls into registers")]
unsafe fn micro<V: Vector, const ROWS: usize, const A_ROW: usize, const A_K: usize>(tile: &Tile) {
    // SAFETY: the tile's promise; the features are those of the wrapper that this is inlined into.
    unsafe {
        let mut sums = [[V::splat(0.0); 2]; ROWS];
        let (mut a, mut b) = (tile.a, tile.b);
        for _ in 0..tile.k {
            let panel = [V::load(b), V::load(b.add(V::LANES))];
            for row in 0..ROWS {
                let x = V::splat(*a.add(row * A_ROW));
                sums[row][0] = x.mul_add(panel[0], sums[row][0]);
                sums[row][1] = x.mul_add(panel[1], sums[row][1]);
            }
            a = a.add(A_K);
            b = b.add(2 * V::LANES);
        }

        match tile.columns < 2 * V::LANES {
            true => finish_narrow(tile, &lines_of(&sums)),
            false => finish(tile, sums),
        }
    }
}

/// A few rows of C, with the order of summation of [`micro`], by columns of B as they lie in memory: a decoded token reads each
/// weight once, so that packing it first would take longer than using it.
#[inline(always)]
#[expect(clippy::needless_range_loop, reason = "indexing by a constant range unrolls into registers")]
unsafe fn in_place<V: Vector, const ROWS: usize>(job: &InPlace) {
    let &InPlace { ref tile, a_row, b_column, next } = job;
    // SAFETY: the job's promise; the features are those of the wrapper that this is inlined into.
    unsafe {
        let (mut sums, mut done) = ([[V::splat(0.0)]; ROWS], 0);
        if tile.columns == V::LANES {
            done = tile.k - tile.k % V::LANES;
            for k in (0..done).step_by(V::LANES) {
                for line in (0..V::LANES * V::LANES).step_by(LINE) {
                    prefetch_far(next.wrapping_add(k * V::LANES + line));
                }
                V::transpose(tile.b.add(k), b_column, |i, register| {
                    for row in 0..ROWS {
                        sums[row][0] = V::splat(*tile.a.add(row * a_row + k + i)).mul_add(register, sums[row][0]);
                    }
                });
            }
            if done == tile.k {
                finish(tile, sums);
                return;
            }
        }
        let mut lines = lines_of(&sums);
        for (row, line) in lines.iter_mut().enumerate() {
            for (column, sum) in line[..tile.columns].iter_mut().enumerate() {
                for k in done..tile.k {
                    *sum = (*tile.a.add(row * a_row + k)).mul_add(*tile.b.add(column * b_column + k), *sum);
                }
            }
        }
        finish_narrow(tile, &lines);
    }
}

/// Compiles the kernels for one level, with micro-kernels of the given numbers of rows.
macro_rules! level {
    ($module:ident, $vector:ty, [$($rows:literal)*] $(, $feature:literal)?) => {
        mod $module {
            use super::*;

            $(#[target_feature(enable = $feature)])?
            unsafe fn micro<const ROWS: usize, const A_ROW: usize, const A_K: usize>(tile: &Tile) {
                // SAFETY: the caller's promise.
                unsafe { super::micro::<$vector, ROWS, A_ROW, A_K>(tile) }
            }

            $(#[target_feature(enable = $feature)])?
            unsafe fn pack_panel(source: &pack::Source, k: usize, columns: usize, to: *mut f32) {
                // SAFETY: the caller's promise.
                unsafe { pack::panel::<$vector>(source, k, columns, to) }
            }

            $(#[target_feature(enable = $feature)])?
            unsafe fn pack_panel_bf16(source: &pack::Source<bf16>, k: usize, columns: usize, to: *mut f32) {
                // SAFETY: the caller's promise.
                unsafe { pack::panel_bf16::<$vector>(source, k, columns, to) }
            }

            $(#[target_feature(enable = $feature)])?
            unsafe fn pack_rows_bf16(
                source: &pack::Source<bf16>,
                rows: usize,
                k: usize,
                layout: Layout,
                to: &PackedA,
            ) {
                // SAFETY: the caller's promise.
                unsafe {
                    match <$vector>::IS_PAIRS {
                        true => pack::rows_of_pairs(source, rows, k, layout, to),
                        false => pack::rows(source, rows, k, layout, to),
                    }
                }
            }

            $(#[target_feature(enable = $feature)])?
            unsafe fn in_place<const ROWS: usize>(job: &InPlace) {
                // SAFETY: the caller's promise.
                unsafe { super::in_place::<$vector, ROWS>(job) }
            }

            pub(super) static KERNELS: Kernels = Kernels {
                columns: 2 * <$vector>::LANES,
                k_of_line: if <$vector>::IS_PAIRS { 2 } else { 1 },
                micro: [
                    &[$(micro::<$rows, ROW_STRIDE, 1>),*],
                    &[$(micro::<$rows, 1, COLUMN_STRIDE>),*],
                    &[$(micro::<$rows, 1, ROW_STRIDE>),*],
                ],
                pack_panel,
                pack_panel_bf16,
                pack_rows_bf16,
                in_place: &[$(in_place::<$rows>),*],
            };
        }
    };
}

// 24, 12, 24 and 12 accumulators of 32, 16, 32 and unknown registers.
#[cfg(target_arch = "x86_64")]
level!(avx512, __m512, [1 2 3 4 5 6 7 8 9 10 11 12], "avx512f,avx2,fma");
#[cfg(target_arch = "x86_64")]
level!(avx512_bf16, Pairs, [1 2 3 4 5 6 7 8 9 10 11 12], "avx512f,avx512bf16,avx2,fma");
#[cfg(target_arch = "x86_64")]
level!(avx2, __m256, [1 2 3 4 5 6], "avx2,fma");
#[cfg(target_arch = "aarch64")]
level!(neon, float32x4_t, [1 2 3 4 5 6 7 8 9 10 11 12], "neon");
level!(portable, Lanes, [1 2 3 4 5 6]);

//! The micro-kernels: products of a few rows of A and one panel of B, with the sums in registers.
//!
//! In: one k block of A (rows in one of the fixed layouts of [`Layout`]) and of B (a packed panel). Out: a tile of C.
//! Never: a second accumulator per element, which would change the order of summation.

#[cfg(target_arch = "aarch64")]
use std::arch::aarch64::float32x4_t;
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{__m256, __m512};

use half::bf16;

use super::finish::{RawEpilogue, finish, finish_narrow, lines_of};
use super::place::PackedA;
use super::{Strides, pack};
use crate::cpu::Float;
#[cfg(target_arch = "x86_64")]
use crate::cpu::peak::Bf16Products;
#[cfg(target_arch = "x86_64")]
use crate::cpu::simd::Pairs;
use crate::cpu::simd::{Lanes, Level, Vector, prefetch};

/// Distance between rows of A in [`Layout::Rows`]. If it were a multiple of 1024, the rows would share cache sets.
pub const ROW_STRIDE: usize = 400;
/// Distance between successive k of A in [`Layout::Columns`]: twice the number of rows of the tallest micro-kernel.
pub const COLUMN_STRIDE: usize = 24;

/// The layout of a packed k block of A.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// Contiguous along k. Packed rows are [`ROW_STRIDE`] apart.
    Rows,
    /// Contiguous along rows; successive k are [`COLUMN_STRIDE`] apart.
    Columns,
    /// Contiguous along rows; successive k are [`ROW_STRIDE`] apart. This is [`Layout::Rows`] read as its transpose.
    WideColumns,
}

impl Layout {
    /// Distance from one row to the next.
    pub fn row(self) -> usize {
        if self == Self::Rows { ROW_STRIDE } else { 1 }
    }

    /// Distance from one line to the next.
    pub const fn line(self) -> usize {
        match self {
            Self::Rows => 1,
            Self::Columns => COLUMN_STRIDE,
            Self::WideColumns => ROW_STRIDE,
        }
    }
}

/// The operands of one micro-kernel call.
pub struct Tile {
    /// First row of A's block, in the layout that the micro-kernel expects. It need not be aligned.
    pub a: *const f32,
    /// Distance between rows of A in [`Layout::Rows`].
    pub a_row: usize,
    /// The packed panel of B: `k` × [`Kernels::columns`] floats.
    pub b: *const f32,
    /// Lines of the k block.
    pub k: usize,
    /// First element of the tile in C.
    pub c: *mut f32,
    /// Distance between rows of C and of `residual`.
    pub c_row: usize,
    /// Columns of C that exist, at most [`Kernels::columns`].
    pub columns: usize,
    /// True if the sums are added to C's values.
    pub accumulate: bool,
    /// Final operations on the tile, with addresses of the tile's first element.
    pub epilogue: RawEpilogue,
}

impl Tile {
    /// Prefetches the lines that the end of the tile reads or writes: two vectors of each row. Otherwise the sums would
    /// wait for C at the end, and the stores for their lines.
    #[inline(always)]
    fn prefetch<const ROWS: usize>(&self, lanes: usize) {
        let rounded = self.epilogue.rounded();
        for row in (0..ROWS).map(|row| row * self.c_row) {
            if self.accumulate || rounded.is_null() {
                prefetch(self.c.wrapping_add(row));
                prefetch(self.c.wrapping_add(row + lanes));
            }
            if !rounded.is_null() {
                prefetch(rounded.wrapping_add(row).cast());
            }
        }
    }
}

/// An element type of a product's operands: f32 or bf16.
pub trait Factor: Float {
    /// True for bf16.
    const IS_BF16: bool;

    /// Packs rows of A.
    ///
    /// # Safety
    /// `source` must have `rows` rows and `k` columns. `to` must have parts for all rows, and `k` and `rows` must fit
    /// the strides of the layout.
    unsafe fn pack_rows(
        kernels: &Kernels,
        source: &pack::Source<Self>,
        rows: usize,
        k: usize,
        layout: Layout,
        to: &PackedA,
    );

    /// Returns the address of the first of some rows of A with `k` columns, and the distance between rows, if
    /// micro-kernels can read the rows in place.
    fn rows_in_place(_: &Kernels, _: &pack::Source<Self>, _: usize) -> Option<(*const f32, usize)> {
        None
    }

    /// Packs a panel of B.
    ///
    /// # Safety
    /// The requirements of [`Kernels::pack_panel`] apply.
    unsafe fn pack_panel(kernels: &Kernels, source: &pack::Source<Self>, k: usize, columns: usize, to: *mut f32);

    /// Returns the address of an operand's elements if they are f32, or `None` if they are bf16.
    fn as_f32(factors: *const Self) -> Option<*const f32>;
}

impl Factor for f32 {
    const IS_BF16: bool = false;

    #[inline]
    unsafe fn pack_rows(_: &Kernels, source: &pack::Source, rows: usize, k: usize, layout: Layout, to: &PackedA) {
        // SAFETY: by this function's contract.
        unsafe { pack::rows(source, rows, k, layout, to) }
    }

    #[inline]
    unsafe fn pack_panel(kernels: &Kernels, source: &pack::Source<Self>, k: usize, columns: usize, to: *mut f32) {
        // SAFETY: by this function's contract.
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
        // SAFETY: by this function's contract.
        unsafe { (kernels.pack_rows_bf16)(source, rows, k, layout, to) }
    }

    /// In place, two adjacent values already form a lane.
    #[inline]
    fn rows_in_place(kernels: &Kernels, source: &pack::Source<Self>, k: usize) -> Option<(*const f32, usize)> {
        /// The rows of a micro-kernel would share too few cache sets if they were a multiple of this length apart.
        const SAME_SETS: usize = 1024;
        let Strides { row, column } = source.strides;
        let are_lanes = kernels.k_of_line == 2 && column == 1 && row.is_multiple_of(2) && k.is_multiple_of(2);
        (are_lanes && !row.is_multiple_of(SAME_SETS)).then_some((source.start.cast(), row / 2))
    }

    #[inline]
    unsafe fn pack_panel(kernels: &Kernels, source: &pack::Source<Self>, k: usize, columns: usize, to: *mut f32) {
        // SAFETY: by this function's contract.
        unsafe { (kernels.pack_panel_bf16)(source, k, columns, to) }
    }

    #[inline]
    fn as_f32(_: *const Self) -> Option<*const f32> {
        None
    }
}

/// A product of a few rows of A by columns of B, with both read in place. Both must be contiguous along k.
pub struct InPlace {
    /// The operands. A and B point to the first k of the k block. The tile has at most as many columns as a vector has
    /// lanes.
    pub tile: Tile,
    /// Distance between rows of A.
    pub a_row: usize,
    /// Distance between columns of B.
    pub b_column: usize,
    /// Address of the data that is read after these columns, which is prefetched. Any address is allowed.
    pub next: *const f32,
}

/// Floats in a cache line.
const LINE: usize = 16;

type Micro = unsafe fn(&Tile);

/// The kernels of one [`Level`].
pub struct Kernels {
    /// Columns of a panel of B.
    pub columns: usize,
    /// Number of k that one line of packed operands holds: 1, or 2 for pairs of bf16.
    pub k_of_line: usize,
    /// Micro-kernels, indexed by the layout of A, and then by the number of rows − 1.
    micro: [&'static [Micro]; 3],
    /// Packs a panel of f32.
    pub pack_panel: unsafe fn(&pack::Source, usize, usize, *mut f32),
    /// Packs a panel of bf16.
    pub pack_panel_bf16: unsafe fn(&pack::Source<bf16>, usize, usize, *mut f32),
    /// Packs rows of A in bf16.
    pub pack_rows_bf16: unsafe fn(&pack::Source<bf16>, usize, usize, Layout, &PackedA),
    /// Kernels that read both operands in place, indexed by the number of rows − 1.
    in_place: &'static [unsafe fn(&InPlace)],
}

impl Kernels {
    /// Returns the kernels of a level, which must be [available](Level::is_available).
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

    /// Returns the kernels of a level for two bf16 operands.
    pub fn of_bf16(level: Level) -> &'static Self {
        match level {
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 if Bf16Products::chosen() == Bf16Products::Pairs => &avx512_bf16::KERNELS,
            _ => Self::of(level),
        }
    }

    /// Returns the number of rows of the tallest micro-kernel.
    pub fn rows(&self) -> usize {
        self.micro[0].len()
    }

    /// Returns the number of packed lines for `k` rows of B.
    pub fn lines(&self, k: usize) -> usize {
        k.div_ceil(self.k_of_line)
    }

    /// Computes `rows` rows of one panel, with the tallest micro-kernels first.
    ///
    /// # Safety
    /// `tile` must describe memory that is valid for `rows` rows. No other code may access its part of C during the
    /// call.
    #[inline]
    pub unsafe fn panel(&self, layout: Layout, rows: usize, mut tile: Tile) {
        let micro = self.micro[layout as usize];
        let a_row = if layout == Layout::Rows { tile.a_row } else { 1 };
        let mut left = rows;
        while left > 0 {
            let height = left.min(micro.len());
            // SAFETY: the level was checked when this table was returned. By this function's contract, the tile is
            // valid.
            unsafe { micro[height - 1](&tile) };
            tile.a = tile.a.wrapping_add(height * a_row);
            tile.c = tile.c.wrapping_add(height * tile.c_row);
            tile.epilogue = tile.epilogue.from(height * tile.c_row, 0);
            left -= height;
        }
    }

    /// Computes `rows` rows and at most one vector of columns. There must be no more rows than the tallest
    /// micro-kernel has.
    ///
    /// # Safety
    /// The requirements of [`Kernels::panel`] apply.
    #[inline]
    pub unsafe fn in_place(&self, rows: usize, job: &InPlace) {
        // SAFETY: by this function's contract.
        unsafe { self.in_place[rows - 1](job) };
    }

    /// Computes C = A·B or C += A·B for `rows` × `product.columns` of C, without bias or residual.
    ///
    /// # Safety
    /// The same as for [`Kernels::panel`], for all panels of `product`.
    pub unsafe fn block(&self, layout: Layout, rows: usize, product: &Product) {
        for column in (0..product.columns).step_by(self.columns) {
            let tile = Tile {
                a: product.a,
                a_row: product.a_row,
                b: product.b.wrapping_add(column * product.depth),
                k: product.k,
                c: product.c.wrapping_add(column),
                c_row: product.c_row,
                columns: self.columns.min(product.columns - column),
                accumulate: product.accumulate,
                epilogue: RawEpilogue::NONE,
            };
            // SAFETY: by this function's contract.
            unsafe { self.panel(layout, rows, tile) };
        }
    }
}

/// A small product of packed operands, for [`Kernels::block`].
pub struct Product {
    /// First row of A, in the layout given to the call. It need not be aligned.
    pub a: *const f32,
    /// Distance between rows of A in [`Layout::Rows`].
    pub a_row: usize,
    /// First line of the first packed panel to multiply by.
    pub b: *const f32,
    /// Number of lines of a packed panel, including those that are not multiplied.
    pub depth: usize,
    /// Lines to multiply.
    pub k: usize,
    /// First element of C.
    pub c: *mut f32,
    /// Distance between rows of C.
    pub c_row: usize,
    /// Columns of C.
    pub columns: usize,
    /// True if the product is added to C's values.
    pub accumulate: bool,
}

/// Computes `ROWS` × 2 vectors of C, with one accumulator per element. The fused multiply-adds are in the order of k,
/// or of pairs of k.
#[inline(always)]
#[expect(clippy::needless_range_loop, reason = "indexing by a constant range unrolls into registers")]
unsafe fn micro<V: Vector, const ROWS: usize, const IS_COLUMNS: bool, const A_K: usize>(tile: &Tile) {
    // SAFETY: the tile is valid. The wrapper into which this is inlined has the features.
    unsafe {
        let mut sums = [[V::splat(0.0); 2]; ROWS];
        let a_row = if IS_COLUMNS { 1 } else { tile.a_row };
        let (mut a, mut b) = (tile.a, tile.b);
        tile.prefetch::<ROWS>(V::LANES);
        for _ in 0..tile.k {
            let panel = [V::load(b), V::load(b.add(V::LANES))];
            for row in 0..ROWS {
                let x = V::splat(a.add(row * a_row).read_unaligned());
                sums[row][0] = x.mul_add(panel[0], sums[row][0]);
                sums[row][1] = x.mul_add(panel[1], sums[row][1]);
            }
            a = a.add(A_K);
            b = b.add(2 * V::LANES);
        }

        match tile.columns < 2 * V::LANES {
            true => finish_narrow::<V>(tile, &lines_of(&sums).0),
            false => finish(tile, sums),
        }
    }
}

/// Computes a few rows of C by columns of B that are read in place, with the order of summation of [`micro`]. When a
/// token is decoded, each weight is read only once, so packing a weight would take longer than multiplying by it.
#[inline(always)]
#[expect(clippy::needless_range_loop, reason = "indexing by a constant range unrolls into registers")]
unsafe fn in_place<V: Vector, const ROWS: usize>(job: &InPlace) {
    let &InPlace { ref tile, a_row, b_column, next } = job;
    // SAFETY: the job's addresses are valid. The wrapper into which this is inlined has the features.
    unsafe {
        let (mut sums, mut done) = ([[V::splat(0.0)]; ROWS], 0);
        if tile.columns == V::LANES {
            done = tile.k - tile.k % V::LANES;
            for k in (0..done).step_by(V::LANES) {
                for line in (0..V::LANES * V::LANES).step_by(LINE) {
                    prefetch(next.wrapping_add(k * V::LANES + line));
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
        for (row, line) in lines.0.iter_mut().enumerate() {
            for (column, sum) in line[..tile.columns].iter_mut().enumerate() {
                for k in done..tile.k {
                    *sum = (*tile.a.add(row * a_row + k)).mul_add(*tile.b.add(column * b_column + k), *sum);
                }
            }
        }
        finish_narrow::<V>(tile, &lines.0);
    }
}

/// Compiles the kernels for one level, with micro-kernels of the given numbers of rows.
macro_rules! level {
    ($module:ident, $vector:ty, [$($rows:literal)*] $(, $feature:literal)?) => {
        mod $module {
            use super::*;

            $(#[target_feature(enable = $feature)])?
            unsafe fn micro<const ROWS: usize, const IS_COLUMNS: bool, const A_K: usize>(tile: &Tile) {
                // SAFETY: by the contract of the inlined function.
                unsafe { super::micro::<$vector, ROWS, IS_COLUMNS, A_K>(tile) }
            }

            $(#[target_feature(enable = $feature)])?
            unsafe fn pack_panel(source: &pack::Source, k: usize, columns: usize, to: *mut f32) {
                // SAFETY: by the contract of the inlined function.
                unsafe { pack::panel::<$vector>(source, k, columns, to) }
            }

            $(#[target_feature(enable = $feature)])?
            unsafe fn pack_panel_bf16(source: &pack::Source<bf16>, k: usize, columns: usize, to: *mut f32) {
                // SAFETY: by the contract of the inlined function.
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
                // SAFETY: by the contract of the inlined function.
                unsafe {
                    match <$vector>::IS_PAIRS {
                        true => pack::rows_of_pairs(source, rows, k, layout, to),
                        false => pack::rows(source, rows, k, layout, to),
                    }
                }
            }

            $(#[target_feature(enable = $feature)])?
            unsafe fn in_place<const ROWS: usize>(job: &InPlace) {
                // SAFETY: by the contract of the inlined function.
                unsafe { super::in_place::<$vector, ROWS>(job) }
            }

            pub(super) static KERNELS: Kernels = Kernels {
                columns: 2 * <$vector>::LANES,
                k_of_line: if <$vector>::IS_PAIRS { 2 } else { 1 },
                micro: [
                    &[$(micro::<$rows, false, { Layout::Rows.line() }>),*],
                    &[$(micro::<$rows, true, { Layout::Columns.line() }>),*],
                    &[$(micro::<$rows, true, { Layout::WideColumns.line() }>),*],
                ],
                pack_panel,
                pack_panel_bf16,
                pack_rows_bf16,
                in_place: &[$(in_place::<$rows>),*],
            };
        }
    };
}

// The numbers of rows are chosen by registers. Accumulators take 24 of 32 registers for AVX-512, 12 of 16 for AVX2, and
// 24 of 32 for NEON. The portable level does not know its number of registers, and its accumulators take 12.
#[cfg(target_arch = "x86_64")]
level!(avx512, __m512, [1 2 3 4 5 6 7 8 9 10 11 12], "avx512f,avx2,fma");
#[cfg(target_arch = "x86_64")]
level!(avx512_bf16, Pairs, [1 2 3 4 5 6 7 8 9 10 11 12], "avx512f,avx512bf16,avx2,fma");
#[cfg(target_arch = "x86_64")]
level!(avx2, __m256, [1 2 3 4 5 6], "avx2,fma");
#[cfg(target_arch = "aarch64")]
level!(neon, float32x4_t, [1 2 3 4 5 6 7 8 9 10 11 12], "neon");
level!(portable, Lanes, [1 2 3 4 5 6]);

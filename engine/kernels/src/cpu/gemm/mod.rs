//! C = A·B in `f32`, with scratch from the caller and a fixed order of summation.
//!
//! In: two matrices with any strides, so that one implementation covers all four combinations of transposes. Out:
//! row-major C, with an optional bias and residual added while a tile is in cache, optionally rounded to bf16. Never:
//! a heap allocation, or a result that depends on the number of threads.
//!
//! The operands A and B may be bf16. They are widened to f32 when they are packed, so the result is bit-identical to
//! the f32 product of the same values. If both are bf16 and the processor has `vdpbf16ps`, they may be packed as pairs
//! along k instead.
//!
//! # Order of summation
//! k is cut into segments of [`Gemm::k_segment`], and each segment into runs of at most [`BLOCK_K`] (twice as many for
//! pairs). Within a run, each element of C has one accumulator. It starts at zero and takes fused multiply-adds in the
//! order of k. The runs' sums are added to C in order, then the bias, then the residual. It follows that:
//! - One call with k = 8·s and `k_segment` = s gives the same bits as eight accumulating calls with k = s.
//! - Tiles, threads and the instruction set do not change a bit.
//!
//! With pairs of bf16, an accumulator takes two products at a time, in the order of `vdpbf16ps`, which rounds after
//! each product and treats subnormals as zeros, as does the instruction that rounds results to bf16. If a run has an odd
//! number of k, the last one is paired with 0. The two consequences above hold for pairs too, except that the bits differ
//! from those of other instruction sets.
//!
//! # How it runs
//! The scheme is that of Goto and van de Geijn ("Anatomy of High-Performance Matrix Multiplication", 2008). First all
//! threads pack B into panels. Then each thread repeatedly takes a block of rows, packs its rows of A into the
//! thread's own scratch, and multiplies them from cache. There are two exceptions:
//! - With few rows, or many matrices (one per expert), or so many columns for the rows as a head has, each thread packs
//!   the columns of B that it needs itself.
//! - With at most as many rows as a micro-kernel has, as for decoded tokens, f32 operands that are contiguous along k
//!   are not packed but read in place.
//!
//! Rows of A in bf16 that are contiguous along k are read in place too if they are multiplied in pairs. In f32 this gained
//! nothing.

mod drive;
mod finish;
mod grouped;
pub mod kernel;
pub mod pack;
mod place;
#[cfg(test)]
pub mod tests;

use half::bf16;

use self::drive::Operands;
use self::finish::RawEpilogue;
use self::kernel::Kernels;
use self::place::Packing;
use crate::cpu::scratch::Scratch;
use crate::cpu::simd::Level;

pub use self::grouped::Groups;
pub use self::kernel::Factor;
pub use self::place::BLOCK_K;

/// Distances in elements between neighbouring rows and between neighbouring columns of a matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Strides {
    /// From one row to the next.
    pub row: usize,
    /// From one column to the next.
    pub column: usize,
}

impl Strides {
    /// The strides of a matrix stored row by row, with rows `row` elements apart.
    pub fn row_major(row: usize) -> Self {
        Self { row, column: 1 }
    }

    /// The strides of the transpose of a matrix that is stored row by row, with rows `row` elements apart.
    pub fn transposed(row: usize) -> Self {
        Self { row: 1, column: row }
    }
}

/// Several products of one shape. Matrix i of an operand begins i × the operand's distance after the first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Batch {
    /// Number of products.
    pub count: usize,
    /// Distance in elements between successive matrices of A. If it is 0, all products use the same A.
    pub a: usize,
    /// Distance in elements between successive matrices of B. If it is 0, all products use the same B.
    pub b: usize,
    /// Distance in elements between successive matrices of C and of the residual.
    pub c: usize,
}

impl Batch {
    /// A single product.
    pub const ONE: Self = Self { count: 1, a: 0, b: 0, c: 0 };
}

/// The shape of a product: C\[m×n\] from A\[m×k\] and B\[k×n\].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gemm {
    /// Rows of A and C.
    pub m: usize,
    /// Columns of B and C.
    pub n: usize,
    /// Columns of A, rows of B.
    pub k: usize,
    /// Strides of A.
    pub a: Strides,
    /// Strides of B.
    pub b: Strides,
    /// Distance in elements between rows of C, and between rows of the residual.
    pub c_row: usize,
    /// Length of a segment of k. The order of summation restarts at each multiple of this length. `usize::MAX` means a
    /// single segment.
    pub k_segment: usize,
    /// The number of products, and the distances between their operands.
    pub batch: Batch,
}

/// The treatment of C's old values: they are overwritten, or the product is added to them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// C = A·B. C may hold anything before, including NaN.
    Overwrite,
    /// C = C + A·B.
    Accumulate,
}

/// Final operations on each tile of C.
#[derive(Debug, Default)]
pub struct Epilogue<'a> {
    /// One value per column to add.
    pub bias: Option<&'a [f32]>,
    /// A matrix to add, with the layout of C.
    pub residual: Option<&'a [f32]>,
    /// The tensor that receives the result, with the layout of C, rounded to the nearest bf16. C itself then only
    /// holds partial sums, and its contents are undefined afterwards.
    pub rounded: Option<&'a mut [bf16]>,
}

/// The reason why a product cannot run.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GemmError {
    /// A slice is too short for its matrix.
    #[error(
        "{operand} of a {m}×{n}×{k} product needs {needed} elements, its slice has {given}; \
         give all of the matrix, or correct its strides"
    )]
    TooShort {
        /// Name of the slice: "A", "B", "C", "bias", "residual", "rounded C", or "scratch" for one of its pieces.
        operand: &'static str,
        /// Rows of the product.
        m: usize,
        /// Columns of the product.
        n: usize,
        /// Inner length of the product.
        k: usize,
        /// Number of elements that the slice must have: the largest offset that the strides address, plus one.
        needed: usize,
        /// Elements that were given.
        given: usize,
    },
    /// An operand's extent overflows the address space.
    #[error("{operand}'s strides address elements outside the address space; correct them")]
    TooLarge {
        /// "A", "B" or "C".
        operand: &'static str,
    },
    /// Two elements of C would share an address.
    #[error("C's rows of {n} columns, {c_row} apart, {count} matrices {batch_c} apart, overlap; keep them apart")]
    Overlap {
        /// Columns of C.
        n: usize,
        /// Distance between rows of C.
        c_row: usize,
        /// Number of matrices.
        count: usize,
        /// Distance between matrices.
        batch_c: usize,
    },
    /// The starts of runs descend, or do not give each group the same number of runs.
    #[error(
        "{starts} starts do not fit {groups} groups; give the same number of ascending starts for each group, and the end of the last"
    )]
    Groups {
        /// The number of starts given.
        starts: usize,
        /// The number of groups.
        groups: usize,
    },
    /// A segment length of zero.
    #[error("k_segment is 0; give its length, or usize::MAX for a single segment")]
    EmptySegment,
}

impl Gemm {
    /// Creates a single product with one segment, and with C's rows adjacent.
    pub fn new(m: usize, n: usize, k: usize, a: Strides, b: Strides) -> Self {
        Self { m, n, k, a, b, c_row: n, k_segment: usize::MAX, batch: Batch::ONE }
    }

    /// Returns the same product with another [`Gemm::k_segment`].
    pub fn with_segment(self, k_segment: usize) -> Self {
        Self { k_segment, ..self }
    }

    /// Returns the same product for each matrix of a batch.
    pub fn with_batch(self, batch: Batch) -> Self {
        Self { batch, ..self }
    }

    /// Returns the floating-point operations of one call.
    pub fn flops(&self) -> u64 {
        2 * (self.batch.count as u64) * (self.m as u64) * (self.n as u64) * (self.k as u64)
    }

    /// Returns the sizes in bytes of the pieces of scratch that [`Gemm::run`] needs in a pool of `threads` threads.
    pub fn scratch(&self, threads: usize) -> Vec<u64> {
        Packing::new(self, threads).bytes().collect()
    }

    /// Multiplies on all threads of the current rayon pool.
    ///
    /// # Errors
    /// Returns an error, and writes nothing, if
    /// - a slice is too short for its strides,
    /// - the scratch is too small for [`Gemm::scratch`] of the current pool,
    /// - rows or matrices of C overlap, or
    /// - a segment has length zero.
    pub fn run<A: Factor, B: Factor>(
        &self,
        a: &[A],
        b: &[B],
        c: &mut [f32],
        mode: Mode,
        epilogue: Epilogue<'_>,
        scratch: &mut Scratch<'_>,
    ) -> Result<(), GemmError> {
        self.run_at(Level::best(), a, b, c, mode, epilogue, scratch)
    }

    /// Like [`Gemm::run`], on a chosen level, so that levels can be compared. The level must be available.
    ///
    /// # Errors
    /// Returns the errors of [`Gemm::run`].
    #[expect(clippy::too_many_arguments, reason = "the operands of a product")]
    pub fn run_at<A: Factor, B: Factor>(
        &self,
        level: Level,
        a: &[A],
        b: &[B],
        c: &mut [f32],
        mode: Mode,
        epilogue: Epilogue<'_>,
        scratch: &mut Scratch<'_>,
    ) -> Result<(), GemmError> {
        let packing = Packing::new(self, rayon::current_num_threads());
        self.check(packing, a, b, c, &epilogue, scratch)?;
        let operands = Operands {
            a: a.as_ptr(),
            b: b.as_ptr(),
            c: c.as_mut_ptr(),
            accumulate: mode == Mode::Accumulate,
            epilogue: RawEpilogue::of(epilogue),
            scratch,
            packing,
            restarts: &[],
        };
        // SAFETY: `check` has compared every extent with its slice. C and the scratch are borrowed exclusively.
        unsafe { drive::run(self, kernels_of::<A, B>(level), operands) };
        Ok(())
    }

    fn check<A, B>(
        &self,
        packing: Packing,
        a: &[A],
        b: &[B],
        c: &[f32],
        epilogue: &Epilogue<'_>,
        scratch: &Scratch,
    ) -> Result<(), GemmError> {
        let &Self { m, n, k, c_row, batch, .. } = self;
        if self.k_segment == 0 {
            return Err(GemmError::EmptySegment);
        }
        let c_strides = Strides::row_major(c_row);
        let c_needed = extent("C", m, n, c_strides, batch.count, batch.c)?;
        let operands = [
            ("A", extent("A", m, k, self.a, batch.count, batch.a)?, Some(a.len())),
            ("B", extent("B", k, n, self.b, batch.count, batch.b)?, Some(b.len())),
            ("C", c_needed, Some(c.len())),
            ("bias", n, epilogue.bias.map(<[f32]>::len)),
            ("residual", c_needed, epilogue.residual.map(<[f32]>::len)),
            ("rounded C", c_needed, epilogue.rounded.as_deref().map(<[bf16]>::len)),
        ];
        for (operand, needed, given) in operands {
            if let Some(given) = given
                && given < needed
            {
                return Err(GemmError::TooShort { operand, m, n, k, needed, given });
            }
        }
        if let Some((needed, given)) = scratch.too_short(packing.bytes()) {
            return Err(GemmError::TooShort { operand: "scratch", m, n, k, needed, given });
        }
        let one = extent("C", m, n, c_strides, 1, 0)?;
        let rows_apart = m <= 1 || c_row >= n;
        // Matrices of C either follow one another, or lie next to each other in wider rows.
        let beside = batch.c >= n && (m <= 1 || batch.count.saturating_mul(batch.c) <= c_row);
        let matrices_apart = batch.count <= 1 || batch.c >= one || beside;
        if c_needed > 0 && !(rows_apart && matrices_apart) {
            return Err(GemmError::Overlap { n, c_row, count: batch.count, batch_c: batch.c });
        }
        Ok(())
    }
}

/// The kernels for operands of these types.
fn kernels_of<A: Factor, B: Factor>(level: Level) -> &'static Kernels {
    if A::IS_BF16 && B::IS_BF16 { Kernels::of_bf16(level) } else { Kernels::of(level) }
}

/// Returns the number of elements that the slice of a batch of matrices must have: the largest offset of an element,
/// plus one.
fn extent(
    operand: &'static str,
    rows: usize,
    columns: usize,
    strides: Strides,
    count: usize,
    distance: usize,
) -> Result<usize, GemmError> {
    if rows == 0 || columns == 0 || count == 0 {
        return Ok(0);
    }
    let last = |length: usize, stride: usize| (length - 1).checked_mul(stride);
    let reach = || {
        let row = last(rows, strides.row)?;
        let column = last(columns, strides.column)?;
        let matrix = last(count, distance)?;
        row.checked_add(column)?.checked_add(matrix)?.checked_add(1)
    };
    reach().filter(|&reach| reach <= isize::MAX as usize / size_of::<f32>()).ok_or(GemmError::TooLarge { operand })
}

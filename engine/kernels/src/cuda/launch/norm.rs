//! Launches of norm.cu.

use candle_core::DType;

use super::reduce::{Fold, Pieces, SUMMING, blocks_of_columns};
use super::{Arguments, FOLD_BYTES, Kernel, Launch, Operand, Operands, blocks, launches, pack, typed};
use crate::Spec;
use crate::cuda::Family::{self, Norm};

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct NormArguments {
    x: u64,
    weight: u64,
    bias: u64,
    y: u64,
    stats: u64,
    width: u64,
    rows: u64,
    eps: f32,
    row_threads: u32,
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct NormGradInputArguments {
    x: u64,
    weight: u64,
    stats: u64,
    dy: u64,
    dx: u64,
    width: u64,
    rows: u64,
    is_centred: u32,
    row_threads: u32,
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct NormGradWeightArguments {
    x: u64,
    stats: u64,
    dy: u64,
    fold: Fold,
}

/// The assignment of rows to blocks. Each block processes one or several rows at a time, with the same number of
/// threads for each.
#[derive(Debug, Clone, Copy)]
pub(in crate::cuda) struct RowBlocks {
    /// Number of threads per row, a multiple of 32.
    pub(in crate::cuda) row_threads: u32,
    block: u32,
    grid: u32,
    shared_bytes: u32,
    tickets: u32,
}

/// Threads per block, unless a row needs more.
const FEW_THREADS: u64 = 256;

/// Most threads per row.
pub(in crate::cuda) const MOST_THREADS: u64 = 512;

/// Packs of a row that a thread holds in registers: `NORM_CHUNKS` of norm.cuh.
const NORM_CHUNKS: u64 = 4;

/// Most packs of a row that a thread holds in registers when it computes a gradient.
const GRAD_CHUNKS: u64 = 2;

impl RowBlocks {
    /// Assigns the rows of x to blocks. A reduction adds up `sums` values per row at once.
    fn new(x: &Operand, row_threads: u64, sums: u32) -> Self {
        let side_by_side = (FEW_THREADS / row_threads).max(1);
        Self {
            row_threads: row_threads as u32,
            block: (row_threads * side_by_side) as u32,
            grid: blocks(rows(x), side_by_side as u32),
            shared_bytes: sums * FOLD_BYTES,
            tickets: 0,
        }
    }

    /// Assigns the rows of x to blocks for their normalization.
    pub(in crate::cuda) fn norm(x: &Operand) -> Self {
        Self::new(x, x.packs().div_ceil(NORM_CHUNKS).next_multiple_of(32).clamp(32, MOST_THREADS), 1)
    }

    /// Assigns the rows of x to blocks for the gradient of x.
    pub(in crate::cuda) fn norm_grad(x: &Operand) -> Self {
        Self::new(x, grad_threads(x.packs()), 2)
    }

    /// Returns the kernel with this assignment of rows, and with the given arguments.
    pub(in crate::cuda) fn kernel(self, family: Family, name: String, arguments: impl Arguments + 'static) -> Kernel {
        let Self { block, grid, shared_bytes, tickets, .. } = self;
        Kernel { family, name, grid: [grid, 1, 1], block, shared_bytes, tickets, arguments: Box::new(arguments) }
    }
}

/// Returns the number of threads that compute the gradient of a row: one for each pack, or one for two packs.
fn grad_threads(packs: u64) -> u64 {
    let threads = if packs <= FEW_THREADS { packs } else { packs.div_ceil(GRAD_CHUNKS) };
    threads.next_multiple_of(32).clamp(32, MOST_THREADS)
}

pub(in crate::cuda) fn rows(x: &Operand) -> u64 {
    x.count() / x.width().max(1)
}

/// Returns the launch that computes (y, stats) from (x, weight) and, for layer normalization, a bias.
pub fn norm(name: &str, eps: f64, operands: &Operands<'_>) -> Option<Vec<Launch>> {
    let ([x, weight, rest @ ..], [y, stats]) = (operands.inputs, operands.outputs) else { return None };
    let blocks = RowBlocks::norm(x);
    let arguments = NormArguments {
        x: x.address,
        weight: weight.address,
        bias: rest.first().map_or(0, |bias| bias.address),
        y: y.address,
        stats: stats.address,
        width: x.width(),
        rows: rows(x),
        eps: eps as f32,
        row_threads: blocks.row_threads,
    };
    launches([blocks.kernel(Norm, typed(name, x.dtype)?, arguments)])
}

/// Returns the launch that computes dx from (x, weight, stats, dy).
pub fn norm_grad_input(is_centred: bool, operands: &Operands<'_>) -> Option<Vec<Launch>> {
    let ([x, weight, stats, dy], [dx]) = (operands.inputs, operands.outputs) else { return None };
    let blocks = RowBlocks::norm_grad(x);
    let arguments = NormGradInputArguments {
        x: x.address,
        weight: weight.address,
        stats: stats.address,
        dy: dy.address,
        dx: dx.address,
        width: x.width(),
        rows: rows(x),
        is_centred: u32::from(is_centred),
        row_threads: blocks.row_threads,
    };
    launches([blocks.kernel(Norm, typed("norm_grad_input", x.dtype)?, arguments)])
}

/// Number of rows per piece. It is small, so that each multiprocessor has many pieces to process.
const PIECE: u64 = 32;

/// Divides rows into pieces for the gradients of weight and bias. Returns the pieces, and the number of shares in
/// each. The order of summation depends on both.
fn pieces(dims: &[usize], dtype: DType) -> (Pieces, u64) {
    let at_most = FEW_THREADS / grad_threads((crate::width(dims) as u64).div_ceil(pack(dtype)));
    let shares = 1 << at_most.max(1).ilog2();
    (Pieces::of(dims, PIECE, PIECE / shares), shares)
}

/// Returns the size of the workspace for [`norm_grad_weight`]: two f32 sums per piece and column.
pub fn norm_grad_weight_workspace(x: &Spec) -> Vec<u64> {
    let pieces = pieces(x.dims(), x.dtype).0.count();
    vec![2 * 4 * pieces * crate::width(x.dims()) as u64]
}

/// Returns the launch that computes (d_weight, d_bias) from (x, stats, dy).
pub fn norm_grad_weight(operands: &Operands<'_>) -> Option<Vec<Launch>> {
    let [x, stats, dy] = operands.inputs else { return None };
    let (pieces, _) = pieces(x.dims(), x.dtype);
    let fold = Fold::new(pieces, x.dtype, operands.outputs, operands, operands.accumulate)?;
    let blocks_side_by_side = blocks_of_columns(x.width(), SUMMING);
    launches([Kernel {
        family: Norm,
        name: typed("norm_grad_weight", x.dtype)?,
        grid: [blocks(pieces.count(), 1), blocks_side_by_side, 1],
        block: SUMMING,
        shared_bytes: 0,
        tickets: fold.tickets(blocks_side_by_side)?,
        arguments: Box::new(NormGradWeightArguments { x: x.address, stats: stats.address, dy: dy.address, fold }),
    }])
}

/// True if one kernel can compute all gradients of a norm in one pass. The rows must be short enough that a whole row
/// fits into registers.
pub fn fits_one_pass(x: &Spec) -> bool {
    crate::width(x.dims()) as u64 <= GRAD_CHUNKS * MOST_THREADS * pack(x.dtype)
}

/// The plan of one kernel that computes the gradients of x, weight and bias in one pass (`norm_grad_to` of norm.cuh).
#[derive(Debug)]
pub(in crate::cuda) struct OnePass {
    /// Number of packs per row that a thread holds in registers.
    pub(in crate::cuda) chunks: u64,
    /// Number of rows that a thread processes at a time.
    pub(in crate::cuda) rows: u64,
    /// The bounds for the compiler's use of registers: threads per block, and blocks per multiprocessor.
    pub(in crate::cuda) bounds: [u64; 2],
    /// The fields of the kernel's struct `Fold`.
    pub(in crate::cuda) fold: [u64; 12],
    pub(in crate::cuda) blocks: RowBlocks,
}

/// Returns the bounds for a block of this many threads: the number of threads, and the number of blocks that a
/// multiprocessor should hold. A thread of a kernel that is `light` gets by with 80 registers, so 768 threads fit. For
/// rows of 768 bf16 elements, 512 pieces then fit on 132 multiprocessors at once.
fn bounds_of(threads: u64, is_light: bool) -> [u64; 2] {
    let resident = if is_light { 768 } else { 512 };
    [threads, (resident / threads).max(1)]
}

impl OnePass {
    /// Plans the pass over the rows x, for the gradients `outs` of weight and bias. Returns `None` if the rows do not
    /// fit into registers, or if the sums cannot be stored in `outs`. The kernel is light if the operations that it
    /// fuses need few registers.
    pub(in crate::cuda) fn of(
        x: &Operand,
        outs: &[Operand],
        accumulate: u64,
        is_light: bool,
        operands: &Operands<'_>,
    ) -> Option<Self> {
        let (pieces, shares) = pieces(x.dims(), x.dtype);
        let fold = Fold::new(pieces, x.dtype, outs, operands, accumulate)?;
        let row_threads = grad_threads(x.packs());
        let (chunks, rows) = if x.packs() <= row_threads { (1, 2) } else { (GRAD_CHUNKS, 1) };
        // In shared memory, the sums of shares follow the scratch of the reductions over rows.
        let of_shares = if shares > 1 { 2 * 4 * shares * x.width() } else { 0 };
        let blocks = RowBlocks {
            row_threads: row_threads as u32,
            block: (row_threads * shares) as u32,
            grid: blocks(pieces.count(), 1),
            shared_bytes: 2 * rows as u32 * FOLD_BYTES + of_shares as u32,
            tickets: fold.tickets(1)?,
        };
        let bounds = bounds_of(row_threads * shares, is_light && chunks == 1);
        (x.packs() <= chunks * row_threads).then_some(Self { chunks, rows, bounds, fold: fold.words(), blocks })
    }
}

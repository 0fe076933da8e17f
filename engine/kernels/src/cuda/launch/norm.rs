//! Launches of norm.cu.

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
    eps: f32,
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
    is_centred: u32,
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct NormGradWeightArguments {
    x: u64,
    stats: u64,
    dy: u64,
    fold: Fold,
}

/// (y, stats) from (x, weight) and, of layer normalisation, a bias.
pub fn norm(name: &str, eps: f64, operands: &Operands<'_>) -> Option<Vec<Launch>> {
    let ([x, weight, rest @ ..], [y, stats]) = (operands.inputs, operands.outputs) else { return None };
    let arguments = NormArguments {
        x: x.address,
        weight: weight.address,
        bias: rest.first().map_or(0, |bias| bias.address),
        y: y.address,
        stats: stats.address,
        width: x.width(),
        eps: eps as f32,
    };
    launches([Kernel::rows(Norm, typed(name, x.dtype)?, x.count() / x.width(), x.packs(), arguments)])
}

/// dx from (x, weight, stats, dy).
pub fn norm_grad_input(is_centred: bool, operands: &Operands<'_>) -> Option<Vec<Launch>> {
    let ([x, weight, stats, dy], [dx]) = (operands.inputs, operands.outputs) else { return None };
    let arguments = NormGradInputArguments {
        x: x.address,
        weight: weight.address,
        stats: stats.address,
        dy: dy.address,
        dx: dx.address,
        width: x.width(),
        is_centred: u32::from(is_centred),
    };
    let name = typed("norm_grad_input", x.dtype)?;
    launches([Kernel::rows(Norm, name, x.count() / x.width(), x.packs(), arguments)])
}

/// Bytes of the pieces' sums.
pub fn norm_grad_weight_workspace(x: &Spec) -> Vec<u64> {
    let pieces = Pieces::of(x.dims()).count();
    vec![2 * 4 * pieces * crate::width(x.dims()) as u64]
}

/// (d_weight, d_bias) from (x, stats, dy).
pub fn norm_grad_weight(operands: &Operands<'_>) -> Option<Vec<Launch>> {
    let [x, stats, dy] = operands.inputs else { return None };
    let pieces = Pieces::of(x.dims());
    let fold = Fold::new(pieces, x.dtype, operands.outputs, operands, operands.accumulate)?;
    let blocks_side_by_side = blocks_of_columns(x.width());
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

/// Most threads of a block that makes all gradients of a norm in one pass over its rows: each has a pack of a row.
const MOST_THREADS: u64 = 512;

/// Whether rows are short enough for one kernel to make all gradients of their norm in one pass.
pub fn fits_one_pass(x: &Spec) -> bool {
    crate::width(x.dims()) as u64 <= MOST_THREADS * pack(x.dtype)
}

/// How the gradient of rows and those of weight and bias are made in one pass (`norm_grad_to` of norm.cuh).
#[derive(Debug)]
pub(in crate::cuda) struct OnePass {
    /// Elements of a thread: its template argument, as are the rows.
    pub(in crate::cuda) pack: u64,
    /// Rows that a block has in registers at a time.
    pub(in crate::cuda) rows: u32,
    /// What its registers are bounded by: threads of a block, at most.
    pub(in crate::cuda) most_threads: u32,
    /// Its struct `Fold`.
    pub(in crate::cuda) fold: [u64; 10],
    grid: u32,
    block: u32,
    tickets: u32,
}

impl OnePass {
    /// Of rows x, and the gradients (of weight, of bias) that become of them.
    pub(in crate::cuda) fn of(x: &Operand, outs: &[Operand], accumulate: u64, operands: &Operands<'_>) -> Option<Self> {
        let pieces = Pieces::of(x.dims());
        let fold = Fold::new(pieces, x.dtype, outs, operands, accumulate)?;
        let block = x.packs().next_multiple_of(32);
        // As many rows as 255 registers hold, or the 128 that there are for each of so many threads.
        let (rows, most_threads) = if block <= MOST_THREADS / 2 { (4, MOST_THREADS / 2) } else { (2, MOST_THREADS) };
        (block <= MOST_THREADS).then_some(Self {
            pack: x.pack(),
            rows,
            most_threads: most_threads as u32,
            fold: fold.words(),
            grid: blocks(pieces.count(), 1),
            block: block as u32,
            tickets: fold.tickets(1)?,
        })
    }

    /// The kernel of this text.
    pub(in crate::cuda) fn kernel(&self, family: Family, name: String, arguments: impl Arguments + 'static) -> Kernel {
        Kernel {
            family,
            name,
            grid: [self.grid, 1, 1],
            block: self.block,
            shared_bytes: 2 * self.rows * FOLD_BYTES,
            tickets: self.tickets,
            arguments: Box::new(arguments),
        }
    }
}

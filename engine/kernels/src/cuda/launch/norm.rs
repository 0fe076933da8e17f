//! Launches of norm.cu.

use super::reduce::{Fold, Pieces, SUMMING, blocks_of_columns};
use super::{Kernel, Launch, Operands, blocks, launches, typed};
use crate::Spec;
use crate::cuda::Family::Norm;

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

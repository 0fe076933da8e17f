//! Launches of norm.cu.

use candle_core::DType;

use super::reduce::{COLUMNS, Pieces, fold};
use super::{Kernel, Launch, Operands, blocks, launches, typed};
use crate::cuda::Family::Norm;
use crate::graph::Spec;

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
    parts: u64,
    width: u64,
    pieces: Pieces,
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
    launches([Kernel::rows(Norm, typed(name, x.dtype)?, x.count() / x.width(), x.width(), arguments)])
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
    launches([Kernel::rows(Norm, name, x.count() / x.width(), x.width(), arguments)])
}

/// Bytes of the pieces' sums.
pub fn norm_grad_weight_workspace(x: &Spec) -> Vec<u64> {
    let (_, pieces) = Pieces::of(x.dims());
    vec![2 * 4 * pieces * crate::ops::width(x.dims()) as u64]
}

/// (d_weight, d_bias) from (x, stats, dy).
pub fn norm_grad_weight(operands: &Operands<'_>) -> Option<Vec<Launch>> {
    let ([x, stats, dy], [d_weight, d_bias], &[parts]) = (operands.inputs, operands.outputs, operands.workspace) else {
        return None;
    };
    let (pieces, count) = Pieces::of(x.dims());
    let width = x.width();
    let arguments =
        NormGradWeightArguments { x: x.address, stats: stats.address, dy: dy.address, parts, width, pieces };
    let sums = Kernel {
        family: Norm,
        name: typed("norm_grad_weight", x.dtype)?,
        grid: [blocks(count, 1), blocks(width, COLUMNS), 1],
        block: COLUMNS,
        shared_bytes: 0,
        arguments: Box::new(arguments),
    };
    let bytes = DType::F32.size_in_bytes() as u64 * count * width;
    launches([
        sums,
        fold(parts, d_weight, count, operands.accumulate(0))?,
        fold(parts + bytes, d_bias, count, operands.accumulate(1))?,
    ])
}

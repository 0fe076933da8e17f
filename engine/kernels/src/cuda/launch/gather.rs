//! Launches of gather.cu. Each function returns `None` if the kernels do not support its operands.

use super::{Kernel, Launch, Operand, Operands, launches, typed};
use crate::cuda::Family::Gather;

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct GatherArguments {
    x: u64,
    ids: u64,
    y: u64,
    elements: u64,
    extent: u64,
    count: u64,
    inner: u64,
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct RowMaxArguments {
    x: u64,
    values: u64,
    ids: u64,
    width: u64,
}

/// Gathers elements along a dimension, from (x, ids).
pub fn gather_along(dim: usize, operands: &Operands<'_>) -> Option<Vec<Launch>> {
    let ([x, ids], [y]) = (operands.inputs, operands.outputs) else { return None };
    along("gather_along", (x, ids, y), x.dims()[dim], dim)
}

/// Adds elements along a dimension, at the indices that ids contain, from (ids, source).
pub fn scatter_add(dim: usize, operands: &Operands<'_>) -> Option<Vec<Launch>> {
    let ([ids, source], [y]) = (operands.inputs, operands.outputs) else { return None };
    along("scatter_add", (source, ids, y), y.dims()[dim], dim)
}

fn along(name: &str, (x, ids, y): (&Operand, &Operand, &Operand), extent: usize, dim: usize) -> Option<Vec<Launch>> {
    let arguments = GatherArguments {
        x: x.address,
        ids: ids.address,
        y: y.address,
        elements: y.count(),
        extent: extent as u64,
        count: ids.dims()[dim] as u64,
        inner: ids.dims()[dim + 1..].iter().product::<usize>() as u64,
    };
    launches([Kernel::flat(Gather, typed(name, y.dtype)?, y.count(), arguments)])
}

/// Computes the maximum of each row and its index. Rows are limited to lengths for which indices are exact in f32.
pub fn row_max(operands: &Operands<'_>) -> Option<Vec<Launch>> {
    let ([x], [values, ids]) = (operands.inputs, operands.outputs) else { return None };
    let width = x.width();
    if width > 1 << 24 {
        return None;
    }
    let arguments = RowMaxArguments { x: x.address, values: values.address, ids: ids.address, width };
    launches([Kernel::rows(Gather, typed("row_max", x.dtype)?, values.count(), x.packs(), arguments)])
}

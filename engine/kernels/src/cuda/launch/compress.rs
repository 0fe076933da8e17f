//! Launches of compress.cu.

use super::{Kernel, Launch, Operand, Operands, launches, typed};
use crate::cuda::Family::Compress;

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct CompressArguments {
    x: u64,
    codes: u64,
    ranges: u64,
    groups: u64,
    row: u64,
    group: u64,
}

/// Compresses x to (codes, ranges). Groups of `group` neighbours share a range; no group spans two rows of `row`
/// elements.
pub fn compress(row: u64, group: u64, operands: &Operands<'_>) -> Option<Vec<Launch>> {
    let ([x], [codes, ranges]) = (operands.inputs, operands.outputs) else { return None };
    kernel("compress", (row, group), x, codes, ranges)
}

/// Restores x from (codes, ranges).
pub fn expand(row: u64, group: u64, operands: &Operands<'_>) -> Option<Vec<Launch>> {
    let ([codes, ranges], [x]) = (operands.inputs, operands.outputs) else { return None };
    kernel("expand", (row, group), x, codes, ranges)
}

/// Returns the launch with one warp per group.
fn kernel(name: &str, (row, group): (u64, u64), x: &Operand, codes: &Operand, ranges: &Operand) -> Option<Vec<Launch>> {
    let groups = ranges.count() / 2;
    let arguments =
        CompressArguments { x: x.address, codes: codes.address, ranges: ranges.address, groups, row, group };
    launches([Kernel::flat(Compress, typed(name, x.dtype)?, 32 * groups, arguments)])
}

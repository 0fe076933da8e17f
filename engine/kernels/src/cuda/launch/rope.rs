//! Launches of rope.cu.

use super::{Kernel, Launch, Operands, Strides, launches, typed};
use crate::cuda::Family::Rope;

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct RopeArguments {
    x: u64,
    y: u64,
    table: u64,
    tokens: u64,
    heads: u64,
    head_size: u64,
    pairs: u64,
    at_x: Strides,
    theta: f64,
    is_inverse: u32,
}

/// Rotates x [batch, tokens, heads, head size], with a table [tokens, head size] of f32 as workspace.
pub fn rope(theta: f64, is_inverse: bool, operands: &Operands<'_>) -> Option<Vec<Launch>> {
    let ([x], [y], &[table]) = (operands.inputs, operands.outputs, operands.workspace) else { return None };
    let &[_, tokens, heads, head_size] = x.dims() else { return None };
    let (tokens, heads, head_size, pairs) = (tokens as u64, heads as u64, head_size as u64, x.count() / 2);
    let arguments = RopeArguments {
        x: x.address,
        y: y.address,
        table,
        tokens,
        heads,
        head_size,
        pairs,
        at_x: Strides::of(x)?,
        theta,
        is_inverse: u32::from(is_inverse),
    };
    launches([
        Kernel::flat(Rope, "rope_table".into(), tokens * head_size / 2, arguments),
        Kernel::flat(Rope, typed("rope", x.dtype)?, pairs, arguments),
    ])
}

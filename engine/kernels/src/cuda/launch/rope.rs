//! Launches of rope.cu.

use super::{Kernel, Launch, Operands, Strides, launches, pack, typed};
use crate::cuda::Family::Rope;

/// The angles per token by which the pairs of a head are rotated. Frequency i is f·(kept + (1 − kept)/factor). In
/// this formula, f is theta^(−2i/head size), and kept is per_turn·f + per_number·i + offset, clamped to [0, 1].
#[derive(Debug, Clone, Copy, PartialEq)]
#[repr(C)]
#[allow(missing_docs, reason = "the formula says what they are")]
pub struct RopeFrequencies {
    pub theta: f64,
    pub factor: f64,
    pub per_turn: f64,
    pub per_number: f64,
    pub offset: f64,
    /// The factor by which cosines and sines are multiplied.
    pub amplitude: f64,
}

impl RopeFrequencies {
    /// Returns the frequency with index `number`, for a head of this size.
    pub fn at(&self, number: usize, head_size: usize) -> f64 {
        let frequency = self.theta.powf(-2.0 * number as f64 / head_size as f64);
        let kept = (self.per_turn * frequency + self.per_number * number as f64 + self.offset).clamp(0.0, 1.0);
        frequency * (kept + (1.0 - kept) / self.factor)
    }
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct RopeArguments {
    x: u64,
    y: u64,
    table: u64,
    positions: u64,
    tokens: u64,
    heads: u64,
    head_size: u64,
    pairs: u64,
    at_x: Strides,
    frequencies: RopeFrequencies,
    are_neighbours: u32,
    is_inverse: u32,
    is_packed: u32,
}

/// Rotates x [batch, tokens, heads, head size]. The workspace holds an f32 table [tokens, head size]. A second input,
/// u32 [batch, tokens], may give the position of each token. The table then has a row for every token of the batch.
/// Returns `None` if the kernels do not support the operands.
pub fn rope(
    frequencies: RopeFrequencies,
    are_neighbours: bool,
    is_inverse: bool,
    operands: &Operands<'_>,
) -> Option<Vec<Launch>> {
    let ([x, positions @ ..], [y], &[table]) = (operands.inputs, operands.outputs, operands.workspace) else {
        return None;
    };
    let &[batch, tokens, heads, head_size] = x.dims() else { return None };
    // The number of rows of the table.
    let tokens = if positions.is_empty() { tokens } else { batch * tokens };
    let (tokens, heads, head_size, pairs) = (tokens as u64, heads as u64, head_size as u64, x.count() / 2);
    let (at_x, pack) = (Strides::of(x)?, pack(x.dtype));
    let is_packed = !are_neighbours
        && head_size.is_multiple_of(2 * pack)
        && [x.address, y.address, table].iter().all(|address| address.is_multiple_of(16))
        && u32::try_from(x.count()).is_ok()
        && Strides::in_packs([at_x], pack).is_some();
    let arguments = RopeArguments {
        x: x.address,
        y: y.address,
        table,
        positions: positions.first().map_or(0, |positions| positions.address),
        tokens,
        heads,
        head_size,
        pairs,
        at_x,
        frequencies,
        are_neighbours: u32::from(are_neighbours),
        is_inverse: u32::from(is_inverse),
        is_packed: u32::from(is_packed),
    };
    launches([
        Kernel::flat(Rope, "rope_table".into(), tokens * head_size / 2, arguments),
        Kernel::flat(Rope, typed("rope", x.dtype)?, if is_packed { pairs / pack } else { pairs }, arguments),
    ])
}

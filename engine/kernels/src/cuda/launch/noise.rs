//! Launches of dropout.cu.

use super::{Kernel, Launch, Operands, Random, launches, typed};
use crate::cuda::Family::Dropout;

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct NoiseArguments {
    x: u64,
    y: u64,
    count: u64,
    random: Random,
    place: u64,
    threshold: u64,
    scale: f32,
}

fn noise(name: &str, place: u64, threshold: u64, scale: f32, operands: &Operands<'_>) -> Option<Vec<Launch>> {
    let ([x], [y]) = (operands.inputs, operands.outputs) else { return None };
    let (count, random) = (y.count(), operands.random);
    let arguments = NoiseArguments { x: x.address, y: y.address, count, random, place, threshold, scale };
    launches([Kernel::flat(Dropout, typed(name, y.dtype)?, count.div_ceil(y.pack()), arguments)])
}

/// y = x·mask·scale, with zeros where 53 bits are below the threshold.
pub fn dropout(place: u64, threshold: u64, scale: f32, operands: &Operands<'_>) -> Option<Vec<Launch>> {
    noise("dropout", place, threshold, scale, operands)
}

/// y = x·u with u uniform around 1.
pub fn jitter(place: u64, amount: f32, operands: &Operands<'_>) -> Option<Vec<Launch>> {
    noise("jitter", place, 0, amount, operands)
}

//! Launches of elementwise.cu.

use candle_core::DType;

use super::{Kernel, Launch, Operands, Strides, launches, pack, typed};
use crate::cuda::Family::Elementwise;

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct MapArguments {
    x: u64,
    y: u64,
    count: u64,
    scale: f32,
    shift: f32,
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct ZipArguments {
    a: u64,
    b: u64,
    y: u64,
    count: u64,
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct BinaryArguments {
    a: u64,
    b: u64,
    y: u64,
    count: u64,
    at_a: Strides,
    at_b: Strides,
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct SwiGluGradArguments {
    gate: u64,
    up: u64,
    dy: u64,
    d_gate: u64,
    d_up: u64,
    count: u64,
}

fn map(name: &str, operands: &Operands<'_>, scale: f32, shift: f32) -> Option<Vec<Launch>> {
    let (x, y) = (&operands.inputs[0], &operands.outputs[0]);
    let arguments = MapArguments { x: x.address, y: y.address, count: y.count(), scale, shift };
    launches([Kernel::flat(Elementwise, typed(name, y.dtype)?, y.count().div_ceil(y.pack()), arguments)])
}

fn zip(name: &str, operands: &Operands<'_>) -> Option<Vec<Launch>> {
    let ([a, b, ..], y) = (operands.inputs, &operands.outputs[0]) else { return None };
    let arguments = ZipArguments { a: a.address, b: b.address, y: y.address, count: y.count() };
    launches([Kernel::flat(Elementwise, typed(name, y.dtype)?, y.count().div_ceil(y.pack()), arguments)])
}

/// y = f(x), by the function's name.
pub fn unary(name: &str, operands: &Operands<'_>) -> Option<Vec<Launch>> {
    map(&format!("unary_{name}"), operands, 1.0, 0.0)
}

/// dx = dy·f′(x) from (x, dy), by the function's name with `_grad`.
pub fn unary_grad(name: &str, operands: &Operands<'_>) -> Option<Vec<Launch>> {
    zip(&format!("unary_{name}"), operands)
}

/// y = gelu(x) on dense elements; y may be x.
pub(super) fn gelu(x: u64, y: u64, count: u64, dtype: DType) -> Option<Kernel> {
    let arguments = MapArguments { x, y, count, scale: 1.0, shift: 0.0 };
    Some(Kernel::flat(Elementwise, typed("unary_gelu", dtype)?, count.div_ceil(pack(dtype)), arguments))
}

/// dy·gelu′(x) over dy.
pub(super) fn gelu_grad(x: u64, dy: u64, count: u64, dtype: DType) -> Option<Kernel> {
    let arguments = ZipArguments { a: x, b: dy, y: dy, count };
    Some(Kernel::flat(Elementwise, typed("unary_gelu_grad", dtype)?, count.div_ceil(pack(dtype)), arguments))
}

/// y = x·scale + shift.
pub fn affine(scale: f64, shift: f64, operands: &Operands<'_>) -> Option<Vec<Launch>> {
    map("affine", operands, scale as f32, shift as f32)
}

/// y = a ∘ b with strides, by the operation's name.
pub fn binary(name: &str, operands: &Operands<'_>) -> Option<Vec<Launch>> {
    let ([a, b], y) = (operands.inputs, &operands.outputs[0]) else { return None };
    let [at_a, at_b] = Strides::merged(y.dims(), [a.layout.stride(), b.layout.stride()])?;
    let arguments = BinaryArguments { a: a.address, b: b.address, y: y.address, count: y.count(), at_a, at_b };
    launches([Kernel::flat(Elementwise, typed(name, y.dtype)?, y.count().div_ceil(y.pack()), arguments)])
}

/// y = silu(gate)·up.
pub fn gated(operands: &Operands<'_>) -> Option<Vec<Launch>> {
    zip("swiglu", operands)
}

/// (d_gate, d_up) from (gate, up, dy).
pub fn gated_grad(operands: &Operands<'_>) -> Option<Vec<Launch>> {
    let ([gate, up, dy], [d_gate, d_up]) = (operands.inputs, operands.outputs) else { return None };
    let count = dy.count();
    let arguments = SwiGluGradArguments {
        gate: gate.address,
        up: up.address,
        dy: dy.address,
        d_gate: d_gate.address,
        d_up: d_up.address,
        count,
    };
    launches([Kernel::flat(Elementwise, typed("swiglu_grad", dy.dtype)?, count.div_ceil(dy.pack()), arguments)])
}

//! Launches of copy.cu.

use candle_core::{DType, Layout};

use super::{Kernel, Launch, Operand, Operands, Strides, launches, pack, typed};
use crate::cuda::Family::Copy;

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct CopyArguments {
    x: u64,
    y: u64,
    count: u64,
    at_x: Strides,
    at_y: Strides,
    are_packs: u32,
    accumulate: u32,
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct FillArguments {
    y: u64,
    count: u64,
    number: f32,
}

/// Returns the kernel that copies x to the part of y with the layout `part`, which has the shape of x. Returns `None`
/// if there is no kernel for these types or strides.
pub fn copy_to(x: &Operand, y: &Operand, part: &Layout, accumulate: u32) -> Option<Kernel> {
    let name = match (x.dtype, y.dtype) {
        (DType::BF16, DType::F32) => "to_f32_bf16".into(),
        (DType::F32, DType::BF16) => "to_bf16_f32".into(),
        (DType::U8, DType::U8) => "copy_u8".into(),
        (DType::U32, DType::U32) => "copy_u32".into(),
        (from, to) if from == to && accumulate == 0 => typed("copy", from)?,
        (DType::F32, DType::F32) => "to_f32_f32".into(),
        (DType::BF16, DType::BF16) => "to_bf16_bf16".into(),
        (DType::U8 | DType::U32, DType::F32 | DType::BF16) => format!("to_{}_{}", y.dtype.as_str(), x.dtype.as_str()),
        _ => return None,
    };
    let at = Strides::merged(x.dims(), [x.layout.stride(), part.stride()])?;
    let addresses = [x.address, y.address + (part.start_offset() * y.dtype.size_in_bytes()) as u64];
    let sizes = [x, y].map(|operand| operand.dtype.size_in_bytes() as u64);
    // The number of elements is that of `pack_of` in copy.cu.
    let neighbours = 16 / sizes[0].min(sizes[1]).max(2);
    let is_aligned = (0..2).all(|i| addresses[i].is_multiple_of((neighbours * sizes[i]).min(16)));
    let packed = if is_aligned { Strides::in_packs(at, neighbours) } else { None };
    let count = if packed.is_some() { x.count() / neighbours } else { x.count() };
    let ([x, y], [at_x, at_y]) = (addresses, packed.unwrap_or(at));
    let arguments = CopyArguments { x, y, count, at_x, at_y, are_packs: u32::from(packed.is_some()), accumulate };
    Some(Kernel::flat(Copy, name, count, arguments))
}

/// Returns the kernel that fills y with one value. Returns `None` if there is no kernel for the type of y.
pub(super) fn fill(y: &Operand, number: f32) -> Option<Kernel> {
    let arguments = FillArguments { y: y.address, count: y.count(), number };
    Some(Kernel::flat(Copy, typed("fill", y.dtype)?, y.count().div_ceil(pack(y.dtype)), arguments))
}

/// Returns the launch that copies x to a contiguous y. If the types differ, it converts x. It can also add x to y.
pub fn copy(operands: &Operands<'_>) -> Option<Vec<Launch>> {
    let ([x], [y]) = (operands.inputs, operands.outputs) else { return None };
    launches([copy_to(x, y, &y.layout, operands.accumulate(0))?])
}

/// Returns the launches that concatenate the inputs along a dimension.
pub fn cat(dim: usize, operands: &Operands<'_>) -> Option<Vec<Launch>> {
    let [y] = operands.outputs else { return None };
    let mut start = 0;
    let mut copies = Vec::new();
    for x in operands.inputs {
        let extent = x.dims()[dim];
        copies.push(Launch::Kernel(copy_to(x, y, &y.layout.narrow(dim, start, extent).ok()?, 0)?));
        start += extent;
    }
    Some(copies)
}

/// Returns the launches that copy the input into an output of zeros, from index `start` of a dimension on.
pub fn widen(dim: usize, start: usize, operands: &Operands<'_>) -> Option<Vec<Launch>> {
    let ([x], [y]) = (operands.inputs, operands.outputs) else { return None };
    let part = y.layout.narrow(dim, start, x.dims()[dim]).ok()?;
    launches([fill(y, 0.0)?, copy_to(x, y, &part, 0)?])
}

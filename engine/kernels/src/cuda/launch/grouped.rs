//! Launches of grouped.cu and grouped_tensor_cores.cu. Each function returns `None` if the kernels do not support its
//! operands.

use candle_core::DType;

use super::{Kernel, Launch, Operand, Operands, blocks, launches, typed, typed_to};
use crate::cuda::Family::{self, Grouped, GroupedTensorCores};

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct GroupedArguments {
    a: u64,
    b: u64,
    c: u64,
    starts: u64,
    rows: u64,
    width: u64,
    out: u64,
    sources: u64,
    experts: u64,
    sequences: u64,
    accumulate: u32,
}

/// Number of threads of a block; equals `GROUPED_THREADS` of grouped.cuh.
const THREADS: u32 = 256;

/// The sizes of the tiles of the kernels for one element type.
#[derive(Debug, Clone, Copy)]
struct Form {
    family: Family,
    /// Rows and columns of a block's tile.
    tile: u64,
    /// Bytes of shared memory for the tiles of an operand whose summed dimension is contiguous.
    bytes_along: u64,
    /// Bytes of shared memory for the tiles of an operand whose other dimension is contiguous.
    bytes_across: u64,
}

impl Form {
    /// Returns the form for a type: tensor cores for bf16, f32 arithmetic for f32. Returns `None` for all other
    /// types.
    fn of(dtype: DType) -> Option<Self> {
        match dtype {
            DType::F32 => {
                let bytes = 4 * 16 * (64 + 4);
                Some(Self { family: Grouped, tile: 64, bytes_along: bytes, bytes_across: bytes })
            }
            DType::BF16 => Some(Self {
                family: GroupedTensorCores,
                tile: 128,
                bytes_along: 3 * 2 * 128 * (32 + 8),
                bytes_across: 3 * 2 * 32 * (128 + 8),
            }),
            _ => None,
        }
    }

    fn tiles(&self, extent: u64) -> u64 {
        extent.div_ceil(self.tile)
    }

    /// Returns the maximum number of tiles for this many rows in this many groups. Each group may end with an
    /// incomplete tile.
    fn most_tiles(&self, rows: u64, groups: u64) -> u64 {
        ((rows + groups * (self.tile - 1)) / self.tile).min(rows)
    }

    fn shared_bytes(&self, is_along: bool) -> u64 {
        if is_along { self.bytes_along } else { self.bytes_across }
    }
}

impl GroupedArguments {
    fn new(sources: usize, experts: usize, [a, b, starts]: [&Operand; 3], c: &Operand) -> Self {
        let (sources, experts) = (sources as u64, experts as u64);
        Self {
            a: a.address,
            b: b.address,
            c: c.address,
            starts: starts.address,
            rows: a.count() / a.width(),
            width: 0,
            out: 0,
            sources,
            experts,
            sequences: (starts.count() - 1) / (sources * experts),
            accumulate: 0,
        }
    }

    /// Launches a kernel with one block per tile. `are_along` says for each operand whether its summed dimension is
    /// contiguous.
    fn launch(
        self,
        name: Option<String>,
        dtype: DType,
        are_along: [bool; 2],
        tiles: impl Fn(&Form) -> u64,
    ) -> Option<Vec<Launch>> {
        let form = Form::of(dtype)?;
        launches([Kernel {
            family: form.family,
            name: name?,
            grid: [blocks(tiles(&form), 1), 1, 1],
            block: THREADS,
            shared_bytes: are_along.map(|is_along| form.shared_bytes(is_along)).iter().sum::<u64>() as u32,
            tickets: 0,
            arguments: Box::new(self),
        }])
    }

    /// Returns the number of groups of rows: one per source and expert, and one of unused rows.
    fn groups(&self) -> u64 {
        self.sources * self.experts + 1
    }
}

/// Computes the product of each row and the weight of the row's expert, from (x, weight, row offsets).
pub fn grouped_linear(sources: usize, operands: &Operands<'_>) -> Option<Vec<Launch>> {
    let ([x, weight, starts], [y]) = (operands.inputs, operands.outputs) else { return None };
    let of = GroupedArguments::new(sources, weight.dims()[0], [x, weight, starts], y);
    let of = GroupedArguments { width: x.width(), out: y.width(), ..of };
    of.launch(typed("grouped_linear", x.dtype), x.dtype, [true, true], |form| {
        form.most_tiles(of.rows, of.groups()) * form.tiles(of.out)
    })
}

/// Computes dx from (dy, weight, row offsets).
pub fn grouped_linear_grad_input(sources: usize, operands: &Operands<'_>) -> Option<Vec<Launch>> {
    let ([dy, weight, starts], [dx]) = (operands.inputs, operands.outputs) else { return None };
    let of = GroupedArguments::new(sources, weight.dims()[0], [dy, weight, starts], dx);
    let of = GroupedArguments { width: dx.width(), out: dy.width(), ..of };
    of.launch(typed("grouped_linear_grad_input", dy.dtype), dy.dtype, [true, false], |form| {
        form.most_tiles(of.rows, of.groups()) * form.tiles(of.width)
    })
}

/// Computes d_weight from (x, dy, row offsets), summed sequence by sequence.
pub fn grouped_linear_grad_weight(sources: usize, operands: &Operands<'_>) -> Option<Vec<Launch>> {
    let ([x, dy, starts], [d_weight]) = (operands.inputs, operands.outputs) else { return None };
    let accumulate = operands.accumulate(0);
    let of = GroupedArguments::new(sources, d_weight.dims()[0], [dy, x, starts], d_weight);
    let of = GroupedArguments { width: x.width(), out: dy.width(), accumulate, ..of };
    let name = typed_to("grouped_linear_grad_weight", x.dtype, d_weight.dtype);
    of.launch(name, x.dtype, [false, false], |form| of.experts * form.tiles(of.out) * form.tiles(of.width))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The launch has enough blocks for every distribution of rows over groups. For small sizes, all distributions
    /// are enumerated.
    #[test]
    fn there_are_as_many_blocks_as_the_worst_of_ways_to_share_rows_needs() {
        let form = Form { tile: 4, ..Form::of(DType::F32).unwrap() };
        /// The largest number of tiles over all distributions of rows.
        fn worst(form: &Form, rows: u64, groups: u64) -> u64 {
            match groups {
                1 => form.tiles(rows),
                _ => (0..=rows).map(|own| form.tiles(own) + worst(form, rows - own, groups - 1)).max().unwrap(),
            }
        }
        for rows in 1..=20 {
            for groups in 1..=4 {
                assert_eq!(form.most_tiles(rows, groups), worst(&form, rows, groups), "{rows} rows, {groups} groups");
            }
        }
    }
}

//! Launches of grouped.cu, grouped_tensor_cores.cu and grouped_warpgroups.cu. Each function returns `None` if the kernels do
//! not support its operands.

use candle_core::DType;

use super::{Features, Kernel, Launch, MULTIPROCESSORS, Operand, Operands, blocks, launches, pack, typed_to};
use crate::cuda::Family::{self, Grouped, GroupedTensorCores, GroupedWarpgroups};

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

/// The kernels for one element type, and the sizes of their tiles.
#[derive(Debug, Clone, Copy)]
struct Form {
    family: Family,
    /// The part of a kernel's name before the type.
    suffix: &'static str,
    /// Rows of a block's tile.
    rows: u64,
    /// Columns of a block's tile.
    columns: u64,
    /// Bytes of shared memory for the tiles of both operands, by whether their summed dimension is contiguous.
    shared_bytes: fn([bool; 2]) -> u64,
    /// The number of blocks that share all tiles; `None` if each tile has a block.
    most_blocks: Option<u64>,
}

impl Form {
    /// f32 arithmetic.
    const PLAIN: Self = Self {
        family: Grouped,
        suffix: "",
        rows: 64,
        columns: 64,
        shared_bytes: |_| 2 * 4 * 16 * (64 + 4),
        most_blocks: None,
    };

    /// bf16 on tensor cores. Three stages, whose rows are padded.
    const TENSOR_CORES: Self = Self {
        family: GroupedTensorCores,
        suffix: "",
        rows: 128,
        columns: 128,
        shared_bytes: |are_along| {
            are_along.map(|is_along| 3 * 2 * if is_along { 128 * (32 + 8) } else { 32 * (128 + 8) }).iter().sum()
        },
        most_blocks: None,
    };

    /// bf16 on the tensor cores of compute capability 9.0. Four stages start at the first address that is a multiple of 1024.
    const WARPGROUPS: Self = Self {
        family: GroupedWarpgroups,
        suffix: "_wg",
        rows: 128,
        columns: 256,
        shared_bytes: |_| 1024 + 4 * 2 * 64 * (128 + 256),
        most_blocks: Some(MULTIPROCESSORS),
    };

    /// Returns the form for the operands' type. Returns `None` for types other than f32 and bf16.
    fn of(dtype: DType, of: &GroupedArguments, features: Features) -> Option<Self> {
        match dtype {
            DType::F32 => Some(Self::PLAIN),
            DType::BF16 if features.warpgroups && of.are_packs() => Some(Self::WARPGROUPS),
            DType::BF16 => Some(Self::TENSOR_CORES),
            _ => None,
        }
    }

    /// Returns the maximum number of tiles along rows, for this many rows in this many groups. Each group may end with an
    /// incomplete tile.
    fn most_row_tiles(&self, rows: u64, groups: u64) -> u64 {
        ((rows + groups * (self.rows - 1)) / self.rows).min(rows)
    }

    /// Returns the number of tiles along this many columns.
    fn column_tiles(&self, columns: u64) -> u64 {
        columns.div_ceil(self.columns)
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

    /// True if all rows can be copied 16 bytes at a time. The addresses that slots contain are aligned.
    fn are_packs(&self) -> bool {
        let is_aligned = |address: u64| address.is_multiple_of(16);
        [self.a, self.b, self.c].into_iter().all(is_aligned)
            && [self.width, self.out].into_iter().all(|extent: u64| extent.is_multiple_of(pack(DType::BF16)))
    }

    /// Launches the kernel `stem` for operands of type `from` and a result of type `to`. `are_along` says for each operand
    /// whether its summed dimension is contiguous. `tiles` returns the largest number of tiles that a form may need.
    fn launch(
        self,
        stem: &str,
        [from, to]: [DType; 2],
        are_along: [bool; 2],
        features: Features,
        tiles: impl Fn(&Form) -> u64,
    ) -> Option<Vec<Launch>> {
        let form = Form::of(from, &self, features)?;
        let tiles = tiles(&form);
        launches([Kernel {
            family: form.family,
            name: typed_to(&format!("{stem}{}", form.suffix), from, to)?,
            grid: [blocks(form.most_blocks.map_or(tiles, |most| tiles.min(most)), 1), 1, 1],
            block: THREADS,
            shared_bytes: (form.shared_bytes)(are_along) as u32,
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
    of.launch("grouped_linear", [x.dtype; 2], [true, true], operands.features, |form| {
        form.most_row_tiles(of.rows, of.groups()) * form.column_tiles(of.out)
    })
}

/// Computes dx from (dy, weight, row offsets).
pub fn grouped_linear_grad_input(sources: usize, operands: &Operands<'_>) -> Option<Vec<Launch>> {
    let ([dy, weight, starts], [dx]) = (operands.inputs, operands.outputs) else { return None };
    let of = GroupedArguments::new(sources, weight.dims()[0], [dy, weight, starts], dx);
    let of = GroupedArguments { width: dx.width(), out: dy.width(), ..of };
    of.launch("grouped_linear_grad_input", [dy.dtype; 2], [true, false], operands.features, |form| {
        form.most_row_tiles(of.rows, of.groups()) * form.column_tiles(of.width)
    })
}

/// Computes d_weight from (x, dy, row offsets), summed sequence by sequence.
pub fn grouped_linear_grad_weight(sources: usize, operands: &Operands<'_>) -> Option<Vec<Launch>> {
    let ([x, dy, starts], [d_weight]) = (operands.inputs, operands.outputs) else { return None };
    let accumulate = operands.accumulate(0);
    let of = GroupedArguments::new(sources, d_weight.dims()[0], [dy, x, starts], d_weight);
    let of = GroupedArguments { width: x.width(), out: dy.width(), accumulate, ..of };
    let types = [x.dtype, d_weight.dtype];
    of.launch("grouped_linear_grad_weight", types, [false, false], operands.features, |form| {
        of.experts * of.out.div_ceil(form.rows) * form.column_tiles(of.width)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The launch has enough blocks for every distribution of rows over groups. For small sizes, all distributions
    /// are enumerated.
    #[test]
    fn there_are_as_many_blocks_as_the_worst_of_ways_to_share_rows_needs() {
        let form = Form { rows: 4, ..Form::PLAIN };
        /// The largest number of tiles over all distributions of rows.
        fn worst(form: &Form, rows: u64, groups: u64) -> u64 {
            match groups {
                1 => rows.div_ceil(form.rows),
                _ => (0..=rows).map(|own| own.div_ceil(form.rows) + worst(form, rows - own, groups - 1)).max().unwrap(),
            }
        }
        for rows in 1..=20 {
            for groups in 1..=4 {
                assert_eq!(
                    form.most_row_tiles(rows, groups),
                    worst(&form, rows, groups),
                    "{rows} rows, {groups} groups"
                );
            }
        }
    }
}

//! What is launched for an operation: which kernels, with how many blocks, on which addresses.
//!
//! In: where the operands of one instruction lie on the device, as a plan says it. Out: [`Launch`]es, in order. Never: a call
//! of the driver, or a look at data: all of it is known when the program is compiled, so that launches can be captured once.

mod adamw;
mod attention;
mod copy;
mod embedding;
mod experts;
mod gather;
mod grouped;
mod norm;
mod product;
mod reduce;
mod rope;
mod softmax;

pub use adamw::together;
pub use adamw::{
    AdamWRule, AdamWTensor, adamw, global_norm, global_norm_workspace, squared_norms, squared_norms_workspace,
    weight_average,
};
pub use attention::{Scores, attention, attention_grad, attention_grad_workspace};
pub use copy::{cat, copy, copy_to, widen};
pub use embedding::{add_embedding_grad, embedding, embedding_grad, embedding_grad_workspace};
pub use experts::{
    Routing, combine, dispatch, document_load, expert_load, gather, load_bias, route, routed_gated, routed_gated_grad,
    run_lengths, run_starts, top_k, top_k_grad, unplaced,
};
pub use gather::{gather_along, row_max, scatter_add};
pub use grouped::{grouped_linear, grouped_linear_grad_input, grouped_linear_grad_weight};
pub(super) use norm::{MOST_THREADS, OnePass, RowBlocks, rows};
pub use norm::{fits_one_pass, norm, norm_grad_input, norm_grad_weight, norm_grad_weight_workspace};
pub use product::ALIGNMENT;
pub use product::{
    Batch, Epilogue, Matrix, Product, is_matrix, leading_sums_workspace, linear, linear_grad_input, linear_grad_weight,
    matmul, product_workspace, scratch_in,
};
pub use reduce::{column_sums_workspace, scaled_sum, sum};
pub use rope::{RopeFrequencies, rope};
pub use softmax::{HeadRows, Upstream, cross_entropy, cross_entropy_grad, head, log_sum_exp, softmax, softmax_grad};

use std::any::Any;
use std::ffi::c_void;
use std::fmt::Debug;

use candle_core::{DType, Layout};

use super::Family;

/// What a device is asked to do.
#[derive(Debug)]
pub enum Launch {
    /// One kernel, started once.
    Kernel(Kernel),
    /// A product of matrices.
    Product(Product),
}

/// Kernels, one after another.
fn launches<const N: usize>(kernels: [Kernel; N]) -> Option<Vec<Launch>> {
    Some(kernels.map(Launch::Kernel).into())
}

/// One kernel, started once.
#[derive(Debug)]
pub struct Kernel {
    /// Where the kernel's source is.
    pub family: Family,
    /// The kernel's name, which ends in the type that it stores.
    pub name: String,
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of a block: whole warps.
    pub block: u32,
    /// Shared memory of a block. The driver has to be told of more than 48 KiB.
    pub shared_bytes: u32,
    /// Numbers from [`Operands::tickets`] on that its blocks count themselves by.
    pub tickets: u32,
    /// The struct that the kernel takes.
    pub arguments: Box<dyn Arguments>,
}

/// A kernel's one argument: plain data, laid out as in C.
pub trait Arguments: Any + Debug + Send + Sync {
    /// Bytes of the struct.
    fn bytes(&self) -> usize;

    /// Where it lies, for the driver to copy from.
    fn address(&self) -> *const c_void;
}

impl<T: Copy + Debug + Send + Sync + 'static> Arguments for T {
    fn bytes(&self) -> usize {
        size_of::<T>()
    }

    fn address(&self) -> *const c_void {
        (&raw const *self).cast()
    }
}

/// The bit of an address that makes it that of a slot (`slots.cuh`): 16 bytes of device memory, in which kernels find the address and
/// the number of bytes of a tensor whose rows are counted while a program runs. Its layout then has the most rows that there may be.
pub const SLOT: u64 = 1 << 63;

/// A tensor at its planned address.
#[derive(Debug, Clone)]
pub struct Operand {
    /// Device address of the first element that the layout shows, or of a slot that has it.
    pub address: u64,
    /// Strides; the start is already in the address.
    pub layout: Layout,
    /// Type of the elements.
    pub dtype: DType,
}

impl Operand {
    /// Extents.
    pub fn dims(&self) -> &[usize] {
        self.layout.dims()
    }

    /// Number of elements.
    pub fn count(&self) -> u64 {
        self.layout.shape().elem_count() as u64
    }

    /// Extent of the last dimension.
    pub fn width(&self) -> u64 {
        crate::width(self.dims()) as u64
    }

    /// Whether a slot says where it lies.
    pub fn has_slot(&self) -> bool {
        self.address & SLOT != 0
    }

    /// Elements of a pack: 16 bytes.
    fn pack(&self) -> u64 {
        pack(self.dtype)
    }

    /// Packs of the last dimension.
    fn packs(&self) -> u64 {
        self.width().div_ceil(self.pack())
    }
}

/// What a device has beyond what all of them have, for which there are kernels of its own.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Features {
    /// Products of warpgroups (`wgmma`), of compute capability 9.0 alone.
    pub warpgroups: bool,
}

/// The operands of one instruction.
#[derive(Debug)]
pub struct Operands<'a> {
    /// What the kernels read. An input that is overwritten has the address of its output.
    pub inputs: &'a [Operand],
    /// What they write: dense tensors.
    pub outputs: &'a [Operand],
    /// Addresses of the pieces of `Op::cuda_workspace`.
    pub workspace: &'a [u64],
    /// Bits of the outputs that are added to.
    pub accumulate: u64,
    /// Device address of `u32`s that are 0, and are again when the launches are over: as many as [`Kernel::tickets`] of any of them.
    pub tickets: u64,
    /// Where the random numbers of this step and micro-batch come from.
    pub random: Random,
    /// What the device has on which they are launched.
    pub features: Features,
}

/// A stream of random numbers, of which the step's part is read when the kernel runs.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Random {
    /// Device address of the step's key, 8 bytes.
    pub key: u64,
    /// The micro-batch within the step.
    pub micro_batch: u64,
}

impl Operands<'_> {
    fn accumulate(&self, output: usize) -> u32 {
        u32::from(self.accumulates(output))
    }

    /// Whether an output is added to.
    pub fn accumulates(&self, output: usize) -> bool {
        self.accumulate >> output & 1 == 1
    }
}

/// Elements of a pack: 16 bytes.
fn pack(dtype: DType) -> u64 {
    16 / dtype.size_in_bytes() as u64
}

/// A kernel's name for a type that it stores; none for types without kernels.
fn typed(name: &str, dtype: DType) -> Option<String> {
    match dtype {
        DType::F32 => Some(format!("{name}_f32")),
        DType::BF16 => Some(format!("{name}_bf16")),
        _ => None,
    }
}

/// A kernel's name where it may store f32 instead of the type that it reads.
fn typed_to(name: &str, from: DType, to: DType) -> Option<String> {
    match (from, to) {
        (DType::BF16, DType::F32) => Some(format!("{name}_bf16_to_f32")),
        _ if from == to => typed(name, to),
        _ => None,
    }
}

/// Most dimensions that kernels walk: `MAX_RANK` of strides.cuh.
const MAX_RANK: usize = 6;

/// Extents and distances in elements, as strides.cuh has them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Strides {
    dims: [u64; MAX_RANK],
    strides: [u64; MAX_RANK],
    rank: u32,
    is_small: u32,
}

impl Strides {
    /// Of a scalar.
    const NONE: Self = Self { dims: [1; MAX_RANK], strides: [0; MAX_RANK], rank: 0, is_small: 1 };

    /// Walks several tensors over the same extents, in as few dimensions as all of them allow; none if that is too many.
    fn merged<const N: usize>(dims: &[usize], strides: [&[usize]; N]) -> Option<[Self; N]> {
        let mut merged: Vec<(usize, [usize; N])> = Vec::new();
        for (dim, &extent) in dims.iter().enumerate().filter(|&(_, &extent)| extent != 1) {
            let steps = strides.map(|strides| strides[dim]);
            match merged.last_mut() {
                Some((last, of_last)) if (0..N).all(|i| of_last[i] == extent * steps[i]) => {
                    *last *= extent;
                    *of_last = steps;
                }
                _ => merged.push((extent, steps)),
            }
        }
        if merged.len() > MAX_RANK {
            return None;
        }
        let is_small = u32::from(u32::try_from(dims.iter().product::<usize>()).is_ok());
        let mut all = [Self { rank: merged.len() as u32, is_small, ..Self::NONE }; N];
        for (dim, (extent, steps)) in merged.into_iter().enumerate() {
            for (of, step) in all.iter_mut().zip(steps) {
                (of.dims[dim], of.strides[dim]) = (extent as u64, step as u64);
            }
        }
        Some(all)
    }

    /// The same in packs of so many neighbours, if these lie side by side in all of them.
    fn in_packs<const N: usize>(all: [Self; N], pack: u64) -> Option<[Self; N]> {
        let is_packed = all.iter().all(|of| {
            let (dims, strides) = (&of.dims[..of.rank as usize], &of.strides[..of.rank as usize]);
            let ([.., extent], [outer @ .., 1]) = (dims, strides) else { return false };
            extent % pack == 0 && outer.iter().all(|stride| stride % pack == 0)
        });
        let in_packs = |mut of: Self| {
            let last = of.rank as usize - 1;
            of.dims[last] /= pack;
            of.strides[..last].iter_mut().for_each(|stride| *stride /= pack);
            of
        };
        is_packed.then(|| all.map(in_packs))
    }

    /// Walks one operand.
    pub fn of(operand: &Operand) -> Option<Self> {
        Self::merged(operand.dims(), [operand.layout.stride()]).map(|[strides]| strides)
    }

    /// The struct as fields of 8 bytes, the last of which holds two numbers.
    pub fn words(&self) -> impl Iterator<Item = u64> {
        let last = u64::from(self.rank) | u64::from(self.is_small) << 32;
        self.dims.into_iter().chain(self.strides).chain([last])
    }
}

/// Whether kernels can walk it.
pub fn can_walk(layout: &Layout) -> bool {
    Strides::merged(layout.dims(), [layout.stride()]).is_some()
}

/// Threads of a block that go through elements.
const BLOCK: u32 = 256;

/// Blocks for so many threads.
fn blocks(threads: u64, block: u32) -> u32 {
    u32::try_from(threads.div_ceil(u64::from(block))).expect("a device's memory holds no more elements than that")
}

/// Bytes of shared memory that a fold over a block takes: `MAX_WARPS` floats of reduce.cuh.
const FOLD_BYTES: u32 = 4 * 32;

impl Kernel {
    /// One thread for each of so many.
    pub fn flat(family: Family, name: String, threads: u64, arguments: impl Arguments + 'static) -> Self {
        let grid = [blocks(threads, BLOCK), 1, 1];
        Self { family, name, grid, block: BLOCK, shared_bytes: 0, tickets: 0, arguments: Box::new(arguments) }
    }

    /// One block for each of so many rows, with threads for a row of so many packs.
    pub fn rows(family: Family, name: String, rows: u64, packs: u64, arguments: impl Arguments + 'static) -> Self {
        // About one pack for a thread, in whole warps.
        let block = packs.next_multiple_of(32).clamp(32, 512) as u32;
        let grid = [blocks(rows, 1), 1, 1];
        Self { family, name, grid, block, shared_bytes: FOLD_BYTES, tickets: 0, arguments: Box::new(arguments) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dimensions_are_merged_where_all_tensors_allow_it() {
        let walk = |dims: &[usize], strides: &[usize]| {
            Strides::merged(dims, [strides])
                .map(|[s]| (0..s.rank as usize).map(|d| (s.dims[d], s.strides[d])).collect())
        };
        assert_eq!(walk(&[2, 3, 4], &[12, 4, 1]), Some(vec![(24, 1)]));
        assert_eq!(walk(&[2, 3, 4], &[0, 4, 1]), Some(vec![(2, 0), (12, 1)]));
        assert_eq!(walk(&[2, 1, 4], &[4, 9, 1]), Some(vec![(8, 1)]));
        assert_eq!(walk(&[], &[]), Some(vec![]));
        assert_eq!(walk(&[2; 7], &[1, 2, 4, 8, 16, 32, 64]), None);
        let [a, b] = Strides::merged(&[2, 3, 4], [&[12, 4, 1], &[0, 0, 1]]).unwrap();
        assert_eq!((a.is_small, Strides::merged(&[1 << 20, 1 << 12], [&[0, 1]]).unwrap()[0].is_small), (1, 0));
        assert_eq!((a.rank, a.strides[..2].to_vec(), b.strides[..2].to_vec()), (2, vec![4, 1], vec![0, 1]));
        let [a, b] = Strides::in_packs([a, b], 2).unwrap();
        assert_eq!((a.dims[1], a.strides[..2].to_vec(), b.strides[..2].to_vec()), (2, vec![2, 1], vec![0, 1]));
        let odd = |dims: &[usize], strides: &[usize]| {
            Strides::in_packs(Strides::merged(dims, [strides]).unwrap(), 2).is_none()
        };
        assert!(odd(&[4, 3], &[4, 1]) && odd(&[4, 2], &[3, 1]) && odd(&[4, 2], &[1, 4]) && odd(&[], &[]));
    }
}

//! The launches of an operation: kernels, numbers of blocks, and addresses.
//!
//! - In: the planned device addresses of one instruction's operands.
//! - Out: [`Launch`]es, in order.
//! - Never: a call of the driver, or a read of tensor data. All launches are known when the program is compiled, so
//!   that they can be captured in a graph.

mod adafactor;
mod adamw;
mod attention;
mod cache;
mod compress;
mod copy;
mod embedding;
mod experts;
mod galore;
mod gather;
mod grouped;
mod norm;
mod product;
mod quantized;
mod reduce;
mod rope;
mod softmax;
mod update;

pub use adafactor::{AdafactorRule, adafactor, adafactor_workspace};
pub use adamw::together;
pub use adamw::{
    AdamWRule, AdamWTensor, adamw, adamw_8bit, global_norm, global_norm_workspace, squared_norms,
    squared_norms_workspace, weight_average,
};
pub use attention::{Scores, attention, attention_grad, attention_grad_workspace};
pub use cache::{cache_write, cached_attention, cached_attention_workspace};
pub use compress::{compress, expand};
pub use copy::{cat, copy, copy_to, widen};
pub use embedding::{add_embedding_grad, embedding, embedding_grad, embedding_grad_workspace};
pub use experts::{
    GatedUnit, Routing, combine, dispatch, document_load, expert_load, gather, load_bias, route, routed_gated,
    routed_gated_grad, run_lengths, run_starts, top_k, top_k_grad, unplaced,
};
pub use galore::{GaLoreRule, galore, galore_workspace};
pub use gather::{gather_along, row_max, scatter_add};
pub use grouped::{grouped_linear, grouped_linear_grad_input, grouped_linear_grad_weight};
pub(super) use norm::{MOST_THREADS, OnePass, RowBlocks, rows};
pub use norm::{fits_one_pass, norm, norm_grad_input, norm_grad_weight, norm_grad_weight_workspace};
pub use product::ALIGNMENT;
pub use product::{
    Batch, Epilogue, Matrix, Product, is_matrix, leading_sums_workspace, linear, linear_grad_input, linear_grad_weight,
    matmul, product_workspace, scratch_in,
};
pub use quantized::{QuantizedMatrix, weight_squares};
pub use reduce::{column_sums_workspace, scaled_sum, sum};
pub use rope::{RopeFrequencies, rope};
pub use softmax::{
    Gathered, HeadRows, Upstream, cross_entropy, cross_entropy_grad, head, log_sum_exp, softmax, softmax_grad,
};
pub use update::{number, update};

use std::any::Any;
use std::ffi::c_void;
use std::fmt::Debug;

use candle_core::{DType, Layout};

use super::Family;

/// One piece of work for a device.
#[derive(Debug)]
pub enum Launch {
    /// One kernel, started once.
    Kernel(Kernel),
    /// A matrix product.
    Product(Product),
    /// A copy that runs at the same time as later launches, until its end is waited for.
    Copy(HostCopy),
    /// Waits for the copy with this index. If the copy has ended before, for instance in an earlier recording, nothing
    /// happens.
    CopyEnd(u32),
}

/// A copy of an offloaded activation between device memory and host memory. Copies run one after another, in order.
#[derive(Debug, Clone, Copy)]
pub struct HostCopy {
    /// The index of the copy in its program.
    pub index: u32,
    /// The device address.
    pub address: u64,
    /// The offset in host memory.
    pub offset: u64,
    /// Number of bytes.
    pub bytes: u64,
    /// True if the bytes are copied to the host, false if they are copied back.
    pub to_host: bool,
}

/// Returns launches that run these kernels one after another.
fn launches<const N: usize>(kernels: [Kernel; N]) -> Option<Vec<Launch>> {
    Some(kernels.map(Launch::Kernel).into())
}

/// One kernel, started once.
#[derive(Debug)]
pub struct Kernel {
    /// The source that contains the kernel.
    pub family: Family,
    /// The kernel's name, which ends in the type that the kernel stores.
    pub name: String,
    /// Number of blocks in each dimension.
    pub grid: [u32; 3],
    /// Number of threads per block, a multiple of 32.
    pub block: u32,
    /// Bytes of dynamic shared memory per block. A size above 48 KiB must be requested from the driver before the
    /// launch.
    pub shared_bytes: u32,
    /// Number of tickets, from [`Operands::tickets`] on, with which the kernel's blocks determine which of them
    /// finishes last.
    pub tickets: u32,
    /// The kernel's only argument, a struct.
    pub arguments: Box<dyn Arguments>,
}

/// A kernel's only argument: plain data in C layout.
pub trait Arguments: Any + Debug + Send + Sync {
    /// Bytes of the struct.
    fn bytes(&self) -> usize;

    /// Returns the address of the struct, from which the driver copies it.
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

/// The bit that marks an address as the address of a slot (`slots.cuh`). A slot is 16 bytes of device memory. It
/// holds the address and the size in bytes of a tensor with dynamic rows. The number of these rows is only known
/// at run time, so the operand's layout has the largest possible number.
pub const SLOT: u64 = 1 << 63;

/// A tensor at its planned address.
#[derive(Debug, Clone)]
pub struct Operand {
    /// Device address of the layout's first element, or of a slot that contains that address (marked by [`SLOT`]).
    pub address: u64,
    /// Shape and strides. The layout's start offset is already included in the address.
    pub layout: Layout,
    /// Type of the elements.
    pub dtype: DType,
}

impl Operand {
    /// Returns the extents.
    pub fn dims(&self) -> &[usize] {
        self.layout.dims()
    }

    /// Returns the number of elements.
    pub fn count(&self) -> u64 {
        self.layout.shape().elem_count() as u64
    }

    /// Returns the extent of the last dimension.
    pub fn width(&self) -> u64 {
        crate::width(self.dims()) as u64
    }

    /// True if the address is read from a slot at run time.
    pub fn has_slot(&self) -> bool {
        self.address & SLOT != 0
    }

    /// Returns the number of elements in a pack of 16 bytes.
    fn pack(&self) -> u64 {
        pack(self.dtype)
    }

    /// Returns the number of packs in the last dimension.
    fn packs(&self) -> u64 {
        self.width().div_ceil(self.pack())
    }
}

/// Optional features of a device that launches use.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Features {
    /// Matrix products of warpgroups (`wgmma`), which only compute capability 9.0 has.
    pub warpgroups: bool,
    /// Products of f32 matrices on tensor cores ([`Product::tf32`]).
    pub tf32: bool,
}

/// The operands of one instruction.
#[derive(Debug)]
pub struct Operands<'a> {
    /// The inputs. An input that is overwritten has the address of its output.
    pub inputs: &'a [Operand],
    /// The outputs, which are contiguous.
    pub outputs: &'a [Operand],
    /// Addresses of the pieces of `Op::cuda_workspace`.
    pub workspace: &'a [u64],
    /// A bit per output: 1 if the kernels add to the output, 0 if they overwrite it.
    pub accumulate: u64,
    /// Device address of `u32` tickets. They are 0 before the launches, and the launches reset them to 0. Their
    /// number is at least [`Kernel::tickets`] of each launch.
    pub tickets: u64,
    /// The source of this step's and micro-batch's random numbers.
    pub random: Random,
    /// The features of the device that runs the launches.
    pub features: Features,
}

/// A stream of random numbers. The part of its seed that depends on the step is read when the kernel runs.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Random {
    /// Device address of the step's key, which has 8 bytes.
    pub key: u64,
    /// The index of the micro-batch within the step.
    pub micro_batch: u64,
}

impl Operands<'_> {
    fn accumulate(&self, output: usize) -> u32 {
        u32::from(self.accumulates(output))
    }

    /// True if the kernels add to this output rather than overwrite it.
    pub fn accumulates(&self, output: usize) -> bool {
        self.accumulate >> output & 1 == 1
    }
}

/// Returns the number of elements in a pack of 16 bytes.
fn pack(dtype: DType) -> u64 {
    16 / dtype.size_in_bytes() as u64
}

/// Returns the name of the kernel that stores this type, or `None` if there is none.
fn typed(name: &str, dtype: DType) -> Option<String> {
    match dtype {
        DType::F32 => Some(format!("{name}_f32")),
        DType::BF16 => Some(format!("{name}_bf16")),
        _ => None,
    }
}

/// Returns the name of the kernel that reads one type and stores another. Returns `None` if there is no such kernel.
/// The types may be equal, or bf16 and f32.
fn typed_to(name: &str, from: DType, to: DType) -> Option<String> {
    match (from, to) {
        (DType::BF16, DType::F32) => Some(format!("{name}_bf16_to_f32")),
        _ if from == to => typed(name, to),
        _ => None,
    }
}

/// Most dimensions that kernels can iterate over: `MAX_RANK` of strides.cuh.
const MAX_RANK: usize = 6;

/// Extents, and strides in elements, with the layout of `Strides` in strides.cuh.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Strides {
    dims: [u64; MAX_RANK],
    strides: [u64; MAX_RANK],
    rank: u32,
    is_small: u32,
}

impl Strides {
    /// The strides of a scalar.
    const NONE: Self = Self { dims: [1; MAX_RANK], strides: [0; MAX_RANK], rank: 0, is_small: 1 };

    /// Returns the strides with which a kernel iterates over several tensors of the extents `dims` together.
    /// Adjacent dimensions are merged where the layouts of all tensors allow it. Returns `None` if more than
    /// [`MAX_RANK`] dimensions remain.
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

    /// Converts extents and strides to units of packs. Returns `None` unless the last dimension of every tensor is
    /// contiguous and consists of whole packs, as do all other strides.
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

    /// Returns the strides of one operand, or `None` if it has too many dimensions.
    pub fn of(operand: &Operand) -> Option<Self> {
        Self::merged(operand.dims(), [operand.layout.stride()]).map(|[strides]| strides)
    }

    /// Returns the struct as fields of 8 bytes. The last field contains both `rank` and `is_small`.
    pub fn words(&self) -> impl Iterator<Item = u64> {
        let last = u64::from(self.rank) | u64::from(self.is_small) << 32;
        self.dims.into_iter().chain(self.strides).chain([last])
    }
}

/// True if kernels can iterate over a tensor with this layout.
pub fn can_walk(layout: &Layout) -> bool {
    Strides::merged(layout.dims(), [layout.stride()]).is_some()
}

/// Number of threads per block in kernels that iterate over elements.
const BLOCK: u32 = 256;

/// The number of multiprocessors of an H100 SXM or H200.
const MULTIPROCESSORS: u64 = 132;

/// Returns the number of blocks that contain this many threads.
fn blocks(threads: u64, block: u32) -> u32 {
    u32::try_from(threads.div_ceil(u64::from(block))).expect("a device's memory holds no more elements than that")
}

/// Bytes of shared memory that a reduction over a block needs: `MAX_WARPS` floats (reduce.cuh).
const FOLD_BYTES: u32 = 4 * 32;

impl Kernel {
    /// Returns a kernel with this many threads in total, for instance one per element.
    pub fn flat(family: Family, name: String, threads: u64, arguments: impl Arguments + 'static) -> Self {
        let grid = [blocks(threads, BLOCK), 1, 1];
        Self { family, name, grid, block: BLOCK, shared_bytes: 0, tickets: 0, arguments: Box::new(arguments) }
    }

    /// Returns a kernel with one block per row. The block's size suits rows of this many packs.
    pub fn rows(family: Family, name: String, rows: u64, packs: u64, arguments: impl Arguments + 'static) -> Self {
        // About one thread per pack, in whole warps.
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

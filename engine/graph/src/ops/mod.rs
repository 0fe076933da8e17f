//! The operations, one per file, each with shape rule, gradient, cost, kernel and reference implementation.

mod affine;
mod attention;
mod binary;
mod broadcast;
mod cache_write;
mod cached_attention;
mod cast;
mod cat;
mod collective;
mod compare;
mod compress;
mod contiguous;
mod cross_entropy;
mod detach;
mod dropout;
mod embedding;
mod experts;
mod gather;
mod layer_norm;
mod linear;
mod linear_cross_entropy;
mod matmul;
mod max;
mod narrow;
mod norm_grad;
mod output_types;
mod powf;
mod quantized_linear;
mod reshape;
mod rms_norm;
mod rope;
mod scaled_sum;
mod sink_attention;
mod softmax;
mod sum;
mod swiglu;
mod transpose;
mod unary;
mod weight_squares;
mod where_cond;

pub(crate) use gapless_kernels::width;

pub use affine::Affine;
pub use attention::Attention;
pub use binary::{Binary, BinaryKind};
pub use broadcast::BroadcastAs;
pub use cache_write::CacheWrite;
pub use cached_attention::CachedAttention;
pub use cast::Cast;
pub use cat::Cat;
pub use collective::Collective;
pub use compare::{Compare, Comparison};
pub use compress::{Compress, Expand, packed};
pub use contiguous::Contiguous;
pub use cross_entropy::CrossEntropy;
pub use detach::Detach;
pub use dropout::Dropout;
pub use embedding::Embedding;
pub(crate) use experts::TopKGrad;
pub use experts::{
    Chooses, Combine, Dispatch, DocumentLoad, DropPolicy, Dropped, ExpertGroups, ExpertLoad, GroupedLinear, Jitter,
    LimitedActivation, LogSumExp, NONE, Route, RouteKept, RoutedSwiGlu, RunLengths, RunStarts, SlotWeights, TopK,
};
pub use gather::{Gather, ScatterAdd};
pub use layer_norm::LayerNorm;
pub use linear::Linear;
pub use linear_cross_entropy::LinearCrossEntropy;
pub use matmul::MatMul;
pub use max::Max;
pub use narrow::{Narrow, Widen};
pub use powf::Powf;
pub use quantized_linear::{QuantizedLinear, QuantizedWeight};
pub use reshape::Reshape;
pub use rms_norm::RmsNorm;
pub use rope::{Rope, RopeFrequencies, RopeScaling};
pub use scaled_sum::ScaledSum;
pub use sink_attention::SinkAttention;
pub use softmax::Softmax;
pub use sum::Sum;
pub use swiglu::SwiGlu;
pub use transpose::Transpose;
pub use unary::{Unary, UnaryKind};
pub use weight_squares::WeightSquares;
pub use where_cond::Where;

use candle_core::{DType, Layout};
use gapless_kernels::Spec;
use gapless_kernels::cpu::{last_extent, row_of};

use self::output_types::OutputTypes;
use crate::graph::FLOATS;

/// True if x is positive, and x and 1/x are representable in f32.
pub(crate) fn is_positive_f32(x: f64) -> bool {
    x > 0.0 && (x as f32).is_normal() && (1.0 / x as f32).is_normal()
}

/// Checks that all tensors have the same type, and that it is one of the [`FLOATS`].
pub(crate) fn expect_float(inputs: &[Spec]) -> Result<(), String> {
    let first = inputs.first().map_or(DType::F32, |s| s.dtype);
    let expected = if FLOATS.contains(&first) { first } else { DType::F32 };
    match inputs.iter().position(|s| s.dtype != expected) {
        Some(0) => Err(format!("input 0 is {first:?}; this operation takes one of {FLOATS:?}")),
        Some(index) => {
            Err(format!("input {index} is {:?}, input 0 {first:?}; all must have one type", inputs[index].dtype))
        }
        None => Ok(()),
    }
}

/// Checks that the type is that of a mask: u8 or u32. In a mask, 0 is false and any other element is true.
pub(crate) fn expect_mask(input: &Spec) -> Result<(), String> {
    match input.dtype {
        DType::U8 | DType::U32 => Ok(()),
        other => Err(format!("a mask must be u8 or u32, not {other:?}")),
    }
}

/// Checks that kernels can copy and compare the type: one of the [`FLOATS`], or u8 or u32 (masks and ids).
pub(crate) fn expect_stored(input: &Spec) -> Result<(), String> {
    if FLOATS.contains(&input.dtype) {
        Ok(())
    } else {
        expect_mask(input).map_err(|_| format!("{:?} has no kernels", input.dtype))
    }
}

/// Checks that all tensors have the same shape and the same type, which is one of the [`FLOATS`].
pub(crate) fn expect_equal(inputs: &[Spec]) -> Result<(), String> {
    expect_float(inputs)?;
    if inputs.windows(2).all(|pair| pair[0] == pair[1]) { Ok(()) } else { Err("the shapes must be equal".into()) }
}

/// The methods of [`Op`](crate::Op) that all views implement in the same way. Views are resolved into layouts when the
/// graph is built, so they have no kernel.
macro_rules! view_only {
    () => {
        fn reads_strides(&self, _: usize, _: &candle_core::Layout) -> bool {
            true
        }

        fn flops(&self, _: &[gapless_kernels::Spec], _: &[gapless_kernels::Spec]) -> u64 {
            0
        }

        fn run(&self, _: &mut gapless_kernels::cpu::Args<'_>) {
            unreachable!("a view has no kernel")
        }

        fn reference(&self, _: &crate::reference::Reference<'_>) -> Vec<crate::reference::Array> {
            unreachable!("the graph reads a view through its layout")
        }
    };
}
use view_only;

/// Checks that a tensor has at least `rank` dimensions.
pub(crate) fn expect_rank(input: &Spec, rank: usize) -> Result<(), String> {
    if input.dims().len() >= rank { Ok(()) } else { Err(format!("the input must have at least {rank} dimensions")) }
}

/// Returns element `index`, in row-major order, of a tensor with strides.
pub(crate) fn element(data: &[f32], layout: &Layout, index: usize) -> f32 {
    let width = last_extent(layout);
    let (row, step) = row_of(data, layout, index / width);
    row[index % width * step]
}

/// Checks that the tensor holds ids: its type must be u32.
pub(crate) fn expect_ids(name: &str, input: &Spec) -> Result<(), String> {
    if input.dtype == DType::U32 { Ok(()) } else { Err(format!("{name} must be u32, not {:?}", input.dtype)) }
}

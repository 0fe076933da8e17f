//! The trait of all operations, the built-in ones and the user's own.
//!
//! An operation is one value, its attributes. It implements a shape rule, a gradient as further graph nodes, a cost, a
//! CPU kernel, and a reference implementation in f64 that is simple enough to be trusted. The kernel is checked against
//! the reference, and the gradient against finite differences of the reference ([`crate::gradient_check`]).

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use candle_core::{DType, Layout};
use gapless_kernels::Spec;
use gapless_kernels::cpu::Args;

use crate::Gradient;
use crate::error::{Error, Result};
use crate::reference::{Array, Reference};

/// The way an operation treats dynamic rows, whose number is known only while the step runs. The first dimension of such a
/// tensor is the greatest number of rows, and the slices that a kernel gets have the actual number.
///
/// On a GPU, the address of such a tensor is read from a slot. Generated kernels (`Op::cuda_fusible`) read slots.
/// Launches of other kernels are refused, unless their family [reads
/// slots](gapless_kernels::cuda::Family::reads_slots).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowUse {
    /// The operation does not distinguish them: it uses the shapes alone.
    Unaware,
    /// The operation reads as many rows as there are. Its outputs have fixed shapes.
    FixedOutputs,
    /// Outputs with the shape of a dynamic input have as many rows as that input.
    InheritsRows,
    /// The outputs have dynamic rows. Their number is the last element of input `offsets`.
    DynamicOutputs {
        /// Index of the input with the row offsets.
        offsets: usize,
        /// Number of rows if all ranks have equally many.
        balanced: usize,
    },
}

/// An operation.
pub trait Op: Any + fmt::Debug + Send + Sync {
    /// Name of the operation in reports, errors and recompute policies.
    fn name(&self) -> &'static str;

    /// Shape rule: returns the shapes and types of the outputs for these inputs.
    ///
    /// # Errors
    /// Returns what is wrong with the inputs, as text; the builder adds the operation, the layer and the shapes.
    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String>;

    /// Returns how the operation treats dynamic rows.
    fn rows(&self) -> RowUse {
        RowUse::Unaware
    }

    /// Returns the layout of the output in the storage of input 0, if the operation is a view, which moves no data.
    fn view(&self, _input: &Layout) -> Option<Layout> {
        None
    }

    /// True if the kernel can read input `index` in this layout. If not, the builder inserts a contiguous copy before
    /// it.
    fn reads_strides(&self, _index: usize, _layout: &Layout) -> bool {
        false
    }

    /// True if the CUDA kernels can write output `index` with any strides whose last is 1.
    fn writes_strides(&self, _index: usize) -> bool {
        false
    }

    /// Records the gradients of the inputs.
    ///
    /// # Errors
    /// Returns [`Error::NoGradient`] if the operation has no gradient, or the errors of recording graph nodes.
    fn gradient(&self, g: &mut Gradient) -> Result<()> {
        match (0..g.inputs()).find(|&input| g.wants(input)) {
            Some(input) => Err(Error::NoGradient { op: self.name().into(), input }),
            None => Ok(()),
        }
    }

    /// True if the outputs count as constants in the backward, even if the inputs depend on parameters.
    fn stops_gradients(&self) -> bool {
        false
    }

    /// Number of arithmetic operations, for schedules and reports.
    fn flops(&self, _inputs: &[Spec], outputs: &[Spec]) -> u64 {
        outputs.iter().map(|s| s.elements() as u64).sum()
    }

    /// Number of bytes read and written, for schedules and for the choice of values to recompute.
    fn bytes_moved(&self, inputs: &[Spec], outputs: &[Spec]) -> u64 {
        inputs.iter().chain(outputs).map(Spec::bytes).sum()
    }

    /// Pairs (input, output) that may share the same bytes.
    fn inplace(&self) -> &[(usize, usize)] {
        &[]
    }

    /// Pairs (input, output) for which the output *is* the input, updated in place (optimizer states).
    fn mutates(&self) -> &[(usize, usize)] {
        &[]
    }

    /// True if the kernel can add to output `index` instead of overwriting it, if [`Args::accumulate`] says so. Calls
    /// for one micro-batch after the other must then give the same bits as one call for all of them.
    fn accumulates(&self, _index: usize) -> bool {
        false
    }

    /// Returns the same operation with output `index` in another float type, or `None` if that output is always
    /// rounded. Sums over micro-batches use it to add values before they are rounded.
    fn with_output_dtype(&self, _index: usize, _dtype: DType) -> Option<Arc<dyn Op>> {
        None
    }

    /// Returns the bytes of each piece of scratch that one call with `threads` threads needs. Several small pieces are
    /// easier to place than a large one, since they need not be adjacent. [`Args::workspace`] returns them in this
    /// order.
    fn workspace(&self, _inputs: &[Spec], _outputs: &[Spec], _threads: usize) -> Vec<u64> {
        Vec::new()
    }

    /// True if [`Op::run`] reads and writes bf16 operands directly. If not, the executor gives it f32 copies of such
    /// inputs and rounds its outputs afterwards. A kernel for f32 thus serves bf16 too, at the price of some scratch.
    fn runs_in_bf16(&self) -> bool {
        false
    }

    /// True if the kernel reads input `index` in bf16 directly. No output may overwrite that input. The executor may
    /// still round the outputs.
    fn reads_bf16(&self, _index: usize) -> bool {
        self.runs_in_bf16()
    }

    /// True if, with bf16 inputs, the kernel may round intermediate results to bf16 before it multiplies them.
    fn rounds_intermediates(&self) -> bool {
        false
    }

    /// The CPU kernel. It is not called for views.
    fn run(&self, args: &mut Args<'_>);

    /// True if the CUDA kernels can read input `index` in a layout that [`Op::run`] can read. If not, it is copied
    /// before they are launched.
    fn cuda_reads_strides(&self, _index: usize, _layout: &Layout) -> bool {
        true
    }

    /// Returns the bytes of each piece of scratch that one call on a GPU needs.
    fn cuda_workspace(&self, _inputs: &[Spec], _outputs: &[Spec]) -> Vec<u64> {
        Vec::new()
    }

    /// Bytes that its kernels on a GPU move besides the operation's own operands and products' matrices: scratch that they hand each other,
    /// and what one of them reads again.
    fn cuda_bytes_again(&self, _inputs: &[Spec], _outputs: &[Spec]) -> u64 {
        0
    }

    /// Returns what the operation contributes to a CUDA kernel that several operations share, or `None` if it is never
    /// fused.
    fn cuda_fusible(&self) -> Option<gapless_kernels::cuda::Fusible> {
        None
    }

    /// Returns the CUDA launches, in order, or `None` if there are no CUDA kernels for the operation. Element-wise
    /// operations ([`Fusible::Each`](gapless_kernels::cuda::Fusible::Each)) get a generated kernel by default. It is
    /// not called for views.
    fn cuda(&self, operands: &gapless_kernels::cuda::Operands<'_>) -> Option<Vec<gapless_kernels::cuda::Launch>> {
        gapless_kernels::cuda::generate::each(self.name(), self.cuda_fusible()?, operands)
    }

    /// The reference implementation in f64, as simple as possible: returns one array per output.
    fn reference(&self, args: &Reference<'_>) -> Vec<Array>;
}

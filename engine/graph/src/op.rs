//! What an operation has to say of itself: one trait, implemented by the built-in operations and by users' own.
//!
//! An operation is one value (its attributes) with a shape rule, a gradient written as more graph, a cost, a CPU kernel,
//! and a reference in f64 that is simple enough to be believed. The reference judges the kernel, and finite differences
//! of it judge the gradient ([`crate::gradient_check`]).

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use candle_core::{DType, Layout};
use gapless_kernels::Spec;
use gapless_kernels::cpu::Args;

use crate::Gradient;
use crate::error::{Error, Result};
use crate::reference::{Array, Reference};

/// What an operation knows of rows that are counted while the step runs: its tensors' first dimension is then the most that
/// there may be, and their slices are as long as the count says. On a GPU, kernels look in slots where such tensors lie: those that are
/// made of an expression (`Op::cuda_fusible`) do; launches of others are refused, unless they are of a family that
/// [reads slots](gapless_kernels::cuda::Family::reads_slots).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rows {
    /// Nothing: it goes by shapes.
    Unaware,
    /// It reads counted rows by their count; its outputs are of their whole shape.
    Fixed,
    /// Outputs of the shape of a counted input have its rows.
    Inherited,
    /// The first dimension of its outputs is counted: the last element of input `starts` says how many rows there are.
    Counted {
        /// Index of the input.
        starts: usize,
        /// How many there are if all ranks have the same number.
        balanced: usize,
    },
}

/// One kind of computation.
pub trait Op: Any + fmt::Debug + Send + Sync {
    /// The name that reports, errors and recompute policies use.
    fn name(&self) -> &'static str;

    /// Shape rule: the outputs for these inputs.
    ///
    /// # Errors
    /// What is wrong with the inputs, in words; the builder adds operation, layer and shapes.
    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String>;

    /// What it knows of counted rows.
    fn rows(&self) -> Rows {
        Rows::Unaware
    }

    /// For operations that move no data: the output's place in the storage of input 0.
    fn view(&self, _input: &Layout) -> Option<Layout> {
        None
    }

    /// Whether the kernel reads input `index` through the strides of this layout; if not, the builder puts a copy in front.
    fn reads_strides(&self, _index: usize, _layout: &Layout) -> bool {
        false
    }

    /// Whether the kernels for GPUs write output `index` through any strides but the last, which is 1.
    fn writes_strides(&self, _index: usize) -> bool {
        false
    }

    /// Records the gradients of the inputs.
    ///
    /// # Errors
    /// [`Error::NoGradient`] when there is none, or what building the graph returns.
    fn gradient(&self, g: &mut Gradient) -> Result<()> {
        match (0..g.inputs()).find(|&input| g.needs(input)) {
            Some(input) => Err(Error::NoGradient { op: self.name().into(), input }),
            None => Ok(()),
        }
    }

    /// Whether what it gives counts as a constant in the backward, whatever it was made of.
    fn stops_gradients(&self) -> bool {
        false
    }

    /// Arithmetic, for schedules and reports.
    fn flops(&self, _inputs: &[Spec], outputs: &[Spec]) -> u64 {
        outputs.iter().map(|s| s.elements() as u64).sum()
    }

    /// Bytes read and written, for schedules and for choosing what to compute again.
    fn bytes_moved(&self, inputs: &[Spec], outputs: &[Spec]) -> u64 {
        inputs.iter().chain(outputs).map(Spec::bytes).sum()
    }

    /// Pairs (input, output): the kernel may be given the same bytes for both.
    fn inplace(&self) -> &[(usize, usize)] {
        &[]
    }

    /// Pairs (input, output): the output *is* the input, changed (optimizer states).
    fn mutates(&self) -> &[(usize, usize)] {
        &[]
    }

    /// Whether the kernel can add to output `index` instead of setting it, when [`Args::accumulate`] says so. The sum
    /// over micro-batches must then have the same bits as one call over all of them.
    fn accumulates(&self, _index: usize) -> bool {
        false
    }

    /// The same with output `index`, of which this is the only change, in another type of float: so that a sum over
    /// micro-batches has it as it was before it was rounded. None if it is always rounded.
    fn with_output_dtype(&self, _index: usize, _dtype: DType) -> Option<Arc<dyn Op>> {
        None
    }

    /// Scratch of one call with `threads` threads: the bytes of each of its pieces. Several small pieces, which need not lie
    /// side by side, are easier to find room for than a large one. [`Args::workspace`] hands them out in this order.
    fn workspace(&self, _inputs: &[Spec], _outputs: &[Spec], _threads: usize) -> Vec<u64> {
        Vec::new()
    }

    /// Whether [`Op::run`] takes what is stored in bf16 as it is. If not, it is given a copy in f32 of each such input, and what it
    /// writes is rounded behind it: a kernel for f32 is one for bf16 too, for some scratch.
    fn runs_in_bf16(&self) -> bool {
        false
    }

    /// Whether it takes input `index` as it is, which no output overwrites; what it writes may be rounded behind it all the same.
    fn reads_bf16(&self, _index: usize) -> bool {
        self.runs_in_bf16()
    }

    /// Whether it may round to bf16 what it makes and multiplies again, where its inputs are bf16.
    fn rounds_factors(&self) -> bool {
        false
    }

    /// The CPU kernel. Not called for views.
    fn run(&self, args: &mut Args<'_>);

    /// Whether the kernels for GPUs read input `index` through the strides of a layout that [`Op::run`] reads; if not, a copy is
    /// put in front of them.
    fn cuda_reads_strides(&self, _index: usize, _layout: &Layout) -> bool {
        true
    }

    /// Scratch of one call on a GPU: the bytes of each of its pieces.
    fn cuda_workspace(&self, _inputs: &[Spec], _outputs: &[Spec]) -> Vec<u64> {
        Vec::new()
    }

    /// Bytes that its kernels on a GPU move besides the operation's own operands and products' matrices: scratch that they hand each other,
    /// and what one of them reads again.
    fn cuda_bytes_again(&self, _inputs: &[Spec], _outputs: &[Spec]) -> u64 {
        0
    }

    /// What it can bring into a kernel of a GPU that several operations share; none if it is always by itself.
    fn cuda_fusible(&self) -> Option<gapless_kernels::cuda::Fusible> {
        None
    }

    /// What is launched on a GPU, in order; none where there are no kernels for it. An operation of elements
    /// ([`Fusible::Each`](gapless_kernels::cuda::Fusible::Each)) has a generated kernel. Not called for views.
    fn cuda(&self, operands: &gapless_kernels::cuda::Operands<'_>) -> Option<Vec<gapless_kernels::cuda::Launch>> {
        gapless_kernels::cuda::generate::each(self.name(), self.cuda_fusible()?, operands)
    }

    /// The same in f64, as simply as it can be said: one array per output.
    fn reference(&self, args: &Reference<'_>) -> Vec<Array>;
}

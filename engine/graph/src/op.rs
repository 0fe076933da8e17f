//! The trait of all operations, the built-in ones and the user's own.
//!
//! An operation is a value that holds its attributes. It implements a shape rule, a gradient as further graph nodes, a
//! cost, a CPU kernel, and a reference implementation in f64 that is simple enough to be trusted. The kernel is checked
//! against the reference implementation. The gradient is checked against finite differences of the reference
//! implementation ([`crate::gradient_check`]).

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use candle_core::{DType, Layout};
use gapless_kernels::cpu::Args;
use gapless_kernels::{Spec, Window};

use crate::Gradient;
use crate::error::{Error, Result};
use crate::reference::{Array, Reference};
use crate::rule::Rule;

/// The way an operation treats dynamic rows, whose number is known only while the step runs. The first extent of a
/// tensor with dynamic rows is the maximum number of rows. The slices that are passed to a kernel have the actual
/// number of rows.
///
/// On a GPU, the address of such a tensor is read from a slot in memory. Generated kernels ([`Op::cuda_fusible`]) read
/// addresses from slots. Any other kernel may only be launched on dynamic rows if its family [reads
/// slots](gapless_kernels::cuda::Family::reads_slots).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowUse {
    /// The operation computes on all rows that the shapes give, so none of its operands can have dynamic rows.
    Unaware,
    /// The operation reads the actual rows of dynamic inputs. Its outputs have fixed shapes.
    FixedOutputs,
    /// Outputs with the shape of a dynamic input have as many rows as that input.
    InheritsRows,
    /// The outputs have dynamic rows. The input with index `offsets` holds row offsets, the last of which is the number
    /// of rows.
    DynamicOutputs {
        /// Index of the input with the row offsets.
        offsets: usize,
        /// Number of rows under balanced routing, with which every rank receives as many rows as it sends.
        balanced: usize,
    },
}

/// The operands of an operation that have a token for each key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Keys {
    /// The indices of inputs.
    pub inputs: &'static [usize],
    /// The indices of outputs, which are sums over the queries.
    pub outputs: &'static [usize],
}

/// An operation.
pub trait Op: Any + fmt::Debug + Send + Sync {
    /// Name of the operation in reports, errors and recompute policies.
    fn name(&self) -> &'static str;

    /// Shape rule: returns the shapes and types of the outputs for these inputs.
    ///
    /// # Errors
    /// Returns the reason why the inputs are invalid, as text. The builder adds the operation, the layer and the shapes
    /// to this text.
    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String>;

    /// Returns how the operation treats dynamic rows.
    fn rows(&self) -> RowUse {
        RowUse::Unaware
    }

    /// Returns the layout of the output in the storage of input 0 if the operation is a view, which moves no data.
    /// Returns `None` for any other operation.
    fn view(&self, _input: &Layout) -> Option<Layout> {
        None
    }

    /// True if the CPU kernel can read input `index` in this layout. If false, the builder inserts a contiguous copy
    /// before the operation.
    fn reads_strides(&self, _index: usize, _layout: &Layout) -> bool {
        false
    }

    /// True if the CUDA kernels can write output `index` with any strides, as long as the last stride is 1.
    fn writes_strides(&self, _index: usize) -> bool {
        false
    }

    /// True if each element of an output depends only on the inputs' elements at the same index. Other operations of
    /// your own may combine tokens, so models that contain them continue sequences without caches
    /// ([`cache_obstacle`](crate::cache_obstacle)). By default true if [`Op::cuda_fusible`] returns an expression.
    fn is_elementwise(&self) -> bool {
        matches!(self.cuda_fusible(), Some(gapless_kernels::cuda::Fusible::Each { .. }))
    }

    /// Returns which dimensions of the operands belong together, so that ranks can divide them (tensor and sequence
    /// parallelism). Returns `None` if all operands must be whole: ranks then gather the inputs, and every rank computes
    /// everything, which is correct and slow. The default is [`Rule::elementwise`] for
    /// [element-wise](Self::is_elementwise) operations, and `None` for all others.
    fn rule(&self, inputs: &[Spec], outputs: &[Spec]) -> Option<Rule> {
        self.is_elementwise().then(|| Rule::elementwise(inputs.len(), outputs.len()))
    }

    /// True if the operation runs on these parts of its inputs, which the [rule](Self::rule) allows: false, for example, if
    /// its kernel cannot compute the places of the elements in the whole tensor. Ranks then gather the inputs.
    fn runs_on(&self, _inputs: &[Window]) -> bool {
        true
    }

    /// Returns the operands that have a token for each key, if the operation relates queries, which input 0 has, and keys.
    /// Ranks that divide the tokens of sequences divide the queries, and each of them reads all keys.
    fn keys(&self) -> Option<Keys> {
        None
    }

    /// Returns the operation that computes the parts `outputs` from the parts `inputs`, if that is another than this
    /// one: for example, if this one holds an extent. Only called for parts on which this one
    /// [runs](Self::runs_on).
    fn on_parts(&self, _inputs: &[Window], _outputs: &[Window]) -> Option<Arc<dyn Op>> {
        None
    }

    /// Returns the operation on the rows of a rank's own tokens, if `ranks` ranks divide the tokens among themselves and this
    /// one holds the number of rows under balanced routing.
    fn on_rows_of(&self, _ranks: usize) -> Option<Arc<dyn Op>> {
        None
    }

    /// Returns the operation that computes statistics of a part which this one needs of all parts, and the number of this
    /// one's first inputs that it reads. Ranks that hold parts gather the statistics. The operation that
    /// [`Self::on_parts`] returns then has one more input, the last one: the statistics of all ranks in the order of their
    /// parts, [ranks, ..]. [`Self::on_parts`] of the statistics is called with the windows of this operation's inputs.
    /// `None` if the operation computes its parts without knowing of the others.
    fn statistics(&self) -> Option<(Arc<dyn Op>, usize)> {
        None
    }

    /// Returns the number of first inputs in which the operation is linear together: if each of them is a sum, and all
    /// other inputs are the same for each summand, the outputs are the sums of the outputs for each summand. Ranks may
    /// then apply the operation before they add up their summands. `usize::MAX` stands for all inputs. The default is 0.
    fn linear_inputs(&self) -> usize {
        0
    }

    /// Returns the index of an input that is added to each row of output 0, the only output, and the operation without
    /// that input. Ranks that compute summands of the output must add it once.
    fn without_bias(&self) -> Option<(usize, Arc<dyn Op>)> {
        None
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

    /// Returns the pairs (input, output) for which the output may be stored in the bytes of the input.
    fn inplace(&self) -> &[(usize, usize)] {
        &[]
    }

    /// Returns the pairs (input, output) for which the output is the input itself, updated in place. Optimizer states
    /// are an example.
    fn mutates(&self) -> &[(usize, usize)] {
        &[]
    }

    /// True if the kernel can add to output `index` instead of overwriting it when [`Args::accumulate`] says so. If
    /// true, one call per micro-batch, in the order of the micro-batches, must give the same bits as one call for the
    /// whole batch.
    fn accumulates(&self, _index: usize) -> bool {
        false
    }

    /// Returns the same operation with output `index` in another float type, or `None` if the operation cannot produce
    /// that type. This allows a sum over micro-batches to be computed from values that have not been rounded to a
    /// smaller type.
    fn with_output_dtype(&self, _index: usize, _dtype: DType) -> Option<Arc<dyn Op>> {
        None
    }

    /// Returns the sizes in bytes of the pieces of scratch that one call with `threads` threads needs. Prefer several
    /// small pieces to a large one: pieces need not be adjacent, so small ones are easier to place. [`Args::workspace`]
    /// returns the pieces in this order.
    fn workspace(&self, _inputs: &[Spec], _outputs: &[Spec], _threads: usize) -> Vec<u64> {
        Vec::new()
    }

    /// True if [`Op::run`] reads and writes bf16 operands directly. If false, the executor passes f32 copies of bf16
    /// inputs, and rounds the f32 outputs afterwards. So a kernel for f32 also supports bf16, but needs more scratch.
    fn runs_in_bf16(&self) -> bool {
        false
    }

    /// True if [`Op::run`] reads input `index` in bf16 directly although [`Op::runs_in_bf16`] is false. The executor
    /// then passes this input without converting it, and still rounds f32 outputs. If an output overwrites such an
    /// input, the kernel finds the input's values in the f32 output.
    fn reads_bf16(&self, _index: usize) -> bool {
        self.runs_in_bf16()
    }

    /// True if the kernel, given bf16 inputs, may round intermediate results to bf16 before it multiplies them.
    fn rounds_intermediates(&self) -> bool {
        false
    }

    /// The CPU kernel. It is not called for views.
    fn run(&self, args: &mut Args<'_>);

    /// True if the CUDA kernels can read input `index` in this layout. Only called for layouts that
    /// [`Op::reads_strides`] accepts. If false, the input is copied to contiguous memory before the kernels are
    /// launched.
    fn cuda_reads_strides(&self, _index: usize, _layout: &Layout) -> bool {
        true
    }

    /// Returns the sizes in bytes of the pieces of scratch that one call on a GPU needs.
    fn cuda_workspace(&self, _inputs: &[Spec], _outputs: &[Spec]) -> Vec<u64> {
        Vec::new()
    }

    /// Bytes that the operation's GPU kernels move in addition to its operands and the matrices of products: scratch
    /// that passes data between kernels, and data that a kernel reads more than once.
    fn cuda_bytes_again(&self, _inputs: &[Spec], _outputs: &[Spec]) -> u64 {
        0
    }

    /// Returns the operation's contribution to a generated CUDA kernel that fuses several operations, or `None` if the
    /// operation is never fused.
    fn cuda_fusible(&self) -> Option<gapless_kernels::cuda::Fusible> {
        None
    }

    /// Returns the operation's CUDA launches, in order, or `None` if there are no CUDA kernels for it. The default is a
    /// generated kernel for element-wise operations ([`Fusible::Each`](gapless_kernels::cuda::Fusible::Each)), and
    /// `None` for all others. Not called for views.
    fn cuda(&self, operands: &gapless_kernels::cuda::Operands<'_>) -> Option<Vec<gapless_kernels::cuda::Launch>> {
        gapless_kernels::cuda::generate::each(self.name(), self.cuda_fusible()?, operands)
    }

    /// The reference implementation in f64, as simple as possible. Returns one array per output.
    fn reference(&self, args: &Reference<'_>) -> Vec<Array>;
}

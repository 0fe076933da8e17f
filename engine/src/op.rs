//! What an operation has to say of itself: one trait, implemented by the built-in operations and by users' own.
//!
//! An operation is one value (its attributes) with a shape rule, a gradient written as more graph, a cost, a CPU kernel,
//! and a reference in f64 that is simple enough to be believed. The reference judges the kernel, and finite differences
//! of it judge the gradient ([`crate::gradient_check`]).

use std::any::Any;
use std::fmt;
use std::sync::{Arc, Mutex};

use candle_core::{DType, Layout};

use crate::cpu::Args;
use crate::error::{Error, Result};
use crate::graph::{Graph, NodeId, Spec, Tensor, lock};
use crate::reference::{Array, Reference};

/// What an operation knows of rows that are counted while the step runs: its tensors' first dimension is then the most that
/// there may be, and their slices are as long as the count says.
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

    /// Arithmetic, for schedules and reports.
    fn flops(&self, _inputs: &[Spec], outputs: &[Spec]) -> u64 {
        outputs.iter().map(|s| s.elements() as u64).sum()
    }

    /// Bytes read and written, for schedules and for choosing what to compute again.
    fn bytes_moved(&self, inputs: &[Spec], outputs: &[Spec]) -> u64 {
        inputs.iter().chain(outputs).map(Spec::bytes).sum()
    }

    /// Pairs (input, output): the kernel may be given the same bytes for both.
    fn may_overwrite(&self) -> &[(usize, usize)] {
        &[]
    }

    /// Pairs (input, output): the output *is* the input, changed (optimizer states).
    fn must_overwrite(&self) -> &[(usize, usize)] {
        &[]
    }

    /// Whether the kernel can add to output `index` instead of setting it, when [`Args::accumulate`] says so. The sum
    /// over micro-batches must then have the same bits as one call over all of them.
    fn accumulates(&self, _index: usize) -> bool {
        false
    }

    /// The same with output `index`, of which this is the only change, in another type of float: so that a sum over
    /// micro-batches has it as it was before it was rounded. None if it is always rounded.
    fn with_output_in(&self, _index: usize, _dtype: DType) -> Option<Arc<dyn Op>> {
        None
    }

    /// Scratch of one call with `threads` threads: the bytes of each of its pieces. Several small pieces, which need not lie
    /// side by side, are easier to find room for than a large one. [`Args::workspace`] hands them out in this order.
    fn workspace(&self, _inputs: &[Spec], _outputs: &[Spec], _threads: usize) -> Vec<u64> {
        Vec::new()
    }

    /// The CPU kernel. Not called for views.
    fn run(&self, args: &mut Args<'_>);

    /// Whether the kernels for GPUs read input `index` through the strides of a layout that [`Op::run`] reads; if not, a copy is
    /// put in front of them.
    #[cfg(feature = "cuda")]
    fn cuda_reads_strides(&self, _index: usize, _layout: &Layout) -> bool {
        true
    }

    /// Scratch of one call on a GPU: the bytes of each of its pieces.
    #[cfg(feature = "cuda")]
    fn cuda_workspace(&self, _inputs: &[Spec], _outputs: &[Spec]) -> Vec<u64> {
        Vec::new()
    }

    /// What it can bring into a kernel of a GPU that several operations share; none if it is always by itself.
    #[cfg(feature = "cuda")]
    fn cuda_fusible(&self) -> Option<crate::cuda::Fusible> {
        None
    }

    /// What is launched on a GPU, in order; none where there are no kernels for it. Not called for views.
    #[cfg(feature = "cuda")]
    fn cuda(&self, _operands: &crate::cuda::Operands<'_>) -> Option<Vec<crate::cuda::Launch>> {
        None
    }

    /// The same in f64, as simply as it can be said: one array per output.
    fn reference(&self, args: &Reference<'_>) -> Vec<Array>;
}

/// Where an operation's gradient is written.
#[derive(Debug)]
pub struct Gradient {
    pub(crate) graph: Arc<Mutex<Graph>>,
    pub(crate) node: NodeId,
    pub(crate) inputs: Vec<Tensor>,
    pub(crate) outputs: Vec<Tensor>,
    pub(crate) grads: Vec<Option<Tensor>>,
    pub(crate) needs: Vec<bool>,
    pub(crate) sent: Vec<(usize, Tensor)>,
}

impl Gradient {
    /// Number of inputs.
    pub fn inputs(&self) -> usize {
        self.inputs.len()
    }

    /// An input of the forward operation.
    pub fn input(&self, index: usize) -> Tensor {
        self.inputs[index].clone()
    }

    /// An output of the forward operation.
    pub fn output(&self, index: usize) -> Tensor {
        self.outputs[index].clone()
    }

    /// The gradient of the loss with respect to an output; zeros if the loss does not depend on it.
    pub fn grad(&self, index: usize) -> Tensor {
        let output = &self.outputs[index];
        self.grads[index].clone().unwrap_or_else(|| output.constant(0.0, output.shape().clone()))
    }

    /// The number that the gradient with respect to an output is everywhere, if that is known already: the loss is often a
    /// mean.
    pub fn constant(&self, index: usize) -> Option<f64> {
        match &self.grads[index] {
            Some(grad) => lock(&self.graph).number(grad.id()),
            None => Some(0.0),
        }
    }

    /// Lets the forward operation make gradients as it goes, where it has at hand what they need and nothing else would: with
    /// what [`Self::constant`] knows, in the end. From now on the forward is `op`, on the same inputs; its first outputs are
    /// those that there were. Returns the `NEW` others.
    ///
    /// A gradient of a weight that is made so should be one that [`Op::accumulates`].
    ///
    /// # Errors
    /// [`Error::Shape`] when the shape rule of `op` refuses the inputs or gives other outputs, or when it cannot read an input
    /// as it lies.
    pub fn in_forward<const NEW: usize>(&mut self, op: impl Op) -> Result<[Tensor; NEW]> {
        let new = lock(&self.graph).extend_node(self.node, Arc::new(op), NEW)?;
        let new: Vec<Tensor> = new.into_iter().map(|id| Tensor::new(&self.graph, id)).collect();
        Ok(new.try_into().expect("as many as were asked for"))
    }

    /// Refuses a loss that depends on an output which `op` has no gradient for.
    ///
    /// # Errors
    /// [`Error::NoOutputGradient`] when it does.
    pub fn refuse(&self, op: &dyn Op, output: usize) -> Result<()> {
        match self.grads[output] {
            Some(_) => Err(Error::NoOutputGradient { op: op.name().into(), output }),
            None => Ok(()),
        }
    }

    /// Whether the gradient with respect to an input is wanted. Send none that is not.
    pub fn needs(&self, index: usize) -> bool {
        self.needs[index]
    }

    /// Adds to the gradient with respect to an input.
    pub fn send(&mut self, index: usize, gradient: Tensor) {
        debug_assert_eq!(gradient.dims(), self.inputs[index].dims(), "gradient has the shape of its input");
        self.sent.push((index, gradient));
    }
}

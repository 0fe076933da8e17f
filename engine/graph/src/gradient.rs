//! The builder with which an operation records its gradient.

use std::sync::{Arc, Mutex};

use crate::error::{Error, Result};
use crate::graph::{Graph, NodeId, lock};
use crate::op::Op;
use crate::tensor::Tensor;

/// The builder with which an operation records its gradient. It gives access to the operation's inputs, outputs and
/// output gradients, and collects the gradients of the inputs.
#[derive(Debug)]
pub struct Gradient {
    pub(crate) graph: Arc<Mutex<Graph>>,
    pub(crate) node: NodeId,
    pub(crate) inputs: Vec<Tensor>,
    pub(crate) outputs: Vec<Tensor>,
    pub(crate) grads: Vec<Option<Tensor>>,
    pub(crate) wants: Vec<bool>,
    pub(crate) accumulated: Vec<(usize, Tensor)>,
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

    /// Returns the gradient of the loss with respect to an output. If the loss does not depend on the output, the
    /// gradient is zeros.
    pub fn grad(&self, index: usize) -> Tensor {
        let output = &self.outputs[index];
        self.grads[index].clone().unwrap_or_else(|| output.constant(0.0, output.shape().clone()))
    }

    /// Returns the value of all elements of the gradient with respect to an output, if they are known to be equal. This
    /// is common, because most losses are means. Returns `None` if the elements are known only when the program runs.
    pub fn constant(&self, index: usize) -> Option<f64> {
        match &self.grads[index] {
            Some(grad) => lock(&self.graph).number(grad.id()),
            None => Some(0.0),
        }
    }

    /// Replaces the forward operation by `op`, which also computes gradients during the forward. Returns the `NEW`
    /// additional outputs of `op`.
    ///
    /// Use this if the gradient of the output is a known constant ([`Self::constant`]), and if the forward computes
    /// data that the backward would otherwise have to recompute. `op` takes the same inputs as the forward operation.
    /// The first outputs of `op` are those of the forward operation. If an additional output is the gradient of a
    /// weight, `op` should be able to accumulate into that output ([`Op::accumulates`]).
    ///
    /// # Errors
    /// Returns [`Error::Shape`] if the shape rule of `op` rejects the inputs or changes the existing outputs, or if
    /// `op` cannot read the strides of an input.
    pub fn compute_in_forward<const NEW: usize>(&mut self, op: impl Op) -> Result<[Tensor; NEW]> {
        let new = lock(&self.graph).extend_node(self.node, Arc::new(op), NEW)?;
        let new: Vec<Tensor> = new.into_iter().map(|id| Tensor::of(&self.graph, id)).collect();
        Ok(new.try_into().expect("as many as were asked for"))
    }

    /// Checks that the loss does not depend on `output`, for an operation that has no gradient with respect to that
    /// output.
    ///
    /// # Errors
    /// Returns [`Error::NoOutputGradient`] if the loss depends on the output.
    pub fn require_unused(&self, op: &dyn Op, output: usize) -> Result<()> {
        match self.grads[output] {
            Some(_) => Err(Error::NoOutputGradient { op: op.name().into(), output }),
            None => Ok(()),
        }
    }

    /// True if the gradient with respect to an input is needed. For other inputs, [`Self::accumulate`] need not be
    /// called.
    pub fn wants(&self, index: usize) -> bool {
        self.wants[index]
    }

    /// Adds `gradient` to the gradient with respect to an input.
    pub fn accumulate(&mut self, index: usize, gradient: Tensor) {
        debug_assert_eq!(gradient.dims(), self.inputs[index].dims(), "gradient has the shape of its input");
        self.accumulated.push((index, gradient));
    }
}

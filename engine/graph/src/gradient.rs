//! The builder with which an operation records its gradient.

use std::sync::{Arc, Mutex};

use crate::error::{Error, Result};
use crate::graph::{Graph, NodeId, lock};
use crate::op::Op;
use crate::tensor::Tensor;

/// The builder with which an operation records its gradient: its inputs, outputs and output gradients, and a place for
/// the gradients of its inputs.
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

    /// The gradient of the loss with respect to an output; zeros if the loss does not depend on it.
    pub fn grad(&self, index: usize) -> Tensor {
        let output = &self.outputs[index];
        self.grads[index].clone().unwrap_or_else(|| output.constant(0.0, output.shape().clone()))
    }

    /// Returns the value of the output's gradient if it is a known constant, the same for every element. This is often
    /// so, because most losses are means.
    pub fn constant(&self, index: usize) -> Option<f64> {
        match &self.grads[index] {
            Some(grad) => lock(&self.graph).number(grad.id()),
            None => Some(0.0),
        }
    }

    /// Replaces the forward operation by `op`, which also computes gradients during the forward. This is for operations
    /// that hold, in the forward, data that the backward would have to recompute, and whose output gradient is already
    /// known ([`Self::constant`]). `op` takes the same inputs; its first outputs are the existing ones. Returns the
    /// `NEW` further outputs.
    ///
    /// If one of them is the gradient of a weight, `op` should be able to add to that output ([`Op::accumulates`]).
    ///
    /// # Errors
    /// Returns [`Error::Shape`] if the shape rule of `op` rejects the inputs or gives other outputs, or if `op` cannot
    /// read the strides of an input.
    pub fn compute_in_forward<const NEW: usize>(&mut self, op: impl Op) -> Result<[Tensor; NEW]> {
        let new = lock(&self.graph).extend_node(self.node, Arc::new(op), NEW)?;
        let new: Vec<Tensor> = new.into_iter().map(|id| Tensor::of(&self.graph, id)).collect();
        Ok(new.try_into().expect("as many as were asked for"))
    }

    /// Checks that the loss does not depend on an output for which `op` has no gradient.
    ///
    /// # Errors
    /// Returns [`Error::NoOutputGradient`] if it does.
    pub fn require_unused(&self, op: &dyn Op, output: usize) -> Result<()> {
        match self.grads[output] {
            Some(_) => Err(Error::NoOutputGradient { op: op.name().into(), output }),
            None => Ok(()),
        }
    }

    /// True if the gradient with respect to an input is needed. Gradients of other inputs should not be sent.
    pub fn wants(&self, index: usize) -> bool {
        self.wants[index]
    }

    /// Adds a summand to the gradient with respect to an input.
    pub fn accumulate(&mut self, index: usize, gradient: Tensor) {
        debug_assert_eq!(gradient.dims(), self.inputs[index].dims(), "gradient has the shape of its input");
        self.accumulated.push((index, gradient));
    }
}

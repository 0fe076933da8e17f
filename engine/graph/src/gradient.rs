//! Where an operation's gradient is written.

use std::sync::{Arc, Mutex};

use crate::error::{Error, Result};
use crate::graph::{Graph, NodeId, lock};
use crate::op::Op;
use crate::tensor::Tensor;

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
        let new: Vec<Tensor> = new.into_iter().map(|id| Tensor::of(&self.graph, id)).collect();
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

//! Broadcasting: dimensions repeated without a copy.

use candle_core::{Layout, Shape};
use gapless_kernels::Spec;

use super::{Sum, view_only};
use crate::error::Result;
use crate::tensor::Tensor;
use crate::{Gradient, Op};

/// A view that repeats dimensions of extent 1 and adds leading dimensions, all with stride 0.
#[derive(Debug, Clone)]
pub struct BroadcastAs {
    /// The new shape.
    pub shape: Shape,
}

impl Op for BroadcastAs {
    fn name(&self) -> &'static str {
        "broadcast_as"
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        let (from, to) = (inputs[0].dims(), self.shape.dims());
        let fits = from.len() <= to.len() && from.iter().rev().zip(to.iter().rev()).all(|(&f, &t)| f == t || f == 1);
        if !fits {
            return Err(format!("{from:?} does not broadcast to {to:?}"));
        }
        Ok(vec![Spec { shape: self.shape.clone(), dtype: inputs[0].dtype }])
    }

    fn view(&self, input: &Layout) -> Option<Layout> {
        input.broadcast_as(self.shape.clone()).ok()
    }

    fn gradient(&self, g: &mut Gradient) -> Result<()> {
        let from = g.input(0).dims().to_vec();
        let added = self.shape.rank() - from.len();
        let repeated = |&dim: &usize| dim < added || from[dim - added] != self.shape.dims()[dim];
        let dims: Vec<usize> = (0..self.shape.rank()).filter(repeated).collect();
        let dy = g.grad(0);
        let summed = if dims.is_empty() { dy } else { Tensor::apply_op::<1>(Sum { dims }, &[&dy])?[0].clone() };
        let dx = summed.reshape(from)?;
        g.accumulate(0, dx);
        Ok(())
    }

    view_only!();
}

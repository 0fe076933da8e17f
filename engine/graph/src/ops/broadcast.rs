//! Broadcasting: dimensions repeated without a copy.

use std::sync::Arc;

use candle_core::{Layout, Shape};
use gapless_kernels::{Spec, Window};

use super::{Sum, view_only};
use crate::error::Result;
use crate::rule::Rule;
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

    /// The dimensions that are not repeated belong together. A dimension that is repeated is a new one.
    fn rule(&self, inputs: &[Spec], _: &[Spec]) -> Option<Rule> {
        let (from, to) = (inputs[0].dims(), self.shape.dims());
        let added = to.len() - from.len();
        let output: String = ('a'..='z').take(to.len()).collect();
        let kept = |(dim, label): (usize, char)| match from[dim] == to[added + dim] {
            true => label,
            false => '_',
        };
        let input: String = output.chars().skip(added).enumerate().map(kept).collect();
        Some(Rule::Labels(format!("{input} -> {output}").into()))
    }

    fn on_parts(&self, _: &[Window], outputs: &[Window]) -> Option<Arc<dyn Op>> {
        Some(Arc::new(Self { shape: outputs[0].dims().into() }))
    }

    fn linear_inputs(&self) -> usize {
        usize::MAX
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

//! Transposition of two dimensions.

use candle_core::{Layout, Shape};
use gapless_kernels::Spec;

use super::view_only;
use crate::error::Result;
use crate::rule::Rule;
use crate::{Gradient, Op};

/// A view with two dimensions swapped.
#[derive(Debug, Clone, Copy)]
pub struct Transpose {
    /// One of the two dimensions.
    pub dim1: usize,
    /// The other dimension.
    pub dim2: usize,
}

impl Op for Transpose {
    fn name(&self) -> &'static str {
        "transpose"
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        let mut dims = inputs[0].dims().to_vec();
        dims.swap(self.dim1, self.dim2);
        Ok(vec![Spec { shape: Shape::from_dims(&dims), dtype: inputs[0].dtype }])
    }

    fn view(&self, input: &Layout) -> Option<Layout> {
        input.transpose(self.dim1, self.dim2).ok()
    }

    fn rule(&self, inputs: &[Spec], _: &[Spec]) -> Option<Rule> {
        let labels: String = ('a'..='z').take(inputs[0].dims().len()).collect();
        let mut swapped: Vec<char> = labels.chars().collect();
        swapped.swap(self.dim1, self.dim2);
        Some(Rule::Labels(format!("{labels} -> {}", String::from_iter(swapped)).into()))
    }

    fn linear_inputs(&self) -> usize {
        usize::MAX
    }

    fn gradient(&self, g: &mut Gradient) -> Result<()> {
        let dx = g.grad(0).transpose(self.dim1, self.dim2)?;
        g.accumulate(0, dx);
        Ok(())
    }

    view_only!();
}

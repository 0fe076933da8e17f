//! A range of one dimension, and its gradient, which pads the range with zeros.

use std::sync::Arc;

use candle_core::{Layout, Shape};
use gapless_kernels::cpu::{Args, InPieces, Pieces};
use gapless_kernels::{Spec, Window};

use super::view_only;
use crate::error::Result;
use crate::reference::{Array, Reference};
use crate::rule::Rule;
use crate::tensor::Tensor;
use crate::{Gradient, Op};

/// A view of the indices `start..start + len` of dimension `dim`.
#[derive(Debug, Clone, Copy)]
pub struct Narrow {
    /// The dimension.
    pub dim: usize,
    /// First index.
    pub start: usize,
    /// Number of indices.
    pub len: usize,
}

impl Op for Narrow {
    fn name(&self) -> &'static str {
        "narrow"
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        let mut dims = inputs[0].dims().to_vec();
        if self.start.checked_add(self.len).is_none_or(|end| end > dims[self.dim]) {
            return Err(format!(
                "indices {}..{} are outside dimension {} of extent {}",
                self.start,
                self.start.saturating_add(self.len),
                self.dim,
                dims[self.dim]
            ));
        }
        dims[self.dim] = self.len;
        Ok(vec![Spec { shape: Shape::from_dims(&dims), dtype: inputs[0].dtype }])
    }

    fn view(&self, input: &Layout) -> Option<Layout> {
        input.narrow(self.dim, self.start, self.len).ok()
    }

    fn rule(&self, _: &[Spec], _: &[Spec]) -> Option<Rule> {
        Some(Rule::Narrow { dim: self.dim, start: self.start })
    }

    fn on_parts(&self, inputs: &[Window], outputs: &[Window]) -> Option<Arc<dyn Op>> {
        let (start, len) = (inputs[0].held_below(self.dim, self.start), outputs[0].dims()[self.dim]);
        Some(Arc::new(Self { start, len, ..*self }))
    }

    fn linear_inputs(&self) -> usize {
        usize::MAX
    }

    fn gradient(&self, g: &mut Gradient) -> Result<()> {
        let extent = g.input(0).dims()[self.dim];
        let dy = g.grad(0);
        let widen = Widen { dim: self.dim, start: self.start, extent };
        let [dx] = Tensor::apply_op(widen, &[&dy])?;
        g.accumulate(0, dx);
        Ok(())
    }

    view_only!();
}

/// The gradient of [`Narrow`]: places the range in a tensor that is otherwise zeros. If the gradients of several ranges
/// tile a tensor, autodiff replaces them by one [`Cat`](super::Cat).
#[derive(Debug, Clone, Copy)]
pub struct Widen {
    /// The dimension.
    pub dim: usize,
    /// Index in the output at which the input starts.
    pub start: usize,
    /// Extent of the dimension in the output.
    pub extent: usize,
}

impl Op for Widen {
    fn name(&self) -> &'static str {
        "widen"
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        super::expect_float(inputs)?;
        let mut dims = inputs[0].dims().to_vec();
        dims[self.dim] = self.extent;
        Ok(vec![inputs[0].in_shape(dims)])
    }

    fn rule(&self, _: &[Spec], _: &[Spec]) -> Option<Rule> {
        Some(Rule::Widen { dim: self.dim, start: self.start })
    }

    fn on_parts(&self, _: &[Window], outputs: &[Window]) -> Option<Arc<dyn Op>> {
        let (start, extent) = (outputs[0].held_below(self.dim, self.start), outputs[0].dims()[self.dim]);
        Some(Arc::new(Self { start, extent, ..*self }))
    }

    fn linear_inputs(&self) -> usize {
        usize::MAX
    }

    fn gradient(&self, g: &mut Gradient) -> Result<()> {
        let dx = g.grad(0).narrow(self.dim, self.start, g.input(0).dims()[self.dim])?;
        g.accumulate(0, dx);
        Ok(())
    }

    fn flops(&self, _: &[Spec], _: &[Spec]) -> u64 {
        0
    }

    fn run(&self, args: &mut Args<'_>) {
        let out = args.output::<f32>(0);
        let x = args.input::<f32>(0);
        let dims = args.input_dims(0);
        let inner: usize = dims[self.dim + 1..].iter().product();
        let (wide, narrow, start) = (self.extent * inner, dims[self.dim] * inner, self.start * inner);
        if narrow == 0 {
            out.fill(0.0);
            return;
        }
        out.pieces_mut(wide).zip(x.pieces(narrow)).for_each(|(out, x)| {
            out[..start].fill(0.0);
            out[start..start + narrow].copy_from_slice(x);
            out[start + narrow..].fill(0.0);
        });
    }
    fn cuda(&self, operands: &gapless_kernels::cuda::Operands<'_>) -> Option<Vec<gapless_kernels::cuda::Launch>> {
        gapless_kernels::cuda::launch::widen(self.dim, self.start, operands)
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        let x = args.input(0);
        let mut dims = x.dims.clone();
        dims[self.dim] = self.extent;
        let layout = Layout::contiguous(Shape::from_dims(&dims));
        let range = layout.narrow(self.dim, self.start, x.dims[self.dim]).expect("inside by the shape rule");
        let mut out = Array::zeros(&dims);
        for (index, &x) in crate::reference::layout_indices(&range).zip(&x.data) {
            out.data[index] = x;
        }
        vec![out]
    }
}

//! Sum over dimensions.

use candle_core::{Layout, Shape};
use gapless_kernels::Spec;
use gapless_kernels::cpu::{Args, BLOCK, InPieces, Pieces, vectorize};

use crate::error::Result;
use crate::reference::{Array, Reference, layout_indices};
use crate::rule::Rule;
use crate::{Gradient, Op};

/// Sum over `dims` (ascending), which are kept with extent 1.
///
/// A sum over leading dimensions adds whole rows in order. So accumulating such a sum over micro-batches gives the same
/// bits as one sum over the whole batch.
#[derive(Debug, Clone)]
pub struct Sum {
    /// The dimensions to sum over.
    pub dims: Vec<usize>,
}

impl Sum {
    /// True if all summed dimensions are leading ones, so that whole rows are added.
    fn is_leading(&self) -> bool {
        self.dims.iter().enumerate().all(|(i, &d)| i == d)
    }

    fn output_dims(&self, dims: &[usize]) -> Vec<usize> {
        dims.iter().enumerate().map(|(d, &extent)| if self.dims.contains(&d) { 1 } else { extent }).collect()
    }
}

impl Op for Sum {
    fn name(&self) -> &'static str {
        "sum"
    }

    fn rule(&self, inputs: &[Spec], _: &[Spec]) -> Option<Rule> {
        let input: String = ('a'..='z').take(inputs[0].dims().len()).collect();
        let kept = |(dim, label)| if self.dims.contains(&dim) { '_' } else { label };
        let output: String = input.chars().enumerate().map(kept).collect();
        Some(Rule::Labels(format!("{input} -> {output}").into()))
    }

    fn linear_inputs(&self) -> usize {
        usize::MAX
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        super::expect_float(inputs)?;
        Ok(vec![inputs[0].in_shape(self.output_dims(inputs[0].dims()))])
    }

    fn reads_strides(&self, _: usize, _: &candle_core::Layout) -> bool {
        true
    }

    fn gradient(&self, g: &mut Gradient) -> Result<()> {
        let dx = g.grad(0).broadcast_as(g.input(0).shape().clone())?;
        g.accumulate(0, dx);
        Ok(())
    }

    fn flops(&self, inputs: &[Spec], _: &[Spec]) -> u64 {
        inputs[0].elements() as u64
    }

    fn accumulates(&self, _: usize) -> bool {
        self.is_leading()
    }

    fn run(&self, args: &mut Args<'_>) {
        let accumulate = args.accumulate(0);
        let out = args.output::<f32>(0);
        let (x, layout) = args.strided::<f32>(0);
        if self.is_leading() && layout.is_contiguous() {
            let width = out.len().max(1);
            out.pieces_mut(BLOCK.min(1024)).enumerate().for_each(|(block, out)| {
                let start = block * BLOCK.min(1024);
                vectorize!({
                    for (row, x) in x.chunks_exact(width).enumerate() {
                        let x = &x[start..start + out.len()];
                        if row == 0 && !accumulate {
                            out.copy_from_slice(x);
                        } else {
                            out.iter_mut().zip(x).for_each(|(o, &x)| *o += x);
                        }
                    }
                });
            });
            return;
        }
        out.pieces_mut(64).enumerate().for_each(|(task, out)| {
            for (i, out) in out.iter_mut().enumerate() {
                let sum = self.sum_of(0, layout, &x[self.first(layout, task * 64 + i)..]) as f32;
                *out = if accumulate { *out + sum } else { sum };
            }
        });
    }
    fn cuda_workspace(&self, inputs: &[Spec], _: &[Spec]) -> Vec<u64> {
        gapless_kernels::cuda::launch::column_sums_workspace(&inputs[0], &self.dims)
    }
    fn cuda(&self, operands: &gapless_kernels::cuda::Operands<'_>) -> Option<Vec<gapless_kernels::cuda::Launch>> {
        gapless_kernels::cuda::launch::sum(&self.dims, operands)
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        let x = args.input(0);
        let mut out = Array::zeros(&self.output_dims(&x.dims));
        let mut strides = Layout::contiguous(out.dims.clone()).stride().to_vec();
        self.dims.iter().for_each(|&d| strides[d] = 0);
        let target = Layout::new(Shape::from_dims(&x.dims), strides, 0);
        for (index, x) in layout_indices(&target).zip(&x.data) {
            out.data[index] += x;
        }
        vec![out]
    }
}

impl Sum {
    /// Returns the offset of the first element that contributes to element `flat` of the output.
    fn first(&self, layout: &Layout, mut flat: usize) -> usize {
        let mut index = 0;
        for (dim, (&extent, &stride)) in layout.dims().iter().zip(layout.stride()).enumerate().rev() {
            if !self.dims.contains(&dim) {
                index += (flat % extent) * stride;
                flat /= extent;
            }
        }
        index
    }

    /// Returns the sum of `x` over the summed dimensions from the `nth` one on.
    fn sum_of(&self, nth: usize, layout: &Layout, x: &[f32]) -> f64 {
        match self.dims.get(nth) {
            Some(&dim) => {
                let stride = layout.stride()[dim];
                (0..layout.dims()[dim]).map(|i| self.sum_of(nth + 1, layout, &x[i * stride..])).sum()
            }
            None => f64::from(x[0]),
        }
    }
}

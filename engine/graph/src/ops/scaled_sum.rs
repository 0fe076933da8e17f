//! Sum or mean of all elements, which turns a tensor into a loss.

use gapless_kernels::Spec;
use gapless_kernels::cpu::{Args, InPieces, Pieces};

use crate::error::Result;
use crate::reference::{Array, Reference};
use crate::rule::Rule;
use crate::{Gradient, Op};

/// scale · Σ x.
///
/// For each index of the first dimension, the elements are summed in f64, and this partial sum is rounded. The partial
/// sums are then added in order. So a loss that is accumulated over micro-batches of whole sequences has the same bits
/// as the loss of the whole batch.
#[derive(Debug, Clone, Copy)]
pub struct ScaledSum {
    /// The multiplier of the sum: 1/count for a mean.
    pub scale: f64,
}

/// Returns the number of partial sums: the extent of the first dimension, or 1 if the tensor has no other dimension.
fn partial_sums(dims: &[usize]) -> usize {
    if dims.len() > 1 { dims[0].max(1) } else { 1 }
}

impl Op for ScaledSum {
    fn name(&self) -> &'static str {
        "scaled_sum"
    }

    fn rule(&self, _: &[Spec], _: &[Spec]) -> Option<Rule> {
        Some(Rule::labels("* -> "))
    }

    fn linear_inputs(&self) -> usize {
        usize::MAX
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        super::expect_float(inputs)?;
        Ok(vec![inputs[0].in_shape(())])
    }

    fn gradient(&self, g: &mut Gradient) -> Result<()> {
        let dx = g.grad(0).affine(self.scale, 0.0)?.broadcast_as(g.input(0).shape().clone())?;
        g.accumulate(0, dx);
        Ok(())
    }

    fn flops(&self, inputs: &[Spec], _: &[Spec]) -> u64 {
        inputs[0].elements() as u64
    }

    fn accumulates(&self, _: usize) -> bool {
        true
    }

    fn workspace(&self, inputs: &[Spec], _: &[Spec], _: usize) -> Vec<u64> {
        vec![4 * partial_sums(inputs[0].dims()) as u64]
    }

    fn run(&self, args: &mut Args<'_>) {
        let accumulate = args.accumulate(0);
        let out = args.output::<f32>(0);
        let x = args.input::<f32>(0);
        let partial = &mut args.workspace().take::<f32>()[..partial_sums(args.input_dims(0))];
        let row = x.len().div_ceil(partial.len()).max(1);
        partial.fill(0.0);
        partial.pieces_mut(1).zip(x.pieces(row)).for_each_in_runs(8, |(sum, x)| {
            sum[0] = (x.iter().map(|&x| f64::from(x)).sum::<f64>() * self.scale) as f32;
        });
        let start = if accumulate { out[0] } else { 0.0 };
        out[0] = partial.iter().fold(start, |sum, part| sum + part);
    }
    fn cuda_workspace(&self, inputs: &[Spec], _: &[Spec]) -> Vec<u64> {
        vec![4 * partial_sums(inputs[0].dims()) as u64]
    }
    fn cuda(&self, operands: &gapless_kernels::cuda::Operands<'_>) -> Option<Vec<gapless_kernels::cuda::Launch>> {
        gapless_kernels::cuda::launch::scaled_sum(self.scale, partial_sums(operands.inputs[0].layout.dims()), operands)
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        vec![Array::new(&[], vec![args.input(0).data.iter().sum::<f64>() * self.scale])]
    }
}

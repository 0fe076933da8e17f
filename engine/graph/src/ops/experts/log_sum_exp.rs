//! The log-sum-exp, by which a softmax is normalised.

use gapless_kernels::Spec;
use gapless_kernels::cpu::{Args, InPieces, Pieces, math, reduce, rows_per_task};

use crate::error::Result;
use crate::reference::{Array, Reference};
use crate::rule::Rule;
use crate::{Gradient, Op};

/// ln Σ eˣ over the last dimension, which is removed. Routers add the square of this value to the loss to keep their
/// logits small (ST-MoE, arXiv 2202.08906, equation 5).
#[derive(Debug, Clone, Copy)]
pub struct LogSumExp;

impl Op for LogSumExp {
    fn name(&self) -> &'static str {
        "log_sum_exp"
    }

    fn rule(&self, _: &[Spec], _: &[Spec]) -> Option<Rule> {
        Some(Rule::labels("* W -> *"))
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        crate::ops::expect_float(inputs)?;
        crate::ops::expect_rank(&inputs[0], 1)?;
        let dims = inputs[0].dims();
        Ok(vec![inputs[0].in_shape(&dims[..dims.len() - 1])])
    }

    /// dx = dy·softmax(x).
    fn gradient(&self, g: &mut Gradient) -> Result<()> {
        let x = g.input(0);
        let dy = g.grad(0).unsqueeze(x.rank() - 1)?;
        let dx = x.softmax_last_dim()?.broadcast_mul(&dy)?;
        g.accumulate(0, dx);
        Ok(())
    }

    fn flops(&self, inputs: &[Spec], _: &[Spec]) -> u64 {
        4 * inputs[0].elements() as u64
    }

    fn run(&self, args: &mut Args<'_>) {
        let out = args.output::<f32>(0);
        let width = gapless_kernels::width(args.input_dims(0));
        let rows = rows_per_task(width);
        out.pieces_mut(rows).zip(args.input::<f32>(0).pieces(rows * width)).for_each(|(out, x)| {
            for (out, x) in out.iter_mut().zip(x.chunks_exact(width)) {
                let max = reduce::max(x);
                *out = max + reduce::sum(x, |x| math::exp_normal(x - max)).ln();
            }
        });
    }
    fn cuda(&self, operands: &gapless_kernels::cuda::Operands<'_>) -> Option<Vec<gapless_kernels::cuda::Launch>> {
        gapless_kernels::cuda::launch::log_sum_exp(operands)
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        let x = args.input(0);
        let row = |row: &[f64]| {
            let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            max + row.iter().map(|x| (x - max).exp()).sum::<f64>().ln()
        };
        vec![Array::new(&x.dims[..x.dims.len() - 1], x.rows().map(row).collect())]
    }
}

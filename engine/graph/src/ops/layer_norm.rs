//! Layer normalisation (Ba et al., arXiv 1607.06450).

use gapless_kernels::Spec;
use gapless_kernels::cpu::{Args, Float, reduce, vectorize, with_float};

use super::norm_grad::{self, each_normalized_row, expect_vector, stats_of};
use crate::error::Result;
use crate::reference::{Array, Reference};
use crate::rule::Rule;
use crate::{Gradient, Op};

/// y = (x − mean)·rstd·weight + bias over the last dimension, with rstd = 1/√(variance + eps). Outputs: y, and (mean,
/// rstd) of each row, which the gradient reads.
#[derive(Debug, Clone, Copy)]
pub struct LayerNorm {
    /// Added to the variance.
    pub eps: f64,
}

impl Op for LayerNorm {
    fn name(&self) -> &'static str {
        "layer_norm"
    }

    fn rule(&self, _: &[Spec], _: &[Spec]) -> Option<Rule> {
        Some(Rule::labels("* W, W, W -> * W, (*) _"))
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        expect_vector("weight", &inputs[1], &inputs[0])?;
        expect_vector("bias", &inputs[2], &inputs[0])?;
        Ok(vec![inputs[0].clone(), stats_of(&inputs[0])])
    }

    fn gradient(&self, g: &mut Gradient) -> Result<()> {
        g.require_unused(self, 1)?;
        norm_grad::record(g, true)
    }

    fn flops(&self, inputs: &[Spec], _: &[Spec]) -> u64 {
        7 * inputs[0].elements() as u64
    }

    fn runs_in_bf16(&self) -> bool {
        true
    }

    fn run(&self, args: &mut Args<'_>) {
        with_float!(args.output_dtype(0), T => self.run_in::<T>(args));
    }
    fn cuda_fusible(&self) -> Option<gapless_kernels::cuda::Fusible> {
        Some(gapless_kernels::cuda::Fusible::Norm { is_centred: true, eps: self.eps })
    }
    fn cuda(&self, operands: &gapless_kernels::cuda::Operands<'_>) -> Option<Vec<gapless_kernels::cuda::Launch>> {
        gapless_kernels::cuda::launch::norm("layer_norm", self.eps, operands)
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        let (x, weight, bias) = (args.input(0), args.input(1), args.input(2));
        let (mut y, mut stats) = (Vec::new(), Vec::new());
        for row in x.rows() {
            let n = row.len() as f64;
            let mean = row.iter().sum::<f64>() / n;
            let rstd = 1.0 / (row.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / n + self.eps).sqrt();
            stats.extend([mean, rstd]);
            y.extend(row.iter().zip(&weight.data).zip(&bias.data).map(|((x, w), b)| (x - mean) * rstd * w + b));
        }
        vec![Array::new(&x.dims, y), Array::new(&[stats.len() / 2, 2], stats)]
    }
}

impl LayerNorm {
    fn run_in<T: Float>(&self, args: &mut Args<'_>) {
        let (weight, bias) = (args.input::<T>(1), args.input::<T>(2));
        each_normalized_row::<T>(args, |y, x, stats| {
            vectorize!({
                let mean = reduce::sum(x, |x| x) / x.len() as f32;
                let variance = reduce::sum(x, |x| (x - mean) * (x - mean)) / x.len() as f32;
                let rstd = 1.0 / (variance + self.eps as f32).sqrt();
                *stats = [mean, rstd];
                for (y, (&x, (&w, &b))) in y.iter_mut().zip(x.iter().zip(weight.iter().zip(bias))) {
                    *y = T::store((x.load() - mean) * rstd * w.load() + b.load());
                }
            });
        });
    }
}

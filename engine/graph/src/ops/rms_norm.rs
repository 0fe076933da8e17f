//! Root-mean-square normalisation (Zhang & Sennrich, arXiv 1910.07467).

use gapless_kernels::Spec;
use gapless_kernels::cpu::{Args, Float, reduce, vectorize, with_float};

use super::norm_grad::{self, each_normalized_row, expect_vector, stats_of};
use crate::error::Result;
use crate::reference::{Array, Reference};
use crate::rule::Rule;
use crate::{Gradient, Op};

/// y = x·rstd·weight over the last dimension, with rstd = 1/√(mean(x²) + eps). Outputs: y, and (0, rstd) of each row,
/// in the format of layer normalization's statistics.
#[derive(Debug, Clone, Copy)]
pub struct RmsNorm {
    /// Added to the mean square.
    pub eps: f64,
}

impl Op for RmsNorm {
    fn name(&self) -> &'static str {
        "rms_norm"
    }

    fn rule(&self, _: &[Spec], _: &[Spec]) -> Option<Rule> {
        Some(Rule::labels("* W, W -> * W, (*) _"))
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        expect_vector("weight", &inputs[1], &inputs[0])?;
        Ok(vec![inputs[0].clone(), stats_of(&inputs[0])])
    }

    fn gradient(&self, g: &mut Gradient) -> Result<()> {
        g.require_unused(self, 1)?;
        norm_grad::record(g, false)
    }

    fn flops(&self, inputs: &[Spec], _: &[Spec]) -> u64 {
        4 * inputs[0].elements() as u64
    }

    fn runs_in_bf16(&self) -> bool {
        true
    }

    fn run(&self, args: &mut Args<'_>) {
        with_float!(args.output_dtype(0), T => self.run_in::<T>(args));
    }
    fn cuda_fusible(&self) -> Option<gapless_kernels::cuda::Fusible> {
        Some(gapless_kernels::cuda::Fusible::Norm { is_centred: false, eps: self.eps })
    }
    fn cuda(&self, operands: &gapless_kernels::cuda::Operands<'_>) -> Option<Vec<gapless_kernels::cuda::Launch>> {
        gapless_kernels::cuda::launch::norm("rms_norm", self.eps, operands)
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        let (x, weight) = (args.input(0), args.input(1));
        let (mut y, mut stats) = (Vec::new(), Vec::new());
        for row in x.rows() {
            let rstd = 1.0 / (row.iter().map(|x| x * x).sum::<f64>() / row.len() as f64 + self.eps).sqrt();
            stats.extend([0.0, rstd]);
            y.extend(row.iter().zip(&weight.data).map(|(x, w)| x * rstd * w));
        }
        vec![Array::new(&x.dims, y), Array::new(&[stats.len() / 2, 2], stats)]
    }
}

impl RmsNorm {
    fn run_in<T: Float>(&self, args: &mut Args<'_>) {
        let weight = args.input::<T>(1);
        each_normalized_row::<T>(args, |y, x, stats| {
            vectorize!({
                let rstd = 1.0 / (reduce::sum(x, |x| x * x) / x.len() as f32 + self.eps as f32).sqrt();
                *stats = [0.0, rstd];
                for (y, (&x, &w)) in y.iter_mut().zip(x.iter().zip(weight)) {
                    *y = T::store(x.load() * rstd * w.load());
                }
            });
        });
    }
}

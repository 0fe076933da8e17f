//! Exponential moving average of the weights (Polyak & Juditsky, 1992; with a constant decay as in Tarvainen & Valpola,
//! arXiv 1703.01780, section 2).

use candle_core::DType;
use gapless_kernels::Spec;
use gapless_kernels::cpu::{Args, BLOCK, Float, InPieces, Pieces, vectorize, with_float};

use crate::op::Op;
use crate::reference::{Array, Reference};

/// average ← average + (1 − decay)·(parameter − average), in place, from (average, parameter, norm). The average is
/// f32. If the norm is not finite, the training step is skipped, and the average keeps its value.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct WeightAverage {
    /// Weight of the old average in the new one.
    pub decay: f64,
}

impl WeightAverage {
    fn run_on<P: Float>(&self, args: &mut Args<'_>) {
        let (average, parameter) = (args.output::<f32>(0), args.input::<P>(1));
        if !args.input::<f32>(2)[0].is_finite() {
            return;
        }
        let part = (1.0 - self.decay) as f32;
        average.pieces_mut(BLOCK).zip(parameter.pieces(BLOCK)).for_each(|(average, parameter)| {
            vectorize!({
                for (average, parameter) in average.iter_mut().zip(parameter) {
                    *average += part * (parameter.load() - *average);
                }
            });
        });
    }
}

impl Op for WeightAverage {
    fn name(&self) -> &'static str {
        "weight_average"
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        let [average, parameter, _] = inputs else { return Err("3 inputs".into()) };
        crate::ops::expect_equal(&[average.clone(), Spec { dtype: DType::F32, ..parameter.clone() }])?;
        Ok(vec![average.clone()])
    }

    fn flops(&self, inputs: &[Spec], _: &[Spec]) -> u64 {
        3 * inputs[0].elements() as u64
    }

    fn mutates(&self) -> &[(usize, usize)] {
        &[(0, 0)]
    }

    fn runs_in_bf16(&self) -> bool {
        true
    }

    fn run(&self, args: &mut Args<'_>) {
        with_float!(args.input_dtype(1), P => self.run_on::<P>(args));
    }
    fn cuda(&self, operands: &gapless_kernels::cuda::Operands<'_>) -> Option<Vec<gapless_kernels::cuda::Launch>> {
        gapless_kernels::cuda::launch::weight_average(self.decay, operands)
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        let part = if args.input(2).data[0].is_finite() { 1.0 - self.decay } else { 0.0 };
        vec![args.input(0).zip(args.input(1), |average, parameter| average + part * (parameter - average))]
    }
}

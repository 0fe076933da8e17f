//! Scale and shift by constants.

use gapless_kernels::Spec;
use gapless_kernels::cpu::{Args, map};

use crate::error::Result;
use crate::reference::{Array, Reference};
use crate::{Gradient, Op};

/// y = x·scale + shift.
#[derive(Debug, Clone, Copy)]
pub struct Affine {
    /// Multiplier of x.
    pub scale: f64,
    /// Summand.
    pub shift: f64,
}

impl Op for Affine {
    fn name(&self) -> &'static str {
        "affine"
    }

    fn linear_inputs(&self) -> usize {
        if self.shift == 0.0 { usize::MAX } else { 0 }
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        super::expect_float(inputs)?;
        Ok(vec![inputs[0].clone()])
    }

    fn gradient(&self, g: &mut Gradient) -> Result<()> {
        let dx = g.grad(0).affine(self.scale, 0.0)?;
        g.accumulate(0, dx);
        Ok(())
    }

    fn inplace(&self) -> &[(usize, usize)] {
        &[(0, 0)]
    }

    fn runs_in_bf16(&self) -> bool {
        true
    }

    fn run(&self, args: &mut Args<'_>) {
        let (scale, shift) = (self.scale as f32, self.shift as f32);
        map(args, |x| x * scale + shift);
    }
    fn cuda_fusible(&self) -> Option<gapless_kernels::cuda::Fusible> {
        use gapless_kernels::cuda::{Constant::Number, Fusible};
        let constants = vec![Number(self.scale as f32), Number(self.shift as f32)];
        Some(Fusible::Each { outputs: vec!["$0 * %0 + %1".into()], constants })
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        vec![args.input(0).map(|x| x * self.scale + self.shift)]
    }
}

//! Powers with a constant exponent.

use gapless_kernels::Spec;
use gapless_kernels::cpu::{Args, map};

use crate::error::Result;
use crate::reference::{Array, Reference};
use crate::{Gradient, Op, RowUse};

/// y = xᵉ.
#[derive(Debug, Clone, Copy)]
pub struct Powf {
    /// The exponent e.
    pub exponent: f64,
}

impl Op for Powf {
    fn name(&self) -> &'static str {
        "powf"
    }

    fn rows(&self) -> RowUse {
        RowUse::InheritsRows
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        super::expect_float(inputs)?;
        Ok(vec![inputs[0].clone()])
    }

    fn gradient(&self, g: &mut Gradient) -> Result<()> {
        let dx = (g.input(0).powf(self.exponent - 1.0)? * self.exponent)?.mul(&g.grad(0))?;
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
        let exponent = self.exponent as f32;
        map(args, |x| x.powf(exponent));
    }

    fn cuda_fusible(&self) -> Option<gapless_kernels::cuda::Fusible> {
        use gapless_kernels::cuda::{Constant::Number, Fusible};
        Some(Fusible::Each { outputs: vec!["powf($0, %0)".into()], constants: vec![Number(self.exponent as f32)] })
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        vec![args.input(0).map(|x| x.powf(self.exponent))]
    }
}

//! Element-wise sum, difference, product, quotient, maximum and minimum of tensors of one shape. Broadcast operands are
//! views with stride 0.

use gapless_kernels::Spec;
use gapless_kernels::cpu::{Args, zip};

use crate::error::Result;
use crate::reference::{Array, Reference};
use crate::{Gradient, Op, RowUse};

/// The function of [`Binary`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "they say it themselves")]
pub enum BinaryKind {
    Add,
    Sub,
    Mul,
    Div,
    Maximum,
    Minimum,
}

impl BinaryKind {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Add => "add",
            Self::Sub => "sub",
            Self::Mul => "mul",
            Self::Div => "div",
            Self::Maximum => "maximum",
            Self::Minimum => "minimum",
        }
    }
}

/// y = a ∘ b.
#[derive(Debug, Clone, Copy)]
pub struct Binary {
    /// The function ∘.
    pub kind: BinaryKind,
}

impl Op for Binary {
    fn name(&self) -> &'static str {
        self.kind.name()
    }

    fn rows(&self) -> RowUse {
        RowUse::InheritsRows
    }

    fn linear_inputs(&self) -> usize {
        if matches!(self.kind, BinaryKind::Add | BinaryKind::Sub) { usize::MAX } else { 0 }
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        super::expect_equal(inputs)?;
        Ok(vec![inputs[0].clone()])
    }

    fn reads_strides(&self, _: usize, _: &candle_core::Layout) -> bool {
        true
    }

    fn gradient(&self, g: &mut Gradient) -> Result<()> {
        let (a, b, dy) = (g.input(0), g.input(1), g.grad(0));
        // A mask that is 1 where the element of `a` is the result. If both elements are equal, `a` gets the gradient.
        let first = match self.kind {
            BinaryKind::Maximum => a.ge(&b)?,
            BinaryKind::Minimum => a.le(&b)?,
            _ => a.clone(),
        };
        if g.wants(0) {
            let da = match self.kind {
                BinaryKind::Add | BinaryKind::Sub => dy.clone(),
                BinaryKind::Mul => dy.mul(&b)?,
                BinaryKind::Div => dy.div(&b)?,
                BinaryKind::Maximum | BinaryKind::Minimum => first.where_cond(&dy, &dy.zeros_like()?)?,
            };
            g.accumulate(0, da);
        }
        if g.wants(1) {
            let db = match self.kind {
                BinaryKind::Add => dy,
                BinaryKind::Sub => dy.neg()?,
                BinaryKind::Mul => dy.mul(&a)?,
                // d(a/b)/db = −(a/b)/b.
                BinaryKind::Div => dy.mul(&g.output(0))?.div(&b)?.neg()?,
                BinaryKind::Maximum | BinaryKind::Minimum => first.where_cond(&dy.zeros_like()?, &dy)?,
            };
            g.accumulate(1, db);
        }
        Ok(())
    }

    fn inplace(&self) -> &[(usize, usize)] {
        &[(0, 0), (1, 0)]
    }

    fn runs_in_bf16(&self) -> bool {
        true
    }

    fn run(&self, args: &mut Args<'_>) {
        match self.kind {
            BinaryKind::Add => zip(args, |a, b| a + b),
            BinaryKind::Sub => zip(args, |a, b| a - b),
            BinaryKind::Mul => zip(args, |a, b| a * b),
            BinaryKind::Div => zip(args, |a, b| a / b),
            BinaryKind::Maximum => zip(args, f32::max),
            BinaryKind::Minimum => zip(args, f32::min),
        }
    }
    fn cuda_fusible(&self) -> Option<gapless_kernels::cuda::Fusible> {
        Some(gapless_kernels::cuda::Fusible::each(match self.kind {
            BinaryKind::Add => "$0 + $1",
            BinaryKind::Sub => "$0 - $1",
            BinaryKind::Mul => "$0 * $1",
            BinaryKind::Div => "$0 / $1",
            BinaryKind::Maximum => "fmaxf($0, $1)",
            BinaryKind::Minimum => "fminf($0, $1)",
        }))
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        vec![args.input(0).zip(args.input(1), |a, b| match self.kind {
            BinaryKind::Add => a + b,
            BinaryKind::Sub => a - b,
            BinaryKind::Mul => a * b,
            BinaryKind::Div => a / b,
            BinaryKind::Maximum => a.max(b),
            BinaryKind::Minimum => a.min(b),
        })]
    }
}

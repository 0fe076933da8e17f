//! Dropout that recomputes its mask instead of storing it.

use gapless_kernels::Numbers;
use gapless_kernels::Spec;
use gapless_kernels::cpu::{Args, BLOCK, InPieces, Pieces, vectorize};

use crate::error::Result;
use crate::reference::{Array, Reference};
use crate::tensor::Tensor;
use crate::{Gradient, Op};

/// y = x·mask/(1−p). The backward recomputes the mask: the gradient is the same operation, applied to dy.
#[derive(Debug, Clone, Copy)]
pub struct Dropout {
    /// Probability that an element is set to zero.
    pub p: f64,
    /// Index of this operation among the random operations of the model, so that no two share a mask.
    pub key: u64,
}

impl Dropout {
    fn scale(&self) -> f64 {
        1.0 / (1.0 - self.p)
    }
}

/// True if element `index` is kept. The comparison uses integers, so that the f32 kernel and the f64 reference
/// implementation agree.
#[inline(always)]
fn keeps(numbers: Numbers, index: usize, threshold: u64) -> bool {
    numbers.bits(index) >> 11 >= threshold
}

/// Returns p as a fraction of 2⁵³, rounded down to an integer.
fn threshold(p: f64) -> u64 {
    (p * (1u64 << 53) as f64) as u64
}

impl Op for Dropout {
    fn name(&self) -> &'static str {
        "dropout"
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        super::expect_float(inputs)?;
        if !(0.0..1.0).contains(&self.p) {
            return Err(format!("probability {} is outside [0, 1)", self.p));
        }
        Ok(vec![inputs[0].clone()])
    }

    fn gradient(&self, g: &mut Gradient) -> Result<()> {
        let [dx] = Tensor::apply_op(*self, &[&g.grad(0)])?;
        g.accumulate(0, dx);
        Ok(())
    }

    fn inplace(&self) -> &[(usize, usize)] {
        &[(0, 0)]
    }

    fn run(&self, args: &mut Args<'_>) {
        let out = args.output::<f32>(0);
        let numbers = args.random().place(self.key, out.len());
        let (threshold, scale) = (threshold(self.p), self.scale() as f32);
        let mask = |index, x| if keeps(numbers, index, threshold) { x * scale } else { 0.0 };
        if args.is_overwritten(0) {
            out.pieces_mut(BLOCK).enumerate().for_each(|(block, out)| {
                vectorize!(out.iter_mut().enumerate().for_each(|(i, o)| *o = mask(block * BLOCK + i, *o)));
            });
            return;
        }
        let x = args.input::<f32>(0);
        out.pieces_mut(BLOCK).zip(x.pieces(BLOCK)).enumerate().for_each(|(block, (out, x))| {
            let pairs = out.iter_mut().zip(x).enumerate();
            vectorize!(pairs.for_each(|(i, (o, &x))| *o = mask(block * BLOCK + i, x)));
        });
    }
    fn cuda_fusible(&self) -> Option<gapless_kernels::cuda::Fusible> {
        use gapless_kernels::cuda::{Constant, Fusible};
        let (threshold, scale) = (Constant::Bits(threshold(self.p)), Constant::Number(self.scale() as f32));
        let constants = vec![Constant::Place(self.key), threshold, scale];
        Some(Fusible::Each { outputs: vec!["dropped(%0, i, $0, %1, %2)".into()], constants })
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        let x = args.input(0);
        let numbers = args.random().place(self.key, x.data.len());
        let keep = |i| f64::from(u8::from(keeps(numbers, i, threshold(self.p))));
        let data = x.data.iter().enumerate().map(|(i, &x)| x * keep(i) * self.scale()).collect();
        vec![Array::new(&x.dims, data)]
    }
}

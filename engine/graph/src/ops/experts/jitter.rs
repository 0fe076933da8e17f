//! Multiplicative noise on a router's input.

use std::sync::Arc;

use gapless_kernels::cpu::{Args, BLOCK, InPieces, Pieces, vectorize};
use gapless_kernels::{Spec, Spread, Window};

use crate::error::Result;
use crate::ops::dropout::{drawn_index, places};
use crate::reference::{Array, Reference};
use crate::tensor::Tensor;
use crate::{Gradient, Op};

/// y = x·u with random u, uniform between 1 − amount and 1 + amount (Switch Transformer, arXiv 2101.03961, appendix C).
/// The backward recomputes u: the gradient is the same operation, applied to dy.
#[derive(Debug, Clone, Copy)]
pub struct Jitter {
    /// The greatest distance of u from 1. It must be below 1.
    pub amount: f64,
    /// Index of this operation among the random operations of the model, so that no two share random numbers.
    pub key: u64,
    /// If x is a part of a tensor: the places of its elements. They get the factors that they have in the whole tensor.
    pub part: Option<Spread>,
}

impl Jitter {
    /// Records the operation with the next free key.
    ///
    /// # Errors
    /// Returns an error if the amount is outside [0, 1).
    pub fn apply(x: &Tensor, amount: f64) -> Result<Tensor> {
        let key = x.next_random();
        Tensor::apply_op::<1>(Self { amount, key, part: None }, &[x]).map(|[y]| y)
    }
}

impl Op for Jitter {
    fn name(&self) -> &'static str {
        "jitter"
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        crate::ops::expect_float(inputs)?;
        if !(0.0..1.0).contains(&self.amount) {
            return Err(format!("amount {} is outside [0, 1)", self.amount));
        }
        Ok(vec![inputs[0].clone()])
    }

    fn runs_on(&self, inputs: &[Window]) -> bool {
        places(self.part, &inputs[0]).is_some()
    }

    fn on_parts(&self, inputs: &[Window], _: &[Window]) -> Option<Arc<dyn Op>> {
        Some(Arc::new(Self { part: places(self.part, &inputs[0]), ..*self }))
    }

    fn gradient(&self, g: &mut Gradient) -> Result<()> {
        let [dx] = Tensor::apply_op(*self, &[&g.grad(0)])?;
        g.accumulate(0, dx);
        Ok(())
    }

    fn run(&self, args: &mut Args<'_>) {
        let out = args.output::<f32>(0);
        let x = args.input::<f32>(0);
        let spread = self.part.unwrap_or_else(|| Spread::whole(out.len()));
        let numbers = args.random().place(self.key, spread.elements);
        let amount = self.amount as f32;
        out.pieces_mut(BLOCK).zip(x.pieces(BLOCK)).enumerate().for_each(|(block, (out, x))| {
            for (run, first) in spread.runs(block * BLOCK..block * BLOCK + out.len()) {
                let pairs = out[run.clone()].iter_mut().zip(&x[run]).enumerate();
                vectorize!({
                    for (i, (y, &x)) in pairs {
                        *y = x * (1.0 + amount * (2.0 * numbers.uniform(first + i) - 1.0));
                    }
                });
            }
        });
    }
    fn cuda_fusible(&self) -> Option<gapless_kernels::cuda::Fusible> {
        use gapless_kernels::cuda::{Constant, Fusible};
        let elements = self.part.map(|part| part.elements as u64);
        let mut constants = vec![Constant::Place { key: self.key, elements }, Constant::Number(self.amount as f32)];
        let index = drawn_index(self.part, &mut constants);
        Some(Fusible::Each { outputs: vec![format!("jittered(%0, {index}, $0, %1)")], constants })
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        let x = args.input(0);
        let spread = self.part.unwrap_or_else(|| Spread::whole(x.data.len()));
        let numbers = args.random().place(self.key, spread.elements);
        let noise = |i| 1.0 + self.amount * (2.0 * f64::from(numbers.uniform(spread.index(i))) - 1.0);
        vec![Array::new(&x.dims, x.data.iter().enumerate().map(|(i, x)| x * noise(i)).collect())]
    }
}

//! Dropout that recomputes its mask instead of storing it.

use std::sync::Arc;

use gapless_kernels::cpu::{Args, BLOCK, InPieces, Pieces, vectorize};
use gapless_kernels::cuda::Constant;
use gapless_kernels::{Numbers, Spec, Spread, Window};

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
    /// If x is a part of a tensor: the places of its elements. They get the mask that they have in the whole tensor.
    pub part: Option<Spread>,
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

/// Returns the expression of the index with which an element of a fused kernel draws its random number, and appends the
/// constants in it to `constants`.
pub(super) fn drawn_index(part: Option<Spread>, constants: &mut Vec<Constant>) -> String {
    let Some(Spread { start, inner, near, stride, elements: _ }) = part else { return "i".into() };
    let first = constants.len();
    constants.extend([start, inner, near, stride].map(|number| Constant::Bits(number as u64)));
    format!("spread(i, %{first}, %{}, %{}, %{})", first + 1, first + 2, first + 3)
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

    fn runs_on(&self, inputs: &[Window]) -> bool {
        inputs[0].spread().is_some()
    }

    fn on_parts(&self, inputs: &[Window], _: &[Window]) -> Option<Arc<dyn Op>> {
        Some(Arc::new(Self { part: inputs[0].spread(), ..*self }))
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
        let spread = self.part.unwrap_or_else(|| Spread::whole(out.len()));
        let numbers = args.random().place(self.key, spread.elements);
        let (threshold, scale) = (threshold(self.p), self.scale() as f32);
        let mask = |index, x| if keeps(numbers, index, threshold) { x * scale } else { 0.0 };
        if args.is_overwritten(0) {
            out.pieces_mut(BLOCK).enumerate().for_each(|(block, out)| {
                for (run, first) in spread.runs(block * BLOCK..block * BLOCK + out.len()) {
                    let out = &mut out[run];
                    vectorize!(out.iter_mut().enumerate().for_each(|(i, o)| *o = mask(first + i, *o)));
                }
            });
            return;
        }
        let x = args.input::<f32>(0);
        out.pieces_mut(BLOCK).zip(x.pieces(BLOCK)).enumerate().for_each(|(block, (out, x))| {
            for (run, first) in spread.runs(block * BLOCK..block * BLOCK + out.len()) {
                let pairs = out[run.clone()].iter_mut().zip(&x[run]).enumerate();
                vectorize!(pairs.for_each(|(i, (o, &x))| *o = mask(first + i, x)));
            }
        });
    }
    fn cuda_fusible(&self) -> Option<gapless_kernels::cuda::Fusible> {
        use gapless_kernels::cuda::Fusible;
        let (threshold, scale) = (Constant::Bits(threshold(self.p)), Constant::Number(self.scale() as f32));
        let elements = self.part.map(|part| part.elements as u64);
        let mut constants = vec![Constant::Place { key: self.key, elements }, threshold, scale];
        let index = drawn_index(self.part, &mut constants);
        Some(Fusible::Each { outputs: vec![format!("dropped(%0, {index}, $0, %1, %2)")], constants })
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        let x = args.input(0);
        let spread = self.part.unwrap_or_else(|| Spread::whole(x.data.len()));
        let numbers = args.random().place(self.key, spread.elements);
        let keep = |i| f64::from(u8::from(keeps(numbers, spread.index(i), threshold(self.p))));
        let data = x.data.iter().enumerate().map(|(i, &x)| x * keep(i) * self.scale()).collect();
        vec![Array::new(&x.dims, data)]
    }
}

#[cfg(test)]
mod tests {
    use gapless_kernels::{Stream, Window};

    use super::*;
    use crate::ops::Jitter;

    /// An operation draws for the elements of a part what it draws for them in the whole tensor.
    #[test]
    fn parts_draw_the_numbers_of_the_whole() {
        let whole = [3, 4, 10];
        let ops = |part| -> [Box<dyn Op>; 2] {
            [Box::new(Dropout { p: 0.5, key: 7, part }), Box::new(Jitter { amount: 0.5, key: 7, part })]
        };
        let draws = |op: &dyn Op, count: usize| {
            let ones = Array::new(&[count], vec![1.0; count]);
            op.reference(&Reference { inputs: vec![&ones], stream: Stream::new(1, 2, 3) }).remove(0).data
        };
        let all = || vec![0..10];
        let windows = [
            Window::of(&whole, vec![vec![1..3], vec![0..4], all()]),
            Window::of(&whole, vec![vec![0..3], vec![2..4], all()]),
            Window::of(&whole, vec![vec![0..3], vec![0..4], vec![3..7]]),
            Window::whole(&whole).range(17..59),
            Window::whole(&whole),
        ];
        for (index, op) in ops(None).iter().enumerate() {
            let expected = draws(&**op, 120);
            for window in &windows {
                let part = &ops(window.spread())[index];
                let expected: Vec<f64> = window.runs().flatten().map(|i| expected[i]).collect();
                assert_eq!(draws(&**part, window.elements()), expected, "{} of {window}", part.name());
            }
        }
    }
}

//! Softmax over the last dimension.

use gapless_kernels::Spec;
use gapless_kernels::cpu::{Args, InPieces, Pieces, math, reduce, rows_per_task, vectorize};

use crate::error::Result;
use crate::reference::{Array, Reference};
use crate::rule::Rule;
use crate::tensor::Tensor;
use crate::{Gradient, Op};

/// y = eˣ / Σ eˣ, for each row.
#[derive(Debug, Clone, Copy)]
pub struct Softmax;

impl Op for Softmax {
    fn name(&self) -> &'static str {
        "softmax_last_dim"
    }

    fn rule(&self, _: &[Spec], _: &[Spec]) -> Option<Rule> {
        Some(Rule::labels("* W -> * W"))
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        super::expect_float(inputs)?;
        super::expect_rank(&inputs[0], 1)?;
        Ok(vec![inputs[0].clone()])
    }

    fn gradient(&self, g: &mut Gradient) -> Result<()> {
        let [dx] = Tensor::apply_op(SoftmaxGrad, &[&g.output(0), &g.grad(0)])?;
        g.accumulate(0, dx);
        Ok(())
    }

    fn flops(&self, inputs: &[Spec], _: &[Spec]) -> u64 {
        5 * inputs[0].elements() as u64
    }

    fn inplace(&self) -> &[(usize, usize)] {
        &[(0, 0)]
    }

    fn run(&self, args: &mut Args<'_>) {
        let out = args.output::<f32>(0);
        if !args.is_overwritten(0) {
            out.copy_from_slice(args.input(0));
        }
        let width = super::width(args.output_dims(0));
        out.pieces_mut(rows_per_task(width) * width).for_each(|rows| {
            vectorize!({
                for row in rows.chunks_exact_mut(width) {
                    let max = reduce::max(row);
                    row.iter_mut().for_each(|x| *x = math::exp_normal(*x - max));
                    let scale = 1.0 / reduce::sum(row, |x| x);
                    row.iter_mut().for_each(|x| *x *= scale);
                }
            });
        });
    }
    fn cuda(&self, operands: &gapless_kernels::cuda::Operands<'_>) -> Option<Vec<gapless_kernels::cuda::Launch>> {
        gapless_kernels::cuda::launch::softmax(operands)
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        let x = args.input(0);
        let softmax = |row: &[f64]| {
            let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = row.iter().map(|x| (x - max).exp()).sum();
            row.iter().map(|x| (x - max).exp() / sum).collect::<Vec<f64>>()
        };
        vec![Array::new(&x.dims, x.rows().flat_map(softmax).collect())]
    }
}

/// The gradient dx = y·(dy − Σ y·dy) of each row.
#[derive(Debug, Clone, Copy)]
struct SoftmaxGrad;

impl Op for SoftmaxGrad {
    fn name(&self) -> &'static str {
        "softmax_grad"
    }

    fn rule(&self, _: &[Spec], _: &[Spec]) -> Option<Rule> {
        Some(Rule::labels("* W, * W -> * W"))
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        super::expect_equal(inputs)?;
        Ok(vec![inputs[0].clone()])
    }

    fn inplace(&self) -> &[(usize, usize)] {
        &[(1, 0)]
    }

    fn run(&self, args: &mut Args<'_>) {
        let out = args.output::<f32>(0);
        if !args.is_overwritten(1) {
            out.copy_from_slice(args.input(1));
        }
        let width = super::width(args.output_dims(0));
        let block = rows_per_task(width) * width;
        out.pieces_mut(block).zip(args.input::<f32>(0).pieces(block)).for_each(|(out, y)| {
            vectorize!({
                for (dy, y) in out.chunks_exact_mut(width).zip(y.chunks_exact(width)) {
                    let dot = reduce::sum2(dy, y, |dy, y| dy * y);
                    dy.iter_mut().zip(y).for_each(|(dy, &y)| *dy = y * (*dy - dot));
                }
            });
        });
    }
    fn cuda(&self, operands: &gapless_kernels::cuda::Operands<'_>) -> Option<Vec<gapless_kernels::cuda::Launch>> {
        gapless_kernels::cuda::launch::softmax_grad(operands)
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        let (y, dy) = (args.input(0), args.input(1));
        let row = |(y, dy): (&[f64], &[f64])| {
            let dot: f64 = y.iter().zip(dy).map(|(y, dy)| y * dy).sum();
            y.iter().zip(dy).map(|(y, dy)| y * (dy - dot)).collect::<Vec<f64>>()
        };
        vec![Array::new(&y.dims, y.rows().zip(dy.rows()).flat_map(row).collect())]
    }
}

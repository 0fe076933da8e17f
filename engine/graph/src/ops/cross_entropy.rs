//! Cross-entropy loss of logits. The only tensors of the logits' size are the logits and their gradient.

use gapless_kernels::cpu::{Args, InPieces, Pieces, math, reduce, rows_per_task, vectorize};
use gapless_kernels::{LossTerms, Spec};

use crate::error::Result;
use crate::reference::{Array, Reference};
use crate::rule::Rule;
use crate::tensor::Tensor;
use crate::{Gradient, Op};

/// The loss −log softmax(logits)`[target]`, plus additional terms. Inputs: logits [.., vocabulary] and targets [..].
/// Outputs: the losses [..], and the log-sum-exp of each row of logits [..], which the gradient reads.
#[derive(Debug, Clone, Copy, Default)]
pub struct CrossEntropy {
    /// Terms of the loss in addition to −log softmax.
    pub terms: LossTerms,
}

impl Op for CrossEntropy {
    fn name(&self) -> &'static str {
        "cross_entropy"
    }

    fn rule(&self, _: &[Spec], _: &[Spec]) -> Option<Rule> {
        Some(Rule::labels("* V, * -> *, *"))
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        super::expect_float(&inputs[..1])?;
        super::expect_rank(&inputs[0], 1)?;
        super::expect_ids("targets", &inputs[1])?;
        let (_, rows) = inputs[0].dims().split_last().expect("rank was checked");
        if inputs[1].dims() != rows {
            return Err("targets must have the shape of the logits without the vocabulary".into());
        }
        Ok(vec![Spec::f32(rows.to_vec()), Spec::f32(rows.to_vec())])
    }

    fn gradient(&self, g: &mut Gradient) -> Result<()> {
        g.require_unused(self, 1)?;
        let inputs = [&g.input(0), &g.input(1), &g.output(1), &g.grad(0)];
        let [d_logits] = Tensor::apply_op(CrossEntropyGrad { terms: self.terms }, &inputs)?;
        g.accumulate(0, d_logits);
        Ok(())
    }

    fn flops(&self, inputs: &[Spec], _: &[Spec]) -> u64 {
        4 * inputs[0].elements() as u64
    }

    fn run(&self, args: &mut Args<'_>) {
        let (losses, lse) = (args.output::<f32>(0), args.output::<f32>(1));
        let (logits, targets) = (args.input::<f32>(0), args.input::<u32>(1));
        let width = super::width(args.input_dims(0));
        let (rows, terms) = (rows_per_task(width), self.terms.for_row(width));
        let tasks = losses.pieces_mut(rows).zip(lse.pieces_mut(rows));
        tasks.zip(targets.pieces(rows).zip(logits.pieces(rows * width))).for_each(|(out, (targets, logits))| {
            vectorize!({
                let rows = targets.iter().zip(logits.chunks_exact(width));
                for ((loss, lse), (&target, row)) in out.0.iter_mut().zip(out.1).zip(rows) {
                    let max = reduce::max(row);
                    *lse = max + reduce::sum(row, |x| math::exp_normal(x - max)).ln();
                    let all = if terms.spread == 0.0 { 0.0 } else { reduce::sum(row, |x| x) };
                    *loss = terms.loss(*lse, row[target as usize], all);
                }
            });
        });
    }
    fn cuda(&self, operands: &gapless_kernels::cuda::Operands<'_>) -> Option<Vec<gapless_kernels::cuda::Launch>> {
        gapless_kernels::cuda::launch::cross_entropy(&self.terms, operands)
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        let (logits, targets) = (args.input(0), args.input(1));
        let lse: Vec<f64> = logits
            .rows()
            .map(|row| {
                let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                max + row.iter().map(|x| (x - max).exp()).sum::<f64>().ln()
            })
            .collect();
        let rows = logits.rows().zip(&targets.data);
        let losses = rows.map(|(row, &target)| self.terms.exact(row, target as usize).0).collect();
        vec![Array::new(&targets.dims, losses), Array::new(&targets.dims, lse)]
    }
}

/// The gradient of the logits, from (logits, targets, log-sum-exp, d_loss). Without additional terms of the loss, it is
/// (softmax − one-hot)·d_loss. It may overwrite the logits.
#[derive(Debug, Clone, Copy)]
struct CrossEntropyGrad {
    terms: LossTerms,
}

impl Op for CrossEntropyGrad {
    fn name(&self) -> &'static str {
        "cross_entropy_grad"
    }

    fn rule(&self, _: &[Spec], _: &[Spec]) -> Option<Rule> {
        Some(Rule::labels("* V, *, *, * -> * V"))
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        Ok(vec![inputs[0].clone()])
    }

    fn flops(&self, inputs: &[Spec], _: &[Spec]) -> u64 {
        4 * inputs[0].elements() as u64
    }

    fn reads_strides(&self, index: usize, _: &candle_core::Layout) -> bool {
        index == 3
    }

    fn inplace(&self) -> &[(usize, usize)] {
        &[(0, 0)]
    }

    fn run(&self, args: &mut Args<'_>) {
        let out = args.output::<f32>(0);
        if !args.is_overwritten(0) {
            out.copy_from_slice(args.input(0));
        }
        let (targets, lse) = (args.input::<u32>(1), args.input::<f32>(2));
        let (d_loss, d_layout) = args.strided::<f32>(3);
        let width = super::width(args.output_dims(0));
        let (rows, terms) = (rows_per_task(width), self.terms.for_row(width));
        out.pieces_mut(rows * width).enumerate().for_each(|(task, out)| {
            for (i, row) in out.chunks_exact_mut(width).enumerate() {
                let index = task * rows + i;
                let (lse, target) = (lse[index], targets[index] as usize);
                let scale = super::element(d_loss, d_layout, index);
                let (of_softmax, spread) = (terms.of_softmax(lse) * scale, terms.spread * scale);
                vectorize!(row.iter_mut().for_each(|x| *x = math::exp_normal(*x - lse) * of_softmax - spread));
                row[target] -= terms.keep * scale;
            }
        });
    }
    fn cuda(&self, operands: &gapless_kernels::cuda::Operands<'_>) -> Option<Vec<gapless_kernels::cuda::Launch>> {
        gapless_kernels::cuda::launch::cross_entropy_grad(&self.terms, operands)
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        let (logits, targets, lse, d_loss) = (args.input(0), args.input(1), args.input(2), args.input(3));
        let mut out = Vec::new();
        for (i, row) in logits.rows().enumerate() {
            let gradient = self.terms.gradient(row, lse.data[i], targets.data[i] as usize);
            out.extend(gradient.iter().map(|x| x * d_loss.data[i]));
        }
        vec![Array::new(&logits.dims, out)]
    }
}

//! Gradients of layer normalisation and RMS normalisation. With x̂ = (x − mean)·rstd and g = dy·weight:
//!
//! - dx = rstd·(g − mean(g) − x̂·mean(g·x̂)), without mean(g) for RMS normalisation, which does not centre;
//! - d_weight = Σ dy·x̂ and d_bias = Σ dy over the rows.

use std::sync::Arc;

use candle_core::DType;
use gapless_kernels::Spec;
use gapless_kernels::cpu::simd::prefetch_row;
use gapless_kernels::cpu::{
    Args, Float, InPieces, Pieces, columns_per_task, reduce, rows_per_task, vectorize, with_float,
};

use super::OutputTypes;
use crate::error::Result;
use crate::reference::{Array, Reference};
use crate::rule::Rule;
use crate::tensor::Tensor;
use crate::{Gradient, Op};

/// Records the gradients of a normalization with inputs (x, weight) or (x, weight, bias) and outputs (y, stats).
pub(super) fn record(g: &mut Gradient, centred: bool) -> Result<()> {
    let (x, weight, stats, dy) = (g.input(0), g.input(1), g.output(1), g.grad(0));
    if g.wants(1) || (centred && g.wants(2)) {
        let [d_weight, d_bias] = Tensor::apply_op(NormGradWeight::default(), &[&x, &stats, &dy])?;
        if g.wants(1) {
            g.accumulate(1, d_weight);
        }
        if centred && g.wants(2) {
            g.accumulate(2, d_bias);
        }
    }
    if g.wants(0) {
        let [dx] = Tensor::apply_op(NormGradInput { centred }, &[&x, &weight, &stats, &dy])?;
        g.accumulate(0, dx);
    }
    Ok(())
}

/// Checks that a tensor has one element per column of x.
pub(super) fn expect_vector(name: &str, vector: &Spec, x: &Spec) -> Result<(), String> {
    super::expect_float(&[vector.clone(), x.clone()])?;
    super::expect_rank(x, 1)?;
    let width = super::width(x.dims());
    if vector.dims() == [width] { Ok(()) } else { Err(format!("{name} must be [{width}]")) }
}

/// The shape of the statistics: one (mean, rstd) per row.
pub(super) fn stats_of(x: &Spec) -> Spec {
    Spec::f32((x.elements() / super::width(x.dims()), 2))
}

/// Calls `f` for each row of a normalization, with the row of y, that of x, and the row's (mean, rstd) to write.
pub(super) fn each_normalized_row<T: Float>(args: &mut Args<'_>, f: impl Fn(&mut [T], &[T], &mut [f32; 2]) + Sync) {
    let (y, stats, x) = (args.output::<T>(0), args.output::<f32>(1), args.input::<T>(0));
    let width = super::width(args.output_dims(0));
    let rows = rows_per_task(width);
    let tasks = y.pieces_mut(rows * width).zip(x.pieces(rows * width)).zip(stats.pieces_mut(rows * 2));
    tasks.for_each(|((y, x), stats)| {
        let (stats, _) = stats.as_chunks_mut();
        let rows = y.chunks_exact_mut(width).zip(x.chunks_exact(width)).zip(stats);
        rows.for_each(|((y, x), stats)| f(y, x, stats));
    });
}

/// The gradient dx, from (x, weight, stats, dy).
#[derive(Debug, Clone, Copy)]
struct NormGradInput {
    centred: bool,
}

impl Op for NormGradInput {
    fn name(&self) -> &'static str {
        "norm_grad_input"
    }

    fn rule(&self, _: &[Spec], _: &[Spec]) -> Option<Rule> {
        Some(Rule::labels("* W, W, (*) _, * W -> * W"))
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        Ok(vec![inputs[0].clone()])
    }

    fn flops(&self, inputs: &[Spec], _: &[Spec]) -> u64 {
        9 * inputs[0].elements() as u64
    }

    fn inplace(&self) -> &[(usize, usize)] {
        &[(3, 0)]
    }

    fn runs_in_bf16(&self) -> bool {
        true
    }

    fn run(&self, args: &mut Args<'_>) {
        with_float!(args.output_dtype(0), T => self.run_in::<T>(args));
    }

    fn cuda_fusible(&self) -> Option<gapless_kernels::cuda::Fusible> {
        Some(gapless_kernels::cuda::Fusible::NormGradInput { is_centred: self.centred })
    }
    fn cuda(&self, operands: &gapless_kernels::cuda::Operands<'_>) -> Option<Vec<gapless_kernels::cuda::Launch>> {
        gapless_kernels::cuda::launch::norm_grad_input(self.centred, operands)
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        let (x, weight, stats, dy) = (args.input(0), args.input(1), args.input(2), args.input(3));
        let mut dx = Vec::new();
        for ((x, dy), stats) in x.rows().zip(dy.rows()).zip(stats.rows()) {
            let n = x.len() as f64;
            let hat: Vec<f64> = x.iter().map(|x| (x - stats[0]) * stats[1]).collect();
            let g: Vec<f64> = dy.iter().zip(&weight.data).map(|(dy, w)| dy * w).collect();
            let mean_g = if self.centred { g.iter().sum::<f64>() / n } else { 0.0 };
            let mean_gx = g.iter().zip(&hat).map(|(g, h)| g * h).sum::<f64>() / n;
            dx.extend(g.iter().zip(&hat).map(|(g, h)| stats[1] * (g - mean_g - h * mean_gx)));
        }
        vec![Array::new(&x.dims, dx)]
    }
}

impl NormGradInput {
    fn run_in<T: Float>(&self, args: &mut Args<'_>) {
        let dx = args.output::<T>(0);
        let (x, weight, stats) = (args.input::<T>(0), args.input::<T>(1), args.input::<f32>(2));
        if !args.is_overwritten(3) {
            dx.copy_from_slice(args.input(3));
        }
        let width = weight.len();
        let rows = rows_per_task(width);
        let tasks = dx.pieces_mut(rows * width).zip(x.pieces(rows * width)).zip(stats.pieces(rows * 2));
        tasks.for_each(|((dx, x), stats)| {
            let rows = dx.chunks_exact_mut(width).zip(x.chunks_exact(width)).zip(stats.chunks_exact(2));
            vectorize!({
                for ((dx, x), stats) in rows {
                    let (mean, rstd) = (stats[0], stats[1]);
                    let [sum_g, sum_gx] = reduce::sums3(dx, x, weight, |dy, x, w| [dy * w, dy * w * (x - mean)]);
                    let mean_g = if self.centred { sum_g / width as f32 } else { 0.0 };
                    let mean_gx = sum_gx * rstd / width as f32;
                    for (dx, (&x, &w)) in dx.iter_mut().zip(x.iter().zip(weight)) {
                        let g = dx.load() * w.load();
                        *dx = T::store(rstd * (g - mean_g - (x.load() - mean) * rstd * mean_gx));
                    }
                }
            });
        });
    }
}

/// The gradients (d_weight, d_bias), from (x, stats, dy). Columns are processed in parallel. In each column, rows are
/// added in order.
#[derive(Debug, Clone, Copy, Default)]
struct NormGradWeight {
    types: OutputTypes<2>,
}

/// Number of rows by which prefetches are ahead of the sums. The hardware does not prefetch a few lines of rows that are
/// far apart.
const AHEAD: usize = 16;

impl Op for NormGradWeight {
    fn name(&self) -> &'static str {
        "norm_grad_weight"
    }

    fn rule(&self, _: &[Spec], _: &[Spec]) -> Option<Rule> {
        Some(Rule::labels("* w, (*) _, * w -> w, w[2]"))
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        let width = inputs[0].in_shape(super::width(inputs[0].dims()));
        Ok(self.types.apply_to([width.clone(), width]))
    }

    fn flops(&self, inputs: &[Spec], _: &[Spec]) -> u64 {
        5 * inputs[0].elements() as u64
    }

    fn accumulates(&self, _: usize) -> bool {
        true
    }

    fn with_output_dtype(&self, index: usize, dtype: DType) -> Option<Arc<dyn Op>> {
        Some(Arc::new(Self { types: self.types.with(index, dtype) }))
    }

    fn reads_bf16(&self, _: usize) -> bool {
        true
    }

    fn run(&self, args: &mut Args<'_>) {
        with_float!(args.input_dtype(0), T => self.run_in::<T>(args));
    }
    fn cuda_fusible(&self) -> Option<gapless_kernels::cuda::Fusible> {
        Some(gapless_kernels::cuda::Fusible::NormGradWeight)
    }
    fn cuda_workspace(&self, inputs: &[Spec], _: &[Spec]) -> Vec<u64> {
        gapless_kernels::cuda::launch::norm_grad_weight_workspace(&inputs[0])
    }
    fn cuda(&self, operands: &gapless_kernels::cuda::Operands<'_>) -> Option<Vec<gapless_kernels::cuda::Launch>> {
        gapless_kernels::cuda::launch::norm_grad_weight(operands)
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        let (x, stats, dy) = (args.input(0), args.input(1), args.input(2));
        let width = super::width(&x.dims);
        let (mut d_weight, mut d_bias) = (Array::zeros(&[width]), Array::zeros(&[width]));
        for ((x, dy), stats) in x.rows().zip(dy.rows()).zip(stats.rows()) {
            for c in 0..width {
                d_weight.data[c] += dy[c] * (x[c] - stats[0]) * stats[1];
                d_bias.data[c] += dy[c];
            }
        }
        vec![d_weight, d_bias]
    }
}

impl NormGradWeight {
    fn run_in<T: Float>(&self, args: &mut Args<'_>) {
        let accumulate = [args.accumulate(0), args.accumulate(1)];
        let (d_weight, d_bias) = (args.output::<f32>(0), args.output::<f32>(1));
        let (x, stats, dy) = (args.input::<T>(0), args.input::<f32>(1), args.input::<T>(2));
        let width = d_weight.len();
        let per_task = columns_per_task(width);
        let tasks = d_weight.pieces_mut(per_task).zip(d_bias.pieces_mut(per_task)).enumerate();
        tasks.for_each(|(task, (d_weight, d_bias))| {
            let columns = task * per_task..task * per_task + d_weight.len();
            if !accumulate[0] {
                d_weight.fill(0.0);
            }
            if !accumulate[1] {
                d_bias.fill(0.0);
            }
            let rows = x.chunks_exact(width).zip(dy.chunks_exact(width)).zip(stats.chunks_exact(2));
            vectorize!({
                for ((x, dy), stats) in rows {
                    let (x, dy) = (&x[columns.clone()], &dy[columns.clone()]);
                    prefetch_row(x.as_ptr(), AHEAD * width, x.len());
                    prefetch_row(dy.as_ptr(), AHEAD * width, dy.len());
                    let (mean, rstd) = (stats[0], stats[1]);
                    for ((dw, db), (&x, &dy)) in d_weight.iter_mut().zip(d_bias.iter_mut()).zip(x.iter().zip(dy)) {
                        *dw += dy.load() * (x.load() - mean) * rstd;
                        *db += dy.load();
                    }
                }
            });
        });
    }
}

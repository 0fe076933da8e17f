//! Matrix multiplication.

use candle_core::Layout;
use gapless_kernels::Spec;
use gapless_kernels::cpu::gemm::{Batch, Epilogue, Factor, Gemm, Mode, Strides};
use gapless_kernels::cpu::{Args, with_float};

use crate::error::Result;
use crate::reference::{Array, Reference};
use crate::rule::Rule;
use crate::{Gradient, Op};

/// The product of [.., m, k] and [.., k, n], which is [.., m, n]. Leading dimensions must be equal. Transposed operands
/// are read through their strides.
#[derive(Debug, Clone, Copy)]
pub struct MatMul;

impl Op for MatMul {
    fn name(&self) -> &'static str {
        "matmul"
    }

    fn rule(&self, _: &[Spec], _: &[Spec]) -> Option<Rule> {
        Some(Rule::labels("* m k, * k n -> * m n"))
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        super::expect_float(inputs)?;
        let ([batch @ .., m, k], [batch_b @ .., k_b, n]) = (inputs[0].dims(), inputs[1].dims()) else {
            return Err("both inputs must have at least two dimensions".into());
        };
        if k != k_b || batch != batch_b {
            return Err("the inputs must be [.., m, k] and [.., k, n] with equal leading dimensions".into());
        }
        Ok(vec![inputs[0].in_shape([batch, &[*m, *n]].concat())])
    }

    fn reads_strides(&self, _: usize, _: &candle_core::Layout) -> bool {
        true
    }

    fn gradient(&self, g: &mut Gradient) -> Result<()> {
        let dy = g.grad(0);
        if g.wants(1) {
            let db = g.input(0).t()?.matmul(&dy)?;
            g.accumulate(1, db);
        }
        if g.wants(0) {
            let da = dy.matmul(&g.input(1).t()?)?;
            g.accumulate(0, da);
        }
        Ok(())
    }

    fn flops(&self, inputs: &[Spec], outputs: &[Spec]) -> u64 {
        2 * outputs[0].elements() as u64 * super::width(inputs[0].dims()) as u64
    }

    fn workspace(&self, inputs: &[Spec], _: &[Spec], threads: usize) -> Vec<u64> {
        // The strides are not known here, but scratch depends on the extents alone. So contiguous layouts give the same
        // sizes.
        let dense = |spec: &Spec| Layout::contiguous(spec.shape.clone());
        product(&dense(&inputs[0]), &dense(&inputs[1])).scratch(threads)
    }

    /// The kernel converts bf16 operands when it packs them.
    fn reads_bf16(&self, _: usize) -> bool {
        true
    }

    fn run(&self, args: &mut Args<'_>) {
        with_float!(args.input_dtype(0), T => run_on::<T>(args));
    }
    fn cuda_reads_strides(&self, _: usize, layout: &Layout) -> bool {
        gapless_kernels::cuda::launch::is_matrix(layout)
    }
    fn cuda_workspace(&self, inputs: &[Spec], _: &[Spec]) -> Vec<u64> {
        let (&[.., m, _], &[.., n]) = (inputs[0].dims(), inputs[1].dims()) else {
            unreachable!("rank 2 by the shape rule")
        };
        vec![gapless_kernels::cuda::launch::product_workspace(m, n)]
    }
    fn cuda(&self, operands: &gapless_kernels::cuda::Operands<'_>) -> Option<Vec<gapless_kernels::cuda::Launch>> {
        gapless_kernels::cuda::launch::matmul(operands)
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        let (a, b) = (args.input(0), args.input(1));
        let rank = a.dims.len();
        let (m, k, n) = (a.dims[rank - 2], a.dims[rank - 1], b.dims[rank - 1]);
        let dims = [&a.dims[..rank - 2], &[m, n]].concat();
        let mut out = Array::zeros(&dims);
        for (batch, out) in out.data.chunks_exact_mut((m * n).max(1)).enumerate() {
            let (a, b) = (&a.data[batch * m * k..], &b.data[batch * k * n..]);
            for (index, out) in out.iter_mut().enumerate() {
                *out = (0..k).map(|i| a[index / n * k + i] * b[i * n + index % n]).sum();
            }
        }
        vec![out]
    }
}

/// Runs the kernel for operands stored in the type `T`.
fn run_on<T: Factor>(args: &mut Args<'_>) {
    let (out, scratch) = (args.output::<f32>(0), &mut args.workspace());
    let ((a, a_layout), (b, b_layout)) = (args.strided::<T>(0), args.strided::<T>(1));
    let gemm = product(a_layout, b_layout);
    let rank = a_layout.dims().len();
    let outer: usize = a_layout.dims()[..rank.saturating_sub(3)].iter().product();
    let share = out.len() / outer.max(1);
    for (i, out) in out.chunks_exact_mut(share.max(1)).enumerate() {
        let (a, b) = (&a[outer_offset(a_layout, i)..], &b[outer_offset(b_layout, i)..]);
        gemm.run(a, b, out, Mode::Overwrite, Epilogue::default(), scratch).expect("extents by the shape rule");
    }
}

/// Returns the kernel that computes the matrix products for all indices of the last batch dimension.
fn product(a: &Layout, b: &Layout) -> Gemm {
    let matrix = |layout: &Layout| {
        let rank = layout.dims().len();
        let strides = Strides { row: layout.stride()[rank - 2], column: layout.stride()[rank - 1] };
        (layout.dims()[rank - 2], layout.dims()[rank - 1], strides)
    };
    let ((m, k, a_strides), (_, n, b_strides)) = (matrix(a), matrix(b));
    let gemm = Gemm::new(m, n, k, a_strides, b_strides);
    match a.dims().len().checked_sub(3) {
        None => gemm,
        Some(d) => gemm.with_batch(Batch { count: a.dims()[d], a: a.stride()[d], b: b.stride()[d], c: m * n }),
    }
}

/// Returns the offset, in elements, of the `index`-th combination of indices of all dimensions before the last three.
fn outer_offset(layout: &Layout, mut index: usize) -> usize {
    let outer = layout.dims().len().saturating_sub(3);
    let mut offset = 0;
    for (&dim, &stride) in layout.dims()[..outer].iter().zip(layout.stride()).rev() {
        offset += (index % dim) * stride;
        index /= dim;
    }
    offset
}

//! SwiGLU, the gated unit of Llama's feed-forward layers (Shazeer, arXiv 2002.05202).

use gapless_kernels::Spec;
use gapless_kernels::cpu::{Args, BLOCK, Float, InPieces, Pieces, math, vectorize, with_float, zip};

use super::unary::silu_derivative;
use crate::error::Result;
use crate::reference::{Array, Reference};
use crate::tensor::Tensor;
use crate::{Gradient, Op};

/// y = silu(gate)·up. silu(gate) is not stored.
#[derive(Debug, Clone, Copy)]
pub struct SwiGlu;

impl Op for SwiGlu {
    fn name(&self) -> &'static str {
        "swiglu"
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        super::expect_equal(inputs)?;
        Ok(vec![inputs[0].clone()])
    }

    fn gradient(&self, g: &mut Gradient) -> Result<()> {
        let [d_gate, d_up] = Tensor::apply_op(SwiGluGrad, &[&g.input(0), &g.input(1), &g.grad(0)])?;
        g.accumulate(0, d_gate);
        g.accumulate(1, d_up);
        Ok(())
    }

    fn inplace(&self) -> &[(usize, usize)] {
        &[(0, 0), (1, 0)]
    }

    fn runs_in_bf16(&self) -> bool {
        true
    }

    fn run(&self, args: &mut Args<'_>) {
        zip(args, |gate, up| gate * math::sigmoid(gate) * up);
    }
    fn cuda_fusible(&self) -> Option<gapless_kernels::cuda::Fusible> {
        Some(gapless_kernels::cuda::Fusible::each("silu($0) * $1"))
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        vec![args.input(0).zip(args.input(1), |gate, up| gate / (1.0 + (-gate).exp()) * up)]
    }
}

/// The gradients (d_gate, d_up) from (gate, up, dy). d_gate and d_up may overwrite gate and up.
#[derive(Debug, Clone, Copy)]
struct SwiGluGrad;

impl Op for SwiGluGrad {
    fn name(&self) -> &'static str {
        "swiglu_grad"
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        super::expect_equal(inputs)?;
        Ok(vec![inputs[0].clone(), inputs[0].clone()])
    }

    fn inplace(&self) -> &[(usize, usize)] {
        &[(0, 0), (1, 1)]
    }

    fn runs_in_bf16(&self) -> bool {
        true
    }

    fn run(&self, args: &mut Args<'_>) {
        with_float!(args.output_dtype(0), T => gradients::<T>(args));
    }
    fn cuda_fusible(&self) -> Option<gapless_kernels::cuda::Fusible> {
        let outputs = vec!["$2 * $1 * silu_derivative($0)".into(), "$2 * silu($0)".into()];
        Some(gapless_kernels::cuda::Fusible::Each { outputs, constants: Vec::new() })
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        let (gate, up, dy) = (args.input(0), args.input(1), args.input(2));
        let sigmoid = gate.map(|g| 1.0 / (1.0 + (-g).exp()));
        let slope = gate.zip(&sigmoid, |g, s| s * (1.0 + g * (1.0 - s)));
        let silu = gate.zip(&sigmoid, |g, s| g * s);
        vec![dy.zip(up, |dy, u| dy * u).zip(&slope, |a, s| a * s), dy.zip(&silu, |dy, s| dy * s)]
    }
}

fn gradients<T: Float>(args: &mut Args<'_>) {
    let (d_gate, d_up) = (args.output::<T>(0), args.output::<T>(1));
    if !args.is_overwritten(0) {
        d_gate.copy_from_slice(args.input(0));
    }
    if !args.is_overwritten(1) {
        d_up.copy_from_slice(args.input(1));
    }
    let dy = args.input::<T>(2).pieces(BLOCK);
    d_gate.pieces_mut(BLOCK).zip(d_up.pieces_mut(BLOCK)).zip(dy).for_each(|((d_gate, d_up), dy)| {
        vectorize!({
            for ((gate, up), &dy) in d_gate.iter_mut().zip(d_up).zip(dy) {
                let (g, u, dy) = (gate.load(), up.load(), dy.load());
                *gate = T::store(dy * u * silu_derivative(g));
                *up = T::store(dy * g * math::sigmoid(g));
            }
        });
    });
}

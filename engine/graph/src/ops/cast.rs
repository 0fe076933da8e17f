//! Another type of float.

use candle_core::DType;
use gapless_kernels::Spec;
use gapless_kernels::cpu::{Args, BLOCK, InPieces, Pieces};

use crate::error::Result;
use crate::graph::FLOATS;
use crate::reference::{Array, Reference};
use crate::tensor::Tensor;
use crate::{Gradient, Op};

/// The same numbers in another of the [`FLOATS`], rounded to it.
#[derive(Debug, Clone, Copy)]
pub struct Cast {
    /// The type.
    pub dtype: DType,
}

impl Op for Cast {
    fn name(&self) -> &'static str {
        "to_dtype"
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        super::expect_float(inputs)?;
        if !FLOATS.contains(&self.dtype) {
            return Err(format!("{:?} is not one of {FLOATS:?}", self.dtype));
        }
        Ok(vec![Spec { shape: inputs[0].shape.clone(), dtype: self.dtype }])
    }

    fn gradient(&self, g: &mut Gradient) -> Result<()> {
        let dtype = g.input(0).dtype();
        let [dx] = Tensor::apply_op(Self { dtype }, &[&g.grad(0)])?;
        g.send(0, dx);
        Ok(())
    }

    fn flops(&self, _: &[Spec], _: &[Spec]) -> u64 {
        0
    }

    fn accumulates(&self, _: usize) -> bool {
        true
    }

    /// From f32 to f32, the only type that the CPU computes in.
    fn run(&self, args: &mut Args<'_>) {
        let accumulate = args.accumulate(0);
        let out = args.output::<f32>(0).pieces_mut(BLOCK);
        out.zip(args.input::<f32>(0).pieces(BLOCK)).for_each(|(out, x)| match accumulate {
            true => out.iter_mut().zip(x).for_each(|(out, x)| *out += x),
            false => out.copy_from_slice(x),
        });
    }
    fn cuda_fusible(&self) -> Option<gapless_kernels::cuda::Fusible> {
        Some(gapless_kernels::cuda::Fusible::each("$0"))
    }
    fn cuda(&self, operands: &gapless_kernels::cuda::Operands<'_>) -> Option<Vec<gapless_kernels::cuda::Launch>> {
        gapless_kernels::cuda::launch::copy(operands)
    }

    /// Unrounded.
    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        vec![args.input(0).clone()]
    }
}

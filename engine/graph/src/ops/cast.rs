//! Casts to another float type.

use candle_core::DType;
use gapless_kernels::Spec;
use gapless_kernels::cpu::{Args, BLOCK, Float, InPieces, Pieces, vectorize, with_float};

use crate::error::Result;
use crate::graph::FLOATS;
use crate::reference::{Array, Reference};
use crate::tensor::Tensor;
use crate::{Gradient, Op};

/// A cast of floats, masks or ids to a type of the [`FLOATS`], with rounding.
#[derive(Debug, Clone, Copy)]
pub struct Cast {
    /// Type of the output.
    pub dtype: DType,
}

impl Op for Cast {
    fn name(&self) -> &'static str {
        "to_dtype"
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        super::expect_stored(&inputs[0])?;
        if !FLOATS.contains(&self.dtype) {
            return Err(format!("{:?} is not one of {FLOATS:?}", self.dtype));
        }
        Ok(vec![Spec { shape: inputs[0].shape.clone(), dtype: self.dtype }])
    }

    fn gradient(&self, g: &mut Gradient) -> Result<()> {
        let dtype = g.input(0).dtype();
        if !dtype.is_float() {
            return Ok(()); // Masks and ids have no gradient.
        }
        let [dx] = Tensor::apply_op(Self { dtype }, &[&g.grad(0)])?;
        g.accumulate(0, dx);
        Ok(())
    }

    fn flops(&self, _: &[Spec], _: &[Spec]) -> u64 {
        0
    }

    fn accumulates(&self, _: usize) -> bool {
        true
    }

    fn runs_in_bf16(&self) -> bool {
        true
    }

    fn run(&self, args: &mut Args<'_>) {
        with_float!(args.output_dtype(0), To => run_to::<To>(args));
    }
    fn cuda_fusible(&self) -> Option<gapless_kernels::cuda::Fusible> {
        Some(gapless_kernels::cuda::Fusible::each("$0"))
    }
    fn cuda(&self, operands: &gapless_kernels::cuda::Operands<'_>) -> Option<Vec<gapless_kernels::cuda::Launch>> {
        gapless_kernels::cuda::launch::copy(operands)
    }

    /// The reference implementation does not round.
    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        vec![args.input(0).clone()]
    }
}

fn run_to<To: Float>(args: &mut Args<'_>) {
    let accumulate = args.accumulate(0);
    let out = args.output::<To>(0);
    match args.input_dtype(0) {
        DType::U8 => convert(out, args.input::<u8>(0), accumulate, f32::from),
        DType::U32 => convert(out, args.input::<u32>(0), accumulate, |x| x as f32),
        dtype => with_float!(dtype, From => convert(out, args.input::<From>(0), accumulate, From::load)),
    }
}

/// Converts each element. Writes the result to the output or, if `accumulate` is true, adds it to the output.
fn convert<T: Copy + Sync, To: Float>(out: &mut [To], x: &[T], accumulate: bool, f: impl Fn(T) -> f32 + Sync) {
    out.pieces_mut(BLOCK).zip(x.pieces(BLOCK)).for_each(|(out, x)| {
        vectorize!(match accumulate {
            true => out.iter_mut().zip(x).for_each(|(o, &x)| *o = To::store(o.load() + f(x))),
            false => out.iter_mut().zip(x).for_each(|(o, &x)| *o = To::store(f(x))),
        });
    });
}

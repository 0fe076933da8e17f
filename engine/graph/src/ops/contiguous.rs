//! Copies to contiguous memory.

use candle_core::DType;
use gapless_kernels::Spec;
use gapless_kernels::cpu::{Args, Element, copy_row, each_row, with_float};

use crate::error::Result;
use crate::reference::{Array, Reference};
use crate::{Gradient, Op};

/// A contiguous copy of x, whatever the strides of x are. The builder inserts this copy before operations that cannot
/// read the strides of x.
#[derive(Debug, Clone, Copy)]
pub struct Contiguous;

impl Op for Contiguous {
    fn name(&self) -> &'static str {
        "contiguous"
    }

    fn linear_inputs(&self) -> usize {
        usize::MAX
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        super::expect_stored(&inputs[0])?;
        Ok(vec![inputs[0].clone()])
    }

    fn reads_strides(&self, _: usize, _: &candle_core::Layout) -> bool {
        true
    }

    fn gradient(&self, g: &mut Gradient) -> Result<()> {
        let dy = g.grad(0);
        g.accumulate(0, dy);
        Ok(())
    }

    fn flops(&self, _: &[Spec], _: &[Spec]) -> u64 {
        0
    }

    fn runs_in_bf16(&self) -> bool {
        true
    }

    fn run(&self, args: &mut Args<'_>) {
        match args.input_dtype(0) {
            DType::U8 => copy::<u8>(args),
            DType::U32 => copy::<u32>(args),
            dtype => with_float!(dtype, Stored => copy::<Stored>(args)),
        }
    }
    fn cuda_fusible(&self) -> Option<gapless_kernels::cuda::Fusible> {
        Some(gapless_kernels::cuda::Fusible::each("$0"))
    }
    fn cuda(&self, operands: &gapless_kernels::cuda::Operands<'_>) -> Option<Vec<gapless_kernels::cuda::Launch>> {
        gapless_kernels::cuda::launch::copy(operands)
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        vec![args.input(0).clone()]
    }
}

fn copy<T: Element + 'static>(args: &mut Args<'_>) {
    let (out, (x, layout)) = (args.output::<T>(0), args.strided::<T>(0));
    each_row(out, layout, |row, out| copy_row(x, layout, row, out));
}

//! A copy without gaps.

use gapless_kernels::Spec;
use gapless_kernels::cpu::{Args, InPieces, Pieces, last_extent, row_of, rows_per_task};

use crate::error::Result;
use crate::reference::{Array, Reference};
use crate::{Gradient, Op};

/// y = x, stored densely whatever the strides of x are. The builder puts it where a kernel cannot read strides.
#[derive(Debug, Clone, Copy)]
pub struct Contiguous;

impl Op for Contiguous {
    fn name(&self) -> &'static str {
        "contiguous"
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        super::expect_float(inputs)?;
        Ok(vec![inputs[0].clone()])
    }

    fn reads_strides(&self, _: usize, _: &candle_core::Layout) -> bool {
        true
    }

    fn gradient(&self, g: &mut Gradient) -> Result<()> {
        let dy = g.grad(0);
        g.send(0, dy);
        Ok(())
    }

    fn flops(&self, _: &[Spec], _: &[Spec]) -> u64 {
        0
    }

    fn run(&self, args: &mut Args<'_>) {
        let out = args.output::<f32>(0);
        let (x, layout) = args.strided::<f32>(0);
        let width = last_extent(layout);
        let rows = rows_per_task(width);
        out.pieces_mut(rows * width).enumerate().for_each(|(task, out)| {
            for (row, out) in out.chunks_mut(width).enumerate() {
                match row_of(x, layout, task * rows + row) {
                    (x, 1) => out.copy_from_slice(&x[..width]),
                    (x, step) => out.iter_mut().enumerate().for_each(|(i, o)| *o = x[i * step]),
                }
            }
        });
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

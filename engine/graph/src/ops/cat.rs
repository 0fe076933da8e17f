//! Concatenation along one dimension.

use gapless_kernels::Spec;
use gapless_kernels::cpu::bf16::with_float;
use gapless_kernels::cpu::{Args, Float, InPieces, Pieces, copy_row};

use crate::error::Result;
use crate::reference::{Array, Reference};
use crate::rule::Rule;
use crate::{Gradient, Op};

/// The inputs concatenated along `dim`.
#[derive(Debug, Clone, Copy)]
pub struct Cat {
    /// The dimension.
    pub dim: usize,
}

impl Op for Cat {
    fn name(&self) -> &'static str {
        "cat"
    }

    fn rule(&self, _: &[Spec], _: &[Spec]) -> Option<Rule> {
        Some(Rule::Cat { dim: self.dim })
    }

    fn linear_inputs(&self) -> usize {
        usize::MAX
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        super::expect_float(inputs)?;
        let mut dims = inputs[0].dims().to_vec();
        for input in &inputs[1..] {
            let others =
                |dims: &[usize]| dims.iter().enumerate().filter(|&(d, _)| d != self.dim).map(|(_, &e)| e).collect();
            let (a, b): (Vec<usize>, Vec<usize>) = (others(&dims), others(input.dims()));
            if a != b || dims.len() != input.dims().len() {
                return Err(format!("all dimensions but {} must be equal", self.dim));
            }
            dims[self.dim] += input.dims()[self.dim];
        }
        Ok(vec![inputs[0].in_shape(dims)])
    }

    fn reads_strides(&self, _: usize, _: &candle_core::Layout) -> bool {
        true
    }

    fn gradient(&self, g: &mut Gradient) -> Result<()> {
        let (dy, mut start) = (g.grad(0), 0);
        for input in 0..g.inputs() {
            let len = g.input(input).dims()[self.dim];
            if g.wants(input) {
                let dx = dy.narrow(self.dim, start, len)?;
                g.accumulate(input, dx);
            }
            start += len;
        }
        Ok(())
    }

    fn flops(&self, _: &[Spec], _: &[Spec]) -> u64 {
        0
    }

    fn runs_in_bf16(&self) -> bool {
        true
    }

    fn run(&self, args: &mut Args<'_>) {
        with_float!(args.output_dtype(0), T => self.join::<T>(args));
    }
    fn cuda(&self, operands: &gapless_kernels::cuda::Operands<'_>) -> Option<Vec<gapless_kernels::cuda::Launch>> {
        gapless_kernels::cuda::launch::cat(self.dim, operands)
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        let inputs: Vec<&Array> = (0..args.inputs()).map(|i| args.input(i)).collect();
        let mut dims = inputs[0].dims.clone();
        dims[self.dim] = inputs.iter().map(|x| x.dims[self.dim]).sum();
        let outer: usize = dims[..self.dim].iter().product();
        let mut data = Vec::new();
        for i in 0..outer {
            for x in &inputs {
                let part: usize = x.dims[self.dim..].iter().product();
                data.extend_from_slice(&x.data[i * part..(i + 1) * part]);
            }
        }
        vec![Array::new(&dims, data)]
    }
}

impl Cat {
    fn join<T: Float>(&self, args: &mut Args<'_>) {
        let out = args.output::<T>(0);
        let dims = args.output_dims(0);
        let wide: usize = dims[self.dim..].iter().product();
        let mut start = 0;
        for input in 0..args.inputs() {
            let (x, layout) = args.strided::<T>(input);
            let narrow: usize = layout.dims()[self.dim..].iter().product();
            let width = gapless_kernels::cpu::last_extent(layout);
            // A row consists of the elements along the last dimension of the input. The input has `rows` rows for each
            // index of the dimensions before `dim`.
            let rows = narrow / width;
            out.pieces_mut(wide.max(1)).enumerate().for_each_in_runs(8, |(outer, out)| {
                for (row, out) in out[start..start + narrow].chunks_exact_mut(width).enumerate() {
                    copy_row(x, layout, outer * rows + row, out);
                }
            });
            start += narrow;
        }
    }
}

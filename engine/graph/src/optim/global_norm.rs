//! The global norm of all gradients, which clipping and the progress line use.
//!
//! The computation takes two operations, because the gradients may be spread over ranks. Each rank sums up the squares
//! of its own gradients ([`SquaredNorms`]). Then every rank adds up the sums of all ranks ([`GlobalNorm`]), in an order
//! that does not depend on which rank computed which sum.

use candle_core::DType;
use gapless_kernels::Spec;
use gapless_kernels::cpu::{Args, BLOCK, InPieces, Pieces, reduce, vectorize, with_float};

use crate::op::Op;
use crate::reference::{Array, Reference};

/// Computes Σ x² of each input, as a vector of f64 with one element per input. Blocks of fixed size are summed in f32
/// lanes, and the sums of the blocks are added in f64, in order. So the result does not depend on the number of
/// threads.
#[derive(Debug, Clone, Copy)]
pub struct SquaredNorms;

fn blocks(elements: usize) -> usize {
    elements.div_ceil(BLOCK)
}

impl Op for SquaredNorms {
    fn name(&self) -> &'static str {
        "squared_norms"
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        crate::ops::expect_float(inputs)?;
        Ok(vec![Spec { shape: inputs.len().into(), dtype: DType::F64 }])
    }

    fn flops(&self, inputs: &[Spec], _: &[Spec]) -> u64 {
        inputs.iter().map(|s| 2 * s.elements() as u64).sum()
    }

    fn workspace(&self, inputs: &[Spec], _: &[Spec], _: usize) -> Vec<u64> {
        vec![4 * inputs.iter().map(|s| blocks(s.elements())).max().unwrap_or(0) as u64]
    }

    fn runs_in_bf16(&self) -> bool {
        true
    }

    fn run(&self, args: &mut Args<'_>) {
        let (out, workspace) = (args.output::<f64>(0), args.workspace().take::<f32>());
        for (input, out) in out.iter_mut().enumerate() {
            with_float!(args.input_dtype(input), Stored => {
                let x = args.input::<Stored>(input);
                let partial = &mut workspace[..blocks(x.len())];
                partial.pieces_mut(1).zip(x.pieces(BLOCK)).for_each(|(sum, x)| {
                    sum[0] = vectorize!(reduce::sum(x, |x| x * x));
                });
                *out = partial.iter().map(|&x| f64::from(x)).sum();
            });
        }
    }
    fn cuda_workspace(&self, inputs: &[Spec], _: &[Spec]) -> Vec<u64> {
        gapless_kernels::cuda::launch::squared_norms_workspace(inputs.iter().map(Spec::elements))
    }
    fn cuda(&self, operands: &gapless_kernels::cuda::Operands<'_>) -> Option<Vec<gapless_kernels::cuda::Launch>> {
        gapless_kernels::cuda::launch::squared_norms(operands)
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        let squares = |i: usize| args.input(i).data.iter().map(|x| x * x).sum();
        vec![Array::new(&[args.inputs()], (0..args.inputs()).map(squares).collect())]
    }
}

/// Computes √(Σ x) over all elements of all inputs, which are f64 vectors of sums of squares. The output is an f32
/// scalar. The elements are added from the smallest to the largest, so the result does not depend on how gradients are
/// distributed over ranks.
#[derive(Debug, Clone, Copy)]
pub struct GlobalNorm;

impl Op for GlobalNorm {
    fn name(&self) -> &'static str {
        "global_norm"
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        match inputs.iter().all(|input| input.dtype == DType::F64) {
            true => Ok(vec![Spec::f32(())]),
            false => Err("the squares must be f64".into()),
        }
    }

    fn workspace(&self, inputs: &[Spec], _: &[Spec], _: usize) -> Vec<u64> {
        vec![inputs.iter().map(Spec::bytes).sum()]
    }

    fn run(&self, args: &mut Args<'_>) {
        let (out, sorted) = (args.output::<f32>(0), args.workspace().take::<f64>());
        let mut rest = &mut sorted[..];
        for input in 0..args.inputs() {
            let squares = args.input::<f64>(input);
            let (part, behind) = rest.split_at_mut(squares.len());
            part.copy_from_slice(squares);
            rest = behind;
        }
        sorted.sort_unstable_by(f64::total_cmp);
        out[0] = sorted.iter().sum::<f64>().sqrt() as f32;
    }
    fn cuda_workspace(&self, inputs: &[Spec], _: &[Spec]) -> Vec<u64> {
        gapless_kernels::cuda::launch::global_norm_workspace(inputs)
    }
    fn cuda(&self, operands: &gapless_kernels::cuda::Operands<'_>) -> Option<Vec<gapless_kernels::cuda::Launch>> {
        gapless_kernels::cuda::launch::global_norm(operands)
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        let squares = (0..args.inputs()).flat_map(|i| &args.input(i).data);
        vec![Array::new(&[], vec![squares.sum::<f64>().sqrt()])]
    }
}

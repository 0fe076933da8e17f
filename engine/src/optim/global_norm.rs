//! The norm of all gradients together, for clipping and for the progress line.

use rayon::prelude::*;

use crate::cpu::{Args, BLOCK, reduce, vectorize};
use crate::graph::Spec;
use crate::op::Op;
use crate::reference::{Array, Reference};

/// √(Σ x²) over all inputs: a scalar. Blocks of fixed size are summed in f32 lanes and added in f64 in order, so that
/// the bits do not depend on the number of threads.
#[derive(Debug, Clone, Copy)]
pub struct GlobalNorm;

fn blocks(elements: usize) -> usize {
    elements.div_ceil(BLOCK)
}

impl Op for GlobalNorm {
    fn name(&self) -> &'static str {
        "global_norm"
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        crate::ops::expect_f32(inputs)?;
        Ok(vec![Spec::f32(())])
    }

    fn flops(&self, inputs: &[Spec], _: &[Spec]) -> u64 {
        inputs.iter().map(|s| 2 * s.elements() as u64).sum()
    }

    fn workspace_bytes(&self, inputs: &[Spec], _: &[Spec], _: usize) -> u64 {
        4 * inputs.iter().map(|s| blocks(s.elements())).max().unwrap_or(0) as u64
    }

    fn run(&self, args: &mut Args<'_>) {
        let (out, workspace) = (args.output::<f32>(0), args.workspace::<f32>());
        let mut total = 0.0;
        for input in 0..args.inputs() {
            let x = args.input::<f32>(input);
            let partial = &mut workspace[..blocks(x.len())];
            partial.par_iter_mut().zip(x.par_chunks(BLOCK)).for_each(|(sum, x)| {
                *sum = vectorize!(reduce::sum(x, |x| x * x));
            });
            total += partial.iter().map(|&x| f64::from(x)).sum::<f64>();
        }
        out[0] = total.sqrt() as f32;
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        let squares = (0..args.inputs()).flat_map(|i| &args.input(i).data).map(|x| x * x);
        vec![Array::new(&[], vec![squares.sum::<f64>().sqrt()])]
    }
}

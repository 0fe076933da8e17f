//! Several operations that run as one kernel, so that intermediate values stay in registers.
//!
//! - In: operations in order, each with the sources of its inputs (memory, or an earlier operation).
//! - Out: one operation with one launch. The launch is either a kernel generated for the operation ([`generate`]), or a
//!   matrix product with an epilogue (`product`). Intermediate values are f32, whatever type the unfused operations
//!   would have stored.
//! - Never: the choice of operations to fuse, which is made in `fuse/mod.rs`.

use std::sync::Arc;

use gapless_graph::Op;
use gapless_graph::Spec;
use gapless_graph::reference::{Array, Reference};
use gapless_kernels::cpu::Args;
use gapless_kernels::cuda::generate::{self, Source};
use gapless_kernels::cuda::{Fusible, Launch, Operands, launch};

use super::product;

/// One of the fused operations.
#[derive(Debug, Clone)]
pub struct Member {
    pub op: Arc<dyn Op>,
    /// The source of each input, and the extents of that input.
    pub inputs: Vec<(Source, Vec<usize>)>,
}

/// Several operations fused into one.
#[derive(Debug)]
pub struct Fused {
    /// The operations, in order.
    pub members: Vec<Member>,
    /// For each output, the index of the member that computes it, and the index among that member's outputs.
    pub outputs: Vec<(usize, usize)>,
    /// Shapes and types of the outputs.
    pub specs: Vec<Spec>,
    /// Pairs (input, output) that share a buffer.
    pub overwrites: Vec<(usize, usize)>,
    /// Sizes in bytes of the pieces of scratch that a matrix product or a sum over rows needs.
    pub workspace: Vec<u64>,
    /// Floating-point operations of all members.
    pub flops: u64,
}

impl Op for Fused {
    fn name(&self) -> &'static str {
        "fused"
    }

    fn infer(&self, _: &[Spec]) -> Result<Vec<Spec>, String> {
        Ok(self.specs.clone())
    }

    fn flops(&self, _: &[Spec], _: &[Spec]) -> u64 {
        self.flops
    }

    fn inplace(&self) -> &[(usize, usize)] {
        &self.overwrites
    }

    /// Runs the reference implementation. Programs for a CPU contain no fused operations, because fusion would not make
    /// them faster.
    fn run(&self, args: &mut Args<'_>) {
        let outputs: Vec<&mut [f32]> = (0..self.outputs.len()).map(|index| args.output(index)).collect();
        let wide = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect();
        let inputs: Vec<Array> = (0..args.inputs())
            .map(|index| match self.overwrites.iter().find(|pair| pair.0 == index) {
                Some(&(_, output)) => Array::new(args.input_dims(index), wide(outputs[output])),
                None => {
                    let (data, layout) = args.strided::<f32>(index);
                    Array::new(&[data.len()], wide(data)).view(layout)
                }
            })
            .collect();
        let made = self.reference(&Reference { inputs: inputs.iter().collect(), stream: args.random() });
        for (index, (output, made)) in outputs.into_iter().zip(made).enumerate() {
            let adds = args.accumulate(index);
            output.iter_mut().zip(made.data).for_each(|(y, x)| *y = if adds { *y + x as f32 } else { x as f32 });
        }
    }

    fn cuda_workspace(&self, _: &[Spec], _: &[Spec]) -> Vec<u64> {
        self.workspace.clone()
    }

    fn cuda(&self, operands: &Operands<'_>) -> Option<Vec<Launch>> {
        let launch = match self.members[0].op.cuda_fusible()? {
            Fusible::Product => return product::product(self, operands),
            Fusible::EmbeddingGrad { padding, first } => {
                let rows = Operands { inputs: &operands.inputs[..2], ..*operands };
                return launch::add_embedding_grad(padding, first, &rows);
            }
            _ => {
                let members = self.members.iter().map(|Member { op, inputs }| {
                    let inputs = inputs.iter().map(|(source, _)| *source).collect();
                    Some(generate::Member { name: op.name(), fusible: op.cuda_fusible()?, inputs })
                });
                Launch::Kernel(generate::kernel(&members.collect::<Option<Vec<_>>>()?, &self.outputs, operands)?)
            }
        };
        Some(vec![launch])
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        let mut made: Vec<Vec<Array>> = Vec::new();
        for Member { op, inputs } in &self.members {
            let inputs: Vec<Array> = inputs
                .iter()
                .map(|(source, dims)| {
                    let array = match *source {
                        Source::Memory(input) => args.input(input),
                        Source::Member(member, output) => &made[member][output],
                    };
                    Array::new(dims, array.data.clone())
                })
                .collect();
            made.push(op.reference(&Reference { inputs: inputs.iter().collect(), stream: args.stream }));
        }
        let output = |(&(member, output), spec): (&(usize, usize), &Spec)| {
            Array::new(spec.dims(), made[member][output].data.clone())
        };
        self.outputs.iter().zip(&self.specs).map(output).collect()
    }
}

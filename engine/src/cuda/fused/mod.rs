//! Operations that one kernel does together, so that what they hand each other stays in registers.
//!
//! In: operations in order, each with where its inputs come from: memory, or an operation before it. Out: one operation, with
//! one launch: of a kernel that is written for it (`source`), or of a product with an epilogue (`product`). Between them numbers are f32, whatever the unfused operations
//! would have stored. Never: a choice of what belongs together; that is `compile/fuse.rs`.

mod product;
mod source;

use std::sync::Arc;

pub(crate) use self::product::Follows;
use super::{Launch, Operands};
use crate::cpu::Args;
use crate::graph::Spec;
use crate::op::Op;
use crate::reference::{Array, Reference};

/// What an operation can bring into a kernel that several of them share.
#[derive(Debug, Clone, PartialEq)]
pub enum Fusible {
    /// Each element of its outputs is made of those at the same place of its inputs. Of more than ten inputs or constants it
    /// stays by itself.
    Each {
        /// For each output an expression in C, in f32: `$0` is the element of input 0, `%0` constant 0, and `i` its place. An
        /// operation whose expressions name others than there are stays by itself.
        outputs: Vec<String>,
        /// What `%0`, `%1`, … are.
        constants: Vec<Constant>,
    },
    /// One product of matrices, with one output that has no gaps: what follows it may be done before that is stored.
    Product,
    /// Rows of input 0 normalised by inputs 1 and, if centred, 2; with their statistics.
    Norm {
        /// Whether it is layer normalisation, rather than by the root of mean squares.
        is_centred: bool,
        /// Added to the variance.
        eps: f64,
    },
    /// The gradient of the rows, from (x, weight, statistics, dy).
    NormGradInput {
        /// As above.
        is_centred: bool,
    },
}

impl Fusible {
    /// Whether its expressions, if it has any, are of inputs and constants that there are.
    pub(crate) fn is_well_formed(&self, inputs: usize) -> bool {
        let Self::Each { outputs, constants } = self else { return true };
        let names = |expression: &String, mark: char, count: usize| {
            expression.split(mark).skip(1).all(|rest| {
                rest.chars().next().and_then(|digit| digit.to_digit(10)).is_some_and(|index| (index as usize) < count)
            })
        };
        outputs.iter().all(|output| names(output, '$', inputs) && names(output, '%', constants.len()))
    }

    /// One output by an expression of the inputs.
    pub fn each(expression: impl Into<String>) -> Self {
        Self::Each { outputs: vec![expression.into()], constants: Vec::new() }
    }
}

/// What a kernel is told when it is launched, so that one kernel does for all layers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Constant {
    /// An f32.
    Number(f32),
    /// A `u64`.
    Bits(u64),
    /// A sequence of random numbers, by its place in the model: the kernel has a `Numbers` of it.
    Place(u64),
}

/// One of the operations.
#[derive(Debug, Clone)]
pub(crate) struct Member {
    pub op: Arc<dyn Op>,
    /// Where each input comes from, and its extents.
    pub inputs: Vec<(Source, Vec<usize>)>,
}

/// Where a member's input comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Source {
    /// An input of the whole.
    Memory(usize),
    /// An output of a member before it.
    Member(usize, usize),
}

/// Several operations as one.
#[derive(Debug)]
pub(crate) struct Fused {
    /// In order.
    pub members: Vec<Member>,
    /// What each output is: a member's output.
    pub outputs: Vec<(usize, usize)>,
    /// Shapes and types of the outputs.
    pub specs: Vec<Spec>,
    /// (input, output) with the same bytes.
    pub overwrites: Vec<(usize, usize)>,
    /// Scratch of a product among them.
    pub workspace: Vec<u64>,
    /// Arithmetic of all members.
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

    fn may_overwrite(&self) -> &[(usize, usize)] {
        &self.overwrites
    }

    /// By the reference: on a processor there is nothing to gain.
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
        for (output, made) in outputs.into_iter().zip(made) {
            output.iter_mut().zip(made.data).for_each(|(output, x)| *output = x as f32);
        }
    }

    fn cuda_workspace(&self, _: &[Spec], _: &[Spec]) -> Vec<u64> {
        self.workspace.clone()
    }

    fn cuda(&self, operands: &Operands<'_>) -> Option<Vec<Launch>> {
        let launch = match self.members[0].op.cuda_fusible()? {
            Fusible::Product => Launch::Product(product::product(self, operands)?),
            _ => Launch::Kernel(source::kernel(self, operands)?),
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

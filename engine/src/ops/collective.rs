//! What the copies of a model do together: sums and gatherings over the data ranks.

use crate::communicator;
use crate::cpu::Args;
use crate::graph::{FLOATS, Spec};
use crate::op::Op;
use crate::reference::{Array, Reference};

/// A collective over the data ranks, as a node of the update. It has no kernel: lowering makes it a start and a wait, and
/// the communicator does the rest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Collective {
    /// Floats of any shape, summed in place.
    AllReduce,
    /// Floats: ranks · n elements → n: this rank's part of the sum.
    ReduceScatter {
        /// Data ranks.
        ranks: usize,
    },
    /// n elements → ranks · n: the parts of all ranks.
    AllGather {
        /// Data ranks.
        ranks: usize,
    },
    /// (tensor of ranks · n elements, part of n) → the tensor, changed to the parts of all ranks.
    Refill {
        /// Data ranks.
        ranks: usize,
    },
}

impl Collective {
    /// What the communicator is asked for, given addresses and extents.
    ///
    /// Input 0 of [`Self::AllReduce`] and [`Self::Refill`] is their output.
    pub(crate) fn request(
        self,
        inputs: [Option<(*mut u8, usize)>; 2],
        (output, bytes): (*mut u8, usize),
    ) -> communicator::Collective {
        let input = |index: usize| inputs[index].expect("the shape rule counted the inputs");
        match self {
            Self::AllReduce => communicator::Collective::AllReduce { values: output.cast(), count: bytes / 4 },
            Self::ReduceScatter { .. } => communicator::Collective::ReduceScatter {
                send: input(0).0.cast_const().cast(),
                receive: output.cast(),
                count: bytes / 4,
            },
            Self::AllGather { .. } => {
                communicator::Collective::AllGather { send: input(0).0.cast_const(), receive: output, len: input(0).1 }
            }
            Self::Refill { .. } => {
                communicator::Collective::AllGather { send: input(1).0.cast_const(), receive: output, len: input(1).1 }
            }
        }
    }
}

impl Op for Collective {
    fn name(&self) -> &'static str {
        match self {
            Self::AllReduce => "all_reduce",
            Self::ReduceScatter { .. } => "reduce_scatter",
            Self::AllGather { .. } | Self::Refill { .. } => "all_gather",
        }
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        let first = &inputs[0];
        let flat = |elements: usize| Spec { shape: elements.into(), dtype: first.dtype };
        match *self {
            Self::AllReduce | Self::ReduceScatter { .. } if !FLOATS.contains(&first.dtype) => {
                Err(format!("sums are of {FLOATS:?}, not {:?}", first.dtype))
            }
            Self::AllReduce => Ok(vec![first.clone()]),
            Self::ReduceScatter { ranks } if first.elements().is_multiple_of(ranks) => {
                Ok(vec![flat(first.elements() / ranks)])
            }
            Self::AllGather { ranks } => Ok(vec![flat(first.elements() * ranks)]),
            Self::Refill { ranks } if first.elements() == inputs[1].elements() * ranks => Ok(vec![first.clone()]),
            Self::ReduceScatter { ranks } | Self::Refill { ranks } => {
                Err(format!("the elements are not {ranks} equal parts"))
            }
        }
    }

    fn must_overwrite(&self) -> &[(usize, usize)] {
        match self {
            Self::AllReduce | Self::Refill { .. } => &[(0, 0)],
            Self::ReduceScatter { .. } | Self::AllGather { .. } => &[],
        }
    }

    fn flops(&self, _: &[Spec], _: &[Spec]) -> u64 {
        0
    }

    fn run(&self, _: &mut Args<'_>) {
        unreachable!("lowering gives collectives to the communicator");
    }

    /// What it is when all ranks hold the same.
    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        let x = args.input(0);
        match *self {
            Self::AllReduce => vec![x.clone()],
            Self::ReduceScatter { ranks } => {
                let part = x.data.len() / ranks;
                vec![Array::new(&[part], x.data[..part].iter().map(|x| x * ranks as f64).collect())]
            }
            Self::AllGather { ranks } => vec![Array::new(&[x.data.len() * ranks], x.data.repeat(ranks))],
            Self::Refill { ranks } => vec![Array::new(&x.dims, args.input(1).data.repeat(ranks))],
        }
    }
}

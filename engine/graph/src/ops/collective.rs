//! What ranks that are not stages of one pipeline do together: sums and gatherings, and the exchange of experts' rows.

use gapless_communicator as communicator;
use gapless_kernels::Spec;
use gapless_kernels::cpu::Args;

use crate::error::Result;
use crate::graph::FLOATS;
use crate::reference::{Array, Reference};
use crate::tensor::Tensor;
use crate::{Gradient, Op, Rows};

/// Which ranks, of those with the same stages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Group {
    /// All that have a share of the batch: data × expert ranks.
    Batch,
    /// Those of one copy of the model, which share its experts.
    Experts,
    /// Those with the same experts.
    Replicas,
}

/// A collective as a node of the graph. It has no kernel: lowering makes it a start and a wait, and the communicator does the
/// rest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Collective {
    /// Floats of any shape, summed in place.
    AllReduce {
        /// By whom.
        group: Group,
    },
    /// Floats: ranks · n elements → n: this rank's part of the sum over the batch's ranks.
    ReduceScatter {
        /// Their number.
        ranks: usize,
    },
    /// n elements → ranks · n: the parts of all ranks.
    AllGather {
        /// By whom.
        group: Group,
        /// Their number.
        ranks: usize,
    },
    /// (tensor of ranks · n elements, part of n) → the tensor, changed to the parts of all of the batch's ranks.
    Refill {
        /// Their number.
        ranks: usize,
    },
    /// ranks · n elements → as many: part r is this rank's part of what the expert rank r has.
    AllToAll {
        /// Their number.
        ranks: usize,
    },
    /// (rows [.., width], starts of what is sent, starts of what comes) → [rows, width], between the expert ranks. Of either
    /// starts, [ranks × runs + 1], each rank has an equal number of runs. Rows behind the last that comes are zeros.
    AllToAllRows {
        /// Their number.
        ranks: usize,
        /// The most rows that come.
        rows: usize,
        /// Whether what comes is counted while the step runs, rather than what is sent.
        counted: bool,
        /// How many rows are counted when all ranks have the same number.
        balanced: usize,
    },
}

impl Collective {
    /// Who takes part.
    pub fn group(self) -> Group {
        match self {
            Self::AllReduce { group } | Self::AllGather { group, .. } => group,
            Self::ReduceScatter { .. } | Self::Refill { .. } => Group::Batch,
            Self::AllToAll { .. } | Self::AllToAllRows { .. } => Group::Experts,
        }
    }

    /// How many ranks it was made for, where that shows in its shapes.
    pub fn ranks(self) -> Option<usize> {
        match self {
            Self::AllReduce { .. } => None,
            Self::ReduceScatter { ranks } | Self::Refill { ranks } | Self::AllToAll { ranks } => Some(ranks),
            Self::AllGather { ranks, .. } | Self::AllToAllRows { ranks, .. } => Some(ranks),
        }
    }

    /// What the communicator is asked for, given addresses and extents. `lens` are the bytes for and from each rank of an
    /// [`Self::AllToAll`] or [`Self::AllToAllRows`].
    ///
    /// Input 0 of [`Self::AllReduce`] and [`Self::Refill`] is their output.
    pub fn request(
        self,
        inputs: [Option<(*mut u8, usize)>; 2],
        (output, bytes): (*mut u8, usize),
        lens: [&[usize]; 2],
    ) -> communicator::Collective {
        let input = |index: usize| inputs[index].expect("the shape rule counted the inputs");
        match self {
            Self::AllReduce { .. } => communicator::Collective::AllReduce { values: output.cast(), count: bytes / 4 },
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
            Self::AllToAll { .. } | Self::AllToAllRows { .. } => communicator::Collective::AllToAllV {
                send: input(0).0.cast_const(),
                send_lens: lens[0].as_ptr(),
                receive: output,
                receive_lens: lens[1].as_ptr(),
            },
        }
    }
}

impl Op for Collective {
    fn name(&self) -> &'static str {
        match self {
            Self::AllReduce { .. } => "all_reduce",
            Self::ReduceScatter { .. } => "reduce_scatter",
            Self::AllGather { .. } | Self::Refill { .. } => "all_gather",
            Self::AllToAll { .. } => "all_to_all",
            Self::AllToAllRows { .. } => "all_to_all_rows",
        }
    }

    fn rows(&self) -> Rows {
        match *self {
            Self::AllToAllRows { counted: true, balanced, .. } => Rows::Counted { starts: 2, balanced },
            Self::AllToAllRows { .. } => Rows::Fixed,
            _ => Rows::Unaware,
        }
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        let first = &inputs[0];
        let flat = |elements: usize| Spec { shape: elements.into(), dtype: first.dtype };
        match *self {
            Self::AllReduce { .. } | Self::ReduceScatter { .. } if !FLOATS.contains(&first.dtype) => {
                Err(format!("a sum takes one of {FLOATS:?}, not {:?}", first.dtype))
            }
            Self::AllReduce { .. } => Ok(vec![first.clone()]),
            Self::ReduceScatter { ranks } if first.elements().is_multiple_of(ranks) => {
                Ok(vec![flat(first.elements() / ranks)])
            }
            Self::AllGather { ranks, .. } => Ok(vec![flat(first.elements() * ranks)]),
            Self::Refill { ranks } if first.elements() == inputs[1].elements() * ranks => Ok(vec![first.clone()]),
            Self::AllToAll { ranks } if first.elements().is_multiple_of(ranks) => Ok(vec![first.clone()]),
            Self::AllToAllRows { ranks, rows, .. } => {
                let &[_, width] = first.dims() else { return Err("the rows must be [rows, width]".into()) };
                super::expect_ids("the starts of sent rows", &inputs[1])?;
                super::expect_ids("the starts of received rows", &inputs[2])?;
                match inputs[1..].iter().all(|starts| (starts.elements() - 1).is_multiple_of(ranks)) {
                    true => Ok(vec![first.in_shape((rows, width))]),
                    false => Err(format!("the starts must have a multiple of {ranks} runs, one per rank")),
                }
            }
            Self::ReduceScatter { ranks } | Self::Refill { ranks } | Self::AllToAll { ranks } => {
                Err(format!("the elements do not divide into {ranks} equal parts"))
            }
        }
    }

    /// Rows go back where they came from.
    fn gradient(&self, g: &mut Gradient) -> Result<()> {
        match *self {
            Self::AllToAllRows { ranks, counted, balanced, .. } => {
                let back = Self::AllToAllRows { ranks, rows: g.input(0).dims()[0], counted: !counted, balanced };
                let [d_rows] = Tensor::apply_op(back, &[&g.grad(0), &g.input(2), &g.input(1)])?;
                g.send(0, d_rows);
                Ok(())
            }
            // Numbers of rows.
            Self::AllToAll { .. } => Ok(()),
            _ => Err(crate::Error::NoGradient { op: self.name().into(), input: 0 }),
        }
    }

    fn mutates(&self) -> &[(usize, usize)] {
        match self {
            Self::AllReduce { .. } | Self::Refill { .. } => &[(0, 0)],
            _ => &[],
        }
    }

    fn flops(&self, _: &[Spec], _: &[Spec]) -> u64 {
        0
    }

    fn run(&self, _: &mut Args<'_>) {
        unreachable!("lowering gives collectives to the communicator");
    }

    /// What it is on the first rank when all ranks hold the same.
    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        let x = args.input(0);
        match *self {
            Self::AllReduce { .. } => vec![x.clone()],
            Self::ReduceScatter { ranks } => {
                let part = x.data.len() / ranks;
                vec![Array::new(&[part], x.data[..part].iter().map(|x| x * ranks as f64).collect())]
            }
            Self::AllGather { ranks, .. } => vec![Array::new(&[x.data.len() * ranks], x.data.repeat(ranks))],
            Self::Refill { ranks } => vec![Array::new(&x.dims, args.input(1).data.repeat(ranks))],
            Self::AllToAll { ranks } => {
                vec![Array::new(&x.dims, x.data[..x.data.len() / ranks].repeat(ranks))]
            }
            Self::AllToAllRows { ranks, rows, .. } => {
                let (sent, width) = (&args.input(1).data, x.dims[1]);
                let mut out = x.data[..sent[(sent.len() - 1) / ranks] as usize * width].repeat(ranks);
                out.resize(rows * width, 0.0);
                vec![Array::new(&[rows, width], out)]
            }
        }
    }
}

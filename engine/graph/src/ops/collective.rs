//! Collectives between ranks that are not stages of one pipeline: sums, gathers, and the exchange of routed rows.

use std::any::Any;
use std::sync::Arc;

use gapless_communicator as communicator;
use gapless_kernels::cpu::Args;
use gapless_kernels::{Spec, Window};
use gapless_parallel::Axes;

use crate::error::Result;
use crate::graph::FLOATS;
use crate::reference::{Array, Reference};
use crate::rule::Rule;
use crate::tensor::Tensor;
use crate::{Gradient, Node, Op, RowUse};

/// A collective as a node of the graph. It has no kernel: lowering turns it into two instructions, a start and a wait,
/// for the communicator. The ranks that take part are this rank's group along the axes `axes` of the mesh.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Collective {
    /// Sum of floats of any shape, in place.
    AllReduce {
        /// The axes of the group.
        axes: Axes,
    },
    /// Sum of floats of which each rank keeps its own part: `[ranks, ..]` → `[..]`, or ranks · n elements of another shape → `[n]`.
    ReduceScatter {
        /// The axes of the group.
        axes: Axes,
        /// Number of ranks.
        ranks: usize,
    },
    /// The parts of all ranks, one after another: `[..]` → `[ranks, ..]`.
    AllGather {
        /// The axes of the group.
        axes: Axes,
        /// Number of ranks.
        ranks: usize,
    },
    /// All-gather into an existing tensor. The inputs are a tensor of ranks · n elements and this rank's part of n
    /// elements. The output is the tensor, overwritten with the parts of all ranks.
    Refill {
        /// The axes of the group.
        axes: Axes,
        /// Number of ranks.
        ranks: usize,
    },
    /// Exchange of equal parts between the ranks: ranks · n elements → ranks · n elements. On rank i, part r of
    /// the output is part i of rank r's input.
    AllToAll {
        /// The axes of the group.
        axes: Axes,
        /// Number of ranks.
        ranks: usize,
    },
    /// Exchange of rows between the ranks. The inputs are the rows [.., width], the offsets of the runs of rows
    /// to send, and the offsets of the runs to receive. The output is [rows, width]. Both offset tensors are [ranks ×
    /// runs + 1], with the same number of runs for each rank. Output rows after the last received row are zeros.
    AllToAllRows {
        /// The axes of the group.
        axes: Axes,
        /// Number of ranks.
        ranks: usize,
        /// The maximum number of rows received.
        rows: usize,
        /// True if the number of rows received is known only while the step runs, as on the way to the experts. False
        /// if this holds for the number of rows sent, as on the way back.
        receives_dynamic_rows: bool,
        /// The number of these rows under balanced routing ([`RowUse::DynamicOutputs`]).
        balanced: usize,
    },
}

impl Collective {
    /// Returns the collective that a node performs, or `None` if it is an ordinary operation.
    pub fn of(node: &Node) -> Option<Self> {
        let op: &dyn Any = &*node.op;
        op.downcast_ref().copied()
    }

    /// Returns the axes of the group of ranks that take part.
    pub fn axes(self) -> Axes {
        match self {
            Self::AllReduce { axes }
            | Self::ReduceScatter { axes, .. }
            | Self::AllGather { axes, .. }
            | Self::Refill { axes, .. }
            | Self::AllToAll { axes, .. }
            | Self::AllToAllRows { axes, .. } => axes,
        }
    }

    /// Returns the number of ranks for which the collective was recorded. Returns `None` for [`Self::AllReduce`], whose
    /// shapes do not depend on the number of ranks.
    pub fn ranks(self) -> Option<usize> {
        match self {
            Self::AllReduce { .. } => None,
            Self::ReduceScatter { ranks, .. }
            | Self::AllGather { ranks, .. }
            | Self::Refill { ranks, .. }
            | Self::AllToAll { ranks, .. }
            | Self::AllToAllRows { ranks, .. } => Some(ranks),
        }
    }

    /// Returns the request to the communicator for operands at these addresses and of these sizes in bytes. For
    /// [`Self::AllToAll`] and [`Self::AllToAllRows`], `lens` gives the number of bytes to send to each rank and to
    /// receive from each rank. Other collectives do not read `lens`.
    ///
    /// The output of [`Self::AllReduce`] and [`Self::Refill`] is input 0.
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

    /// The operands of a collective among some ranks, if other ranks divide them.
    fn rule(&self, inputs: &[Spec], _: &[Spec]) -> Option<Rule> {
        match *self {
            Self::AllReduce { .. } => Some(Rule::elementwise(1, 1)),
            Self::AllGather { .. } => Some(Rule::labels("* -> R *")),
            Self::ReduceScatter { ranks, .. } if inputs[0].dims().first() == Some(&ranks) => {
                Some(Rule::labels("R * -> *"))
            }
            Self::AllToAllRows { .. } => Some(Rule::labels("R w, S, T -> Q w")),
            _ => None,
        }
    }

    fn on_parts(&self, _: &[Window], outputs: &[Window]) -> Option<Arc<dyn Op>> {
        match *self {
            Self::AllToAllRows { axes, ranks, receives_dynamic_rows, balanced, .. } => {
                let rows = outputs[0].dims()[0];
                Some(Arc::new(Self::AllToAllRows { axes, ranks, rows, receives_dynamic_rows, balanced }))
            }
            _ => None,
        }
    }

    fn on_rows_of(&self, token_ranks: usize) -> Option<Arc<dyn Op>> {
        match *self {
            Self::AllToAllRows { axes, ranks, rows, receives_dynamic_rows, balanced } => {
                let balanced = balanced.div_ceil(token_ranks);
                Some(Arc::new(Self::AllToAllRows { axes, ranks, rows, receives_dynamic_rows, balanced }))
            }
            _ => None,
        }
    }

    fn rows(&self) -> RowUse {
        match *self {
            Self::AllToAllRows { receives_dynamic_rows: true, balanced, .. } => {
                RowUse::DynamicOutputs { offsets: 2, balanced }
            }
            Self::AllToAllRows { .. } => RowUse::FixedOutputs,
            _ => RowUse::Unaware,
        }
    }

    fn linear_inputs(&self) -> usize {
        usize::from(!matches!(self, Self::Refill { .. } | Self::AllToAll { .. }))
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        let first = &inputs[0];
        match *self {
            Self::AllReduce { .. } | Self::ReduceScatter { .. } if !FLOATS.contains(&first.dtype) => {
                Err(format!("a sum takes one of {FLOATS:?}, not {:?}", first.dtype))
            }
            Self::AllReduce { .. } => Ok(vec![first.clone()]),
            Self::ReduceScatter { ranks, .. } if first.elements().is_multiple_of(ranks) => {
                Ok(vec![match first.dims() {
                    [of, part @ ..] if *of == ranks => first.in_shape(part),
                    _ => first.in_shape(first.elements() / ranks),
                }])
            }
            Self::AllGather { ranks, .. } => Ok(vec![first.in_shape([&[ranks], first.dims()].concat())]),
            Self::Refill { ranks, .. } if first.elements() == inputs[1].elements() * ranks => Ok(vec![first.clone()]),
            Self::AllToAll { ranks, .. } if first.elements().is_multiple_of(ranks) => Ok(vec![first.clone()]),
            Self::AllToAllRows { ranks, rows, .. } => {
                let &[_, width] = first.dims() else { return Err("the rows must be [rows, width]".into()) };
                super::expect_ids("the starts of sent rows", &inputs[1])?;
                super::expect_ids("the starts of received rows", &inputs[2])?;
                match inputs[1..].iter().all(|starts| (starts.elements() - 1).is_multiple_of(ranks)) {
                    true => Ok(vec![first.in_shape((rows, width))]),
                    false => Err(format!("the starts must have a multiple of {ranks} runs, one per rank")),
                }
            }
            Self::ReduceScatter { ranks, .. } | Self::Refill { ranks, .. } | Self::AllToAll { ranks, .. } => {
                Err(format!("the elements do not divide into {ranks} equal parts"))
            }
        }
    }

    /// The gradient of each row is sent back to the rank from which the row came.
    fn gradient(&self, g: &mut Gradient) -> Result<()> {
        match *self {
            Self::AllToAllRows { axes, ranks, receives_dynamic_rows, balanced, .. } => {
                let back = Self::AllToAllRows {
                    axes,
                    ranks,
                    rows: g.input(0).dims()[0],
                    receives_dynamic_rows: !receives_dynamic_rows,
                    balanced,
                };
                let [d_rows] = Tensor::apply_op(back, &[&g.grad(0), &g.input(2), &g.input(1)])?;
                g.accumulate(0, d_rows);
                Ok(())
            }
            // Row counts have no gradient.
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

    /// Returns the result on the first rank if all ranks have the same input. [`Self::AllReduce`] does not record the
    /// number of ranks, so its result is that of a single rank.
    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        let x = args.input(0);
        match *self {
            Self::AllReduce { .. } => vec![x.clone()],
            Self::ReduceScatter { ranks, .. } => {
                let part = x.data.len() / ranks;
                let dims = if x.dims.first() == Some(&ranks) { &x.dims[1..] } else { &[part][..] };
                vec![Array::new(dims, x.data[..part].iter().map(|x| x * ranks as f64).collect())]
            }
            Self::AllGather { ranks, .. } => {
                vec![Array::new(&[&[ranks], &x.dims[..]].concat(), x.data.repeat(ranks))]
            }
            Self::Refill { ranks, .. } => vec![Array::new(&x.dims, args.input(1).data.repeat(ranks))],
            Self::AllToAll { ranks, .. } => {
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

//! Grouped matrix products: each expert's rows are multiplied by the expert's own weight. The number of rows of an
//! expert is known only when the program runs.

use std::sync::Arc;

use candle_core::DType;
use gapless_kernels::Spec;
use gapless_kernels::cpu::bf16::Stored;
use gapless_kernels::cpu::gemm::{Factor, Gemm, Groups, Mode, Strides};
use gapless_kernels::cpu::{Args, with_float};

use super::{RowRuns, exact_offsets, used_rows};
use crate::error::Result;
use crate::ops::OutputTypes;
use crate::reference::{Array, Reference};
use crate::rule::Rule;
use crate::tensor::Tensor;
use crate::{Gradient, Op, RowUse};

/// Multiplies each row by the weight of its expert: x·Wᵀ, from x [rows, in], weights [experts, out, in] and `starts`
/// (see [`Route`](super::Route)) to [rows, out]. Rows are not padded. MegaBlocks (arXiv 2211.15841) computes the same
/// in blocks.
#[derive(Debug, Clone, Copy)]
pub struct GroupedLinear {
    /// Number of ranks from which rows come. All rows of one rank precede those of the next.
    pub sources: usize,
    /// The number of rows under balanced routing ([`RowUse::DynamicOutputs`](crate::RowUse::DynamicOutputs)), or `None`
    /// if the number of rows is fixed.
    pub balanced: Option<usize>,
}

/// Returns the extents (experts, out, in) of the weight of all experts.
fn weight_dims(weight: &[usize]) -> (usize, usize, usize) {
    let &[experts, out, width] = weight else { unreachable!("rank 3 by the shape rule") };
    (experts, out, width)
}

/// The product of one expert with `rows` rows.
fn forward(rows: usize, out: usize, width: usize) -> Gemm {
    Gemm::new(rows, out, width, Strides::row_major(width), Strides::transposed(width))
}

fn backward(rows: usize, out: usize, width: usize) -> Gemm {
    Gemm::new(rows, width, out, Strides::row_major(out), Strides::row_major(width))
}

/// Computes the product of each expert's rows and weight, and sets the unused rows of the output to zero.
fn run(args: &mut Args<'_>, sources: usize, most: &Gemm) {
    with_float!(args.input_dtype(0), T => run_on::<T>(args, sources, most));
}

fn run_on<T: Factor>(args: &mut Args<'_>, sources: usize, most: &Gemm) {
    let ((out, mut rounded), mut scratch) = (args.output_rounded(0), args.workspace());
    let (x, weight, offsets) = (args.input::<T>(0), args.input::<T>(1), args.input::<u32>(2));
    let experts = weight.len() / (most.n * most.k);
    let groups = Groups::new(offsets, sources * experts).expect("starts by the shape rule");
    let c = (&mut *out, rounded.as_deref_mut());
    most.run_grouped(groups, experts, x, weight, c, &mut scratch).expect("extents by the shape rule");
    let unused = used_rows(offsets) * most.n..;
    match rounded {
        Some(rounded) => rounded[unused].fill(Stored::ZERO),
        None => out[unused].fill(0.0),
    }
}

impl Op for GroupedLinear {
    fn name(&self) -> &'static str {
        "grouped_linear"
    }

    fn rows(&self) -> RowUse {
        super::rows(2, self.balanced)
    }

    fn rule(&self, _: &[Spec], _: &[Spec]) -> Option<Rule> {
        Some(Rule::labels("R i, E o i, S -> R o"))
    }

    fn on_rows_of(&self, ranks: usize) -> Option<Arc<dyn Op>> {
        Some(Arc::new(Self { balanced: super::balanced_on(ranks, self.balanced), ..*self }))
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        crate::ops::expect_float(&inputs[..2])?;
        crate::ops::expect_ids("starts", &inputs[2])?;
        let (&[rows, width], &[experts, out, weight_width]) = (inputs[0].dims(), inputs[1].dims()) else {
            return Err("x must be [rows, in], the weight [experts, out, in]".into());
        };
        if width != weight_width {
            return Err(format!("the rows' width is {width}, the weight takes {weight_width}"));
        }
        let runs = experts * self.sources;
        if self.sources == 0 || !(inputs[2].elements() - 1).is_multiple_of(runs) || inputs[2].elements() < 2 {
            return Err(format!("starts must be [{} × {experts} × sequences + 1]", self.sources));
        }
        Ok(vec![inputs[0].in_shape((rows, out))])
    }

    fn gradient(&self, g: &mut Gradient) -> Result<()> {
        let (x, weight, offsets, dy) = (g.input(0), g.input(1), g.input(2), g.grad(0));
        // The weight's gradient is recorded first, because it is the last reader of x.
        if g.wants(1) {
            let experts = weight.dims()[0];
            let [d_weight] = Tensor::apply_op(
                GroupedLinearGradWeight {
                    experts,
                    sources: self.sources,
                    balanced: self.balanced,
                    types: OutputTypes::default(),
                },
                &[&x, &dy, &offsets],
            )?;
            g.accumulate(1, d_weight);
        }
        if g.wants(0) {
            let [dx] = Tensor::apply_op(
                GroupedLinearGradInput { sources: self.sources, balanced: self.balanced },
                &[&dy, &weight, &offsets],
            )?;
            g.accumulate(0, dx);
        }
        Ok(())
    }

    /// Counts the rows of balanced routing if `balanced` is given, and all rows if not.
    fn flops(&self, inputs: &[Spec], outputs: &[Spec]) -> u64 {
        let (width, out) = (gapless_kernels::width(inputs[0].dims()), gapless_kernels::width(outputs[0].dims()));
        2 * (self.balanced.unwrap_or(inputs[0].dims()[0]) * width * out) as u64
    }

    fn workspace(&self, inputs: &[Spec], _: &[Spec], threads: usize) -> Vec<u64> {
        let (_, out, width) = weight_dims(inputs[1].dims());
        forward(inputs[0].dims()[0], out, width).scratch_grouped(threads)
    }

    /// The kernel converts bf16 operands when it packs them.
    fn reads_bf16(&self, index: usize) -> bool {
        index < 2
    }

    fn run(&self, args: &mut Args<'_>) {
        let (_, out, width) = weight_dims(args.input_dims(1));
        run(args, self.sources, &forward(args.input_dims(0)[0], out, width));
    }
    fn cuda(&self, operands: &gapless_kernels::cuda::Operands<'_>) -> Option<Vec<gapless_kernels::cuda::Launch>> {
        gapless_kernels::cuda::launch::grouped_linear(self.sources, operands)
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        let (x, weight, offsets) = (args.input(0), args.input(1), exact_offsets(args.input(2)));
        let (experts, out, width) = weight_dims(&weight.dims);
        let mut y = Array::zeros(&[x.dims[0], out]);
        let runs = RowRuns { offsets: &offsets, sources: self.sources, experts };
        for expert in 0..experts {
            for row in runs.by_sequence(expert).flatten() {
                for o in 0..out {
                    let w = &weight.data[(expert * out + o) * width..][..width];
                    y.data[row * out + o] = x.data[row * width..][..width].iter().zip(w).map(|(x, w)| x * w).sum();
                }
            }
        }
        vec![y]
    }
}

/// The gradient dx = dy·W of the rows, from (dy, weight, starts).
#[derive(Debug, Clone, Copy)]
struct GroupedLinearGradInput {
    sources: usize,
    balanced: Option<usize>,
}

impl Op for GroupedLinearGradInput {
    fn name(&self) -> &'static str {
        "grouped_linear_grad_input"
    }

    fn rows(&self) -> RowUse {
        super::rows(2, self.balanced)
    }

    fn rule(&self, _: &[Spec], _: &[Spec]) -> Option<Rule> {
        Some(Rule::labels("R o, E o i, S -> R i"))
    }

    fn on_rows_of(&self, ranks: usize) -> Option<Arc<dyn Op>> {
        Some(Arc::new(Self { balanced: super::balanced_on(ranks, self.balanced), ..*self }))
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        let (_, _, width) = weight_dims(inputs[1].dims());
        Ok(vec![inputs[0].in_shape((inputs[0].dims()[0], width))])
    }

    fn flops(&self, inputs: &[Spec], outputs: &[Spec]) -> u64 {
        let Self { sources, balanced } = *self;
        GroupedLinear { sources, balanced }.flops(inputs, outputs)
    }

    fn workspace(&self, inputs: &[Spec], _: &[Spec], threads: usize) -> Vec<u64> {
        let (_, out, width) = weight_dims(inputs[1].dims());
        backward(inputs[0].dims()[0], out, width).scratch_grouped(threads)
    }

    /// The kernel converts bf16 operands when it packs them.
    fn reads_bf16(&self, index: usize) -> bool {
        index < 2
    }

    fn run(&self, args: &mut Args<'_>) {
        let (_, out, width) = weight_dims(args.input_dims(1));
        run(args, self.sources, &backward(args.input_dims(0)[0], out, width));
    }
    fn cuda(&self, operands: &gapless_kernels::cuda::Operands<'_>) -> Option<Vec<gapless_kernels::cuda::Launch>> {
        gapless_kernels::cuda::launch::grouped_linear_grad_input(self.sources, operands)
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        let (dy, weight, offsets) = (args.input(0), args.input(1), exact_offsets(args.input(2)));
        let (experts, out, width) = weight_dims(&weight.dims);
        let mut dx = Array::zeros(&[dy.dims[0], width]);
        let runs = RowRuns { offsets: &offsets, sources: self.sources, experts };
        for expert in 0..experts {
            for row in runs.by_sequence(expert).flatten() {
                for o in 0..out {
                    for i in 0..width {
                        dx.data[row * width + i] +=
                            dy.data[row * out + o] * weight.data[(expert * out + o) * width + i];
                    }
                }
            }
        }
        vec![dx]
    }
}

/// The gradient d_weight = dyᵀ·x over each expert's rows, from (x, dy, starts). The sum of each sequence is computed
/// separately, and these sums are added in order. So accumulating over micro-batches gives the same bits as one call
/// for the whole batch.
#[derive(Debug, Clone, Copy)]
struct GroupedLinearGradWeight {
    experts: usize,
    sources: usize,
    balanced: Option<usize>,
    types: OutputTypes<1>,
}

impl GroupedLinearGradWeight {
    fn most(x: &[usize], dy: &[usize]) -> Gemm {
        let (width, out) = (gapless_kernels::width(x), gapless_kernels::width(dy));
        Gemm::new(out, width, x[0], Strides::transposed(out), Strides::row_major(width))
    }

    /// Runs the kernel for operands stored in the type `T`.
    fn run_on<T: Factor>(&self, args: &mut Args<'_>) {
        let accumulate = args.accumulate(0);
        let (d_weight, mut scratch) = (args.output::<f32>(0), args.workspace());
        let (x, dy, offsets) = (args.input::<T>(0), args.input::<T>(1), args.input::<u32>(2));
        let most = Self::most(args.input_dims(0), args.input_dims(1));
        // Each sequence has its own partial sum. The sequences are ordered by source.
        let of_source = (offsets.len() - 1) / self.sources;
        for source in 0..self.sources {
            let source_offsets = &offsets[source * of_source..][..=of_source];
            let groups = Groups::new(source_offsets, self.experts).expect("starts by the shape rule");
            let mode = if accumulate || source > 0 { Mode::Accumulate } else { Mode::Overwrite };
            most.sum_grouped(groups, dy, x, d_weight, mode, &mut scratch).expect("extents by the shape rule");
        }
    }
}

impl Op for GroupedLinearGradWeight {
    fn name(&self) -> &'static str {
        "grouped_linear_grad_weight"
    }

    fn rows(&self) -> RowUse {
        RowUse::FixedOutputs
    }

    fn rule(&self, _: &[Spec], _: &[Spec]) -> Option<Rule> {
        Some(Rule::labels("R i, R o, S -> E o i"))
    }

    fn on_rows_of(&self, ranks: usize) -> Option<Arc<dyn Op>> {
        Some(Arc::new(Self { balanced: super::balanced_on(ranks, self.balanced), ..*self }))
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        let (width, out) = (gapless_kernels::width(inputs[0].dims()), gapless_kernels::width(inputs[1].dims()));
        Ok(self.types.apply_to([inputs[0].in_shape((self.experts, out, width))]))
    }

    fn flops(&self, inputs: &[Spec], _: &[Spec]) -> u64 {
        let rows = self.balanced.unwrap_or(inputs[0].dims()[0]);
        2 * (rows * gapless_kernels::width(inputs[0].dims()) * gapless_kernels::width(inputs[1].dims())) as u64
    }

    fn accumulates(&self, _: usize) -> bool {
        true
    }

    fn with_output_dtype(&self, index: usize, dtype: DType) -> Option<Arc<dyn Op>> {
        Some(Arc::new(Self { types: self.types.with(index, dtype), ..*self }))
    }

    fn workspace(&self, inputs: &[Spec], _: &[Spec], threads: usize) -> Vec<u64> {
        Self::most(inputs[0].dims(), inputs[1].dims()).scratch_grouped(threads)
    }

    /// The kernel converts bf16 operands when it packs them.
    fn reads_bf16(&self, index: usize) -> bool {
        index < 2
    }

    fn run(&self, args: &mut Args<'_>) {
        with_float!(args.input_dtype(0), T => self.run_on::<T>(args));
    }
    fn cuda(&self, operands: &gapless_kernels::cuda::Operands<'_>) -> Option<Vec<gapless_kernels::cuda::Launch>> {
        gapless_kernels::cuda::launch::grouped_linear_grad_weight(self.sources, operands)
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        let (x, dy, offsets) = (args.input(0), args.input(1), exact_offsets(args.input(2)));
        let (width, out) = (gapless_kernels::width(&x.dims), gapless_kernels::width(&dy.dims));
        let mut d_weight = Array::zeros(&[self.experts, out, width]);
        let runs = RowRuns { offsets: &offsets, sources: self.sources, experts: self.experts };
        for expert in 0..self.experts {
            for row in runs.by_sequence(expert).flatten() {
                for o in 0..out {
                    for i in 0..width {
                        d_weight.data[(expert * out + o) * width + i] +=
                            dy.data[row * out + o] * x.data[row * width + i];
                    }
                }
            }
        }
        vec![d_weight]
    }
}

//! The linear layer x·Wᵀ + b, with separate operations for the gradients of its input and its weight.

use std::sync::Arc;

use candle_core::DType;
use gapless_kernels::Spec;
use gapless_kernels::cpu::gemm::{Epilogue, Factor, Gemm, Mode, Strides};
use gapless_kernels::cpu::{Args, InPieces, Pieces, columns_per_task, vectorize, with_float};

use super::OutputTypes;
use crate::error::Result;
use crate::reference::{Array, Reference};
use crate::rule::Rule;
use crate::tensor::Tensor;
use crate::{Gradient, Op};

/// x·Wᵀ + b: from x [.., in], the weight W [out, in] and an optional bias `[out]` to [.., out].
#[derive(Debug, Clone, Copy)]
pub struct Linear {
    /// True if the bias is given as a third input.
    pub has_bias: bool,
}

impl Op for Linear {
    fn name(&self) -> &'static str {
        "linear"
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        super::expect_float(inputs)?;
        super::expect_rank(&inputs[0], 1)?;
        let &[out, width] = inputs[1].dims() else { return Err("the weight must be [out, in]".into()) };
        let (&last, rows) = inputs[0].dims().split_last().expect("rank was checked");
        if last != width {
            return Err(format!("the input's last dimension is {last}, the weight takes {width}"));
        }
        if self.has_bias && inputs[2].dims() != [out] {
            return Err(format!("the bias must be [{out}]"));
        }
        Ok(vec![inputs[0].in_shape([rows, &[out]].concat())])
    }

    fn rule(&self, _: &[Spec], _: &[Spec]) -> Option<Rule> {
        Some(Rule::labels(if self.has_bias { "* i, o i, o -> * o" } else { "* i, o i -> * o" }))
    }

    fn without_bias(&self) -> Option<(usize, Arc<dyn Op>)> {
        self.has_bias.then(|| (2, Arc::new(Self { has_bias: false }) as Arc<dyn Op>))
    }

    fn gradient(&self, g: &mut Gradient) -> Result<()> {
        let (x, weight, dy) = (g.input(0), g.input(1), g.grad(0));
        let needs_bias = self.has_bias && g.wants(2);
        // The weight's gradient is recorded first, because it is the last reader of x.
        let op = LinearGradWeight { has_bias: needs_bias, types: OutputTypes::default() };
        if needs_bias {
            let [d_weight, d_bias] = Tensor::apply_op(op, &[&x, &dy])?;
            if g.wants(1) {
                g.accumulate(1, d_weight);
            }
            g.accumulate(2, d_bias);
        } else if g.wants(1) {
            let [d_weight] = Tensor::apply_op(op, &[&x, &dy])?;
            g.accumulate(1, d_weight);
        }
        if g.wants(0) {
            let [dx] = Tensor::apply_op(LinearGradInput, &[&dy, &weight])?;
            g.accumulate(0, dx);
        }
        Ok(())
    }

    fn flops(&self, inputs: &[Spec], outputs: &[Spec]) -> u64 {
        2 * outputs[0].elements() as u64 * super::width(inputs[0].dims()) as u64
    }

    fn workspace(&self, inputs: &[Spec], _: &[Spec], threads: usize) -> Vec<u64> {
        forward(inputs[0].dims(), inputs[1].dims()).scratch(threads)
    }

    /// The kernel converts bf16 operands when it packs them.
    fn reads_bf16(&self, index: usize) -> bool {
        index < 2
    }

    fn run(&self, args: &mut Args<'_>) {
        let ((out, rounded), scratch) = (args.output_rounded(0), &mut args.workspace());
        let gemm = forward(args.input_dims(0), args.input_dims(1));
        let epilogue = Epilogue { bias: self.has_bias.then(|| args.input(2)), rounded, ..Epilogue::default() };
        with_float!(args.input_dtype(0), T => {
            gemm.run(args.input::<T>(0), args.input::<T>(1), out, Mode::Overwrite, epilogue, scratch)
        })
        .expect("extents by the shape rule");
    }
    fn cuda_fusible(&self) -> Option<gapless_kernels::cuda::Fusible> {
        Some(gapless_kernels::cuda::Fusible::Product)
    }
    fn cuda_workspace(&self, inputs: &[Spec], _: &[Spec]) -> Vec<u64> {
        let (x, weight) = (inputs[0].dims(), inputs[1].dims());
        vec![gapless_kernels::cuda::launch::product_workspace(
            x.iter().product::<usize>() / weight[1].max(1),
            weight[0],
        )]
    }
    fn cuda(&self, operands: &gapless_kernels::cuda::Operands<'_>) -> Option<Vec<gapless_kernels::cuda::Launch>> {
        gapless_kernels::cuda::launch::linear(operands)
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        let (x, weight) = (args.input(0), args.input(1));
        let mut dims = x.dims.clone();
        *dims.last_mut().expect("rank was checked") = weight.dims[0];
        let mut out = Vec::new();
        for row in x.rows() {
            for (o, w) in weight.rows().enumerate() {
                let bias = if self.has_bias { args.input(2).data[o] } else { 0.0 };
                out.push(row.iter().zip(w).map(|(x, w)| x * w).sum::<f64>() + bias);
            }
        }
        vec![Array::new(&dims, out)]
    }
}

/// The product x·Wᵀ of [rows, in] and [out, in].
fn forward(x: &[usize], weight: &[usize]) -> Gemm {
    let &[out, width] = weight else { unreachable!("rank 2 by the shape rule") };
    let rows = x.iter().product::<usize>() / width.max(1);
    Gemm::new(rows, out, width, Strides::row_major(width), Strides::transposed(width))
}

/// The gradient dx = dy·W, from (dy, weight).
#[derive(Debug, Clone, Copy)]
struct LinearGradInput;

impl LinearGradInput {
    fn gemm(dy: &[usize], weight: &[usize]) -> Gemm {
        let &[out, width] = weight else { unreachable!("rank 2 by the shape rule") };
        let rows = dy.iter().product::<usize>() / out.max(1);
        Gemm::new(rows, width, out, Strides::row_major(out), Strides::row_major(width))
    }
}

impl Op for LinearGradInput {
    fn name(&self) -> &'static str {
        "linear_grad_input"
    }

    fn rule(&self, _: &[Spec], _: &[Spec]) -> Option<Rule> {
        Some(Rule::labels("* o, o i -> * i"))
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        let mut dims = inputs[0].dims().to_vec();
        *dims.last_mut().expect("rank by the forward's rule") = inputs[1].dims()[1];
        Ok(vec![inputs[0].in_shape(dims)])
    }

    fn flops(&self, inputs: &[Spec], outputs: &[Spec]) -> u64 {
        2 * outputs[0].elements() as u64 * super::width(inputs[0].dims()) as u64
    }

    fn workspace(&self, inputs: &[Spec], _: &[Spec], threads: usize) -> Vec<u64> {
        Self::gemm(inputs[0].dims(), inputs[1].dims()).scratch(threads)
    }

    /// The kernel converts bf16 operands when it packs them.
    fn reads_bf16(&self, index: usize) -> bool {
        index < 2
    }

    fn run(&self, args: &mut Args<'_>) {
        let ((out, rounded), scratch) = (args.output_rounded(0), &mut args.workspace());
        let gemm = Self::gemm(args.input_dims(0), args.input_dims(1));
        let epilogue = Epilogue { rounded, ..Epilogue::default() };
        with_float!(args.input_dtype(0), T => {
            let (dy, weight) = (args.input::<T>(0), args.input::<T>(1));
            gemm.run(dy, weight, out, Mode::Overwrite, epilogue, scratch)
        })
        .expect("extents by the shape rule");
    }
    fn cuda_fusible(&self) -> Option<gapless_kernels::cuda::Fusible> {
        Some(gapless_kernels::cuda::Fusible::Product)
    }
    fn cuda_workspace(&self, inputs: &[Spec], _: &[Spec]) -> Vec<u64> {
        let (dy, weight) = (inputs[0].dims(), inputs[1].dims());
        vec![gapless_kernels::cuda::launch::product_workspace(
            dy.iter().product::<usize>() / weight[0].max(1),
            weight[1],
        )]
    }
    fn cuda(&self, operands: &gapless_kernels::cuda::Operands<'_>) -> Option<Vec<gapless_kernels::cuda::Launch>> {
        gapless_kernels::cuda::launch::linear_grad_input(operands)
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        let (dy, weight) = (args.input(0), args.input(1));
        let mut dims = dy.dims.clone();
        *dims.last_mut().expect("rank by the forward's rule") = weight.dims[1];
        let mut out = Vec::new();
        for row in dy.rows() {
            for i in 0..weight.dims[1] {
                out.push(row.iter().zip(weight.rows()).map(|(dy, w)| dy * w[i]).sum::<f64>());
            }
        }
        vec![Array::new(&dims, out)]
    }
}

/// The gradients d_weight = dyᵀ·x and d_bias = Σ dy over the rows, from (x, dy). The sum of each sequence is computed
/// separately, and these sums are added in order. So accumulating over micro-batches gives the same bits as one call
/// for the whole batch.
#[derive(Debug, Clone, Copy)]
struct LinearGradWeight {
    has_bias: bool,
    types: OutputTypes<2>,
}

impl LinearGradWeight {
    fn gemm(x: &[usize], dy: &[usize]) -> Gemm {
        let (width, out) = (super::width(x), super::width(dy));
        let rows = x.iter().product::<usize>() / width;
        let sequence = if x.len() > 2 { x[x.len() - 2] } else { rows };
        Gemm::new(out, width, rows, Strides::transposed(out), Strides::row_major(width)).with_segment(sequence.max(1))
    }

    /// Runs the kernel for operands stored in the type `T`.
    fn run_on<T: Factor>(&self, args: &mut Args<'_>) {
        let (d_weight, scratch) = (args.output::<f32>(0), &mut args.workspace());
        let (x, dy) = (args.input::<T>(0), args.input::<T>(1));
        let gemm = Self::gemm(args.input_dims(0), args.input_dims(1));
        let mode = if args.accumulate(0) { Mode::Accumulate } else { Mode::Overwrite };
        gemm.run(dy, x, d_weight, mode, Epilogue::default(), scratch).expect("extents by the shape rule");
        if !self.has_bias {
            return;
        }
        let d_bias = args.output::<f32>(1);
        if !args.accumulate(1) {
            d_bias.fill(0.0);
        }
        let width = d_bias.len();
        let per_task = columns_per_task(width);
        d_bias.pieces_mut(per_task).enumerate().for_each(|(task, d_bias)| {
            let columns = task * per_task..task * per_task + d_bias.len();
            vectorize!({
                for row in dy.chunks_exact(width) {
                    d_bias.iter_mut().zip(&row[columns.clone()]).for_each(|(sum, dy)| *sum += dy.load());
                }
            });
        });
    }
}

impl Op for LinearGradWeight {
    fn name(&self) -> &'static str {
        "linear_grad_weight"
    }

    fn rule(&self, _: &[Spec], _: &[Spec]) -> Option<Rule> {
        Some(Rule::labels(if self.has_bias { "* i, * o -> o i, o[1]" } else { "* i, * o -> o i" }))
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        let (width, out) = (super::width(inputs[0].dims()), super::width(inputs[1].dims()));
        let weight = inputs[0].in_shape((out, width));
        let bias = self.has_bias.then(|| inputs[0].in_shape(out));
        Ok(self.types.apply_to([weight].into_iter().chain(bias)))
    }

    fn flops(&self, inputs: &[Spec], _: &[Spec]) -> u64 {
        2 * inputs[0].elements() as u64 * super::width(inputs[1].dims()) as u64
    }

    fn accumulates(&self, _: usize) -> bool {
        true
    }

    fn with_output_dtype(&self, index: usize, dtype: DType) -> Option<Arc<dyn Op>> {
        Some(Arc::new(Self { types: self.types.with(index, dtype), ..*self }))
    }

    fn workspace(&self, inputs: &[Spec], _: &[Spec], threads: usize) -> Vec<u64> {
        Self::gemm(inputs[0].dims(), inputs[1].dims()).scratch(threads)
    }

    /// The kernel converts bf16 operands when it packs them.
    fn reads_bf16(&self, index: usize) -> bool {
        index < 2
    }

    fn run(&self, args: &mut Args<'_>) {
        with_float!(args.input_dtype(0), T => self.run_on::<T>(args));
    }
    fn cuda_workspace(&self, inputs: &[Spec], _: &[Spec]) -> Vec<u64> {
        let (width, out) = (super::width(inputs[0].dims()), super::width(inputs[1].dims()));
        let bias = self.has_bias.then(|| gapless_kernels::cuda::launch::leading_sums_workspace(&inputs[1]));
        [vec![gapless_kernels::cuda::launch::product_workspace(out, width)], bias.unwrap_or_default()].concat()
    }
    /// The kernel that computes the gradient of the bias reads dy a second time.
    fn cuda_bytes_again(&self, inputs: &[Spec], _: &[Spec]) -> u64 {
        if self.has_bias { inputs[1].bytes() } else { 0 }
    }
    fn cuda(&self, operands: &gapless_kernels::cuda::Operands<'_>) -> Option<Vec<gapless_kernels::cuda::Launch>> {
        gapless_kernels::cuda::launch::linear_grad_weight(operands)
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        let (x, dy) = (args.input(0), args.input(1));
        let (width, out) = (super::width(&x.dims), super::width(&dy.dims));
        let (mut d_weight, mut d_bias) = (Array::zeros(&[out, width]), Array::zeros(&[out]));
        for (x, dy) in x.rows().zip(dy.rows()) {
            for (o, dy) in dy.iter().enumerate() {
                d_bias.data[o] += dy;
                for (i, x) in x.iter().enumerate() {
                    d_weight.data[o * width + i] += dy * x;
                }
            }
        }
        if self.has_bias { vec![d_weight, d_bias] } else { vec![d_weight] }
    }
}

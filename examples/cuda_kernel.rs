//! An operation with a CUDA kernel of your own: the cumulative sum along the last dimension, and its gradient.
//!
//! The kernel is source text. Where there is a GPU, NVRTC compiles it when the trainer is built, and its launches are
//! recorded with those of all other operations. An elementwise operation needs no source of its own (`custom_op.rs`).

use gapless::engine::kernels::cuda::{Family, Kernel, Launch, Operands};
use gapless::engine::{Args, Array, DType, Gradient, Op, Reference, Spec, gradient_check};
use gapless::nn::{Embedding, Linear, Module, VarBuilder, embedding, linear};
use gapless::{Model, Result, StepOptions, Tensor, TrainOptions, Trainer};

/// y[…, i] = x[…, 0] + … + x[…, i]. If `from_end`, the sum runs from the last element to element i.
#[derive(Debug, Clone, Copy)]
struct CumulativeSum {
    from_end: bool,
}

/// `KERNELS` defines a kernel for f32 and one for bf16 from a template. A kernel takes one struct, by value.
const SOURCE: &str = r#"
#include "base.cuh"

struct Arguments {
    const void* x;
    void* y;
    u64 rows;
    u64 width;
    u64 from_end;
};

// A thread sums one row.
template <typename T>
__device__ void cumulative_sum(const Arguments& to) {
    const u64 row = global_thread();
    if (row >= to.rows) return;
    f32 sum = 0.0f;
    for (u64 i = 0; i < to.width; ++i) {
        const u64 at = row * to.width + (to.from_end ? to.width - 1 - i : i);
        sum += load((const T*)to.x + at);
        store((T*)to.y + at, sum);
    }
}
KERNELS(cumulative_sum, Arguments)
"#;

/// The kernel's argument, with the layout of the struct in the source.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct Arguments {
    x: u64,
    y: u64,
    rows: u64,
    width: u64,
    from_end: u64,
}

impl Op for CumulativeSum {
    fn name(&self) -> &'static str {
        "cumulative_sum"
    }

    fn infer(&self, inputs: &[Spec]) -> std::result::Result<Vec<Spec>, String> {
        Ok(vec![inputs[0].clone()])
    }

    fn gradient(&self, g: &mut Gradient) -> Result<()> {
        let [dx] = Tensor::apply_op(Self { from_end: !self.from_end }, &[&g.grad(0)])?;
        g.accumulate(0, dx);
        Ok(())
    }

    fn run(&self, args: &mut Args<'_>) {
        let (x, y) = (args.input::<f32>(0), args.output::<f32>(0));
        let width = args.output_dims(0).last().map_or(1, |&width| width.max(1));
        for (x, y) in x.chunks_exact(width).zip(y.chunks_exact_mut(width)) {
            let mut sum = 0.0;
            for i in 0..width {
                let at = if self.from_end { width - 1 - i } else { i };
                sum += x[at];
                y[at] = sum;
            }
        }
    }

    /// The launches, with the planned addresses of the operands.
    fn cuda(&self, operands: &Operands<'_>) -> Option<Vec<Launch>> {
        let ([x], [y]) = (operands.inputs, operands.outputs) else { return None };
        let name = match x.dtype {
            DType::F32 => "cumulative_sum_f32",
            DType::BF16 => "cumulative_sum_bf16",
            _ => return None,
        };
        let (width, from_end) = (x.width(), u64::from(self.from_end));
        let rows = x.count() / width.max(1);
        let arguments = Arguments { x: x.address, y: y.address, rows, width, from_end };
        let family = Family::of_text("cumulative_sum.cu", SOURCE);
        Some(vec![Launch::Kernel(Kernel::flat(family, name.into(), rows, arguments))])
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        let mut y = args.input(0).clone();
        let width = y.dims.last().map_or(1, |&width| width.max(1));
        for row in y.data.chunks_exact_mut(width) {
            for i in 1..width {
                let (at, before) = if self.from_end { (width - 1 - i, width - i) } else { (i, i - 1) };
                row[at] += row[before];
            }
        }
        vec![y]
    }
}

fn cumulative_sum(x: &Tensor) -> Result<Tensor> {
    Tensor::apply_op::<1>(CumulativeSum { from_end: false }, &[x]).map(|[y]| y)
}

/// A model that uses the operation: it predicts the next byte from the current one.
struct Next {
    embed: Embedding,
    head: Linear,
}

impl Next {
    fn new(vb: VarBuilder) -> Result<Self> {
        Ok(Self { embed: embedding(256, 64, vb.pp("embed"))?, head: linear(64, 256, vb.pp("head"))? })
    }
}

impl Model for Next {
    fn forward(&self, tokens: &Tensor, _train: bool) -> Result<Tensor> {
        self.head.forward(&cumulative_sum(&self.embed.forward(tokens)?)?)
    }
}

fn main() -> anyhow::Result<()> {
    let error = gradient_check(&[&[4, 5]], &[], |x, _| cumulative_sum(&x[0]))?;
    println!("gradient against finite differences: {:.1e}", error.finite_difference);
    println!("CPU kernel against the f64 reference: {:.1e}", error.kernel);
    anyhow::ensure!(error.finite_difference < 1e-6 && error.kernel < 1e-5, "the operation is wrong: {error:?}");

    let mut options = TrainOptions {
        step: StepOptions { batch: 4, sequence: 32, ..StepOptions::default() },
        ..TrainOptions::default()
    };
    options.learning_rate.peak = 1e-2;
    let mut trainer = Trainer::new(Next::new, options)?;
    println!("{}", trainer.device());
    let text = include_bytes!("cuda_kernel.rs");
    let ids = |start: usize| -> Vec<u32> { text[start..start + 128].iter().map(|&b| b.into()).collect() };
    let first = trainer.step(&ids(0), &ids(1))?.loss;
    for _ in 0..50 {
        trainer.step(&ids(0), &ids(1))?;
    }
    let last = trainer.step(&ids(0), &ids(1))?.loss;
    println!("loss {first:.3} to {last:.3}");
    anyhow::ensure!(last < first, "the model does not learn");
    Ok(())
}

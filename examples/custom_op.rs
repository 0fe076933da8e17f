//! An operation of your own, with its gradient: squared ReLU (Primer, So et al., arXiv 2109.08668).
//!
//! An operation defines its shape rule, its gradient as further operations of the graph, its CPU kernel, and a simple
//! f64 reference. `gradient_check` compares the gradient with finite differences, and the kernel with the reference.

use gapless::engine::kernels::cuda::Fusible;
use gapless::engine::{Args, Array, Gradient, Op, Reference, Spec, gradient_check};
use gapless::nn::{Embedding, Linear, Module, VarBuilder, embedding, linear};
use gapless::{Model, Result, StepOptions, Tensor, TrainOptions, Trainer};

/// y = max(x, 0)².
#[derive(Debug)]
struct SquaredRelu;

impl Op for SquaredRelu {
    fn name(&self) -> &'static str {
        "squared_relu"
    }

    fn infer(&self, inputs: &[Spec]) -> std::result::Result<Vec<Spec>, String> {
        Ok(vec![inputs[0].clone()])
    }

    fn gradient(&self, g: &mut Gradient) -> Result<()> {
        // dy/dx = 2·max(x, 0), composed of existing operations.
        let dx = g.input(0).relu()?.affine(2.0, 0.0)?.mul(&g.grad(0))?;
        g.accumulate(0, dx);
        Ok(())
    }

    /// Allows the planner to place the output at the address of the input, if no later operation reads the input.
    fn inplace(&self) -> &[(usize, usize)] {
        &[(0, 0)]
    }

    fn run(&self, args: &mut Args<'_>) {
        let y = args.output::<f32>(0);
        if !args.is_overwritten(0) {
            y.copy_from_slice(args.input(0));
        }
        y.iter_mut().for_each(|y| *y = y.max(0.0) * y.max(0.0));
    }

    /// The formula in C, from which a GPU kernel is generated that fuses this operation with its neighbors.
    fn cuda_fusible(&self) -> Option<Fusible> {
        Some(Fusible::each("fmaxf($0, 0.0f) * fmaxf($0, 0.0f)"))
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        vec![args.input(0).map(|x| x.max(0.0).powi(2))]
    }
}

fn squared_relu(x: &Tensor) -> Result<Tensor> {
    Tensor::apply_op::<1>(SquaredRelu, &[x]).map(|[y]| y)
}

/// A model that uses the operation: it predicts the next byte from the current one.
struct Next {
    embed: Embedding,
    hidden: Linear,
    head: Linear,
}

impl Next {
    fn new(vb: VarBuilder) -> Result<Self> {
        Ok(Self {
            embed: embedding(256, 64, vb.pp("embed"))?,
            hidden: linear(64, 128, vb.pp("hidden"))?,
            head: linear(128, 256, vb.pp("head"))?,
        })
    }
}

impl Model for Next {
    fn forward(&self, tokens: &Tensor, _train: bool) -> Result<Tensor> {
        let x = self.embed.forward(tokens)?;
        self.head.forward(&squared_relu(&self.hidden.forward(&x)?)?)
    }
}

fn main() -> anyhow::Result<()> {
    let error = gradient_check(&[&[4, 5]], &[], |x, _| squared_relu(&x[0]))?;
    println!("gradient against finite differences: {:.1e}", error.finite_difference);
    println!("kernel against the f64 reference:    {:.1e}", error.kernel);
    anyhow::ensure!(error.finite_difference < 1e-6 && error.kernel < 1e-5, "the operation is wrong: {error:?}");

    let mut options = TrainOptions {
        step: StepOptions { batch: 4, sequence: 32, ..StepOptions::default() },
        ..TrainOptions::default()
    };
    options.learning_rate.peak = 1e-2;
    let mut trainer = Trainer::new(Next::new, options)?;
    println!("{}", trainer.device());
    let text = include_bytes!("custom_op.rs");
    let ids = |start: usize| -> Vec<u32> { text[start..start + 128].iter().map(|&b| b.into()).collect() };
    let first = trainer.step(&ids(0), &ids(1))?.loss;
    for _ in 0..50 {
        trainer.step(&ids(0), &ids(1))?;
    }
    let last = trainer.step(&ids(0), &ids(1))?.loss;
    println!("loss {first:.3} to {last:.3} in a model with this operation; gap {:.3}", trainer.report().gap);
    anyhow::ensure!(last < first, "the model does not learn");
    Ok(())
}

//! Operations of users, as described in CONTRIBUTING.md: an elementwise one, whose kernel is generated, and one with a
//! CUDA source of its own.

use gapless_kernels::cpu::map;
use gapless_kernels::cuda::{Family, Fusible, Kernel, Launch, Operands};

use super::judge::check;
use super::processor::Processor;
use super::small::{BATCH, SEQUENCE, Small, Style};
use super::step::{compare_steps, executable};
use crate::compile::Target;
use crate::nn::{Module, VarBuilder};
use crate::reference::{Array, Reference};
use crate::runtime::Session;
use crate::{Args, DType, Gradient, Model, Op, Result, Spec, StepOptions, Tensor, TrainOptions, gradient_check};

/// y = log(1 + exp(x)).
#[derive(Debug)]
struct Softplus;

impl Op for Softplus {
    fn name(&self) -> &'static str {
        "softplus"
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        Ok(vec![inputs[0].clone()])
    }

    fn gradient(&self, g: &mut Gradient) -> Result<(), gapless_graph::Error> {
        let dx = g.input(0).sigmoid()?.mul(&g.grad(0))?;
        g.accumulate(0, dx);
        Ok(())
    }

    fn run(&self, args: &mut Args<'_>) {
        map(args, |x| x.max(0.0) + (-x.abs()).exp().ln_1p());
    }

    fn cuda_fusible(&self) -> Option<Fusible> {
        Some(Fusible::each("fmaxf($0, 0.0f) + log1pf(expf(-fabsf($0)))"))
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        vec![args.input(0).map(|x| x.max(0.0) + (-x.abs()).exp().ln_1p())]
    }
}

#[test]
fn a_new_operation_is_one_implementation() {
    let softplus = |x: &Tensor| Tensor::apply_op::<1>(Softplus, &[x]).map(|[y]| y);
    let error = gradient_check(&[&[3, 7]], &[], |x, _| softplus(&x[0])).unwrap();
    assert!(error.finite_difference <= 1e-6 && error.kernel <= 1e-5, "{error:?}");
    check(&["softplus"], &[&[3, 5, 17]], &[], |x, _| softplus(&x[0]));
}

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

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        Ok(vec![inputs[0].clone()])
    }

    fn gradient(&self, g: &mut Gradient) -> Result<(), gapless_graph::Error> {
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

/// A model whose last layer reads the results of an operation.
struct Changed(Small, fn(&Tensor) -> Result<Tensor>);

impl Changed {
    fn hidden(&self, tokens: &Tensor, train: bool) -> Result<Tensor> {
        self.1(&self.0.hidden(tokens, train)?)
    }
}

impl Model for Changed {
    fn forward(&self, tokens: &Tensor, train: bool) -> Result<Tensor> {
        self.0.head.forward(&self.hidden(tokens, train)?)
    }

    fn loss(&self, tokens: &Tensor, targets: &Tensor, train: bool) -> Result<Tensor> {
        self.0.head.cross_entropy(&self.hidden(tokens, train)?, targets)?.mean_all()
    }
}

/// A source of one's own is compiled, compared with the reference, and recorded in a step.
#[test]
fn an_operation_brings_its_source() {
    if !super::host::is_there() {
        return;
    }
    let sums = |x: &Tensor| Tensor::apply_op::<1>(CumulativeSum { from_end: false }, &[x]).map(|[y]| y);
    check(&["cumulative_sum"], &[&[3, 5, 7]], &[], |x, _| sums(&x[0]));
    compare_steps("sums", |vb| Small::new(Style::Llama, vb).map(|small| Changed(small, sums)));
}

/// The identity, without kernels for GPUs.
#[derive(Debug, Clone, Copy)]
struct OnCpus(&'static str);

impl Op for OnCpus {
    fn name(&self) -> &'static str {
        self.0
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        Ok(vec![inputs[0].clone()])
    }

    fn gradient(&self, g: &mut Gradient) -> Result<(), gapless_graph::Error> {
        let dx = g.grad(0);
        g.accumulate(0, dx);
        Ok(())
    }

    fn run(&self, args: &mut Args<'_>) {
        map(args, |x| x);
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        vec![args.input(0).clone()]
    }
}

/// Operations without kernels are an error that names all of them, with their layers and the remedy, before anything
/// runs.
#[test]
fn operations_without_gpu_kernels_are_named() {
    fn twice(x: &Tensor) -> Result<Tensor> {
        let [x] = Tensor::apply_op(OnCpus("first"), &[x])?;
        let _layer = x.enter("layer");
        Tensor::apply_op::<1>(OnCpus("second"), &[&x]).map(|[y]| y)
    }
    let options = StepOptions { batch: BATCH, sequence: SEQUENCE, ..StepOptions::default() };
    let options = TrainOptions { step: options, ..TrainOptions::default() };
    let model = |vb: VarBuilder| Small::new(Style::Gpt, vb).map(|small| Changed(small, twice));
    let planned = executable(&options, Target::Cuda, model);
    let error = Session::on_cuda(planned, Box::<Processor>::default(), 0, (0, 1)).unwrap_err().to_string();
    let expected = "2 operations cannot run on a GPU: first in the model, for inputs of [F32]; second in layer, for inputs of [F32]; \
                    choose another element type, ";
    assert!(error.starts_with(expected), "{error}");
}

//! The linear layer x·Wᵀ + b with a frozen, quantized weight.
//!
//! On the CPU, W is dequantized one tile after another: [`TILE`] columns of the result at a time. So the whole dequantized
//! weight is never in memory at once. Each tile is multiplied over all of k, so the result has the bits of a
//! [`Linear`](super::Linear) layer with the dequantized weight. On a GPU, W is dequantized into scratch of one call.

use std::ops::Range;
use std::sync::Arc;

use candle_core::DType;
use gapless_kernels::cpu::gemm::{Epilogue, Factor, Gemm, Mode, Strides};
use gapless_kernels::cpu::quantized::{BLOCK, Format, Matrix, NESTED_BLOCK, NF4, Rounding, Scales, dynamic_map};
use gapless_kernels::cpu::{Args, scratch, with_float};
use gapless_kernels::cuda::launch::{QuantizedMatrix, product_workspace};
use gapless_kernels::cuda::{Fusible, Launch, Operands};
use gapless_kernels::{Spec, Spread, Window};

use crate::error::{Error, Result};
use crate::reference::{Array, Reference};
use crate::rule::Rule;
use crate::tensor::Tensor;
use crate::{Gradient, Op};

/// Number of columns of a product for which the weight is dequantized at once.
const TILE: usize = 256;

/// A quantized weight [out, in]: its shape, and the meaning of the tensors in which it is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QuantizedWeight {
    /// Number of rows.
    pub outputs: usize,
    /// Number of columns.
    pub inputs: usize,
    /// The format of the codes.
    pub format: Format,
    /// The rounding of dequantized elements.
    pub rounding: Rounding,
    /// The place of this weight's blocks among those of a whole one, if it is a part whose scales are quantized.
    pub blocks: Option<Spread>,
}

impl QuantizedWeight {
    /// Returns the shapes and types of the tensors in which the weight is stored, in the order in which operations take
    /// them: codes; scales or, with double quantization, codes of scales, their scales and an offset.
    pub fn stored(&self) -> Vec<Spec> {
        let elements = self.outputs * self.inputs;
        let codes = |count: usize| Spec { shape: count.into(), dtype: DType::U8 };
        let blocks = elements.div_ceil(BLOCK);
        let scales = match self.format {
            Format::Int8 => vec![Spec::f32(self.outputs)],
            Format::Nf4 { is_double: false } => vec![Spec::f32(blocks)],
            Format::Nf4 { is_double: true } => {
                let nested = self.places(blocks).elements.div_ceil(NESTED_BLOCK);
                vec![codes(blocks), Spec::f32(nested), Spec::f32(1)]
            }
        };
        [vec![codes(self.format.code_bytes(elements))], scales].concat()
    }

    /// Returns the labels of the columns and, for a rule, those of [`Self::stored`], in which rows are `o`. Columns are divided
    /// by blocks. Returns `None` if parts of the weight are not stored as a weight is, because blocks span rows.
    pub(super) fn labels(&self) -> Option<(&'static str, &'static str)> {
        match self.format {
            Format::Int8 => Some(("i", "(o i), o")),
            Format::Nf4 { .. } if !self.inputs.is_multiple_of(BLOCK) => None,
            Format::Nf4 { is_double: false } => Some(("(b L)", "(o b C), (o b)")),
            Format::Nf4 { is_double: true } => Some(("(b L)", "(o b C), (o b), N, _")),
        }
    }

    /// Returns the places of all blocks among those of the whole weight.
    fn places(&self, blocks: usize) -> Spread {
        self.blocks.unwrap_or(Spread::whole(blocks))
    }

    /// True if the places of a part's blocks have the form in which kernels find them. `inputs` has the windows of the
    /// tensors of [`Self::stored`] from `first` on.
    pub(super) fn runs_on(&self, inputs: &[Window], first: usize) -> bool {
        self.format != Format::Nf4 { is_double: true } || inputs[first + 1].spread().is_some()
    }

    /// Returns the part of the weight with the rows of a tensor [.., out] and the columns of one [.., in]. `stored` are the
    /// parts of the tensors of [`Self::stored`].
    pub(super) fn on_parts(&self, outputs: &Window, inputs: &Window, stored: &[Window]) -> Self {
        let blocks = stored[1].spread().filter(|_| self.format == Format::Nf4 { is_double: true });
        let last = |window: &Window| window.dims().last().copied().expect("rank was checked");
        Self { outputs: last(outputs), inputs: last(inputs), blocks, ..*self }
    }

    /// Returns the weight in the inputs of an operation from `first` on.
    pub(super) fn of<'a>(&self, args: &Args<'a>, first: usize) -> Matrix<'a> {
        let scales = match self.format {
            Format::Nf4 { is_double: true } => {
                let [codes, nested, offset] = [1, 2, 3].map(|at| first + at);
                let (codes, offset) = (args.input::<u8>(codes), args.input::<f32>(offset)[0]);
                Scales::Double { codes, nested: args.input(nested), offset, blocks: self.places(codes.len()) }
            }
            Format::Int8 | Format::Nf4 { is_double: false } => Scales::Plain(args.input(first + 1)),
        };
        Matrix { format: self.format, columns: self.inputs, codes: args.input(first), scales, rounding: self.rounding }
    }

    /// The weight in the form that the CUDA kernels take.
    pub(super) fn on_device(&self) -> QuantizedMatrix {
        let Self { outputs: rows, inputs: columns, format, rounding, .. } = *self;
        QuantizedMatrix { format, rounding, rows, columns, blocks: self.places((rows * columns).div_ceil(BLOCK)) }
    }

    /// Returns the sizes of the scratch of a product on a GPU, from x or dy to `result`.
    fn cuda_workspace(&self, x: &Spec, result: &Spec) -> Vec<u64> {
        let columns = super::width(result.dims());
        let product = product_workspace(result.elements() / columns.max(1), columns);
        vec![self.on_device().dequantized_bytes(x.dtype), product]
    }

    /// Returns the whole dequantized weight, by the formulas of the format.
    pub(super) fn reference(&self, args: &Reference<'_>, first: usize) -> Array {
        let input = |at: usize| &args.input(first + at).data;
        let codes = input(0);
        let scale = |at: usize| match self.format {
            Format::Int8 => input(1)[at / self.inputs] / 127.0,
            Format::Nf4 { is_double: false } => input(1)[at / BLOCK],
            Format::Nf4 { is_double: true } => {
                let block = at / BLOCK;
                let value = dynamic_map()[input(1)[block] as usize];
                let whole = self.places(input(1).len()).index(block);
                f64::from(value) * input(2)[whole / NESTED_BLOCK] + input(3)[0]
            }
        };
        let value = |at: usize| match self.format {
            Format::Int8 => f64::from(codes[at] as u8 as i8),
            Format::Nf4 { .. } => {
                let byte = codes[at / 2] as u8;
                f64::from(NF4[usize::from(if at.is_multiple_of(2) { byte >> 4 } else { byte & 15 })])
            }
        };
        let element = |at: usize| match self.rounding {
            Rounding::None => value(at) * scale(at),
            rounding => f64::from(rounding.round((value(at) * scale(at)) as f32)),
        };
        let elements = (0..self.outputs * self.inputs).map(element);
        Array::new(&[self.outputs, self.inputs], elements.collect())
    }

    pub(super) fn check(&self, inputs: &[Spec], first: usize) -> Result<(), String> {
        let stored = self.stored();
        match inputs.get(first..first + stored.len()) == Some(&stored[..]) {
            true => Ok(()),
            false => Err(format!("the weight must be stored as {stored:?}")),
        }
    }
}

/// x·Wᵀ + b from x [.., in], the tensors of [`QuantizedWeight::stored`] and an optional bias `[out]` to [.., out].
#[derive(Debug, Clone, Copy)]
pub struct QuantizedLinear {
    /// The weight.
    pub weight: QuantizedWeight,
    /// True if the bias is given as the last input.
    pub has_bias: bool,
}

impl Op for QuantizedLinear {
    fn name(&self) -> &'static str {
        "quantized_linear"
    }

    fn rule(&self, _: &[Spec], _: &[Spec]) -> Option<Rule> {
        let (columns, stored) = self.weight.labels()?;
        let bias = if self.has_bias { ", o" } else { "" };
        Some(Rule::Labels(format!("* {columns}, {stored}{bias} -> * o").into()))
    }

    fn runs_on(&self, inputs: &[Window]) -> bool {
        self.weight.runs_on(inputs, 1)
    }

    fn on_parts(&self, inputs: &[Window], outputs: &[Window]) -> Option<Arc<dyn Op>> {
        let weight = self.weight.on_parts(&outputs[0], &inputs[0], &inputs[1..]);
        Some(Arc::new(Self { weight, ..*self }))
    }

    fn without_bias(&self) -> Option<(usize, Arc<dyn Op>)> {
        let bias = 1 + self.weight.stored().len();
        self.has_bias.then(|| (bias, Arc::new(Self { has_bias: false, ..*self }) as Arc<dyn Op>))
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        super::expect_float(&inputs[..1])?;
        super::expect_rank(&inputs[0], 1)?;
        self.weight.check(inputs, 1)?;
        let (&last, rows) = inputs[0].dims().split_last().expect("rank was checked");
        let QuantizedWeight { outputs, inputs: width, .. } = self.weight;
        if last != width {
            return Err(format!("the input's last dimension is {last}, the weight takes {width}"));
        }
        if self.has_bias && inputs.last() != Some(&inputs[0].in_shape(outputs)) {
            return Err(format!("the bias must be [{outputs}], of the input's type"));
        }
        Ok(vec![inputs[0].in_shape([rows, &[outputs]].concat())])
    }

    fn gradient(&self, g: &mut Gradient) -> Result<()> {
        if let Some(input) = (1..g.inputs()).find(|&input| g.wants(input)) {
            return Err(Error::NoGradient { op: self.name().into(), input });
        }
        if g.wants(0) {
            let stored: Vec<Tensor> = (1..=self.weight.stored().len()).map(|input| g.input(input)).collect();
            let dy = g.grad(0);
            let inputs: Vec<&Tensor> = [&dy].into_iter().chain(&stored).collect();
            let [dx] = Tensor::apply_op(QuantizedLinearGradInput(self.weight), &inputs)?;
            g.accumulate(0, dx);
        }
        Ok(())
    }

    fn flops(&self, _: &[Spec], outputs: &[Spec]) -> u64 {
        2 * outputs[0].elements() as u64 * self.weight.inputs as u64
    }

    fn workspace(&self, inputs: &[Spec], _: &[Spec], threads: usize) -> Vec<u64> {
        Product::Forward.workspace(&self.weight, &inputs[0], threads)
    }

    /// The kernel converts bf16 operands when it packs them.
    fn reads_bf16(&self, index: usize) -> bool {
        index == 0
    }

    /// With a bf16 input, the dequantized weights are rounded to bf16.
    fn rounds_intermediates(&self) -> bool {
        true
    }

    fn run(&self, args: &mut Args<'_>) {
        let bias = self.has_bias.then(|| args.input::<f32>(args.inputs() - 1));
        with_float!(args.input_dtype(0), T => Product::Forward.run::<T>(&self.weight, args, bias));
    }
    fn cuda_fusible(&self) -> Option<Fusible> {
        Some(Fusible::Product)
    }
    fn cuda_workspace(&self, inputs: &[Spec], outputs: &[Spec]) -> Vec<u64> {
        self.weight.cuda_workspace(&inputs[0], &outputs[0])
    }
    /// The dequantized weight is written; the product counts that it is read.
    fn cuda_bytes_again(&self, inputs: &[Spec], _: &[Spec]) -> u64 {
        self.weight.on_device().dequantized_bytes(inputs[0].dtype)
    }
    fn cuda(&self, operands: &Operands<'_>) -> Option<Vec<Launch>> {
        self.weight.on_device().linear(self.weight.stored().len(), operands)
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        let (x, weight) = (args.input(0), self.weight.reference(args, 1));
        let mut dims = x.dims.clone();
        *dims.last_mut().expect("rank was checked") = self.weight.outputs;
        let mut out = Vec::new();
        for row in x.rows() {
            for (o, w) in weight.rows().enumerate() {
                let bias = if self.has_bias { args.input(args.inputs() - 1).data[o] } else { 0.0 };
                out.push(row.iter().zip(w).map(|(x, w)| x * w).sum::<f64>() + bias);
            }
        }
        vec![Array::new(&dims, out)]
    }
}

/// The gradient dx = dy·W, from dy and the tensors of [`QuantizedWeight::stored`].
#[derive(Debug, Clone, Copy)]
struct QuantizedLinearGradInput(QuantizedWeight);

impl Op for QuantizedLinearGradInput {
    fn name(&self) -> &'static str {
        "quantized_linear_grad_input"
    }

    fn rule(&self, _: &[Spec], _: &[Spec]) -> Option<Rule> {
        let (columns, stored) = self.0.labels()?;
        Some(Rule::Labels(format!("* o, {stored} -> * {columns}").into()))
    }

    fn runs_on(&self, inputs: &[Window]) -> bool {
        self.0.runs_on(inputs, 1)
    }

    fn on_parts(&self, inputs: &[Window], outputs: &[Window]) -> Option<Arc<dyn Op>> {
        Some(Arc::new(Self(self.0.on_parts(&inputs[0], &outputs[0], &inputs[1..]))))
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        self.0.check(inputs, 1)?;
        let mut dims = inputs[0].dims().to_vec();
        *dims.last_mut().expect("rank by the forward's rule") = self.0.inputs;
        Ok(vec![inputs[0].in_shape(dims)])
    }

    fn flops(&self, _: &[Spec], outputs: &[Spec]) -> u64 {
        2 * outputs[0].elements() as u64 * self.0.outputs as u64
    }

    fn workspace(&self, inputs: &[Spec], _: &[Spec], threads: usize) -> Vec<u64> {
        Product::Backward.workspace(&self.0, &inputs[0], threads)
    }

    /// The kernel converts bf16 operands when it packs them.
    fn reads_bf16(&self, index: usize) -> bool {
        index == 0
    }

    /// With a bf16 input, the dequantized weights are rounded to bf16.
    fn rounds_intermediates(&self) -> bool {
        true
    }

    fn run(&self, args: &mut Args<'_>) {
        with_float!(args.input_dtype(0), T => Product::Backward.run::<T>(&self.0, args, None));
    }
    fn cuda_fusible(&self) -> Option<Fusible> {
        Some(Fusible::Product)
    }
    fn cuda_workspace(&self, inputs: &[Spec], outputs: &[Spec]) -> Vec<u64> {
        self.0.cuda_workspace(&inputs[0], &outputs[0])
    }
    /// The dequantized weight is written; the product counts that it is read.
    fn cuda_bytes_again(&self, inputs: &[Spec], _: &[Spec]) -> u64 {
        self.0.on_device().dequantized_bytes(inputs[0].dtype)
    }
    fn cuda(&self, operands: &Operands<'_>) -> Option<Vec<Launch>> {
        self.0.on_device().linear_grad_input(self.0.stored().len(), operands)
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        let (dy, weight) = (args.input(0), self.0.reference(args, 1));
        let mut dims = dy.dims.clone();
        *dims.last_mut().expect("rank by the forward's rule") = self.0.inputs;
        let mut out = Vec::new();
        for row in dy.rows() {
            for i in 0..self.0.inputs {
                out.push(row.iter().zip(weight.rows()).map(|(dy, w)| dy * w[i]).sum::<f64>());
            }
        }
        vec![Array::new(&dims, out)]
    }
}

/// The two products with a weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Product {
    /// x·Wᵀ
    Forward,
    /// dy·W
    Backward,
}

impl Product {
    /// Returns the columns of the result and the inner length of the product.
    fn extents(self, weight: &QuantizedWeight) -> (usize, usize) {
        match self {
            Self::Forward => (weight.outputs, weight.inputs),
            Self::Backward => (weight.inputs, weight.outputs),
        }
    }

    /// Returns the product for some columns of the result.
    fn gemm(self, weight: &QuantizedWeight, rows: usize, columns: usize) -> Gemm {
        let (all, k) = self.extents(weight);
        let b = match self {
            Self::Forward => Strides::transposed(k),
            Self::Backward => Strides::row_major(columns),
        };
        Gemm { c_row: all, ..Gemm::new(rows, columns, k, Strides::row_major(k), b) }
    }

    /// Returns the ranges of columns of the result.
    fn tiles(self, weight: &QuantizedWeight) -> impl Iterator<Item = Range<usize>> {
        let (all, _) = self.extents(weight);
        (0..all).step_by(TILE).map(move |first| first..all.min(first + TILE))
    }

    fn workspace(self, weight: &QuantizedWeight, x: &Spec, threads: usize) -> Vec<u64> {
        let (columns, k) = self.extents(weight);
        let tile = (k * columns.min(TILE) * x.dtype.size_in_bytes()) as u64;
        let rows = x.elements() / k.max(1);
        let products = self.tiles(weight).map(|tile| self.gemm(weight, rows, tile.len()).scratch(threads));
        [vec![tile], scratch::for_each_of(products)].concat()
    }

    fn run<T: Factor>(self, weight: &QuantizedWeight, args: &mut Args<'_>, bias: Option<&[f32]>) {
        let ((out, mut rounded), mut scratch) = (args.output_rounded(0), args.workspace());
        let (x, matrix) = (args.input::<T>(0), weight.of(args, 1));
        let (_, k) = self.extents(weight);
        let (rows, tile) = (x.len() / k.max(1), scratch.take::<T>());
        for columns in self.tiles(weight) {
            let tile = &mut tile[..k * columns.len()];
            match self {
                Self::Forward => matrix.dequantize(columns.clone(), 0..k, tile),
                Self::Backward => matrix.dequantize(0..k, columns.clone(), tile),
            }
            let epilogue = Epilogue {
                bias: bias.map(|bias| &bias[columns.clone()]),
                rounded: rounded.as_deref_mut().map(|rounded| &mut rounded[columns.start..]),
                ..Epilogue::default()
            };
            let (gemm, out) = (self.gemm(weight, rows, columns.len()), &mut out[columns.start..]);
            gemm.run(x, tile, out, Mode::Overwrite, epilogue, &mut scratch).expect("extents by the shape rule");
        }
    }
}

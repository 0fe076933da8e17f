//! The head of a language model and its loss in one operation, so that its logits never exist whole.
//!
//! Rows are taken in chunks. The logits of a chunk lie in scratch, are turned into losses, and are overwritten by their own
//! gradient, of which the chunk's dx and its share of d_weight are made at once: in training, forward and backward are one
//! pass and no logit is computed twice (Hsu et al., "Liger Kernel", arXiv 2410.10989, section 3.2).

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

use candle_core::{DType, Layout};
use gapless_kernels::Spec;
use gapless_kernels::cpu::gemm::{Epilogue, Factor, Gemm, Mode, Strides};
use gapless_kernels::cpu::scratch::for_each_of;
use gapless_kernels::cpu::{Args, InPieces, Pieces, Scratch, math, reduce, rows_per_task, vectorize, with_float};
use gapless_kernels::cuda::{
    Launch, Product,
    launch::{self, Matrix},
};

use super::OutputTypes;
use crate::error::Result;
use crate::reference::{Array, Reference};
use crate::tensor::Tensor;
use crate::{Gradient, Op};

/// −log softmax(x·Wᵀ)`[target]` for x [.., width], weight [vocabulary, width] and targets [..]: the losses [..].
#[derive(Debug, Clone, Copy)]
pub struct LinearCrossEntropy {
    gradient: Option<f64>,
    /// Whether d_weight is among the outputs.
    has_d_weight: bool,
    types: OutputTypes<3>,
}

impl LinearCrossEntropy {
    /// With the gradient of every loss, where that is known beforehand. Then dx and d_weight are two more outputs.
    pub fn new(gradient: Option<f64>) -> Self {
        Self { gradient, has_d_weight: true, types: OutputTypes::default() }
    }

    /// Without d_weight: for a weight that is frozen.
    #[must_use]
    pub fn without_d_weight(self) -> Self {
        Self { has_d_weight: false, ..self }
    }

    fn products(&self) -> Products {
        match (self.gradient, self.has_d_weight) {
            (None, _) => Products::Logits,
            (Some(_), false) => Products::Dx,
            (Some(_), true) => Products::Both,
        }
    }
}

/// Which products a pass takes of every chunk: that of its logits, and those of the gradients that are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Products {
    Logits,
    Dx,
    Both,
}

impl Products {
    /// Those of a backward.
    fn of_backward(has_d_weight: bool) -> Self {
        if has_d_weight { Self::Both } else { Self::Dx }
    }
}

impl Op for LinearCrossEntropy {
    fn name(&self) -> &'static str {
        "linear_cross_entropy"
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        super::expect_float(&inputs[..2])?;
        super::expect_rank(&inputs[0], 1)?;
        super::expect_ids("targets", &inputs[2])?;
        let (&last, rows) = inputs[0].dims().split_last().expect("rank was checked");
        let &[_, width] = inputs[1].dims() else { return Err("the weight must be [vocabulary, width]".into()) };
        if last != width {
            return Err(format!("the input's last dimension is {last}, the weight takes {width}"));
        }
        if inputs[2].dims() != rows {
            return Err("targets must have the shape of the input without its width".into());
        }
        let losses = Spec::f32(rows.to_vec());
        Ok(match self.gradient {
            None => vec![losses],
            Some(_) => {
                let d_weight = self.has_d_weight.then(|| inputs[1].clone());
                self.types.of([losses, inputs[0].clone()].into_iter().chain(d_weight))
            }
        })
    }

    fn gradient(&self, g: &mut Gradient) -> Result<()> {
        if !g.needs(1) {
            let [dx] = match g.constant(0) {
                Some(number) => g.in_forward(Self::new(Some(number)).without_d_weight())?,
                None => gradient_in_backward(g, false)?,
            };
            g.send(0, dx);
            return Ok(());
        }
        let [dx, d_weight] = match g.constant(0) {
            Some(number) => g.in_forward(Self::new(Some(number)))?,
            None => gradient_in_backward(g, true)?,
        };
        if g.needs(0) {
            g.send(0, dx);
        }
        g.send(1, d_weight);
        Ok(())
    }

    fn flops(&self, inputs: &[Spec], _: &[Spec]) -> u64 {
        Chunks::of(inputs).flops(self.products())
    }

    fn inplace(&self) -> &[(usize, usize)] {
        if self.gradient.is_some() { &[(0, 1)] } else { &[] }
    }

    fn accumulates(&self, index: usize) -> bool {
        index == 2
    }

    fn with_output_dtype(&self, index: usize, dtype: DType) -> Option<Arc<dyn Op>> {
        (index == 2).then(|| Arc::new(Self { types: self.types.with(index, dtype), ..*self }) as Arc<dyn Op>)
    }

    fn workspace(&self, inputs: &[Spec], _: &[Spec], threads: usize) -> Vec<u64> {
        Chunks::of(inputs).scratch(self.products(), threads)
    }

    /// As factors are packed.
    fn reads_bf16(&self, index: usize) -> bool {
        index < 2
    }

    fn run(&self, args: &mut Args<'_>) {
        let chunks = Chunks::new(args.input_dims(0), args.input_dims(1));
        let (losses, scratch) = (args.output(0), args.workspace());
        let backward = self.gradient.map(|number| Backward {
            d_losses: Upstream::Everywhere(number as f32),
            dx: args.output(1),
            d_weight: self.has_d_weight.then(|| args.output(2)),
            accumulate: self.has_d_weight && args.accumulate(2),
        });
        with_float!(args.input_dtype(1), T => chunks.pass(&Inputs::<T>::of(args), losses, backward, scratch));
    }
    fn cuda_workspace(&self, inputs: &[Spec], _: &[Spec]) -> Vec<u64> {
        Chunks::of(inputs).cuda_workspace(inputs[0].dtype, self.products())
    }
    fn cuda(&self, operands: &gapless_kernels::cuda::Operands<'_>) -> Option<Vec<gapless_kernels::cuda::Launch>> {
        let chunks = Chunks::new(operands.inputs[0].layout.dims(), operands.inputs[1].layout.dims());
        let upstream = self.gradient.map(|number| launch::Upstream::Everywhere(number as f32));
        chunks.launches(operands, operands.outputs[0].address, upstream.zip(operands.outputs.get(1..)), 2)
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        let (x, weight, targets) = (args.input(0), args.input(1), args.input(2));
        match self.gradient {
            None => vec![reference_losses(x, weight, targets)],
            Some(number) => {
                let d_losses = targets.map(|_| number);
                let [dx, d_weight] = reference_gradients(x, weight, targets, &d_losses);
                let d_weight = self.has_d_weight.then_some(d_weight);
                [reference_losses(x, weight, targets), dx].into_iter().chain(d_weight).collect()
            }
        }
    }
}

/// (dx, d_weight) from (x, weight, targets, d_losses): computes the logits once more, for losses whose gradient is known only
/// in the backward.
#[derive(Debug, Clone, Copy)]
struct LinearCrossEntropyGrad {
    /// Whether d_weight is among the outputs.
    has_d_weight: bool,
    types: OutputTypes<2>,
}

fn gradient_in_backward<const MADE: usize>(g: &Gradient, has_d_weight: bool) -> Result<[Tensor; MADE]> {
    let inputs = [&g.input(0), &g.input(1), &g.input(2), &g.grad(0)];
    Tensor::apply_op(LinearCrossEntropyGrad { has_d_weight, types: OutputTypes::default() }, &inputs)
}

impl Op for LinearCrossEntropyGrad {
    fn name(&self) -> &'static str {
        "linear_cross_entropy_grad"
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        let d_weight = self.has_d_weight.then(|| inputs[1].clone());
        Ok(self.types.of([inputs[0].clone()].into_iter().chain(d_weight)))
    }

    fn reads_strides(&self, index: usize, _: &Layout) -> bool {
        index == 3
    }

    fn flops(&self, inputs: &[Spec], _: &[Spec]) -> u64 {
        Chunks::of(inputs).flops(Products::of_backward(self.has_d_weight))
    }

    fn inplace(&self) -> &[(usize, usize)] {
        &[(0, 0)]
    }

    fn accumulates(&self, index: usize) -> bool {
        index == 1
    }

    fn with_output_dtype(&self, index: usize, dtype: DType) -> Option<Arc<dyn Op>> {
        (index == 1).then(|| Arc::new(Self { types: self.types.with(index, dtype), ..*self }) as Arc<dyn Op>)
    }

    fn workspace(&self, inputs: &[Spec], _: &[Spec], threads: usize) -> Vec<u64> {
        let chunks = Chunks::of(inputs);
        let products = Products::of_backward(self.has_d_weight);
        [vec![4 * chunks.rows as u64], chunks.scratch(products, threads)].concat()
    }

    /// As factors are packed.
    fn reads_bf16(&self, index: usize) -> bool {
        index < 2
    }

    fn run(&self, args: &mut Args<'_>) {
        let chunks = Chunks::new(args.input_dims(0), args.input_dims(1));
        // The losses are known already; here they are a by-product.
        let mut scratch = args.workspace();
        let losses = scratch.take();
        let (d_losses, layout) = args.strided(3);
        let backward = Backward {
            d_losses: Upstream::Each(d_losses, layout),
            dx: args.output(0),
            d_weight: self.has_d_weight.then(|| args.output(1)),
            accumulate: self.has_d_weight && args.accumulate(1),
        };
        with_float!(args.input_dtype(1), T => chunks.pass(&Inputs::<T>::of(args), losses, Some(backward), scratch));
    }
    fn cuda_workspace(&self, inputs: &[Spec], _: &[Spec]) -> Vec<u64> {
        let chunks = Chunks::of(inputs);
        let products = Products::of_backward(self.has_d_weight);
        [chunks.cuda_workspace(inputs[0].dtype, products), vec![4 * chunks.rows as u64]].concat()
    }
    fn cuda(&self, operands: &gapless_kernels::cuda::Operands<'_>) -> Option<Vec<gapless_kernels::cuda::Launch>> {
        let chunks = Chunks::new(operands.inputs[0].layout.dims(), operands.inputs[1].layout.dims());
        // The losses are known already; here they are a by-product.
        let &[.., losses] = operands.workspace else { return None };
        let upstream = launch::Upstream::Each(&operands.inputs[3], 0);
        chunks.launches(operands, losses, Some((upstream, operands.outputs)), 1)
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        let [dx, d_weight] = reference_gradients(args.input(0), args.input(1), args.input(2), args.input(3));
        [dx].into_iter().chain(self.has_d_weight.then_some(d_weight)).collect()
    }
}

/// Rows of a chunk that are enough for its products to be as fast as those of all rows, and no more of a shorter sequence
/// than fill it up.
const ENOUGH_ROWS: usize = 256;

/// The same on a GPU: what fills it, and adds seldom enough to the weight's gradient that it is the products that take the time.
const ENOUGH_ROWS_ON_GPU: usize = 2048;

/// How rows are cut. A chunk is several whole sequences, or a piece of one that only the lengths of the sequence, the width
/// and the vocabulary decide: so the order of summation does not depend on how the batch is cut into micro-batches.
#[derive(Debug, Clone, Copy)]
struct Chunks {
    rows: usize,
    width: usize,
    vocabulary: usize,
    /// Rows of a sequence: the order of summation restarts with each.
    sequence: usize,
    /// Rows of the whole sequences that are cut together.
    block: usize,
    /// Rows of a chunk, but for the last of a block.
    chunk: usize,
}

impl Chunks {
    fn new(x: &[usize], weight: &[usize]) -> Self {
        let &[vocabulary, width] = weight else { unreachable!("rank 2 by the shape rule") };
        let rows = x.iter().product::<usize>() / width;
        let sequence = if x.len() > 2 { x[x.len() - 2] } else { rows };
        // So many that the logits of a piece are no larger than the sequence's x.
        let pieces = vocabulary.div_ceil(width).min(sequence / ENOUGH_ROWS).max(1);
        let block = if pieces > 1 { sequence } else { sequence * (ENOUGH_ROWS / sequence).max(1) };
        Self { rows, width, vocabulary, sequence, block, chunk: block.div_ceil(pieces) }
    }

    fn of(inputs: &[Spec]) -> Self {
        Self::new(inputs[0].dims(), inputs[1].dims())
    }

    fn ranges(self) -> impl Iterator<Item = Range<usize>> {
        let Self { rows, block, chunk, .. } = self;
        (0..rows).step_by(block).flat_map(move |start| {
            let end = (start + block).min(rows);
            (start..end).step_by(chunk).map(move |start| start..(start + chunk).min(end))
        })
    }

    /// rows × width · (vocabulary × width)ᵀ.
    fn logits(&self, rows: usize) -> Gemm {
        let &Self { width, vocabulary, .. } = self;
        Gemm::new(rows, vocabulary, width, Strides::row_major(width), Strides::transposed(width))
    }

    /// (rows × vocabulary)ᵀ · rows × width.
    fn d_weight(&self, rows: usize) -> Gemm {
        let &Self { width, vocabulary, sequence, .. } = self;
        let product = Gemm::new(vocabulary, width, rows, Strides::transposed(vocabulary), Strides::row_major(width));
        product.with_segment(sequence)
    }

    /// rows × vocabulary · vocabulary × width.
    fn dx(&self, rows: usize) -> Gemm {
        let &Self { width, vocabulary, .. } = self;
        Gemm::new(rows, width, vocabulary, Strides::row_major(vocabulary), Strides::row_major(width))
    }

    /// Bytes of each piece of scratch: a chunk's logits, then what is the largest that a product needs.
    fn scratch(&self, products: Products, threads: usize) -> Vec<u64> {
        let products = |rows: usize| {
            let d_weight = (products == Products::Both).then(|| self.d_weight(rows));
            let dx = (products != Products::Logits).then(|| self.dx(rows));
            std::iter::once(self.logits(rows)).chain(d_weight).chain(dx)
        };
        // Few ranges differ in length, and only that counts.
        let lengths: BTreeSet<usize> = self.ranges().map(|range| range.len()).collect();
        let pieces = for_each_of(lengths.into_iter().flat_map(products).map(|product| product.scratch(threads)));
        let logits = 4 * self.chunk.min(self.rows) * self.vocabulary;
        [vec![logits as u64], pieces].concat()
    }

    /// The chunks' ranges on a GPU, where the order of summation is the library's, but always the same for as many rows.
    fn cuda_ranges(self) -> impl Iterator<Item = Range<usize>> {
        let chunk = self.cuda_chunk();
        (0..self.rows).step_by(chunk.max(1)).map(move |start| start..(start + chunk).min(self.rows))
    }

    /// Rows of a chunk on a GPU, but for the last.
    fn cuda_chunk(&self) -> usize {
        self.rows.div_ceil(self.rows.div_ceil(ENOUGH_ROWS_ON_GPU).max(1))
    }

    /// Elements from a row of logits to the next on a GPU: so many that all rows are aligned, which products of a vocabulary of
    /// an odd size would be the slower for.
    fn cuda_pitch(&self) -> usize {
        self.vocabulary.next_multiple_of(64)
    }

    /// Bytes of each piece of scratch on a GPU: a chunk's logits, then what is the largest that a product is given.
    fn cuda_workspace(&self, dtype: DType, products: Products) -> Vec<u64> {
        let &Self { width, vocabulary, .. } = self;
        let rows = self.cuda_chunk();
        let d_weight = (products == Products::Both).then_some((vocabulary, width));
        let dx = (products != Products::Logits).then_some((rows, width));
        let products =
            d_weight.into_iter().chain(dx).chain([(rows, vocabulary)]).map(|(m, n)| launch::product_workspace(m, n));
        vec![(rows * self.cuda_pitch() * dtype.size_in_bytes()) as u64, products.max().unwrap_or(0)]
    }

    /// The pass on a GPU: for each chunk its logits, what becomes of them, and its share of the gradients, `[dx]` or
    /// `[dx, d_weight]`, of which the latter is output `weight` of the operation.
    fn launches(
        &self,
        operands: &gapless_kernels::cuda::Operands<'_>,
        losses: u64,
        backward: Option<(launch::Upstream<'_>, &[gapless_kernels::cuda::Operand])>,
        weight: usize,
    ) -> Option<Vec<gapless_kernels::cuda::Launch>> {
        let [x, of_weight, targets, ..] = operands.inputs else { return None };
        let (&[logits, scratch, ..], dtype) = (operands.workspace, x.dtype) else { return None };
        let products = backward.map_or(Products::Logits, |(_, made)| Products::of_backward(made.len() > 1));
        let scratch = launch::scratch_in(scratch, self.cuda_workspace(dtype, products)[1]);
        let (width, vocabulary, pitch) = (self.width as u64, self.vocabulary as u64, self.cuda_pitch());
        let at = |address: u64, elements: usize| address + (elements * dtype.size_in_bytes()) as u64;
        let weights = Matrix::dense(of_weight.address, dtype, width);
        let mut launches = Vec::new();
        for (index, range) in self.cuda_ranges().enumerate() {
            let rows = range.len() as u64;
            let x = Matrix::dense(at(x.address, range.start * self.width), dtype, width);
            let of_logits = Matrix::dense(logits, dtype, pitch as u64);
            launches.push(Launch::Product(Product::new((rows, vocabulary, width), x, weights.t(), of_logits, scratch)));
            let layout = Layout::new((range.len(), self.vocabulary).into(), vec![pitch, 1], 0);
            let upstream = match backward {
                Some((launch::Upstream::Each(d_losses, _), _)) => launch::Upstream::Each(d_losses, range.start as u64),
                Some((everywhere, _)) => everywhere,
                None => launch::Upstream::None,
            };
            let chunk = gapless_kernels::cuda::Operand { address: logits, layout, dtype };
            let of_rows = |address: u64| address + 4 * range.start as u64;
            launches.extend(launch::head(&chunk, of_rows(targets.address), of_rows(losses), upstream)?);
            let Some((_, [dx, rest @ ..])) = backward else { continue };
            if let [d_weight] = rest {
                let to = Matrix::dense(d_weight.address, d_weight.dtype, width);
                let product = Product::new((vocabulary, width, rows), of_logits.t(), x, to, scratch);
                let accumulate = index > 0 || operands.accumulates(weight);
                launches.push(Launch::Product(Product { accumulate, ..product }));
            }
            // Last, as it may overwrite x.
            let to = Matrix::dense(at(dx.address, range.start * self.width), dtype, width);
            launches.push(Launch::Product(Product::new((rows, width, vocabulary), of_logits, weights, to, scratch)));
        }
        Some(launches)
    }

    /// Arithmetic of the pass.
    fn flops(&self, products: Products) -> u64 {
        let products = match products {
            Products::Logits => 1,
            Products::Dx => 2,
            Products::Both => 3,
        };
        let logits = self.rows as u64 * self.vocabulary as u64;
        logits * (2 * products * self.width as u64 + 4)
    }

    /// The losses of all rows, and their gradients if asked for.
    fn pass<T: Factor>(
        &self,
        inputs: &Inputs<'_, T>,
        losses: &mut [f32],
        mut backward: Option<Backward<'_>>,
        mut scratch: Scratch<'_>,
    ) {
        const FITS: &str = "extents by the shape rule";
        let &Self { width, vocabulary, .. } = self;
        let logits = scratch.take::<f32>();
        let scratch = &mut scratch;
        let (weight, none) = (inputs.weight, Epilogue::default());
        for (index, range) in self.ranges().enumerate() {
            let (rows, elements) = (range.len(), range.start * width..range.end * width);
            let logits = &mut logits[..rows * vocabulary];
            match (inputs.x, &backward) {
                (Some(x), _) => {
                    self.logits(rows).run(&x[elements.clone()], weight, logits, Mode::Overwrite, none, scratch)
                }
                (None, Some(backward)) => {
                    let x = &backward.dx[elements.clone()];
                    self.logits(rows).run(x, weight, logits, Mode::Overwrite, none, scratch)
                }
                (None, None) => unreachable!("only dx overwrites x"),
            }
            .expect(FITS);
            let d_losses = backward.as_ref().map(|backward| backward.d_losses);
            cross_entropy(logits, &inputs.targets[range.clone()], &mut losses[range.clone()], |row| {
                d_losses.map(|d_losses| d_losses.at(range.start + row))
            });
            let Some(Backward { dx, d_weight, accumulate, .. }) = &mut backward else { continue };
            let mode = if *accumulate || index > 0 { Mode::Accumulate } else { Mode::Overwrite };
            if let Some(d_weight) = d_weight {
                let product = self.d_weight(rows);
                match inputs.x {
                    Some(x) => product.run(logits, &x[elements.clone()], d_weight, mode, none, scratch),
                    None => product.run(logits, &dx[elements.clone()], d_weight, mode, none, scratch),
                }
                .expect(FITS);
            }
            // Last, as it may overwrite x.
            self.dx(rows).run(logits, weight, &mut dx[elements], Mode::Overwrite, none, scratch).expect(FITS);
        }
    }
}

struct Inputs<'a, T> {
    /// None if dx has its bytes.
    x: Option<&'a [T]>,
    weight: &'a [T],
    targets: &'a [u32],
}

impl<'a, T: Factor> Inputs<'a, T> {
    fn of(args: &Args<'a>) -> Self {
        let x = (!args.is_overwritten(0)).then(|| args.input(0));
        Self { x, weight: args.input(1), targets: args.input(2) }
    }
}

struct Backward<'a> {
    d_losses: Upstream<'a>,
    dx: &'a mut [f32],
    /// None where the weight is frozen.
    d_weight: Option<&'a mut [f32]>,
    accumulate: bool,
}

/// The gradients of the losses.
#[derive(Clone, Copy)]
enum Upstream<'a> {
    Everywhere(f32),
    Each(&'a [f32], &'a Layout),
}

impl Upstream<'_> {
    fn at(self, row: usize) -> f32 {
        match self {
            Self::Everywhere(number) => number,
            Self::Each(data, layout) => super::element(data, layout, row),
        }
    }
}

/// The loss of each row of logits. Where a row's loss has a gradient, the logits become theirs: (softmax − one-hot)·d_loss.
fn cross_entropy(
    logits: &mut [f32],
    targets: &[u32],
    losses: &mut [f32],
    d_loss: impl Fn(usize) -> Option<f32> + Sync,
) {
    let vocabulary = logits.len() / targets.len();
    let rows = rows_per_task(vocabulary);
    let tasks = losses.pieces_mut(rows).zip(targets.pieces(rows));
    tasks.zip(logits.pieces_mut(rows * vocabulary)).enumerate().for_each(|(task, ((losses, targets), logits))| {
        let of_task = losses.iter_mut().zip(targets).zip(logits.chunks_exact_mut(vocabulary));
        vectorize!({
            // Loops instead of closures, which might not be inlined, and would not be vectorised then.
            for (row, ((loss, &target), logits)) in of_task.enumerate() {
                let (target, max) = (target as usize, reduce::max(logits));
                let logit = logits[target];
                for x in logits.iter_mut() {
                    *x = math::exp(*x - max);
                }
                let sum = reduce::sum(logits, |x| x);
                *loss = max + sum.ln() - logit;
                if let Some(d_loss) = d_loss(task * rows + row) {
                    let scale = d_loss / sum;
                    for x in logits.iter_mut() {
                        *x *= scale;
                    }
                    logits[target] -= d_loss;
                }
            }
        });
    });
}

fn reference_logits<'a>(x: &'a Array, weight: &'a Array) -> impl Iterator<Item = Vec<f64>> + 'a {
    x.rows().map(|x| weight.rows().map(|w| x.iter().zip(w).map(|(x, w)| x * w).sum()).collect())
}

fn reference_losses(x: &Array, weight: &Array, targets: &Array) -> Array {
    let loss = |(logits, &target): (Vec<f64>, &f64)| {
        let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        max + logits.iter().map(|logit| (logit - max).exp()).sum::<f64>().ln() - logits[target as usize]
    };
    Array::new(&targets.dims, reference_logits(x, weight).zip(&targets.data).map(loss).collect())
}

fn reference_gradients(x: &Array, weight: &Array, targets: &Array, d_losses: &Array) -> [Array; 2] {
    let width = weight.dims[1];
    let (mut dx, mut d_weight) = (Array::zeros(&x.dims), Array::zeros(&weight.dims));
    for (row, logits) in reference_logits(x, weight).enumerate() {
        let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = logits.iter().map(|logit| (logit - max).exp()).sum();
        for (token, logit) in logits.iter().enumerate() {
            let hot = f64::from(u8::from(token == targets.data[row] as usize));
            let d_logit = ((logit - max).exp() / sum - hot) * d_losses.data[row];
            for i in 0..width {
                dx.data[row * width + i] += d_logit * weight.data[token * width + i];
                d_weight.data[token * width + i] += d_logit * x.data[row * width + i];
            }
        }
    }
    [dx, d_weight]
}

#[cfg(test)]
mod tests {
    use gapless_testing::prelude::*;

    use super::*;
    use gapless_kernels::cpu::ScratchMemory;

    fn pool(threads: usize) -> rayon::ThreadPool {
        rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a thread pool starts")
    }

    fn random(len: usize, seed: u64) -> Vec<f32> {
        let numbers = gapless_kernels::Numbers::from_seed(seed);
        (0..len).map(|index| 2.0 * numbers.uniform(index) - 1.0).collect()
    }

    /// A head on a batch of sequences.
    #[derive(Debug, Clone, Copy)]
    struct Case {
        batch: usize,
        sequence: usize,
        width: usize,
        vocabulary: usize,
    }

    /// Operands of a case, and what they make.
    struct Run {
        x: Vec<f32>,
        weight: Vec<f32>,
        targets: Vec<u32>,
        losses: Vec<f32>,
        dx: Vec<f32>,
        d_weight: Vec<f32>,
    }

    impl Case {
        /// In so many calls of equally many sequences, each adding to d_weight if that is made, dx over x or beside it.
        fn run(self, calls: usize, threads: usize, over_x: bool, products: Products) -> Run {
            let Self { batch, sequence, width, vocabulary } = self;
            let rows = batch * sequence;
            let targets = random(rows, 3).iter().map(|x| ((x + 1.0) * 0.5 * vocabulary as f32) as u32).collect();
            let mut run = Run {
                x: random(rows * width, 1),
                weight: random(vocabulary * width, 2),
                targets,
                losses: vec![f32::NAN; rows],
                dx: vec![f32::NAN; rows * width],
                d_weight: vec![f32::NAN; vocabulary * width],
            };
            if over_x {
                run.dx.copy_from_slice(&run.x);
            }
            let chunks = Chunks::new(&[batch / calls, sequence, width], &[vocabulary, width]);
            let mut memory = ScratchMemory::new(&chunks.scratch(products, threads));
            for call in 0..calls {
                let rows = call * rows / calls..(call + 1) * rows / calls;
                let elements = rows.start * width..rows.end * width;
                let inputs = Inputs {
                    x: (!over_x).then_some(&run.x[elements.clone()]),
                    weight: &run.weight,
                    targets: &run.targets[rows.clone()],
                };
                let backward = Backward {
                    d_losses: Upstream::Everywhere(0.5),
                    dx: &mut run.dx[elements],
                    d_weight: (products == Products::Both).then_some(&mut run.d_weight),
                    accumulate: call > 0,
                };
                let losses = &mut run.losses[rows];
                pool(threads).install(|| chunks.pass(&inputs, losses, Some(backward), memory.lend()));
            }
            run
        }

        fn check(self) {
            let Self { batch, sequence, width, vocabulary } = self;
            let run = self.run(1, 2, false, Products::Both);
            let frozen = self.run(1, 2, true, Products::Dx);
            assert!(run.losses == frozen.losses && run.dx == frozen.dx, "{self:?} of a frozen weight");
            for other in [self.run(1, 3, true, Products::Both), self.run(batch, 1, false, Products::Both)] {
                assert!(run.losses == other.losses && run.dx == other.dx && run.d_weight == other.d_weight, "{self:?}");
            }
            let array = |dims: &[usize], data: &[f32]| Array::new(dims, data.iter().map(|&x| f64::from(x)).collect());
            let (x, weight) = (array(&[batch, sequence, width], &run.x), array(&[vocabulary, width], &run.weight));
            let targets = Array::new(&[batch, sequence], run.targets.iter().map(|&x| f64::from(x)).collect());
            let losses = reference_losses(&x, &weight, &targets);
            let [dx, d_weight] = reference_gradients(&x, &weight, &targets, &targets.map(|_| 0.5));
            for (name, data, exact) in
                [("losses", run.losses, losses), ("dx", run.dx, dx), ("d_weight", run.d_weight, d_weight)]
            {
                let square = |x: f64| x * x;
                let error: f64 = data.iter().zip(&exact.data).map(|(&a, &b)| square(f64::from(a) - b)).sum();
                let scale: f64 = exact.data.iter().map(|&x| square(x)).sum();
                // Sums of up to 700 numbers in f32: some multiples of 2⁻²⁴. With one token, all gradients are 0.
                assert!(error.sqrt() <= 1e-5 * scale.sqrt() + 1e-9, "{name} of {self:?}: {error} of {scale}");
            }
        }
    }

    generated! {
        #![cases(24)]
        #[test]
        fn losses_and_gradients_are_those_of_the_reference_however_the_batch_is_cut(
            (batch, sequence, width, vocabulary) in (1..4usize, 1..700usize, 1..9usize, 1..40usize)
        ) {
            Case { batch, sequence, width, vocabulary }.check();
        }
    }

    #[test]
    fn a_piece_may_leave_a_rest() {
        Case { batch: 2, sequence: 513, width: 5, vocabulary: 30 }.check();
        Case { batch: 3, sequence: 100, width: 5, vocabulary: 30 }.check();
    }

    /// Lengths of the chunks.
    fn chunks(x: &[usize], vocabulary: usize) -> Vec<usize> {
        Chunks::new(x, &[vocabulary, x[x.len() - 1]]).ranges().map(|range| range.len()).collect()
    }

    #[test]
    fn chunks_are_whole_sequences_or_pieces_of_one() {
        // A vocabulary no larger than the width needs no pieces, short sequences are taken together.
        assert_eq!(chunks(&[2, 1024, 256], 256), [1024, 1024]);
        assert_eq!(chunks(&[5, 100, 32], 50_000), [200, 200, 100]);
        // Pieces of at least 256 rows, the same in every sequence.
        assert_eq!(chunks(&[2, 1024, 768], 50_257), [256; 8]);
        assert_eq!(chunks(&[1, 4096, 4096], 32_000), [512; 8]);
        assert_eq!(chunks(&[2, 700, 64], 5_000), [350; 4]);
        assert_eq!(chunks(&[2, 513, 64], 5_000), [257, 256, 257, 256]);
        // One row; rows that say nothing of sequences.
        assert_eq!(chunks(&[8], 100), [1]);
        assert_eq!(chunks(&[300, 8], 100), [300]);
    }
}

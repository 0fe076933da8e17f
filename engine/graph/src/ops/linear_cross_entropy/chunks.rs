//! The division of a head's rows into chunks, and the cost, scratch and launches of a pass over them.

use std::collections::BTreeSet;
use std::ops::Range;

use candle_core::{DType, Layout};
use gapless_kernels::Spec;
use gapless_kernels::cpu::gemm::{Gemm, Strides};
use gapless_kernels::cpu::scratch::for_each_of;
use gapless_kernels::cuda::{
    self, Launch, Product,
    launch::{self, Matrix},
};

use super::Counted;

/// The products that a pass computes for every chunk: the logits, and those of the gradients that are needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Products {
    Logits,
    Dx,
    Both,
}

impl Products {
    /// The products of a backward.
    pub fn of_backward(has_d_weight: bool) -> Self {
        if has_d_weight { Self::Both } else { Self::Dx }
    }
}

/// The operands of a head on a GPU.
pub(super) struct Head<'a> {
    pub operands: &'a cuda::Operands<'a>,
    pub counted: Counted,
    /// Address to which the losses are written.
    pub losses: u64,
    /// Address to which the likelihoods are written; 0 if they are not.
    pub likelihoods: u64,
    /// Address of the factors of the losses; 0 if there are none.
    pub weights: u64,
}

/// Number of rows with which a chunk's products are as fast as those of all rows. Longer sequences are divided into
/// chunks of at least this many rows; shorter ones are taken together up to it.
const ENOUGH_ROWS: usize = 256;

/// The same on a GPU: what fills it, and adds seldom enough to the weight's gradient that it is the products that take the time.
const ENOUGH_ROWS_ON_GPU: usize = 2048;

/// The division of rows into chunks. A chunk is either several whole sequences, or a piece of one. The size of a piece
/// depends only on the lengths of the sequence, the width and the vocabulary, so the order of summation does not depend
/// on how the batch is divided into micro-batches.
#[derive(Debug, Clone, Copy)]
pub(super) struct Chunks {
    pub rows: usize,
    pub width: usize,
    pub vocabulary: usize,
    /// Rows of a sequence; the order of summation restarts with each.
    sequence: usize,
    /// Rows of the whole sequences that are divided together.
    block: usize,
    /// Rows of a chunk, except for the last of a block.
    chunk: usize,
}

impl Chunks {
    pub fn new(x: &[usize], weight: &[usize]) -> Self {
        let &[vocabulary, width] = weight else { unreachable!("rank 2 by the shape rule") };
        let rows = x.iter().product::<usize>() / width;
        let sequence = if x.len() > 2 { x[x.len() - 2] } else { rows };
        // Enough pieces that the logits of one are no larger than the sequence's x.
        let pieces = vocabulary.div_ceil(width).min(sequence / ENOUGH_ROWS).max(1);
        let block = if pieces > 1 { sequence } else { sequence * (ENOUGH_ROWS / sequence).max(1) };
        Self { rows, width, vocabulary, sequence, block, chunk: block.div_ceil(pieces) }
    }

    pub fn of(inputs: &[Spec]) -> Self {
        Self::new(inputs[0].dims(), inputs[1].dims())
    }

    pub fn ranges(self) -> impl Iterator<Item = Range<usize>> {
        let Self { rows, block, chunk, .. } = self;
        (0..rows).step_by(block).flat_map(move |start| {
            let end = (start + block).min(rows);
            (start..end).step_by(chunk).map(move |start| start..(start + chunk).min(end))
        })
    }

    /// The product rows × width · (vocabulary × width)ᵀ.
    pub fn logits(&self, rows: usize) -> Gemm {
        let &Self { width, vocabulary, .. } = self;
        Gemm::new(rows, vocabulary, width, Strides::row_major(width), Strides::transposed(width))
    }

    /// The product (rows × vocabulary)ᵀ · rows × width.
    pub fn d_weight(&self, rows: usize) -> Gemm {
        let &Self { width, vocabulary, sequence, .. } = self;
        let product = Gemm::new(vocabulary, width, rows, Strides::transposed(vocabulary), Strides::row_major(width));
        product.with_segment(sequence)
    }

    /// The product rows × vocabulary · vocabulary × width.
    pub fn dx(&self, rows: usize) -> Gemm {
        let &Self { width, vocabulary, .. } = self;
        Gemm::new(rows, width, vocabulary, Strides::row_major(vocabulary), Strides::row_major(width))
    }

    /// Returns the bytes of each piece of scratch: a chunk's logits, then the greatest that any product needs.
    pub fn scratch(&self, products: Products, threads: usize) -> Vec<u64> {
        let products = |rows: usize| {
            let d_weight = (products == Products::Both).then(|| self.d_weight(rows));
            let dx = (products != Products::Logits).then(|| self.dx(rows));
            std::iter::once(self.logits(rows)).chain(d_weight).chain(dx)
        };
        // Only the length of a range matters, and few lengths occur.
        let lengths: BTreeSet<usize> = self.ranges().map(|range| range.len()).collect();
        let pieces = for_each_of(lengths.into_iter().flat_map(products).map(|product| product.scratch(threads)));
        let logits = 4 * self.chunk.min(self.rows) * self.vocabulary;
        [vec![logits as u64], pieces].concat()
    }

    /// The ranges of the chunks on a GPU. There the library decides the order of summation; it is always the same for
    /// the same number of rows.
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
    pub fn cuda_workspace(&self, dtype: DType, products: Products) -> Vec<u64> {
        let &Self { width, vocabulary, .. } = self;
        let rows = self.cuda_chunk();
        let d_weight = (products == Products::Both).then_some((vocabulary, width));
        let dx = (products != Products::Logits).then_some((rows, width));
        let products =
            d_weight.into_iter().chain(dx).chain([(rows, vocabulary)]).map(|(m, n)| launch::product_workspace(m, n));
        vec![(rows * self.cuda_pitch() * dtype.size_in_bytes()) as u64, products.max().unwrap_or(0)]
    }

    /// Returns the launches of a pass on a GPU: for each chunk its logits, their conversion to losses and gradients,
    /// and the chunk's share of the outputs `[dx]` or `[dx, d_weight]`. `weight` is the index of d_weight among the
    /// operation's outputs.
    pub fn launches(
        &self,
        &Head { operands, counted, losses, likelihoods, weights }: &Head<'_>,
        backward: Option<(launch::Upstream<'_>, &[cuda::Operand])>,
        weight: usize,
    ) -> Option<Vec<Launch>> {
        let [x, of_weight, targets, ..] = operands.inputs else { return None };
        let (&[logits, scratch, ..], dtype) = (operands.workspace, x.dtype) else { return None };
        let products = backward.map_or(Products::Logits, |(_, made)| Products::of_backward(made.len() > 1));
        let scratch = launch::scratch_in(scratch, self.cuda_workspace(dtype, products)[1]);
        let (width, vocabulary, pitch) = (self.width as u64, self.vocabulary as u64, self.cuda_pitch());
        let at = |address: u64, elements: usize| address + (elements * dtype.size_in_bytes()) as u64;
        let of_weight = Matrix::dense(of_weight.address, dtype, width);
        let mut launches = Vec::new();
        for (index, range) in self.cuda_ranges().enumerate() {
            let count = range.len() as u64;
            let x = Matrix::dense(at(x.address, range.start * self.width), dtype, width);
            let of_logits = Matrix::dense(logits, dtype, pitch as u64);
            launches.push(Launch::Product(Product::new(
                (count, vocabulary, width),
                x,
                of_weight.t(),
                of_logits,
                scratch,
            )));
            let layout = Layout::new((range.len(), self.vocabulary).into(), vec![pitch, 1], 0);
            let upstream = match backward {
                Some((launch::Upstream::Each(d_losses, _), _)) => launch::Upstream::Each(d_losses, range.start as u64),
                Some((everywhere, _)) => everywhere,
                None => launch::Upstream::None,
            };
            let chunk = cuda::Operand { address: logits, layout, dtype };
            let of_rows = |address: u64| if address > 0 { address + 4 * range.start as u64 } else { 0 };
            let rows = launch::HeadRows {
                targets: of_rows(targets.address),
                losses: of_rows(losses),
                likelihoods: of_rows(likelihoods),
                weights: of_rows(weights),
            };
            launches.extend(launch::head(&chunk, rows, upstream, &counted.terms, counted.cap.unwrap_or(0.0))?);
            let Some((_, [dx, rest @ ..])) = backward else { continue };
            if let [d_weight] = rest {
                let to = Matrix::dense(d_weight.address, d_weight.dtype, width);
                let product = Product::new((vocabulary, width, count), of_logits.t(), x, to, scratch);
                let adds = index > 0 || operands.accumulates(weight);
                launches.push(Launch::Product(Product { onto: adds.then_some(d_weight.address), ..product }));
            }
            // dx comes last, as it may overwrite x.
            let to = Matrix::dense(at(dx.address, range.start * self.width), dtype, width);
            launches.push(Launch::Product(Product::new((count, width, vocabulary), of_logits, of_weight, to, scratch)));
        }
        Some(launches)
    }

    /// Number of floating-point operations of the pass.
    pub fn flops(&self, products: Products) -> u64 {
        let products = match products {
            Products::Logits => 1,
            Products::Dx => 2,
            Products::Both => 3,
        };
        let logits = self.rows as u64 * self.vocabulary as u64;
        logits * (2 * products * self.width as u64 + 4)
    }
}

//! The division of a head's rows into chunks, and the cost, scratch and launches of a pass over them.

use std::collections::BTreeSet;
use std::ops::Range;

use candle_core::{DType, Layout};
use gapless_kernels::cpu::gemm::{Gemm, Strides};
use gapless_kernels::cpu::scratch::for_each_of;
use gapless_kernels::cuda::{
    self, Launch, Product,
    launch::{self, Matrix},
};
use gapless_kernels::{Spec, Window};

use super::LossDefinition;
use super::statistics::STATISTICS;

/// The rows of the weight that a rank holds if ranks divide the vocabulary.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Part {
    /// The vocabulary entry of the first row.
    pub first: usize,
    /// Number of entries of the whole vocabulary.
    pub vocabulary: usize,
}

impl Part {
    /// Returns the part of a rank that holds this window of the weight, or `None` if it holds all rows.
    ///
    /// # Panics
    /// Panics if the rows are not one range.
    pub fn of(weight: &Window) -> Option<Self> {
        let (held, vocabulary) = (&weight.held()[0], weight.whole_dims()[0]);
        let [rows] = &held[..] else { panic!("a rank holds one range of a vocabulary, not {held:?}") };
        (rows.len() < vocabulary).then_some(Self { first: rows.start, vocabulary })
    }

    /// Returns the row of the weight for a vocabulary entry. The index exceeds the rows if another rank holds the row.
    pub fn index(self, entry: u32) -> usize {
        (entry as usize).wrapping_sub(self.first)
    }
}

/// The products that a pass computes for every chunk: the logits, and the gradients that are needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Products {
    /// The statistics of all ranks are given and no gradient is needed.
    None,
    Logits,
    Dx,
    Both,
}

impl Products {
    /// Returns the products that a backward computes.
    pub fn of_backward(has_d_weight: bool) -> Self {
        if has_d_weight { Self::Both } else { Self::Dx }
    }
}

/// The operands of a head on a GPU.
pub(super) struct HeadOperands<'a> {
    pub operands: &'a cuda::Operands<'a>,
    pub loss: LossDefinition,
    /// Address to which the losses are written; not used if statistics are written.
    pub losses: u64,
    /// Address to which the likelihoods are written; 0 if the likelihoods are not an output.
    pub likelihoods: u64,
    /// Address of the weights of the losses; 0 if the losses have no weights.
    pub weights: u64,
    /// The statistics of all ranks, [ranks, rows, 4], if ranks divide the vocabulary.
    pub gathered: Option<&'a cuda::Operand>,
    /// Address to which the statistics of the logits are written; 0 if losses are computed.
    pub statistics: u64,
}

/// Number of rows from which on the products of a chunk are as fast, per row, as one product of all rows. A sequence
/// with more rows is divided into chunks of at least this size. Sequences with fewer rows are joined into chunks of at
/// most this size.
const ENOUGH_ROWS: usize = 256;

/// Range of the number of rows of a chunk on a GPU. [`Chunks::cuda_chunk`] chooses the number within this range. The
/// lower end limits the number of chunks that add to the weight's gradient. The upper end limits the memory of the
/// logits.
const ROWS_ON_GPU: Range<usize> = 2048..3072;

/// Rows and columns of the tiles in which a GPU's library computes products. The tiles are divided among the
/// multiprocessors, of which an H100 or H200 has [`MULTIPROCESSORS`].
const TILE: [usize; 2] = [128, 256];
const MULTIPROCESSORS: usize = 132;

/// Products on a GPU are computed for a number of vocabulary entries that is a multiple of this. If the contiguous
/// extent of a product were not a multiple of 16 bytes, the library would use kernels that load single elements. So the
/// remaining entries of a vocabulary have separate products.
const ENTRIES: usize = 8;

/// The division of rows into chunks. A chunk is either several whole sequences, or a piece of one sequence. The size of
/// a piece depends only on the length of the sequence, the width and the whole vocabulary. So the order in which rows are
/// added does not depend on how a batch is divided into micro-batches, and is the same on all ranks.
#[derive(Debug, Clone, Copy)]
pub(super) struct Chunks {
    pub rows: usize,
    pub width: usize,
    /// Number of vocabulary entries for which there are rows of the weight.
    pub vocabulary: usize,
    /// The place of these entries in the whole vocabulary.
    pub part: Part,
    /// Distance between the rows of the gradients of a chunk's logits on the CPU, in elements of x. The rows of bf16 begin
    /// where the rows of f32 logits were.
    pitch: usize,
    /// Rows of a sequence. The order of summation restarts with each sequence.
    sequence: usize,
    /// Rows of a block: one sequence, or several sequences that are divided into chunks together.
    block: usize,
    /// Rows of a chunk, except for the last chunk of a block.
    chunk: usize,
}

impl Chunks {
    /// The division of x with these dimensions, for a weight of `dtype` with these dimensions, which is all of the weight
    /// or a part.
    pub fn new(x: &[usize], weight: &[usize], dtype: DType, part: Option<Part>) -> Self {
        let &[vocabulary, width] = weight else { unreachable!("rank 2 by the shape rule") };
        let rows = x.iter().product::<usize>() / width;
        let sequence = if x.len() > 2 { x[x.len() - 2] } else { rows };
        // Divides a sequence into enough pieces that the logits of one piece are no larger than the sequence's x, if
        // that leaves at least `ENOUGH_ROWS` rows per piece.
        let part = part.unwrap_or(Part { first: 0, vocabulary });
        let pieces = part.vocabulary.div_ceil(width).min(sequence / ENOUGH_ROWS).max(1);
        let block = if pieces > 1 { sequence } else { sequence * (ENOUGH_ROWS / sequence).max(1) };
        let pitch = vocabulary * size_of::<f32>() / dtype.size_in_bytes();
        Self { rows, width, vocabulary, part, pitch, sequence, block, chunk: block.div_ceil(pieces) }
    }

    pub fn of(inputs: &[Spec], part: Option<Part>) -> Self {
        Self::new(inputs[0].dims(), inputs[1].dims(), inputs[1].dtype, part)
    }

    pub fn of_operands(operands: &cuda::Operands<'_>, part: Option<Part>) -> Self {
        let [x, weight, ..] = operands.inputs else { unreachable!("a head has three inputs or more") };
        Self::new(x.layout.dims(), weight.layout.dims(), weight.dtype, part)
    }

    pub fn ranges(self) -> impl Iterator<Item = Range<usize>> {
        let Self { rows, block, chunk, .. } = self;
        (0..rows).step_by(block).flat_map(move |start| {
            let end = (start + block).min(rows);
            (start..end).step_by(chunk).map(move |start| start..(start + chunk).min(end))
        })
    }

    /// The product [rows, width] · [vocabulary, width]ᵀ, which gives the logits.
    pub fn logits(&self, rows: usize) -> Gemm {
        let &Self { width, vocabulary, .. } = self;
        Gemm::new(rows, vocabulary, width, Strides::row_major(width), Strides::transposed(width))
    }

    /// The product [rows, vocabulary]ᵀ · [rows, width], which gives the gradient of the weight.
    pub fn d_weight(&self, rows: usize) -> Gemm {
        let &Self { width, vocabulary, pitch, sequence, .. } = self;
        let product = Gemm::new(vocabulary, width, rows, Strides::transposed(pitch), Strides::row_major(width));
        product.with_segment(sequence)
    }

    /// The product [rows, vocabulary] · [vocabulary, width], which gives the gradient of x.
    pub fn dx(&self, rows: usize) -> Gemm {
        let &Self { width, vocabulary, pitch, .. } = self;
        Gemm::new(rows, width, vocabulary, Strides::row_major(pitch), Strides::row_major(width))
    }

    /// Returns the sizes in bytes of the pieces of scratch: the logits of a chunk, then the scratch of the products.
    /// The scratch is large enough for each of the products. It is empty if there are no products.
    pub fn scratch(&self, products: Products, threads: usize) -> Vec<u64> {
        if products == Products::None {
            return Vec::new();
        }
        let products = |rows: usize| {
            let d_weight = (products == Products::Both).then(|| self.d_weight(rows));
            let dx = (products != Products::Logits).then(|| self.dx(rows));
            std::iter::once(self.logits(rows)).chain(d_weight).chain(dx)
        };
        // The scratch of a product depends only on the number of rows of a chunk, and few numbers occur.
        let lengths: BTreeSet<usize> = self.ranges().map(|range| range.len()).collect();
        let pieces = for_each_of(lengths.into_iter().flat_map(products).map(|product| product.scratch(threads)));
        let logits = 4 * self.chunk.min(self.rows) * self.vocabulary;
        [vec![logits as u64], pieces].concat()
    }

    /// Returns the ranges of rows of the chunks on a GPU. The order of summation on a GPU is the library's. It depends
    /// only on the number of rows.
    fn cuda_ranges(self) -> impl Iterator<Item = Range<usize>> {
        let chunk = self.cuda_chunk();
        (0..self.rows).step_by(chunk.max(1)).map(move |start| start..(start + chunk).min(self.rows))
    }

    /// Returns the number of rows of every chunk on a GPU except the last. The number is a multiple of a tile's rows,
    /// and the one with which the product for dx leaves the fewest multiprocessors idle. This product has far fewer
    /// tiles than the other two. If several numbers are equally good, returns the smallest.
    fn cuda_chunk(&self) -> usize {
        let least = self.rows.div_ceil(ROWS_ON_GPU.end).max(1);
        let most = self.rows.div_ceil(ROWS_ON_GPU.start).max(1);
        let chunk = |count: usize| self.rows.div_ceil(count).next_multiple_of(TILE[0]);
        // If a product has few tiles, the library may divide the sum of each tile into two or four parts, to give work
        // to more multiprocessors.
        let idle = |rows: usize| {
            let tiles = rows.div_ceil(TILE[0]) * self.width.div_ceil(TILE[1]);
            let splits = if tiles < MULTIPROCESSORS { &[1, 2, 4][..] } else { &[1] };
            let idle = splits.iter().map(|parts| {
                let all = (tiles * parts).next_multiple_of(MULTIPROCESSORS);
                1000 * (all - tiles * parts) / all
            });
            idle.min()
        };
        let best = (least..=most).map(chunk).min_by_key(|&rows| (idle(rows), rows));
        best.expect("there is at least one chunk").min(self.rows)
    }

    /// Returns the number of vocabulary entries in the products with aligned extents, and the number of remaining
    /// entries, which have separate products. If the rows of the weight are not aligned, separate products would gain
    /// nothing, so there are no remaining entries.
    fn cuda_entries(&self) -> (usize, usize) {
        let is_split = self.width.is_multiple_of(ENTRIES) && self.vocabulary > ENTRIES;
        let rest = if is_split { self.vocabulary % ENTRIES } else { 0 };
        (self.vocabulary - rest, rest)
    }

    /// Returns the distance, in elements, between rows of logits on a GPU. Every row is aligned.
    fn cuda_pitch(&self) -> usize {
        self.vocabulary.next_multiple_of(64)
    }

    /// Returns the sizes in bytes of the pieces of scratch on a GPU: the logits of a chunk; the workspace of products;
    /// and, if there are remaining vocabulary entries, the logits of all rows for these entries. Gradients overwrite
    /// these logits.
    pub fn cuda_workspace(&self, dtype: DType, products: Products) -> Vec<u64> {
        if products == Products::None {
            return Vec::new();
        }
        let &Self { width, vocabulary, .. } = self;
        let rows = self.cuda_chunk();
        let d_weight = (products == Products::Both).then_some((vocabulary, width));
        let dx = (products != Products::Logits).then_some((rows, width));
        let products =
            d_weight.into_iter().chain(dx).chain([(rows, vocabulary)]).map(|(m, n)| launch::product_workspace(m, n));
        let bytes = |elements: usize| (elements * dtype.size_in_bytes()) as u64;
        let rest = (self.cuda_entries().1 > 0).then(|| bytes(self.rows * ENTRIES));
        [bytes(rows * self.cuda_pitch()), products.max().unwrap_or(0)].into_iter().chain(rest).collect()
    }

    /// Returns the bytes of logits that the loss kernels move on a GPU. Each logit is read once for the maximum and the
    /// sum of its row. If gradients are computed, the logit is read again and overwritten.
    pub fn cuda_logit_bytes(&self, dtype: DType, products: Products) -> u64 {
        let passes = match products {
            Products::None => 0,
            Products::Logits => 1,
            Products::Dx | Products::Both => 3,
        };
        passes * (self.rows * self.vocabulary * dtype.size_in_bytes()) as u64
    }

    /// Returns the launches of a pass on a GPU. For each chunk, launches compute the logits, convert the logits to
    /// losses and gradients, and compute the chunk's share of the outputs `[dx]` or `[dx, d_weight]`. `weight` is the
    /// index of d_weight among the operation's outputs.
    pub fn launches(
        &self,
        head: &HeadOperands<'_>,
        backward: Option<(launch::Upstream<'_>, &[cuda::Operand])>,
        weight: usize,
    ) -> Option<Vec<Launch>> {
        let &HeadOperands { operands, loss: definition, losses, likelihoods, weights, gathered, statistics } = head;
        let [x, weight_operand, targets, ..] = operands.inputs else { return None };
        let of_rows = |first: usize| {
            let at = |address: u64, bytes: usize| if address > 0 { address + (bytes * first) as u64 } else { 0 };
            let gathered = gathered.map(|all| launch::Gathered {
                address: at(all.address, 4 * STATISTICS),
                ranks: all.layout.dims()[0] as u64,
                distance: self.rows as u64,
            });
            launch::HeadRows {
                targets: at(targets.address, 4),
                losses: at(losses, 4),
                likelihoods: at(likelihoods, 4),
                weights: at(weights, 4),
                rest: None,
                vocabulary: self.part.vocabulary as u64,
                first_entry: self.part.first as u64,
                gathered,
                statistics: at(statistics, 4 * STATISTICS),
            }
        };
        let (terms, cap) = (&definition.terms, definition.cap.unwrap_or(0.0));
        if gathered.is_some() && backward.is_none() {
            let rows = cuda::Operand { address: losses, layout: Layout::contiguous((self.rows, 1)), dtype: DType::F32 };
            return launch::head(&rows, of_rows(0), launch::Upstream::None, terms, cap);
        }
        let (&[logits, scratch, ref others @ ..], dtype) = (operands.workspace, x.dtype) else { return None };
        let products = backward.map_or(Products::Logits, |(_, made)| Products::of_backward(made.len() > 1));
        let scratch = launch::scratch_in(scratch, self.cuda_workspace(dtype, products)[1]);
        let (width, pitch, (entries, rest_entries)) = (self.width as u64, self.cuda_pitch(), self.cuda_entries());
        let at = |address: u64, elements: usize| address + (elements * dtype.size_in_bytes()) as u64;
        let rows_of = |address: u64, first: usize| Matrix::dense(at(address, first * self.width), dtype, width);
        // If there are remaining entries, the first piece of `others` holds their logits.
        let rest = others.first().copied().unwrap_or(0);
        let rest_of = |first: usize| Matrix::dense(at(rest, first * ENTRIES), dtype, ENTRIES as u64);
        let weight_of = |first: usize| rows_of(weight_operand.address, first);
        let extents = |m: usize, n: usize, k: usize| (m as u64, n as u64, k as u64);
        let product = |extents, a, b, c| Product::new(extents, a, b, c, scratch);
        let mut launches = Vec::new();
        if rest_entries > 0 {
            let extents = extents(self.rows, rest_entries, self.width);
            launches.push(Launch::Product(product(extents, rows_of(x.address, 0), weight_of(entries).t(), rest_of(0))));
        }
        for (index, range) in self.cuda_ranges().enumerate() {
            let count = range.len();
            let x = rows_of(x.address, range.start);
            let of_logits = Matrix::dense(logits, dtype, pitch as u64);
            let of_logit = extents(count, entries, self.width);
            launches.push(Launch::Product(product(of_logit, x, weight_of(0).t(), of_logits)));
            let layout = Layout::new((count, self.vocabulary).into(), vec![pitch, 1], 0);
            let upstream = match backward {
                Some((launch::Upstream::Each(d_losses, _), _)) => launch::Upstream::Each(d_losses, range.start as u64),
                Some((everywhere, _)) => everywhere,
                None => launch::Upstream::None,
            };
            let chunk = cuda::Operand { address: logits, layout, dtype };
            let rest = rest_of(range.start);
            let of_rest = (rest_entries > 0).then_some((rest.address, entries as u64));
            let rows = launch::HeadRows { rest: of_rest, ..of_rows(range.start) };
            launches.extend(launch::head(&chunk, rows, upstream, terms, cap)?);
            let Some((_, [dx, made @ ..])) = backward else { continue };
            if let [d_weight] = made {
                let adds = index > 0 || operands.accumulates(weight);
                for (first, entries, of_logits) in [(0, entries, of_logits), (entries, rest_entries, rest)] {
                    let to = Matrix::dense(d_weight.address, d_weight.dtype, width).skip((first * self.width) as u64);
                    let product = product(extents(entries, self.width, count), of_logits.t(), x, to);
                    let onto = adds.then_some(to.address);
                    launches.extend((entries > 0).then_some(Launch::Product(Product { onto, ..product })));
                }
            }
            // dx is computed last, because it may overwrite x.
            let to = rows_of(dx.address, range.start);
            launches.push(Launch::Product(product(extents(count, self.width, entries), of_logits, weight_of(0), to)));
        }
        if let Some((_, [dx, ..])) = backward.filter(|_| rest_entries > 0) {
            let to = rows_of(dx.address, 0);
            let extents = extents(self.rows, self.width, rest_entries);
            let product = product(extents, rest_of(0), weight_of(entries), to);
            launches.push(Launch::Product(Product { onto: Some(to.address), ..product }));
        }
        Some(launches)
    }

    /// Number of floating-point operations of the pass.
    pub fn flops(&self, products: Products) -> u64 {
        let products = match products {
            Products::None => return self.rows as u64,
            Products::Logits => 1,
            Products::Dx => 2,
            Products::Both => 3,
        };
        let logits = self.rows as u64 * self.vocabulary as u64;
        logits * (2 * products * self.width as u64 + 4)
    }
}

//! The pass over a head's chunks on the CPU.

use std::ops::Range;

use candle_core::Layout;
use gapless_kernels::cpu::bf16::round_in_place;
use gapless_kernels::cpu::gemm::{Epilogue, Factor, Mode};
use gapless_kernels::cpu::{Args, Element, InPieces, Pieces, Scratch, math, rows_per_task, vectorize};

use super::LossDefinition;
use super::chunks::Chunks;
use super::statistics::{RowStatistics, apply_cap, exponentials};
use crate::ops::element;

pub(super) const FITS: &str = "extents by the shape rule";

impl Chunks {
    /// Computes the losses of all rows, and the gradients for which there is an output. If the operands are bf16, the
    /// gradients of the logits are rounded to bf16 before they are multiplied, as on a GPU.
    pub fn pass<T: Factor>(
        &self,
        inputs: &Inputs<'_, T>,
        made: &mut Losses<'_>,
        mut backward: Option<Backward<'_>>,
        mut scratch: Scratch<'_>,
    ) {
        let &Self { width, vocabulary, .. } = self;
        let logits = scratch.take::<f32>();
        let scratch = &mut scratch;
        for (index, range) in self.ranges().enumerate() {
            let (rows, elements) = (range.len(), range.start * width..range.end * width);
            let logits = &mut logits[..rows * vocabulary];
            if let (None, Some(backward), true) = (inputs.x, &mut backward, T::IS_BF16) {
                // The values are exact, because x was bf16.
                round_in_place(&mut backward.dx[elements.clone()]);
            }
            let x = inputs.rows(backward.as_ref(), elements);
            let product = self.logits(rows);
            product.run(x, inputs.weight, logits, Mode::Overwrite, Epilogue::default(), scratch).expect(FITS);
            let d_losses = backward.as_ref().map(|backward| backward.d_losses);
            self.cross_entropy(logits, range.clone(), inputs, made.of_rows(range.clone()), d_losses);
            let Some(backward) = &mut backward else { continue };
            backward.accumulate |= index > 0;
            self.gradients(elements_of(logits), range, inputs, backward, scratch);
        }
    }

    /// Computes a chunk's share of the gradients from the gradients of its logits.
    fn gradients<T: Factor>(
        &self,
        d_logits: &[T],
        range: Range<usize>,
        inputs: &Inputs<'_, T>,
        backward: &mut Backward<'_>,
        scratch: &mut Scratch<'_>,
    ) {
        let (rows, elements) = (range.len(), range.start * self.width..range.end * self.width);
        let none = Epilogue::default;
        if let Some(d_weight) = backward.d_weight.take() {
            let mode = if backward.accumulate { Mode::Accumulate } else { Mode::Overwrite };
            let x = inputs.rows(Some(backward), elements.clone());
            self.d_weight(rows).run(d_logits, x, d_weight, mode, none(), scratch).expect(FITS);
            backward.d_weight = Some(d_weight);
        }
        // dx is computed last, because it may overwrite x.
        let dx = &mut backward.dx[elements];
        self.dx(rows).run(d_logits, inputs.weight, dx, Mode::Overwrite, none(), scratch).expect(FITS);
    }

    /// Computes the losses of a chunk's rows from its logits. If `d_losses` is given, replaces the logits by their
    /// gradient, which is (softmax − one-hot)·d_loss without additional terms or a cap. If `T` is bf16, the gradient is
    /// rounded, and is in the first half of a row's bytes. Otherwise, the logits have unspecified values afterwards.
    fn cross_entropy<T: Factor>(
        &self,
        logits: &mut [f32],
        range: Range<usize>,
        inputs: &Inputs<'_, T>,
        Losses { losses, likelihoods }: Losses<'_>,
        d_losses: Option<Upstream<'_>>,
    ) {
        let &Self { vocabulary, part, rows: all_rows, .. } = self;
        let &Inputs { targets, loss: LossDefinition { terms, cap }, gathered, .. } = inputs;
        let (rows, terms, cap) = (rows_per_task(vocabulary), terms.for_row(part.vocabulary), cap.map(|cap| cap as f32));
        let likelihoods = likelihoods.map(|likelihoods| likelihoods.pieces_mut(rows));
        let tasks = losses.pieces_mut(rows).zip(likelihoods).zip(targets[range.clone()].pieces(rows));
        tasks.zip(logits.pieces_mut(rows * vocabulary)).enumerate().for_each(
            |(task, (((losses, mut likelihoods), targets), logits))| {
                let of_task = losses.iter_mut().zip(targets).zip(logits.chunks_exact_mut(vocabulary));
                let first = range.start + task * rows;
                vectorize!({
                    // These are loops instead of closures. Closures that are not inlined would not vectorize.
                    for (row, ((loss, &target), logits)) in of_task.enumerate() {
                        if let Some(cap) = cap {
                            apply_cap(logits, cap);
                        }
                        let target = part.index(target);
                        // With a cap, the gradient is computed from the logits themselves, so the exponentials do not
                        // overwrite them.
                        let statistics = match gathered {
                            None => {
                                let logit = logits[target];
                                RowStatistics::of(logits, logit, cap.is_some(), terms.spread != 0.0)
                            }
                            Some(gathered) => {
                                let merged = RowStatistics::merge(gathered, all_rows, first + row);
                                if cap.is_none() {
                                    exponentials(logits, merged.max);
                                }
                                merged
                            }
                        };
                        let (lse, RowStatistics { max, sum, logit, all }) = (statistics.lse(), statistics);
                        *loss = terms.loss(lse, logit, all);
                        if let Some(likelihoods) = &mut likelihoods {
                            likelihoods[row] = lse - logit;
                        }
                        let Some(d_loss) = d_losses.map(|d_losses| d_losses.at(first + row)) else { continue };
                        let (scale, spread) = (d_loss / sum * terms.of_softmax(lse), terms.spread * d_loss);
                        let mut of_target = terms.keep * d_loss;
                        match cap {
                            None => {
                                for x in logits.iter_mut() {
                                    *x = *x * scale - spread;
                                }
                            }
                            Some(cap) => {
                                for x in logits.iter_mut() {
                                    let slope = 1.0 - (*x / cap) * (*x / cap);
                                    *x = (math::exp_normal(*x - max) * scale - spread) * slope;
                                }
                                of_target *= 1.0 - (logit / cap) * (logit / cap);
                            }
                        }
                        if let Some(x) = logits.get_mut(target) {
                            *x -= of_target;
                        }
                        if T::IS_BF16 {
                            round_in_place(logits);
                        }
                    }
                });
            },
        );
    }
}

pub(super) struct Inputs<'a, T> {
    /// x, or `None` if x and dx share their bytes, so that `dx` initially holds x in f32.
    pub x: Option<&'a [T]>,
    pub weight: &'a [T],
    pub targets: &'a [u32],
    pub loss: LossDefinition,
    /// The statistics of all ranks, [ranks, rows, 4], if ranks divide the vocabulary.
    pub gathered: Option<&'a [f32]>,
}

impl<'a, T: Factor> Inputs<'a, T> {
    pub fn of(args: &Args<'a>, loss: LossDefinition, gathered: Option<&'a [f32]>) -> Self {
        let x = (!args.is_overwritten(0)).then(|| args.input(0));
        Self { x, weight: args.input(1), targets: args.input(2), loss, gathered }
    }

    /// Returns a range of the elements of x.
    pub fn rows<'x>(&'x self, backward: Option<&'x Backward<'_>>, elements: Range<usize>) -> &'x [T] {
        match (self.x, backward) {
            (Some(x), _) => &x[elements],
            (None, Some(Backward { dx, .. })) => &elements_of(&dx[elements.clone()])[..elements.len()],
            (None, None) => unreachable!("only dx overwrites x"),
        }
    }
}

/// Returns the bytes of floats as floats, or as twice as many bf16 numbers.
fn elements_of<T: Factor>(floats: &[f32]) -> &[T] {
    T::elements(f32::bytes(floats)).expect("floats are aligned for bf16")
}

pub(super) struct Losses<'a> {
    pub losses: &'a mut [f32],
    /// −log softmax without additional terms, if it is an output.
    pub likelihoods: Option<&'a mut [f32]>,
}

impl Losses<'_> {
    fn of_rows(&mut self, rows: Range<usize>) -> Losses<'_> {
        let likelihoods = self.likelihoods.as_deref_mut().map(|likelihoods| &mut likelihoods[rows.clone()]);
        Losses { losses: &mut self.losses[rows], likelihoods }
    }
}

pub(super) struct Backward<'a> {
    pub d_losses: Upstream<'a>,
    pub dx: &'a mut [f32],
    /// The gradient of the weight, or `None` if the weight is frozen.
    pub d_weight: Option<&'a mut [f32]>,
    pub accumulate: bool,
}

/// The gradients of the model's loss with respect to the losses of the rows.
#[derive(Clone, Copy)]
pub(super) enum Upstream<'a> {
    Everywhere(f32),
    /// A constant times the weight of each row.
    Weighted(f32, &'a [f32]),
    Each(&'a [f32], &'a Layout),
}

impl Upstream<'_> {
    fn at(self, row: usize) -> f32 {
        match self {
            Self::Everywhere(number) => number,
            Self::Weighted(number, weights) => number * weights[row],
            Self::Each(data, layout) => element(data, layout, row),
        }
    }
}

#[cfg(test)]
mod tests {
    use gapless_kernels::cpu::bf16::Stored as bf16;
    use gapless_testing::prelude::*;

    use super::super::chunks::{Part, Products};
    use super::super::statistics::STATISTICS;
    use super::super::{reference_gradients, reference_losses};
    use super::*;
    use crate::reference::Array;
    use gapless_kernels::LossTerms;
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
        counted: LossDefinition,
    }

    /// The operands and the results of a case, or of a part of its vocabulary.
    struct Run<T> {
        x: Vec<T>,
        weight: Vec<T>,
        targets: Vec<u32>,
        losses: Vec<f32>,
        dx: Vec<f32>,
        d_weight: Vec<f32>,
    }

    impl Case {
        /// Runs the case in several calls with the same number of sequences each. If `d_weight` is computed, each call
        /// adds to `d_weight`. If `over_x` is true, dx overwrites x; otherwise, dx is a separate tensor.
        fn run<T: Factor>(self, calls: usize, threads: usize, over_x: bool, products: Products) -> Run<T> {
            self.run_part(calls, threads, over_x, products, (0..self.vocabulary, None))
        }

        /// The operands of a case on a part of its vocabulary.
        fn operands<T: Factor>(self, entries: &Range<usize>) -> Run<T> {
            let Self { batch, sequence, width, vocabulary, .. } = self;
            let rows = batch * sequence;
            let targets = random(rows, 3).iter().map(|x| ((x + 1.0) * 0.5 * vocabulary as f32) as u32).collect();
            let weight = &random(vocabulary * width, 2)[entries.start * width..entries.end * width];
            Run {
                x: random(rows * width, 1).into_iter().map(T::store).collect(),
                weight: weight.iter().copied().map(T::store).collect(),
                targets,
                losses: vec![f32::NAN; rows],
                dx: vec![f32::NAN; rows * width],
                d_weight: vec![f32::NAN; entries.len() * width],
            }
        }

        /// The statistics of a part of the vocabulary, in several calls.
        fn statistics<T: Factor>(self, calls: usize, threads: usize, entries: &Range<usize>) -> Vec<f32> {
            let Self { batch, sequence, width, vocabulary, counted: loss } = self;
            let (rows, run) = (batch * sequence, self.operands::<T>(entries));
            let part = Part { first: entries.start, vocabulary };
            let dims = [batch / calls, sequence, width];
            let chunks = Chunks::new(&dims, &[entries.len(), width], T::DTYPE, Some(part));
            let mut memory = ScratchMemory::new(&chunks.scratch(Products::Logits, threads));
            let mut statistics = vec![f32::NAN; rows * STATISTICS];
            let calls = statistics.chunks_mut(rows / calls * STATISTICS).enumerate();
            for (call, statistics) in calls {
                let rows = call * chunks.rows..(call + 1) * chunks.rows;
                let x = Some(&run.x[rows.start * width..rows.end * width]);
                let inputs = Inputs { x, weight: &run.weight, targets: &run.targets[rows], loss, gathered: None };
                pool(threads).install(|| chunks.statistics(&inputs, statistics, memory.lend()));
            }
            statistics
        }

        /// Like [`Self::run`], on a part of the vocabulary, with the statistics of each rank.
        fn run_part<T: Factor>(
            self,
            calls: usize,
            threads: usize,
            over_x: bool,
            products: Products,
            (entries, of_ranks): (Range<usize>, Option<&[Vec<f32>]>),
        ) -> Run<T> {
            let Self { batch, sequence, width, vocabulary, counted: loss } = self;
            let rows = batch * sequence;
            let mut run = self.operands::<T>(&entries);
            if over_x {
                run.dx.iter_mut().zip(&run.x).for_each(|(dx, x)| *dx = x.load());
            }
            let part = of_ranks.map(|_| Part { first: entries.start, vocabulary });
            let chunks = Chunks::new(&[batch / calls, sequence, width], &[entries.len(), width], T::DTYPE, part);
            let mut memory = ScratchMemory::new(&chunks.scratch(products, threads));
            for call in 0..calls {
                let rows = call * rows / calls..(call + 1) * rows / calls;
                let elements = rows.start * width..rows.end * width;
                let of_rows = |rank: &Vec<f32>| rank[rows.start * STATISTICS..rows.end * STATISTICS].to_vec();
                let gathered: Option<Vec<f32>> = of_ranks.map(|ranks| ranks.iter().flat_map(of_rows).collect());
                let inputs = Inputs {
                    x: (!over_x).then_some(&run.x[elements.clone()]),
                    weight: &run.weight,
                    targets: &run.targets[rows.clone()],
                    loss,
                    gathered: gathered.as_deref(),
                };
                if let (Products::None, Some(gathered)) = (products, &gathered) {
                    let mut made = Losses { losses: &mut run.losses[rows], likelihoods: None };
                    pool(threads).install(|| chunks.losses_of(gathered, &mut made, loss));
                    continue;
                }
                let backward = Backward {
                    d_losses: Upstream::Everywhere(0.5),
                    dx: &mut run.dx[elements],
                    d_weight: (products == Products::Both).then_some(&mut run.d_weight),
                    accumulate: call > 0,
                };
                let mut made = Losses { losses: &mut run.losses[rows], likelihoods: None };
                pool(threads).install(|| chunks.pass(&inputs, &mut made, Some(backward), memory.lend()));
            }
            run
        }

        fn check<T: Factor>(self) {
            let batch = self.batch;
            let run = self.run::<T>(1, 2, false, Products::Both);
            let frozen = self.run::<T>(1, 2, true, Products::Dx);
            assert!(run.losses == frozen.losses && run.dx == frozen.dx, "{self:?} of a frozen weight");
            for other in [self.run::<T>(1, 3, true, Products::Both), self.run(batch, 1, false, Products::Both)] {
                assert!(run.losses == other.losses && run.dx == other.dx && run.d_weight == other.d_weight, "{self:?}");
            }
            self.compare(&run);
        }

        /// Runs the case on each part of its vocabulary. `ends` are the ends of the parts.
        fn check_parts<T: Factor>(self, ends: &[usize]) {
            let starts = [0].into_iter().chain(ends.iter().copied());
            let parts: Vec<Range<usize>> = starts.zip(ends).map(|(start, &end)| start..end).collect();
            let of_ranks: Vec<Vec<f32>> = parts.iter().map(|part| self.statistics::<T>(1, 2, part)).collect();
            let mut whole: Option<Run<T>> = None;
            for (part, of_rank) in parts.iter().zip(&of_ranks) {
                for (calls, threads) in [(1, 3), (self.batch, 1)] {
                    assert!(*of_rank == self.statistics::<T>(calls, threads, part), "statistics of {part:?}, {self:?}");
                }
                let run = |calls, threads, over_x, products| {
                    self.run_part::<T>(calls, threads, over_x, products, (part.clone(), Some(&of_ranks[..])))
                };
                let first = run(1, 2, false, Products::Both);
                for other in [run(1, 3, true, Products::Both), run(self.batch, 1, false, Products::Both)] {
                    let is_same = first.dx == other.dx && first.d_weight == other.d_weight;
                    assert!(is_same && first.losses == other.losses, "{part:?} of {self:?}");
                }
                assert!(first.dx == run(1, 1, true, Products::Dx).dx, "{part:?} of {self:?}");
                for (calls, threads) in [(1, 3), (self.batch, 1)] {
                    let losses = run(calls, threads, false, Products::None).losses;
                    assert!(first.losses == losses, "losses without products, {part:?} of {self:?}");
                }
                match &mut whole {
                    None => whole = Some(first),
                    Some(whole) => {
                        assert!(whole.losses == first.losses, "losses of {part:?} and other ranks, {self:?}");
                        whole.dx.iter_mut().zip(first.dx).for_each(|(sum, dx)| *sum += dx);
                        whole.weight.extend(first.weight);
                        whole.d_weight.extend(first.d_weight);
                    }
                }
            }
            let whole = whole.expect("there is a part");
            if parts.len() == 1 {
                let run = self.run::<T>(1, 2, false, Products::Both);
                let is_same = run.losses == whole.losses && run.dx == whole.dx && run.d_weight == whole.d_weight;
                assert!(is_same, "one part of {self:?}");
            }
            self.compare(&whole);
        }

        /// Compares the results of all of the vocabulary with the reference.
        fn compare<T: Factor>(self, run: &Run<T>) {
            let Self { batch, sequence, width, vocabulary, counted } = self;
            let array =
                |dims: &[usize], data: &[T]| Array::new(dims, data.iter().map(|x| f64::from(x.load())).collect());
            let (x, weight) = (array(&[batch, sequence, width], &run.x), array(&[vocabulary, width], &run.weight));
            let targets = Array::new(&[batch, sequence], run.targets.iter().map(|&x| f64::from(x)).collect());
            let losses = reference_losses(&x, &weight, &targets, &counted, None);
            let [dx, d_weight] = reference_gradients(&x, &weight, &targets, &targets.map(|_| 0.5), &counted, None);
            for (name, data, exact) in
                [("losses", &run.losses, losses), ("dx", &run.dx, dx), ("d_weight", &run.d_weight, d_weight)]
            {
                let square = |x: f64| x * x;
                let error: f64 = data.iter().zip(&exact.data).map(|(&a, &b)| square(f64::from(a) - b)).sum();
                let scale: f64 = exact.data.iter().map(|&x| square(x)).sum();
                // Sums of up to 700 f32 elements have an error of a few multiples of 2⁻²⁴. If the vocabulary has one
                // token, every result is a difference of terms of about 1, which is zero except for rounding.
                let rounding = 2f64.powi(-22) * (batch as f64 * sequence as f64).sqrt();
                // The gradients of logits are rounded to bf16, the losses are not.
                let relative = if T::IS_BF16 && name != "losses" { 2f64.powi(-9) } else { 1e-5 };
                assert!(error.sqrt() <= relative * scale.sqrt() + rounding, "{name} of {self:?}: {error} of {scale}");
            }
        }
    }

    generated! {
        #![cases(24)]
        #[test]
        fn losses_and_gradients_are_those_of_the_reference_however_the_batch_is_cut(
            (batch, sequence, width, vocabulary) in (1..4usize, 1..700usize, 1..9usize, 1..40usize),
            label_smoothing in prop::sample::select(vec![0.0, 0.1]), z_loss in prop::sample::select(vec![0.0, 0.01]),
            cap in prop::sample::select(vec![None, Some(1.5)]),
        ) {
            let counted = LossDefinition { terms: LossTerms { label_smoothing, z_loss }, cap };
            Case { batch, sequence, width, vocabulary, counted }.check::<f32>();
            Case { batch, sequence, width, vocabulary, counted }.check::<bf16>();
        }
    }

    #[test]
    fn parts_of_a_vocabulary_give_the_losses_and_gradients_of_the_whole() {
        let cases: [(usize, &[usize]); 6] =
            [(7, &[7]), (7, &[3, 7]), (33, &[1, 20, 33]), (33, &[11, 22, 33]), (50, &[12, 25, 37, 50]), (2, &[1, 2])];
        for (vocabulary, ends) in cases {
            for (terms, cap) in [
                (LossTerms::NONE, None),
                (LossTerms { label_smoothing: 0.1, z_loss: 0.01 }, None),
                (LossTerms { label_smoothing: 0.1, z_loss: 0.01 }, Some(1.5)),
            ] {
                let counted = LossDefinition { terms, cap };
                Case { batch: 3, sequence: 13, width: 5, vocabulary, counted }.check_parts::<f32>(ends);
                Case { batch: 2, sequence: 70, width: 8, vocabulary, counted }.check_parts::<bf16>(ends);
            }
        }
        // Several chunks.
        let counted = LossDefinition::default();
        Case { batch: 2, sequence: 513, width: 3, vocabulary: 50, counted }.check_parts::<f32>(&[17, 50]);
    }

    #[test]
    fn a_part_of_a_vocabulary_needs_no_more_scratch_than_the_whole() {
        for (x, vocabulary) in
            [([2, 1024, 768], 50_257), ([1, 4096, 4096], 32_000), ([3, 13, 5], 33), ([2, 700, 64], 50)]
        {
            let scratch = |entries: usize, products, threads| -> u64 {
                let part = (entries < vocabulary).then_some(Part { first: 0, vocabulary });
                Chunks::new(&x, &[entries, x[2]], f32::DTYPE, part).scratch(products, threads).iter().sum()
            };
            for products in [Products::Logits, Products::Dx, Products::Both] {
                for (threads, ranks) in [(1, 2), (3, 2), (3, 3), (8, 4)] {
                    let (part, whole) = (vocabulary.div_ceil(ranks), scratch(vocabulary, products, threads));
                    assert!(scratch(part, products, threads) <= whole, "{x:?}, {products:?}, 1 of {ranks} parts");
                }
            }
        }
    }

    #[test]
    fn a_piece_may_leave_a_rest() {
        let counted = LossDefinition::default();
        Case { batch: 2, sequence: 513, width: 5, vocabulary: 30, counted }.check::<f32>();
        Case { batch: 3, sequence: 100, width: 5, vocabulary: 30, counted }.check::<f32>();
    }

    /// Returns the numbers of rows of the chunks.
    fn chunks(x: &[usize], vocabulary: usize) -> Vec<usize> {
        Chunks::new(x, &[vocabulary, x[x.len() - 1]], f32::DTYPE, None).ranges().map(|range| range.len()).collect()
    }

    #[test]
    fn chunks_are_whole_sequences_or_pieces_of_one() {
        // A vocabulary no larger than the width needs no pieces. Short sequences are joined.
        assert_eq!(chunks(&[2, 1024, 256], 256), [1024, 1024]);
        assert_eq!(chunks(&[5, 100, 32], 50_000), [200, 200, 100]);
        // Every sequence is divided in the same way, into pieces of at least 256 rows.
        assert_eq!(chunks(&[2, 1024, 768], 50_257), [256; 8]);
        assert_eq!(chunks(&[1, 4096, 4096], 32_000), [512; 8]);
        assert_eq!(chunks(&[2, 700, 64], 5_000), [350; 4]);
        assert_eq!(chunks(&[2, 513, 64], 5_000), [257, 256, 257, 256]);
        // The first case has one row. The rows of the second case are not divided into sequences.
        assert_eq!(chunks(&[8], 100), [1]);
        assert_eq!(chunks(&[300, 8], 100), [300]);
    }
}

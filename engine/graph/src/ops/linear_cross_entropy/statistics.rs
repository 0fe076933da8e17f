//! Statistics of a rank's logits, from which ranks that divide a vocabulary compute the same losses.
//!
//! In: x, the rank's rows of the weight, the targets. Out: four numbers per row of x, which ranks gather and merge in the
//! order of their parts. Never: a buffer of all rows' logits.

use std::sync::Arc;

use gapless_kernels::cpu::gemm::{Epilogue, Factor, Mode};
use gapless_kernels::cpu::{Args, InPieces, Pieces, Scratch, math, reduce, rows_per_task, vectorize, with_float};
use gapless_kernels::cuda::{Launch, Operands};
use gapless_kernels::{Spec, Window};

use super::chunks::{Chunks, HeadOperands, Part, Products};
use super::pass::{FITS, Inputs, Losses};
use super::{LossDefinition, expect_head, reference_logits};
use crate::Op;
use crate::reference::{Array, Reference};

/// Number of statistics of a row.
pub(super) const STATISTICS: usize = 4;

/// The numbers that the loss of a row depends on, for all of the row's logits x or for those of a rank.
#[derive(Debug, Clone, Copy)]
pub(super) struct RowStatistics {
    /// The maximum logit.
    pub max: f32,
    /// Σ exp(x − max).
    pub sum: f32,
    /// The target's logit; 0 if it is not among the logits.
    pub logit: f32,
    /// Σ x.
    pub all: f32,
}

impl RowStatistics {
    /// Computes the statistics of a row of logits. `all` is computed only if `has_all` is true. If `keeps_logits` is
    /// false, exp(x − max) overwrites the logits x.
    #[inline(always)]
    pub fn of(logits: &mut [f32], logit: f32, keeps_logits: bool, has_all: bool) -> Self {
        let max = reduce::max(logits);
        let all = if has_all { reduce::sum(logits, |x| x) } else { 0.0 };
        let sum = if keeps_logits {
            reduce::sum(logits, |x| math::exp_normal(x - max))
        } else {
            exponentials(logits, max);
            reduce::sum(logits, |x| x)
        };
        Self { max, sum, logit, all }
    }

    /// Merges the statistics of all ranks for one row, in rank order. `gathered` is [ranks, `rows`, [`STATISTICS`]].
    #[inline(always)]
    pub fn merge(gathered: &[f32], rows: usize, row: usize) -> Self {
        let of_ranks = || gathered.chunks_exact(STATISTICS).skip(row).step_by(rows);
        let mut merged = Self { max: f32::NEG_INFINITY, sum: 0.0, logit: 0.0, all: 0.0 };
        for of_rank in of_ranks() {
            merged.max = merged.max.max(of_rank[0]);
        }
        for of_rank in of_ranks() {
            merged.sum += of_rank[1] * math::exp_normal(of_rank[0] - merged.max);
            merged.logit += of_rank[2];
            merged.all += of_rank[3];
        }
        merged
    }

    /// The log-sum-exp of the logits.
    #[inline(always)]
    pub fn lse(self) -> f32 {
        self.max + self.sum.ln()
    }
}

/// Replaces logits x by exp(x − max).
#[inline(always)]
pub(super) fn exponentials(logits: &mut [f32], max: f32) {
    for x in logits.iter_mut() {
        *x = math::exp_normal(*x - max);
    }
}

/// Replaces logits x by cap·tanh(x/cap).
#[inline(always)]
pub(super) fn apply_cap(logits: &mut [f32], cap: f32) {
    for x in logits.iter_mut() {
        *x = cap * math::tanh(*x / cap);
    }
}

impl Chunks {
    /// Computes the statistics of all rows, [rows, [`STATISTICS`]].
    pub fn statistics<T: Factor>(&self, inputs: &Inputs<'_, T>, statistics: &mut [f32], mut scratch: Scratch<'_>) {
        let &Self { width, vocabulary, part, .. } = self;
        let (logits, tasks, cap) =
            (scratch.take::<f32>(), rows_per_task(vocabulary), inputs.loss.cap.map(|cap| cap as f32));
        let scratch = &mut scratch;
        for range in self.ranges() {
            let logits = &mut logits[..range.len() * vocabulary];
            let x = inputs.rows(None, range.start * width..range.end * width);
            let product = self.logits(range.len());
            product.run(x, inputs.weight, logits, Mode::Overwrite, Epilogue::default(), scratch).expect(FITS);
            let targets = inputs.targets[range.clone()].pieces(tasks);
            let of_rows = statistics[range.start * STATISTICS..range.end * STATISTICS].pieces_mut(tasks * STATISTICS);
            targets.zip(of_rows).zip(logits.pieces_mut(tasks * vocabulary)).for_each(|((targets, of_rows), logits)| {
                let rows = targets.iter().zip(of_rows.chunks_exact_mut(STATISTICS));
                vectorize!({
                    for ((&target, of_row), logits) in rows.zip(logits.chunks_exact_mut(vocabulary)) {
                        if let Some(cap) = cap {
                            apply_cap(logits, cap);
                        }
                        let logit = logits.get(part.index(target)).copied().unwrap_or(0.0);
                        let RowStatistics { max, sum, logit, all } = RowStatistics::of(logits, logit, false, true);
                        of_row.copy_from_slice(&[max, sum, logit, all]);
                    }
                });
            });
        }
    }

    /// Computes the losses of all rows from the statistics of all ranks, [ranks, rows, [`STATISTICS`]].
    pub fn losses_of(&self, gathered: &[f32], made: &mut Losses<'_>, definition: LossDefinition) {
        let (all, terms) = (self.rows, definition.terms.for_row(self.part.vocabulary));
        let rows = rows_per_task(gathered.len() / all.max(1));
        let likelihoods = made.likelihoods.as_deref_mut().map(|likelihoods| likelihoods.pieces_mut(rows));
        made.losses.pieces_mut(rows).zip(likelihoods).enumerate().for_each(|(task, (losses, mut likelihoods))| {
            vectorize!({
                for (row, loss) in losses.iter_mut().enumerate() {
                    let merged = RowStatistics::merge(gathered, all, task * rows + row);
                    *loss = terms.loss(merged.lse(), merged.logit, merged.all);
                    if let Some(likelihoods) = &mut likelihoods {
                        likelihoods[row] = merged.lse() - merged.logit;
                    }
                }
            });
        });
    }
}

/// Statistics of the logits x·Wᵀ for a part of the vocabulary.
///
/// - Inputs: x [.., width], the rank's rows of the weight W, [entries, width], targets [..].
/// - Output: f32 [.., 4], for each row the maximum logit, Σ exp(logit − maximum), the target's logit (0 if the rank does
///   not hold its row of the weight), and Σ logits, all after the soft cap.
#[derive(Debug, Clone, Copy)]
pub(super) struct HeadStatistics {
    pub cap: Option<f64>,
    /// `None` if the rank holds the whole vocabulary.
    pub part: Option<Part>,
}

impl HeadStatistics {
    fn loss(&self) -> LossDefinition {
        LossDefinition { cap: self.cap, ..LossDefinition::default() }
    }
}

impl Op for HeadStatistics {
    fn name(&self) -> &'static str {
        "linear_cross_entropy_statistics"
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        let rows = expect_head(inputs, self.part)?;
        Ok(vec![Spec::f32([rows, &[STATISTICS]].concat())])
    }

    fn on_parts(&self, inputs: &[Window], _: &[Window]) -> Option<Arc<dyn Op>> {
        let part = Some(Part::of(&inputs[1])?);
        Some(Arc::new(Self { part, ..*self }))
    }

    fn flops(&self, inputs: &[Spec], _: &[Spec]) -> u64 {
        Chunks::of(inputs, self.part).flops(Products::Logits)
    }

    fn workspace(&self, inputs: &[Spec], _: &[Spec], threads: usize) -> Vec<u64> {
        Chunks::of(inputs, self.part).scratch(Products::Logits, threads)
    }

    /// The kernel converts bf16 operands when it packs them.
    fn reads_bf16(&self, index: usize) -> bool {
        index < 2
    }

    fn run(&self, args: &mut Args<'_>) {
        let chunks = Chunks::new(args.input_dims(0), args.input_dims(1), args.input_dtype(1), self.part);
        let (statistics, scratch) = (args.output(0), args.workspace());
        with_float!(args.input_dtype(1), T => {
            chunks.statistics(&Inputs::<T>::of(args, self.loss(), None), statistics, scratch);
        });
    }

    fn cuda_workspace(&self, inputs: &[Spec], _: &[Spec]) -> Vec<u64> {
        Chunks::of(inputs, self.part).cuda_workspace(inputs[0].dtype, Products::Logits)
    }
    fn cuda_bytes_again(&self, inputs: &[Spec], _: &[Spec]) -> u64 {
        Chunks::of(inputs, self.part).cuda_logit_bytes(inputs[0].dtype, Products::Logits)
    }
    fn cuda(&self, operands: &Operands<'_>) -> Option<Vec<Launch>> {
        let (loss, statistics) = (self.loss(), operands.outputs[0].address);
        let head = HeadOperands { operands, loss, losses: 0, likelihoods: 0, weights: 0, gathered: None, statistics };
        Chunks::of_operands(operands, self.part).launches(&head, None, 0)
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        let (x, weight, targets) = (args.input(0), args.input(1), args.input(2));
        let first = self.part.map_or(0, |part| part.first);
        let of_row = |(logits, &target): (Vec<f64>, &f64)| {
            let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum = logits.iter().map(|x| (x - max).exp()).sum();
            let logit = (target as usize).checked_sub(first).and_then(|index| logits.get(index).copied());
            [max, sum, logit.unwrap_or(0.0), logits.iter().sum()]
        };
        let data = reference_logits(x, weight, self.cap).zip(&targets.data).flat_map(of_row).collect();
        vec![Array::new(&[&targets.dims[..], &[STATISTICS]].concat(), data)]
    }
}

/// Merges the statistics of all ranks for one row. `gathered` is [ranks, .., 4]. Returns the log-sum-exp of the row's
/// logits, the target's logit, and the sum of the logits.
pub(super) fn reference_merged(gathered: &Array, row: usize) -> [f64; 3] {
    let rows = gathered.data.len() / STATISTICS / gathered.dims[0];
    let of_ranks = || gathered.rows().skip(row).step_by(rows);
    let max = of_ranks().map(|x| x[0]).fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = of_ranks().map(|x| x[1] * (x[0] - max).exp()).sum();
    [max + sum.ln(), of_ranks().map(|x| x[2]).sum(), of_ranks().map(|x| x[3]).sum()]
}

#[cfg(test)]
mod tests {
    use gapless_kernels::{LossTerms, Numbers, Stream};

    use super::super::{LinearCrossEntropy, LinearCrossEntropyGrad};
    use super::*;
    use crate::ops::OutputTypes;
    use crate::rule::Rule;

    fn reference(op: &dyn Op, inputs: &[&Array]) -> Vec<Array> {
        op.reference(&Reference { inputs: inputs.to_vec(), stream: Stream::new(1, 1, 0) })
    }

    fn random(dims: &[usize], seed: u64) -> Array {
        let numbers = Numbers::from_seed(seed);
        Array::new(dims, (0..dims.iter().product::<usize>()).map(|index| numbers.normal(index)).collect())
    }

    fn assert_equal(name: &str, parts: &Array, whole: &Array, context: &dyn std::fmt::Debug) {
        assert_eq!(parts.dims, whole.dims, "{name} of {context:?}");
        for (part, whole) in parts.data.iter().zip(&whole.data) {
            assert!((part - whole).abs() <= 1e-12 * whole.abs().max(1.0), "{name} of {context:?}: {part}, {whole}");
        }
    }

    /// Compares the reference of an operation on parts of the vocabulary with its reference on the whole. The operation
    /// has `losses` outputs before dx.
    fn check(op: &dyn Op, losses: usize, others: &[&Array], vocabulary: usize, ends: &[usize]) {
        let (rows, width) = ([2, 3], 5);
        let (x, weight) = (random(&[rows[0], rows[1], width], 1), random(&[vocabulary, width], 2));
        let targets = Array::new(&rows, (0..6).map(|row| (row * 17 % vocabulary) as f64).collect());
        let whole = reference(op, &[&[&x, &weight, &targets][..], others].concat());

        let starts = [0].into_iter().chain(ends.iter().copied());
        let part = |(start, &end): (usize, &usize)| {
            let held = vec![vec![start..end], vec![0..width]];
            let windows = vec![Window::whole(&x.dims), Window::of(&weight.dims, held), Window::whole(&rows)];
            let data = weight.data[start * width..end * width].to_vec();
            (windows, Array::new(&[end - start, width], data))
        };
        let parts: Vec<(Vec<Window>, Array)> = starts.zip(ends).map(part).collect();
        let (statistics, _) = op.statistics().expect("a head has statistics");
        let mut gathered = Array::new(&[0, 2, 3, STATISTICS], Vec::new());
        for (windows, weight) in &parts {
            let statistics = statistics.on_parts(windows, &[]).expect("a part");
            gathered.data.extend(&reference(&*statistics, &[&x, weight, &targets])[0].data);
            gathered.dims[0] += 1;
        }
        let made: Vec<Vec<Array>> = parts
            .iter()
            .map(|(windows, weight)| {
                let op = op.on_parts(windows, &[]).expect("a part");
                reference(&*op, &[&[&x, weight, &targets][..], others, &[&gathered]].concat())
            })
            .collect();
        for (index, whole) in whole.iter().enumerate() {
            let of_parts = made.iter().map(|made| &made[index]);
            if index < losses {
                assert!(of_parts.clone().all(|part| *part == made[0][index]), "losses of the ranks of {op:?}");
                assert_equal("losses", &made[0][index], whole, &op);
            } else if index == losses {
                let sum = of_parts.cloned().reduce(|a, b| a.zip(&b, |a, b| a + b)).expect("a part");
                assert_equal("dx", &sum, whole, &op);
            } else {
                let data = of_parts.flat_map(|part| part.data.clone()).collect();
                assert_equal("d_weight", &Array::new(&whole.dims, data), whole, &op);
            }
        }
    }

    #[test]
    fn the_reference_of_parts_is_that_of_the_whole() {
        let (weights, d_losses) = (random(&[2, 3], 3).map(f64::abs), random(&[2, 3], 4));
        let smooth = LossTerms { label_smoothing: 0.1, z_loss: 0.01 };
        let cases: [(usize, &[usize]); 7] = [
            (7, &[3, 7]),
            (7, &[1, 2, 7]),
            (33, &[16, 33]),
            (33, &[11, 22, 33]),
            (33, &[8, 9, 24, 33]),
            (50, &[12, 25, 37, 50]),
            (50, &[49, 50]),
        ];
        for (vocabulary, ends) in cases {
            for (terms, cap) in
                [(LossTerms::NONE, None), (smooth, None), (LossTerms::NONE, Some(0.7)), (smooth, Some(0.7))]
            {
                for gradient in [None, Some(0.25)] {
                    for has_d_weight in [true, false] {
                        let head = LinearCrossEntropy { has_d_weight, ..LinearCrossEntropy::new(gradient) };
                        let head = head.with_terms(terms).with_cap(cap);
                        check(&head, 1, &[], vocabulary, ends);
                        check(&head.with_likelihoods(), 2, &[&weights], vocabulary, ends);
                    }
                }
                let loss = LossDefinition { terms, cap };
                for has_d_weight in [true, false] {
                    let types = OutputTypes::default();
                    let grad = LinearCrossEntropyGrad { has_d_weight, loss, types, part: None };
                    check(&grad, 0, &[&d_losses], vocabulary, ends);
                }
            }
        }
    }

    #[test]
    fn losses_are_no_summands_and_dx_is_one() {
        let (x, weight, rows) = (Spec::f32(vec![2, 3, 5]), Spec::f32(vec![7, 5]), Spec::f32(vec![2, 3]));
        let targets = Spec { dtype: candle_core::DType::U32, ..rows.clone() };
        let (unweighted, weighted) = ([x, weight, targets], rows);
        let weighted = [&unweighted[..], &[weighted]].concat();
        let rule = |head: &LinearCrossEntropy, inputs: &[Spec]| {
            let outputs = head.infer(inputs).expect("the shapes fit");
            head.rule(inputs, &outputs)
        };
        let head = LinearCrossEntropy::new(None);
        assert_eq!(rule(&head, &unweighted), Some(Rule::labels("* W, v' W, * -> *[02]")));
        let head = LinearCrossEntropy::new(Some(1.0));
        assert_eq!(rule(&head, &unweighted), Some(Rule::labels("* W, v' W, * -> *[02], * W, v' W")));
        let frozen = LinearCrossEntropy { has_d_weight: false, ..head.with_likelihoods() };
        assert_eq!(rule(&frozen, &weighted), Some(Rule::labels("* W, v' W, *, * -> *[023], *[023], * W")));
    }

    #[test]
    fn a_whole_vocabulary_is_no_part() {
        let windows = [Window::whole(&[2, 5]), Window::whole(&[7, 5]), Window::whole(&[2])];
        let head = LinearCrossEntropy::new(None);
        assert!(head.on_parts(&windows, &[]).is_none());
        assert!(head.statistics().expect("it has statistics").0.on_parts(&windows, &[]).is_none());
    }
}

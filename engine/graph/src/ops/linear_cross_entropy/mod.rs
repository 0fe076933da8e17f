//! The head of a language model fused with its loss, so that the logits are never stored as a whole.
//!
//! Rows are processed in chunks. For each chunk, the logits are computed into scratch and converted to losses. Then the
//! gradient of the logits overwrites them. Right after that, the chunk's rows of dx and its share of d_weight are
//! computed from this gradient. So forward and backward are one pass in training, and no logit is computed twice (Hsu
//! et al., "Liger Kernel", arXiv 2410.10989, section 3.2).
//!
//! If ranks divide the vocabulary, the softmax of a row needs the logits of all ranks. So each rank first computes
//! statistics of its logits (`HeadStatistics`), all ranks gather them, and the pass then reads the merged statistics. It
//! computes the same losses on all ranks, the gradient of the rank's rows of the weight, and a summand of dx.

mod chunks;
mod pass;
mod statistics;

use std::sync::Arc;

use candle_core::{DType, Layout};
use gapless_kernels::cpu::{Args, with_float};
use gapless_kernels::cuda::{Launch, Operands, launch};
use gapless_kernels::{LossTerms, Spec, Window};

use self::chunks::{Chunks, HeadOperands, Part, Products};
use self::pass::{Backward, Inputs, Losses, Upstream};
use self::statistics::{HeadStatistics, STATISTICS, reference_merged};
use super::{OutputTypes, is_positive_f32};
use crate::error::{Error, Result};
use crate::reference::{Array, Reference};
use crate::rule::Rule;
use crate::tensor::Tensor;
use crate::{Gradient, Op};

/// The loss −log softmax(x·Wᵀ)`[target]`.
///
/// - Inputs: x [.., width], weight W [vocabulary, width], targets [..], and optionally a weight of each loss, f32 [..].
/// - Output 0: the losses [..], including the additional terms of [`Self::with_terms`].
/// - With [`Self::with_likelihoods`], the next output is −log softmax without additional terms, multiplied by the same
///   weights. It has no gradient.
/// - If the gradient of the losses is known ([`Self::new`]), the last outputs are dx and d_weight.
/// - On a part of the vocabulary ([`Op::on_parts`]), W and d_weight are the rank's rows, dx is the rank's summand, and the
///   last input is the statistics of all ranks ([`Op::statistics`]), f32 [ranks, .., 4].
#[derive(Debug, Clone, Copy)]
pub struct LinearCrossEntropy {
    gradient: Option<f64>,
    /// True if d_weight is among the outputs.
    has_d_weight: bool,
    loss: LossDefinition,
    has_likelihoods: bool,
    types: OutputTypes<4>,
    /// The part of the vocabulary that the rank holds; `None` if it holds all.
    part: Option<Part>,
}

/// The settings with which a loss is computed from logits.
#[derive(Debug, Clone, Copy, Default)]
struct LossDefinition {
    /// Terms of the loss in addition to −log softmax.
    terms: LossTerms,
    /// Soft cap: a logit x is replaced by cap·tanh(x/cap).
    cap: Option<f64>,
}

impl LinearCrossEntropy {
    /// Creates the operation. `gradient` is the gradient of every loss, if it is known when the graph is built. If
    /// `gradient` is given, the operation has dx and d_weight as additional outputs.
    pub fn new(gradient: Option<f64>) -> Self {
        let (loss, types) = (LossDefinition::default(), OutputTypes::default());
        Self { gradient, has_d_weight: true, loss, has_likelihoods: false, types, part: None }
    }

    /// Sets terms of the loss in addition to −log softmax.
    #[must_use]
    pub fn with_terms(self, terms: LossTerms) -> Self {
        Self { loss: LossDefinition { terms, ..self.loss }, ..self }
    }

    /// Sets a soft cap: logits x are replaced by cap·tanh(x/cap) (Gemma 2, arXiv 2408.00118, section 2).
    #[must_use]
    pub fn with_cap(self, cap: Option<f64>) -> Self {
        Self { loss: LossDefinition { cap, ..self.loss }, ..self }
    }

    /// Adds an output with −log softmax, without additional terms.
    #[must_use]
    pub fn with_likelihoods(self) -> Self {
        Self { has_likelihoods: true, ..self }
    }

    /// Index of the output dx.
    fn dx(&self) -> usize {
        if self.has_likelihoods { 2 } else { 1 }
    }

    fn products(&self) -> Products {
        match (self.gradient, self.has_d_weight) {
            (None, _) if self.part.is_some() => Products::None,
            (None, _) => Products::Logits,
            (Some(_), false) => Products::Dx,
            (Some(_), true) => Products::Both,
        }
    }

    /// True if the losses have weights, for this number of inputs.
    fn has_weights(&self, inputs: usize) -> bool {
        inputs > 3 + usize::from(self.part.is_some())
    }
}

/// Checks x [.., width], the rows of the weight, and the targets. Returns the dimensions of the rows of x.
fn expect_head(inputs: &[Spec], part: Option<Part>) -> Result<&[usize], String> {
    super::expect_float(&inputs[..2])?;
    super::expect_rank(&inputs[0], 1)?;
    super::expect_ids("targets", &inputs[2])?;
    let (&last, rows) = inputs[0].dims().split_last().expect("rank was checked");
    let &[entries, width] = inputs[1].dims() else { return Err("the weight must be [vocabulary, width]".into()) };
    if last != width {
        return Err(format!("the input's last dimension is {last}, the weight takes {width}"));
    }
    if inputs[2].dims() != rows {
        return Err("targets must have the shape of the input without its width".into());
    }
    match part {
        Some(Part { first, vocabulary }) if entries == 0 || first + entries > vocabulary => {
            Err(format!("{entries} rows from row {first} on are not a part of a vocabulary of {vocabulary}"))
        }
        _ => Ok(rows),
    }
}

/// Checks the last input of an operation on a part of the vocabulary: the statistics of all ranks.
fn expect_statistics(inputs: &[Spec], part: Option<Part>) -> Result<(), String> {
    let (Some(_), Some(gathered)) = (part, inputs.last()) else { return Ok(()) };
    let ranks = gathered.dims().first().copied().unwrap_or(0);
    let dims = [&[ranks.max(1)][..], inputs[2].dims(), &[STATISTICS]].concat();
    match *gathered == Spec::f32(dims) {
        true => Ok(()),
        false => Err(format!("statistics must be f32 [ranks, .., {STATISTICS}] for targets {:?}", inputs[2].dims())),
    }
}

impl Op for LinearCrossEntropy {
    fn name(&self) -> &'static str {
        "linear_cross_entropy"
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        let rows = expect_head(inputs, self.part)?;
        expect_statistics(inputs, self.part)?;
        if self.has_weights(inputs.len()) && inputs[3] != Spec::f32(rows.to_vec()) {
            return Err("weights must be f32 in the shape of the targets".into());
        }
        if let Some(cap) = self.loss.cap.filter(|&cap| !is_positive_f32(cap)) {
            return Err(format!("the cap {cap} of the logits is not a positive number in f32"));
        }
        let losses = vec![Spec::f32(rows.to_vec()); self.dx()];
        Ok(match self.gradient {
            None => losses,
            Some(_) => {
                let d_weight = self.has_d_weight.then(|| inputs[1].clone());
                self.types.apply_to(losses.into_iter().chain([inputs[0].clone()]).chain(d_weight))
            }
        })
    }

    /// The losses are no summands, because ranks compute them from the statistics of all ranks.
    fn rule(&self, inputs: &[Spec], outputs: &[Spec]) -> Option<Rule> {
        let (weights, losses) = if self.has_weights(inputs.len()) { (", *", "*[023]") } else { ("", "*[02]") };
        let gradients = ["* W", "v' W"].into_iter().filter(|_| self.gradient.is_some());
        let made: Vec<&str> = vec![losses; self.dx()].into_iter().chain(gradients).take(outputs.len()).collect();
        let rule = format!("* W, v' W, *{weights} -> {}", made.join(", "));
        self.part.is_none().then(|| Rule::Labels(rule.into()))
    }

    fn on_parts(&self, inputs: &[Window], _: &[Window]) -> Option<Arc<dyn Op>> {
        let part = Some(Part::of(&inputs[1])?);
        Some(Arc::new(Self { part, ..*self }))
    }

    fn statistics(&self) -> Option<(Arc<dyn Op>, usize)> {
        Some((Arc::new(HeadStatistics { cap: self.loss.cap, part: self.part }), 3))
    }

    fn gradient(&self, g: &mut Gradient) -> Result<()> {
        if self.part.is_some() {
            // A part has been taken of a graph that has its gradients.
            return Err(Error::NoGradient { op: self.name().into(), input: 0 });
        }
        if self.has_likelihoods {
            g.require_unused(self, 1)?;
        }
        if !g.wants(1) {
            let [dx] = match g.constant(0) {
                Some(number) => g.compute_in_forward(Self { gradient: Some(number), has_d_weight: false, ..*self })?,
                None => self.gradient_in_backward(g, false)?,
            };
            g.accumulate(0, dx);
            return Ok(());
        }
        let [dx, d_weight] = match g.constant(0) {
            Some(number) => g.compute_in_forward(Self { gradient: Some(number), ..*self })?,
            None => self.gradient_in_backward(g, true)?,
        };
        if g.wants(0) {
            g.accumulate(0, dx);
        }
        g.accumulate(1, d_weight);
        Ok(())
    }

    fn flops(&self, inputs: &[Spec], _: &[Spec]) -> u64 {
        Chunks::of(inputs, self.part).flops(self.products())
    }

    fn inplace(&self) -> &[(usize, usize)] {
        match (self.gradient, self.has_likelihoods) {
            (None, _) => &[],
            (Some(_), false) => &[(0, 1)],
            (Some(_), true) => &[(0, 2)],
        }
    }

    fn accumulates(&self, index: usize) -> bool {
        index == self.dx() + 1
    }

    fn with_output_dtype(&self, index: usize, dtype: DType) -> Option<Arc<dyn Op>> {
        (index == self.dx() + 1)
            .then(|| Arc::new(Self { types: self.types.with(index, dtype), ..*self }) as Arc<dyn Op>)
    }

    fn workspace(&self, inputs: &[Spec], _: &[Spec], threads: usize) -> Vec<u64> {
        Chunks::of(inputs, self.part).scratch(self.products(), threads)
    }

    /// The kernel converts bf16 operands when it packs them.
    fn reads_bf16(&self, index: usize) -> bool {
        index < 2
    }

    /// The gradients of the logits are rounded.
    fn rounds_intermediates(&self) -> bool {
        true
    }

    fn run(&self, args: &mut Args<'_>) {
        let chunks = Chunks::new(args.input_dims(0), args.input_dims(1), args.input_dtype(1), self.part);
        let (losses, scratch, dx) = (args.output(0), args.workspace(), self.dx());
        let mut likelihoods = self.has_likelihoods.then(|| args.output(1));
        let weights = self.has_weights(args.inputs()).then(|| args.input::<f32>(3));
        let gathered = self.part.map(|_| args.input::<f32>(args.inputs() - 1));
        let upstream = |number: f32| weights.map_or(Upstream::Everywhere(number), |w| Upstream::Weighted(number, w));
        let backward = self.gradient.map(|number| Backward {
            d_losses: upstream(number as f32),
            dx: args.output(dx),
            d_weight: self.has_d_weight.then(|| args.output(dx + 1)),
            accumulate: self.has_d_weight && args.accumulate(dx + 1),
        });
        let mut made = Losses { losses, likelihoods: likelihoods.as_deref_mut() };
        match gathered.filter(|_| backward.is_none()) {
            Some(gathered) => chunks.losses_of(gathered, &mut made, self.loss),
            None => with_float!(args.input_dtype(1), T => {
                chunks.pass(&Inputs::<T>::of(args, self.loss, gathered), &mut made, backward, scratch);
            }),
        }
        if let Some(weights) = weights {
            for made in [Some(losses), likelihoods].into_iter().flatten() {
                made.iter_mut().zip(weights).for_each(|(loss, weight)| *loss *= weight);
            }
        }
    }
    fn cuda_workspace(&self, inputs: &[Spec], _: &[Spec]) -> Vec<u64> {
        Chunks::of(inputs, self.part).cuda_workspace(inputs[0].dtype, self.products())
    }
    fn cuda_bytes_again(&self, inputs: &[Spec], _: &[Spec]) -> u64 {
        Chunks::of(inputs, self.part).cuda_logit_bytes(inputs[0].dtype, self.products())
    }
    fn cuda(&self, operands: &Operands<'_>) -> Option<Vec<Launch>> {
        let chunks = Chunks::of_operands(operands, self.part);
        let upstream = self.gradient.map(|number| launch::Upstream::Everywhere(number as f32));
        let weights = if self.has_weights(operands.inputs.len()) { operands.inputs[3].address } else { 0 };
        let gathered = operands.inputs.last().filter(|_| self.part.is_some());
        let (dx, losses) = (self.dx(), operands.outputs[0].address);
        let likelihoods = if self.has_likelihoods { operands.outputs[1].address } else { 0 };
        let head = HeadOperands { operands, loss: self.loss, losses, likelihoods, weights, gathered, statistics: 0 };
        chunks.launches(&head, upstream.zip(operands.outputs.get(dx..)), dx + 1)
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        let (x, weight, targets) = (args.input(0), args.input(1), args.input(2));
        let weights = if self.has_weights(args.inputs()) { args.input(3).clone() } else { targets.map(|_| 1.0) };
        let gathered = self.part.map(|part| (part, args.input(args.inputs() - 1)));
        let times = |losses: Array| {
            let data = losses.data.iter().zip(&weights.data).map(|(loss, weight)| loss * weight).collect();
            Array::new(&losses.dims, data)
        };
        let alone = LossDefinition { terms: LossTerms::NONE, ..self.loss };
        let likelihoods = self.has_likelihoods.then(|| times(reference_losses(x, weight, targets, &alone, gathered)));
        let losses = [times(reference_losses(x, weight, targets, &self.loss, gathered))].into_iter().chain(likelihoods);
        let Some(number) = self.gradient else { return losses.collect() };
        let d_losses = weights.map(|weight| number * weight);
        let [dx, d_weight] = reference_gradients(x, weight, targets, &d_losses, &self.loss, gathered);
        losses.chain([dx]).chain(self.has_d_weight.then_some(d_weight)).collect()
    }
}

/// The gradients (dx, d_weight) from (x, weight, targets, d_losses), for losses whose gradient is known only in the
/// backward. The logits are recomputed. On a part of the vocabulary, the last input is the statistics of all ranks.
#[derive(Debug, Clone, Copy)]
struct LinearCrossEntropyGrad {
    /// True if d_weight is among the outputs.
    has_d_weight: bool,
    loss: LossDefinition,
    types: OutputTypes<2>,
    part: Option<Part>,
}

impl LinearCrossEntropy {
    fn gradient_in_backward<const MADE: usize>(&self, g: &Gradient, has_d_weight: bool) -> Result<[Tensor; MADE]> {
        let d_losses = if g.inputs() > 3 { g.grad(0).mul(&g.input(3))? } else { g.grad(0) };
        let inputs = [&g.input(0), &g.input(1), &g.input(2), &d_losses];
        let op = LinearCrossEntropyGrad { has_d_weight, loss: self.loss, types: OutputTypes::default(), part: None };
        Tensor::apply_op(op, &inputs)
    }
}

impl Op for LinearCrossEntropyGrad {
    fn name(&self) -> &'static str {
        "linear_cross_entropy_grad"
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        expect_head(inputs, self.part)?;
        expect_statistics(inputs, self.part)?;
        let d_weight = self.has_d_weight.then(|| inputs[1].clone());
        Ok(self.types.apply_to([inputs[0].clone()].into_iter().chain(d_weight)))
    }

    fn rule(&self, _: &[Spec], _: &[Spec]) -> Option<Rule> {
        let rule = match self.has_d_weight {
            true => "* W, v' W, *, * -> * W, v' W",
            false => "* W, v' W, *, * -> * W",
        };
        self.part.is_none().then_some(Rule::labels(rule))
    }

    fn on_parts(&self, inputs: &[Window], _: &[Window]) -> Option<Arc<dyn Op>> {
        let part = Some(Part::of(&inputs[1])?);
        Some(Arc::new(Self { part, ..*self }))
    }

    fn statistics(&self) -> Option<(Arc<dyn Op>, usize)> {
        Some((Arc::new(HeadStatistics { cap: self.loss.cap, part: self.part }), 3))
    }

    fn reads_strides(&self, index: usize, _: &Layout) -> bool {
        index == 3
    }

    fn flops(&self, inputs: &[Spec], _: &[Spec]) -> u64 {
        Chunks::of(inputs, self.part).flops(Products::of_backward(self.has_d_weight))
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
        let chunks = Chunks::of(inputs, self.part);
        let products = Products::of_backward(self.has_d_weight);
        [vec![4 * chunks.rows as u64], chunks.scratch(products, threads)].concat()
    }

    /// The kernel converts bf16 operands when it packs them.
    fn reads_bf16(&self, index: usize) -> bool {
        index < 2
    }

    /// The gradients of the logits are rounded.
    fn rounds_intermediates(&self) -> bool {
        true
    }

    fn run(&self, args: &mut Args<'_>) {
        let chunks = Chunks::new(args.input_dims(0), args.input_dims(1), args.input_dtype(1), self.part);
        // The forward has already returned the losses. The pass recomputes the losses into scratch, where they are not
        // used.
        let mut scratch = args.workspace();
        let losses = scratch.take();
        let (d_losses, layout) = args.strided(3);
        let backward = Backward {
            d_losses: Upstream::Each(d_losses, layout),
            dx: args.output(0),
            d_weight: self.has_d_weight.then(|| args.output(1)),
            accumulate: self.has_d_weight && args.accumulate(1),
        };
        let mut made = Losses { losses, likelihoods: None };
        let gathered = self.part.map(|_| args.input(4));
        with_float!(args.input_dtype(1), T => {
            chunks.pass(&Inputs::<T>::of(args, self.loss, gathered), &mut made, Some(backward), scratch);
        });
    }
    fn cuda_workspace(&self, inputs: &[Spec], _: &[Spec]) -> Vec<u64> {
        let chunks = Chunks::of(inputs, self.part);
        let products = Products::of_backward(self.has_d_weight);
        [chunks.cuda_workspace(inputs[0].dtype, products), vec![4 * chunks.rows as u64]].concat()
    }
    fn cuda_bytes_again(&self, inputs: &[Spec], _: &[Spec]) -> u64 {
        Chunks::of(inputs, self.part).cuda_logit_bytes(inputs[0].dtype, Products::of_backward(self.has_d_weight))
    }
    fn cuda(&self, operands: &Operands<'_>) -> Option<Vec<Launch>> {
        let chunks = Chunks::of_operands(operands, self.part);
        // The forward has already returned the losses. The pass recomputes the losses into scratch, where they are not
        // used.
        let &[.., losses] = operands.workspace else { return None };
        let upstream = launch::Upstream::Each(&operands.inputs[3], 0);
        let gathered = operands.inputs.last().filter(|_| self.part.is_some());
        let head =
            HeadOperands { operands, loss: self.loss, losses, likelihoods: 0, weights: 0, gathered, statistics: 0 };
        chunks.launches(&head, Some((upstream, operands.outputs)), 1)
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        let (x, weight, targets, d_losses) = (args.input(0), args.input(1), args.input(2), args.input(3));
        let gathered = self.part.map(|part| (part, args.input(4)));
        let [dx, d_weight] = reference_gradients(x, weight, targets, d_losses, &self.loss, gathered);
        [dx].into_iter().chain(self.has_d_weight.then_some(d_weight)).collect()
    }
}

/// Returns the logits of each row, after the soft cap.
fn reference_logits<'a>(x: &'a Array, weight: &'a Array, cap: Option<f64>) -> impl Iterator<Item = Vec<f64>> + 'a {
    let capped = move |x: f64| cap.map_or(x, |cap| cap * (x / cap).tanh());
    x.rows().map(move |x| weight.rows().map(|w| capped(x.iter().zip(w).map(|(x, w)| x * w).sum())).collect())
}

/// `gathered` is a rank's part of the vocabulary and the statistics of all ranks, if ranks divide the vocabulary.
fn reference_losses(
    x: &Array,
    weight: &Array,
    targets: &Array,
    &LossDefinition { terms, cap }: &LossDefinition,
    gathered: Option<(Part, &Array)>,
) -> Array {
    let losses = match gathered {
        None => {
            let logits = reference_logits(x, weight, cap);
            logits.zip(&targets.data).map(|(logits, &target)| terms.exact(&logits, target as usize).0).collect()
        }
        Some((part, gathered)) => (0..targets.data.len())
            .map(|row| {
                let [lse, logit, sum] = reference_merged(gathered, row);
                terms.exact_loss(lse, logit, sum, part.vocabulary)
            })
            .collect(),
    };
    Array::new(&targets.dims, losses)
}

fn reference_gradients(
    x: &Array,
    weight: &Array,
    targets: &Array,
    d_losses: &Array,
    &LossDefinition { terms, cap }: &LossDefinition,
    gathered: Option<(Part, &Array)>,
) -> [Array; 2] {
    let width = weight.dims[1];
    let (mut dx, mut d_weight) = (Array::zeros(&x.dims), Array::zeros(&weight.dims));
    for (row, logits) in reference_logits(x, weight, cap).enumerate() {
        let target = targets.data[row] as usize;
        let gradient = match gathered {
            None => terms.exact(&logits, target).1,
            Some((Part { first, vocabulary }, gathered)) => {
                let held = (first..first + logits.len()).position(|entry| entry == target);
                terms.gradient_of_part(&logits, reference_merged(gathered, row)[0], held, vocabulary)
            }
        };
        for (token, (logit, gradient)) in logits.iter().zip(gradient).enumerate() {
            let d_logit = gradient * d_losses.data[row] * cap.map_or(1.0, |cap| 1.0 - (logit / cap).powi(2));
            for i in 0..width {
                dx.data[row * width + i] += d_logit * weight.data[token * width + i];
                d_weight.data[token * width + i] += d_logit * x.data[row * width + i];
            }
        }
    }
    [dx, d_weight]
}

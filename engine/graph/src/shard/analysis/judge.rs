//! The rules of all operations, judged by the reference implementations: what ranks compute from parts, put together,
//! is what one rank computes from the whole.

use std::path::Path;
use std::sync::{Arc, Mutex};

use candle_core::{D, DType, Layout};
use gapless_kernels::cpu::quantized::{Format, Rounding};
use gapless_kernels::{Fold, LossTerms, Numbers, Spec, Stream, Window};
use gapless_parallel::Axes;

use super::*;
use crate::autodiff::differentiate;
use crate::graph::lock;
use crate::nn::{Init, VarBuilder};
use crate::op::Op;
use crate::ops::*;
use crate::reference::{Array, Reference, evaluate};
use crate::{Result, Tensor};

/// The operations without a rule: those of collectives and compressed activations, which come after the pass,
/// and the counting of routed rows.
const UNRULED: [&str; 7] = ["Collective", "Compress", "Expand", "HeadStatistics", "Route", "RunLengths", "RunStarts"];

/// The operations whose rules relate dimensions that no rank divides: the indices of all tokens and rows.
const UNDIVIDED: [&str; 3] = ["RouteKept", "SlotWeights", "SlotWeightsGrad"];

#[test]
fn parts_put_together_are_the_whole() {
    let mut judge = Judge::default();
    cases(&mut judge).unwrap();
    let Judge { pairs, folds, linear, judged } = &judge;
    let (judged_count, fold_count) = (judged.len(), folds.len());
    println!(
        "{judged_count} operations, {pairs} pairs of an operation and a dimension, {fold_count} on chunks, {linear} linear"
    );
    let on_tokens =
        ["Binary", "Linear", "LinearGradWeight", "Rope", "Dropout", "Softmax", "Sum", "LayerNorm", "RmsNorm"];
    for name in on_tokens.into_iter().chain(["LinearCrossEntropy", "TopK", "ExpertLoad", "Embedding"]) {
        assert!(folds.contains(name), "{name} is not judged on chunks: {folds:?}");
    }
    let known = operations(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src/ops"));
    let not_judged: Vec<&str> = known.iter().map(String::as_str).filter(|name| !judged.contains(*name)).collect();
    let expected: BTreeSet<&str> = UNRULED.into_iter().chain(UNDIVIDED).collect();
    assert!(not_judged.iter().eq(&expected), "operations without a case here, or without a rule: {not_judged:?}");
}

/// Returns the names of the types that implement [`Op`] in the files of a folder.
fn operations(folder: &Path) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            names.extend(operations(&path));
        } else {
            let text = std::fs::read_to_string(&path).unwrap();
            let lines = text.lines().filter_map(|line| line.strip_prefix("impl Op for "));
            names.extend(lines.map(|line| line.trim_end_matches(" {").to_owned()));
        }
    }
    names
}

#[derive(Default)]
struct Judge {
    /// The names of types of operations, of which a rule allowed a split.
    judged: BTreeSet<String>,
    pairs: usize,
    /// The operations on tokens that lie in two chunks.
    folds: BTreeSet<String>,
    linear: usize,
}

impl Judge {
    /// Records a function and its gradient, and judges all operations in the graph.
    fn check(
        &mut self,
        parameters: &[&[usize]],
        ids: &[(&[usize], &[u32])],
        f: impl Fn(&[Tensor], &[Tensor]) -> Result<Tensor>,
    ) -> Result<()> {
        let graph = Arc::new(Mutex::new(Graph::default()));
        let vb = VarBuilder::new(&graph, DType::F32);
        let mut given = HashMap::new();
        let mut xs = Vec::new();
        for (index, &dims) in parameters.iter().enumerate() {
            let name = format!("x{index}");
            xs.push(vb.get_with_hints(dims.to_vec(), &name, Init::Const(0.0))?);
            let numbers = Numbers::from_seed(index as u64 + 1);
            let count = dims.iter().product();
            given.insert(name, Array::new(dims, (0..count).map(|i| numbers.normal(i)).collect()));
        }
        let mut inputs = Vec::new();
        for (index, &(dims, data)) in ids.iter().enumerate() {
            let name = format!("ids{index}");
            let id = lock(&graph).add_input(&name, Spec { shape: dims.to_vec().into(), dtype: DType::U32 })?;
            inputs.push(Tensor::of(&graph, id));
            given.insert(name, Array::new(dims, data.iter().map(|&x| f64::from(x)).collect()));
        }
        // A loss whose gradients differ from element to element.
        let y = f(&xs, &inputs)?;
        let loss = if y.rank() == 0 { y } else { y.sin()?.sum_all()? };
        differentiate(&graph, &loss, 1.0)?;
        let graph = lock(&graph);
        let stream = Stream::new(1, 1, 0);
        let values = evaluate(&graph, &given, stream);
        for node in graph.nodes() {
            let of = |ids: &[ValueId]| -> Vec<&Array> { ids.iter().map(|id| &values[id.index()]).collect() };
            let (inputs, outputs) = (graph.specs(&node.inputs), graph.specs(&node.outputs));
            let case = Case { op: &node.op, inputs: &inputs, arrays: of(&node.inputs), stream };
            self.node(&case, &outputs, &of(&node.outputs));
        }
        Ok(())
    }

    fn node(&mut self, case: &Case<'_>, specs: &[Spec], whole: &[&Array]) {
        let op = case.op;
        let name = format!("{op:?}").split(|c: char| !c.is_alphanumeric()).next().unwrap().to_owned();
        let Some(rule) = op.rule(case.inputs, specs) else {
            assert!(UNRULED.contains(&&*name), "{op:?} has no rule");
            return;
        };
        assert!(!UNRULED.contains(&&*name), "{op:?} has a rule");
        let mut dims = Dims::default();
        let mut leaves = |specs: &[Spec]| -> Vec<Vec<Dim>> {
            specs.iter().map(|spec| spec.dims().iter().map(|&extent| dims.leaf(extent)).collect()).collect()
        };
        let (inputs, outputs) = (leaves(case.inputs), leaves(specs));
        let [of_inputs, of_outputs] =
            [&inputs, &outputs].map(|shapes| shapes.iter().map(|shape| &shape[..]).collect::<Vec<_>>());
        let related = rule.relate(&mut dims, &of_inputs, &of_outputs).unwrap_or_else(|why| panic!("{op:?}: {why}"));
        let ranges = related.labels.iter().filter(|label| label.is_range).flat_map(|label| dims.leaves(label.dim));
        let ranges: BTreeSet<Dim> = ranges.collect();
        let node = NodeDims::new(&dims, Some(related), &[of_inputs, of_outputs].concat());
        let free = |leaf: &Dim| !node.whole.contains(leaf) && !dims.is_whole(*leaf);
        let leaves: Vec<Dim> = node.leaves.iter().copied().filter(free).collect();
        let split = Split { case, dims: &dims, node: &node, inputs: &inputs, outputs: &outputs, whole };
        for (index, &leaf) in leaves.iter().enumerate() {
            for parts in [2, 3].into_iter().filter(|&parts| parts <= dims.extent(leaf)) {
                split.check(&[(leaf, Cut::Ranges(parts))]);
                self.judged.insert(name.clone());
            }
            if !ranges.contains(&leaf) && split.runs_on_chunks(leaf) {
                split.check(&[(leaf, Cut::Chunks)]);
                self.folds.insert(name.clone());
            }
            self.pairs += 1;
            // Two dimensions at once, as if ranks lay along two axes.
            for &other in &leaves[..index] {
                if dims.extent(leaf).min(dims.extent(other)) > 1 {
                    split.check(&[(leaf, Cut::Ranges(2)), (other, Cut::Ranges(2))]);
                }
            }
        }
        self.linear(case, whole);
    }

    fn linear(&mut self, case: &Case<'_>, whole: &[&Array]) {
        let op = case.op;
        let summed = op.linear_inputs();
        if summed > 0 {
            let with = |change: &dyn Fn(&Array) -> Array| -> Vec<Array> {
                let of_input = |(index, x): (usize, &&Array)| if index < summed { change(x) } else { (*x).clone() };
                case.arrays.iter().enumerate().map(of_input).collect()
            };
            let other = |x: f64| (3.0 * x + 1.0).sin();
            let (others, sums) = (with(&|x| x.map(other)), with(&|x| x.map(|x| x + other(x))));
            let of = |arrays: &[Array]| Case { arrays: arrays.iter().collect(), ..case.clone() }.compute(op);
            for ((other, sum), &one) in of(&others).iter().zip(of(&sums)).zip(whole) {
                assert_close(&other.zip(one, |a, b| a + b), &sum, || format!("{op:?} is not linear"));
            }
            self.linear += 1;
        }
        if let Some((bias, without)) = op.without_bias() {
            let mut arrays = case.arrays.clone();
            let added = arrays.remove(bias);
            let mut product = Case { arrays, ..case.clone() }.compute(&without).remove(0);
            product
                .data
                .chunks_exact_mut(added.data.len())
                .for_each(|row| row.iter_mut().zip(&added.data).for_each(|(x, b)| *x += b));
            assert_close(&product, whole[0], || format!("{op:?} without its bias"));
        }
    }
}

#[derive(Clone)]
struct Case<'a> {
    op: &'a Arc<dyn Op>,
    inputs: &'a [Spec],
    arrays: Vec<&'a Array>,
    stream: Stream,
}

impl Case<'_> {
    fn compute(&self, op: &Arc<dyn Op>) -> Vec<Array> {
        let input = Layout::contiguous(self.arrays[0].dims.clone());
        match op.view(&input) {
            Some(layout) => vec![self.arrays[0].view(&layout)],
            None => op.reference(&Reference { inputs: self.arrays.clone(), stream: self.stream }),
        }
    }
}

/// The way in which ranks divide a dimension.
#[derive(Debug, Clone, Copy)]
enum Cut {
    /// This many ranges.
    Ranges(usize),
    /// Each of two ranks has two chunks of a [`Fold`].
    Chunks,
}

impl Cut {
    fn ranks(self) -> usize {
        match self {
            Self::Ranges(parts) => parts,
            Self::Chunks => 2,
        }
    }

    fn part(self, extent: usize, index: usize) -> Option<Part> {
        match self {
            Self::Ranges(of) => Some(Part::Range { of, index }),
            Self::Chunks => Fold::new(extent, (2, index), 1).map(Part::Fold),
        }
    }
}

/// True if a part is that of the first rank.
fn is_of_first_rank(part: Part) -> bool {
    match part {
        Part::Range { index, .. } => index == 0,
        Part::Fold(fold) => fold.place(0) == 0,
        Part::Own(_) => false,
    }
}

/// A node whose dimensions are related.
struct Split<'a> {
    case: &'a Case<'a>,
    dims: &'a Dims,
    node: &'a NodeDims,
    inputs: &'a [Vec<Dim>],
    outputs: &'a [Vec<Dim>],
    whole: &'a [&'a Array],
}

impl Split<'_> {
    fn windows(&self, shapes: &[Vec<Dim>], parts: &Parts) -> Vec<Window> {
        let window = |shape: &Vec<Dim>| {
            let whole: Vec<usize> = shape.iter().map(|&dim| self.dims.extent(dim)).collect();
            Window::of(&whole, shape.iter().map(|&dim| self.dims.held(dim, parts)).collect())
        };
        shapes.iter().map(window).collect()
    }

    /// True if the operation runs on two chunks of a dimension, on each of two ranks.
    fn runs_on_chunks(&self, leaf: Dim) -> bool {
        let runs = |index| {
            let part = Cut::Chunks.part(self.dims.extent(leaf), index);
            part.is_some_and(|part| self.case.op.runs_on(&self.windows(self.inputs, &Parts::from([(leaf, part)]))))
        };
        runs(0) && runs(1)
    }

    /// Computes the outputs from parts, and compares the outputs that the parts make up with those of the whole.
    fn check(&self, split: &[(Dim, Cut)]) {
        let op = self.case.op;
        let what = || format!("{op:?} of {:?}, {split:?}", self.case.inputs);
        let mut sums: Vec<Array> = self.whole.iter().map(|array| Array::zeros(&array.dims)).collect();
        for rank in 0..split.iter().map(|(_, cut)| cut.ranks()).product::<usize>() {
            let mut rest = rank;
            let place = |&(leaf, cut): &(Dim, Cut)| {
                let index = rest % cut.ranks();
                rest /= cut.ranks();
                (leaf, cut.part(self.dims.extent(leaf), index).expect("chunks were checked"))
            };
            let parts: Parts = split.iter().map(place).collect();
            let [inputs, outputs] = [self.inputs, self.outputs].map(|shapes| self.windows(shapes, &parts));
            let slice = |(window, array): (&Window, &&Array)| {
                Array::new(&window.dims(), window.runs().flatten().map(|index| array.data[index]).collect())
            };
            let arrays: Vec<Array> = inputs.iter().zip(&self.case.arrays).map(slice).collect();
            let on_parts = op.on_parts(&inputs, &outputs);
            if on_parts.is_some() && op.statistics().is_some() {
                // Parts that need statistics of each other are judged in the tests of `linear_cross_entropy`.
                return;
            }
            let local = on_parts.unwrap_or_else(|| op.clone());
            let specs = inputs.iter().zip(self.case.inputs);
            let specs: Vec<Spec> = specs.map(|(window, spec)| spec.in_shape(window.dims())).collect();
            let inferred = local.infer(&specs).unwrap_or_else(|why| panic!("{}: {why}", what()));
            let made = Case { arrays: arrays.iter().collect(), ..self.case.clone() }.compute(&local);
            for (index, (made, window)) in made.iter().zip(&outputs).enumerate() {
                assert_eq!(made.dims, window.dims(), "{}", what());
                assert_eq!(inferred[index].dims(), window.dims(), "{}", what());
                // Where an output depends on no part of a dimension, all ranks have the same.
                let has = |leaf: Dim, shape: &[Dim]| shape.iter().any(|&dim| self.dims.leaves(dim).contains(&leaf));
                let reads = self.node.reads.get(index).and_then(Option::as_ref);
                let is_read = |input: usize| reads.is_none_or(|reads| reads.contains(&input));
                let is_summed =
                    |leaf: Dim| self.inputs.iter().enumerate().any(|(input, shape)| is_read(input) && has(leaf, shape));
                let shape = &self.outputs[index];
                let sums_up = |leaf: Dim| !has(leaf, shape) && is_summed(leaf);
                let is_summand = parts.keys().any(|&leaf| sums_up(leaf));
                let is_first = parts.iter().all(|(&leaf, &part)| is_of_first_rank(part) || !sums_up(leaf));
                let made = match op.without_bias().filter(|_| !is_first) {
                    // The bias is added once.
                    Some((bias, without)) => {
                        let without = without.on_parts(&inputs, &outputs).unwrap_or(without);
                        let mut arrays: Vec<&Array> = arrays.iter().collect();
                        arrays.remove(bias);
                        &Case { arrays, ..self.case.clone() }.compute(&without)[index]
                    }
                    None => made,
                };
                if parts.iter().all(|(&leaf, &part)| is_of_first_rank(part) || has(leaf, shape) || is_summed(leaf)) {
                    // Several ranks may hold the same elements: those outside the segment that they divide.
                    window.runs().flatten().zip(&made.data).for_each(|(at, x)| match is_summand {
                        true => sums[index].data[at] += x,
                        false => sums[index].data[at] = *x,
                    });
                }
            }
        }
        for (sum, whole) in sums.iter().zip(self.whole) {
            assert_close(sum, whole, what);
        }
    }
}

fn assert_close(found: &Array, expected: &Array, what: impl Fn() -> String) {
    let most = expected.data.iter().fold(1.0, |most: f64, x| most.max(x.abs()));
    assert_eq!(found.dims, expected.dims, "{}", what());
    for (found, expected) in found.data.iter().zip(&expected.data) {
        assert!((found - expected).abs() <= 1e-12 * most, "{}: {found} is not {expected}", what());
    }
}

const ATTENTION_STARTS: (&[usize], &[u32]) = (&[2, 5], &[0, 0, 2, 2, 4, 0, 1, 1, 1, 4]);
const IDS: (&[usize], &[u32]) = (&[2, 3], &[1, 0, 6, 1, 1, 3]);
/// The choices of two sequences of seven tokens among four experts, two per token. No token chooses expert 2.
const CHOICES: (&[usize], &[u32]) =
    (&[2, 7, 2], &[0, 1, 3, 0, 1, 3, 1, 0, 0, 3, 3, 1, 1, 0, 3, 1, 3, 0, 0, 1, 1, 3, 3, 0, 1, 0, 0, 3]);
const EXPERTS: usize = 4;

/// Every operation that has a rule, with extents that do not divide evenly.
fn cases(judge: &mut Judge) -> Result<()> {
    elements(judge)?;
    views(judge)?;
    reductions(judge)?;
    products_and_norms(judge)?;
    attention(judge)?;
    lookups_and_losses(judge)?;
    adapted_weights(judge)?;
    experts(judge)?;
    chunks_of_tokens(judge)
}

/// Operations on two sequences of four tokens, which two ranks can divide into chunks.
fn chunks_of_tokens(judge: &mut Judge) -> Result<()> {
    let ids: (&[usize], &[u32]) = (&[2, 4], &[1, 0, 6, 1, 5, 2, 1, 3]);
    let rope = Rope { frequencies: RopeScaling::None.frequencies(100.0), neighbours: false, inverse: false };
    judge.check(&[&[2, 4, 3, 4]], &[ids], |x, ids| Tensor::apply_op(rope, &[&x[0], &ids[0]]).map(|[y]| y))?;
    judge.check(&[&[2, 4, 5], &[5], &[5]], &[], |x, _| {
        x[0].layer_norm(&x[1], &x[2], 1e-5)?.add(&x[0].rms_norm(&x[1], 1e-5)?)?.mul(&x[0].softmax_last_dim()?)
    })?;
    judge.check(&[&[2, 4, 5], &[7, 5]], &[ids], |x, ids| x[0].linear_cross_entropy(&x[1], &ids[0]))?;
    judge.check(&[&[2, 4, 8]], &[], |x, _| {
        let [scores, ids] = Tensor::apply_op(TopK { k: 3, groups: None, by_best: false }, &[&x[0]])?;
        let [load] = Tensor::apply_op(ExpertLoad { experts: 8, by_sequence: true }, &[&ids])?;
        scores.sum(1)?.broadcast_mul(&load.sum_keepdim(1)?)
    })
}

fn elements(judge: &mut Judge) -> Result<()> {
    judge.check(&[&[3, 5]], &[], |x, _| {
        let positive = x[0].sqr()?.affine(1.0, 0.5)?;
        let y = positive.log()?.add(&positive.sqrt()?)?.add(&positive.recip()?)?.add(&positive.powf(1.5)?)?;
        y.add(&x[0].gelu()?)?
            .add(&x[0].neg()?)?
            .add(&x[0].detach())?
            .add(&x[0].to_dtype(DType::BF16)?.to_dtype(DType::F32)?)
    })?;
    judge.check(&[&[3, 5], &[3, 5]], &[], |x, _| {
        let (a, b) = (&x[0], &x[1]);
        let y = a.add(b)?.sub(&a.mul(b)?)?.add(&a.div(&b.exp()?)?)?.add(&a.swiglu(b)?)?;
        y.add(&a.maximum(b)?)?.add(&a.minimum(b)?)?.add(&a.ge(b)?.where_cond(a, b)?)
    })?;
    judge.check(&[&[4, 5]], &[], |x, _| Jitter::apply(&x[0].dropout(0.3)?, 0.3))
}

fn views(judge: &mut Judge) -> Result<()> {
    judge.check(&[&[2, 3, 4]], &[], |x, _| x[0].transpose(0, 2)?.reshape((4, 6)))?;
    judge.check(&[&[3, 6]], &[], |x, _| x[0].narrow(1, 2, 3)?.mul(&x[0].narrow(1, 0, 3)?))?;
    judge.check(&[&[3, 6]], &[], |x, _| x[0].reshape((3, 2, 3))?.transpose(1, 2)?.contiguous())?;
    judge.check(&[&[3, 5]], &[], |x, _| x[0].unsqueeze(1)?.broadcast_as((3, 4, 5)))?;
    judge.check(&[&[3, 4], &[3, 5]], &[], |x, _| Tensor::cat(&[&x[0], &x[1], &x[0]], 1))
}

fn reductions(judge: &mut Judge) -> Result<()> {
    judge.check(&[&[2, 3, 5]], &[], |x, _| x[0].sum(0))?;
    judge.check(&[&[2, 3, 5]], &[], |x, _| x[0].mean_keepdim(2)?.add(&x[0].sum_keepdim(2)?))?;
    judge.check(&[&[2, 3, 5]], &[], |x, _| x[0].transpose(0, 2)?.sum((0, 1)))?;
    judge.check(&[&[3, 5]], &[], |x, _| x[0].sqr()?.mean_all())?;
    judge.check(&[&[2, 3, 5]], &[], |x, _| x[0].softmax_last_dim())?;
    judge.check(&[&[2, 3, 5]], &[], |x, _| x[0].max_keepdim(D::Minus1)?.add(&x[0].log_sum_exp(2)?.unsqueeze(2)?))
}

fn products_and_norms(judge: &mut Judge) -> Result<()> {
    judge.check(&[&[2, 3, 4], &[2, 4, 5]], &[], |x, _| x[0].matmul(&x[1]))?;
    judge.check(&[&[2, 3, 4], &[5, 4], &[5]], &[], |x, _| x[0].linear(&x[1], Some(&x[2])))?;
    judge.check(&[&[2, 3, 4], &[5, 4]], &[], |x, _| x[0].linear(&x[1], None))?;
    judge.check(&[&[2, 3, 5], &[5], &[5]], &[], |x, _| {
        x[0].layer_norm(&x[1], &x[2], 1e-5)?.add(&x[0].rms_norm(&x[1], 1e-5)?)
    })
}

/// Weights of adapters, plain and quantized, which have two blocks of columns.
fn adapted_weights(judge: &mut Judge) -> Result<()> {
    judge.check(&[&[2, 5], &[4, 2], &[4, 5]], &[], |x, _| {
        let [squares] = Tensor::apply_op(WeightSquares { scale: 0.5, quantized: None }, &[&x[0], &x[1], &x[2]])?;
        squares.mul(&x[2].sum(1)?)
    })?;
    for format in [Format::Int8, Format::Nf4 { is_double: false }, Format::Nf4 { is_double: true }] {
        let weight = QuantizedWeight { outputs: 200, inputs: 128, format, rounding: Rounding::None, blocks: None };
        judge.check(&[&[3, 128], &[2, 128], &[200, 2], &[200]], &[], |x, _| {
            let stored = weight.stored().into_iter().enumerate().map(|(seed, spec)| {
                let number = |i: usize| (i * i + seed) % 251;
                let (count, device) = (spec.elements(), x[0].device());
                match spec.dtype {
                    DType::U8 => Tensor::from_vec((0..count).map(|i| number(i) as u8).collect(), count, device),
                    _ => Tensor::from_vec((0..count).map(|i| number(i) as f32 / 251.0).collect(), count, device),
                }
            });
            let stored = stored.collect::<Result<Vec<Tensor>>>()?;
            let y = x[0].quantized_linear(weight, &stored, Some(&x[3].detach()))?;
            let inputs: Vec<&Tensor> = x[1..3].iter().chain(&stored).collect();
            let [squares] = Tensor::apply_op(WeightSquares { scale: 0.5, quantized: Some(weight) }, &inputs)?;
            y.broadcast_mul(&squares)
        })?;
    }
    Ok(())
}

fn attention(judge: &mut Judge) -> Result<()> {
    let rope = Rope { frequencies: RopeScaling::None.frequencies(100.0), neighbours: false, inverse: false };
    judge.check(&[&[2, 3, 5, 4]], &[], |x, _| x[0].rope(100.0))?;
    judge.check(&[&[2, 3, 5, 4]], &[(&[2, 3], &[0, 1, 0, 7, 8, 0])], |x, ids| {
        Tensor::apply_op(rope, &[&x[0], &ids[0]]).map(|[y]| y)
    })?;
    // Three groups of two heads, with and without causality, windows, caps, packed documents and sinks.
    let shapes: &[&[usize]] = &[&[2, 6, 5, 4], &[2, 3, 5, 4], &[2, 3, 5, 2], &[6]];
    for how in [
        Attention::full(0.3),
        Attention::causal(0.3),
        Attention { window: Some(2), cap: Some(0.5), ..Attention::causal(0.3) },
        Attention { chunk: Some(2), ..Attention::causal(0.3) },
    ] {
        judge.check(shapes, &[], |x, _| x[0].attend(&x[1], &x[2], how))?;
        judge.check(shapes, &[], |x, _| x[0].attend_with_sinks(&x[1], &x[2], &x[3], how))?;
        judge.check(shapes, &[ATTENTION_STARTS], |x, ids| {
            Tensor::apply_op::<2>(how, &[&x[0], &x[1], &x[2], &ids[0]]).map(|[y, _]| y)
        })?;
    }
    judge.check(&[&[2, 3, 5, 4]], &[], |x, _| x[0].attend(&x[0], &x[0], Attention::full(0.3)))?;
    // Caches of nine tokens. Continued sequences have no gradient.
    let shapes: &[&[usize]] = &[&[2, 6, 3, 4], &[2, 3, 9, 4], &[2, 3, 9, 2], &[2, 3, 3, 4], &[6]];
    judge.check(shapes, &[(&[2, 3], &[1, 2, 3, 6, 7, 8])], |x, ids| {
        let past: Vec<Tensor> = x.iter().map(Tensor::detach).collect();
        let [keys] = Tensor::apply_op(CacheWrite, &[&past[1], &past[3], &ids[0]])?;
        let operands = [&past[0], &keys, &past[2], &ids[0], &past[4]];
        let how = CachedAttention(Attention::causal(0.3));
        Tensor::apply_op::<1>(how, &operands)?;
        Tensor::apply_op::<1>(how, &operands[..4])?;
        Ok(x[0].clone())
    })
}

fn lookups_and_losses(judge: &mut Judge) -> Result<()> {
    for padding in [None, Some(1)] {
        judge.check(&[&[7, 4]], &[IDS], |x, ids| x[0].padded_embedding(&ids[0], padding))?;
    }
    judge.check(&[&[2, 5, 3]], &[(&[2, 2, 3], &[1, 0, 4, 1, 2, 3, 0, 0, 4, 3, 2, 1])], |x, ids| {
        let picked = x[0].gather(&ids[0], 1)?;
        x[0].scatter_add(&ids[0], &picked, 1)
    })?;
    for terms in [LossTerms::NONE, LossTerms { label_smoothing: 0.1, z_loss: 0.3 }] {
        judge.check(&[&[2, 3, 7]], &[IDS], |x, ids| {
            Tensor::apply_op(CrossEntropy { terms }, &[&x[0], &ids[0]]).map(|[losses, _]| losses)
        })?;
        let head = LinearCrossEntropy::new(None).with_terms(terms).with_cap(Some(0.5));
        judge.check(&[&[2, 3, 5], &[7, 5]], &[IDS], |x, ids| {
            Tensor::apply_op(head, &[&x[0], &x[1], &ids[0]]).map(|[losses]| losses)
        })?;
        judge.check(&[&[2, 3, 5], &[7, 5]], &[IDS], |x, ids| {
            let weights = ids[0].to_dtype(DType::F32)?;
            let [losses, _] = Tensor::apply_op(head.with_likelihoods(), &[&x[0], &x[1], &ids[0], &weights])?;
            losses.mean_all()
        })?;
    }
    // A head whose weight is frozen has no gradient.
    judge.check(&[&[2, 3, 5], &[7, 5]], &[IDS], |x, ids| x[0].linear_cross_entropy(&x[1].detach(), &ids[0]))?;
    judge.check(&[&[2, 3, 5], &[7, 5]], &[IDS], |x, ids| x[0].linear_cross_entropy(&x[1].detach(), &ids[0])?.mean_all())
}

fn experts(judge: &mut Judge) -> Result<()> {
    judge.check(&[&[2, 5, 8], &[8]], &[], |x, _| {
        let top = TopK { k: 3, groups: Some(ExpertGroups { count: 4, limit: 2 }), by_best: false };
        let [scores, _] = Tensor::apply_op(top, &[&x[0]])?;
        let routed = Tensor::from_vec(vec![1f32, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0], (2, 5), x[0].device())?;
        let [biased, _] = Tensor::apply_op(TopK { k: 3, groups: None, by_best: false }, &[&x[0], &x[1], &routed])?;
        scores.add(&biased)
    })?;
    let shapes: &[&[usize]] = &[&[2, 7, 5], &[EXPERTS, 3, 5], &[EXPERTS, 5, 3], &[2, 7, 2]];
    for capacity in [None, Some((2, DropPolicy::Last))] {
        judge.check(shapes, &[CHOICES], |x, ids| {
            let route = Route { experts: EXPERTS, chooses: Chooses::Tokens, capacity };
            let [places, slots, _] = Tensor::apply_op(route, &[&ids[0]])?;
            let kept = RouteKept { experts: EXPERTS, chooses: Chooses::Tokens, rows: slots.dim(0)? };
            let [places, slots, starts] = Tensor::apply_op(kept, &[&places, &ids[0]])?;
            let linear = |x: &Tensor, weight: &Tensor| {
                let linear = GroupedLinear { sources: 1, balanced: None };
                Tensor::apply_op(linear, &[x, weight, &starts]).map(|[y]: [Tensor; 1]| y)
            };
            let [rows] = Tensor::apply_op(Dispatch, &[&x[0], &places, &slots])?;
            let exchange = Collective::AllToAllRows {
                axes: Axes::EXPERT,
                ranks: 2,
                rows: rows.dim(0)?,
                receives_dynamic_rows: false,
                balanced: 1,
            };
            let [exchanged] = Tensor::apply_op(exchange, &[&rows, &starts, &starts])?;
            let rows = rows.add(&exchanged)?;
            let [weights] = Tensor::apply_op(SlotWeights, &[&x[3], &places, &slots])?;
            let (gate, up) = (linear(&rows, &x[1])?, linear(&rows, &x[1])?);
            let [rows] =
                Tensor::apply_op(RoutedSwiGlu { balanced: None, limited: None }, &[&gate, &up, &weights, &starts])?;
            let [y] = Tensor::apply_op(Combine, &[&linear(&rows, &x[2])?, &places, &slots])?;
            for whole_tokens in [false, true] {
                Tensor::apply_op::<1>(Dropped { whole_tokens }, &[&places])?;
            }
            Ok(y)
        })?;
    }
    judge.check(&[&[3]], &[CHOICES, (&[2, 7], &[0, 0, 0, 3, 3, 3, 3, 0, 1, 1, 1, 1, 1, 1])], |x, ids| {
        for by_sequence in [false, true] {
            let load = ExpertLoad { experts: EXPERTS, by_sequence };
            Tensor::apply_op::<1>(load, &[&ids[0]])?;
            Tensor::apply_op::<1>(load, &[&ids[0].reshape((14, 2))?])?;
        }
        Tensor::apply_op::<1>(DocumentLoad { experts: EXPERTS }, &[&ids[0], &ids[1]])?;
        Ok(x[0].clone())
    })
}

//! A head whose vocabulary is divided, computed part by part in one graph.

use std::sync::{Arc, Mutex};

use gapless_graph::autodiff::differentiate;
use gapless_graph::nn::VarBuilder;
use gapless_graph::{Graph, Spec, Window, lock};
use gapless_kernels::LossTerms;

use crate::ops::LinearCrossEntropy;
use crate::{DType, Op, Result, Tensor, gradient_check};

/// Ends of the parts of a vocabulary of 7.
pub const ENDS: [usize; 3] = [3, 4, 7];

/// Applies a head to parts of x[1], a weight [7, width]. Its inputs are x[0], the part, the targets ids[0], and the others of `ids`
/// as numbers. Returns all results, without gradients, plus x[2], a number.
pub fn head_on_parts(op: &dyn Op, x: &[Tensor], ids: &[Tensor]) -> Result<Tensor> {
    let targets = &ids[0];
    let others = ids[1..].iter().map(|ids| ids.to_dtype(DType::F32)).collect::<Result<Vec<_>>>()?;
    let (rows, (vocabulary, width)) = (targets.dims().to_vec(), x[1].dims2()?);
    let mut parts = Vec::new();
    for (start, end) in [0].into_iter().chain(ENDS).zip(ENDS) {
        let held = vec![vec![start..end], vec![0..width]];
        let weight = Window::of(&[vocabulary, width], held);
        let windows = [Window::whole(x[0].dims()), weight, Window::whole(&rows)];
        parts.push((windows, x[1].narrow(0, start, end - start)?.contiguous()?));
    }
    let (statistics, _) = op.statistics().expect("a head has statistics");
    let mut gathered = Vec::new();
    for (windows, weight) in &parts {
        let op = statistics.on_parts(windows, &[]).expect("a part");
        gathered.extend(Tensor::apply_shared(op, &[&x[0], weight, targets])?);
    }
    let gathered = Tensor::stack(&gathered.iter().collect::<Vec<_>>(), 0)?;
    let mut results = Vec::new();
    for (windows, weight) in &parts {
        let op = op.on_parts(windows, &[]).expect("a part");
        let mut inputs = vec![&x[0], weight, targets];
        inputs.extend(&others);
        inputs.push(&gathered);
        for result in Tensor::apply_shared(op, &inputs)? {
            results.push(result.to_dtype(DType::F32)?.flatten_all()?);
        }
    }
    let results = Tensor::cat(&results.iter().collect::<Vec<_>>(), 0)?.detach();
    results.broadcast_add(&x[2].to_dtype(DType::F32)?)
}

/// The heads that are checked, each with its ids: the targets and, for some heads, the weights or the gradients of the
/// losses.
pub fn heads() -> Vec<(Arc<dyn Op>, &'static [Ids])> {
    let smooth = LossTerms { label_smoothing: 0.1, z_loss: 0.01 };
    let (without, with): (&[Ids], &[Ids]) = (&IDS[..1], &IDS);
    let mut heads: Vec<(Arc<dyn Op>, &[Ids])> = Vec::new();
    // Near a cap, a GPU's bf16 logits would leave few digits of its slope.
    for (terms, cap) in [(LossTerms::NONE, None), (smooth, Some(5.0))] {
        for gradient in [None, Some(0.25)] {
            let head = LinearCrossEntropy::new(gradient).with_terms(terms).with_cap(cap);
            heads.push((Arc::new(head), without));
            heads.push((Arc::new(head.with_likelihoods()), with));
        }
        let backward = gradient_of(LinearCrossEntropy::new(None).with_terms(terms).with_cap(cap)).expect("it records");
        heads.push((backward, with));
    }
    heads
}

/// Returns the operation that computes a head's gradient in the backward.
fn gradient_of(head: LinearCrossEntropy) -> Result<Arc<dyn Op>> {
    let graph = Arc::new(Mutex::new(Graph::default()));
    let vb = VarBuilder::new(&graph, DType::F32);
    let (x, weight) = (vb.get((2, 5), "x")?, vb.get((7, 5), "weight")?);
    let targets = lock(&graph).add_input("targets", Spec { shape: 2.into(), dtype: DType::U32 })?;
    let targets = Tensor::of(&graph, targets);
    let [losses] = Tensor::apply_op(head, &[&x, &weight, &targets])?;
    differentiate(&graph, &losses.sqr()?.sum_all()?, 1.0)?;
    let graph = lock(&graph);
    let node = graph.nodes().iter().find(|node| node.op.name() == "linear_cross_entropy_grad").expect("recorded");
    Ok(Arc::clone(&node.op))
}

/// Shapes of x, the weight and the number that is added to all results.
pub const SHAPES: [&[usize]; 3] = [&[2, 3, 5], &[7, 5], &[1]];
/// A shape and the ids of an input.
pub type Ids = (&'static [usize], &'static [u32]);
static IDS: [Ids; 2] = [(&[2, 3], &[1, 0, 6, 3, 2, 3]), (&[2, 3], &[1, 0, 2, 1, 3, 1])];

#[test]
fn kernels_of_parts_are_those_of_their_references() {
    for (head, ids) in heads() {
        let error = gradient_check(&SHAPES, ids, |x, ids| head_on_parts(&*head, x, ids)).unwrap();
        assert!(error.kernel <= 1e-5 && error.bf16.is_some_and(|error| error <= 1.0), "{error:?} of {head:?}");
    }
}

//! Checks the choices of a layer against a brute-force search over all subsets of the layer's candidates.

use std::sync::{Arc, Mutex};

use candle_core::DType;
use gapless_graph::autodiff::differentiate;
use gapless_graph::nn::{Experts, Linear, Module, Router, RouterConfig, VarBuilder, linear_no_bias, rms_norm};
use gapless_graph::{Graph, Node, Spec, Tensor, lock};
use gapless_parallel::Rates;
use gapless_testing::prelude::*;

use super::parts;
use crate::Output;
use crate::lower::alive_nodes;
use crate::recompute::SavedActivations;
use crate::recompute::layer::{Choice, Costs, Layer, Local, RUN};
use crate::recompute::min_cut::hull;
use gapless_graph::Result;

/// Returns random layers. Each forward node reads some of the nodes before it, and the backward reads some of the
/// forward's results in reverse order.
fn any_layer(candidates: std::ops::RangeInclusive<usize>) -> impl Strategy<Value = Layer> {
    // Per node: bytes, nanoseconds, a mask of the nodes that it reads, and a kind. The backward does not read nodes of
    // kinds 0 and 1. It reads nodes of kind 2, but these cannot be recomputed. Nodes of any other kind are candidates.
    let node = (1..100u64, 0..100u64, any::<u32>(), 0..8usize);
    let nodes = prop::collection::vec(node, 2 * candidates.end());
    (candidates, nodes).prop_map(|(candidates, nodes)| {
        let mut layer = Layer::default();
        let count = nodes.len();
        layer.bytes = nodes.iter().chain(&nodes).map(|node| node.0).collect();
        for (index, (_, nanoseconds, reads, kind)) in nodes.into_iter().enumerate() {
            // Each node reads about two of the nodes before it.
            let reads = (0..index).filter(|before| reads >> (before % 16 * 2) & 3 == 0 && index - before < 9).collect();
            let is_candidate = kind > 2 && layer.candidates.len() < candidates;
            if kind != 2 {
                layer.forward.push(Local { reads, makes: vec![index], nanoseconds });
            }
            if kind == 2 || is_candidate {
                layer.saved.push(index);
            }
            if is_candidate {
                layer.candidates.push(vec![index]);
            }
        }
        for index in (0..count).rev() {
            let mut reads: Vec<usize> = layer.saved.iter().copied().filter(|&saved| saved == index).collect();
            reads.extend((index + 1 < count).then_some(count + index + 1));
            layer.backward.push(Local { reads, makes: vec![count + index], nanoseconds: 0 });
        }
        layer.leaves = vec![count];
        layer
    })
}

fn all(layer: &Layer) -> Vec<Choice> {
    let mut costs = Costs::new(layer);
    (0..1 << layer.candidates.len()).map(|dropped| costs.choice(dropped, 0)).collect()
}

/// Returns the points (time, bytes) on the lower convex hull of some choices, the fastest first.
fn lower_hull(choices: &[Choice]) -> Vec<(i128, i128)> {
    let mut points: Vec<(i128, i128)> = choices.iter().map(|c| (c.nanoseconds.into(), c.kept.into())).collect();
    points.sort_unstable();
    let mut hull: Vec<(i128, i128)> = Vec::new();
    for (x, y) in points {
        if hull.last().is_some_and(|last| last.1 <= y) {
            continue;
        }
        while let [.., a, b] = hull[..]
            && (b.0 - a.0) * (y - a.1) <= (b.1 - a.1) * (x - a.0)
        {
            hull.pop();
        }
        hull.push((x, y));
    }
    hull
}

generated! {
    #![cases(48)]

    /// Every corner of the convex hull of all subsets is a minimal cut, and every minimal cut is such a corner.
    #[test]
    fn minimal_cuts_are_the_corners_of_all_choices(layer in any_layer(1..=12)) {
        let mut costs = Costs::new(&layer);
        let cuts: Vec<Choice> = hull(&layer).into_iter().map(|dropped| costs.choice(dropped, 0)).collect();
        let corners = lower_hull(&all(&layer));
        prop_assert_eq!(lower_hull(&cuts), corners.clone());
        // There is one exception: the choice that keeps everything is not a corner if something can be dropped without
        // costing time.
        let is_corner = |cut: &Choice| corners.contains(&(cut.nanoseconds.into(), cut.kept.into()));
        prop_assert!(cuts.iter().all(|cut| cut.dropped == 0 || is_corner(cut)));
    }

    /// Tests layers that have too many candidates for an exhaustive search.
    #[test]
    fn choices_of_large_layers_are_no_worse_than_those_of_their_runs(layer in any_layer(17..=17)) {
        prop_assume!(layer.candidates.len() == 17);
        let choices = layer.choices();
        let widest = choices.iter().map(|choice| choice.peak).max().unwrap();
        // The tolerance is needed because the choices are reduced to 256. In ten thousand random layers, at most a
        // quarter of the tolerance was needed.
        let beaten = |run: &Choice| choices.iter().any(|choice| is_as_good(choice, run, widest / 32));
        prop_assert!(of_runs(&layer).iter().all(beaten));
        prop_assert_eq!(choices[0].dropped, 0);
    }
}

/// Two candidates in different runs depend on one node whose result is not kept. Recomputing one of them alone is worse
/// than recomputing another candidate of the same run. Recomputing both takes hardly longer than recomputing one.
#[test]
fn cuts_find_what_two_runs_share() {
    let mut layer = Layer::default();
    let mut node = |reads: &[usize], bytes: u64, nanoseconds: u64, is_candidate: bool| {
        let value = layer.bytes.len();
        layer.bytes.push(bytes);
        layer.forward.push(Local { reads: reads.to_vec(), makes: vec![value], nanoseconds });
        if is_candidate {
            layer.saved.push(value);
            layer.candidates.push(vec![value]);
            layer.backward.insert(0, Local { reads: vec![value], makes: vec![], nanoseconds: 0 });
        }
        value
    };
    let shared = node(&[], 1, 100, false);
    for small in [10, 4] {
        node(&[shared], 10, 1, true);
        // Considered alone, this node saves as many bytes in less time.
        node(&[], 10, 90, true);
        (0..small).for_each(|_| _ = node(&[], 1, 1000, true));
    }
    let choices = layer.choices();
    // The expected choice keeps the 14 small values and two of the four large ones.
    let finds = |choices: &[Choice]| choices.iter().any(|c| c.nanoseconds == 102 && c.kept == 34);
    assert!(finds(&choices), "{choices:?}");
    assert!(!finds(&of_runs(&layer)));
}

fn is_as_good(one: &Choice, other: &Choice, within: u64) -> bool {
    let kept = one.kept <= other.kept + within;
    kept && one.peak <= other.peak + within && one.nanoseconds <= other.nanoseconds
}

/// Returns all pairs of the best choices of two runs of candidates. While the choices of one run are searched, the
/// other run is kept. Two choices of a run with equal costs can have different costs in combination with the other run.
/// The one of these choices with the lowest bit mask is taken.
fn of_runs(layer: &Layer) -> Vec<Choice> {
    let mut costs = Costs::new(layer);
    let mut best = |subsets: Vec<u64>| -> Vec<Choice> {
        let all: Vec<Choice> = subsets.into_iter().map(|dropped| costs.choice(dropped, 0)).collect();
        let beats = |other: &Choice, one: &Choice| {
            is_as_good(other, one, 0) && (!is_as_good(one, other, 0) || other.dropped < one.dropped)
        };
        let is_best = |one: &&Choice| !all.iter().any(|other| beats(other, one));
        all.iter().filter(is_best).copied().collect()
    };
    let first = best((0..1 << RUN).collect());
    let second = best((0..1 << (layer.candidates.len() - RUN)).map(|subset| subset << RUN).collect());
    let pairs = first.iter().flat_map(|first| second.iter().map(|second| first.dropped | second.dropped));
    best(pairs.collect())
}

/// An MoE layer as in Qwen1.5-MoE-A2.7B: 60 experts, of which each token uses 4, and a shared expert with a sigmoid
/// gate.
fn layer_of_experts(x: &Tensor, vb: &VarBuilder) -> Result<Tensor> {
    let (width, hidden) = (2048, 5632);
    let vb = vb.pp("layers").pp(0);
    let _layer = x.enter(vb.prefix());
    let linear = |name: &str, from: usize, to: usize| -> Result<Linear> { linear_no_bias(from, to, vb.pp(name)) };
    let normed = rms_norm(width, 1e-6, vb.pp("input_norm"))?.forward(x)?;
    let heads = |x: Tensor| x.reshape((1, 4096, 16, width / 16))?.transpose(1, 2);
    let q = heads(linear("q", width, width)?.forward(&normed)?)?.rope(1e6)?;
    let k = heads(linear("k", width, width)?.forward(&normed)?)?.rope(1e6)?;
    let v = heads(linear("v", width, width)?.forward(&normed)?)?;
    let y = q.causal_attention(&k, &v, 0.088)?.transpose(1, 2)?.reshape((1, 4096, width))?;
    let x = x.add(&linear("o", width, width)?.forward(&y)?)?;
    let normed = rms_norm(width, 1e-6, vb.pp("post_norm"))?.forward(&x)?;
    let config = RouterConfig { experts: 60, top_k: 4, renormalise: false, ..RouterConfig::default() };
    let routing = Router::new(&config, width, vb.pp("router"))?.forward(&normed, true)?;
    let y = Experts::new(60, width, 1408, vb.pp("experts"))?.forward(&normed, &routing)?;
    let up = linear("up", width, hidden)?.forward(&normed)?;
    let shared = linear("gate", width, hidden)?.forward(&normed)?.swiglu(&up)?;
    let shared = linear("down", hidden, width)?.forward(&shared)?;
    let shared = shared.broadcast_mul(&linear("shared_gate", width, 1)?.forward(&normed)?.sigmoid()?)?;
    x.add(&y.add(&shared)?)
}

#[test]
fn a_layer_of_experts_has_choices_no_worse_than_those_of_its_runs() {
    let graph = Arc::new(Mutex::new(Graph::default()));
    let vb = VarBuilder::new(&graph, DType::BF16);
    let table = gapless_graph::nn::embedding(1000, 2048, vb.pp("table")).unwrap();
    let tokens = lock(&graph).add_input("tokens", Spec { shape: (1, 4096).into(), dtype: DType::U32 }).unwrap();
    let x = table.forward(&Tensor::of(&graph, tokens)).unwrap();
    let y = layer_of_experts(&x, &vb).unwrap();
    // This norm reads the layer's result, so that the backward reads it too.
    let loss = rms_norm(2048, 1e-6, vb.pp("norm")).unwrap().forward(&y).unwrap();
    let loss = loss.to_dtype(DType::F32).unwrap().sqr().unwrap().mean_all().unwrap();
    let gradients = differentiate(&graph, &loss, 1.0).unwrap();
    let graph = lock(&graph);
    let summands = gradients.iter().flat_map(|gradient| &gradient.summands);
    let outputs: Vec<Output> = summands.map(|&id| Output::local("gradient", id)).collect();
    let alive = alive_nodes(&graph, &outputs);
    let saved = SavedActivations::new(&graph, &alive);
    let rates = Rates { flops: 770e12, bytes: 3e12 };
    let time = |node: &Node| {
        let (inputs, outputs) = (graph.specs(&node.inputs), graph.specs(&node.outputs));
        rates.nanoseconds(node.op.flops(&inputs, &outputs), node.op.bytes_moved(&inputs, &outputs))
    };
    let layers: Vec<Layer> =
        parts(&graph, &alive, &saved).iter().map(|part| part.layer(&graph, &saved, false, &time).0).collect();
    let layer = layers.iter().max_by_key(|layer| layer.candidates.len()).unwrap();
    assert!(layer.candidates.len() > 16, "{} candidates", layer.candidates.len());
    let (choices, runs) = (layer.choices(), of_runs(layer));
    // The tolerance is needed because some 2500 choices that differ by little are reduced.
    let within = choices[0].peak / 1024;
    let is_worse = |run: &&Choice| !choices.iter().any(|choice| is_as_good(choice, run, within));
    let worse: Vec<&Choice> = runs.iter().filter(is_worse).collect();
    assert!(worse.is_empty(), "{worse:?}");
}

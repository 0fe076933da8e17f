//! Checks the budget search against a brute-force search that lowers every possible choice of dropped values.

use gapless_alloc::Options;
use gapless_graph::nn::{Embedding, Linear, Module, RmsNorm, VarBuilder, embedding, linear_no_bias, rms_norm};
use gapless_graph::{Model, Tensor, ValueId};
use gapless_parallel::Rates;
use gapless_testing::few;

use super::record::TrainStep;
use super::{MemoryOptions, RankPlan, StepOptions, boxed_build, choose_recomputation, record};
use crate::error::Error;
use crate::link::height;
use crate::lower::alive_nodes;
use crate::recompute::{RematPlan, SavedActivations};
use crate::{CompileOptions, Program, Target};
use gapless_graph::Result;

/// A model of residual layers x + W₂·f(W₁·norm(x)), each with its own hidden width.
pub(super) struct Chain {
    embed: Embedding,
    layers: Vec<(RmsNorm, Linear, Linear, String)>,
    head: Linear,
}

impl Chain {
    pub(super) fn new(hidden: &[usize], vb: VarBuilder) -> Result<Self> {
        let layer = |(index, &hidden): (usize, &usize)| {
            let vb = vb.pp("h").pp(index);
            let (norm, up) = (rms_norm(16, 1e-5, vb.pp("norm"))?, linear_no_bias(16, hidden, vb.pp("up"))?);
            Ok((norm, up, linear_no_bias(hidden, 16, vb.pp("down"))?, vb.prefix().to_owned()))
        };
        let layers = hidden.iter().enumerate().map(layer).collect::<Result<_>>()?;
        Ok(Self { embed: embedding(32, 16, vb.pp("embed"))?, layers, head: linear_no_bias(16, 32, vb.pp("head"))? })
    }
}

impl Model for Chain {
    fn forward(&self, tokens: &Tensor, _: bool) -> Result<Tensor> {
        let mut x = self.embed.forward(tokens)?;
        for (norm, up, down, name) in &self.layers {
            let _layer = x.enter(name);
            x = (&x + down.forward(&up.forward(&norm.forward(&x)?)?.gelu()?)?)?;
        }
        self.head.forward(&x)
    }
}

/// The tested budgets. They are given in sixteenths of the difference between the fewest bytes possible and the most.
const PARTS: [u64; 16] = [4, 8, 12, 16, 1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15];

pub(super) const TARGET: Target = Target::Cpu { threads: 1 };

/// Returns the program in which the first micro-batch drops `first` and the other micro-batches drop `rest`.
fn dropping(step: &TrainStep, plan: &RankPlan, first: Vec<ValueId>, rest: Vec<ValueId>) -> Program {
    let graph = step.graph();
    let saved = SavedActivations::new(&graph, &alive_nodes(&graph, step.outputs()));
    let recomputation = RematPlan::uniform(saved.dropping(rest)).except(0, saved.dropping(first));
    step.lower_graph(&graph, &StepOptions::default(), plan, TARGET, &recomputation).unwrap()
}

/// Returns groups of values that may be dropped together. A norm computes its statistics together with its result, so
/// both are in one group.
pub(super) fn candidates(saved: &SavedActivations<'_>) -> Vec<Vec<ValueId>> {
    let mut groups: Vec<Vec<_>> = Vec::new();
    for &root in saved.roots().iter().filter(|&&root| !saved.leaves_layer(root)) {
        match groups.last_mut() {
            Some(last) if std::ptr::eq(saved.maker(last[0]), saved.maker(root)) => last.push(root),
            _ => groups.push(vec![root]),
        }
    }
    groups
}

/// Returns the peak of live bytes and the recomputation time for every subset of dropped values. All micro-batches drop
/// the same subset. If `first_is_other` is true, the first micro-batch may drop another one.
fn all_ways(step: &TrainStep, plan: &RankPlan, rates: &Rates, first_is_other: bool) -> Vec<(u64, u64)> {
    let graph = step.graph();
    let candidates = candidates(&SavedActivations::new(&graph, &alive_nodes(&graph, step.outputs())));
    drop(graph);
    let values_in = |subset: usize| -> Vec<ValueId> {
        let chosen = candidates.iter().enumerate().filter(|(i, _)| subset >> i & 1 == 1);
        chosen.flat_map(|(_, group)| group.iter().copied()).collect()
    };
    let way = |(first, rest): (usize, usize)| {
        let program = dropping(step, plan, values_in(first), values_in(rest));
        let [_, again] = program.nanoseconds(rates);
        // A capacity of 0 gives the lower bound, which no plan can be below.
        (
            height(
                &[&program],
                CompileOptions {
                    planner: Options { capacity: Some(0), ..Options::default() },
                    ..CompileOptions::default()
                },
            )
            .unwrap(),
            again,
        )
    };
    let all = 1 << candidates.len();
    let of_rest = |rest| if first_is_other { 0..all } else { rest..rest + 1 }.map(move |first| (first, rest));
    (0..all).flat_map(of_rest).map(way).collect()
}

#[test]
fn no_way_to_keep_and_drop_is_cheaper() {
    let all: [&[usize]; 3] = [&[96, 32], &[32, 96, 64], &[64, 64, 64]];
    for hidden in few(&all, 2) {
        check(hidden, 1);
    }
}

/// The first micro-batch keeps more than the others, and no pair of choices for the first and the others is much
/// faster.
#[test]
fn no_way_of_its_own_for_the_first_micro_batch_is_cheaper() {
    // The pairs of choices of longer chains take a minute.
    check(&[96], 2);
}

fn check(hidden: &[usize], micro_batches: usize) {
    let options = StepOptions { batch: 4 * micro_batches, micro_batches, sequence: 16, ..<_>::default() };
    let plan = RankPlan::new(options.mesh, 0, &options.pipeline, options.micro_batches).unwrap();
    let step = record(&boxed_build(|vb| Chain::new(hidden, vb)), &options, &plan).unwrap();
    let rates = Rates { flops: 1e9, bytes: 1e9 };
    let same = all_ways(&step, &plan, &rates, false);
    let (mut least, most) = (same.iter().map(|way| way.0).min().unwrap(), same[0].0);
    let ways = if micro_batches > 1 { all_ways(&step, &plan, &rates, true) } else { same };
    assert!(least < most);
    let within = |bytes| {
        let memory = MemoryOptions { budget: Some(bytes), rates, ..MemoryOptions::default() };
        StepOptions { memory, ..options.clone() }
    };
    let below = within(least - 1);
    match choose_recomputation(&step, &below, &plan, TARGET, &[]) {
        Err(Error::OverBudget { smallest, .. }) => {
            // The search takes the peak of a layer only in the graph's order of operations. With several micro-batches,
            // the search also slightly underestimates the live bytes outside the layers. So it may mistake the second
            // smallest choice for the smallest.
            let allowed = least / 100;
            assert!((least..=least + allowed).contains(&smallest), "{smallest}, not {least}");
            least = smallest;
        }
        other => panic!("nothing fits below the least: {other:?}"),
    }
    let (mut found, mut at_best) = (0, 0);
    for &part in few(&PARTS, 4) {
        let bytes = least + (most - least) * part / 16;
        let best = ways.iter().filter(|way| way.0 <= bytes).map(|way| way.1).min().unwrap();
        let options = within(bytes);
        let program = step
            .lower(&options, &plan, TARGET, &choose_recomputation(&step, &options, &plan, TARGET, &[]).unwrap())
            .unwrap();
        let arena = height(&[&program], options.planning_within(Some(bytes))).unwrap();
        let [all, again] = program.nanoseconds(&rates);
        println!("{hidden:?}: {bytes} bytes, {arena} planned, {again} ns again, {best} at best, of {}", all - again);
        assert!(arena <= bytes);
        assert!(again >= best);
        (found, at_best) = (found + again, at_best + best);
    }
    // The search knows the bytes of a layer only in the graph's order of operations. It may miss a choice that it
    // considers too large but that fits in another order.
    println!("{hidden:?}: {found} ns again, {at_best} at best");
    assert!(found as f64 <= 1.02 * at_best as f64, "{hidden:?}: {found} ns again, {at_best} at best");
}

//! Checks recomputation in split backwards (I and W) against brute-force searches. One lowers every set of stages that
//! recompute twice. The other lowers every choice of dropped values for each half.

use std::collections::BTreeSet;
use std::sync::Arc;

use gapless_alloc::lower_bound;
use gapless_graph::{Phase, Place, ValueId};
use gapless_parallel::{Kind, Mesh, Rates, StageId, by_name};
use gapless_testing::few;

use super::budget_reference::{Chain, TARGET, candidates};
use super::record::TrainStep;
use super::{MemoryOptions, Pipeline, RankPlan, StepOptions, boxed_build, choose_recomputation, policy, record};
use crate::error::Error;
use crate::lower::alive_nodes;
use crate::recompute::{Layers, Recompute, RematPlan, SavedActivations};
use crate::{Program, table};

const RATES: Rates = Rates { flops: 1e9, bytes: 1e9 };

fn dropping(recompute: &Recompute) -> MemoryOptions {
    MemoryOptions { recompute: recompute.clone(), ..MemoryOptions::default() }
}

fn options(schedule: &str, chunks: usize, micro_batches: usize, memory: MemoryOptions) -> StepOptions {
    let schedule = Arc::from(by_name(schedule).unwrap());
    let pipeline = Pipeline { schedule, chunks, ..Pipeline::default() };
    let (mesh, batch) = (Mesh::pipeline(2), 4 * micro_batches);
    StepOptions { batch, micro_batches, sequence: 16, mesh, pipeline, memory, ..StepOptions::default() }
}

fn recorded(hidden: &[usize], options: &StepOptions, rank: usize) -> (TrainStep, RankPlan) {
    let ranks = RankPlan::new(options.mesh, rank, &options.pipeline, options.micro_batches).unwrap();
    (record(&boxed_build(|vb| Chain::new(hidden, vb)), options, &ranks).unwrap(), ranks)
}

/// Returns the peak of live bytes and the time of the recomputation.
fn cost(program: &Program) -> (u64, u64) {
    (lower_bound(&table(program).unwrap()), program.nanoseconds(&RATES)[1])
}

/// If a policy names the values to drop, the chosen set of stages that recompute twice has the lowest peak of live
/// bytes. Of the sets with the same peak, the chosen set takes the least time.
#[test]
fn no_other_stages_hold_less() {
    let layers = Recompute::Layers(Layers::All);
    let gelu = Recompute::Ops(vec!["gelu".into()]);
    let (mut once, mut twice) = (0, 0);
    for (schedule, chunks) in [("zb-h1", 1), ("zb-h2", 1), ("zbv", 2), ("interleaved-zb", 2), ("v-min", 2)] {
        // With ten micro-batches, the set is chosen by lowering only the first few.
        for (rank, recomputed, micro_batches) in [(0, &layers, 4), (1, &layers, 10), (1, &gelu, 4), (0, &gelu, 10)] {
            let options = options(schedule, chunks, micro_batches, dropping(recomputed));
            let (step, ranks) = recorded(&[64, 96, 32, 64], &options, rank);
            let named = policy(&step, &options, &ranks, TARGET, &[]).unwrap();
            let of_row = ranks.table[rank].iter().filter(|action| action.kind == Kind::BackwardInput);
            let stages: Vec<StageId> = of_row.map(|action| action.stage).collect::<BTreeSet<_>>().into_iter().collect();
            let way = |set: usize| {
                let chosen = stages.iter().enumerate().filter(|(index, _)| set >> index & 1 == 1);
                let plan =
                    named.clone().recompute_in_both_halves(&step.graph(), &chosen.map(|(_, &stage)| stage).collect());
                cost(&step.lower(&options, &ranks, TARGET, &plan).unwrap())
            };
            let best = (0..1 << stages.len()).map(way).min().unwrap();
            let chosen = choose_recomputation(&step, &options, &ranks, TARGET, &[]).unwrap();
            let found = cost(&step.lower(&options, &ranks, TARGET, &chosen).unwrap());
            println!("{schedule} {rank}, {micro_batches} micro-batches: {found:?}, {:?} at once", way(0));
            assert_eq!(found, best, "{schedule}, rank {rank}, {micro_batches}, {recomputed:?}");
            *(if chosen.variants()[0].ending_with_input().next().is_some() { &mut twice } else { &mut once }) += 1;
        }
    }
    assert!(once > 0 && twice > 0, "{once} once, {twice} twice");
}

/// Returns the costs of all pairs of candidates that are dropped after F and candidates that are freed at the end of I.
fn all_ways(step: &TrainStep, ranks: &RankPlan) -> Vec<(u64, u64)> {
    let graph = step.graph();
    let alive = alive_nodes(&graph, step.outputs());
    let saved = SavedActivations::new(&graph, &alive);
    let here = Some(Place::Stage(StageId(ranks.at.pipeline as u32)));
    let candidates: Vec<Vec<ValueId>> =
        candidates(&saved).into_iter().filter(|roots| graph.place_of(roots[0]) == here).collect();
    let by_weights = |roots: &Vec<ValueId>| {
        let readers = graph.nodes().iter().filter(|node| node.phase == Phase::BackwardWeight);
        readers.flat_map(|node| &node.inputs).any(|&input| roots.contains(&graph.value(input).root))
    };
    let for_weights: Vec<Vec<ValueId>> = candidates.iter().filter(|roots| by_weights(roots)).cloned().collect();
    let values_in = |all: &[Vec<ValueId>], subset: usize| -> Vec<ValueId> {
        let chosen = all.iter().enumerate().filter(|(index, _)| subset >> index & 1 == 1);
        chosen.flat_map(|(_, roots)| roots.iter().copied()).collect()
    };
    println!("{} candidates, {} that W reads", candidates.len(), for_weights.len());
    let way = |(dropped, again)| {
        let dropping = saved.dropping(values_in(&candidates, dropped));
        let plan = RematPlan::uniform(saved.ending_with_input(dropping, values_in(&for_weights, again)));
        cost(&step.lower_graph(&graph, &StepOptions::default(), ranks, TARGET, &plan).unwrap())
    };
    let all_again = 1 << for_weights.len();
    (0..1 << candidates.len()).flat_map(|dropped| (0..all_again).map(move |again| (dropped, again))).map(way).collect()
}

/// With a budget, the search finds the cheapest pair of choices for both halves. The separate choice for the first
/// micro-batch, which is even cheaper, is left out of the comparison.
#[test]
fn no_way_for_both_halves_is_cheaper() {
    let all: [(&str, usize, &[usize]); 4] =
        [("zb-h2", 1, &[64, 64]), ("zb-h1", 1, &[64, 64]), ("zb-h2", 0, &[64, 64]), ("zb-h2", 1, &[64, 96, 32, 64])];
    for &(schedule, rank, hidden) in few(&all, 3) {
        let within =
            |bytes| options(schedule, 1, 3, MemoryOptions { budget: Some(bytes), rates: RATES, ..Default::default() });
        let (step, ranks) = recorded(hidden, &within(0), rank);
        let ways = all_ways(&step, &ranks);
        let (least, most) = (ways.iter().map(|way| way.0).min().unwrap(), ways[0].0);
        let found = |bytes| choose_recomputation(&step, &within(bytes), &ranks, TARGET, &[]);
        let Err(Error::OverBudget { smallest, .. }) = found(least - 1) else { panic!("it fits below the least") };
        println!("{schedule} {rank}: from {least} ({smallest} found) to {most}");
        assert!((least..=least + least / 100).contains(&smallest), "{smallest}, not {least}");
        let (mut again, mut at_best) = (0, 0);
        for part in [0, 2, 4, 6, 8, 10, 12, 14] {
            let bytes = smallest + (most - smallest) * part / 16;
            let best = ways.iter().filter(|way| way.0 <= bytes).map(|way| way.1).min().unwrap();
            let found = found(bytes).unwrap();
            let alike = RematPlan::uniform(found.variants()[0].clone());
            let [(alive, less), (_, time)] =
                [&found, &alike].map(|plan| cost(&step.lower(&within(0), &ranks, TARGET, plan).unwrap()));
            println!("{bytes} bytes, {alive} alive, {less} ns again, {time} if all are alike, {best} at best");
            assert!(alive <= bytes && less <= time && best <= time);
            (again, at_best) = (again + time, at_best + best);
        }
        println!("{again} ns again, {at_best} at best");
        // The search adds the bytes of recomputation in W to what another micro-batch keeps of the earlier layers, not
        // of all layers.
        assert!(again as f64 <= 1.03 * at_best as f64, "{again} ns again, {at_best} at best");
    }
}

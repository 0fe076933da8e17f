//! The rows that experts receive in a step that does not run.
//!
//! In: a distribution of tokens over experts ([`ExpertLoad`]), and the sizes of a step. Out: the row counts of the
//! experts of one expert rank, for each layer and micro-batch. They are the same in every run and for every allocator,
//! because they depend on nothing else. No router runs.

use std::collections::{BTreeMap, HashSet};

use gapless_engine::compile::step::StepGraph;
use gapless_engine::graph::{Numbers, Place};
use gapless_engine::nn::Choice;
use gapless_models::hf::Architecture;
use gapless_parallel::StageId;

use super::Step;
use crate::run::ExpertLoad;

/// The rows that the experts of a rank receive. Of all expert ranks with the same pipeline rank, it is the one that
/// receives most rows in the whole step.
#[derive(Debug, Clone, PartialEq)]
pub struct RoutedRows {
    /// By layer and micro-batch: the row count of each of the rank's experts.
    counts: BTreeMap<String, Vec<Vec<u64>>>,
}

impl RoutedRows {
    /// The row count of each of the rank's experts in one micro-batch of a layer of experts. Empty if the step has no
    /// such layer or micro-batch.
    pub fn of_experts(&self, micro_batch: usize, layer: &str) -> &[u64] {
        self.counts.get(layer).and_then(|counts| counts.get(micro_batch)).map_or(&[], Vec::as_slice)
    }

    /// The rows that the rank receives in one micro-batch of a layer of experts.
    pub fn received(&self, micro_batch: usize, layer: &str) -> u64 {
        self.of_experts(micro_batch, layer).iter().sum()
    }
}

impl Step {
    /// Returns the rows that the experts of a pipeline rank receive under the load [`Self::expert_load`]. Of its expert
    /// ranks, the one with most rows counts. Returns `None` if the model is not a mixture of experts, or if its experts
    /// choose tokens, so that all experts have equally many rows.
    pub fn routed_rows(&self, graph: &StepGraph, rank: usize) -> Option<RoutedRows> {
        let Architecture::Moe(moe) = self.architecture() else { return None };
        if moe.router.choice == Choice::Experts {
            return None;
        }
        let options = &self.options;
        let ranks = options.mesh.expert.max(1);
        let tokens = (options.evaluation_batch() * options.sequence * ranks) as u64;
        let (top_k, experts) = (moe.router.top_k as u64, moe.router.experts);
        let even = (tokens * top_k) as f64 / experts.max(1) as f64;
        let capacity = moe.router.capacity.as_ref().map_or(tokens, |capacity| (capacity.factor * even).ceil() as u64);
        let tokens = Tokens { load: self.expert_load, tokens, top_k, experts, capacity: capacity.min(tokens) };
        // The counts of all experts: those of rank 0 come first.
        let graph = graph.graph();
        let table = options.pipeline.schedule.actions(&self.shape()).ok()?;
        let stages: HashSet<StageId> = table.get(rank)?.iter().map(|action| action.stage).collect();
        let is_here = |place: Place| matches!(place, Place::Stage(stage) if stages.contains(&stage));
        let here = graph.nodes().iter().filter(|node| node.op.name() == "dispatch" && is_here(node.place));
        let layers = here.map(|node| node.layer.to_string());
        let counts: BTreeMap<String, Vec<Vec<u64>>> = layers
            .map(|layer| {
                let counts = (0..options.micro_batches).map(|m| tokens.of_experts(m, &layer)).collect();
                (layer, counts)
            })
            .collect();
        let here = experts / ranks;
        let of_rank = |counts: &[u64], rank: usize| counts[rank * here..(rank + 1) * here].to_vec();
        let received = |rank: usize| {
            counts.values().flatten().map(|counts| of_rank(counts, rank).iter().sum::<u64>()).sum::<u64>()
        };
        let fullest = (0..ranks).rev().max_by_key(|&rank| received(rank)).unwrap_or(0);
        let here = |counts: Vec<Vec<u64>>| counts.iter().map(|counts| of_rank(counts, fullest)).collect();
        Some(RoutedRows { counts: counts.into_iter().map(|(layer, counts)| (layer, here(counts))).collect() })
    }

    /// Returns the rows of [`Self::routed_rows`] in the form that
    /// [`table_with_rows`](gapless_engine::compile::table_with_rows) reads. Rows are balanced if there are none.
    pub fn received_rows(&self, graph: &StepGraph, rank: usize) -> impl Fn(&str, u32, u64) -> u64 + use<> {
        let rows = self.routed_rows(graph, rank);
        move |layer, micro_batch, balanced| {
            rows.as_ref().map_or(balanced, |rows| rows.received(micro_batch as usize, layer))
        }
    }
}

/// The tokens of a micro-batch, over all expert ranks, and the experts that they choose.
#[derive(Debug, Clone)]
struct Tokens {
    load: ExpertLoad,
    tokens: u64,
    top_k: u64,
    experts: usize,
    /// The most rows of an expert.
    capacity: u64,
}

impl Tokens {
    /// The row count of every expert of a layer.
    fn of_experts(&self, micro_batch: usize, layer: &str) -> Vec<u64> {
        match self.load {
            ExpertLoad::Worst => {
                (0..self.experts).map(|expert| if (expert as u64) < self.top_k { self.capacity } else { 0 }).collect()
            }
            ExpertLoad::Skewed(exponent) => self.drawn(micro_batch, layer, exponent),
        }
    }

    /// Draws the row count of every expert. Which experts are popular depends on the layer only, so the same experts
    /// are popular in every micro-batch. A token chooses an expert at most once, so no expert has more rows than there
    /// are tokens. Each count has a binomial distribution, which is approximated by a normal distribution.
    fn drawn(&self, micro_batch: usize, layer: &str, exponent: f64) -> Vec<u64> {
        let of_layer = Numbers::from_seed(seed(layer));
        let mut ranking: Vec<usize> = (0..self.experts).collect();
        ranking.sort_by_key(|&expert| of_layer.bits(expert));
        let weight = |place: usize| ((place + 1) as f64).powf(-exponent);
        let numbers = Numbers::from_seed(of_layer.bits(self.experts + micro_batch));
        let mut weight_left: f64 = (0..self.experts).map(weight).sum();
        let mut left = (self.tokens * self.top_k).min(self.capacity * self.experts as u64);
        let mut counts = vec![0; self.experts];
        // The popular experts first, so that what exceeds their capacity goes to the others.
        for (place, &expert) in ranking.iter().enumerate() {
            let chance = (weight(place) / weight_left).min(1.0);
            weight_left -= weight(place);
            let mean = left as f64 * chance;
            let deviation = (mean * (1.0 - chance)).sqrt();
            let others = self.capacity * (self.experts - 1 - place) as u64;
            let (least, most) = (left.saturating_sub(others), left.min(self.capacity));
            let count = (mean + deviation * numbers.normal(expert)).round().max(0.0) as u64;
            counts[expert] = count.clamp(least, most);
            left -= counts[expert];
        }
        counts
    }
}

/// FNV-1a of a layer's name.
fn seed(layer: &str) -> u64 {
    layer.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(load: ExpertLoad) -> Tokens {
        Tokens { load, tokens: 4096, top_k: 4, experts: 60, capacity: 4096 }
    }

    #[test]
    fn all_rows_go_to_some_expert() {
        for load in [ExpertLoad::EVEN, ExpertLoad::Skewed(0.6), ExpertLoad::Skewed(2.0), ExpertLoad::Skewed(16.0)] {
            for (micro_batch, layer) in [(0, "h.0"), (1, "h.0"), (0, "h.1")] {
                let all = tokens(load).of_experts(micro_batch, layer);
                assert_eq!((all.len(), all.iter().sum::<u64>()), (60, 4 * 4096), "{load}");
                assert!(all.iter().all(|&count| count <= 4096), "{load}: {all:?}");
                assert_eq!(all, tokens(load).of_experts(micro_batch, layer));
            }
        }
    }

    #[test]
    fn skew_makes_ranks_unequal() {
        let most = |load| {
            let counts = tokens(load).of_experts(0, "h.0");
            counts.chunks(15).map(|counts| counts.iter().sum::<u64>()).max().unwrap()
        };
        let [even, some, much, worst] =
            [ExpertLoad::EVEN, ExpertLoad::Skewed(0.6), ExpertLoad::Skewed(1.5), ExpertLoad::Worst].map(most);
        assert!((4096..4300).contains(&even), "{even}");
        assert!(even < some && some < much && much <= worst, "{even} {some} {much} {worst}");
        assert_eq!(worst, 4 * 4096);
    }

    #[test]
    fn capacities_drop_rows() {
        let limited = |load| Tokens { capacity: 300, ..tokens(load) }.of_experts(0, "h.0");
        assert_eq!(limited(ExpertLoad::Worst)[..5], [300, 300, 300, 300, 0]);
        let skewed = limited(ExpertLoad::Skewed(1.0));
        assert!(skewed.iter().all(|&count| count <= 300), "{skewed:?}");
    }
}

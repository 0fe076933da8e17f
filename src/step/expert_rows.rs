//! The rows that experts receive in a step that does not run.
//!
//! In: a distribution of tokens over experts ([`ExpertLoad`]), drawn or recorded, and the sizes of a step. Out: the row counts of the
//! experts of one expert rank, for each layer and micro-batch. They are the same in every run and for every allocator,
//! because they depend on nothing else. No router runs.

use std::collections::{BTreeMap, HashSet};

use gapless_engine::compile::step::StepGraph;
use gapless_engine::graph::{Numbers, Place};
use gapless_engine::nn::Choice;
use gapless_models::hf::Architecture;
use gapless_parallel::{Axes, StageId};

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
        self.rows_of_steps(graph, rank, 1)
    }

    /// Like [`Self::routed_rows`], for several steps in a row. The micro-batches of all steps are numbered through.
    pub(super) fn rows_of_steps(&self, graph: &StepGraph, rank: usize, steps: usize) -> Option<RoutedRows> {
        let Architecture::Moe(moe) = self.architecture() else { return None };
        if moe.router.choice == Choice::Experts {
            return None;
        }
        let options = &self.options;
        let ranks = options.expert_ranks().max(1);
        // Tensor and context ranks among them divide the same sequences.
        let mesh = options.mesh;
        let sequences = (options.evaluation_batch() * mesh.size(mesh.experts() & Axes::SEQUENCES)) as u64;
        let divided = mesh.size(!mesh.experts() & Axes::CONTEXT) as u64;
        let tokens = sequences * options.sequence as u64 / divided;
        let (top_k, experts) = (moe.router.top_k as u64, moe.router.experts);
        let capacity =
            moe.router.capacity(options.sequence).map_or(tokens, |(of_sequence, _)| sequences * of_sequence as u64);
        let tokens = Tokens { load: self.expert_load.clone(), tokens, top_k, experts, capacity };
        // The counts of all experts: those of rank 0 come first.
        let graph = graph.graph();
        let table = options.pipeline.schedule.actions(&self.shape()).ok()?;
        let stages: HashSet<StageId> = table.get(rank)?.iter().map(|action| action.stage).collect();
        let is_here = |place: Place| matches!(place, Place::Stage(stage) if stages.contains(&stage));
        let mut layers: Vec<(&str, Place)> = Vec::new();
        for node in graph.nodes().iter().filter(|node| node.op.name() == "dispatch") {
            if !layers.iter().any(|(known, _)| *known == &*node.layer) {
                layers.push((&node.layer, node.place));
            }
        }
        let here = layers.into_iter().enumerate().filter(|(_, (_, place))| is_here(*place));
        let counts: BTreeMap<String, Vec<Vec<u64>>> = here
            .map(|(index, (layer, _))| {
                let counts = (0..steps * options.micro_batches).map(|m| tokens.of_experts(m, (index, layer))).collect();
                (layer.to_owned(), counts)
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
    /// The row count of every expert of a layer, which is given by its index among the layers with experts and by its
    /// name.
    fn of_experts(&self, micro_batch: usize, (index, layer): (usize, &str)) -> Vec<u64> {
        match &self.load {
            // The experts of rank 0 come first, and all of them are filled as long as tokens have choices left.
            ExpertLoad::Worst => {
                let mut left = self.tokens * self.top_k;
                let mut filled = || {
                    let count = left.min(self.capacity);
                    left -= count;
                    count
                };
                (0..self.experts).map(|_| filled()).collect()
            }
            // The choices beyond an expert's capacity are dropped. They do not go to other experts.
            ExpertLoad::Skewed(exponent) => {
                let counts = self.drawn(micro_batch, layer, *exponent);
                counts.into_iter().map(|count| count.min(self.capacity)).collect()
            }
            // Each micro-batch has the load of a recorded step.
            ExpertLoad::Recorded(load) => {
                let counts = self.scaled(load.of_layer(micro_batch, index));
                counts.into_iter().map(|count| count.min(self.capacity)).collect()
            }
        }
    }

    /// Scales recorded counts to the choices of this micro-batch, rounded so that their sum is right. The experts with
    /// the largest remainders are rounded up.
    fn scaled(&self, recorded: &[u64]) -> Vec<u64> {
        let of = |numerator: u64| u128::from(numerator) * u128::from(self.tokens * self.top_k);
        let sum = u128::from(recorded.iter().sum::<u64>().max(1));
        let mut counts: Vec<u64> = recorded.iter().map(|&count| (of(count) / sum) as u64).collect();
        counts.resize(self.experts, 0);
        let mut by_remainder: Vec<usize> = (0..recorded.len()).collect();
        by_remainder.sort_by_key(|&expert| std::cmp::Reverse(of(recorded[expert]) % sum));
        let left = self.tokens * self.top_k - counts.iter().sum::<u64>();
        by_remainder.into_iter().take(left as usize).for_each(|expert| counts[expert] += 1);
        // With a larger `top_k` than the recording's, an expert could have more rows than there are tokens.
        counts.into_iter().map(|count| count.min(self.tokens)).collect()
    }

    /// Draws how many tokens choose each expert. Which experts are popular depends on the layer only, so the same experts
    /// are popular in every micro-batch. A token chooses an expert at most once, so no count is larger than the
    /// number of tokens. Each count has a binomial distribution, which is approximated by a normal distribution.
    fn drawn(&self, micro_batch: usize, layer: &str, exponent: f64) -> Vec<u64> {
        let of_layer = Numbers::from_seed(seed(layer));
        let mut ranking: Vec<usize> = (0..self.experts).collect();
        ranking.sort_by_key(|&expert| of_layer.bits(expert));
        let weight = |place: usize| ((place + 1) as f64).powf(-exponent);
        let numbers = Numbers::from_seed(of_layer.bits(self.experts + micro_batch));
        let mut weight_left: f64 = (0..self.experts).map(weight).sum();
        let mut left = self.tokens * self.top_k;
        let mut counts = vec![0; self.experts];
        // The popular experts first, so that the choices of tokens that all chose them already go to the others.
        for (place, &expert) in ranking.iter().enumerate() {
            let chance = (weight(place) / weight_left).min(1.0);
            weight_left -= weight(place);
            let mean = left as f64 * chance;
            let deviation = (mean * (1.0 - chance)).sqrt();
            let others = self.tokens * (self.experts - 1 - place) as u64;
            let (least, most) = (left.saturating_sub(others), left.min(self.tokens));
            let count = (mean + deviation * numbers.normal(expert)).round().max(0.0) as u64;
            counts[expert] = count.clamp(least, most);
            left -= counts[expert];
        }
        counts
    }
}

/// The first bytes of a hash of a layer's name.
fn seed(layer: &str) -> u64 {
    u64::from_le_bytes(*blake3::hash(layer.as_bytes()).as_bytes().first_chunk().expect("a hash has 32 bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::RunConfig;

    fn tokens(load: &ExpertLoad) -> Tokens {
        Tokens { load: load.clone(), tokens: 4096, top_k: 4, experts: 60, capacity: 4096 }
    }

    #[test]
    fn all_rows_go_to_some_expert() {
        for load in &[ExpertLoad::EVEN, ExpertLoad::Skewed(0.6), ExpertLoad::Skewed(2.0), ExpertLoad::Skewed(16.0)] {
            for (micro_batch, layer) in [(0, "h.0"), (1, "h.0"), (0, "h.1")] {
                let all = tokens(load).of_experts(micro_batch, (0, layer));
                assert_eq!((all.len(), all.iter().sum::<u64>()), (60, 4 * 4096), "{load}");
                assert!(all.iter().all(|&count| count <= 4096), "{load}: {all:?}");
                assert_eq!(all, tokens(load).of_experts(micro_batch, (0, layer)));
            }
        }
    }

    #[test]
    fn skew_makes_ranks_unequal() {
        let most = |load: &ExpertLoad| {
            let counts = tokens(load).of_experts(0, (0, "h.0"));
            counts.chunks(15).map(|counts| counts.iter().sum::<u64>()).max().unwrap()
        };
        let [even, some, much, worst] =
            [ExpertLoad::EVEN, ExpertLoad::Skewed(0.6), ExpertLoad::Skewed(1.5), ExpertLoad::Worst]
                .each_ref()
                .map(most);
        assert!((4096..4300).contains(&even), "{even}");
        assert!(even < some && some < much && much <= worst, "{even} {some} {much} {worst}");
        assert_eq!(worst, 4 * 4096);
    }

    #[test]
    fn capacities_drop_rows() {
        let limited = |load: &ExpertLoad, capacity| Tokens { capacity, ..tokens(load) }.of_experts(0, (0, "h.0"));
        // All 15 experts of the first of four ranks are full, which is more than any other load sends to a rank.
        let worst = limited(&ExpertLoad::Worst, 300);
        assert_eq!(worst[..15], [300; 15]);
        assert_eq!(worst.iter().sum::<u64>(), 4 * 4096);
        // A token has four choices, so four full experts are all that a capacity of all tokens allows.
        assert_eq!(limited(&ExpertLoad::Worst, 4096)[..5], [4096, 4096, 4096, 4096, 0]);
        for load in &[ExpertLoad::EVEN, ExpertLoad::Skewed(1.0), ExpertLoad::Skewed(4.0)] {
            let chosen = tokens(load).of_experts(0, (0, "h.0"));
            let skewed = limited(load, 300);
            assert!(skewed.iter().zip(&chosen).all(|(rows, chosen)| *rows == 300.min(*chosen)), "{load}: {skewed:?}");
            assert!(skewed.chunks(15).all(|rank| rank.iter().sum::<u64>() <= 15 * 300), "{load}: {skewed:?}");
        }
    }

    /// Recorded loads keep their proportions. Micro-batches take the recorded steps in turn.
    #[test]
    fn recorded_rows_are_scaled() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("load.csv");
        let write = |text: &str| std::fs::write(&path, format!("step,layer,expert,tokens\n{text}")).unwrap();
        let text = format!(
            "model = \"moe:llama.vocabulary=64,llama.layers=2,llama.heads=2,llama.kv_heads=2,llama.width=64,router.experts=4,\
             router.top_k=2,expert_hidden=64\"\nstep = {{ batch = 12, micro_batches = 3, sequence = 10 }}\nmesh.expert = 2\n\
             estimate.expert_load = \"recorded:{}\"",
            path.display()
        );
        write("1,a,0,3\n1,a,1,0\n1,a,3,1\n1,b,2,5\n2,a,0,1\n2,a,1,1\n2,a,2,1\n2,b,3,5\n2,b,2,5\n");
        let step = Step::new(&RunConfig::parse(&text, &[]).unwrap()).unwrap();
        let rows = step.routed_rows(&step.record().unwrap(), 0).unwrap();
        let counts: Vec<&Vec<Vec<u64>>> = rows.counts.values().collect();
        // 40 tokens of both expert ranks make 80 choices. The rank with experts 2 and 3 has most rows in both layers. Of 27,
        // 27 and 26 rows, expert 2 has the last, and no expert has more rows than there are tokens.
        assert_eq!(counts[0], &[[0, 20], [26, 0], [0, 20]], "{rows:?}");
        assert_eq!(counts[1], &[[40, 0], [40, 40], [40, 0]], "{rows:?}");
        let refused = |lines: &str| {
            write(lines);
            Step::new(&RunConfig::parse(&text, &[]).unwrap()).unwrap_err().to_string()
        };
        assert!(refused("1,a,0,3\n").contains("1 layer(s) of 1 experts, but the model has 2 of 4"));
        assert!(refused("1,a,0,3\n1,b,4,3\n").contains("2 layer(s) of 5 experts, but the model has 2 of 4"));
    }

    /// A router's capacity limits the rows of each sequence, rounded up.
    #[test]
    fn capacities_are_those_of_sequences() {
        let text = "model = \"moe:llama.vocabulary=64,llama.layers=1,llama.heads=2,llama.kv_heads=2,llama.width=64,\
                    router.experts=16,router.top_k=2,router.capacity.factor=1.25,router.capacity.drop='last',expert_hidden=64\"\n\
                    step = { batch = 8, sequence = 30 }\nmesh.expert = 4\nestimate.expert_load = 'worst'";
        let step = Step::new(&RunConfig::parse(text, &[]).unwrap()).unwrap();
        let rows = step.routed_rows(&step.record().unwrap(), 0).unwrap();
        let (layer, counts) = rows.counts.first_key_value().unwrap();
        let sequences = (step.options.evaluation_batch() * 4) as u64;
        // 1.25 × 30 · 2 / 16 = 4.69 tokens.
        assert_eq!(counts[0], [5 * sequences; 4], "{layer}");
    }
}

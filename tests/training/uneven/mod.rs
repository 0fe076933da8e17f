//! Models whose routers are made to route extremely unevenly.
#![allow(dead_code, reason = "not every test uses all of it")]

use candle_core::{Device, Tensor};
use gapless::engine::ops::DropPolicy;
use gapless::models::{LlamaConfig, MoeConfig};
use gapless::nn::{Capacity, RouterConfig, Score};
use gapless::{MemoryOptions, Mesh, Reserve, StepOptions, TrainOptions, Trainer};

use crate::common::{PLANNING, on_cpu};

pub const EXPERTS: usize = 8;
pub const LAYERS: usize = 2;
pub const WIDTH: usize = 32;
pub const VOCABULARY: usize = 50;
pub const BATCH: usize = 8;
pub const SEQUENCE: usize = 24;
pub const STEPS: u64 = 4;

/// The experts that the tokens of a step choose.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Pattern {
    /// All tokens choose one expert, because of its bias.
    One(usize),
    /// All scores are equal, so all tokens choose the first expert.
    Alike,
    /// All tokens choose experts of the second half.
    NotTheFirstHalf,
    /// Each expert is chosen by fewer tokens than the expert before it.
    Zipf,
}

impl Pattern {
    /// Sets the weights and biases of all routers of this rank.
    pub fn steer(self, trainer: &mut Trainer) {
        let routers: Vec<String> =
            trainer.parameter_names().filter(|name| name.contains(".gate.")).map(Into::into).collect();
        for name in routers {
            let value = match name.ends_with(".weight") {
                true => Tensor::from_vec(self.weight(), (EXPERTS, WIDTH), &Device::Cpu),
                false => Tensor::from_vec(self.bias(), EXPERTS, &Device::Cpu),
            };
            trainer.set_tensor(&name, &value.unwrap()).unwrap();
        }
    }

    /// Returns a router's weight. The logits of a token differ by about 1, unless all are 0.
    fn weight(self) -> Vec<f32> {
        let spread = if self == Self::Alike { 0.0 } else { 0.3 };
        let mixed = |i: usize| (i as u32).wrapping_mul(2_654_435_761) >> 16;
        (0..EXPERTS * WIDTH).map(|i| spread * (mixed(i + 1) as f32 / 32_768.0 - 1.0)).collect()
    }

    /// Returns a router's bias, which is large compared with scores between 0 and 1.
    fn bias(self) -> Vec<f32> {
        let bias = |expert: usize| match self {
            Self::One(chosen) => f32::from(u8::from(expert == chosen)) * 10.0,
            Self::Alike => 0.0,
            Self::NotTheFirstHalf => f32::from(u8::from(expert >= EXPERTS / 2)) * 10.0,
            Self::Zipf => -0.3 * (expert as f32 + 1.0).ln(),
        };
        (0..EXPERTS).map(bias).collect()
    }

    /// Checks that the loads follow the pattern. The load of an expert is the number of tokens that chose this expert.
    pub fn check(self, load: &[f32], what: &str) {
        let all: f32 = load.iter().sum();
        let fits = match self {
            Self::One(expert) => load[expert] == all,
            Self::Alike => load[0] == all,
            Self::NotTheFirstHalf => load[..EXPERTS / 2].iter().all(|&tokens| tokens == 0.0),
            Self::Zipf => load[0] > 2.0 * all / EXPERTS as f32 && load[EXPERTS - 1] < 0.5 * all / EXPERTS as f32,
        };
        assert!(fits, "{what}: {self:?} is not what was chosen: {load:?}");
    }
}

/// A model, and the pattern of its routing at each step.
pub struct Case {
    pub name: &'static str,
    pub config: MoeConfig,
    pub pattern: fn(u64) -> Pattern,
}

pub fn config(top_k: usize) -> MoeConfig {
    let llama = LlamaConfig {
        vocabulary: VOCABULARY,
        layers: LAYERS,
        heads: 4,
        kv_heads: 2,
        width: WIDTH,
        hidden: 48,
        ..LlamaConfig::default()
    };
    let router = RouterConfig {
        experts: EXPERTS,
        top_k,
        score: Score::Sigmoid,
        renormalise: false,
        bias_rate: 0.001,
        balance_loss: 0.1,
        z_loss: 0.01,
        ..RouterConfig::default()
    };
    MoeConfig { llama, router, expert_hidden: 64, ..MoeConfig::default() }
}

pub fn cases() -> [Case; 6] {
    let with = |top_k, change: fn(&mut RouterConfig)| {
        let mut config = config(top_k);
        change(&mut config.router);
        config
    };
    let alike = |router: &mut RouterConfig| (router.score, router.bias_rate) = (Score::Softmax, 0.0);
    let tight =
        |router: &mut RouterConfig| router.capacity = Some(Capacity { factor: 1.5, drop: DropPolicy::Lightest });
    [
        Case { name: "all to the last expert", config: config(1), pattern: |_| Pattern::One(EXPERTS - 1) },
        Case { name: "all scores alike", config: with(1, alike), pattern: |_| Pattern::Alike },
        Case { name: "none to the first half", config: config(2), pattern: |_| Pattern::NotTheFirstHalf },
        Case { name: "Zipf", config: config(2), pattern: |_| Pattern::Zipf },
        Case {
            name: "oscillating",
            config: config(1),
            pattern: |step| [Pattern::One(0), Pattern::One(EXPERTS - 1), Pattern::Zipf][step as usize % 3],
        },
        Case { name: "all to one with a capacity", config: with(1, tight), pattern: |_| Pattern::One(0) },
    ]
}

pub fn options(mesh: Mesh, routing: Reserve) -> TrainOptions {
    TrainOptions {
        step: StepOptions {
            batch: BATCH,
            sequence: SEQUENCE,
            micro_batches: 4 / mesh.expert,
            mesh,
            memory: MemoryOptions { routing, planning: PLANNING, ..on_cpu().step.memory },
            ..on_cpu().step
        },
        threads: 1,
        seed: 5,
        poison: true,
        ..on_cpu()
    }
}

pub fn experts(ranks: usize) -> Mesh {
    Mesh { expert: ranks, ..Mesh::default() }
}

pub fn batch(step: u64) -> (Vec<u32>, Vec<u32>) {
    let id = |i: u64| ((step * 7919 + i) * (step * 7919 + i) % 1009) as u32 % VOCABULARY as u32;
    let count = (BATCH * SEQUENCE) as u64;
    ((0..count).map(id).collect(), (1..=count).map(id).collect())
}

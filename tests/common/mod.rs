//! Small training runs whose results can be compared bit by bit.
#![allow(dead_code, reason = "not every test uses all of it")]

use std::hash::{DefaultHasher, Hash, Hasher};

use gapless::models::{Gpt, GptConfig, Llama, LlamaConfig};
use gapless::{StepReport, TrainOptions, Trainer};

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Kind {
    Gpt,
    Llama,
}

/// A model, its options, and a batch per step.
#[derive(Debug, Clone)]
pub struct Run {
    pub kind: Kind,
    pub options: TrainOptions,
}

impl Default for Run {
    fn default() -> Self {
        let options = TrainOptions { batch: 8, sequence: 24, threads: 2, seed: 7, ..TrainOptions::default() };
        Self { kind: Kind::Gpt, options }
    }
}

/// What a run ends with, as bits.
#[derive(Debug, PartialEq)]
pub struct Outcome {
    pub losses: Vec<u32>,
    pub gradient_norms: Vec<u32>,
    /// Name and hash of every parameter's bits.
    pub parameters: Vec<(String, u64)>,
}

pub const VOCABULARY: u32 = 50;

impl Run {
    pub fn trainer(&self) -> Trainer {
        let vocabulary = VOCABULARY as usize;
        let options = self.options.clone();
        match self.kind {
            Kind::Gpt => {
                let config = GptConfig { vocabulary, sequence: 32, layers: 2, heads: 3, width: 48, dropout: 0.1 };
                Trainer::new(|vb| Gpt::new(&config, vb), options)
            }
            Kind::Llama => {
                let config = LlamaConfig {
                    vocabulary,
                    layers: 2,
                    heads: 4,
                    kv_heads: 2,
                    width: 48,
                    hidden: 80,
                    ..LlamaConfig::default()
                };
                Trainer::new(|vb| Llama::new(&config, vb), options)
            }
        }
        .expect("the model is sound")
    }

    /// The batch of a step: pseudo-random ids and their successors.
    pub fn batch(&self, step: u64) -> (Vec<u32>, Vec<u32>) {
        let id = |i: u64| ((step * 7919 + i) * (step * 7919 + i) % 1009) as u32 % VOCABULARY;
        let count = (self.options.batch * self.options.sequence) as u64;
        ((0..count).map(id).collect(), (1..=count).map(id).collect())
    }

    pub fn step(&self, trainer: &mut Trainer) -> StepReport {
        let (tokens, targets) = self.batch(trainer.steps());
        trainer.step(&tokens, &targets).expect("the step is sound")
    }

    pub fn steps(&self, count: u64) -> Outcome {
        let mut trainer = self.trainer();
        self.go_on(&mut trainer, count)
    }

    pub fn go_on(&self, trainer: &mut Trainer, count: u64) -> Outcome {
        let reports: Vec<StepReport> = (0..count).map(|_| self.step(trainer)).collect();
        Outcome {
            losses: reports.iter().map(|r| r.loss.to_bits()).collect(),
            gradient_norms: reports.iter().map(|r| r.gradient_norm.to_bits()).collect(),
            parameters: parameters(trainer),
        }
    }
}

pub fn parameters(trainer: &Trainer) -> Vec<(String, u64)> {
    let hash = |name: &str| {
        let values: Vec<f32> = trainer.tensor(name).unwrap().flatten_all().unwrap().to_vec1().unwrap();
        let mut hasher = DefaultHasher::new();
        values.iter().for_each(|value| value.to_bits().hash(&mut hasher));
        (name.to_owned(), hasher.finish())
    };
    trainer.parameter_names().map(hash).collect()
}

//! The measured training steps: GPT-2 in several sizes, the shapes of two Llamas, and a small model.

use std::fmt;

use clap::ValueEnum;
use gapless::engine::compile::{CompileOptions, Executable, InstrKind, Program, Target, compile, step};
use gapless::models::{Gpt, GptConfig, Llama, LlamaConfig};
use gapless::{DType, DeviceChoice, StepOptions, TrainOptions, Trainer};
use serde::Serialize;

use super::probe::Gpu;

/// The models, by the name used on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Model {
    /// A model for smoke tests: 2 layers, width 64, 2 heads, 512 ids.
    Small,
    /// GPT-2 124M.
    Gpt2,
    /// GPT-2 355M.
    Gpt2Medium,
    /// GPT-2 1.5B.
    Gpt2Xl,
    /// The shapes of Llama 3.2 1B.
    Llama1b,
    /// The shapes of Llama 3 8B.
    Llama8b,
}

/// A model's configuration.
#[derive(Debug, Clone)]
pub enum Config {
    Gpt(GptConfig),
    Llama(LlamaConfig),
}

impl Config {
    pub fn vocabulary(&self) -> usize {
        match self {
            Self::Gpt(config) => config.vocabulary,
            Self::Llama(config) => config.vocabulary,
        }
    }

    pub fn parameters(&self) -> u64 {
        match self {
            Self::Gpt(config) => config.parameters(),
            Self::Llama(config) => config.parameters(),
        }
    }
}

/// The type in which parameters and activations are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Float {
    F32,
    /// With masters and moments in f32.
    Bf16,
}

impl fmt::Display for Float {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
        })
    }
}

/// A training step with one micro-batch.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Step {
    pub model: Model,
    pub dtype: Float,
    pub micro_batch: usize,
    pub sequence: usize,
    pub seed: u64,
}

/// Numbers of a step's plan that are known without a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Planned {
    pub arena_bytes: u64,
    /// Floating-point operations of the attention's forward.
    attention_flops: u64,
}

impl Step {
    pub fn config(&self) -> Config {
        let (vocabulary, layers, heads, width) = match self.model {
            Model::Small => (512, 2, 2, 64),
            Model::Gpt2 => (50_257, 12, 12, 768),
            Model::Gpt2Medium => (50_257, 24, 16, 1024),
            Model::Gpt2Xl => (50_257, 48, 25, 1600),
            Model::Llama1b => {
                let config =
                    LlamaConfig { layers: 16, width: 2048, hidden: 8192, tied: true, ..LlamaConfig::default() };
                return Config::Llama(LlamaConfig { head_size: Some(64), ..config });
            }
            // The default configuration of a Llama is Llama 3 8B.
            Model::Llama8b => return Config::Llama(LlamaConfig::default()),
        };
        // GPT-2 has 1,024 positions. If the sequence is shorter, only the first positions are used.
        let positions = if self.model == Model::Small { self.sequence } else { self.sequence.max(1024) };
        let config = GptConfig { vocabulary, layers, heads, width, sequence: positions, ..GptConfig::default() };
        Config::Gpt(GptConfig { dropout: 0.0, ..config })
    }

    pub fn tokens(&self) -> usize {
        self.micro_batch * self.sequence
    }

    fn options(&self, device: DeviceChoice) -> TrainOptions {
        let dtype = match self.dtype {
            Float::F32 => DType::F32,
            Float::Bf16 => DType::BF16,
        };
        let &Self { micro_batch, sequence, seed, .. } = self;
        TrainOptions {
            step: StepOptions {
                batch: micro_batch,
                sequence,
                precision: dtype.try_into().expect("f32 or bf16"),
                ..StepOptions::default()
            },
            device,
            seed,
            ..TrainOptions::default()
        }
    }

    pub fn trainer(&self, device: DeviceChoice) -> Result<Trainer, gapless::TrainError> {
        let options = self.options(device);
        match self.config() {
            Config::Gpt(config) => Trainer::new(|vb| Gpt::new(&config, vb), options),
            Config::Llama(config) => Trainer::new(|vb| Llama::new(&config, vb), options),
        }
    }

    /// Plans the step for a GPU.
    pub fn plan(&self) -> Result<Planned, gapless::TrainError> {
        let (executable, attention_flops) = self.compiled()?;
        Ok(Planned { arena_bytes: executable.arena_bytes(), attention_flops })
    }

    /// Returns the executable for a GPU, and the floating-point operations of the attention's forward.
    pub fn compiled(&self) -> Result<(Executable, u64), gapless::TrainError> {
        let options = self.options(Gpu(0).choice());
        let program = match self.config() {
            Config::Gpt(config) => step::program(|vb| Gpt::new(&config, vb), &options.step, 0, Target::Cuda),
            Config::Llama(config) => step::program(|vb| Llama::new(&config, vb), &options.step, 0, Target::Cuda),
        }?;
        let attention_flops = attention_flops(&program);
        let within = CompileOptions::within(None, options.step.memory.planning, options.step.memory.routing);
        Ok((compile(&[program], &within)?, attention_flops))
    }

    /// Returns the floating-point operations that a step of this model requires, however it is computed. There are 6
    /// per parameter and token, plus three times the attention's forward, without the scores that a causal mask
    /// hides. Except for the mask, this is the count of PaLM's appendix B (Chowdhery et al., arXiv 2204.02311).
    /// Recomputation does not count.
    pub fn model_flops(&self, planned: &Planned) -> f64 {
        6.0 * self.config().parameters() as f64 * self.tokens() as f64 + 3.0 * planned.attention_flops as f64
    }
}

fn attention_flops(program: &Program) -> u64 {
    let is_attention = |work: &InstrKind| matches!(work, InstrKind::Compute(op) if op.name() == "attention");
    program.instrs.iter().filter(|step| is_attention(&step.kind)).map(|step| step.flops()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_have_the_sizes_of_their_names_and_arithmetic_is_counted_once() {
        let step = |model, dtype| Step { model, dtype, micro_batch: 3, sequence: 32, seed: 0 };
        let sizes = [
            (Model::Gpt2, 124),
            (Model::Gpt2Medium, 355),
            (Model::Gpt2Xl, 1558),
            (Model::Llama1b, 1236),
            (Model::Llama8b, 8030),
        ];
        for (model, millions) in sizes {
            assert_eq!((step(model, Float::F32).config().parameters() + 500_000) / 1_000_000, millions);
        }
        // Each layer has two products over the scores on and below the diagonal. A multiplication and an addition
        // count as two.
        let scores = 32 * 33 / 2;
        let forward = 2 * 2 * 2 * 3 * 64 * scores;
        let small = step(Model::Small, Float::F32);
        let planned = small.plan().unwrap();
        assert_eq!(planned.attention_flops, forward);
        let parameters = small.config().parameters();
        assert_eq!(small.model_flops(&planned), (6 * parameters * 96 + 3 * forward) as f64);
        assert!(step(Model::Small, Float::Bf16).plan().unwrap().arena_bytes < planned.arena_bytes);
    }
}

//! The measured training steps: GPT-2 in several sizes, the shapes of two Llamas, mixtures of experts, adapters, and
//! small models.

use std::fmt;

use clap::ValueEnum;
use gapless::engine::compile::{Executable, InstrKind, Program, Target, compile, step};
use gapless::models::{Gpt, GptConfig, Llama, LlamaConfig, Moe, MoeConfig, MoeStyle};
use gapless::parallel::Rates;
use gapless::{DType, DeviceChoice, Lora, MemoryOptions, StepOptions, TrainError, TrainOptions, Trainable, Trainer};
use serde::{Deserialize, Serialize};

use super::probe::Gpu;

/// The models, by the name used on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
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
    /// GPT-3 6.7B (arXiv 2005.14165, table 2.1), with 1,024 positions.
    #[value(name = "gpt6.7b")]
    #[serde(rename = "gpt6.7b")]
    Gpt6_7b,
    /// The shapes of Llama 3.2 1B.
    Llama1b,
    /// The shapes of Llama 3 8B.
    Llama8b,
    /// A mixture with Mixtral's routing: 607M parameters, 192M of them for each token; 8 layers, width 1024, 2 of 8
    /// experts with a hidden width of 2816, 32,000 ids, tied.
    Mixture,
    /// A mixture with DeepSeek's routing and the shapes of `mixture`: 577M parameters, 153M of them for each token; 4 of
    /// 32 experts with a hidden width of 704, of 2 of 4 groups, by sigmoid scores; a shared expert; a first layer without
    /// experts. The router has a bias that moves towards balance.
    Deepseek,
    /// A mixture with Mixtral's routing for smoke tests: 2 layers, width 64, 512 ids.
    SmallMixture,
    /// A mixture with DeepSeek's routing for smoke tests.
    SmallDeepseek,
    /// GPT-2 124M, frozen, with trained adapters of rank 8 in all layers of its blocks.
    Gpt2Lora,
}

/// A model's configuration.
#[derive(Debug, Clone)]
pub enum Config {
    Gpt(GptConfig),
    Llama(LlamaConfig),
    Moe(Box<MoeConfig>),
}

impl Config {
    pub fn vocabulary(&self) -> usize {
        match self {
            Self::Gpt(config) => config.vocabulary,
            Self::Llama(config) => config.vocabulary,
            Self::Moe(config) => config.llama.vocabulary,
        }
    }

    pub fn parameters(&self) -> u64 {
        match self {
            Self::Gpt(config) => config.parameters(),
            Self::Llama(config) => config.parameters(),
            Self::Moe(config) => config.parameters(),
        }
    }

    /// Returns the number of parameters that are used for each token.
    fn active_parameters(&self) -> u64 {
        match self {
            Self::Moe(config) => config.active_parameters(),
            _ => self.parameters(),
        }
    }
}

/// Returns a mixture with the routing of a style. The hidden widths are those of an expert and of the shared expert.
/// Layers without experts have the hidden width of all experts of a token together.
fn mixture(style: MoeStyle, llama: LlamaConfig, [expert_hidden, shared_hidden]: [usize; 2]) -> Box<MoeConfig> {
    let MoeConfig { router, dense_layers, .. } = MoeConfig::small(style, llama.vocabulary);
    let llama = LlamaConfig { hidden: router.top_k * expert_hidden, tied: true, ..llama };
    Box::new(MoeConfig { llama, router, expert_hidden, shared_hidden, dense_layers, ..MoeConfig::default() })
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
    /// The maximum bytes of the arena. The engine recomputes what does not fit.
    pub budget_bytes: Option<u64>,
}

/// The arithmetic of a step in which nothing is recomputed, in floating-point operations.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Arithmetic {
    /// All operations that the step executes.
    pub executed: u64,
    /// The operations that a step of this model requires, however it is computed: 6 per parameter and token, or 4 if
    /// the parameters are frozen, plus three times the attention's forward, without the scores that a causal mask
    /// hides. In a mixture, the parameters that are used for a token count. Except for the mask, this is the count of
    /// PaLM's appendix B (Chowdhery et al., arXiv 2204.02311).
    pub required: f64,
}

impl Arithmetic {
    /// Returns the arithmetic of recomputed operations, relative to all other arithmetic, of a step that executes
    /// `flops`.
    pub fn recomputed(&self, flops: u64) -> f64 {
        flops as f64 / self.executed as f64 - 1.0
    }
}

/// The speed of an H200, by which a budget chooses the values to recompute.
const RATES: Rates = Rates { flops: 770e12, bytes: 4.3e12 };

impl Step {
    pub fn config(&self) -> Config {
        let llama = |layers, [heads, kv_heads]: [usize; 2], width, vocabulary| {
            let rope_theta = if vocabulary > 100_000 { 500_000.0 } else { 1e6 };
            LlamaConfig { layers, heads, kv_heads, width, vocabulary, rope_theta, ..LlamaConfig::default() }
        };
        let mixture_llama = llama(8, [16, 4], 1024, 32_000);
        let small_llama = llama(2, [4, 2], 64, 512);
        let (vocabulary, layers, heads, width) = match self.model {
            Model::Small => (512, 2, 2, 64),
            Model::Gpt2 | Model::Gpt2Lora => (50_257, 12, 12, 768),
            Model::Gpt2Medium => (50_257, 24, 16, 1024),
            Model::Gpt2Xl => (50_257, 48, 25, 1600),
            Model::Gpt6_7b => (50_257, 32, 32, 4096),
            Model::Llama1b => {
                let config = llama(16, [32, 8], 2048, 128_256);
                return Config::Llama(LlamaConfig { hidden: 8192, tied: true, ..config });
            }
            // The default configuration of a Llama is Llama 3 8B.
            Model::Llama8b => return Config::Llama(LlamaConfig::default()),
            Model::Mixture => return Config::Moe(mixture(MoeStyle::Mixtral, mixture_llama, [2816, 0])),
            Model::Deepseek => return Config::Moe(mixture(MoeStyle::DeepSeek, mixture_llama, [704, 1408])),
            Model::SmallMixture => return Config::Moe(mixture(MoeStyle::Mixtral, small_llama, [128, 0])),
            Model::SmallDeepseek => return Config::Moe(mixture(MoeStyle::DeepSeek, small_llama, [32, 64])),
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
        let &Self { micro_batch, sequence, seed, budget_bytes, .. } = self;
        let lora = Lora { targets: ["c_attn", "c_proj", "c_fc"].map(str::to_owned).to_vec(), ..Lora::default() };
        TrainOptions {
            step: StepOptions {
                batch: micro_batch,
                sequence,
                precision: dtype.try_into().expect("f32 or bf16"),
                memory: MemoryOptions { budget: budget_bytes, rates: RATES, ..MemoryOptions::default() },
                trainable: if self.is_frozen() { Trainable::Lora(lora) } else { Trainable::All },
                ..StepOptions::default()
            },
            device,
            seed,
            ..TrainOptions::default()
        }
    }

    /// True if only adapters are trained.
    fn is_frozen(&self) -> bool {
        self.model == Model::Gpt2Lora
    }

    pub fn trainer(&self, device: DeviceChoice) -> Result<Trainer, TrainError> {
        let options = self.options(device);
        match self.config() {
            Config::Gpt(config) => Trainer::new(|vb| Gpt::new(&config, vb), options),
            Config::Llama(config) => Trainer::new(|vb| Llama::new(&config, vb), options),
            Config::Moe(config) => Trainer::new(|vb| Moe::new(&*config, vb), options),
        }
    }

    /// Returns the program of the step for a GPU.
    ///
    /// # Errors
    /// Returns an error if nothing fits the budget.
    pub fn program(&self) -> Result<Program, TrainError> {
        let options = self.options(Gpu(0).choice()).step;
        Ok(match self.config() {
            Config::Gpt(config) => step::program(|vb| Gpt::new(&config, vb), &options, 0, Target::Cuda),
            Config::Llama(config) => step::program(|vb| Llama::new(&config, vb), &options, 0, Target::Cuda),
            Config::Moe(config) => step::program(|vb| Moe::new(&*config, vb), &options, 0, Target::Cuda),
        }?)
    }

    /// Plans the program of the step.
    ///
    /// # Errors
    /// Returns an error if the plan exceeds the budget.
    pub fn compiled(&self, program: Program) -> Result<Executable, TrainError> {
        Ok(compile(&[program], &self.options(Gpu(0).choice()).step.planning())?)
    }

    /// Returns the bytes of the arena of a step on a GPU.
    ///
    /// # Errors
    /// Returns an error if nothing fits the budget.
    pub fn arena_bytes(&self) -> Result<u64, TrainError> {
        Ok(self.compiled(self.program()?)?.arena_bytes())
    }

    /// Counts the arithmetic of the step.
    ///
    /// # Errors
    /// Returns an error if the model is refused.
    pub fn arithmetic(&self) -> Result<Arithmetic, TrainError> {
        let program = Self { budget_bytes: None, ..*self }.program()?;
        let per_parameter = if self.is_frozen() { 4.0 } else { 6.0 };
        let products = per_parameter * self.config().active_parameters() as f64 * self.tokens() as f64;
        Ok(Arithmetic { executed: program.flops(), required: products + 3.0 * attention_flops(&program) as f64 })
    }
}

fn attention_flops(program: &Program) -> u64 {
    let is_attention = |work: &InstrKind| matches!(work, InstrKind::Compute(op) if op.name() == "attention");
    program.instrs.iter().filter(|step| is_attention(&step.kind)).map(|step| step.flops()).sum()
}

#[cfg(test)]
mod tests {
    use gapless::engine::cuda::CudaBackend;

    use super::*;

    #[test]
    fn models_have_the_sizes_of_their_names_and_arithmetic_is_counted_once() {
        let step = |model, dtype| Step { model, dtype, micro_batch: 3, sequence: 32, seed: 0, budget_bytes: None };
        let sizes = [
            (Model::Gpt2, 124, 124),
            (Model::Gpt2Medium, 355, 355),
            (Model::Gpt2Xl, 1558, 1558),
            (Model::Gpt6_7b, 6654, 6654),
            (Model::Llama1b, 1236, 1236),
            (Model::Llama8b, 8030, 8030),
            (Model::Mixture, 607, 192),
            (Model::Deepseek, 577, 153),
        ];
        for (model, millions, active) in sizes {
            let config = step(model, Float::F32).config();
            let found = [config.parameters(), config.active_parameters()].map(|count| (count + 500_000) / 1_000_000);
            assert_eq!(found, [millions, active], "{model:?}");
        }
        // Each layer has two products over the scores on and below the diagonal. A multiplication and an addition
        // count as two.
        let scores = 32 * 33 / 2;
        let forward = 2 * 2 * 2 * 3 * 64 * scores;
        let small = step(Model::Small, Float::F32);
        let parameters = small.config().parameters();
        assert_eq!(small.arithmetic().unwrap().required, (6 * parameters * 96 + 3 * forward) as f64);
        assert!(step(Model::Small, Float::Bf16).arena_bytes().unwrap() < small.arena_bytes().unwrap());
        // A GPU has kernels for every step, in both types. A budget of nine tenths requires recomputation.
        for model in [Model::Small, Model::SmallMixture, Model::SmallDeepseek, Model::Gpt2Lora] {
            for dtype in [Float::F32, Float::Bf16] {
                let step = Step { micro_batch: 8, sequence: 128, ..step(model, dtype) };
                let budget = step.arena_bytes().unwrap() / 10 * 9;
                let within = Step { budget_bytes: Some(budget), ..step };
                if model != Model::Gpt2Lora {
                    let program = within.program().unwrap();
                    assert!(program.flops() > step.arithmetic().unwrap().executed, "{model:?} in {dtype}");
                    assert!(within.compiled(program).unwrap().arena_bytes() <= budget);
                }
                CudaBackend::work(&step.compiled(step.program().unwrap()).unwrap()).unwrap();
            }
        }
    }
}

//! Small training runs whose results can be compared bit by bit.
#![allow(dead_code, reason = "not every test uses all of it")]

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::Path;

use gapless::communicator::{self, Communicator};
use gapless::engine::checkpoint::Checkpoint;
use gapless::engine::nn::RouterConfig;
use gapless::models::{Gpt, GptConfig, LatentConfig, Llama, LlamaConfig, Moe, MoeConfig, MoeStyle, Traits};
use gapless::nn::VarBuilder;
use gapless::{
    Batch, DType, DeviceChoice, IGNORED, MemoryOptions, Model, StepOptions, StepReport, TrainOptions, Trainer,
};

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Kind {
    Gpt,
    Llama,
    /// A Llama whose attention has a sink for each head.
    Sinks,
    Moe(MoeStyle),
    /// A mixture of experts with DeepSeek's latent attention.
    Latent,
}

impl Kind {
    /// Mixtures of experts in every style.
    pub const MOE: [Self; 5] = [
        Self::Moe(MoeStyle::Mixtral),
        Self::Moe(MoeStyle::Switch),
        Self::Moe(MoeStyle::Qwen),
        Self::Moe(MoeStyle::DeepSeek),
        Self::Moe(MoeStyle::ExpertChoice),
    ];

    /// All kinds of models.
    pub fn all() -> impl Iterator<Item = Self> {
        [Self::Gpt, Self::Llama].into_iter().chain(Self::MOE)
    }
}

/// A mixture of a few small experts that keeps the characteristics of its style.
pub fn moe(style: MoeStyle) -> MoeConfig {
    let small = MoeConfig::small(style, VOCABULARY as usize);
    let llama = LlamaConfig { layers: 2, width: 48, hidden: 80, ..small.llama };
    let router = RouterConfig { experts: 8, top_k: small.router.top_k.min(3), ..small.router.clone() };
    MoeConfig { llama, router, expert_hidden: 40, shared_hidden: small.shared_hidden.min(56), ..small }
}

/// Training options that give the same results on every machine.
pub fn on_cpu() -> TrainOptions {
    TrainOptions { device: DeviceChoice::Cpu, ..TrainOptions::default() }
}

/// A model, the options of its training, and a batch for each step.
#[derive(Debug, Clone)]
pub struct TinyRun {
    pub kind: Kind,
    pub options: TrainOptions,
}

impl Default for TinyRun {
    fn default() -> Self {
        let (threads, planning) = (2, PLANNING);
        let options = TrainOptions {
            step: StepOptions {
                batch: 8,
                sequence: 24,
                memory: MemoryOptions { planning, ..on_cpu().step.memory },
                ..on_cpu().step
            },
            threads,
            seed: 7,
            ..on_cpu()
        };
        Self { kind: Kind::Gpt, options }
    }
}

/// The results of a run as bits, so that they can be compared exactly.
#[derive(Debug, PartialEq)]
pub struct Outcome {
    pub losses: Vec<u32>,
    pub gradient_norms: Vec<u32>,
    /// Name and hash of the bits of each parameter.
    pub parameters: Vec<(String, u64)>,
}

pub const VOCABULARY: u32 = 50;

/// The widths of the latent and of the rotated key in [`Kind::Latent`].
pub const LATENT: (usize, usize) = (24, 6);

/// The work limit of the planner in tests about computed results. Without this limit, reducing a small arena by a last
/// thousandth takes seconds.
pub const PLANNING: u64 = 1 << 20;

impl TinyRun {
    pub fn trainer(&self) -> Trainer {
        self.rank(None)
    }

    /// Creates the trainer, or returns the error.
    pub fn try_trainer(&self) -> Result<Trainer, gapless::TrainError> {
        self.try_rank(None)
    }

    /// Creates the trainer of one rank, or the only trainer if `world` is `None`.
    pub fn rank(&self, world: Option<Box<dyn Communicator>>) -> Trainer {
        self.try_rank(world).expect("the model is sound")
    }

    /// Like [`Self::rank`], but returns the error.
    pub fn try_rank(&self, world: Option<Box<dyn Communicator>>) -> Result<Trainer, gapless::TrainError> {
        let vocabulary = VOCABULARY as usize;
        match self.kind {
            Kind::Gpt => {
                let config = GptConfig {
                    vocabulary,
                    sequence: 32,
                    layers: 2,
                    heads: 3,
                    width: 48,
                    dropout: 0.1,
                    ..GptConfig::default()
                };
                self.with(world, |vb| Gpt::new(&config, vb))
            }
            Kind::Llama | Kind::Sinks => {
                let traits = Traits { sinks: self.kind == Kind::Sinks, ..Traits::default() };
                let config = LlamaConfig {
                    vocabulary,
                    layers: 2,
                    heads: 4,
                    kv_heads: 2,
                    width: 48,
                    hidden: 80,
                    traits: Box::new(traits),
                    ..LlamaConfig::default()
                };
                self.with(world, |vb| Llama::new(&config, vb))
            }
            Kind::Moe(style) => self.with(world, |vb| Moe::new(&moe(style), vb)),
            Kind::Latent => {
                let latent = LatentConfig {
                    query_rank: Some(20),
                    kv_rank: LATENT.0,
                    plain_size: 10,
                    rotated_size: LATENT.1,
                    value_size: 14,
                    neighbours: true,
                };
                let config = MoeConfig { latent: Some(latent), ..moe(MoeStyle::DeepSeek) };
                self.with(world, |vb| Moe::new(&config, vb))
            }
        }
    }

    fn with<M: Model>(
        &self,
        world: Option<Box<dyn Communicator>>,
        build: impl Fn(VarBuilder) -> gapless::Result<M>,
    ) -> Result<Trainer, gapless::TrainError> {
        let options = self.options.clone();
        match world {
            None => Trainer::new(build, options),
            Some(world) => Trainer::builder(build, options).distributed(world).build(),
        }
    }

    /// Runs `f` with one trainer per rank of the mesh, as threads.
    pub fn on_ranks<T: Send>(&self, f: impl Fn(Trainer) -> T + Sync) -> Vec<T> {
        let ranks = self.options.step.mesh.ranks().unwrap();
        communicator::on_threads(ranks, |world| Ok(f(self.rank(Some(world))))).expect("no rank fails")
    }

    /// Does [`Self::steps`] on all ranks. Returns the results, which must be equal on all ranks, and the merged
    /// parameters of all ranks.
    pub fn steps_on_ranks(&self, count: u64) -> Outcome {
        merge(self.on_ranks(|mut trainer| self.go_on(&mut trainer, count)))
    }

    /// Does some steps on all ranks and saves a checkpoint.
    pub fn save_on_ranks(&self, count: u64, dir: &Path) {
        self.on_ranks(|mut trainer| {
            self.go_on(&mut trainer, count);
            trainer.save(dir, serde_json::Value::Null).unwrap();
        });
    }

    /// Resumes from the newest checkpoint on all ranks and does some steps.
    pub fn resume_on_ranks(&self, dir: &Path, count: u64) -> Outcome {
        merge(self.on_ranks(|mut trainer| {
            trainer.resume(&Checkpoint::latest(dir).unwrap().unwrap()).unwrap();
            self.go_on(&mut trainer, count)
        }))
    }

    /// Returns the batch of a step: pseudo-random ids, and as targets the ids after them.
    pub fn batch(&self, step: u64) -> (Vec<u32>, Vec<u32>) {
        let id = |i: u64| ((step * 7919 + i) * (step * 7919 + i) % 1009) as u32 % VOCABULARY;
        let count = (self.options.step.batch * self.options.step.sequence) as u64;
        ((0..count).map(id).collect(), (1..=count).map(id).collect())
    }

    /// Returns, for each token, the position at which its document begins, for [`TrainOptions::documents`]. Documents
    /// have 1 to 9 tokens and differ between sequences. The answers of pairs are not packed.
    fn starts(&self) -> Vec<u32> {
        let StepOptions { batch, sequence, documents, preference, .. } = &self.options.step;
        let mut starts = Vec::new();
        for index in 0..if *documents && preference.is_none() { batch * sequence } else { 0 } {
            let at = (index % sequence) as u32;
            let begins = at == 0 || at - starts[index - 1] > (index * index % 11 % 9) as u32;
            starts.push(if begins { at } else { starts[index - 1] });
        }
        starts
    }

    pub fn step(&self, trainer: &mut Trainer) -> StepReport {
        let ((tokens, mut targets), starts) = (self.batch(trainer.steps()), self.starts());
        // The last token of a document has no target, because the next token belongs to another document.
        for (target, next) in targets.iter_mut().zip(starts.iter().skip(1).zip(&starts)) {
            *target = if next.0 == next.1 { *target } else { IGNORED };
        }
        let StepOptions { batch, sequence, preference, .. } = &self.options.step;
        let report = match preference {
            None => trainer.step_batch(&Batch { tokens: &tokens, targets: &targets, starts: &starts }),
            Some(_) => {
                // The first tokens of a sequence are the prompt. References differ from pair to pair.
                let (prompt, reference) = (sequence / 3, (0..*batch).map(|index| -60.0 - index as f32));
                let in_prompt = targets.iter_mut().enumerate().filter(|(index, _)| index % sequence < prompt);
                in_prompt.for_each(|(_, target)| *target = IGNORED);
                let reference: Vec<f32> = reference.collect();
                trainer.step_pairs(&Batch { tokens: &tokens, targets: &targets, starts: &starts }, &reference)
            }
        };
        report.expect("the step is sound")
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

/// Combines the outcomes of all ranks. Losses and norms must be equal on all ranks; the parameters are merged.
fn merge(outcomes: Vec<Outcome>) -> Outcome {
    let mut parameters = BTreeMap::new();
    for (name, hash) in outcomes.iter().flat_map(|outcome| &outcome.parameters) {
        assert_eq!(parameters.insert(name.clone(), *hash).unwrap_or(*hash), *hash, "copies of {name} differ");
    }
    for outcome in &outcomes {
        assert_eq!(outcome.losses, outcomes[0].losses, "all ranks see the same losses");
        assert_eq!(outcome.gradient_norms, outcomes[0].gradient_norms, "all ranks see the same norms");
    }
    let Outcome { losses, gradient_norms, .. } = outcomes.into_iter().next().expect("at least one rank");
    Outcome { losses, gradient_norms, parameters: parameters.into_iter().collect() }
}

pub fn parameters(trainer: &Trainer) -> Vec<(String, u64)> {
    let hash = |name: &str| {
        let values = trainer.tensor(name).unwrap().flatten_all().unwrap().to_dtype(DType::F32).unwrap();
        let values: Vec<f32> = values.to_vec1().unwrap();
        let mut hasher = DefaultHasher::new();
        values.iter().for_each(|value| value.to_bits().hash(&mut hasher));
        (name.to_owned(), hasher.finish())
    };
    let mut parameters: Vec<(String, u64)> = trainer.parameter_names().map(hash).collect();
    parameters.sort();
    parameters
}

//! The models that all sides train.

use gapless::engine::compile::{Program, Target, step::program};
use gapless::models::{Gpt, GptConfig, Llama, LlamaConfig, Moe, MoeConfig, MoeStyle};
use gapless::{StepOptions, TrainOptions, Trainer};

use crate::Options;

/// The kinds of models.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Kind {
    /// A GPT with layer norms, GELU, and one query head per key head; 256 tokens.
    Gpt,
    /// A Llama with RMS norms, gated units, and two query heads per key head.
    Llama,
    /// A Llama with 8 experts in each layer, of which a token uses 2.
    Mixtral,
}

/// A model with its sizes.
#[derive(Debug, Clone)]
pub enum Model {
    Gpt(GptConfig),
    Llama(LlamaConfig),
    Mixtral(Box<MoeConfig>),
}

impl Model {
    /// Creates the model that the command line describes, with the defaults of its kind.
    pub fn new(options: &Options) -> Self {
        let (layers, width, heads) = match (options.model, options.quick) {
            (_, true) => (2, 64, 2),
            (Kind::Gpt, _) => (6, 384, 6),
            (Kind::Llama, _) => (8, 512, 8),
            (Kind::Mixtral, _) => (4, 192, 4),
        };
        let (layers, width) = (options.layers.unwrap_or(layers), options.width.unwrap_or(width));
        let heads = options.heads.unwrap_or(heads);
        let vocabulary = options.vocabulary();
        if options.model == Kind::Gpt {
            let sequence = options.sequence();
            return Self::Gpt(GptConfig {
                vocabulary,
                layers,
                width,
                heads,
                sequence,
                dropout: 0.0,
                ..GptConfig::default()
            });
        }
        let mixtral = MoeConfig::small(MoeStyle::Mixtral, vocabulary);
        let kv_heads = heads.div_ceil(2);
        let llama = LlamaConfig { layers, width, heads, kv_heads, hidden: width * 11 / 4, ..mixtral.llama.clone() };
        match options.model {
            Kind::Mixtral => Self::Mixtral(Box::new(MoeConfig { llama, expert_hidden: 2 * width, ..mixtral })),
            _ => Self::Llama(llama),
        }
    }

    /// Returns the kind, and the sizes under the names that pytorch.py uses.
    fn extents(&self) -> (&'static str, [(&'static str, usize); 6]) {
        let of_llama = |llama: &LlamaConfig, hidden| {
            [llama.vocabulary, llama.layers, llama.width, llama.heads, llama.kv_heads, hidden]
        };
        let (kind, extents) = match self {
            Self::Gpt(gpt) => ("gpt", [gpt.vocabulary, gpt.layers, gpt.width, gpt.heads, gpt.heads, 4 * gpt.width]),
            Self::Llama(llama) => ("llama", of_llama(llama, llama.hidden)),
            Self::Mixtral(moe) => ("mixtral", of_llama(&moe.llama, moe.expert_hidden)),
        };
        let names = ["vocabulary", "layers", "width", "heads", "kv-heads", "hidden"];
        (kind, std::array::from_fn(|at| (names[at], extents[at])))
    }

    /// Returns a description with the sizes.
    pub fn describe(&self) -> String {
        let (name, parameters) = match self {
            Self::Gpt(gpt) => ("GPT", gpt.parameters()),
            Self::Llama(llama) => ("Llama", llama.parameters()),
            Self::Mixtral(moe) => ("Mixtral", moe.parameters()),
        };
        let (_, [_, (_, layers), (_, width), (_, heads), ..]) = self.extents();
        let millions = parameters as f64 / 1e6;
        format!("{name} of {layers} layers, width {width}, {heads} heads ({millions:.1} M parameters)")
    }

    /// The arguments for pytorch.py.
    pub fn flags(&self) -> Vec<(&'static str, String)> {
        let (kind, extents) = self.extents();
        let extents = extents.map(|(name, extent)| (name, extent.to_string()));
        std::iter::once(("model", kind.to_owned())).chain(extents).collect()
    }

    /// Returns the program of a step.
    pub fn program(&self, step: &StepOptions) -> anyhow::Result<Program> {
        let target = Target::Cpu { threads: 1 };
        Ok(match self {
            Self::Gpt(gpt) => program(|vb| Gpt::new(gpt, vb), step, 0, target)?,
            Self::Llama(llama) => program(|vb| Llama::new(llama, vb), step, 0, target)?,
            Self::Mixtral(moe) => program(|vb| Moe::new(&**moe, vb), step, 0, target)?,
        })
    }

    /// Creates gapless's trainer.
    pub fn trainer(&self, train: TrainOptions) -> anyhow::Result<Trainer> {
        Ok(match self {
            Self::Gpt(gpt) => Trainer::new(|vb| Gpt::new(gpt, vb), train)?,
            Self::Llama(llama) => Trainer::new(|vb| Llama::new(llama, vb), train)?,
            Self::Mixtral(moe) => Trainer::new(|vb| Moe::new(&**moe, vb), train)?,
        })
    }
}

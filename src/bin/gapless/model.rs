//! A model by name or folder, and the training step of it that is meant.

use std::fmt::{self, Display, Formatter};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::bail;
use clap::ValueEnum;
use gapless::engine::compile::Program;
use gapless::engine::optim::AdamW;
use gapless::models::hf::Config;
use gapless::models::{Gpt, GptConfig, Llama, LlamaConfig, Moe, MoeConfig};
use gapless::{
    DType, DeviceChoice, Lora, Mesh, Offload, Report, Reserve, TrainError, TrainOptions, Trainable, Trainer,
};

/// What --model can be: a name, or a folder or config.json of Hugging Face's, whose weights are not read.
#[derive(Debug, Clone)]
pub enum Model {
    Known(Known),
    Config(PathBuf, Box<Config>),
}

impl FromStr for Model {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if let Ok(known) = Known::from_str(text, true) {
            return Ok(Self::Known(known));
        }
        let path = Path::new(text);
        if !path.exists() {
            let names = Known::value_variants().iter().filter_map(ValueEnum::to_possible_value);
            let names: Vec<String> = names.map(|value| value.get_name().to_owned()).collect();
            bail!("there is no such folder or config.json, and no model of that name; names are {}", names.join(", "));
        }
        Ok(Self::Config(path.to_owned(), Box::new(Config::read(path)?)))
    }
}

impl Display for Model {
    fn fmt(&self, to: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::Known(known) => to.write_str(known.title()),
            Self::Config(path, _) => write!(to, "{}", path.display()),
        }
    }
}

impl Model {
    /// Layers that have adapters where nothing else is asked for.
    fn lora_targets(&self) -> Vec<String> {
        use Known::{Gpt2, Gpt2Large, Gpt2Medium, Gpt2Xl, Small};
        match self {
            Self::Known(Small | Gpt2 | Gpt2Medium | Gpt2Large | Gpt2Xl) => vec!["c_attn".into()],
            Self::Known(_) => Lora::default().targets,
            Self::Config(_, config) => config.lora_targets(),
        }
    }

    /// Plans of whole runs, by rank: of models of Hugging Face's.
    pub fn ranks(&self, options: &TrainOptions) -> Result<Vec<Report>, TrainError> {
        match self {
            Self::Known(_) => Ok(Vec::new()),
            Self::Config(_, config) => gapless::plan::ranks(config, options),
        }
    }

    /// Compiles the training step of rank 0; reserves nothing.
    pub fn program(&self, options: &TrainOptions) -> Result<Program, TrainError> {
        match self {
            Self::Known(known) => known.program(options),
            Self::Config(_, config) => Trainer::program(|vb| config.model(vb), options, 0),
        }
    }
}

/// Models that are known by name.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum Known {
    /// 6 layers, width 384: that of the train_gpt example.
    Small,
    /// GPT-2 124M.
    Gpt2,
    /// GPT-2 355M.
    Gpt2Medium,
    /// GPT-2 774M.
    Gpt2Large,
    /// GPT-2 1.5B.
    Gpt2Xl,
    /// Llama 2 7B.
    Llama2_7b,
    /// Llama 3 8B.
    Llama3_8b,
    /// Mixtral 8x7B.
    Mixtral8x7b,
    /// Qwen1.5-MoE-A2.7B.
    QwenMoe,
}

/// The extents of a training step.
#[derive(Debug, clap::Args)]
pub struct StepArguments {
    /// Sequences per step of --model.
    #[arg(long, default_value_t = 8, allow_negative_numbers = true)]
    batch: usize,
    /// Parts into which the batch of --model is cut.
    #[arg(long, default_value_t = 1, allow_negative_numbers = true)]
    micro_batches: usize,
    /// Tokens per sequence of --model.
    #[arg(long, default_value_t = 1024, allow_negative_numbers = true)]
    sequence: usize,
    /// Element type of --model's parameters, activations, gradients and optimizer states.
    #[arg(long, value_enum, default_value_t = Float::F32)]
    dtype: Float,
    /// Operations of --model whose results wait for the backward in 8 bits, e.g. gelu,linear.
    #[arg(long, value_name = "OPS", value_delimiter = ',')]
    compress: Vec<String>,
    /// Operations of --model whose results wait for the backward in a file.
    #[arg(long, value_name = "OPS", value_delimiter = ',')]
    offload: Vec<String>,
    /// Train adapters of this rank beside some layers of --model, and nothing else; with alpha (by default the rank) behind it, e.g. 16:32.
    #[arg(long, value_name = "RANK[:ALPHA]", value_parser = lora, conflicts_with = "train")]
    lora: Option<(usize, f64)>,
    /// The layers that have adapters, e.g. q_proj,o_proj; by default queries and values.
    #[arg(long, value_name = "LAYERS", value_delimiter = ',', requires = "lora")]
    lora_targets: Vec<String>,
    /// Train these parameters or modules of --model alone, e.g. lm_head,*norm*.
    #[arg(long, value_name = "PATTERNS", value_delimiter = ',')]
    train: Vec<String>,
    /// Ranks that share the batch of --model; the step planned is that of the first.
    #[arg(long, default_value_t = 1, allow_negative_numbers = true)]
    data_ranks: usize,
    /// Ranks of a pipeline, of one stage each.
    #[arg(long, default_value_t = 1, allow_negative_numbers = true)]
    pipeline_ranks: usize,
    /// Ranks that share the experts of --model; the step planned is that of the first.
    #[arg(long, default_value_t = 1, allow_negative_numbers = true)]
    expert_ranks: usize,
    /// Whose kernels it is planned for, cpu or cuda: they need other scratch
    #[arg(long, default_value = "cpu")]
    kernels: DeviceChoice,
    /// Room for the rows that an expert rank receives, as a multiple of what even routing needs; without it, for the worst case.
    #[arg(long, value_name = "FACTOR", allow_negative_numbers = true)]
    routing: Option<f64>,
}

/// Types of floating-point numbers that a step can be planned in.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum Float {
    F32,
    /// All of it, the optimizer's states too
    Bf16,
    /// Bf16, but for the optimizer's masters and moments and gradients of several micro-batches
    Mixed,
}

impl StepArguments {
    /// The options that they mean for a model.
    pub fn options(&self, model: &Model) -> TrainOptions {
        let &Self { batch, micro_batches, sequence, dtype, routing, ref compress, ref offload, kernels, .. } = self;
        let dtype = match dtype {
            Float::F32 => DType::F32,
            Float::Bf16 | Float::Mixed => DType::BF16,
        };
        let optimizer = AdamW { masters: matches!(self.dtype, Float::Mixed), ..AdamW::default() }.into();
        let (compress, ops) = (compress.clone(), offload.clone());
        // Nothing is written to it.
        let offload = (!ops.is_empty()).then(|| Offload { ops, folder: ".".into() });
        let mesh = Mesh { data: self.data_ranks, pipeline: self.pipeline_ranks, expert: self.expert_ranks };
        let routing = routing.map_or(Reserve::Worst, |factor| Reserve::Balanced { factor });
        TrainOptions {
            batch,
            micro_batches,
            sequence,
            device: kernels,
            dtype,
            trainable: self.trainable(model),
            optimizer,
            mesh,
            routing,
            compress,
            offload,
            ..TrainOptions::default()
        }
    }
}

impl StepArguments {
    fn trainable(&self, model: &Model) -> Trainable {
        match self.lora {
            Some((rank, alpha)) => {
                let targets = match self.lora_targets.is_empty() {
                    true => model.lora_targets(),
                    false => self.lora_targets.clone(),
                };
                Trainable::Lora(Lora { rank, alpha, targets, ..Lora::default() })
            }
            None if self.train.is_empty() => Trainable::All,
            None => Trainable::Only(self.train.clone()),
        }
    }
}

/// `16` or `16:32`.
fn lora(text: &str) -> anyhow::Result<(usize, f64)> {
    let (rank, alpha) = text.split_once(':').unwrap_or((text, text));
    match (rank.parse(), alpha.parse()) {
        (Ok(rank), Ok(alpha)) => Ok((rank, alpha)),
        _ => bail!("{text:?} is no rank, or rank:alpha, e.g. 16:32"),
    }
}

impl Known {
    /// The name that people use.
    fn title(self) -> &'static str {
        match self {
            Self::Small => "small GPT, 6 layers of width 384",
            Self::Gpt2 => "GPT-2 124M",
            Self::Gpt2Medium => "GPT-2 355M",
            Self::Gpt2Large => "GPT-2 774M",
            Self::Gpt2Xl => "GPT-2 1.5B",
            Self::Llama2_7b => "Llama 2 7B",
            Self::Llama3_8b => "Llama 3 8B",
            Self::Mixtral8x7b => "Mixtral 8x7B",
            Self::QwenMoe => "Qwen1.5-MoE-A2.7B",
        }
    }

    fn program(self, options: &TrainOptions) -> Result<Program, TrainError> {
        let sequence = options.sequence;
        let gpt = |layers, heads, width| {
            let config = GptConfig { layers, heads, width, sequence: sequence.max(1024), ..GptConfig::default() };
            Trainer::program(|vb| Gpt::new(&config, vb), options, 0)
        };
        let llama = |config: LlamaConfig| Trainer::program(|vb| Llama::new(&config, vb), options, 0);
        let moe = |config: MoeConfig| Trainer::program(|vb| Moe::new(&config, vb), options, 0);
        match self {
            Self::Small => {
                let config =
                    GptConfig { vocabulary: 4096, sequence, layers: 6, heads: 6, width: 384, ..GptConfig::default() };
                Trainer::program(|vb| Gpt::new(&config, vb), options, 0)
            }
            Self::Gpt2 => gpt(12, 12, 768),
            Self::Gpt2Medium => gpt(24, 16, 1024),
            Self::Gpt2Large => gpt(36, 20, 1280),
            Self::Gpt2Xl => gpt(48, 25, 1600),
            Self::Llama2_7b => {
                let defaults = LlamaConfig::default();
                let (vocabulary, kv_heads, hidden) = (32_000, 32, 11_008);
                llama(LlamaConfig { vocabulary, kv_heads, hidden, rope_theta: 1e4, ..defaults })
            }
            Self::Llama3_8b => llama(LlamaConfig::default()),
            Self::Mixtral8x7b => moe(MoeConfig::default()),
            Self::QwenMoe => moe(MoeConfig::qwen1_5_a2_7b()),
        }
    }
}

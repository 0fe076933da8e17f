//! A checked config.json.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use gapless_engine::graph::Graph;
use gapless_engine::nn::{Lora, QuantizedRounding, Trainable, VarBuilder};
use gapless_engine::{DType, Model, Tensor};
use serde_json::{Map, Value};

use super::error::{ConfigProblem, HfError, Result};
use super::families::FAMILIES;
use super::fields::{Fields, read_object};
use super::layout::{ExpertNames, NUMBERED};
use super::multimodal::TextPart;
use super::quantized::{self, Quantization};
use super::tensors::Dtype;
use super::{HEAD, experts, gpt2, known, refused};
use crate::limits::MAX_ELEMENTS;
use crate::{Decoder, FusedQkv, Gpt, GptConfig, LlamaConfig, MoeConfig};

/// The checked contents of a config.json.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    path: PathBuf,
    architecture: Architecture,
    parameters: Vec<(String, Vec<usize>)>,
    /// Layers that the files may contain but that are not part of the model.
    unread_layers: Range<usize>,
    expert_names: ExpertNames,
    /// The parts of names that differ in files.
    file_names: &'static [(&'static str, &'static str)],
    /// The part that is read of a multimodal model.
    text_part: Option<TextPart>,
    positions: Option<usize>,
    quantization: Option<Quantization>,
    /// The type of the stored weights, or of those that are not quantized.
    rounding: QuantizedRounding,
}

/// A family of models with its settings.
#[derive(Debug, Clone, PartialEq)]
#[expect(clippy::large_enum_variant, reason = "there is one of it")]
pub enum Architecture {
    /// GPT-2.
    Gpt(GptConfig),
    /// Llama and related models.
    Llama(LlamaConfig),
    /// A model with experts.
    Moe(MoeConfig),
}

impl Architecture {
    /// Declares the model.
    ///
    /// # Errors
    /// Returns the errors of the model's constructor, such as [`Decoder::new`].
    pub fn model(&self, vb: VarBuilder) -> gapless_engine::Result<Pretrained> {
        Pretrained::new(self, vb)
    }

    /// Returns the names of the layers that have adapters by default: the query and value projections, as in PEFT.
    pub fn lora_targets(&self) -> Vec<String> {
        let llama = self.llama();
        let targets: &[&str] = match self {
            Self::Gpt(_) => &["c_attn"],
            Self::Moe(MoeConfig { latent: Some(latent), .. }) if latent.query_rank.is_some() => {
                &["q_b_proj", "kv_b_proj"]
            }
            Self::Moe(MoeConfig { latent: Some(_), .. }) => &["q_proj", "kv_b_proj"],
            _ if llama.is_some_and(|llama| llama.traits.fused_qkv != FusedQkv::Separate) => &["qkv_proj"],
            Self::Llama(_) | Self::Moe(_) => &["q_proj", "v_proj"],
        };
        let name = |&target| llama.map_or(target, |llama| llama.traits.name(target)).to_owned();
        targets.iter().map(name).collect()
    }
}

impl Architecture {
    /// The number of layers.
    pub fn layers(&self) -> usize {
        match self {
            Self::Gpt(gpt) => gpt.layers,
            Self::Llama(llama) | Self::Moe(MoeConfig { llama, .. }) => llama.layers,
        }
    }

    /// Sets the number of layers, and nothing else.
    pub fn set_layers(&mut self, layers: usize) {
        match self {
            Self::Gpt(gpt) => gpt.layers = layers,
            Self::Llama(llama) | Self::Moe(MoeConfig { llama, .. }) => llama.layers = layers,
        }
    }

    /// The settings of a decoder, with or without experts. `None` for GPT-2.
    pub(super) fn llama(&self) -> Option<&LlamaConfig> {
        match self {
            Self::Gpt(_) => None,
            Self::Llama(llama) | Self::Moe(MoeConfig { llama, .. }) => Some(llama),
        }
    }

    /// Sets the path of the decoder in the names of parameters.
    fn set_decoder(&mut self, path: &str) {
        match self {
            Self::Gpt(_) => {}
            Self::Llama(llama) | Self::Moe(MoeConfig { llama, .. }) => {
                llama.traits.names.insert("model".to_owned(), path.to_owned());
            }
        }
    }
}

impl Config {
    /// Reads and checks a config.json. `path` is the file or its folder.
    ///
    /// # Errors
    /// Returns [`HfError::Config`], which lists every option that is wrong, unsupported or unknown. Returns an error if
    /// the file is not valid JSON.
    pub fn read(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let path = if path.is_dir() { path.join("config.json") } else { path.to_owned() };
        Self::of_options(read_object(&path)?, path)
    }

    /// Checks the options of a config.json. `path` is the file, for messages.
    ///
    /// # Errors
    /// Returns the errors of [`Self::read`] for a file with these options.
    pub(super) fn of_options(options: Map<String, Value>, path: PathBuf) -> Result<Self> {
        let (text_part, prefix) = TextPart::of(&options).unzip();
        let options = text_part.as_ref().map_or(options, TextPart::options);
        let mut fields = Fields::new(options, prefix.unwrap_or_default());
        let refused = |problems| HfError::Config { path: path.clone(), problems };
        let family = fields.text("model_type");
        let positions = fields.peek("max_position_embeddings").and_then(|it| usize::try_from(it.as_u64()?).ok());
        let table = family.as_deref().and_then(|name| FAMILIES.iter().find(|family| family.name == name));
        let mut architecture = match (family, table) {
            (_, Some(table)) => table.take(&mut fields),
            (Some(name), None) if name == "gpt2" && text_part.is_none() => Architecture::Gpt(gpt2::take(&mut fields)),
            (family, None) => return Err(refused(vec![no_family(family, fields.full("model_type"))])),
        };
        let unread_layers = match architecture.llama() {
            Some(llama) if table.is_some_and(|table| table.predicts_further) => {
                experts::unread_layers(&mut fields, llama.layers)
            }
            _ => 0..0,
        };
        if let Some(part) = &text_part {
            architecture.set_decoder(part.decoder);
            let changed = |llama: &LlamaConfig| llama.traits.logit_scale != 1.0 || llama.logit_cap.is_some();
            if part.is_opened_whole() && architecture.llama().is_some_and(changed) {
                let options = "logit_scale, logits_scaling or final_logit_softcapping";
                let supported = "no factor and no cap of the logits, which transformers leaves out of the whole model";
                fields.unsupported(options, &"given".into(), supported);
            }
        }
        let (quantization, rounding) = quantized::take(&mut fields);
        known::take(&mut fields);
        let problems = fields.problems();
        if !problems.is_empty() {
            return Err(refused(problems));
        }
        let parameters = parameters(&architecture, &Trainable::All)?;
        let elements = |shape: &[usize]| shape.iter().map(|&extent| extent as u128).product::<u128>();
        let all: u128 = parameters.iter().map(|(_, shape)| elements(shape)).sum();
        if all > MAX_ELEMENTS {
            let (field, found) = ("the number of parameters".to_owned(), all.to_string());
            return Err(refused(vec![ConfigProblem::Value {
                field,
                found,
                expected: format!("below {MAX_ELEMENTS}"),
            }]));
        }
        let (expert_names, file_names) =
            table.map_or((NUMBERED, &[][..]), |table| (table.expert_names, table.file_names));
        Ok(Self {
            path,
            architecture,
            parameters,
            unread_layers,
            expert_names,
            file_names,
            text_part,
            positions,
            quantization,
            rounding,
        })
    }

    /// Declares the model in the builder of a [`Trainer`](gapless_engine::Trainer).
    ///
    /// # Errors
    /// Returns the errors of the model's constructor, such as [`Decoder::new`].
    pub fn model(&self, vb: VarBuilder) -> gapless_engine::Result<Pretrained> {
        self.architecture.model(vb)
    }

    /// Names and shapes of all parameters.
    pub fn parameters(&self) -> impl Iterator<Item = (&str, &[usize])> {
        self.parameters.iter().map(|(name, shape)| (name.as_str(), shape.as_slice()))
    }

    /// Returns the names and shapes of all parameters of the model, including those of the adapters that `trainable`
    /// adds.
    pub(super) fn declared(&self, trainable: &Trainable) -> Result<Vec<(String, Vec<usize>)>> {
        parameters(&self.architecture, trainable)
    }

    /// The family of the model, with its settings.
    pub fn architecture(&self) -> &Architecture {
        &self.architecture
    }

    /// The method by which the stored weights are quantized, or `None` if they are not.
    pub(super) fn quantization(&self) -> Option<&Quantization> {
        self.quantization.as_ref()
    }

    /// The type in which weights that are not quantized are stored.
    pub(super) fn plain_dtype(&self) -> Dtype {
        match self.rounding {
            QuantizedRounding::F32 => Dtype::F32,
            QuantizedRounding::Bf16 => Dtype::BF16,
            QuantizedRounding::F16 => Dtype::F16,
        }
    }

    /// Fills in the settings of adapters that follow from this model: the layers that have adapters, and the storage of
    /// frozen weights ([`Lora::quantize`]), which by default is that of the folder.
    #[must_use]
    pub fn complete(&self, mut lora: Lora) -> Lora {
        if lora.targets.is_empty() {
            lora.targets = self.architecture.lora_targets();
        }
        if let (None, Some(Quantization::BitsAndBytes(quantize))) = (&lora.quantize, &self.quantization) {
            lora.quantize = Some(quantize.clone());
        }
        if let Some(quantize) = &mut lora.quantize {
            quantize.rounding.get_or_insert(self.rounding);
        }
        lora
    }

    /// Number of tokens in the vocabulary: rows of the embedding.
    pub fn vocabulary(&self) -> usize {
        match &self.architecture {
            Architecture::Gpt(config) => config.vocabulary,
            Architecture::Llama(llama) | Architecture::Moe(MoeConfig { llama, .. }) => llama.vocabulary,
        }
    }

    /// Returns the greatest sequence length, in tokens, for which the model was trained, or `None` if the file does not
    /// give this length. A model with rotary positions accepts longer sequences, but its predictions get worse.
    pub fn trained_positions(&self) -> Option<usize> {
        self.positions
    }

    /// Returns the greatest sequence length, in tokens, that the model accepts. Returns `None` if there is no limit.
    /// Only models with learned position embeddings have a limit.
    pub fn longest_sequence(&self) -> Option<usize> {
        match &self.architecture {
            Architecture::Gpt(config) => Some(config.sequence),
            Architecture::Llama(_) | Architecture::Moe(_) => None,
        }
    }

    /// True if the model is the text part of a multimodal model.
    pub fn is_multimodal(&self) -> bool {
        self.text_part.is_some()
    }

    /// The part that is read of a multimodal model, or `None` for other models.
    pub(super) fn text_part(&self) -> Option<&TextPart> {
        self.text_part.as_ref()
    }

    /// The part that is read of a multimodal model, to change its names in files.
    pub(super) fn text_part_mut(&mut self) -> Option<&mut TextPart> {
        self.text_part.as_mut()
    }

    /// The stored name of a tensor of the model.
    pub(super) fn stored(&self, name: String) -> String {
        match &self.text_part {
            Some(part) => part.stored(&name),
            None => self.file_names.iter().fold(name, |name, (own, file)| name.replace(own, file)),
        }
    }

    /// Notices for the user. Each names a part of the files that is left out of the model.
    pub fn notices(&self) -> Vec<String> {
        let notice = |layer| {
            format!(
                "{}: model.layers.{layer} (or mtp) is left out, as transformers does: it predicts further tokens \
                 (num_nextn_predict_layers)",
                self.path.display()
            )
        };
        let text_only = self.text_part.as_ref().map(|_| {
            format!(
                "{}: of this multimodal model, the text part is read; a saved folder has the other parts unchanged",
                self.path.display()
            )
        });
        self.unread_layers.clone().map(notice).chain(text_only).collect()
    }

    /// True if a stored tensor belongs to a layer that is not part of the model.
    pub(super) fn is_unread(&self, stored: &str) -> bool {
        let layer = stored.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.'));
        let of_mtp = |part: &str| part == "mtp" || part.starts_with("mtp_");
        layer.and_then(|(layer, _)| layer.parse().ok()).is_some_and(|layer| self.unread_layers.contains(&layer))
            || (!self.unread_layers.is_empty() && stored.split('.').any(of_mtp))
    }

    /// True if linear layers are stored transposed, as in GPT-2.
    pub(super) fn is_gpt2(&self) -> bool {
        matches!(self.architecture, Architecture::Gpt(_))
    }

    /// The names in which transformers writes experts of this family.
    pub(super) fn expert_names(&self) -> ExpertNames {
        self.expert_names
    }

    /// Returns the name of the embedding to which the head is tied, or `None` if the head has a weight of its own.
    pub(super) fn tied_to(&self) -> Option<String> {
        match &self.architecture {
            Architecture::Gpt(config) => config.tied.then(|| "wte.weight".to_owned()),
            Architecture::Llama(llama) | Architecture::Moe(MoeConfig { llama, .. }) => {
                let name = |module| llama.traits.name(module);
                llama.tied.then(|| format!("{}.{}.weight", name("model"), name("embed_tokens")))
            }
        }
    }

    /// The stored name of the head's weight. A tied head usually has no stored weight.
    pub(super) fn head(&self) -> String {
        let llama = self.architecture.llama();
        self.stored(llama.map_or(HEAD.to_owned(), |llama| format!("{}.weight", llama.traits.name("lm_head"))))
    }
}

/// Returns the problem of a `model_type` that is missing or not one of the families.
fn no_family(found: Option<String>, field: String) -> ConfigProblem {
    let Some(found) = found else { return ConfigProblem::Missing { field } };
    if let Some(missing) = refused::missing_part(&found) {
        return ConfigProblem::Family { found, missing };
    }
    let mut names: Vec<&str> = FAMILIES.iter().map(|family| family.name).chain(["gpt2"]).collect();
    names.sort_unstable();
    ConfigProblem::Unsupported { field, found, supported: names.join(", ") }
}

/// Returns names and shapes of the parameters that the model declares, by declaring them in a temporary graph.
fn parameters(architecture: &Architecture, trainable: &Trainable) -> Result<Vec<(String, Vec<usize>)>> {
    let graph = Arc::new(Mutex::new(Graph::default()));
    Pretrained::new(architecture, VarBuilder::new(&graph, DType::F32).with_trainable(trainable))?;
    let graph = graph.lock().unwrap_or_else(PoisonError::into_inner);
    trainable.check_model(&graph)?;
    let shape = |id| graph.value(id).spec.dims().to_vec();
    Ok(graph.persistent().map(|(id, name)| (name.to_owned(), shape(id))).collect())
}

/// A pretrained model of one of the families.
#[derive(Debug, Clone)]
pub enum Pretrained {
    /// GPT-2.
    Gpt(Box<Gpt>),
    /// Any other model.
    Decoder(Box<Decoder>),
}

impl Pretrained {
    fn new(architecture: &Architecture, vb: VarBuilder) -> gapless_engine::Result<Self> {
        Ok(match architecture {
            Architecture::Gpt(config) => Self::Gpt(Box::new(Gpt::new(config, vb)?)),
            Architecture::Llama(config) => Self::Decoder(Box::new(Decoder::new(config, vb)?)),
            Architecture::Moe(config) => Self::Decoder(Box::new(Decoder::new(config, vb)?)),
        })
    }

    fn model(&self) -> &dyn Model {
        match self {
            Self::Gpt(model) => &**model,
            Self::Decoder(model) => &**model,
        }
    }
}

impl Model for Pretrained {
    fn forward(&self, tokens: &Tensor, train: bool) -> gapless_engine::Result<Tensor> {
        self.model().forward(tokens, train)
    }

    fn loss(&self, tokens: &Tensor, targets: &Tensor, train: bool) -> gapless_engine::Result<Tensor> {
        self.model().loss(tokens, targets, train)
    }
}

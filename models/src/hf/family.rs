//! A family of models as a table: the traits of its decoder, and the names and defaults of its options.

use std::ops::RangeInclusive;

use serde_json::Value;

use super::config::Architecture;
use super::fields::Fields;
use super::layout::{ExpertNames, NUMBERED};
use super::rope;
use super::window::{self, WindowedLayers};
use crate::{FusedQkv, GateActivation, LlamaConfig, MoeConfig, NormKind, Norms, QkNorm, Traits};

/// The allowed range of widths and of numbers of heads.
pub(super) const SIZE: RangeInclusive<usize> = 1..=1 << 20;

/// A family of models. The defaults are those of its class in transformers.
#[derive(Clone, Copy)]
pub(super) struct Family {
    /// The option `model_type`.
    pub name: &'static str,
    pub rope_theta: f64,
    /// Default rotary base of layers with a sliding window. `None` means the base of the other layers.
    pub local_rope_theta: Option<f64>,
    /// Default share of a head that is rotated. `None` means the whole head; no option changes it.
    pub partial: Option<f64>,
    /// Default of `max_position_embeddings`.
    pub positions: usize,
    /// Default of `original_max_position_embeddings`, beside the options of the rotary positions.
    pub original_positions: Option<usize>,
    /// True if queries grow with their position by the option `llama_4_scaling_beta`.
    pub growing_queries: bool,
    /// The option of the norms' epsilon, and its default.
    pub eps: (&'static str, f64),
    /// Default number of key-value heads. `None` means as many as query heads.
    pub kv_heads: Option<usize>,
    /// Default width of a head. `None` means width ÷ heads.
    pub head_size: Option<usize>,
    /// The biases of the query, key and value projections, of the output projection, and of the feed-forward layers.
    pub biases: [Bias; 3],
    pub qk_norm: QkNorm,
    pub norm: NormKind,
    pub norms: Norms,
    pub window: WindowedLayers,
    pub unrotated: Unrotated,
    pub neighbours: bool,
    pub fused_qkv: FusedQkv,
    pub fused_gate_up: bool,
    pub ungated: bool,
    /// Default activation.
    pub activation: GateActivation,
    /// Default padding token. `None` means that there is no padding token by default.
    pub padding: Option<u32>,
    /// True if the head is tied by default.
    pub tied: bool,
    /// The names of modules that differ from Llama's: Llama's name, and the family's.
    pub names: &'static [(&'static str, &'static str)],
    /// The parts of names that differ in files: that of the parameter's name, and that of the file's. They are replaced one
    /// after another.
    pub file_names: &'static [(&'static str, &'static str)],
    /// Reads options that decide about this table, before all others.
    pub prepare: fn(&mut Fields, &mut Family),
    /// Reads the options that only this family has.
    pub finish: fn(&mut Fields, &mut LlamaConfig),
    /// Reads the options of routed experts.
    pub experts: Option<fn(&mut Fields, LlamaConfig, &Family) -> MoeConfig>,
    /// The names of the experts' tensors in files.
    pub expert_names: ExpertNames,
    /// True if files may have further layers, which predict further tokens and are left out.
    pub predicts_further: bool,
    /// The factor of queries and keys, as part of the factor of the scores (DeepSeek).
    pub stretch: f64,
}

/// The condition under which layers have biases.
#[derive(Clone, Copy)]
pub(super) enum Bias {
    Never,
    Always,
    /// An option decides, with this default.
    Option(&'static str, bool),
}

/// The layers without rotary positions.
#[derive(Clone, Copy)]
pub(super) enum Unrotated {
    Never,
    /// Layers that are 0 in `no_rope_layers`, or every `no_rope_layer_interval`th layer.
    Listed,
    /// Layers with full attention.
    Full,
    /// Layers with full attention, unless `sliding_window` is null.
    FullUnlessNull,
}

/// The bias that several families switch with `attention_bias`.
pub(super) const ATTENTION_BIAS: Bias = Bias::Option("attention_bias", false);

impl Family {
    pub const LLAMA: Self = Self {
        name: "llama",
        rope_theta: 10_000.0,
        local_rope_theta: None,
        partial: None,
        positions: 2048,
        original_positions: None,
        growing_queries: false,
        eps: ("rms_norm_eps", 1e-6),
        kv_heads: None,
        head_size: None,
        biases: [ATTENTION_BIAS, ATTENTION_BIAS, Bias::Option("mlp_bias", false)],
        qk_norm: QkNorm::None,
        norm: NormKind::Rms,
        norms: Norms::Before,
        window: WindowedLayers::Never,
        unrotated: Unrotated::Never,
        neighbours: false,
        fused_qkv: FusedQkv::Separate,
        fused_gate_up: false,
        ungated: false,
        activation: GateActivation::Silu,
        padding: None,
        tied: false,
        names: &[],
        file_names: &[],
        prepare: |_, _| (),
        finish: |_, _| (),
        experts: None,
        expert_names: NUMBERED,
        predicts_further: false,
        stretch: 1.0,
    };

    /// Reads the options of a model of this family.
    pub fn take(mut self, fields: &mut Fields) -> Architecture {
        (self.prepare)(fields, &mut self);
        let mut llama = self.llama(fields);
        (self.finish)(fields, &mut llama);
        match self.experts {
            None => Architecture::Llama(llama),
            Some(_) if llama.activation != GateActivation::Silu => {
                fields.unsupported("hidden_act", &"another function".into(), "silu");
                Architecture::Llama(llama)
            }
            Some(experts) => Architecture::Moe(experts(fields, llama, &self)),
        }
    }

    fn llama(&self, fields: &mut Fields) -> LlamaConfig {
        let names = self.names.iter().map(|(llama, own)| ((*llama).to_owned(), (*own).to_owned()));
        let mut config = LlamaConfig {
            vocabulary: fields.count("vocab_size", None, 1..=1 << 28),
            layers: fields.count("num_hidden_layers", None, 1..=4096),
            heads: fields.count("num_attention_heads", None, SIZE),
            width: fields.count("hidden_size", None, SIZE),
            hidden: fields.count("intermediate_size", None, 1..=1 << 22),
            rope_theta: self.rope_theta,
            window_rope_theta: self.local_rope_theta,
            rms_norm_eps: fields.positive(self.eps.0, Some(self.eps.1)),
            qk_norm: self.qk_norm,
            norms: self.norms,
            tied: fields.flag("tie_word_embeddings", self.tied),
            traits: Box::new(Traits {
                norm: self.norm,
                fused_qkv: self.fused_qkv,
                fused_gate_up: self.fused_gate_up,
                ungated: self.ungated,
                neighbours: self.neighbours,
                names: names.collect(),
                ..Traits::default()
            }),
            ..LlamaConfig::default()
        };
        config.padding = padding(fields, self.padding, config.vocabulary);
        let heads = config.heads;
        config.kv_heads = fields.count("num_key_value_heads", Some(self.kv_heads.unwrap_or(heads)), SIZE);
        if !heads.is_multiple_of(config.kv_heads) {
            let expected = format!("a divisor of num_attention_heads, {heads}");
            fields.wrong("num_key_value_heads", &config.kv_heads.into(), &expected);
        }
        let head_size = self.head_size(fields, &config);
        config.head_size = Some(head_size);
        config.activation = activation(fields, "hidden_act", self.activation);
        [config.qkv_bias, config.output_bias, config.mlp_bias] = self.biases(fields);
        if self.qk_norm != QkNorm::None {
            ["qk_norm", "use_qk_norm"].iter().for_each(|name| fields.require(name, true));
        }
        let layers = config.layers;
        let unrotated = match self.unrotated {
            Unrotated::Never => Vec::new(),
            Unrotated::Listed => listed_layers(fields, layers),
            Unrotated::FullUnlessNull if fields.has("sliding_window") && fields.peek("sliding_window").is_none() => {
                Vec::new()
            }
            Unrotated::Full | Unrotated::FullUnlessNull => (0..layers).collect(),
        };
        (config.sliding_window, config.full_layers) = window::take(fields, self.window, layers, &unrotated);
        let is_full = |layer: &usize| config.sliding_window.is_none() || config.full_layers.contains(layer);
        config.traits.unrotated_layers = match self.unrotated {
            Unrotated::Full | Unrotated::FullUnlessNull => unrotated.into_iter().filter(is_full).collect(),
            _ => unrotated,
        };
        rope::take(fields, &mut config, self, head_size);
        config
    }

    fn head_size(&self, fields: &mut Fields, config: &LlamaConfig) -> usize {
        let &LlamaConfig { width, heads, .. } = config;
        let has = fields.has("head_dim");
        let is_null = has && fields.peek("head_dim").is_none();
        let given = has.then(|| fields.count("head_dim", Some(0), 0..=1 << 16)).filter(|size| *size > 0);
        // A null is the width divided by the heads, as no option is in most families.
        let default = self.head_size.filter(|_| !is_null);
        let Some(size) = given.or(default) else {
            if !width.is_multiple_of(heads) {
                fields.wrong("num_attention_heads", &heads.into(), &format!("a divisor of hidden_size, {width}"));
            }
            return (width / heads).max(1);
        };
        if !size.is_multiple_of(2) {
            fields.wrong("head_dim", &size.into(), "even, as rotary positions need");
        }
        size
    }

    fn biases(&self, fields: &mut Fields) -> [bool; 3] {
        let found = self.biases.map(|bias| match bias {
            Bias::Never => false,
            Bias::Always => true,
            Bias::Option(option, default) => fields.peek_flag(option, default),
        });
        for bias in self.biases {
            match bias {
                Bias::Option(option, _) => fields.ignore(&[option]),
                Bias::Never | Bias::Always => {}
            }
        }
        // Options of other families must agree.
        fields.require("attention_bias", false);
        fields.require("mlp_bias", found[2]);
        if found[0] {
            fields.require("qkv_bias", true);
        }
        found
    }
}

/// Reads an activation function. A missing option has the default.
pub(super) fn activation(fields: &mut Fields, option: &str, default: GateActivation) -> GateActivation {
    use GateActivation::{Gelu, GeluErf, Relu, Relu2, Silu, Xielu};
    const NAMES: [(&str, GateActivation); 11] = [
        ("silu", Silu),
        ("swish", Silu),
        ("gelu", GeluErf),
        ("gelu_pytorch_tanh", Gelu),
        ("gelu_new", Gelu),
        ("gelu_fast", Gelu),
        ("gelu_accurate", Gelu),
        ("gelu_python", GeluErf),
        ("relu", Relu),
        ("relu2", Relu2),
        ("xielu", Xielu),
    ];
    if fields.peek(option).is_none() {
        fields.ignore(&[option]);
        return default;
    }
    let name = fields.one_of(option, &NAMES.map(|(name, _)| name));
    NAMES.iter().find(|(known, _)| *known == name).map_or(default, |(_, found)| *found)
}

/// Reads the padding token, whose embedding row is not trained, as in PyTorch. Null means that there is no padding
/// token. A negative number counts from the end of the vocabulary.
fn padding(fields: &mut Fields, default: Option<u32>, vocabulary: usize) -> Option<u32> {
    if !fields.has("pad_token_id") {
        return default.filter(|&id| (id as usize) < vocabulary);
    }
    let value = fields.take("pad_token_id")?;
    let place = |id: i64| u32::try_from(if id < 0 { id + vocabulary as i64 } else { id }).ok();
    let id = value.as_i64().and_then(place).filter(|&id| (id as usize) < vocabulary);
    if id.is_none() {
        fields.wrong("pad_token_id", &value, &format!("a token, below {vocabulary}"));
    }
    id
}

/// Returns the layers that are 0 in `no_rope_layers`. If the option is missing, returns every
/// `no_rope_layer_interval`th layer.
fn listed_layers(fields: &mut Fields, layers: usize) -> Vec<usize> {
    let every = fields.count("no_rope_layer_interval", Some(4), 1..=1 << 20);
    // An empty list means the default, like a missing one.
    let listed = fields.take("no_rope_layers").filter(|listed| listed.as_array().is_none_or(|all| !all.is_empty()));
    let Some(listed) = listed else {
        return (0..layers).filter(|layer| (layer + 1).is_multiple_of(every)).collect();
    };
    let flags: Option<Vec<u64>> = listed.as_array().and_then(|all| all.iter().map(Value::as_u64).collect());
    match flags.filter(|flags| flags.len() >= layers) {
        Some(flags) => (0..layers).filter(|&layer| flags[layer] == 0).collect(),
        None => {
            fields.wrong("no_rope_layers", &listed, &format!("a list of 0 and 1 for {layers} layers"));
            Vec::new()
        }
    }
}

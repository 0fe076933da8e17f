//! The settings of a decoder without experts. The default is Llama (Touvron et al., arXiv 2302.13971): RMS norm, rotary
//! positions, SwiGLU, and grouped-query attention (Ainslie et al., arXiv 2305.13245). Other settings give the other
//! families that [`hf`](crate::hf) reads.

use gapless_engine::ops::RopeScaling;
use gapless_engine::{Error, Result};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::limits::{Checked, MAX_HIDDEN, MAX_LAYERS, MAX_TOKENS, MAX_WIDTH};
use crate::traits::{NormKind, Traits};

/// The settings of a [`Llama`](crate::Llama).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct LlamaConfig {
    /// The number of tokens in the vocabulary.
    pub vocabulary: usize,
    /// The number of blocks.
    pub layers: usize,
    /// The number of query heads.
    pub heads: usize,
    /// The number of key and value heads; it must divide `heads`.
    pub kv_heads: usize,
    /// The width of the residual stream.
    pub width: usize,
    /// The width of the feed-forward layer.
    pub hidden: usize,
    /// The base of the rotary frequencies.
    pub rope_theta: f64,
    /// The scaling of the rotary frequencies for longer sequences.
    pub rope_scaling: RopeScaling,
    /// The value that the norms add to the mean square or to the variance.
    pub rms_norm_eps: f64,
    /// The width of a head. The default is `width` divided by `heads`.
    pub head_size: Option<usize>,
    /// Whether the query, key and value projections have biases (Qwen2).
    pub qkv_bias: bool,
    /// Whether the output projection of the attention has a bias.
    pub output_bias: bool,
    /// Whether the feed-forward layers have biases.
    pub mlp_bias: bool,
    /// The normalization of queries and keys before the rotation.
    pub qk_norm: QkNorm,
    /// The position of the norms in a block.
    pub norms: Norms,
    /// Whether the head shares its weight with the embedding.
    pub tied: bool,
    /// The maximum number of tokens that a token attends to, including itself (Mistral, arXiv 2310.06825, section 2).
    /// If it is missing, a token attends to all earlier tokens.
    pub sliding_window: Option<usize>,
    /// The layers that have full attention although the model has a sliding window.
    pub full_layers: Vec<usize>,
    /// The base of the rotary frequencies in layers with a sliding window. If it is set, `rope_scaling` does not apply
    /// to these layers. If it is missing, these layers have the same frequencies as the others.
    pub window_rope_theta: Option<f64>,
    /// The padding token. Looking it up gives its embedding row no gradient.
    pub padding: Option<u32>,
    /// The activation function of the gate in the feed-forward layer.
    pub activation: GateActivation,
    /// Whether the norms multiply by 1 + weight (Gemma, Nemotron).
    pub offset_norms: bool,
    /// Whether the embedding is multiplied by the square root of the width (Gemma).
    pub scaled_embedding: bool,
    /// Attention scores are divided by the square root of this value. The default is the width of a head.
    pub query_scale: Option<f64>,
    /// The cap of attention scores: a score s is replaced by cap · tanh(s / cap) (Gemma 2, arXiv 2408.00118, section
    /// 2).
    pub attention_cap: Option<f64>,
    /// The cap of logits: a logit x is replaced by cap · tanh(x / cap).
    pub logit_cap: Option<f64>,
    /// The traits that only some families have.
    #[serde(skip_serializing_if = "Traits::is_default")]
    pub traits: Box<Traits>,
}

/// The activation function of a feed-forward layer, which is that of its gate if it has one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum GateActivation {
    /// SiLU, x · sigmoid(x), which makes the feed-forward layer a SwiGLU.
    #[default]
    Silu,
    /// GELU with the tanh approximation, which makes the feed-forward layer a GeGLU (Shazeer, arXiv 2002.05202).
    Gelu,
    /// GELU with the error function.
    GeluErf,
    /// relu(x).
    Relu,
    /// relu(x)² (So et al., arXiv 2109.08668).
    Relu2,
    /// xIELU, with two trained parameters per layer (Huang and Schlag, arXiv 2411.13010).
    Xielu,
}

/// The normalization of queries and keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum QkNorm {
    /// Queries and keys are not normalized.
    #[default]
    None,
    /// Each head is normalized separately (Qwen3).
    Head,
    /// All heads are normalized together (OLMo 2).
    Width,
    /// Each head has a layer norm of its own, without a bias: their weights are [heads, head size] (Cohere, StableLM).
    OwnLayer,
    /// Each head is normalized separately, after the rotation (Hunyuan).
    Rotated,
    /// Each head is normalized separately and without a weight, after the rotation, in the layers with rotary positions
    /// (Llama 4).
    RotatedNoWeight,
}

/// The position of the norms in a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Norms {
    /// Pre-norm: x + part(norm(x)).
    #[default]
    Before,
    /// Post-norm inside the residual: x + norm(part(x)) (OLMo 2, arXiv 2501.00656).
    After,
    /// Both: x + norm(part(norm(x))) (Gemma 2, arXiv 2408.00118).
    Both,
    /// Attention and feed-forward layer read the same x, each with a norm of its own (GPT-NeoX, arXiv 2204.06745, section
    /// 2.1).
    Parallel,
    /// Attention and feed-forward layer read the same norm(x) (Cohere).
    Shared,
}

impl Default for LlamaConfig {
    /// The settings of Llama 3 8B.
    fn default() -> Self {
        Self {
            vocabulary: 128_256,
            layers: 32,
            heads: 32,
            kv_heads: 8,
            width: 4096,
            hidden: 14_336,
            rope_theta: 500_000.0,
            rope_scaling: RopeScaling::None,
            rms_norm_eps: 1e-5,
            head_size: None,
            qkv_bias: false,
            output_bias: false,
            mlp_bias: false,
            qk_norm: QkNorm::None,
            norms: Norms::Before,
            tied: false,
            sliding_window: None,
            full_layers: Vec::new(),
            window_rope_theta: None,
            padding: None,
            activation: GateActivation::Silu,
            offset_norms: false,
            scaled_embedding: false,
            query_scale: None,
            attention_cap: None,
            logit_cap: None,
            traits: Box::default(),
        }
    }
}

impl LlamaConfig {
    /// Checks that the settings are within the [`limits`](crate::limits).
    ///
    /// # Errors
    /// Returns an error for the first setting that is outside its limits.
    pub fn check(&self) -> Result<()> {
        let &Self { vocabulary, layers, heads, kv_heads, width, hidden, .. } = self;
        let checked = Checked::default()
            .extent("vocabulary", vocabulary, MAX_TOKENS)
            .extent("layers", layers, MAX_LAYERS)
            .extent("heads", heads, MAX_WIDTH)
            .extent("kv_heads", kv_heads, MAX_WIDTH)
            .extent("width", width, MAX_WIDTH)
            .extent("hidden", hidden, MAX_HIDDEN)
            .extent("head_size", self.head_size.unwrap_or(1), MAX_WIDTH)
            .extent("heads × head_size", heads.saturating_mul(self.head_size.unwrap_or(1)), MAX_HIDDEN)
            .extent("sliding_window", self.sliding_window.unwrap_or(1), usize::MAX)
            .positive("rope_theta", self.rope_theta)
            .positive("rms_norm_eps", self.rms_norm_eps);
        let optional = [
            ("window_rope_theta", self.window_rope_theta),
            ("query_scale", self.query_scale),
            ("attention_cap", self.attention_cap),
            ("logit_cap", self.logit_cap),
        ];
        let numbers = optional.into_iter().filter_map(|(name, number)| Some((name, number?)));
        numbers.fold(checked, |checked, (name, number)| checked.positive(name, number)).done()?;
        self.traits.check(self.width_of_head())?;
        let fail = |why: &str, remedy| Err(Error::config("model", why, remedy));
        if self.offset_norms
            && matches!(self.traits.norm, NormKind::LayerNoWeight | NormKind::LayerNoBias | NormKind::RmsNoWeight)
        {
            return fail("offset_norms has no effect on this norm", "leave offset_norms out");
        }
        if self.traits.backwards && self.qk_norm == QkNorm::Rotated {
            return fail("norms of rotated heads know no backwards rotation", "leave one of the two out");
        }
        let has_own = self.traits.dynamic_rope.is_some() || self.traits.long_rope.is_some();
        if has_own && self.rope_scaling != RopeScaling::None {
            let why = "rope_scaling has no effect beside dynamic_rope or long_rope".to_owned();
            return Err(Error::config("model", why, "leave rope_scaling out, or the trait"));
        }
        Checked::default().elements(self.parameters().into()).done()
    }

    /// Returns the number of parameters.
    pub fn parameters(&self) -> u64 {
        let norms = match self.norms {
            Norms::Both => 4,
            Norms::Before | Norms::After | Norms::Parallel => 2,
            Norms::Shared => 1,
        };
        let block = self.attention_parameters() + self.mlp_parameters() + norms * self.norm_parameters(self.width);
        let tables = if self.tied { 1 } else { 2 };
        let head_bias = if self.traits.head_bias { self.vocabulary } else { 0 };
        (tables * self.vocabulary * self.width + head_bias + self.layers * block + self.norm_parameters(self.width))
            as u64
    }

    fn norm_parameters(&self, width: usize) -> usize {
        match self.traits.norm {
            NormKind::Layer => 2 * width,
            NormKind::Rms | NormKind::LayerNoBias => width,
            NormKind::LayerNoWeight | NormKind::RmsNoWeight => 0,
        }
    }

    /// Returns the number of parameters of one layer's attention.
    pub(crate) fn attention_parameters(&self) -> usize {
        let (width, head_size) = (self.width, self.width_of_head());
        let (q, kv) = (self.heads * head_size, self.kv_heads * head_size);
        let attention = 2 * width * q + 2 * width * kv;
        let qk_norms = match self.qk_norm {
            QkNorm::None | QkNorm::RotatedNoWeight => 0,
            QkNorm::Head | QkNorm::Rotated => 2 * self.norm_parameters(head_size),
            QkNorm::Width => self.norm_parameters(q + kv),
            QkNorm::OwnLayer => q + kv,
        };
        let biases = usize::from(self.qkv_bias) * (q + 2 * kv) + usize::from(self.output_bias) * width;
        let gate = if self.traits.gated_attention { width * q } else { 0 };
        attention + gate + qk_norms + biases + if self.traits.sinks { self.heads } else { 0 }
    }

    /// Returns the number of parameters of one feed-forward layer.
    pub(crate) fn mlp_parameters(&self) -> usize {
        let inner = if self.traits.ungated { 1 } else { 2 };
        let alphas = if self.activation == GateActivation::Xielu { 2 } else { 0 };
        let biases = usize::from(self.mlp_bias) * (inner * self.hidden + self.width);
        (inner + 1) * self.width * self.hidden + biases + alphas
    }

    fn width_of_head(&self) -> usize {
        self.head_size.unwrap_or(self.width / self.heads.max(1))
    }

    /// The width of the rotated part of a head.
    pub(crate) fn rotated_size(&self) -> usize {
        self.traits.rotated_size.unwrap_or(self.width_of_head())
    }
}

//! Llama (Touvron et al., arXiv 2302.13971): RMS norm, rotary positions, SwiGLU, and grouped-query attention (Ainslie
//! et al., arXiv 2305.13245). Other settings give Mistral, Qwen2, Qwen3, OLMo 2, Gemma 2 and Gemma 3.

use gapless_engine::nn::{
    Embedding, Linear, Module, RmsNorm, VarBuilder, embedding, linear, linear_no_bias, rms_norm, rms_norm_offset,
};
use gapless_engine::ops::{self, RopeScaling};
use gapless_engine::{Error, Model, Result, Tensor};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::head_size;
use crate::limits::{Checked, MAX_HIDDEN, MAX_LAYERS, MAX_TOKENS, MAX_WIDTH};

/// The settings of a [`Llama`].
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
    /// The value that the norms add to the mean square.
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
    /// Whether the norms multiply by 1 + weight (Gemma).
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
}

/// The activation function of the gate in a feed-forward layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum GateActivation {
    /// SiLU, x · sigmoid(x), which makes the feed-forward layer a SwiGLU.
    #[default]
    Silu,
    /// GELU with the tanh approximation, which makes the feed-forward layer a GeGLU (Shazeer, arXiv 2002.05202).
    Gelu,
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
        Checked::default().elements(self.parameters().into()).done()
    }

    /// Returns the number of parameters.
    pub fn parameters(&self) -> u64 {
        let norms = if self.norms == Norms::Both { 4 } else { 2 };
        let block = self.attention_parameters() + self.mlp_parameters() + norms * self.width;
        let tables = if self.tied { 1 } else { 2 };
        (tables * self.vocabulary * self.width + self.layers * block + self.width) as u64
    }

    /// Returns the number of parameters of one layer's attention.
    pub(crate) fn attention_parameters(&self) -> usize {
        let (width, head_size) = (self.width, self.head_size.unwrap_or(self.width / self.heads.max(1)));
        let (q, kv) = (self.heads * head_size, self.kv_heads * head_size);
        let attention = 2 * width * q + 2 * width * kv;
        let qk_norms = match self.qk_norm {
            QkNorm::None => 0,
            QkNorm::Head => 2 * head_size,
            QkNorm::Width => q + kv,
        };
        let biases = usize::from(self.qkv_bias) * (q + 2 * kv) + usize::from(self.output_bias) * width;
        attention + qk_norms + biases
    }

    /// Returns the number of parameters of one feed-forward layer.
    pub(crate) fn mlp_parameters(&self) -> usize {
        3 * self.width * self.hidden + usize::from(self.mlp_bias) * (2 * self.hidden + self.width)
    }

    /// Returns the head. A tied head shares the table of the embedding. For any other head, declares a weight.
    pub(crate) fn head(&self, embedding: &Embedding, vb: VarBuilder) -> Result<Linear> {
        match self.tied {
            true => Ok(Linear::new(embedding.embeddings().clone(), None, vb.prefix())),
            false => linear_no_bias(self.width, self.vocabulary, vb),
        }
    }

    /// Declares a norm over `width` elements with the configured epsilon and form.
    pub(crate) fn norm(&self, width: usize, vb: VarBuilder) -> Result<RmsNorm> {
        let norm = if self.offset_norms { rms_norm_offset } else { rms_norm };
        norm(width, self.rms_norm_eps, vb)
    }

    /// Declares the token embedding under the model's path.
    pub(crate) fn embedding(&self, model: &VarBuilder) -> Result<Embedding> {
        Ok(embedding(self.vocabulary, self.width, model.pp("embed_tokens"))?.with_padding(self.padding))
    }

    /// Returns the embedded tokens, which are the input of the first block.
    pub(crate) fn embed(&self, embedding: &Embedding, tokens: &Tensor) -> Result<Tensor> {
        let x = embedding.forward(tokens)?;
        if self.scaled_embedding { x.affine((self.width as f64).sqrt(), 0.0) } else { Ok(x) }
    }

    /// Returns the logits for the hidden states `x`. If `logit_cap` is set, the logits are capped.
    pub(crate) fn logits(&self, head: &Linear, x: &Tensor) -> Result<Tensor> {
        let logits = head.forward(x)?;
        self.logit_cap.map_or(Ok(logits.clone()), |cap| logits.cap(cap))
    }
}

/// The Llama model.
#[derive(Debug, Clone)]
pub struct Llama {
    embed_tokens: Embedding,
    blocks: Vec<Block>,
    norm: RmsNorm,
    lm_head: Linear,
    config: LlamaConfig,
}

impl Llama {
    /// Declares the parameters.
    ///
    /// # Errors
    /// Returns the errors of [`LlamaConfig::check`]. Returns an error if `head_size` is not set and the width is not a
    /// multiple of `heads`, or if `heads` is not a multiple of `kv_heads`.
    pub fn new(config: &LlamaConfig, vb: VarBuilder) -> Result<Self> {
        config.check()?;
        let model = vb.pp("model");
        let embed_tokens = config.embedding(&model)?;
        let blocks =
            (0..config.layers).map(|i| Block::new(config, i, model.pp("layers").pp(i))).collect::<Result<_>>()?;
        let norm = config.norm(config.width, model.pp("norm"))?;
        let lm_head = config.head(&embed_tokens, vb.pp("lm_head"))?;
        Ok(Self { embed_tokens, blocks, norm, lm_head, config: config.clone() })
    }

    /// Returns the hidden states that the head turns into logits: [batch, tokens, width].
    fn hidden(&self, tokens: &Tensor) -> Result<Tensor> {
        let mut x = self.config.embed(&self.embed_tokens, tokens)?;
        for block in &self.blocks {
            x = block.forward(&x)?;
        }
        self.norm.forward(&x)
    }
}

impl Model for Llama {
    fn forward(&self, tokens: &Tensor, _train: bool) -> Result<Tensor> {
        self.config.logits(&self.lm_head, &self.hidden(tokens)?)
    }

    fn loss(&self, tokens: &Tensor, targets: &Tensor, _train: bool) -> Result<Tensor> {
        self.lm_head.capped_cross_entropy(&self.hidden(tokens)?, targets, self.config.logit_cap)?.mean_all()
    }
}

#[derive(Debug, Clone)]
struct Block {
    residual: Residual,
    self_attn: Attention,
    mlp: Mlp,
    layer: String,
}

impl Block {
    fn new(config: &LlamaConfig, layer: usize, vb: VarBuilder) -> Result<Self> {
        Ok(Self {
            residual: Residual::new(config, &vb)?,
            self_attn: Attention::new(config, layer, vb.pp("self_attn"))?,
            mlp: Mlp::new(config, vb.pp("mlp"))?,
            layer: vb.prefix().to_owned(),
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let _layer = x.enter(&self.layer);
        let x = self.residual.attention(x, |x| self.self_attn.forward(x))?;
        self.residual.feed_forward(&x, |x| self.mlp.forward(x))
    }
}

/// The norms of a block, with the residual connections around its attention and around its feed-forward layer.
#[derive(Debug, Clone)]
pub(crate) struct Residual {
    attention: PartNorms,
    feed_forward: PartNorms,
}

/// The optional norms before and after a part of a block.
#[derive(Debug, Clone)]
struct PartNorms {
    before: Option<RmsNorm>,
    after: Option<RmsNorm>,
}

impl Residual {
    /// Declares the norms, under the block's path.
    pub(crate) fn new(config: &LlamaConfig, vb: &VarBuilder) -> Result<Self> {
        // The names of the norms before and after the attention, and of those before and after the feed-forward layer.
        let (attention, feed_forward) = match config.norms {
            Norms::Before => ((Some("input_layernorm"), None), (Some("post_attention_layernorm"), None)),
            Norms::After => ((None, Some("post_attention_layernorm")), (None, Some("post_feedforward_layernorm"))),
            Norms::Both => (
                (Some("input_layernorm"), Some("post_attention_layernorm")),
                (Some("pre_feedforward_layernorm"), Some("post_feedforward_layernorm")),
            ),
        };
        let norm = |name: Option<&str>| name.map(|name| config.norm(config.width, vb.pp(name))).transpose();
        let around = |(before, after)| Ok::<_, Error>(PartNorms { before: norm(before)?, after: norm(after)? });
        Ok(Self { attention: around(attention)?, feed_forward: around(feed_forward)? })
    }

    pub(crate) fn attention(&self, x: &Tensor, part: impl FnOnce(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
        self.attention.add(x, part)
    }

    pub(crate) fn feed_forward(&self, x: &Tensor, part: impl FnOnce(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
        self.feed_forward.add(x, part)
    }
}

impl PartNorms {
    fn add(&self, x: &Tensor, part: impl FnOnce(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
        let normed = |norm: &Option<RmsNorm>, x: Tensor| norm.as_ref().map_or(Ok(x.clone()), |norm| norm.forward(&x));
        x + normed(&self.after, part(&normed(&self.before, x.clone())?)?)?
    }
}

/// Grouped-query attention with rotary positions.
#[derive(Debug, Clone)]
pub(crate) struct Attention {
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    o_proj: Linear,
    /// The norms of queries and of keys, if they are normalized.
    norms: Option<(RmsNorm, RmsNorm)>,
    config: LlamaConfig,
    head_size: usize,
    /// The maximum number of tokens that a token attends to, including itself; `None` means all earlier tokens.
    window: Option<usize>,
    layer: String,
}

impl Attention {
    pub(crate) fn new(config: &LlamaConfig, layer_number: usize, vb: VarBuilder) -> Result<Self> {
        let &LlamaConfig { width, heads, kv_heads, qkv_bias, output_bias, .. } = config;
        let head_size = config.head_size.map_or_else(|| head_size(width, heads), Ok)?;
        if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
            let why = format!("{kv_heads} key-value heads do not divide {heads} heads");
            return Err(Error::config("model", why, "choose a divisor of the heads"));
        }
        let (q, kv) = (heads * head_size, kv_heads * head_size);
        let (q_norm, k_norm) = match config.qk_norm {
            QkNorm::None => (None, None),
            QkNorm::Head => (Some(head_size), Some(head_size)),
            QkNorm::Width => (Some(q), Some(kv)),
        };
        let norm = |width, name| config.norm(width, vb.pp(name));
        Ok(Self {
            q_proj: layer(qkv_bias, width, q, vb.pp("q_proj"))?,
            k_proj: layer(qkv_bias, width, kv, vb.pp("k_proj"))?,
            v_proj: layer(qkv_bias, width, kv, vb.pp("v_proj"))?,
            o_proj: layer(output_bias, q, width, vb.pp("o_proj"))?,
            norms: q_norm
                .zip(k_norm)
                .map(|(q, k)| Ok::<_, Error>((norm(q, "q_norm")?, norm(k, "k_norm")?)))
                .transpose()?,
            window: config.sliding_window.filter(|_| !config.full_layers.contains(&layer_number)),
            config: config.clone(),
            head_size,
            layer: vb.prefix().to_owned(),
        })
    }

    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let _layer = x.enter(&self.layer);
        let LlamaConfig { heads, kv_heads, rope_theta, rope_scaling, qk_norm, .. } = self.config;
        let (b, t, _) = x.dims3()?;
        let (rope_theta, rope_scaling) = match self.window.and(self.config.window_rope_theta) {
            Some(theta) => (theta, RopeScaling::None),
            None => (rope_theta, rope_scaling),
        };
        let split = |x: Tensor, heads: usize| x.reshape((b, t, heads, self.head_size));
        // Splits queries or keys into heads and rotates them. If they are normalized, this happens before or after the
        // split.
        let rotated = |x: Tensor, heads: usize, norm: Option<&RmsNorm>| {
            let x_bthd = match (norm, qk_norm) {
                (Some(norm), QkNorm::Head) => norm.forward(&split(x, heads)?)?,
                (Some(norm), _) => split(norm.forward(&x)?, heads)?,
                (None, _) => split(x, heads)?,
            };
            x_bthd.transpose(1, 2)?.rope_scaled(rope_theta, rope_scaling)
        };
        let (q_norm, k_norm) = self.norms.as_ref().map(|(q, k)| (q, k)).unzip();
        let q_bhtd = rotated(self.q_proj.forward(x)?, heads, q_norm)?;
        let k_bhtd = rotated(self.k_proj.forward(x)?, kv_heads, k_norm)?;
        let v_bhtd = split(self.v_proj.forward(x)?, kv_heads)?.transpose(1, 2)?;
        let scale = 1.0 / self.config.query_scale.unwrap_or(self.head_size as f64).sqrt();
        let (window, cap) = (self.window, self.config.attention_cap);
        let y_bhtd =
            q_bhtd.attend(&k_bhtd, &v_bhtd, ops::Attention { window, cap, ..ops::Attention::causal(scale) })?;
        self.o_proj.forward(&y_bhtd.transpose(1, 2)?.reshape((b, t, heads * self.head_size))?)
    }
}

/// The feed-forward layer down(activation(gate)·up).
#[derive(Debug, Clone)]
pub(crate) struct Mlp {
    gate_proj: Linear,
    up_proj: Linear,
    down_proj: Linear,
    activation: GateActivation,
    layer: String,
}

impl Mlp {
    pub(crate) fn new(config: &LlamaConfig, vb: VarBuilder) -> Result<Self> {
        let &LlamaConfig { width, hidden, mlp_bias, .. } = config;
        Ok(Self {
            gate_proj: layer(mlp_bias, width, hidden, vb.pp("gate_proj"))?,
            up_proj: layer(mlp_bias, width, hidden, vb.pp("up_proj"))?,
            down_proj: layer(mlp_bias, hidden, width, vb.pp("down_proj"))?,
            activation: config.activation,
            layer: vb.prefix().to_owned(),
        })
    }

    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let _layer = x.enter(&self.layer);
        let (gate, up) = (self.gate_proj.forward(x)?, self.up_proj.forward(x)?);
        self.down_proj.forward(&match self.activation {
            GateActivation::Silu => gate.swiglu(&up)?,
            GateActivation::Gelu => gate.gelu()?.mul(&up)?,
        })
    }
}

fn layer(bias: bool, in_dim: usize, out_dim: usize, vb: VarBuilder) -> Result<Linear> {
    if bias { linear(in_dim, out_dim, vb) } else { linear_no_bias(in_dim, out_dim, vb) }
}

//! GPT-2 (Radford et al., 2019): learned position embeddings, layer norm before each attention and feed-forward part,
//! GELU, and a head tied to the embedding.

use gapless_engine::nn::{
    Embedding, Init, LayerNorm, Linear, Module, VarBuilder, embedding, layer_norm, linear, linear_no_bias,
    linear_with_hints,
};
use gapless_engine::{Error, Model, Result, Tensor};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::head_size;
use crate::limits::{Checked, MAX_HIDDEN, MAX_LAYERS, MAX_TOKENS, MAX_WIDTH};

/// The settings of a [`Gpt`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct GptConfig {
    /// The number of tokens in the vocabulary.
    pub vocabulary: usize,
    /// The maximum number of tokens per sequence.
    pub sequence: usize,
    /// The number of blocks.
    pub layers: usize,
    /// The number of attention heads per block.
    pub heads: usize,
    /// The width of the residual stream.
    pub width: usize,
    /// The width of the feed-forward layer. The default is four times `width`.
    pub hidden: Option<usize>,
    /// The value that the norms add to the variance.
    pub layer_norm_eps: f64,
    /// The activation function of the feed-forward layer.
    pub activation: Activation,
    /// Whether the head shares its weight with the embedding.
    pub tied: bool,
    /// The probability of dropout, which is applied to the embeddings and to the outputs of the attention and of the
    /// feed-forward layer of each block.
    pub dropout: f64,
}

/// A form of GELU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// GELU with the tanh approximation, as in GPT-2.
    #[default]
    GeluTanh,
    /// GELU with the error function.
    GeluErf,
}

impl Default for GptConfig {
    /// The settings of GPT-2 124M.
    fn default() -> Self {
        Self {
            vocabulary: 50_257,
            sequence: 1024,
            layers: 12,
            heads: 12,
            width: 768,
            hidden: None,
            layer_norm_eps: 1e-5,
            activation: Activation::GeluTanh,
            tied: true,
            dropout: 0.0,
        }
    }
}

impl GptConfig {
    /// Returns the number of parameters.
    pub fn parameters(&self) -> u64 {
        let (width, hidden) = (self.width, self.hidden());
        let block = 4 * width * width + 2 * width * hidden + 9 * width + hidden;
        let tables = if self.tied { 1 } else { 2 };
        ((tables * self.vocabulary + self.sequence) * width + self.layers * block + 2 * width) as u64
    }

    fn hidden(&self) -> usize {
        self.hidden.unwrap_or(4 * self.width)
    }

    /// Checks that the settings are within the [`limits`](crate::limits).
    ///
    /// # Errors
    /// Returns an error for the first setting that is outside its limits.
    pub fn check(&self) -> Result<()> {
        let &Self { vocabulary, sequence, layers, heads, width, .. } = self;
        Checked::default()
            .extent("vocabulary", vocabulary, MAX_TOKENS)
            .extent("sequence", sequence, MAX_TOKENS)
            .extent("layers", layers, MAX_LAYERS)
            .extent("heads", heads, MAX_WIDTH)
            .extent("width", width, MAX_WIDTH)
            .extent("hidden", self.hidden.unwrap_or(width), MAX_HIDDEN)
            .positive("layer_norm_eps", self.layer_norm_eps)
            .probability("dropout", self.dropout)
            .done()?;
        Checked::default().elements(self.parameters().into()).done()
    }
}

/// The GPT-2 model.
#[derive(Debug, Clone)]
pub struct Gpt {
    wte: Embedding,
    wpe: Tensor,
    blocks: Vec<Block>,
    ln_f: LayerNorm,
    head: Linear,
    config: GptConfig,
}

impl Gpt {
    /// Declares the parameters.
    ///
    /// # Errors
    /// Returns an error if the width is not a multiple of the number of heads, and the errors of [`GptConfig::check`].
    pub fn new(config: &GptConfig, vb: VarBuilder) -> Result<Self> {
        config.check()?;
        let wte = embedding(config.vocabulary, config.width, vb.pp("wte"))?;
        let wpe = vb.pp("wpe").get((config.sequence, config.width), "weight")?;
        let blocks = (0..config.layers).map(|i| Block::new(config, vb.pp("h").pp(i))).collect::<Result<_>>()?;
        let ln_f = layer_norm(config.width, config.layer_norm_eps, vb.pp("ln_f"))?;
        let head = match config.tied {
            true => Linear::new(wte.embeddings().clone(), None, "head"),
            false => linear_no_bias(config.width, config.vocabulary, vb.pp("lm_head").unquantized())?,
        };
        Ok(Self { wte, wpe, blocks, ln_f, head, config: config.clone() })
    }

    /// Returns the hidden states that the head turns into logits: [batch, tokens, width].
    fn hidden(&self, tokens: &Tensor, train: bool) -> Result<Tensor> {
        let (_, t) = tokens.dims2()?;
        let dropout = if train { self.config.dropout } else { 0.0 };
        if t > self.config.sequence {
            return Err(Error::config(
                "sequence",
                format!("{t} tokens, but the model has positions for {}", self.config.sequence),
                "use shorter sequences, or a model with more positions (GptConfig::sequence)",
            ));
        }
        let positions = self.wpe.rows_of_positions(t)?;
        let mut x = self.wte.forward(tokens)?.broadcast_add(&positions)?.dropout(dropout)?;
        for block in &self.blocks {
            x = block.forward(&x, dropout)?;
        }
        self.ln_f.forward(&x)
    }
}

impl Model for Gpt {
    fn forward(&self, tokens: &Tensor, train: bool) -> Result<Tensor> {
        self.head.forward(&self.hidden(tokens, train)?)
    }

    fn loss(&self, tokens: &Tensor, targets: &Tensor, train: bool) -> Result<Tensor> {
        self.head.cross_entropy(&self.hidden(tokens, train)?, targets)?.mean_all()
    }
}

#[derive(Debug, Clone)]
struct Block {
    ln_1: LayerNorm,
    attn: Attention,
    ln_2: LayerNorm,
    mlp: Mlp,
    layer: String,
}

impl Block {
    fn new(config: &GptConfig, vb: VarBuilder) -> Result<Self> {
        Ok(Self {
            ln_1: layer_norm(config.width, config.layer_norm_eps, vb.pp("ln_1"))?,
            attn: Attention::new(config, vb.pp("attn"))?,
            ln_2: layer_norm(config.width, config.layer_norm_eps, vb.pp("ln_2"))?,
            mlp: Mlp::new(config, vb.pp("mlp"))?,
            layer: vb.prefix().to_owned(),
        })
    }

    fn forward(&self, x: &Tensor, dropout: f64) -> Result<Tensor> {
        let _layer = x.enter(&self.layer);
        let x = (x + self.attn.forward(&self.ln_1.forward(x)?)?.dropout(dropout)?)?;
        &x + self.mlp.forward(&self.ln_2.forward(&x)?)?.dropout(dropout)?
    }
}

#[derive(Debug, Clone)]
struct Attention {
    c_attn: Linear,
    c_proj: Linear,
    heads: usize,
    head_size: usize,
    layer: String,
}

impl Attention {
    fn new(config: &GptConfig, vb: VarBuilder) -> Result<Self> {
        let width = config.width;
        let head_size = head_size(width, config.heads)?;
        let c_attn = linear(width, 3 * width, vb.pp("c_attn"))?;
        let c_proj = residual_linear(width, width, config, vb.pp("c_proj"))?;
        Ok(Self { c_attn, c_proj, heads: config.heads, head_size, layer: vb.prefix().to_owned() })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let _layer = x.enter(&self.layer);
        let (b, t, c) = x.dims3()?;
        let qkv = self.c_attn.forward(x)?;
        let heads = |i: usize| qkv.narrow(2, i * c, c)?.reshape((b, t, self.heads, self.head_size))?.transpose(1, 2);
        let (q_bhtd, k_bhtd, v_bhtd) = (heads(0)?, heads(1)?, heads(2)?);
        let scale = 1.0 / (self.head_size as f64).sqrt();
        let y_bhtd = q_bhtd.causal_attention(&k_bhtd, &v_bhtd, scale)?;
        self.c_proj.forward(&y_bhtd.transpose(1, 2)?.reshape((b, t, c))?)
    }
}

#[derive(Debug, Clone)]
struct Mlp {
    c_fc: Linear,
    c_proj: Linear,
    activation: Activation,
    layer: String,
}

impl Mlp {
    fn new(config: &GptConfig, vb: VarBuilder) -> Result<Self> {
        let c_fc = linear(config.width, config.hidden(), vb.pp("c_fc"))?;
        let c_proj = residual_linear(config.hidden(), config.width, config, vb.pp("c_proj"))?;
        Ok(Self { c_fc, c_proj, activation: config.activation, layer: vb.prefix().to_owned() })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let _layer = x.enter(&self.layer);
        let x = self.c_fc.forward(x)?;
        let x = match self.activation {
            Activation::GeluTanh => x.gelu()?,
            Activation::GeluErf => x.gelu_erf()?,
        };
        self.c_proj.forward(&x)
    }
}

/// Declares a layer whose output is added to the residual stream. The layer's initial weights are scaled by
/// 1/√(2·layers) (GPT-2, section 2.3).
fn residual_linear(in_dim: usize, out_dim: usize, config: &GptConfig, vb: VarBuilder) -> Result<Linear> {
    let stdev = 0.02 / (2.0 * config.layers.max(1) as f64).sqrt();
    linear_with_hints(in_dim, out_dim, Init::Randn { mean: 0.0, stdev }, vb)
}

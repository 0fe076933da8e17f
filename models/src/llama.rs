//! Llama (Touvron et al., arXiv 2302.13971): RMS norm, rotary positions, SwiGLU, grouped-query attention
//! (Ainslie et al., arXiv 2305.13245).

use gapless_engine::nn::{Embedding, Linear, Module, RmsNorm, VarBuilder, embedding, linear_no_bias, rms_norm};
use gapless_engine::{Error, Model, Result, Tensor};
use serde::{Deserialize, Serialize};

use crate::head_size;

/// Extents of a [`Llama`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LlamaConfig {
    /// Number of tokens that exist.
    pub vocabulary: usize,
    /// Number of blocks.
    pub layers: usize,
    /// Heads of the queries.
    pub heads: usize,
    /// Heads of the keys and values; divides `heads`.
    pub kv_heads: usize,
    /// Width of the residual stream.
    pub width: usize,
    /// Width of the feed-forward part.
    pub hidden: usize,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Added to the mean square in the norms.
    pub rms_norm_eps: f64,
}

impl Default for LlamaConfig {
    /// Llama 3 8B.
    fn default() -> Self {
        Self {
            vocabulary: 128_256,
            layers: 32,
            heads: 32,
            kv_heads: 8,
            width: 4096,
            hidden: 14_336,
            rope_theta: 500_000.0,
            rms_norm_eps: 1e-5,
        }
    }
}

impl LlamaConfig {
    /// Number of trained numbers.
    pub fn parameters(&self) -> u64 {
        let width = self.width;
        let kv = width / self.heads.max(1) * self.kv_heads;
        let block = 2 * width * width + 2 * width * kv + 3 * width * self.hidden + 2 * width;
        (2 * self.vocabulary * width + self.layers * block + width) as u64
    }
}

/// The model.
#[derive(Debug, Clone)]
pub struct Llama {
    embed_tokens: Embedding,
    blocks: Vec<Block>,
    norm: RmsNorm,
    lm_head: Linear,
}

impl Llama {
    /// Declares the parameters.
    ///
    /// # Errors
    /// When the heads do not divide the width, or the key-value heads the heads.
    pub fn new(config: &LlamaConfig, vb: VarBuilder) -> Result<Self> {
        let model = vb.pp("model");
        let embed_tokens = embedding(config.vocabulary, config.width, model.pp("embed_tokens"))?;
        let blocks = (0..config.layers).map(|i| Block::new(config, model.pp("layers").pp(i))).collect::<Result<_>>()?;
        let norm = rms_norm(config.width, config.rms_norm_eps, model.pp("norm"))?;
        let lm_head = linear_no_bias(config.width, config.vocabulary, vb.pp("lm_head"))?;
        Ok(Self { embed_tokens, blocks, norm, lm_head })
    }

    /// What the head reads: [batch, tokens, width].
    fn hidden(&self, tokens: &Tensor) -> Result<Tensor> {
        let mut x = self.embed_tokens.forward(tokens)?;
        for block in &self.blocks {
            x = block.forward(&x)?;
        }
        self.norm.forward(&x)
    }
}

impl Model for Llama {
    fn forward(&self, tokens: &Tensor, _train: bool) -> Result<Tensor> {
        self.lm_head.forward(&self.hidden(tokens)?)
    }

    fn loss(&self, tokens: &Tensor, targets: &Tensor, _train: bool) -> Result<Tensor> {
        self.lm_head.cross_entropy(&self.hidden(tokens)?, targets)?.mean_all()
    }
}

#[derive(Debug, Clone)]
struct Block {
    input_layernorm: RmsNorm,
    self_attn: Attention,
    post_attention_layernorm: RmsNorm,
    mlp: Mlp,
    layer: String,
}

impl Block {
    fn new(config: &LlamaConfig, vb: VarBuilder) -> Result<Self> {
        let eps = config.rms_norm_eps;
        Ok(Self {
            input_layernorm: rms_norm(config.width, eps, vb.pp("input_layernorm"))?,
            self_attn: Attention::new(config, vb.pp("self_attn"))?,
            post_attention_layernorm: rms_norm(config.width, eps, vb.pp("post_attention_layernorm"))?,
            mlp: Mlp::new(config.width, config.hidden, vb.pp("mlp"))?,
            layer: vb.prefix().to_owned(),
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let _layer = x.enter(&self.layer);
        let x = (x + self.self_attn.forward(&self.input_layernorm.forward(x)?)?)?;
        &x + self.mlp.forward(&self.post_attention_layernorm.forward(&x)?)?
    }
}

/// Grouped-query attention with rotary positions.
#[derive(Debug, Clone)]
pub(crate) struct Attention {
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    o_proj: Linear,
    heads: usize,
    kv_heads: usize,
    head_size: usize,
    rope_theta: f64,
    layer: String,
}

impl Attention {
    pub(crate) fn new(config: &LlamaConfig, vb: VarBuilder) -> Result<Self> {
        let &LlamaConfig { width, heads, kv_heads, rope_theta, .. } = config;
        let head_size = head_size(width, heads)?;
        if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
            let why = format!("{kv_heads} key-value heads do not divide {heads} heads");
            return Err(Error::Config { what: "model", why, remedy: "choose a divisor of the heads" });
        }
        Ok(Self {
            q_proj: linear_no_bias(width, heads * head_size, vb.pp("q_proj"))?,
            k_proj: linear_no_bias(width, kv_heads * head_size, vb.pp("k_proj"))?,
            v_proj: linear_no_bias(width, kv_heads * head_size, vb.pp("v_proj"))?,
            o_proj: linear_no_bias(heads * head_size, width, vb.pp("o_proj"))?,
            heads,
            kv_heads,
            head_size,
            rope_theta,
            layer: vb.prefix().to_owned(),
        })
    }

    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let _layer = x.enter(&self.layer);
        let (b, t, _) = x.dims3()?;
        let heads = |x: Tensor, heads: usize| x.reshape((b, t, heads, self.head_size))?.transpose(1, 2);
        let q_bhtd = heads(self.q_proj.forward(x)?, self.heads)?.rope(self.rope_theta)?;
        let k_bhtd = heads(self.k_proj.forward(x)?, self.kv_heads)?.rope(self.rope_theta)?;
        let v_bhtd = heads(self.v_proj.forward(x)?, self.kv_heads)?;
        let scale = 1.0 / (self.head_size as f64).sqrt();
        let y_bhtd = q_bhtd.causal_attention(&k_bhtd, &v_bhtd, scale)?;
        self.o_proj.forward(&y_bhtd.transpose(1, 2)?.reshape((b, t, self.heads * self.head_size))?)
    }
}

/// down(silu(gate)·up).
#[derive(Debug, Clone)]
pub(crate) struct Mlp {
    gate_proj: Linear,
    up_proj: Linear,
    down_proj: Linear,
    layer: String,
}

impl Mlp {
    pub(crate) fn new(width: usize, hidden: usize, vb: VarBuilder) -> Result<Self> {
        Ok(Self {
            gate_proj: linear_no_bias(width, hidden, vb.pp("gate_proj"))?,
            up_proj: linear_no_bias(width, hidden, vb.pp("up_proj"))?,
            down_proj: linear_no_bias(hidden, width, vb.pp("down_proj"))?,
            layer: vb.prefix().to_owned(),
        })
    }

    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let _layer = x.enter(&self.layer);
        self.down_proj.forward(&self.gate_proj.forward(x)?.swiglu(&self.up_proj.forward(x)?)?)
    }
}

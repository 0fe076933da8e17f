//! Llama, eager.

use candle_core::{Module, Result, Tensor};
use candle_nn::{Init, Linear, RmsNorm, VarBuilder};
use gapless::models::LlamaConfig;

use super::{WEIGHT, causal_attention, linear_no_bias};

/// The reference implementation of [`gapless::models::Llama`].
pub struct Llama {
    embed_tokens: Tensor,
    blocks: Vec<Block>,
    norm: RmsNorm,
    lm_head: Linear,
}

impl Llama {
    pub fn new(config: &LlamaConfig, vb: VarBuilder) -> Result<Self> {
        let &LlamaConfig { vocabulary, width, rms_norm_eps, .. } = config;
        let model = vb.pp("model");
        let blocks = (0..config.layers).map(|i| Block::new(config, model.pp("layers").pp(i))).collect::<Result<_>>()?;
        Ok(Self {
            embed_tokens: model.pp("embed_tokens").get_with_hints((vocabulary, width), "weight", WEIGHT)?,
            blocks,
            norm: rms_norm(width, rms_norm_eps, model.pp("norm"))?,
            lm_head: linear_no_bias(width, vocabulary, vb.pp("lm_head"))?,
        })
    }
}

impl Module for Llama {
    fn forward(&self, tokens: &Tensor) -> Result<Tensor> {
        let (b, t) = tokens.dims2()?;
        let mut x = self.embed_tokens.index_select(&tokens.flatten_all()?, 0)?.reshape((b, t, ()))?;
        for block in &self.blocks {
            x = block.forward(&x)?;
        }
        self.lm_head.forward(&self.norm.forward_diff(&x)?)
    }
}

struct Block {
    input_layernorm: RmsNorm,
    self_attn: Attention,
    post_attention_layernorm: RmsNorm,
    mlp: Mlp,
}

impl Block {
    fn new(config: &LlamaConfig, vb: VarBuilder) -> Result<Self> {
        let &LlamaConfig { width, hidden, rms_norm_eps, .. } = config;
        Ok(Self {
            input_layernorm: rms_norm(width, rms_norm_eps, vb.pp("input_layernorm"))?,
            self_attn: Attention::new(config, vb.pp("self_attn"))?,
            post_attention_layernorm: rms_norm(width, rms_norm_eps, vb.pp("post_attention_layernorm"))?,
            mlp: Mlp::new(width, hidden, vb.pp("mlp"))?,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = (x + self.self_attn.forward(&self.input_layernorm.forward_diff(x)?)?)?;
        &x + self.mlp.forward(&self.post_attention_layernorm.forward_diff(&x)?)?
    }
}

pub(super) struct Attention {
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    o_proj: Linear,
    config: LlamaConfig,
}

impl Attention {
    pub(super) fn new(config: &LlamaConfig, vb: VarBuilder) -> Result<Self> {
        let width = config.width;
        let kv_width = width / config.heads * config.kv_heads;
        Ok(Self {
            q_proj: linear_no_bias(width, width, vb.pp("q_proj"))?,
            k_proj: linear_no_bias(width, kv_width, vb.pp("k_proj"))?,
            v_proj: linear_no_bias(width, kv_width, vb.pp("v_proj"))?,
            o_proj: linear_no_bias(width, width, vb.pp("o_proj"))?,
            config: config.clone(),
        })
    }

    pub(super) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let (b, t, width) = x.dims3()?;
        let &LlamaConfig { heads, kv_heads, rope_theta, .. } = &self.config;
        let split = |x: Tensor, heads: usize| x.reshape((b, t, heads, ()))?.transpose(1, 2)?.contiguous();
        let q = rope(&split(self.q_proj.forward(x)?, heads)?, rope_theta)?;
        let k = rope(&split(self.k_proj.forward(x)?, kv_heads)?, rope_theta)?;
        let v = split(self.v_proj.forward(x)?, kv_heads)?;
        let y = causal_attention(&q, &repeat_heads(&k, heads)?, &repeat_heads(&v, heads)?)?;
        self.o_proj.forward(&y.transpose(1, 2)?.reshape((b, t, width))?)
    }
}

pub(super) struct Mlp {
    gate_proj: Linear,
    up_proj: Linear,
    down_proj: Linear,
}

impl Mlp {
    pub(super) fn new(width: usize, hidden: usize, vb: VarBuilder) -> Result<Self> {
        Ok(Self {
            gate_proj: linear_no_bias(width, hidden, vb.pp("gate_proj"))?,
            up_proj: linear_no_bias(width, hidden, vb.pp("up_proj"))?,
            down_proj: linear_no_bias(hidden, width, vb.pp("down_proj"))?,
        })
    }

    pub(super) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.down_proj.forward(&(self.gate_proj.forward(x)?.silu()? * self.up_proj.forward(x)?)?)
    }
}

/// Repeats each key-value head for its query heads, which are adjacent.
fn repeat_heads(x: &Tensor, heads: usize) -> Result<Tensor> {
    let (b, kv_heads, t, head_size) = x.dims4()?;
    x.unsqueeze(2)?.expand((b, kv_heads, heads / kv_heads, t, head_size))?.reshape((b, heads, t, head_size))
}

/// Rotates the two halves of each head against each other. The angles have the precision of `x`.
fn rope(x: &Tensor, theta: f64) -> Result<Tensor> {
    let (.., t, head_size) = x.dims4()?;
    let frequencies = (0..head_size / 2).map(|i| theta.powf(-2.0 * i as f64 / head_size as f64));
    let frequencies: Vec<f64> = frequencies.collect();
    let angles: Vec<f64> = (0..t).flat_map(|token| frequencies.iter().map(move |f| token as f64 * f)).collect();
    let angles = Tensor::from_vec(angles, (t, head_size / 2), x.device())?;
    let (cos, sin) = (angles.cos()?.to_dtype(x.dtype())?, angles.sin()?.to_dtype(x.dtype())?);
    candle_nn::rotary_emb::rope_slow(x, &cos, &sin)
}

pub(super) fn rms_norm(width: usize, eps: f64, vb: VarBuilder) -> Result<RmsNorm> {
    Ok(RmsNorm::new(vb.get_with_hints(width, "weight", Init::Const(1.0))?, eps))
}

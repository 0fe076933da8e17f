//! GPT-2, eager.

use candle_core::{Module, Result, Tensor};
use candle_nn::{Init, Linear, VarBuilder};
use gapless::models::GptConfig;

use super::{WEIGHT, causal_attention, linear};

/// The reference implementation of [`gapless::models::Gpt`].
pub struct Gpt {
    wte: Tensor,
    wpe: Tensor,
    blocks: Vec<Block>,
    ln_f: LayerNorm,
}

impl Gpt {
    pub fn new(config: &GptConfig, vb: VarBuilder) -> Result<Self> {
        let width = config.width;
        let blocks = (0..config.layers).map(|i| Block::new(config, vb.pp("h").pp(i))).collect::<Result<_>>()?;
        Ok(Self {
            wte: vb.pp("wte").get_with_hints((config.vocabulary, width), "weight", WEIGHT)?,
            wpe: vb.pp("wpe").get_with_hints((config.sequence, width), "weight", WEIGHT)?,
            blocks,
            ln_f: LayerNorm::new(width, vb.pp("ln_f"))?,
        })
    }
}

impl Module for Gpt {
    fn forward(&self, tokens: &Tensor) -> Result<Tensor> {
        let (b, t) = tokens.dims2()?;
        let embedded = self.wte.index_select(&tokens.flatten_all()?, 0)?.reshape((b, t, ()))?;
        let mut x = embedded.broadcast_add(&self.wpe.narrow(0, 0, t)?)?;
        for block in &self.blocks {
            x = block.forward(&x)?;
        }
        Linear::new(self.wte.clone(), None).forward(&self.ln_f.forward(&x)?)
    }
}

struct Block {
    ln_1: LayerNorm,
    c_attn: Linear,
    c_proj: Linear,
    ln_2: LayerNorm,
    mlp_fc: Linear,
    mlp_proj: Linear,
    heads: usize,
}

impl Block {
    fn new(config: &GptConfig, vb: VarBuilder) -> Result<Self> {
        let width = config.width;
        Ok(Self {
            ln_1: LayerNorm::new(width, vb.pp("ln_1"))?,
            c_attn: linear(width, 3 * width, vb.pp("attn.c_attn"))?,
            c_proj: linear(width, width, vb.pp("attn.c_proj"))?,
            ln_2: LayerNorm::new(width, vb.pp("ln_2"))?,
            mlp_fc: linear(width, 4 * width, vb.pp("mlp.c_fc"))?,
            mlp_proj: linear(4 * width, width, vb.pp("mlp.c_proj"))?,
            heads: config.heads,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = (x + self.attention(&self.ln_1.forward(x)?)?)?;
        let hidden = self.mlp_fc.forward(&self.ln_2.forward(&x)?)?.gelu()?;
        &x + self.mlp_proj.forward(&hidden)?
    }

    fn attention(&self, x: &Tensor) -> Result<Tensor> {
        let (b, t, c) = x.dims3()?;
        let qkv = self.c_attn.forward(x)?;
        let heads = |i: usize| qkv.narrow(2, i * c, c)?.reshape((b, t, self.heads, c / self.heads))?.transpose(1, 2);
        let y = causal_attention(&heads(0)?, &heads(1)?, &heads(2)?)?;
        self.c_proj.forward(&y.transpose(1, 2)?.reshape((b, t, c))?)
    }
}

struct LayerNorm {
    weight: Tensor,
    bias: Tensor,
}

impl LayerNorm {
    fn new(width: usize, vb: VarBuilder) -> Result<Self> {
        let weight = vb.get_with_hints(width, "weight", Init::Const(1.0))?;
        Ok(Self { weight, bias: vb.get_with_hints(width, "bias", Init::Const(0.0))? })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        candle_nn::ops::layer_norm_slow(x, &self.weight, &self.bias, 1e-5)
    }
}

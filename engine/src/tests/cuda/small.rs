//! Small language models with the components of large ones.

use crate::nn::{Embedding, Linear, Module, VarBuilder, embedding, layer_norm, linear, linear_no_bias, rms_norm};
use crate::{Model, Result, Tensor};

/// The components of a small language model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Style {
    /// Learned positions, layer norm, GELU, dropout, biases, head tied to the embedding.
    Gpt,
    /// Rotary positions, RMS norm, SwiGLU, grouped-query attention.
    Llama,
}

/// A model with one block between embedding and head.
pub struct Small {
    style: Style,
    embedding: Embedding,
    positions: Tensor,
    norms: [Box<dyn Module>; 3],
    q: Linear,
    kv: [Linear; 2],
    out: Linear,
    up: Linear,
    gate: Linear,
    down: Linear,
    pub head: Linear,
}

pub const VOCABULARY: usize = 19;
pub const WIDTH: usize = 8;
pub const SEQUENCE: usize = 6;
pub const BATCH: usize = 4;

impl Small {
    pub fn new(style: Style, vb: VarBuilder) -> Result<Self> {
        Self::over(SEQUENCE, style, vb)
    }

    /// The model for sequences of `tokens` tokens.
    pub fn over(tokens: usize, style: Style, vb: VarBuilder) -> Result<Self> {
        let norm = |name: &str| -> Result<Box<dyn Module>> {
            Ok(match style {
                Style::Gpt => Box::new(layer_norm(WIDTH, 1e-5, vb.pp(name))?),
                Style::Llama => Box::new(rms_norm(WIDTH, 1e-5, vb.pp(name))?),
            })
        };
        let project = |from, to, name: &str| match style {
            Style::Gpt => linear(from, to, vb.pp(name)),
            Style::Llama => linear_no_bias(from, to, vb.pp(name)),
        };
        let kv = if style == Style::Gpt { WIDTH } else { WIDTH / 2 };
        let embedding = embedding(VOCABULARY, WIDTH, vb.pp("embedding"))?;
        let head = match style {
            Style::Gpt => Linear::new(embedding.embeddings().clone(), None, "head"),
            Style::Llama => linear_no_bias(WIDTH, VOCABULARY, vb.pp("head"))?,
        };
        Ok(Self {
            style,
            embedding,
            positions: vb.get((tokens, WIDTH), "places")?,
            norms: [norm("norm_1")?, norm("norm_2")?, norm("norm_3")?],
            q: project(WIDTH, WIDTH, "q")?,
            kv: [project(WIDTH, kv, "k")?, project(WIDTH, kv, "v")?],
            out: project(WIDTH, WIDTH, "out")?,
            up: project(WIDTH, 2 * WIDTH, "up")?,
            gate: project(WIDTH, 2 * WIDTH, "gate")?,
            down: project(2 * WIDTH, WIDTH, "down")?,
            head,
        })
    }

    /// Returns the input of the head.
    pub fn hidden(&self, tokens: &Tensor, train: bool) -> Result<Tensor> {
        let is_gpt = self.style == Style::Gpt;
        let dropout = if train && is_gpt { 0.1 } else { 0.0 };
        let (b, t) = tokens.dims2()?;
        let x = self.embedding.forward(tokens)?.broadcast_add(&self.positions)?.dropout(dropout)?;
        let y = self.norms[0].forward(&x)?;
        let heads = |x: Tensor| x.reshape((b, t, x.dims()[2] / 4, 4))?.transpose(1, 2);
        let rotated = |x: Tensor| if is_gpt { Ok(x) } else { x.rope(10_000.0) };
        let q = rotated(heads(self.q.forward(&y)?)?)?;
        let [k, v] = [heads(self.kv[0].forward(&y)?)?, heads(self.kv[1].forward(&y)?)?];
        let y = q.causal_attention(&rotated(k)?, &v, 0.5)?.transpose(1, 2)?.reshape((b, t, WIDTH))?;
        let x = x.add(&self.out.forward(&y)?.dropout(dropout)?)?;
        let y = self.norms[1].forward(&x)?;
        let up = self.up.forward(&y)?;
        let y = if is_gpt { up.gelu()? } else { self.gate.forward(&y)?.swiglu(&up)? };
        self.norms[2].forward(&x.add(&self.down.forward(&y)?.dropout(dropout)?)?)
    }
}

impl Model for Small {
    fn forward(&self, tokens: &Tensor, train: bool) -> Result<Tensor> {
        self.head.forward(&self.hidden(tokens, train)?)
    }

    fn loss(&self, tokens: &Tensor, targets: &Tensor, train: bool) -> Result<Tensor> {
        self.head.cross_entropy(&self.hidden(tokens, train)?, targets)?.mean_all()
    }
}

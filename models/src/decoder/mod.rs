//! The decoder: an embedding, blocks of attention and feed-forward layer, a norm and a head. Its settings are a
//! [`LlamaConfig`], or a [`MoeConfig`] if it has routed experts.

mod attention;
mod feed_forward;
mod norm;
mod tables;

use gapless_engine::nn::{Embedding, Init, Linear, Module, VarBuilder, embedding, linear_b};
use gapless_engine::{Error, Model, Result, Tensor};

use self::attention::Attention;
#[cfg(feature = "hugging-face")]
pub(crate) use self::feed_forward::XIELU_BETA;
use self::feed_forward::{Mlp, Sparse};
use self::norm::Norm;
use self::tables::Tables;
use crate::latent::LatentAttention;
use crate::llama::{LlamaConfig, Norms};
use crate::moe::MoeConfig;

/// The settings of a [`Decoder`], made from a reference to a [`LlamaConfig`] or a [`MoeConfig`].
#[derive(Debug, Clone, Copy)]
pub struct Settings<'a> {
    llama: &'a LlamaConfig,
    experts: Option<&'a MoeConfig>,
}

impl<'a> From<&'a LlamaConfig> for Settings<'a> {
    fn from(llama: &'a LlamaConfig) -> Self {
        Self { llama, experts: None }
    }
}

impl<'a> From<&'a MoeConfig> for Settings<'a> {
    fn from(moe: &'a MoeConfig) -> Self {
        Self { llama: &moe.llama, experts: Some(moe) }
    }
}

/// A decoder with rotary positions: Llama and every model that differs from it in the traits of [`LlamaConfig`] and
/// [`MoeConfig`].
#[derive(Debug, Clone)]
pub struct Decoder {
    embed_tokens: Embedding,
    /// The norm of the embedding, if it is normalized.
    embedding_norm: Option<Norm>,
    blocks: Vec<Block>,
    norm: Norm,
    lm_head: Linear,
    config: LlamaConfig,
}

/// A decoder with a [`LlamaConfig`].
pub type Llama = Decoder;
/// A decoder with a [`MoeConfig`].
pub type Moe = Decoder;

impl Decoder {
    /// Declares the parameters.
    ///
    /// # Errors
    /// Returns the errors of [`LlamaConfig::check`] or [`MoeConfig::check`]. Unless attention is latent, returns an error
    /// if `head_size` is not set and the width is not a multiple of `heads`, or if `heads` is not a multiple of
    /// `kv_heads`.
    pub fn new<'a>(settings: impl Into<Settings<'a>>, vb: VarBuilder) -> Result<Self> {
        let settings @ Settings { llama: config, experts } = settings.into();
        experts.map_or_else(|| config.check(), MoeConfig::check)?;
        let layers = config.layers;
        if let Some(layer) = experts.and_then(|moe| moe.dense_layers.iter().find(|&&layer| layer >= layers)) {
            let why = format!("the dense layer {layer} is not one of its {layers} layers");
            return Err(Error::config("model", why, "number layers from 0"));
        }
        let vb = vb.with_names(&config.traits.names);
        let model = vb.pp("model");
        let embed_tokens = embedding(config.vocabulary, config.width, model.pp("embed_tokens"))?;
        let blocks = (0..layers).map(|i| Block::new(settings, i, model.pp("layers").pp(i))).collect::<Result<_>>()?;
        let norm = Norm::new(config, config.width, model.pp("norm"))?;
        let head = vb.pp("lm_head");
        let lm_head = match config.tied {
            true => {
                let bias =
                    config.traits.head_bias.then(|| head.get_with_hints(config.vocabulary, "bias", Init::Const(0.0)));
                Linear::new(embed_tokens.embeddings().clone(), bias.transpose()?, head.prefix())
            }
            false => linear_b(config.width, config.vocabulary, config.traits.head_bias, head.unquantized())?,
        };
        let embedding_norm =
            config.traits.normed_embedding.then(|| Norm::no_weight(config, config.width, &model)).transpose()?;
        let embed_tokens = embed_tokens.with_padding(config.padding);
        Ok(Self { embed_tokens, embedding_norm, blocks, norm, lm_head, config: config.clone() })
    }

    /// Returns the hidden states that the head turns into logits, [batch, tokens, width], and the terms that routers add
    /// to the loss of every token. The second value is `None` if there are no such terms.
    fn hidden(&self, tokens: &Tensor, train: bool) -> Result<(Tensor, Option<Tensor>)> {
        let config = &self.config;
        let mut x = self.embed_tokens.forward(tokens)?;
        if config.scaled_embedding || config.traits.embedding_scale != 1.0 {
            let width = if config.scaled_embedding { (config.width as f64).sqrt() } else { 1.0 };
            x = x.affine(width * config.traits.embedding_scale, 0.0)?;
        }
        if let Some(norm) = &self.embedding_norm {
            x = norm.forward(&x)?;
        }
        let tables = Tables::new(config, config.rotated_size(), tokens, &x)?;
        let mut losses: Option<Tensor> = None;
        for block in &self.blocks {
            let (y, loss) = block.forward(&x, &tables, train)?;
            x = y;
            losses = match (losses, loss) {
                (Some(sum), Some(loss)) => Some(sum.add(&loss)?),
                (sum, loss) => sum.or(loss),
            };
        }
        Ok((scaled(self.norm.forward(&x)?, config.traits.logit_scale)?, losses))
    }
}

impl Model for Decoder {
    fn forward(&self, tokens: &Tensor, train: bool) -> Result<Tensor> {
        let logits = self.lm_head.forward(&self.hidden(tokens, train)?.0)?;
        self.config.logit_cap.map_or(Ok(logits.clone()), |cap| logits.cap(cap))
    }

    /// Returns the mean loss over all tokens. While training, it includes the terms that the routers add.
    fn loss(&self, tokens: &Tensor, targets: &Tensor, train: bool) -> Result<Tensor> {
        let (x, losses) = self.hidden(tokens, train)?;
        let of_tokens = self.lm_head.capped_cross_entropy(&x, targets, self.config.logit_cap)?;
        losses.map_or(Ok(of_tokens.clone()), |losses| of_tokens.add(&losses))?.mean_all()
    }
}

fn scaled(x: Tensor, scale: f64) -> Result<Tensor> {
    if scale == 1.0 { Ok(x) } else { x.affine(scale, 0.0) }
}

#[derive(Debug, Clone)]
struct Block {
    /// The norms before and after the attention, and before and after the feed-forward layer.
    norms: [Option<Norm>; 4],
    self_attn: SelfAttention,
    feed_forward: FeedForward,
    is_parallel: bool,
    residual_scale: f64,
    layer: String,
}

#[derive(Debug, Clone)]
enum SelfAttention {
    Whole(Box<Attention>),
    Latent(Box<LatentAttention>),
}

#[derive(Debug, Clone)]
enum FeedForward {
    Dense(Box<Mlp>),
    Sparse(Box<Sparse>),
}

impl Block {
    fn new(Settings { llama: config, experts }: Settings<'_>, layer: usize, vb: VarBuilder) -> Result<Self> {
        let (mlp, attention) = (vb.pp("mlp"), vb.pp("self_attn"));
        let norms = names_of_norms(config.norms);
        let norm = |name: Option<&str>| name.map(|name| Norm::new(config, config.width, vb.pp(name))).transpose();
        // Parameters are numbered in the order of their declaration, in which experts come first.
        let sparse = experts.filter(|moe| !moe.dense_layers.contains(&layer));
        let early = match experts {
            None => None,
            Some(_) => Some(FeedForward::new(config, sparse, mlp.clone(), &vb)?),
        };
        let [a, b, c, d] = norms;
        let norms = [norm(a)?, norm(b)?, norm(c)?, norm(d)?];
        let self_attn = match experts.and_then(|moe| moe.latent.as_ref()) {
            None => SelfAttention::Whole(Box::new(Attention::new(config, layer, attention)?)),
            Some(latent) => SelfAttention::Latent(Box::new(LatentAttention::new(config, latent, attention)?)),
        };
        Ok(Self {
            norms,
            self_attn,
            feed_forward: early.map_or_else(|| FeedForward::new(config, sparse, mlp, &vb), Ok)?,
            is_parallel: matches!(config.norms, Norms::Parallel | Norms::Shared),
            residual_scale: config.traits.residual_scale,
            layer: vb.prefix().to_owned(),
        })
    }

    fn forward(&self, x: &Tensor, tables: &Tables, train: bool) -> Result<(Tensor, Option<Tensor>)> {
        let _layer = x.enter(&self.layer);
        let [before, after, before_feed_forward, after_feed_forward] = &self.norms;
        let normed = |norm: &Option<Norm>, x: &Tensor| norm.as_ref().map_or(Ok(x.clone()), |norm| norm.forward(x));
        let input = normed(before, x)?;
        let y = match &self.self_attn {
            SelfAttention::Whole(attention) => attention.forward(&input, tables)?,
            SelfAttention::Latent(attention) => attention.forward(&input)?,
        };
        let attended = (x + scaled(normed(after, &y)?, self.residual_scale)?)?;
        // A parallel feed-forward layer reads the block's input, under the attention's norm or one of its own.
        let input = match (self.is_parallel, before_feed_forward) {
            (true, None) => input,
            (true, norm) => normed(norm, x)?,
            (false, norm) => normed(norm, &attended)?,
        };
        let (y, loss) = match &self.feed_forward {
            FeedForward::Dense(mlp) => (mlp.forward(&input)?, None),
            FeedForward::Sparse(sparse) => sparse.forward(&input, train)?,
        };
        Ok(((attended + scaled(normed(after_feed_forward, &y)?, self.residual_scale)?)?, loss))
    }
}

impl FeedForward {
    fn new(config: &LlamaConfig, sparse: Option<&MoeConfig>, vb: VarBuilder, block: &VarBuilder) -> Result<Self> {
        Ok(match sparse {
            None => Self::Dense(Box::new(Mlp::new(config, vb)?)),
            Some(moe) => Self::Sparse(Box::new(Sparse::new(moe, vb, block)?)),
        })
    }
}

/// Returns the names of the norms before and after the attention, and before and after the feed-forward layer.
fn names_of_norms(norms: Norms) -> [Option<&'static str>; 4] {
    match norms {
        Norms::Before | Norms::Parallel => [Some("input_layernorm"), None, Some("post_attention_layernorm"), None],
        Norms::Shared => [Some("input_layernorm"), None, None, None],
        Norms::After => [None, Some("post_attention_layernorm"), None, Some("post_feedforward_layernorm")],
        Norms::Both => [
            Some("input_layernorm"),
            Some("post_attention_layernorm"),
            Some("pre_feedforward_layernorm"),
            Some("post_feedforward_layernorm"),
        ],
    }
}

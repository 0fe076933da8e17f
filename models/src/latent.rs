//! Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1). The keys and values of all heads are
//! computed from one short vector per token, the latent. Queries may be computed from a latent of their own. Positions
//! are encoded by rotating only a part of each query and key. The rotated part of the key is the same for all heads.

use gapless_engine::nn::{Linear, Module, RmsNorm, VarBuilder, linear_b, linear_no_bias, rms_norm};
use gapless_engine::{Result, Tensor, ops};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::llama::LlamaConfig;

/// The settings of latent attention.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct LatentConfig {
    /// The width of the latent of the queries. If it is missing, queries are computed from the residual stream
    /// directly.
    pub query_rank: Option<usize>,
    /// The width of the latent of keys and values.
    pub kv_rank: usize,
    /// The width of the part of a query or key that is not rotated.
    pub plain_size: usize,
    /// The width of the part of a query or key that is rotated.
    pub rotated_size: usize,
    /// The width of the values of a head.
    pub value_size: usize,
    /// Whether the rotation pairs adjacent elements. If false, the paired elements are half the rotated part apart.
    pub neighbours: bool,
}

impl Default for LatentConfig {
    /// The settings of DeepSeek-V3.
    fn default() -> Self {
        Self {
            query_rank: Some(1536),
            kv_rank: 512,
            plain_size: 128,
            rotated_size: 64,
            value_size: 128,
            neighbours: true,
        }
    }
}

impl LatentConfig {
    /// The width of a query or key.
    pub(crate) fn head_size(&self) -> usize {
        self.plain_size + self.rotated_size
    }

    /// Returns the number of parameters of one layer's attention.
    pub(crate) fn parameters(&self, config: &LlamaConfig) -> usize {
        let (width, q) = (config.width, config.heads * self.head_size());
        let bias = |outputs: usize| if config.output_bias { outputs } else { 0 };
        let queries = self.query_rank.map_or(width * q, |rank| rank * (width + 1 + q) + bias(rank));
        let shared = self.kv_rank + self.rotated_size;
        let of_heads = config.heads * (self.plain_size + self.value_size);
        let keys_values = width * shared + bias(shared) + self.kv_rank * (1 + of_heads);
        queries + keys_values + config.heads * self.value_size * width + bias(width)
    }
}

/// The value that the norms of the latents add to the mean square. It is independent of `rms_norm_eps`.
const EPS: f64 = 1e-6;

/// A layer of latent attention.
#[derive(Debug, Clone)]
pub(crate) struct LatentAttention {
    /// The projection to the latent of the queries, and the norm of this latent. `None` if queries are computed without
    /// a latent.
    short: Option<(Linear, RmsNorm)>,
    queries: Linear,
    kv_a_proj_with_mqa: Linear,
    kv_a_layernorm: RmsNorm,
    kv_b_proj: Linear,
    o_proj: Linear,
    config: LlamaConfig,
    latent: LatentConfig,
    layer: String,
}

impl LatentAttention {
    /// Declares the parameters. If the configuration sets `output_bias`, the projections to the latents also have
    /// biases.
    pub(crate) fn new(config: &LlamaConfig, latent: &LatentConfig, vb: VarBuilder) -> Result<Self> {
        let &LlamaConfig { width, heads, output_bias: bias, .. } = config;
        let &LatentConfig { kv_rank, plain_size, rotated_size, value_size, .. } = latent;
        let of_queries = heads * latent.head_size();
        let (short, queries) = match latent.query_rank {
            None => (None, linear_no_bias(width, of_queries, vb.pp("q_proj"))?),
            Some(rank) => {
                let short = linear_b(width, rank, bias, vb.pp("q_a_proj"))?;
                let norm = rms_norm(rank, EPS, vb.pp("q_a_layernorm"))?;
                (Some((short, norm)), linear_no_bias(rank, of_queries, vb.pp("q_b_proj"))?)
            }
        };
        Ok(Self {
            short,
            queries,
            kv_a_proj_with_mqa: linear_b(width, kv_rank + rotated_size, bias, vb.pp("kv_a_proj_with_mqa"))?,
            kv_a_layernorm: rms_norm(kv_rank, EPS, vb.pp("kv_a_layernorm"))?,
            kv_b_proj: linear_no_bias(kv_rank, heads * (plain_size + value_size), vb.pp("kv_b_proj"))?,
            o_proj: linear_b(heads * value_size, width, bias, vb.pp("o_proj"))?,
            config: config.clone(),
            latent: latent.clone(),
            layer: vb.prefix().to_owned(),
        })
    }

    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let _layer = x.enter(&self.layer);
        let LlamaConfig { heads, rope_theta, rope_scaling, query_scale, attention_cap: cap, .. } = self.config;
        let LatentConfig { kv_rank, plain_size, rotated_size, value_size, neighbours, .. } = self.latent;
        let (b, t, _) = x.dims3()?;
        let rotated = |x: Tensor| match neighbours {
            true => x.rope_i_scaled(rope_theta, rope_scaling),
            false => x.rope_scaled(rope_theta, rope_scaling),
        };
        // Splits x into heads [batch, heads, tokens, size], and selects a part of each head.
        let split = |x: Tensor, heads: usize, size: usize| x.reshape((b, t, heads, size))?.transpose(1, 2);
        let part = |x: &Tensor, first: usize, size: usize| x.narrow(3, first, size);

        let q = match &self.short {
            None => self.queries.forward(x)?,
            Some((short, norm)) => self.queries.forward(&norm.forward(&short.forward(x)?)?)?,
        };
        let q = split(q, heads, self.latent.head_size())?;
        let q_rotated = rotated(part(&q, plain_size, rotated_size)?)?;
        let q = Tensor::cat(&[&part(&q, 0, plain_size)?, &q_rotated], 3)?;

        // If sequences are continued, the cache holds the latent and the rotated key of each past token. The keys and
        // values are recomputed from the cache by the same operations as for a whole sequence.
        let shared = self.kv_a_proj_with_mqa.forward(x)?;
        let k_rotated = rotated(split(shared.narrow(2, kv_rank, rotated_size)?, 1, rotated_size)?)?;
        let k_rotated = k_rotated.cached("rotated_keys")?;
        let latent = self.kv_a_layernorm.forward(&shared.narrow(2, 0, kv_rank)?)?.cached("latent")?;
        let seen = latent.dim(1)?;
        let kv = self.kv_b_proj.forward(&latent)?;
        let kv = kv.reshape((b, seen, heads, plain_size + value_size))?.transpose(1, 2)?;
        let k_rotated = k_rotated.broadcast_as((b, heads, seen, rotated_size))?;
        let k = Tensor::cat(&[&part(&kv, 0, plain_size)?, &k_rotated], 3)?;
        let v = part(&kv, plain_size, value_size)?;

        let scale = 1.0 / query_scale.unwrap_or(self.latent.head_size() as f64).sqrt();
        let y = q.attend_past(&k, &v, ops::Attention { cap, ..ops::Attention::causal(scale) })?;
        self.o_proj.forward(&y.transpose(1, 2)?.reshape((b, t, heads * value_size))?)
    }
}

//! Grouped-query attention with rotary positions.

use gapless_engine::nn::{Linear, Module, VarBuilder, linear_b};
use gapless_engine::ops::{self, RopeScaling};
use gapless_engine::{Error, Result, Tensor};

use super::norm::Norm;
use super::tables::Tables;
use crate::head_size;
use crate::llama::{LlamaConfig, QkNorm};
use crate::traits::FusedQkv;

/// Grouped-query attention with rotary positions.
#[derive(Debug, Clone)]
pub(crate) struct Attention {
    /// The layers of queries, keys and values, or the one that computes all three.
    qkv: Vec<Linear>,
    o_proj: Linear,
    /// The layer of the gate of the output, if there is one.
    gate: Option<Linear>,
    /// The norms of queries and of keys, if they are normalized.
    norms: Option<[Norm; 2]>,
    /// The sinks `[heads]`, if there are any.
    sinks: Option<Tensor>,
    config: LlamaConfig,
    head_size: usize,
    /// The maximum number of tokens that a token attends to, including itself, or the width of a chunk; `None` means all
    /// earlier tokens.
    window: Option<usize>,
    is_rotated: bool,
    layer: String,
}

impl Attention {
    pub(crate) fn new(config: &LlamaConfig, layer: usize, vb: VarBuilder) -> Result<Self> {
        let &LlamaConfig { width, heads, kv_heads, qkv_bias, output_bias, .. } = config;
        let head_size = config.head_size.map_or_else(|| head_size(width, heads), Ok)?;
        if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
            let why = format!("{kv_heads} key-value heads do not divide {heads} heads");
            return Err(Error::config("model", why, "choose a divisor of the heads"));
        }
        let (q, kv) = (heads * head_size, kv_heads * head_size);
        let linear = |out: usize, name: &str| linear_b(width, out, qkv_bias, vb.pp(name));
        let qkv = match config.traits.fused_qkv {
            FusedQkv::Separate => vec![linear(q, "q_proj")?, linear(kv, "k_proj")?, linear(kv, "v_proj")?],
            FusedQkv::Stacked => vec![linear(q + 2 * kv, "qkv_proj")?],
            FusedQkv::ByHead if kv_heads == heads => vec![linear(3 * q, "qkv_proj")?],
            FusedQkv::ByHead => {
                let why = format!("there are {kv_heads} key-value heads and {heads} heads, but fused_qkv is by_head");
                return Err(Error::config("model", why, "use equal numbers"));
            }
        };
        let o_proj = linear_b(q, width, output_bias, vb.pp("o_proj"))?;
        let gate = config.traits.gated_attention.then(|| linear_b(width, q, false, vb.pp("gate_proj"))).transpose()?;
        let [q, kv] = if config.qk_norm == QkNorm::Width { [q, kv] } else { [head_size; 2] };
        let is_rotated = !config.traits.unrotated_layers.contains(&layer);
        let norms = match config.qk_norm {
            QkNorm::None => None,
            QkNorm::RotatedNoWeight => {
                let norm = || Norm::no_weight(config, head_size, &vb);
                is_rotated.then(|| Ok::<_, Error>([norm()?, norm()?])).transpose()?
            }
            QkNorm::OwnLayer => {
                let norm = |heads, name: &str| Norm::of_heads(config, heads, head_size, vb.pp(name));
                Some([norm(heads, "q_norm")?, norm(kv_heads, "k_norm")?])
            }
            _ => Some([Norm::new(config, q, vb.pp("q_norm"))?, Norm::new(config, kv, vb.pp("k_norm"))?]),
        };
        let sinks = config.traits.sinks.then(|| vb.get(heads, "sinks")).transpose()?;
        Ok(Self {
            qkv,
            o_proj,
            gate,
            norms,
            sinks,
            window: config.sliding_window.filter(|_| !config.full_layers.contains(&layer)),
            is_rotated,
            config: config.clone(),
            head_size,
            layer: vb.prefix().to_owned(),
        })
    }

    pub(crate) fn forward(&self, x: &Tensor, tables: &Tables) -> Result<Tensor> {
        let _layer = x.enter(&self.layer);
        let LlamaConfig { heads, kv_heads, qk_norm, .. } = self.config;
        let (b, t, _) = x.dims3()?;
        let fused = match &self.qkv[..] {
            [all] => Some(all.forward(x)?),
            _ => None,
        };
        let projected = |part: usize| self.projected(x, fused.as_ref(), part);
        let clipped = |x: Tensor| self.config.traits.qkv_clip.map_or(Ok(x.clone()), |clip| x.clamp(-clip, clip));
        let split = |x: Tensor, heads: usize| x.reshape((b, t, heads, self.head_size));
        // Splits queries or keys into heads and rotates them. If they are normalized, this happens before or after the
        // split, or after the rotation.
        let rotated = |part: usize, heads: usize| {
            let x = projected(part)?;
            let norm = self.norms.as_ref().map(|norms| &norms[part]);
            let x_bthd = match (norm, qk_norm) {
                (Some(norm), QkNorm::Head | QkNorm::OwnLayer) => norm.forward(&split(clipped(x)?, heads)?)?,
                (Some(norm), QkNorm::Width) => split(clipped(norm.forward(&x)?)?, heads)?,
                _ => split(clipped(x)?, heads)?,
            };
            let x_bhtd = self.rotated(&x_bthd.transpose(1, 2)?, tables)?;
            match (norm, qk_norm) {
                (Some(norm), QkNorm::Rotated | QkNorm::RotatedNoWeight) => norm.forward(&x_bhtd),
                _ => Ok(x_bhtd),
            }
        };
        let mut q_bhtd = rotated(0, heads)?;
        let k_bhtd = rotated(1, kv_heads)?;
        let v_bhtd = split(clipped(projected(2)?)?, kv_heads)?.transpose(1, 2)?;
        if let Some(scale) = tables.query_scale.as_ref().filter(|_| !(tables.scales_unrotated && self.is_rotated)) {
            q_bhtd = q_bhtd.broadcast_mul(scale)?;
        }
        let scale = 1.0 / self.config.query_scale.unwrap_or(self.head_size as f64).sqrt();
        let (window, chunk) = match (self.config.traits.chunked, self.window) {
            // A chunk that holds the longest text has no effect.
            (true, Some(chunk)) => (None, Some(chunk).filter(|&chunk| x.cache_window().unwrap_or(t) > chunk)),
            (_, window) => (window, None),
        };
        let cap = self.config.attention_cap;
        let how = ops::Attention { window, chunk, cap, ..ops::Attention::causal(scale) };
        let y_bhtd = match &self.sinks {
            None => q_bhtd.attend(&k_bhtd, &v_bhtd, how)?,
            Some(sinks) => q_bhtd.attend_with_sinks(&k_bhtd, &v_bhtd, sinks, how)?,
        };
        let y = y_bhtd.transpose(1, 2)?.reshape((b, t, heads * self.head_size))?;
        self.o_proj.forward(&match &self.gate {
            None => y,
            Some(gate) => y.mul(&gate.forward(x)?.sigmoid()?)?,
        })
    }

    /// Returns the queries (`part` 0), keys (1) or values (2) of all heads: [batch, tokens, heads × head size]. `fused` is
    /// the output of the layer that computes all three, if there is one.
    fn projected(&self, x: &Tensor, fused: Option<&Tensor>, part: usize) -> Result<Tensor> {
        let LlamaConfig { heads, kv_heads, .. } = self.config;
        let size = self.head_size;
        let Some(all) = fused else { return self.qkv[part].forward(x) };
        if self.config.traits.fused_qkv == FusedQkv::Stacked {
            let first = [0, heads, heads + kv_heads][part];
            return all.narrow(2, first * size, [heads, kv_heads, kv_heads][part] * size);
        }
        let (b, t, _) = all.dims3()?;
        let of_heads = all.reshape((b, t, heads, 3 * size))?.narrow(3, part * size, size)?;
        of_heads.reshape((b, t, heads * size))
    }

    /// Rotates queries or keys [batch, heads, tokens, head size], unless this layer has no rotary positions.
    fn rotated(&self, x: &Tensor, tables: &Tables) -> Result<Tensor> {
        if !self.is_rotated {
            return Ok(x.clone());
        }
        let traits = &self.config.traits;
        let Some(size) = traits.rotated_size.filter(|&size| size < self.head_size) else {
            return self.rotated_whole(x, tables);
        };
        let turned = self.rotated_whole(&x.narrow(3, 0, size)?, tables)?;
        Tensor::cat(&[&turned, &x.narrow(3, size, self.head_size - size)?], 3)
    }

    fn rotated_whole(&self, x: &Tensor, tables: &Tables) -> Result<Tensor> {
        if self.config.traits.backwards {
            // With its halves exchanged, x is turned by the negative angles. Scores do not depend on the order of elements.
            let half = x.dim(3)? / 2;
            let exchanged = Tensor::cat(&[&x.narrow(3, half, half)?, &x.narrow(3, 0, half)?], 3)?;
            return self.rotated_forwards(&exchanged, tables);
        }
        self.rotated_forwards(x, tables)
    }

    fn rotated_forwards(&self, x: &Tensor, tables: &Tables) -> Result<Tensor> {
        let neighbours = self.config.traits.neighbours;
        let (theta, scaling) = match (self.window.and(self.config.window_rope_theta), &tables.rotation) {
            (None, Some(rotation)) => return rotated_by(x, rotation, neighbours),
            (None, None) => (tables.theta, self.config.rope_scaling),
            (Some(theta), _) => (theta, RopeScaling::None),
        };
        if neighbours { x.rope_i_scaled(theta, scaling) } else { x.rope_scaled(theta, scaling) }
    }
}

/// Rotates pairs of elements of x [batch, heads, tokens, size] by tables of cosines and sines.
fn rotated_by(x: &Tensor, [cos, sin]: &[Tensor; 2], neighbours: bool) -> Result<Tensor> {
    let (b, h, t, size) = x.dims4()?;
    let half = size / 2;
    // With neighbours, the elements of a pair are along the last dimension; without, along the one before it.
    let (pairs, dim) = if neighbours { ((b, h, t, half, 2), 4) } else { ((b, h, t, 2, half), 3) };
    let pairs = x.reshape(pairs)?;
    let part = |i: usize| pairs.narrow(dim, i, 1)?.squeeze(dim);
    let (first, second) = (part(0)?, part(1)?);
    let turned = [
        first.broadcast_mul(cos)?.sub(&second.broadcast_mul(sin)?)?,
        second.broadcast_mul(cos)?.add(&first.broadcast_mul(sin)?)?,
    ];
    Tensor::stack(&turned, dim)?.reshape((b, h, t, size))
}

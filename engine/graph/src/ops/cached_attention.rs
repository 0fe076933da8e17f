//! Attention of new tokens over a cache of those before them.

use candle_core::Layout;
use gapless_kernels::Spec;
use gapless_kernels::cpu::Args;
use gapless_kernels::cpu::attention::{self, HeadStrides, Mask};

use super::attention::head_is_dense;
use crate::Op;
use crate::reference::{Array, Reference};

/// softmax(scale·q·kᵀ)·v for q [batch, heads, tokens, head size] and caches k, v [batch, key-value heads, window, head size], in
/// which the keys and values of these tokens are already: a token at position p sees rows 0 to p. `positions` are u32
/// [batch, tokens], consecutive in each sequence. The result is [batch, tokens, heads, head size], with the bits of
/// [`Attention`](super::Attention) over the whole sequence. There is no gradient.
#[derive(Debug, Clone, Copy)]
pub struct CachedAttention {
    /// Factor of the scores, 1/√(head size) as a rule.
    pub scale: f64,
}

impl Op for CachedAttention {
    fn name(&self) -> &'static str {
        "cached_attention"
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        super::expect_float(&inputs[..3])?;
        super::expect_ids("positions", &inputs[3])?;
        let (&[batch, heads, tokens, size], &[b, kv_heads, window, d]) = (inputs[0].dims(), inputs[1].dims()) else {
            return Err("[batch, heads, tokens, head size] is needed for q, k and v".into());
        };
        if inputs[1] != inputs[2] || (b, d) != (batch, size) || inputs[3].dims() != [batch, tokens] {
            return Err("k and v must have the batch and head size of q, and the positions [batch, tokens]".into());
        }
        if kv_heads == 0 || heads % kv_heads != 0 {
            return Err(format!("{heads} heads are not a multiple of {kv_heads} key-value heads"));
        }
        if size > attention::MAX_HEAD_SIZE {
            return Err(format!("the head size {size} is larger than {}", attention::MAX_HEAD_SIZE));
        }
        if tokens > window {
            return Err(format!("{tokens} tokens do not fit a window of {window}"));
        }
        if !(self.scale > 0.0 && self.scale.is_finite()) {
            return Err(format!("the scale {} is not a positive number", self.scale));
        }
        Ok(vec![inputs[0].in_shape((batch, tokens, heads, size))])
    }

    /// Over a full window.
    fn flops(&self, inputs: &[Spec], _: &[Spec]) -> u64 {
        4 * (inputs[0].elements() * inputs[1].dims()[2]) as u64
    }

    fn reads_strides(&self, index: usize, layout: &Layout) -> bool {
        index == 0 && head_is_dense(layout)
    }

    fn workspace(&self, inputs: &[Spec], _: &[Spec], threads: usize) -> Vec<u64> {
        let q = Layout::contiguous(inputs[0].shape.clone());
        self.kernel(&q, inputs[1].dims()).forward_scratch(threads)
    }

    fn run(&self, args: &mut Args<'_>) {
        let (out, scratch) = (args.output::<f32>(0), &mut args.workspace());
        let ((q, layout), positions) = (args.strided(0), args.input(3));
        let kernel = self.kernel(layout, args.input_dims(1));
        kernel.forward_at(q, args.input(1), args.input(2), positions, out, scratch).expect("extents by the shape rule");
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        let (q, k, v, positions) = (args.input(0), args.input(1), args.input(2), args.input(3));
        let &[batch, heads, tokens, size] = &q.dims[..] else { unreachable!("rank 4 by the shape rule") };
        let (kv_heads, window) = (k.dims[1], k.dims[2]);
        let mut out = Array::zeros(&[batch, tokens, heads, size]);
        for (row, q) in q.rows().enumerate() {
            let (b, h, t) = (row / tokens / heads, row / tokens % heads, row % tokens);
            let first = (b * kv_heads + h / (heads / kv_heads)) * window * size;
            let visible = positions.data[b * tokens + t] as usize + 1;
            let key = |s: usize| &k.data[first + s * size..][..size];
            let dot = |s: usize| q.iter().zip(key(s)).map(|(q, k)| q * k).sum::<f64>();
            let weights: Vec<f64> = (0..visible).map(|s| (self.scale * dot(s)).exp()).collect();
            let sum: f64 = weights.iter().sum();
            for (s, weight) in weights.iter().enumerate() {
                for i in 0..size {
                    out.data[((b * tokens + t) * heads + h) * size + i] += weight / sum * v.data[first + s * size + i];
                }
            }
        }
        vec![out]
    }
}

impl CachedAttention {
    /// The kernel for queries with these strides and caches of these extents.
    fn kernel(&self, q: &Layout, cache: &[usize]) -> attention::Attention {
        let (&[batch, heads, queries, head_size], &[q_batch, q_head, q_token, _]) = (q.dims(), q.stride()) else {
            unreachable!("rank 4 by the shape rule")
        };
        let &[_, kv_heads, keys, _] = cache else { unreachable!("rank 4 by the shape rule") };
        let kv = HeadStrides { batch: kv_heads * keys * head_size, head: keys * head_size, token: head_size };
        let out = HeadStrides { batch: queries * heads * head_size, head: head_size, token: heads * head_size };
        attention::Attention {
            batch,
            heads,
            kv_heads,
            queries,
            keys,
            head_size,
            scale: self.scale as f32,
            mask: Mask::Causal { offset: 0 },
            q: HeadStrides { batch: q_batch, head: q_head, token: q_token },
            k: kv,
            v: kv,
            out,
            d_q: out,
            d_k: kv,
            d_v: kv,
        }
    }
}

//! Fused attention (FlashAttention, Dao et al., arXiv 2205.14135 and 2307.08691): no tokens × tokens scores.

use candle_core::Layout;
use gapless_kernels::Spec;
use gapless_kernels::cpu::Args;
use gapless_kernels::cpu::attention::{self, HeadStrides, Mask};

use crate::error::Result;
use crate::reference::{Array, Reference};
use crate::tensor::Tensor;
use crate::{Gradient, Op};

/// softmax(scale·q·kᵀ)·v for q [batch, heads, tokens, head size] and k, v [batch, key-value heads, tokens, head size].
/// Outputs: the result as [batch, tokens, heads, head size], and the log-sum-exp of the scores
/// [batch, heads, tokens] for the gradient. A fourth input, u32 [batch, tokens], says the first key that each query sees, for
/// sequences of several documents; one behind all that the query sees is taken as the last of these.
#[derive(Debug, Clone, Copy)]
pub struct Attention {
    /// Factor of the scores, 1/√(head size) as a rule.
    pub scale: f64,
    /// Whether a token sees only itself and those before it.
    pub causal: bool,
}

/// Extents of one attention.
#[derive(Debug, Clone, Copy)]
struct Extents {
    batch: usize,
    heads: usize,
    kv_heads: usize,
    queries: usize,
    keys: usize,
    head_size: usize,
}

impl Extents {
    fn of(q: &[usize], k: &[usize]) -> Option<Self> {
        let (&[batch, heads, queries, head_size], &[_, kv_heads, keys, _]) = (q, k) else { return None };
        Some(Self { batch, heads, kv_heads, queries, keys, head_size })
    }
}

impl Op for Attention {
    fn name(&self) -> &'static str {
        "attention"
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        super::expect_float(&inputs[..3])?;
        let Some(e) = Extents::of(inputs[0].dims(), inputs[1].dims()) else {
            return Err("[batch, heads, tokens, head size] is needed for q, k and v".into());
        };
        if inputs[1] != inputs[2] || inputs[1].dims()[0] != e.batch || inputs[1].dims()[3] != e.head_size {
            return Err("k and v must have equal shapes, and the batch and head size of q".into());
        }
        if e.kv_heads == 0 || e.heads % e.kv_heads != 0 {
            return Err(format!("{} heads are not a multiple of {} key-value heads", e.heads, e.kv_heads));
        }
        if e.head_size > attention::MAX_HEAD_SIZE {
            return Err(format!("the head size {} is larger than {}", e.head_size, attention::MAX_HEAD_SIZE));
        }
        if !(self.scale > 0.0 && self.scale.is_finite()) {
            return Err(format!("the scale {} is not a positive number", self.scale));
        }
        if self.causal && e.keys < e.queries {
            return Err("causal attention needs a key for every query".into());
        }
        if let Some(starts) = inputs.get(3) {
            super::expect_ids("first keys", starts)?;
            if starts.dims() != [e.batch, e.queries] {
                return Err("the first keys must be [batch, tokens]".into());
            }
        }
        let out = inputs[0].in_shape((e.batch, e.queries, e.heads, e.head_size));
        Ok(vec![out, Spec::f32((e.batch, e.heads, e.queries))])
    }

    fn gradient(&self, g: &mut Gradient) -> Result<()> {
        g.refuse(self, 1)?;
        let starts = (g.inputs() > 3).then(|| g.input(3));
        let inputs = [g.input(0), g.input(1), g.input(2), g.output(0), g.output(1), g.grad(0)];
        let inputs: Vec<&Tensor> = inputs.iter().chain(&starts).collect();
        let grads = Tensor::apply_op::<3>(AttentionGrad { of: *self }, &inputs)?;
        for (input, grad) in grads.into_iter().enumerate().filter(|&(input, _)| g.needs(input)).collect::<Vec<_>>() {
            g.send(input, grad.transpose(1, 2)?);
        }
        Ok(())
    }

    fn flops(&self, inputs: &[Spec], _: &[Spec]) -> u64 {
        2 * self.product_flops(inputs)
    }

    fn reads_strides(&self, index: usize, layout: &Layout) -> bool {
        index < 3 && head_is_dense(layout)
    }

    fn workspace(&self, inputs: &[Spec], _: &[Spec], threads: usize) -> Vec<u64> {
        self.kernel(&dense(inputs, 0), &dense(inputs, 1), &dense(inputs, 2)).forward_scratch(threads)
    }

    fn run(&self, args: &mut Args<'_>) {
        let (out, lse, scratch) = (args.output::<f32>(0), args.output::<f32>(1), &mut args.workspace());
        let ((q, q_layout), (k, k_layout), (v, v_layout)) = (args.strided(0), args.strided(1), args.strided(2));
        let kernel = self.kernel(q_layout, k_layout, v_layout);
        let starts = (args.inputs() > 3).then(|| args.input(3));
        kernel.forward(q, k, v, starts, out, lse, scratch).expect("extents by the shape rule");
    }
    fn cuda(&self, operands: &gapless_kernels::cuda::Operands<'_>) -> Option<Vec<gapless_kernels::cuda::Launch>> {
        gapless_kernels::cuda::launch::attention(self.scale, self.causal, operands)
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        let (q, k, v) = (args.input(0), args.input(1), args.input(2));
        let e = Extents::of(&q.dims, &k.dims).expect("rank 4 by the shape rule");
        let mut out = Array::zeros(&[e.batch, e.queries, e.heads, e.head_size]);
        let mut lse = Array::zeros(&[e.batch, e.heads, e.queries]);
        let starts = (args.inputs() > 3).then(|| args.input(3));
        self.for_each_score(e, q, k, starts, |b, h, t, first, scores| {
            let sum = log_sum_exp(scores);
            lse.data[(b * e.heads + h) * e.queries + t] = sum;
            for (s, score) in (first..).zip(scores) {
                for i in 0..e.head_size {
                    out.data[((b * e.queries + t) * e.heads + h) * e.head_size + i] +=
                        (score - sum).exp() * v.data[kv_index(e, b, h, s, i)];
                }
            }
        });
        vec![out, lse]
    }
}

impl Attention {
    /// The kernel for operands with these strides; outputs and gradients are dense [batch, tokens, heads, head size].
    fn kernel(&self, q: &Layout, k: &Layout, v: &Layout) -> attention::Attention {
        let e = Extents::of(q.dims(), k.dims()).expect("rank 4 by the shape rule");
        let strides = |layout: &Layout| {
            let &[batch, head, token, _] = layout.stride() else { unreachable!("rank 4 by the shape rule") };
            HeadStrides { batch, head, token }
        };
        let dense = |heads: usize, tokens: usize| HeadStrides {
            batch: tokens * heads * e.head_size,
            head: e.head_size,
            token: heads * e.head_size,
        };
        let (d_q, d_kv) = (dense(e.heads, e.queries), dense(e.kv_heads, e.keys));
        attention::Attention {
            batch: e.batch,
            heads: e.heads,
            kv_heads: e.kv_heads,
            queries: e.queries,
            keys: e.keys,
            head_size: e.head_size,
            scale: self.scale as f32,
            mask: if self.causal { Mask::Causal { offset: e.keys - e.queries } } else { Mask::Full },
            q: strides(q),
            k: strides(k),
            v: strides(v),
            out: d_q,
            d_q,
            d_k: d_kv,
            d_v: d_kv,
        }
    }

    /// Arithmetic of one product of queries with keys, the masked half left out.
    fn product_flops(&self, inputs: &[Spec]) -> u64 {
        let e = Extents::of(inputs[0].dims(), inputs[1].dims()).expect("rank 4 by the shape rule");
        let scores = if self.causal { e.queries * (2 * e.keys - e.queries + 1) / 2 } else { e.queries * e.keys };
        2 * (e.batch * e.heads * e.head_size * scores) as u64
    }

    /// The first key that each query sees, and the scores over it and those behind it that it sees.
    fn for_each_score(
        &self,
        e: Extents,
        q: &Array,
        k: &Array,
        starts: Option<&Array>,
        mut f: impl FnMut(usize, usize, usize, usize, &[f64]),
    ) {
        for (b, h, t) in (0..e.batch * e.heads * e.queries)
            .map(|i| (i / e.queries / e.heads, i / e.queries % e.heads, i % e.queries))
        {
            let visible = if self.causal { t + 1 + e.keys - e.queries } else { e.keys };
            let q = &q.data[((b * e.heads + h) * e.queries + t) * e.head_size..][..e.head_size];
            let score = |s| {
                let dot: f64 = q.iter().enumerate().map(|(i, q)| q * k.data[kv_index(e, b, h, s, i)]).sum();
                dot * self.scale
            };
            let first =
                starts.map_or(0, |starts| starts.data[b * e.queries + t] as usize).min(visible.saturating_sub(1));
            f(b, h, t, first, &(first..visible).map(score).collect::<Vec<f64>>());
        }
    }
}

/// Whether the elements of a head lie side by side, as the kernels need it.
pub(super) fn head_is_dense(layout: &Layout) -> bool {
    layout.stride().last() == Some(&1)
}

/// The strides of an input without gaps: scratch depends on the extents alone.
fn dense(inputs: &[Spec], index: usize) -> Layout {
    Layout::contiguous(inputs[index].shape.clone())
}

/// Index into k or v [batch, key-value heads, keys, head size] for a query's head.
fn kv_index(e: Extents, b: usize, h: usize, s: usize, i: usize) -> usize {
    ((b * e.kv_heads + h / (e.heads / e.kv_heads)) * e.keys + s) * e.head_size + i
}

fn log_sum_exp(scores: &[f64]) -> f64 {
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    max + scores.iter().map(|s| (s - max).exp()).sum::<f64>().ln()
}

/// (dq, dk, dv), each [batch, tokens, heads, head size], from (q, k, v, out, log-sum-exp, d_out). The probabilities are
/// recomputed from the log-sum-exp.
#[derive(Debug, Clone, Copy)]
struct AttentionGrad {
    of: Attention,
}

impl Op for AttentionGrad {
    fn name(&self) -> &'static str {
        "attention_grad"
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        let e = Extents::of(inputs[0].dims(), inputs[1].dims()).expect("rank 4 by the forward's rule");
        let d_kv = inputs[1].in_shape((e.batch, e.keys, e.kv_heads, e.head_size));
        Ok(vec![inputs[0].in_shape((e.batch, e.queries, e.heads, e.head_size)), d_kv.clone(), d_kv])
    }

    fn flops(&self, inputs: &[Spec], _: &[Spec]) -> u64 {
        5 * self.of.product_flops(inputs)
    }

    fn reads_strides(&self, index: usize, layout: &Layout) -> bool {
        index < 3 && head_is_dense(layout)
    }

    fn workspace(&self, inputs: &[Spec], _: &[Spec], threads: usize) -> Vec<u64> {
        self.of.kernel(&dense(inputs, 0), &dense(inputs, 1), &dense(inputs, 2)).backward_scratch(threads)
    }

    fn run(&self, args: &mut Args<'_>) {
        let grads = (args.output::<f32>(0), args.output::<f32>(1), args.output::<f32>(2));
        let scratch = &mut args.workspace();
        let ((q, q_layout), (k, k_layout), (v, v_layout)) = (args.strided(0), args.strided(1), args.strided(2));
        let (out, lse, d_out) = (args.input(3), args.input(4), args.input(5));
        let kernel = self.of.kernel(q_layout, k_layout, v_layout);
        let starts = (args.inputs() > 6).then(|| args.input(6));
        kernel.backward(q, k, v, out, lse, d_out, starts, grads, scratch).expect("extents by the shape rule");
    }
    fn cuda_workspace(&self, inputs: &[Spec], _: &[Spec]) -> Vec<u64> {
        gapless_kernels::cuda::launch::attention_grad_workspace(&inputs[4])
    }
    fn cuda(&self, operands: &gapless_kernels::cuda::Operands<'_>) -> Option<Vec<gapless_kernels::cuda::Launch>> {
        gapless_kernels::cuda::launch::attention_grad(self.of.scale, self.of.causal, operands)
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        let (q, k, v, out) = (args.input(0), args.input(1), args.input(2), args.input(3));
        let (lse, d_out) = (args.input(4), args.input(5));
        let e = Extents::of(&q.dims, &k.dims).expect("rank 4 by the forward's rule");
        let mut dq = Array::zeros(&[e.batch, e.queries, e.heads, e.head_size]);
        let mut dk = Array::zeros(&[e.batch, e.keys, e.kv_heads, e.head_size]);
        let mut dv = dk.clone();
        let group = e.heads / e.kv_heads;
        let starts = (args.inputs() > 6).then(|| args.input(6));
        self.of.for_each_score(e, q, k, starts, |b, h, t, first, scores| {
            let row = ((b * e.queries + t) * e.heads + h) * e.head_size;
            let (out, d_out) = (&out.data[row..][..e.head_size], &d_out.data[row..][..e.head_size]);
            let delta: f64 = out.iter().zip(d_out).map(|(o, d)| o * d).sum();
            for (s, score) in (first..).zip(scores) {
                let p = (score - lse.data[(b * e.heads + h) * e.queries + t]).exp();
                let dp: f64 = d_out.iter().enumerate().map(|(i, d)| d * v.data[kv_index(e, b, h, s, i)]).sum();
                let d_score = p * (dp - delta) * self.of.scale;
                let kv_row = ((b * e.keys + s) * e.kv_heads + h / group) * e.head_size;
                let q_row = ((b * e.heads + h) * e.queries + t) * e.head_size;
                for (i, d_out) in d_out.iter().enumerate() {
                    dq.data[row + i] += d_score * k.data[kv_index(e, b, h, s, i)];
                    dk.data[kv_row + i] += d_score * q.data[q_row + i];
                    dv.data[kv_row + i] += p * d_out;
                }
            }
        });
        vec![dq, dk, dv]
    }
}

//! Fused attention (FlashAttention, Dao et al., arXiv 2205.14135 and 2307.08691), which never stores tokens × tokens
//! scores.

use std::sync::Arc;

use candle_core::Layout;
use gapless_kernels::cpu::Args;
use gapless_kernels::cpu::attention::{self, HeadStrides, Mask};
use gapless_kernels::cpu::bf16::with_float;
use gapless_kernels::cuda::launch::Scores;
use gapless_kernels::{Fold, Spec, Window};

use super::is_positive_f32;
use crate::error::Result;
use crate::op::Keys;
use crate::reference::{Array, Reference};
use crate::rule::Rule;
use crate::tensor::Tensor;
use crate::{Gradient, Op};

/// Attention: softmax(scale·q·kᵀ)·v.
///
/// - Inputs: q [batch, heads, tokens, head size], k [batch, key-value heads, tokens, head size], v [batch, key-value
///   heads, tokens, value size].
/// - Optional fourth input, for sequences of several documents: the index of the first key that each query sees, u32
///   [batch, tokens]. An index after the last key that the query sees is replaced by that key's index.
/// - Outputs: the result [batch, tokens, heads, value size], and the log-sum-exp of the scores [batch, heads, tokens],
///   which the gradient reads.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Attention {
    /// Multiplier of the scores, usually 1/√(head size).
    pub scale: f64,
    /// True if a token sees only itself and earlier tokens.
    pub causal: bool,
    /// The maximum number of tokens that a token sees, including itself (Beltagy et al., arXiv 2004.05150). Only for
    /// causal attention.
    pub window: Option<usize>,
    /// The number of tokens of a chunk: a token sees no token of an earlier chunk (Llama 4). Documents begin with a chunk
    /// of their own. Only for causal attention.
    pub chunk: Option<usize>,
    /// The soft cap of scores: a score s is replaced by cap·tanh(s/cap) (Gemma 2, arXiv 2408.00118, section 2).
    pub cap: Option<f64>,
    /// The tokens of the keys' sequence that the queries are. `None` if the queries are its last tokens.
    pub places: Option<Fold>,
}

/// The extents of the operands of an attention.
#[derive(Debug, Clone, Copy)]
struct Extents {
    batch: usize,
    heads: usize,
    kv_heads: usize,
    queries: usize,
    keys: usize,
    head_size: usize,
    value_size: usize,
}

impl Extents {
    fn of(q: &[usize], k: &[usize], v: &[usize]) -> Option<Self> {
        let (&[batch, heads, queries, head_size], &[_, kv_heads, keys, _]) = (q, k) else { return None };
        let &[_, _, _, value_size] = v else { return None };
        Some(Self { batch, heads, kv_heads, queries, keys, head_size, value_size })
    }

    fn of_specs(inputs: &[Spec]) -> Self {
        Self::of(inputs[0].dims(), inputs[1].dims(), inputs[2].dims()).expect("rank 4 by the shape rule")
    }
}

impl Attention {
    /// Attention in which every query sees every key.
    pub fn full(scale: f64) -> Self {
        Self { scale, causal: false, window: None, chunk: None, cap: None, places: None }
    }

    /// Attention in which every query sees the keys up to its own.
    pub fn causal(scale: f64) -> Self {
        Self { causal: true, ..Self::full(scale) }
    }

    /// Checks the settings.
    pub(super) fn check(&self) -> Result<(), String> {
        let Self { scale, causal, window, chunk, cap, places: _ } = *self;
        if !is_positive_f32(scale) {
            return Err(format!("the scale {scale} is not a positive number in f32"));
        }
        if let Some(cap) = cap.filter(|&cap| !is_positive_f32(cap)) {
            return Err(format!("the cap {cap} of the scores is not a positive number in f32"));
        }
        match window.into_iter().chain(chunk).min() {
            Some(0) => Err("the window and the chunk must be at least 1".into()),
            Some(_) if !causal => Err("a window or a chunk requires causal attention".into()),
            _ => Ok(()),
        }
    }

    /// Returns the rule of these labels, in which `q` stands for the queries. In causal attention, the index of a query is
    /// its position.
    pub(super) fn labels(&self, text: String) -> Option<Rule> {
        Some(Rule::Labels(if self.causal { text.replace('q', "Q") } else { text }.into()))
    }

    /// The settings in the form that the CUDA kernels take.
    pub(super) fn scores(&self) -> Scores {
        let Self { scale, causal, window, chunk, cap, places } = *self;
        let places = places.filter(|_| causal);
        let (scale, cap) = (scale as f32, cap.unwrap_or(0.0) as f32);
        Scores { scale, cap, is_causal: causal, window, chunk, places }
    }

    /// True if the queries may be those in this window, [batch, heads, tokens, ..], of all queries.
    pub(crate) fn runs_on(&self, queries: &Window) -> bool {
        let is_divided = queries.dims()[2] < queries.whole_dims()[2];
        !self.causal || !is_divided || Self::fold(queries).is_some()
    }

    /// Returns the attention of the queries in this window, [batch, heads, tokens, ..].
    pub(super) fn of_queries(&self, queries: &Window) -> Self {
        match queries.dims()[2] < queries.whole_dims()[2] {
            true => Self { places: Self::fold(queries).filter(|_| self.causal), ..*self },
            false => *self,
        }
    }

    fn fold(queries: &Window) -> Option<Fold> {
        Fold::of(&queries.held()[2], queries.whole_dims()[2])
    }

    /// Returns the number of keys up to and including the last one that a query sees.
    fn visible(&self, e: Extents, query: usize) -> usize {
        match self.places {
            _ if !self.causal => e.keys,
            Some(places) => places.place(query) + 1,
            None => query + 1 + e.keys - e.queries,
        }
    }

    /// Returns the index of the first key that a query sees. `start` is the first key of the query's document, and `visible`
    /// the number of keys up to and including the last one that the query sees.
    pub(super) fn first(&self, start: usize, visible: usize) -> usize {
        let last = visible.saturating_sub(1);
        let start = start.min(last);
        let in_window = self.window.map_or(0, |window| visible.saturating_sub(window));
        let in_chunk = self.chunk.map_or(start, |chunk| start + (last - start) / chunk * chunk);
        in_chunk.max(in_window).min(last)
    }
}

impl Op for Attention {
    fn name(&self) -> &'static str {
        "attention"
    }

    fn rule(&self, inputs: &[Spec], _: &[Spec]) -> Option<Rule> {
        let starts = if inputs.len() > 3 { ", b q" } else { "" };
        self.labels(format!("b (h g) q D, b h K D, b h K E{starts} -> b q (h g) E, b (h g) q"))
    }

    fn keys(&self) -> Option<Keys> {
        Some(Keys { inputs: &[1, 2], outputs: &[] })
    }

    fn runs_on(&self, inputs: &[Window]) -> bool {
        self.runs_on(&inputs[0])
    }

    fn on_parts(&self, inputs: &[Window], _: &[Window]) -> Option<Arc<dyn Op>> {
        Some(Arc::new(self.of_queries(&inputs[0])))
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        super::expect_float(&inputs[..3])?;
        let Some(e) = Extents::of(inputs[0].dims(), inputs[1].dims(), inputs[2].dims()) else {
            return Err("q, k and v must be [batch, heads, tokens, head size]".into());
        };
        if inputs[1].dtype != inputs[2].dtype || inputs[1].dims()[..3] != inputs[2].dims()[..3] {
            return Err("k and v must have equal types, and equal shapes except for the head size".into());
        }
        if inputs[0].dtype != inputs[1].dtype {
            return Err("q must have the type of k and v".into());
        }
        if inputs[1].dims()[0] != e.batch || inputs[1].dims()[3] != e.head_size {
            return Err("k and v must have the batch of q, and k its head size".into());
        }
        if e.kv_heads == 0 || e.heads % e.kv_heads != 0 {
            return Err(format!("{} heads are not a multiple of {} key-value heads", e.heads, e.kv_heads));
        }
        let widest = e.head_size.max(e.value_size);
        if widest > attention::MAX_HEAD_SIZE {
            return Err(format!("the head size {widest} is above the maximum of {}", attention::MAX_HEAD_SIZE));
        }
        self.check()?;
        if self.causal && e.keys < e.queries {
            return Err("causal attention needs a key for every query".into());
        }
        if let Some(starts) = inputs.get(3) {
            super::expect_ids("first keys", starts)?;
            if starts.dims() != [e.batch, e.queries] {
                return Err("the first keys must be [batch, tokens]".into());
            }
        }
        let out = inputs[0].in_shape((e.batch, e.queries, e.heads, e.value_size));
        Ok(vec![out, Spec::f32((e.batch, e.heads, e.queries))])
    }

    fn gradient(&self, g: &mut Gradient) -> Result<()> {
        g.require_unused(self, 1)?;
        let starts = (g.inputs() > 3).then(|| g.input(3));
        let inputs = [g.input(0), g.input(1), g.input(2), g.output(0), g.output(1), g.grad(0)];
        let inputs: Vec<&Tensor> = inputs.iter().chain(&starts).collect();
        let grads = Tensor::apply_op::<3>(AttentionGrad { attention: *self }, &inputs)?;
        for (input, grad) in grads.into_iter().enumerate().filter(|&(input, _)| g.wants(input)).collect::<Vec<_>>() {
            g.accumulate(input, grad.transpose(1, 2)?);
        }
        Ok(())
    }

    fn flops(&self, inputs: &[Spec], _: &[Spec]) -> u64 {
        let e = Extents::of_specs(inputs);
        (e.head_size + e.value_size) as u64 * self.flops_per_element(e)
    }

    fn reads_strides(&self, index: usize, layout: &Layout) -> bool {
        index < 3 && head_is_dense(layout)
    }

    fn runs_in_bf16(&self) -> bool {
        true
    }

    /// The kernel rounds the probabilities and the gradients of the scores.
    fn rounds_intermediates(&self) -> bool {
        true
    }

    fn workspace(&self, inputs: &[Spec], _: &[Spec], threads: usize) -> Vec<u64> {
        let kernel = self.kernel(&dense(inputs, 0), &dense(inputs, 1), &dense(inputs, 2));
        with_float!(inputs[0].dtype, T => kernel.forward_scratch::<T>(threads))
    }

    fn run(&self, args: &mut Args<'_>) {
        let (lse, scratch) = (args.output::<f32>(1), &mut args.workspace());
        let starts = (args.inputs() > 3).then(|| args.input(3));
        with_float!(args.input_dtype(0), T => {
            let ((q, of_q), (k, of_k), (v, of_v)) = (args.strided::<T>(0), args.strided::<T>(1), args.strided::<T>(2));
            let (kernel, out) = (self.kernel(of_q, of_k, of_v), args.output::<T>(0));
            kernel.forward(q, k, v, starts, out, lse, scratch).expect("extents by the shape rule");
        });
    }
    fn cuda(&self, operands: &gapless_kernels::cuda::Operands<'_>) -> Option<Vec<gapless_kernels::cuda::Launch>> {
        gapless_kernels::cuda::launch::attention(self.scores(), operands)
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        let (q, k, v) = (args.input(0), args.input(1), args.input(2));
        let e = Extents::of(&q.dims, &k.dims, &v.dims).expect("rank 4 by the shape rule");
        let mut out = Array::zeros(&[e.batch, e.queries, e.heads, e.value_size]);
        let mut lse = Array::zeros(&[e.batch, e.heads, e.queries]);
        let starts = (args.inputs() > 3).then(|| args.input(3));
        self.for_each_score(e, q, k, starts, |b, h, t, first, scores| {
            let sum = log_sum_exp(scores);
            lse.data[(b * e.heads + h) * e.queries + t] = sum;
            for (s, score) in (first..).zip(scores) {
                for i in 0..e.value_size {
                    out.data[((b * e.queries + t) * e.heads + h) * e.value_size + i] +=
                        (score - sum).exp() * v.data[e.kv_row(b, h, s) * e.value_size + i];
                }
            }
        });
        vec![out, lse]
    }
}

impl Attention {
    /// Returns the CPU kernel for operands with these strides. Outputs and gradients are contiguous [batch, tokens,
    /// heads, head size].
    fn kernel(&self, q: &Layout, k: &Layout, v: &Layout) -> attention::Attention {
        let e = Extents::of(q.dims(), k.dims(), v.dims()).expect("rank 4 by the shape rule");
        let strides = |layout: &Layout| {
            let &[batch, head, token, _] = layout.stride() else { unreachable!("rank 4 by the shape rule") };
            HeadStrides { batch, head, token }
        };
        let dense = |heads: usize, tokens: usize, size: usize| HeadStrides {
            batch: tokens * heads * size,
            head: size,
            token: heads * size,
        };
        attention::Attention {
            batch: e.batch,
            heads: e.heads,
            kv_heads: e.kv_heads,
            queries: e.queries,
            keys: e.keys,
            head_size: e.head_size,
            value_size: e.value_size,
            scale: self.scale as f32,
            mask: match self.places {
                _ if !self.causal => Mask::Full,
                Some(places) => Mask::Folded(places),
                None => Mask::Causal { offset: e.keys - e.queries },
            },
            window: self.window,
            chunk: self.chunk,
            cap: self.cap.map(|cap| cap as f32),
            q: strides(q),
            k: strides(k),
            v: strides(v),
            out: dense(e.heads, e.queries, e.value_size),
            d_q: dense(e.heads, e.queries, e.head_size),
            d_k: dense(e.kv_heads, e.keys, e.head_size),
            d_v: dense(e.kv_heads, e.keys, e.value_size),
        }
    }

    /// Returns the number of floating-point operations per element of a head that one product over the visible scores
    /// takes.
    fn flops_per_element(&self, e: Extents) -> u64 {
        if self.places.is_some() || self.chunk.is_some() {
            let seen = |query| self.visible(e, query) - self.first(0, self.visible(e, query));
            return 2 * (e.batch * e.heads * (0..e.queries).map(seen).sum::<usize>()) as u64;
        }
        let causal = |queries: usize, keys: usize| queries * (2 * keys - queries + 1) / 2;
        let scores = match (self.causal, self.window) {
            (false, _) => e.queries * e.keys,
            (true, Some(window)) if window < e.keys => {
                // Subtracts the scores before the window. These scores form a triangle, like those of causal attention
                // over `behind` queries.
                let behind = e.queries.min(e.keys - window);
                causal(e.queries, e.keys) - causal(behind, e.keys - window)
            }
            (true, _) => causal(e.queries, e.keys),
        };
        2 * (e.batch * e.heads * scores) as u64
    }

    /// Calls `f` for every query. The arguments of `f` are the query's batch index, head and token, the index of the
    /// first key that the query sees, and the scores of all keys that it sees.
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
            let visible = self.visible(e, t);
            let q = &q.data[((b * e.heads + h) * e.queries + t) * e.head_size..][..e.head_size];
            let score = |s| self.score(q, &k.data[e.kv_row(b, h, s) * e.head_size..]);
            let first = self.first(starts.map_or(0, |starts| starts.data[b * e.queries + t] as usize), visible);
            f(b, h, t, first, &(first..visible).map(score).collect::<Vec<f64>>());
        }
    }

    /// Returns the scaled and capped score of a query and a key, in f64.
    pub(super) fn score(&self, q: &[f64], k: &[f64]) -> f64 {
        let score = self.scale * q.iter().zip(k).map(|(q, k)| q * k).sum::<f64>();
        self.cap.map_or(score, |cap| cap * (score / cap).tanh())
    }
}

/// True if the elements of each head are adjacent in memory, as the kernels require.
pub(super) fn head_is_dense(layout: &Layout) -> bool {
    layout.stride().last() == Some(&1)
}

/// Returns the contiguous layout of an input. Scratch depends on the extents alone, so this layout suffices to compute
/// its size.
fn dense(inputs: &[Spec], index: usize) -> Layout {
    Layout::contiguous(inputs[index].shape.clone())
}

impl Extents {
    /// Returns the index of the row of k or v [batch, key-value heads, keys, …] that query head `h` reads for key `s`.
    fn kv_row(self, b: usize, h: usize, s: usize) -> usize {
        (b * self.kv_heads + h / (self.heads / self.kv_heads)) * self.keys + s
    }
}

fn log_sum_exp(scores: &[f64]) -> f64 {
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    max + scores.iter().map(|s| (s - max).exp()).sum::<f64>().ln()
}

/// The gradient of [`Attention`]: (dq, dk, dv), each [batch, tokens, heads, …], from (q, k, v, out, log-sum-exp,
/// d_out). The probabilities are recomputed from the log-sum-exp.
#[derive(Debug, Clone, Copy)]
pub(super) struct AttentionGrad {
    pub(super) attention: Attention,
}

impl Op for AttentionGrad {
    fn name(&self) -> &'static str {
        "attention_grad"
    }

    fn rule(&self, inputs: &[Spec], _: &[Spec]) -> Option<Rule> {
        let starts = if inputs.len() > 6 { ", b q" } else { "" };
        self.attention.labels(format!(
            "b (h g) q D, b h K D, b h K E, b q (h g) E, b (h g) q, b q (h g) E{starts} \
             -> b q (h g) D, b K h D, b K h E"
        ))
    }

    fn keys(&self) -> Option<Keys> {
        Some(Keys { inputs: &[1, 2], outputs: &[1, 2] })
    }

    fn runs_on(&self, inputs: &[Window]) -> bool {
        self.attention.runs_on(&inputs[0])
    }

    fn on_parts(&self, inputs: &[Window], _: &[Window]) -> Option<Arc<dyn Op>> {
        Some(Arc::new(Self { attention: self.attention.of_queries(&inputs[0]) }))
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        let e = Extents::of_specs(inputs);
        Ok(vec![
            inputs[0].in_shape((e.batch, e.queries, e.heads, e.head_size)),
            inputs[1].in_shape((e.batch, e.keys, e.kv_heads, e.head_size)),
            inputs[2].in_shape((e.batch, e.keys, e.kv_heads, e.value_size)),
        ])
    }

    fn flops(&self, inputs: &[Spec], _: &[Spec]) -> u64 {
        let e = Extents::of_specs(inputs);
        (3 * e.head_size + 2 * e.value_size) as u64 * self.attention.flops_per_element(e)
    }

    fn reads_strides(&self, index: usize, layout: &Layout) -> bool {
        index < 3 && head_is_dense(layout)
    }

    fn workspace(&self, inputs: &[Spec], _: &[Spec], threads: usize) -> Vec<u64> {
        let kernel = self.attention.kernel(&dense(inputs, 0), &dense(inputs, 1), &dense(inputs, 2));
        with_float!(inputs[0].dtype, T => kernel.backward_scratch::<T>(threads))
    }

    fn runs_in_bf16(&self) -> bool {
        true
    }

    /// The kernel rounds the probabilities and the gradients of the scores.
    fn rounds_intermediates(&self) -> bool {
        true
    }

    fn run(&self, args: &mut Args<'_>) {
        let scratch = &mut args.workspace();
        let starts = (args.inputs() > 6).then(|| args.input(6));
        with_float!(args.input_dtype(0), T => {
            let ((q, of_q), (k, of_k), (v, of_v)) = (args.strided::<T>(0), args.strided::<T>(1), args.strided::<T>(2));
            let (out, lse, d_out) = (args.input::<T>(3), args.input(4), args.input::<T>(5));
            let grads = (args.output::<T>(0), args.output::<T>(1), args.output::<T>(2));
            let kernel = self.attention.kernel(of_q, of_k, of_v);
            kernel.backward(q, k, v, out, lse, d_out, starts, grads, scratch).expect("extents by the shape rule");
        });
    }
    fn writes_strides(&self, _: usize) -> bool {
        true
    }
    fn cuda_workspace(&self, inputs: &[Spec], _: &[Spec]) -> Vec<u64> {
        gapless_kernels::cuda::launch::attention_grad_workspace(&inputs[4])
    }
    fn cuda(&self, operands: &gapless_kernels::cuda::Operands<'_>) -> Option<Vec<gapless_kernels::cuda::Launch>> {
        gapless_kernels::cuda::launch::attention_grad(self.attention.scores(), operands)
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        let (q, k, v, out) = (args.input(0), args.input(1), args.input(2), args.input(3));
        let (lse, d_out) = (args.input(4), args.input(5));
        let e = Extents::of(&q.dims, &k.dims, &v.dims).expect("rank 4 by the forward's rule");
        let mut dq = Array::zeros(&[e.batch, e.queries, e.heads, e.head_size]);
        let mut dk = Array::zeros(&[e.batch, e.keys, e.kv_heads, e.head_size]);
        let mut dv = Array::zeros(&[e.batch, e.keys, e.kv_heads, e.value_size]);
        let group = e.heads / e.kv_heads;
        let starts = (args.inputs() > 6).then(|| args.input(6));
        self.attention.for_each_score(e, q, k, starts, |b, h, t, first, scores| {
            let row = (b * e.queries + t) * e.heads + h;
            let of_out = row * e.value_size..(row + 1) * e.value_size;
            let (out, d_out) = (&out.data[of_out.clone()], &d_out.data[of_out]);
            let delta: f64 = out.iter().zip(d_out).map(|(o, d)| o * d).sum();
            for (s, score) in (first..).zip(scores) {
                let p = (score - lse.data[(b * e.heads + h) * e.queries + t]).exp();
                let of_kv = e.kv_row(b, h, s);
                let dp: f64 = d_out.iter().zip(&v.data[of_kv * e.value_size..]).map(|(d, v)| d * v).sum();
                let slope = self.attention.cap.map_or(1.0, |cap| 1.0 - (score / cap).powi(2));
                let d_score = p * (dp - delta) * slope * self.attention.scale;
                let to_kv = (b * e.keys + s) * e.kv_heads + h / group;
                let of_q = (b * e.heads + h) * e.queries + t;
                for i in 0..e.head_size {
                    dq.data[row * e.head_size + i] += d_score * k.data[of_kv * e.head_size + i];
                    dk.data[to_kv * e.head_size + i] += d_score * q.data[of_q * e.head_size + i];
                }
                for (i, d_out) in d_out.iter().enumerate() {
                    dv.data[to_kv * e.value_size + i] += p * d_out;
                }
            }
        });
        vec![dq, dk, dv]
    }
}

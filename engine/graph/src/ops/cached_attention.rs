//! Attention of new tokens over a cache of past keys and values.

use candle_core::Layout;
use gapless_kernels::Spec;
use gapless_kernels::cpu::attention::{self, HeadStrides, Mask};
use gapless_kernels::cpu::bf16::with_float;
use gapless_kernels::cpu::gemm::Factor;
use gapless_kernels::cpu::{Args, math};

use super::Attention;
use super::attention::head_is_dense;
use crate::Op;
use crate::reference::{Array, Reference};
use crate::rule::Rule;

/// Causal [`Attention`] of new tokens over caches that already hold the new tokens' keys and values.
///
/// - Inputs: q [batch, heads, tokens, head size], the caches k [batch, key-value heads, window, head size] and v
///   [batch, key-value heads, window, value size], and `positions` u32 [batch, tokens], consecutive in each sequence.
/// - Optional fifth input: sinks f32 `[heads]`, as in [`SinkAttention`](super::SinkAttention).
/// - Output: [batch, tokens, heads, value size]: the rows that [`Attention`] over the whole text gives for the new tokens,
///   bit-identical on a CPU, and up to rounding on a GPU.
///
/// A token at position p sees rows 0 to p of the cache. With a sliding window, it sees only the last of these rows.
/// There is no gradient.
#[derive(Debug, Clone, Copy)]
pub struct CachedAttention(pub Attention);

impl Op for CachedAttention {
    fn name(&self) -> &'static str {
        "cached_attention"
    }

    fn rule(&self, inputs: &[Spec], _: &[Spec]) -> Option<Rule> {
        let sinks = if inputs.len() > 4 { ", (h g)" } else { "" };
        Some(Rule::Labels(format!("b (h g) t D, b h W D, b h W E, b t{sinks} -> b t (h g) E").into()))
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        super::expect_float(&inputs[..3])?;
        super::expect_ids("positions", &inputs[3])?;
        let (&[batch, heads, tokens, size], &[b, kv_heads, window, d]) = (inputs[0].dims(), inputs[1].dims()) else {
            return Err("q, k and v must be [batch, heads, tokens, head size]".into());
        };
        let &[.., value_size] = inputs[2].dims() else { return Err("v must have as many dimensions as k".into()) };
        if inputs[2] != inputs[1].in_shape((b, kv_heads, window, value_size)) {
            return Err("k and v must have equal types, and equal shapes except for the head size".into());
        }
        if inputs[0].dtype != inputs[1].dtype {
            return Err("q must have the type of k and v".into());
        }
        if (b, d) != (batch, size) || inputs[3].dims() != [batch, tokens] {
            return Err("k and v must have the batch of q, k its head size, and the positions [batch, tokens]".into());
        }
        if kv_heads == 0 || heads % kv_heads != 0 {
            return Err(format!("{heads} heads are not a multiple of {kv_heads} key-value heads"));
        }
        let widest = size.max(value_size);
        if widest > attention::MAX_HEAD_SIZE {
            return Err(format!("the head size {widest} is above the maximum of {}", attention::MAX_HEAD_SIZE));
        }
        if inputs.get(4).is_some_and(|sinks| sinks.dims() != [heads]) {
            return Err(format!("the sinks must be [{heads}]"));
        }
        if tokens > window {
            return Err(format!("{tokens} tokens do not fit a window of {window}"));
        }
        if !self.0.causal {
            return Err("attention over a cache must be causal".into());
        }
        self.0.check()?;
        Ok(vec![inputs[0].in_shape((batch, tokens, heads, value_size))])
    }

    /// Counts operations as if every query saw the full window.
    fn flops(&self, inputs: &[Spec], _: &[Spec]) -> u64 {
        let (&[batch, heads, tokens, size], value_size) = (inputs[0].dims(), inputs[2].dims()[3]) else { return 0 };
        2 * (batch * heads * tokens * (size + value_size) * inputs[1].dims()[2]) as u64
    }

    fn reads_strides(&self, index: usize, layout: &Layout) -> bool {
        index < 3 && head_is_dense(layout)
    }

    fn workspace(&self, inputs: &[Spec], _: &[Spec], threads: usize) -> Vec<u64> {
        let [q, k, v] = [0, 1, 2].map(|i| Layout::contiguous(inputs[i].shape.clone()));
        let lse = (inputs.len() > 4).then(|| 4 * inputs[0].dims()[..3].iter().product::<usize>() as u64);
        let kernel = self.kernel(&q, &k, &v);
        let of_kernel = with_float!(inputs[0].dtype, T => kernel.forward_scratch::<T>(threads));
        lse.into_iter().chain(of_kernel).collect()
    }

    fn runs_in_bf16(&self) -> bool {
        true
    }

    /// The kernel rounds the probabilities.
    fn rounds_intermediates(&self) -> bool {
        true
    }

    fn run(&self, args: &mut Args<'_>) {
        with_float!(args.input_dtype(0), T => self.run_in::<T>(args));
    }

    fn cuda_workspace(&self, inputs: &[Spec], _: &[Spec]) -> Vec<u64> {
        gapless_kernels::cuda::launch::cached_attention_workspace(inputs)
    }
    fn cuda(&self, operands: &gapless_kernels::cuda::Operands<'_>) -> Option<Vec<gapless_kernels::cuda::Launch>> {
        gapless_kernels::cuda::launch::cached_attention(self.0.scores(), operands)
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        let (q, k, v, positions) = (args.input(0), args.input(1), args.input(2), args.input(3));
        let &[batch, heads, tokens, size] = &q.dims[..] else { unreachable!("rank 4 by the shape rule") };
        let (kv_heads, window, value_size) = (k.dims[1], k.dims[2], v.dims[3]);
        let mut out = Array::zeros(&[batch, tokens, heads, value_size]);
        for (row, q) in q.rows().enumerate() {
            let (b, h, t) = (row / tokens / heads, row / tokens % heads, row % tokens);
            let rows = (b * kv_heads + h / (heads / kv_heads)) * window;
            let visible = positions.data[b * tokens + t] as usize + 1;
            let seen = self.0.first(0, visible)..visible;
            let weight = |s: usize| self.0.score(q, &k.data[(rows + s) * size..]).exp();
            let sink = if args.inputs() > 4 { args.input(4).data[h].exp() } else { 0.0 };
            let sum: f64 = seen.clone().map(weight).sum::<f64>() + sink;
            for s in seen {
                for i in 0..value_size {
                    out.data[((b * tokens + t) * heads + h) * value_size + i] +=
                        weight(s) / sum * v.data[(rows + s) * value_size + i];
                }
            }
        }
        vec![out]
    }
}

impl CachedAttention {
    fn run_in<T: Factor>(&self, args: &mut Args<'_>) {
        let (out, scratch) = (args.output::<T>(0), &mut args.workspace());
        let positions = args.input(3);
        let sinks = (args.inputs() > 4).then(|| args.input::<f32>(4));
        let mut lse = sinks.map(|_| scratch.take::<f32>());
        let [(q, of_q), (k, of_k), (v, of_v)] = [0, 1, 2].map(|i| args.strided::<T>(i));
        let kernel = self.kernel(of_q, of_k, of_v);
        kernel.forward_at(q, k, v, positions, out, lse.as_deref_mut(), scratch).expect("extents by the shape rule");
        let (Some(sinks), Some(lse)) = (sinks, lse) else { return };
        let &[_, tokens, heads, value_size] = args.output_dims(0) else { unreachable!("rank 4 by the shape rule") };
        for (row, out) in out.chunks_exact_mut(value_size).enumerate() {
            let (b, t, h) = (row / heads / tokens, row / heads % tokens, row % heads);
            let share = T::store(math::sigmoid(lse[(b * heads + h) * tokens + t] - sinks[h])).load();
            out.iter_mut().for_each(|out| *out = T::store(out.load() * share));
        }
    }

    /// Returns the CPU kernel for operands of these extents and strides.
    fn kernel(&self, q: &Layout, k: &Layout, v: &Layout) -> attention::Attention {
        let (&[batch, heads, queries, head_size], &[_, kv_heads, keys, _], &[_, _, _, value_size]) =
            (q.dims(), k.dims(), v.dims())
        else {
            unreachable!("rank 4 by the shape rule")
        };
        let [q, k, v] = [q, k, v].map(|layout| {
            let stride = layout.stride();
            HeadStrides { batch: stride[0], head: stride[1], token: stride[2] }
        });
        let out = HeadStrides { batch: queries * heads * value_size, head: value_size, token: heads * value_size };
        attention::Attention {
            batch,
            heads,
            kv_heads,
            queries,
            keys,
            head_size,
            value_size,
            scale: self.0.scale as f32,
            mask: Mask::Causal { offset: 0 },
            window: self.0.window,
            chunk: self.0.chunk,
            cap: self.0.cap.map(|cap| cap as f32),
            q,
            k,
            v,
            out,
            d_q: out,
            d_k: k,
            d_v: v,
        }
    }
}

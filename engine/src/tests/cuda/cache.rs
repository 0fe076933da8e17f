//! The kernels of cache.cu, and text that is generated with them.

use std::ops::ControlFlow;

use candle_core::DType;
use gapless_testing::few;

use super::host;
use super::judge::check_forward;
use super::processor::device;
use crate::nn::{
    Embedding, Experts, Linear, Module, RmsNorm, Router, RouterConfig, VarBuilder, embedding, linear_no_bias, rms_norm,
};
use crate::ops::{Attention, CacheWrite, CachedAttention};
use crate::{GenerateOptions, Generation, Model, Result, StepOptions, Tensor, TrainOptions, Trainer};

/// Chunks and single tokens at different positions, strided operands, shared heads of keys, windows, caps, and values
/// of another size than keys. Keys are split if there are many of them and few rows.
#[test]
fn caches_are_written_and_read() {
    if !host::is_there() {
        return;
    }
    let write =
        |x: &[Tensor], p: &[Tensor]| Tensor::apply_op(CacheWrite, &[&x[0], &x[1].transpose(1, 2)?, &p[0]]).map(|[y]| y);
    check_forward(&[&[2, 3, 7, 4], &[2, 2, 3, 4]], &[(&[2, 2], &[0, 1, 5, 6])], write);
    check_forward(&[&[2, 3, 7, 5], &[2, 1, 3, 5]], &[(&[2, 1], &[6, 2])], write);
    let causal = Attention::causal(0.3);
    let near = Attention { window: Some(5), cap: Some(0.7), ..causal };
    let chunks = Attention { chunk: Some(7), ..causal };
    // (attention, [batch, heads, key heads, queries, keys, head size, value size], positions of the last queries)
    let cases: [(Attention, [usize; 7], &[u32]); 10] = [
        (causal, [2, 4, 2, 3, 9, 8, 8], &[8, 2]),
        (causal, [1, 2, 2, 1, 5, 7, 5], &[3]),
        (causal, [2, 2, 2, 1, 300, 16, 16], &[299, 0]),
        (causal, [1, 6, 1, 2, 270, 64, 24], &[200]),
        (near, [2, 4, 2, 3, 9, 8, 3], &[8, 2]),
        (near, [1, 2, 2, 1, 150, 8, 16], &[149]),
        (chunks, [2, 4, 2, 3, 9, 8, 3], &[8, 2]),
        (Attention { chunk: Some(140), ..causal }, [1, 2, 2, 1, 150, 8, 16], &[149]),
        (causal, [1, 1, 1, 5, 40, 100, 72], &[39]),
        (causal, [1, 2, 1, 1, 20, 136, 256], &[19]),
    ];
    for (how, [batch, heads, kv_heads, queries, keys, size, of_v], last) in cases {
        let positions: Vec<u32> = last.iter().flat_map(|&last| last + 1 - queries as u32..=last).collect();
        let shapes: [&[usize]; 3] =
            [&[batch, queries, heads, size], &[batch, kv_heads, keys, size], &[batch, keys, kv_heads, of_v]];
        check_forward(&shapes, &[(&[batch, queries], &positions)], |x, p| {
            let inputs = [&x[0].transpose(1, 2)?, &x[1], &x[2].transpose(1, 2)?, &p[0]];
            Tensor::apply_op(CachedAttention(how), &inputs).map(|[y]| y)
        });
    }
    // A sink for each head, with one split of the keys and with several.
    let with_sinks: [(Attention, [usize; 5], &[u32]); 3] =
        [(causal, [2, 4, 2, 3, 9], &[8, 2]), (near, [1, 2, 2, 1, 5], &[3]), (causal, [2, 2, 2, 1, 300], &[299, 0])];
    for (how, [batch, heads, kv_heads, queries, keys], last) in with_sinks {
        let positions: Vec<u32> = last.iter().flat_map(|&last| last + 1 - queries as u32..=last).collect();
        let cache = [batch, kv_heads, keys, 8];
        check_forward(
            &[&[batch, heads, queries, 8], &cache, &cache, &[heads]],
            &[(&[batch, queries], &positions)],
            |x, p| {
                let sinks = x[3].to_dtype(DType::F32)?;
                Tensor::apply_op(CachedAttention(how), &[&x[0], &x[1], &x[2], &p[0], &sinks]).map(|[y]| y)
            },
        );
    }
}

/// The kinds of models whose text is compared.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    /// Learned positions.
    Gpt,
    /// Rotary positions, and heads that share keys.
    Llama,
    /// A Llama with experts.
    Mixture,
    /// A Llama with windows and capped scores, like Gemma.
    Windows,
    /// Latent attention, like DeepSeek.
    Latent,
}

/// A block of a language model, between an embedding and a head.
struct Speaker {
    kind: Kind,
    embedding: Embedding,
    positions: Tensor,
    norms: [RmsNorm; 2],
    /// The projections to queries, to keys or latents, and to values or, from latents, to keys and values.
    q: Linear,
    k: Linear,
    v: Linear,
    out: Linear,
    up: Linear,
    down: Linear,
    experts: Option<(Router, Experts)>,
    head: Linear,
}

const WIDTH: usize = 8;
const SIZE: usize = 4;
const VOCABULARY: usize = 23;
const WINDOW: usize = 12;
/// Sizes of the latent and of the rotated part of a key.
const LATENT: usize = 3;
const ROTATED: usize = 2;

impl Speaker {
    fn new(kind: Kind, vb: VarBuilder) -> Result<Self> {
        let project = |from, to, name: &str| linear_no_bias(from, to, vb.pp(name));
        let config = RouterConfig { experts: 4, ..RouterConfig::default() };
        let experts = || -> Result<_> {
            Ok((Router::new(&config, WIDTH, vb.pp("router"))?, Experts::new(4, WIDTH, 5, vb.pp("experts"))?))
        };
        let kv = if matches!(kind, Kind::Gpt) { WIDTH } else { WIDTH / 2 };
        let (k, v) = match kind {
            Kind::Latent => ((WIDTH, LATENT + ROTATED), (LATENT, WIDTH / SIZE * 2 * SIZE)),
            _ => ((WIDTH, kv), (WIDTH, kv)),
        };
        Ok(Self {
            kind,
            embedding: embedding(VOCABULARY, WIDTH, vb.pp("embedding"))?,
            positions: vb.get((WINDOW, WIDTH), "places")?,
            norms: [rms_norm(WIDTH, 1e-5, vb.pp("norm_1"))?, rms_norm(WIDTH, 1e-5, vb.pp("norm_2"))?],
            q: project(WIDTH, if kind == Kind::Latent { WIDTH / SIZE * (SIZE + ROTATED) } else { WIDTH }, "q")?,
            k: project(k.0, k.1, "k")?,
            v: project(v.0, v.1, "v")?,
            out: project(WIDTH, WIDTH, "out")?,
            up: project(WIDTH, 2 * WIDTH, "up")?,
            down: project(2 * WIDTH, WIDTH, "down")?,
            experts: (kind == Kind::Mixture).then(experts).transpose()?,
            head: project(WIDTH, VOCABULARY, "head")?,
        })
    }

    fn attend(&self, x: &Tensor) -> Result<Tensor> {
        let (b, t, _) = x.dims3()?;
        let heads = |x: Tensor, size: usize| x.reshape((b, t, x.dims()[2] / size, size))?.transpose(1, 2);
        let rotated = |x: Tensor| if self.kind == Kind::Gpt { Ok(x) } else { x.rope(10_000.0) };
        let k = self.k.forward(x)?;
        if self.kind != Kind::Latent {
            let (q, v) = (rotated(heads(self.q.forward(x)?, SIZE)?)?, heads(self.v.forward(x)?, SIZE)?);
            let (window, cap) = if self.kind == Kind::Windows { (Some(5), Some(2.0)) } else { (None, None) };
            return q.attend(&rotated(heads(k, SIZE)?)?, &v, Attention { window, cap, ..Attention::causal(0.5) });
        }
        let q = heads(self.q.forward(x)?, SIZE + ROTATED)?;
        let q = Tensor::cat(&[&q.narrow(3, 0, SIZE)?, &rotated(q.narrow(3, SIZE, ROTATED)?)?], 3)?;
        let shared = rotated(heads(k.narrow(2, LATENT, ROTATED)?, ROTATED)?)?.cached("rotated")?;
        let latent = k.narrow(2, 0, LATENT)?.cached("latent")?;
        let seen = latent.dim(1)?;
        let kv = self.v.forward(&latent)?.reshape((b, seen, WIDTH / SIZE, 2 * SIZE))?.transpose(1, 2)?;
        let shared = shared.broadcast_as((b, WIDTH / SIZE, seen, ROTATED))?;
        let k = Tensor::cat(&[&kv.narrow(3, 0, SIZE)?, &shared], 3)?;
        q.attend_past(&k, &kv.narrow(3, SIZE, SIZE)?, Attention::causal(0.5))
    }
}

impl Model for Speaker {
    fn forward(&self, tokens: &Tensor, train: bool) -> Result<Tensor> {
        let (b, t) = tokens.dims2()?;
        let mut x = self.embedding.forward(tokens)?;
        if self.kind == Kind::Gpt {
            x = x.broadcast_add(&self.positions.rows_of_positions(t)?)?;
        }
        let y = self.attend(&self.norms[0].forward(&x)?)?.transpose(1, 2)?.reshape((b, t, WIDTH))?;
        let x = x.add(&self.out.forward(&y)?)?;
        let y = self.norms[1].forward(&x)?;
        let y = match &self.experts {
            Some((router, experts)) => experts.forward(&y, &router.forward(&y, train)?)?,
            None => self.down.forward(&self.up.forward(&y)?.gelu()?)?,
        };
        self.head.forward(&x.add(&y)?)
    }

    fn loss(&self, tokens: &Tensor, targets: &Tensor, train: bool) -> Result<Tensor> {
        self.forward(tokens, train)?.cross_entropy(targets)?.mean_all()
    }
}

/// Greedy text equals that of the CPU. The prompts are longer than a chunk, and the text is longer than the window.
#[test]
fn text_is_that_of_the_cpu() {
    if !host::is_there() {
        return;
    }
    let generation = Some(Generation { batch: 2, window: Some(WINDOW), chunk: 4 });
    let options = TrainOptions {
        step: StepOptions { batch: 1, sequence: 4, generation, ..StepOptions::default() },
        seed: 5,
        ..super::trainer::options()
    };
    let prompts: [&[u32]; 2] = [&[1, 7, 3, 18, 2, 9], &[11, 4]];
    let cases = [
        (Kind::Windows, 16),
        (Kind::Latent, 16),
        (Kind::Gpt, 100),
        (Kind::Llama, 100),
        (Kind::Mixture, 100),
        (Kind::Windows, 100),
        (Kind::Latent, 100),
    ];
    for &(kind, tokens) in few(&cases, 2) {
        let build = |vb| Speaker::new(kind, vb);
        let cpu = Trainer::builder(build, options.clone()).for_inference().build().unwrap();
        let gpu = Trainer::builder(build, options.clone()).for_inference().on_device(device()).build().unwrap();
        let texts = [cpu, gpu].map(|mut trainer| {
            let mut logits = Vec::new();
            let text = trainer.generate(&prompts, &GenerateOptions::greedy(tokens), |next| {
                logits.extend_from_slice(next.logits);
                ControlFlow::Continue(())
            });
            (text.unwrap(), logits)
        });
        let [(of_cpu, logits), (of_gpu, others)] = &texts;
        assert_eq!(of_cpu, of_gpu, "{kind:?}");
        // Not every step chooses the same token.
        assert!(of_cpu[0].iter().any(|token| *token != of_cpu[0][0]), "{kind:?}: {of_cpu:?}");
        let most = logits.iter().fold(0.0, |most: f32, x| most.max(x.abs()));
        let allowed = super::gpu::allowed(1e-5, 1e-4) as f32 * most;
        assert!(logits.iter().zip(others).all(|(a, b)| (a - b).abs() <= allowed), "{kind:?}");
    }
}

//! Each case is the source of a model: a function of embedded tokens [1, 6, 4].

use std::sync::{Arc, Mutex};

use candle_core::{D, DType};
use gapless_kernels::Spec;
use gapless_kernels::cpu::Args;

use super::{Causality, cache_obstacle, causality};
use crate::graph::lock;
use crate::nn::{Conv1dConfig, Module, VarBuilder, conv1d, embedding, linear};
use crate::ops::Attention;
use crate::{Array, Graph, IndexOp, Op, Reference, Result, Sequences, Tensor};

const TOKENS: usize = 6;

/// Records a model, and returns its graph, its tokens and its logits.
fn recorded(
    tokens: usize,
    is_continued: bool,
    f: impl Fn(&Tensor, &VarBuilder) -> Result<Tensor>,
) -> (Arc<Mutex<Graph>>, Tensor, Tensor) {
    let graph = Arc::new(Mutex::new(Graph::default()));
    let vb = VarBuilder::new(&graph, DType::F32);
    let input = |name| {
        let id = lock(&graph).add_input(name, Spec { shape: (1, tokens).into(), dtype: DType::U32 }).unwrap();
        Tensor::of(&graph, id)
    };
    let ids = input("tokens");
    if is_continued {
        let positions = input("positions").id();
        lock(&graph).set_sequences(Sequences::Continued { positions, window: 16 });
    }
    let x = embedding(7, 4, vb.pp("embed")).unwrap().forward(&ids).unwrap();
    let _layer = x.enter("layer");
    let x = f(&x, &vb).unwrap();
    let logits = linear(4, 7, vb.pp("head")).unwrap().forward(&x).unwrap();
    (graph, ids, logits)
}

/// Checks which operation makes a model not causal, and which one makes it continue sequences without caches.
fn check(ahead: Option<&str>, mixes: Option<&str>, f: impl Fn(&Tensor, &VarBuilder) -> Result<Tensor>) {
    let (graph, tokens, logits) = recorded(TOKENS, false, f);
    let graph = lock(&graph);
    let found = match causality(&graph, tokens.id(), logits.id()) {
        Causality::Causal => None,
        Causality::NotCausal(culprit) => Some(culprit.op),
        Causality::Unknown(culprit) => Some(format!("{} ?", culprit.op)),
    };
    assert_eq!(found.as_deref(), ahead, "not causal");
    let obstacle = cache_obstacle(&graph, tokens.id(), logits.id());
    assert_eq!(obstacle.map(|culprit| culprit.op).as_deref(), mixes, "mixes tokens");
}

/// Two heads of [1, 2, tokens, 2].
fn heads(x: &Tensor) -> Result<Tensor> {
    x.reshape((1, x.dim(1)?, 2, 2))?.transpose(1, 2)
}

fn merged(x: &Tensor) -> Result<Tensor> {
    x.transpose(1, 2)?.reshape((1, x.dim(2)?, 4))
}

/// Scores [1, 2, tokens, tokens].
fn scores(x: &Tensor) -> Result<Tensor> {
    heads(x)?.matmul(&heads(x)?.t()?)
}

fn lower(n: usize, x: &Tensor) -> Result<Tensor> {
    Tensor::tril2(n, DType::U8, x.device())
}

#[test]
fn operations_on_each_token() {
    check(None, None, |x, _| Ok(x.clone()));
    check(None, None, |x, vb| linear(4, 4, vb.pp("a"))?.forward(&x.gelu()?)?.softmax_last_dim());
    check(None, None, |x, _| x.broadcast_sub(&x.mean_keepdim(2)?)?.broadcast_div(&x.sqr()?.sum_keepdim(2)?));
    check(None, None, |x, _| x.broadcast_mul(&x.max_keepdim(2)?));
    check(None, None, |x, _| merged(&heads(x)?.rope(10.0).or_else(|_| heads(x))?));
    check(None, None, |x, _| Tensor::cat(&[x.narrow(2, 2, 2)?, x.narrow(2, 0, 2)?], 2));
    check(None, None, |x, _| x.transpose(0, 1)?.reshape((TOKENS, 4))?.unsqueeze(0));
    // A table of positions.
    check(None, None, |x, vb| x.broadcast_add(&vb.pp("wpe").get((8, 4), "weight")?.rows_of_positions(x.dim(1)?)?));
}

#[test]
fn attention() {
    check(None, None, |x, _| merged(&heads(x)?.causal_attention(&heads(x)?, &heads(x)?, 0.5)?));
    check(None, None, |x, _| merged(&heads(x)?.sliding_attention(&heads(x)?, &heads(x)?, 2, 0.5)?));
    check(Some("attention"), Some("attention"), |x, _| merged(&heads(x)?.attention(&heads(x)?, &heads(x)?, 0.5)?));
    check(Some("attention"), Some("attention"), |x, _| {
        let y = merged(&heads(x)?.causal_attention(&heads(x)?, &heads(x)?, 0.5)?)?;
        merged(&heads(&y)?.attend(&heads(&y)?, &heads(x)?, Attention::full(0.5))?)
    });
    // Attention that is composed of other operations.
    let attend = |scores: Tensor, x: &Tensor| merged(&scores.softmax_last_dim()?.matmul(&heads(x)?)?);
    let low = f32::NEG_INFINITY;
    check(Some("softmax_last_dim"), Some("matmul"), |x, _| attend(scores(x)?, x));
    check(None, Some("matmul"), |x, _| attend((scores(x)? * 0.5)?.masked_fill(&lower(TOKENS, x)?.eq(0u8)?, low)?, x));
    check(None, Some("matmul"), |x, _| {
        let (mask, scores) = (lower(TOKENS, x)?.broadcast_as((1, 2, TOKENS, TOKENS))?, scores(x)?);
        attend(mask.where_cond(&scores, &Tensor::full(-1e9f32, scores.shape().clone(), x.device())?)?, x)
    });
    check(None, Some("matmul"), |x, _| {
        let mask = ((lower(TOKENS, x)?.to_dtype(DType::F32)? - 1.0)? * 1e9)?;
        attend(scores(x)?.broadcast_add(&mask)?, x)
    });
    check(None, Some("matmul"), |x, _| {
        merged(&scores(x)?.broadcast_mul(&lower(TOKENS, x)?.to_dtype(DType::F32)?)?.matmul(&heads(x)?)?)
    });
    check(None, Some("matmul"), |x, _| {
        merged(&heads(x)?.masked_attention(&heads(x)?, &heads(x)?, &lower(TOKENS, x)?, 0.5)?)
    });
    check(Some("softmax_last_dim"), Some("matmul"), |x, _| attend(scores(x)?.masked_fill(&lower(TOKENS, x)?, low)?, x));
    // A mask that depends on the tokens, besides the causal one, or in its place.
    check(None, Some("matmul"), |x, _| {
        let padding = x.sum_keepdim(2)?.transpose(1, 2)?.unsqueeze(0)?;
        let scores = scores(x)?.masked_fill(&lower(TOKENS, x)?.eq(0u8)?, low)?;
        attend(scores.broadcast_add(&padding)?, x)
    });
    check(Some("softmax_last_dim ?"), Some("matmul"), |x, _| {
        let padding = x.sum_keepdim(2)?.transpose(1, 2)?.unsqueeze(0)?;
        attend(scores(x)?.broadcast_add(&padding.broadcast_mul(&lower(TOKENS, x)?.to_dtype(DType::F32)?)?)?, x)
    });
    // A mask that only the parameters know.
    check(Some("softmax_last_dim ?"), Some("matmul"), |x, vb| {
        attend(scores(x)?.broadcast_add(&vb.get((TOKENS, TOKENS), "mask")?)?, x)
    });
}

#[test]
fn operations_along_the_tokens() {
    let convolution = |padding: usize| {
        move |x: &Tensor, vb: &VarBuilder| {
            let config = Conv1dConfig { padding, ..Conv1dConfig::default() };
            let y = conv1d(4, 4, 3, config, vb.pp("conv"))?.forward(&x.transpose(1, 2)?)?;
            y.narrow(2, 0, TOKENS)?.transpose(1, 2)
        }
    };
    check(None, Some("widen"), convolution(2));
    check(Some("narrow"), Some("widen"), convolution(1));
    check(None, Some("linear"), |x, _| x.cumsum(1));
    // A recurrence over the tokens.
    check(None, Some("narrow"), |x, vb| {
        let layer = linear(4, 4, vb.pp("recurrence"))?;
        let mut states: Vec<Tensor> = Vec::new();
        for token in 0..TOKENS {
            let x = x.narrow(1, token, 1)?;
            states.push(match states.last() {
                Some(state) => layer.forward(&(x + state)?)?.tanh()?,
                None => x,
            });
        }
        Tensor::cat(&states, 1)
    });
    check(Some("sum"), Some("sum"), |x, _| x.broadcast_sub(&x.mean_keepdim(1)?));
    check(Some("softmax_last_dim"), Some("softmax_last_dim"), |x, _| x.t()?.softmax_last_dim()?.t());
    check(Some("narrow"), Some("narrow"), |x, _| x.roll(1, 1));
    check(None, Some("narrow"), |x, _| x.narrow(1, 0, TOKENS - 1)?.pad_with_zeros(1, 1, 0));
    // Zeros in the place of the token that a cyclic shift moves to the front.
    check(None, Some("narrow"), |x, _| {
        let first: Vec<u8> = (0..TOKENS).map(|token| u8::from(token == 0)).collect();
        let first = Tensor::new(&first[..], x.device())?.reshape((1, TOKENS, 1))?.broadcast_as(x.shape().clone())?;
        x.roll(1, 1)?.masked_fill(&first, 0f32)
    });
    check(None, Some("narrow"), |x, _| {
        let others: Vec<f32> = (0..TOKENS).map(|token| if token > 0 { 1.0 } else { 0.0 }).collect();
        x.roll(1, 1)?.broadcast_mul(&Tensor::new(&others[..], x.device())?.reshape((1, TOKENS, 1))?)
    });
    check(Some("narrow"), Some("narrow"), |x, _| x.narrow(1, 1, TOKENS - 1)?.pad_with_zeros(1, 0, 1));
    check(Some("embedding"), Some("embedding"), |x, _| {
        let reversed: Vec<u32> = (0..TOKENS as u32).rev().collect();
        x.index_select(&Tensor::new(&reversed[..], x.device())?, 1)
    });
    check(Some("narrow"), Some("narrow"), |x, _| x.broadcast_add(&x.i((.., TOKENS - 1..))?));
    check(None, Some("narrow"), |x, _| x.broadcast_add(&x.i((.., 0..1))?));
    check(Some("linear"), Some("linear"), |x, vb| linear(TOKENS, TOKENS, vb.pp("mix"))?.forward(&x.t()?)?.t());
    check(None, Some("matmul"), |x, _| {
        let mean = lower(TOKENS, x)?.to_dtype(DType::F32)?;
        let mean = mean.broadcast_div(&mean.sum_keepdim(D::Minus1)?)?;
        mean.unsqueeze(0)?.matmul(x)
    });
}

/// Dimensions with one index keep the tokens of this index.
#[test]
fn one_index_of_several_tokens() {
    let mean = |x: &Tensor| Tensor::full(1f32 / 6.0, (1, 1, TOKENS), x.device())?.matmul(x);
    let row = |x: &Tensor, token: u32| x.index_select(&Tensor::new(&[token], x.device())?, 1);
    check(Some("matmul"), Some("matmul"), |x, _| x.broadcast_add(&mean(x)?));
    check(Some("matmul"), Some("matmul"), |x, _| x.broadcast_add(&mean(x)?.reshape((1, 4))?.unsqueeze(1)?));
    check(Some("embedding"), Some("embedding"), |x, _| x.broadcast_add(&row(x, 5)?));
    check(None, Some("embedding"), |x, _| x.broadcast_add(&row(x, 0)?));
    check(None, Some("embedding"), |x, _| {
        Tensor::cat(&(0..TOKENS as u32).map(|token| row(x, token / 2)).collect::<Result<Vec<Tensor>>>()?, 1)
    });
    check(Some("embedding"), Some("embedding"), |x, _| {
        Tensor::cat(&(0..TOKENS as u32).map(|token| row(x, 5 - token)).collect::<Result<Vec<Tensor>>>()?, 1)
    });
}

/// Operations between a mask and the sum over the keys that make the hidden scores visible.
#[test]
fn masks_that_later_operations_undo() {
    let attend = |scores: Tensor, x: &Tensor| merged(&scores.softmax_last_dim()?.matmul(&heads(x)?)?);
    let masked = |x: &Tensor| scores(x)?.masked_fill(&lower(TOKENS, x)?.eq(0u8)?, -1e9f32);
    let weights = |x: &Tensor| masked(x)?.softmax_last_dim();
    check(None, Some("matmul"), |x, _| merged(&(weights(x)? * 0.9)?.matmul(&heads(x)?)?));
    check(Some("matmul ?"), Some("matmul"), |x, _| merged(&((weights(x)? * 0.9)? + (0.1 / 6.0))?.matmul(&heads(x)?)?));
    check(Some("matmul ?"), Some("matmul"), |x, _| merged(&weights(x)?.exp()?.matmul(&heads(x)?)?));
    check(None, Some("matmul"), |x, _| attend((masked(x)? * 0.5)?, x));
    check(None, Some("matmul"), |x, _| attend((masked(x)? + 1.0)?, x));
    check(Some("softmax_last_dim ?"), Some("matmul"), |x, _| attend((masked(x)? * -1.0)?, x));
    // The first row sees no key, so that its scores are equal.
    check(Some("softmax_last_dim ?"), Some("matmul"), |x, _| {
        let past = Tensor::triu2(TOKENS, DType::U8, x.device())?.eq(0u8)?;
        attend(scores(x)?.masked_fill(&past.eq(0u8)?, -1e9f32)?, x)
    });
    // The weights are the second factor.
    check(None, Some("matmul"), |x, _| merged(&heads(x)?.t()?.matmul(&weights(x)?.t()?)?.t()?));
    check(Some("matmul ?"), Some("matmul"), |x, _| merged(&heads(x)?.t()?.matmul(&weights(x)?)?.t()?));
    let scaled = |x: &Tensor, by: f32| masked(x)?.broadcast_mul(&Tensor::new(&[by], x.device())?);
    check(None, Some("matmul"), |x, _| attend(scaled(x, 2.0)?, x));
    check(Some("softmax_last_dim ?"), Some("matmul"), |x, _| attend(scaled(x, -2.0)?, x));
}

#[test]
fn attention_over_other_dimensions_than_the_tokens() {
    // Rows of channels: [1, 1, 4, tokens].
    let channels = |x: &Tensor| x.t()?.unsqueeze(1);
    let back = |y: &Tensor| y.squeeze(1)?.t();
    for is_causal in [false, true] {
        check(Some("attention"), Some("attention"), |x, _| {
            let x = channels(x)?;
            back(&if is_causal { x.causal_attention(&x, &x, 0.5)? } else { x.attention(&x, &x, 0.5)? })
        });
    }
    // Only the values have tokens, each in its own column.
    check(None, Some("attention"), |x, vb| {
        let [q, k] = ["q", "k"].map(|name| vb.get((1, 1, 4, 4), name));
        back(&q?.causal_attention(&k?, &channels(x)?, 0.5)?)
    });
    // Each token is a head of its own.
    let rows = |x: &Tensor| x.reshape((1, TOKENS, 2, 2));
    check(None, None, |x, _| rows(x)?.attention(&rows(x)?, &rows(x)?, 0.5)?.reshape((1, TOKENS, 4)));
    // The tokens are the head size that a rotation combines.
    check(Some("rope"), Some("rope"), |x, _| x.t()?.unsqueeze(1)?.rope(10.0)?.squeeze(1)?.t());
}

/// A learned mixture of tokens whose weights a constant mask hides.
#[test]
fn learned_mixtures_of_tokens() {
    let weights = |vb: &VarBuilder| vb.get((TOKENS, TOKENS), "mix");
    let mask = |x: &Tensor| lower(TOKENS, x)?.to_dtype(DType::F32);
    check(None, Some("matmul"), |x, vb| (weights(vb)? * mask(x)?)?.broadcast_matmul(x));
    check(None, Some("linear"), |x, vb| x.t()?.broadcast_matmul(&(weights(vb)? * mask(x)?)?.t()?)?.t());
    check(Some("matmul"), Some("matmul"), |x, vb| (weights(vb)? * mask(x)?)?.t()?.broadcast_matmul(x));
    check(None, Some("matmul"), |x, vb| {
        lower(TOKENS, x)?.where_cond(&weights(vb)?, &mask(x)?.zeros_like()?)?.broadcast_matmul(x)
    });
    check(None, Some("matmul"), |x, vb| {
        let hidden = weights(vb)?.masked_fill(&lower(TOKENS, x)?.eq(0u8)?, f32::NEG_INFINITY)?;
        hidden.softmax_last_dim()?.broadcast_matmul(x)
    });
    check(Some("matmul"), Some("matmul"), |x, vb| weights(vb)?.broadcast_matmul(x));
    check(Some("matmul ?"), Some("matmul"), |x, vb| weights(vb)?.softmax_last_dim()?.broadcast_matmul(x));
}

/// Logits that point at tokens.
#[test]
fn logits_of_tokens() {
    let pointers = |is_masked: bool| {
        let (graph, tokens, _) = recorded(TOKENS, false, |x, _| Ok(x.clone()));
        let vb = VarBuilder::new(&graph, DType::F32);
        let q = embedding(7, 4, vb.pp("pointers")).unwrap().forward(&tokens).unwrap();
        let mut logits = q.matmul(&q.t().unwrap()).unwrap();
        if is_masked {
            let hidden = lower(TOKENS, &q).unwrap().eq(0u8).unwrap();
            logits = logits.masked_fill(&hidden, f32::NEG_INFINITY).unwrap();
        }
        let graph = lock(&graph);
        causality(&graph, tokens.id(), logits.id())
    };
    assert!(matches!(pointers(false), Causality::NotCausal(culprit) if culprit.op == "matmul"));
    assert_eq!(pointers(true), Causality::Causal);
}

/// An operation of a user: the identity, or the reversed tokens.
#[derive(Debug)]
struct Own {
    is_elementwise: bool,
}

impl Op for Own {
    fn name(&self) -> &'static str {
        "own"
    }

    fn infer(&self, inputs: &[Spec]) -> std::result::Result<Vec<Spec>, String> {
        Ok(vec![inputs[0].clone()])
    }

    fn is_elementwise(&self) -> bool {
        self.is_elementwise
    }

    fn run(&self, _: &mut Args<'_>) {}

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        vec![args.input(0).clone()]
    }
}

#[test]
fn operations_of_a_user() {
    let own = |is_elementwise: bool| {
        move |x: &Tensor, _: &VarBuilder| Tensor::apply_op::<1>(Own { is_elementwise }, &[x]).map(|[y]| y)
    };
    check(None, None, own(true));
    check(Some("own ?"), Some("own"), own(false));
}

/// Tokens of a continued sequence have positions that differ from their indices.
#[test]
fn positions_of_continued_tokens() {
    let check = |expected: Option<&str>, f: fn(&Tensor, &VarBuilder) -> Result<Tensor>| {
        let (graph, tokens, logits) = recorded(TOKENS, true, f);
        let obstacle = cache_obstacle(&lock(&graph), tokens.id(), logits.id());
        assert_eq!(obstacle.map(|culprit| culprit.op).as_deref(), expected);
    };
    check(None, |x, vb| x.broadcast_add(&vb.pp("wpe").get((16, 4), "weight")?.rows_of_positions(x.dim(1)?)?));
    check(Some("add"), |x, vb| x.broadcast_add(&vb.pp("wpe").get((16, 4), "weight")?.narrow(0, 0, x.dim(1)?)?));
    check(Some("mul"), |x, _| {
        let positions: Vec<f32> = (0..x.dim(1)?).map(|i| i as f32).collect();
        x.broadcast_mul(&Tensor::new(&positions[..], x.device())?.unsqueeze(1)?)
    });
    check(None, |x, _| x.broadcast_add(&x.ones_like()?));
    check(None, |x, _| merged(&heads(x)?.causal_attention(&heads(x)?, &heads(x)?, 0.5)?));
    // Keys that depend on two tokens must not be cached.
    check(Some("narrow"), |x, _| {
        let y = x.narrow(1, 0, TOKENS - 1)?.pad_with_zeros(1, 1, 0)?;
        merged(&heads(x)?.causal_attention(&heads(&(x + y)?)?, &heads(x)?, 0.5)?)
    });
}

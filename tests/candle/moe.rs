//! An eager, dense Llama with experts. Every expert processes every token, and the results of experts that were not
//! chosen are multiplied by zero.
//!
//! Experts are chosen by sorting scores on the host. Each choice has a margin, which is the distance to the nearest
//! other choice. Choices are not continuous, so a comparison at another precision must check the margin.

use candle_core::{D, Module, Result, Tensor};
use candle_nn::{Linear, RmsNorm, VarBuilder};
use gapless::engine::nn;
use gapless::engine::ops::{DropPolicy, ExpertGroups};
use gapless::models::MoeConfig;

use super::llama::{Attention, Mlp, rms_norm};
use super::{ReferenceModel, WEIGHT, linear_no_bias};

/// The reference implementation of [`gapless::models::Moe`], without jitter.
pub struct Moe {
    embed_tokens: Tensor,
    blocks: Vec<Block>,
    norm: RmsNorm,
    lm_head: Linear,
}

/// The routing of a batch.
#[derive(Debug, Clone)]
pub struct Choice {
    /// Number of tokens that chose each expert, whether or not the expert processed them.
    pub load: Vec<f64>,
    /// Number of choices that exceeded the capacity; if experts choose tokens, the number of tokens that no expert
    /// chose.
    pub dropped: usize,
    /// The smallest relative difference between a score that was chosen and one that was not, or between a row that
    /// was kept and one that was dropped. Exact ties do not count, because the order decides them.
    pub margin: f64,
    /// Whether expert e processed token t of sequence s, at index (s × tokens + t) × experts + e.
    kept: Vec<bool>,
    /// Whether token t of sequence s chose expert e, at the same index as in `kept`.
    wanted: Vec<bool>,
}

impl Moe {
    pub fn new(config: &MoeConfig, vb: VarBuilder) -> Result<Self> {
        let (width, vocabulary) = (config.llama.width, config.llama.vocabulary);
        let model = vb.pp("model");
        let blocks = (0..config.llama.layers).map(|i| Block::new(config, i, model.pp("layers").pp(i)));
        Ok(Self {
            embed_tokens: model.pp("embed_tokens").get_with_hints((vocabulary, width), "weight", WEIGHT)?,
            blocks: blocks.collect::<Result<_>>()?,
            norm: rms_norm(width, config.llama.rms_norm_eps, model.pp("norm"))?,
            lm_head: linear_no_bias(width, vocabulary, vb.pp("lm_head"))?,
        })
    }

    /// Returns the head's input, and the results of each router.
    fn hidden(&self, tokens: &Tensor) -> Result<(Tensor, Vec<(String, Routed)>)> {
        let (b, t) = tokens.dims2()?;
        let mut x = self.embed_tokens.index_select(&tokens.flatten_all()?, 0)?.reshape((b, t, ()))?;
        let mut routed = Vec::new();
        for (i, block) in self.blocks.iter().enumerate() {
            let (y, router) = block.forward(&x)?;
            x = y;
            routed.extend(router.map(|router| (format!("model.layers.{i}.mlp.gate"), router)));
        }
        Ok((self.norm.forward_diff(&x)?, routed))
    }
}

impl Module for Moe {
    fn forward(&self, tokens: &Tensor) -> Result<Tensor> {
        self.lm_head.forward(&self.hidden(tokens)?.0)
    }
}

impl ReferenceModel for Moe {
    fn training_loss(&self, tokens: &Tensor) -> Result<Option<Tensor>> {
        let losses = self.hidden(tokens)?.1.into_iter().map(|(_, routed)| Ok(routed.loss));
        losses.reduce(|a, b| a? + b?).transpose()
    }

    fn choices(&self, tokens: &Tensor) -> Result<Vec<(String, Choice)>> {
        Ok(self.hidden(tokens)?.1.into_iter().map(|(name, routed)| (name, routed.choice)).collect())
    }
}

struct Block {
    input_layernorm: RmsNorm,
    self_attn: Attention,
    post_attention_layernorm: RmsNorm,
    feed_forward: FeedForward,
}

enum FeedForward {
    Dense(Box<Mlp>),
    Sparse(Box<Sparse>),
}

impl Block {
    fn new(config: &MoeConfig, index: usize, vb: VarBuilder) -> Result<Self> {
        let (width, eps) = (config.llama.width, config.llama.rms_norm_eps);
        let feed_forward = match config.dense_layers.contains(&index) {
            true => FeedForward::Dense(Box::new(Mlp::new(width, config.llama.hidden, vb.pp("mlp"))?)),
            false => FeedForward::Sparse(Box::new(Sparse::new(config, vb.pp("mlp"))?)),
        };
        Ok(Self {
            input_layernorm: rms_norm(width, eps, vb.pp("input_layernorm"))?,
            self_attn: Attention::new(&config.llama, vb.pp("self_attn"))?,
            post_attention_layernorm: rms_norm(width, eps, vb.pp("post_attention_layernorm"))?,
            feed_forward,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<(Tensor, Option<Routed>)> {
        let x = (x + self.self_attn.forward(&self.input_layernorm.forward_diff(x)?)?)?;
        let normed = self.post_attention_layernorm.forward_diff(&x)?;
        match &self.feed_forward {
            FeedForward::Dense(mlp) => Ok(((&x + mlp.forward(&normed)?)?, None)),
            FeedForward::Sparse(sparse) => {
                let (y, routed) = sparse.forward(&normed)?;
                Ok(((x + y)?, Some(routed)))
            }
        }
    }
}

struct Sparse {
    config: MoeConfig,
    gate: Linear,
    bias: Option<Tensor>,
    /// Shape [experts, hidden, width]; `down_proj` has shape [experts, width, hidden].
    gate_proj: Tensor,
    up_proj: Tensor,
    down_proj: Tensor,
    shared: Option<Mlp>,
    shared_gate: Option<Linear>,
}

/// The results of a router for a batch.
struct Routed {
    choice: Choice,
    loss: Tensor,
}

impl Sparse {
    fn new(config: &MoeConfig, vb: VarBuilder) -> Result<Self> {
        let (experts, width, hidden) = (config.router.experts, config.llama.width, config.expert_hidden);
        let biased = config.router.bias_rate > 0.0;
        let shared = config.shared_hidden;
        let of_experts = vb.pp("experts");
        Ok(Self {
            gate: linear_no_bias(width, experts, vb.pp("gate"))?,
            bias: biased.then(|| vb.pp("gate").get(experts, "e_score_correction_bias")).transpose()?,
            gate_proj: of_experts.get_with_hints((experts, hidden, width), "gate_proj", WEIGHT)?,
            up_proj: of_experts.get_with_hints((experts, hidden, width), "up_proj", WEIGHT)?,
            down_proj: of_experts.get_with_hints((experts, width, hidden), "down_proj", WEIGHT)?,
            shared: (shared > 0).then(|| Mlp::new(width, shared, vb.pp("shared_expert"))).transpose()?,
            shared_gate: (shared > 0 && config.shared_gate)
                .then(|| linear_no_bias(width, 1, vb.pp("shared_expert_gate")))
                .transpose()?,
            config: config.clone(),
        })
    }

    fn forward(&self, x: &Tensor) -> Result<(Tensor, Routed)> {
        let router = &self.config.router;
        let logits = self.gate.forward(x)?;
        let scores = match router.score {
            nn::Score::Softmax => candle_nn::ops::softmax(&logits, D::Minus1)?,
            nn::Score::Sigmoid => (logits.neg()?.exp()? + 1.0)?.recip()?,
        };
        let choice = self.choose(&scores)?;
        let mask = |chosen: &[bool]| {
            let values: Vec<f64> = chosen.iter().map(|&chosen| f64::from(u8::from(chosen))).collect();
            Tensor::from_vec(values, scores.shape(), scores.device())?.to_dtype(scores.dtype())
        };
        let mut weights = (&scores * mask(&choice.wanted)?)?;
        if router.renormalise && router.choice == nn::Choice::Tokens {
            weights = weights.broadcast_div(&weights.sum_keepdim(2)?)?;
        }
        let weights = ((weights * mask(&choice.kept)?)? * router.scale)?;
        let mut y = x.zeros_like()?;
        for expert in 0..router.experts {
            let linear = |x: &Tensor, weights: &Tensor| Linear::new(weights.get(expert)?, None).forward(x);
            let hidden = (linear(x, &self.gate_proj)?.silu()? * linear(x, &self.up_proj)?)?;
            let weight = weights.narrow(2, expert, 1)?;
            y = (y + linear(&hidden, &self.down_proj)?.broadcast_mul(&weight)?)?;
        }
        if let Some(shared) = &self.shared {
            let mut own = shared.forward(x)?;
            if let Some(gate) = &self.shared_gate {
                own = own.broadcast_mul(&(gate.forward(x)?.neg()?.exp()? + 1.0)?.recip()?)?;
            }
            y = (y + own)?;
        }
        let loss = self.loss(&logits, &scores, &mask(&choice.wanted)?)?;
        Ok((y, Routed { choice, loss }))
    }

    /// Returns the balance loss α·Σ f·P (DeepSeek-V3, equations 17 to 20), averaged over sequences, plus the z-loss
    /// (ST-MoE, equation 5).
    fn loss(&self, logits: &Tensor, scores: &Tensor, wanted: &Tensor) -> Result<Tensor> {
        let router = &self.config.router;
        let shares = scores.broadcast_div(&scores.sum_keepdim(2)?)?;
        let balance = match router.choice {
            nn::Choice::Tokens => {
                let f = (wanted.mean(1)? * (router.experts as f64 / router.top_k as f64))?;
                ((f * shares.mean(1)?)?.sum(1)?.mean_all()? * router.balance_loss)?
            }
            nn::Choice::Experts => scores.zeros_like()?.sum_all()?,
        };
        let z = logits.exp()?.sum(2)?.log()?.sqr()?.mean_all()?;
        balance + (z * router.z_loss)?
    }

    fn choose(&self, scores: &Tensor) -> Result<Choice> {
        let router = &self.config.router;
        let experts = router.experts;
        let scores: Vec<Vec<Vec<f64>>> = scores.to_dtype(candle_core::DType::F64)?.to_vec3()?;
        let bias = match &self.bias {
            Some(bias) => bias.to_dtype(candle_core::DType::F64)?.to_vec1()?,
            None => vec![0.0; experts],
        };
        let mut choice = Choice {
            load: vec![0.0; experts],
            dropped: 0,
            margin: f64::INFINITY,
            kept: Vec::new(),
            wanted: Vec::new(),
        };
        for sequence in scores {
            let tokens = sequence.len();
            let mut wanted = vec![true; tokens * experts];
            if router.choice == nn::Choice::Tokens {
                for (scores, wanted) in sequence.iter().zip(wanted.chunks_mut(experts)) {
                    let biased: Vec<f64> = scores.iter().zip(&bias).map(|(score, bias)| score + bias).collect();
                    choice.of_token(&biased, router.top_k, router.groups, wanted);
                }
            }
            let mut kept = wanted.clone();
            if let Some(capacity) = router.capacity {
                let even = (tokens * router.top_k) as f64 / experts as f64;
                let most = (capacity.factor * even).ceil() as usize;
                for expert in 0..experts {
                    let wanting: Vec<usize> = (0..tokens).filter(|t| wanted[t * experts + expert]).collect();
                    let worth = |&token: &usize| match capacity.drop {
                        DropPolicy::Last => 0.0,
                        DropPolicy::Lightest => sequence[token][expert],
                    };
                    for token in choice.best(wanting, worth, most).1 {
                        kept[token * experts + expert] = false;
                    }
                }
            }
            choice.dropped += match router.choice {
                nn::Choice::Tokens => wanted.iter().zip(&kept).filter(|(wanted, kept)| wanted != kept).count(),
                nn::Choice::Experts => kept.chunks(experts).filter(|flags| !flags.contains(&true)).count(),
            };
            choice.wanted.extend(wanted);
            choice.kept.extend(kept);
        }
        for wanted in choice.wanted.chunks(experts) {
            choice.load.iter_mut().zip(wanted).for_each(|(load, &wanted)| *load += f64::from(u8::from(wanted)));
        }
        Ok(choice)
    }
}

impl Choice {
    /// Marks the experts that a token chooses in `wanted`.
    fn of_token(&mut self, scores: &[f64], top_k: usize, groups: Option<ExpertGroups>, wanted: &mut [bool]) {
        let mut allowed: Vec<usize> = (0..scores.len()).collect();
        if let Some(ExpertGroups { count, limit }) = groups {
            let groups: Vec<Vec<usize>> = allowed.chunks(scores.len() / count).map(<[usize]>::to_vec).collect();
            let worth = |group: &Vec<usize>| {
                let mut scores: Vec<f64> = group.iter().map(|&expert| scores[expert]).collect();
                scores.sort_by(|a, b| b.total_cmp(a));
                scores.iter().take(2).sum()
            };
            allowed = self.best(groups, worth, limit).0.concat();
            allowed.sort_unstable();
        }
        let (chosen, _) = self.best(allowed, |&expert| scores[expert], top_k);
        wanted.fill(false);
        chosen.into_iter().for_each(|expert| wanted[expert] = true);
    }

    /// Returns the `count` best elements, and the others. Of equal elements, earlier ones count as better.
    fn best<T>(&mut self, mut items: Vec<T>, worth: impl Fn(&T) -> f64, count: usize) -> (Vec<T>, Vec<T>) {
        items.sort_by(|a, b| worth(b).total_cmp(&worth(a)));
        let others = items.split_off(count.min(items.len()));
        if let (Some(last), Some(next)) = (items.last(), others.first()) {
            let margin = (worth(last) - worth(next)) / worth(last).abs();
            if margin > 0.0 {
                self.margin = self.margin.min(margin);
            }
        }
        (items, others)
    }
}

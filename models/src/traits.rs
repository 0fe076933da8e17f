//! The traits of a decoder that only some families have. Without them, a decoder is a Llama.

use std::collections::BTreeMap;

use gapless_engine::{Error, Result};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::limits::{Checked, MAX_WIDTH};

/// The traits of a decoder that only some families have. The default is a decoder without them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Traits {
    /// The kind of the norms.
    pub norm: NormKind,
    /// The layers that compute queries, keys and values.
    pub fused_qkv: FusedQkv,
    /// True if gate and up projection are one layer, whose output is the gate followed by the other (Phi-3, GLM-4).
    pub fused_gate_up: bool,
    /// True if the feed-forward layer is down(activation(up)), without a gate (GPT-NeoX, StarCoder2).
    pub ungated: bool,
    /// The width of the part of each head that is rotated. The default is the whole head.
    pub rotated_size: Option<usize>,
    /// True if the rotation pairs adjacent elements. If false, paired elements are half the rotated part apart.
    pub neighbours: bool,
    /// The layers without rotary positions (NoPE, Yang et al., arXiv 2501.18795).
    pub unrotated_layers: Vec<usize>,
    /// A rotary base that grows with the length of the sequence.
    pub dynamic_rope: Option<DynamicRope>,
    /// Rotary frequencies with a divisor each.
    pub long_rope: Option<LongRope>,
    /// The growth of queries with their position.
    pub query_growth: Option<QueryGrowth>,
    /// True if a layer with `sliding_window` divides the tokens into chunks of this width, and a token attends to its own
    /// chunk (Llama 4).
    pub chunked: bool,
    /// The greatest absolute value of queries, keys and values before the rotation; greater ones are clamped (OLMoE,
    /// arXiv 2409.02060).
    pub qkv_clip: Option<f64>,
    /// True if each head has a sink: a trained score that takes part in the softmax but has no value (gpt-oss).
    pub sinks: bool,
    /// True if the output of the attention is multiplied by the sigmoid of a projection of its input (Qiu et al., arXiv
    /// 2505.06708).
    pub gated_attention: bool,
    /// True if the rotation turns by negative angles (nanochat).
    pub backwards: bool,
    /// True if the head has a bias (Phi, ERNIE 4.5 with experts).
    pub head_bias: bool,
    /// True if the embedding is normalized, by a norm without a weight (nanochat).
    pub normed_embedding: bool,
    /// The factor of the embedding, besides that of `scaled_embedding` (Granite).
    pub embedding_scale: f64,
    /// The factor of the output of each attention and each feed-forward layer (Granite).
    pub residual_scale: f64,
    /// The factor of the logits, before a bias of the head is added (Cohere, Granite).
    pub logit_scale: f64,
    /// Other names of the modules in parameters' names: `self_attn` = "attention".
    pub names: BTreeMap<String, String>,
}

/// The modules that have the same parent, and must therefore have different names.
const SIBLINGS: [&[&str]; 5] = [
    &["model", "lm_head"],
    &["embed_tokens", "layers", "norm"],
    &[
        "self_attn",
        "mlp",
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ],
    &[
        "q_proj",
        "k_proj",
        "v_proj",
        "qkv_proj",
        "o_proj",
        "gate_proj",
        "q_norm",
        "k_norm",
        "q_a_proj",
        "q_a_layernorm",
        "q_b_proj",
        "kv_a_proj_with_mqa",
        "kv_a_layernorm",
        "kv_b_proj",
    ],
    &[
        "gate_proj",
        "up_proj",
        "gate_up_proj",
        "down_proj",
        "act_fn",
        "gate",
        "experts",
        "shared_expert",
        "shared_expert_gate",
    ],
];

/// The kind of a norm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum NormKind {
    /// Root-mean-square norm.
    #[default]
    Rms,
    /// Layer norm.
    Layer,
    /// Layer norm without a bias (Cohere).
    LayerNoBias,
    /// Layer norm without a bias and without a weight (OLMo).
    LayerNoWeight,
    /// Root-mean-square norm without a weight (nanochat).
    RmsNoWeight,
}

/// The layout of queries, keys and values in the output of a linear layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum FusedQkv {
    /// Each has a layer of its own.
    #[default]
    Separate,
    /// One layer: the queries of all heads, then the keys, then the values (Phi-3).
    Stacked,
    /// One layer: for each head its query, its key and its value (GPT-NeoX).
    ByHead,
}

/// A rotary base that grows with the length L of the sequence if L is above `positions`: it is multiplied by (factor ·
/// L / positions − factor + 1)^(d / (d − 2)), where d is the rotated width (dynamic NTK scaling, as in transformers). In
/// generation, the base of each token is that of the text up to this token. transformers has the same base for the tokens
/// that it generates, but rotates a whole prompt with the base of the prompt's length.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DynamicRope {
    /// The factor of the growth.
    pub factor: f64,
    /// The number of tokens up to which the base is constant.
    pub positions: usize,
}

/// Rotary frequencies with a divisor each (LongRoPE, Ding et al., arXiv 2402.13753). The sequence length that decides
/// between the divisors is the number of tokens of a sequence in training, and the greatest number of tokens of a text in
/// generation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct LongRope {
    /// The divisors for sequences of up to `original` tokens, one per frequency.
    pub short: Vec<f64>,
    /// The divisors for longer sequences.
    pub long: Vec<f64>,
    /// The sequence length of the original training, in tokens.
    pub original: usize,
    /// The factor of cosines and sines.
    pub amplitude: f64,
}

/// The growth of queries with their position p: they are multiplied by 1 + rate · ln(1 + ⌊p / length⌋) (Nakanishi, arXiv
/// 2501.19399, in the form of Ministral 3 and Llama 4).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct QueryGrowth {
    /// The factor of the logarithm.
    pub rate: f64,
    /// The number of positions with the same factor.
    pub length: usize,
    /// True if only the layers without rotary positions have growing queries, and the first token has position 1 (Llama 4).
    /// If false, all layers have them, and the first token has position 0.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unrotated: bool,
}

impl Default for Traits {
    /// No trait.
    fn default() -> Self {
        Self {
            norm: NormKind::Rms,
            fused_qkv: FusedQkv::Separate,
            fused_gate_up: false,
            ungated: false,
            rotated_size: None,
            neighbours: false,
            unrotated_layers: Vec::new(),
            dynamic_rope: None,
            long_rope: None,
            query_growth: None,
            chunked: false,
            qkv_clip: None,
            sinks: false,
            gated_attention: false,
            backwards: false,
            head_bias: false,
            normed_embedding: false,
            embedding_scale: 1.0,
            residual_scale: 1.0,
            logit_scale: 1.0,
            names: BTreeMap::new(),
        }
    }
}

impl Traits {
    /// True if there is no trait.
    pub(crate) fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// True if there is a trait of attention.
    pub(crate) fn has_attention(&self) -> bool {
        let Self { norm, fused_gate_up, ungated, head_bias, normed_embedding, .. } = *self;
        let Self { embedding_scale, residual_scale, logit_scale, ref names, .. } = *self;
        let names = names.clone();
        let others = Self {
            norm,
            fused_gate_up,
            ungated,
            head_bias,
            normed_embedding,
            embedding_scale,
            residual_scale,
            logit_scale,
            names,
            ..Self::default()
        };
        *self != others
    }

    /// The name of a module in parameters' names.
    pub(crate) fn name<'a>(&'a self, module: &'a str) -> &'a str {
        self.names.get(module).map_or(module, String::as_str)
    }

    /// Checks the traits of a model whose heads have `head_size` elements.
    pub(crate) fn check(&self, head_size: usize) -> Result<()> {
        let numbers = [
            ("embedding_scale", Some(self.embedding_scale)),
            ("residual_scale", Some(self.residual_scale)),
            ("logit_scale", Some(self.logit_scale)),
            ("qkv_clip", self.qkv_clip),
            ("dynamic_rope.factor", self.dynamic_rope.as_ref().map(|it| it.factor)),
            ("long_rope.amplitude", self.long_rope.as_ref().map(|it| it.amplitude)),
            ("query_growth.rate", self.query_growth.as_ref().map(|it| it.rate)),
        ];
        let numbers = numbers.into_iter().filter_map(|(name, number)| Some((name, number?)));
        let checked = numbers.fold(Checked::default(), |checked, (name, number)| checked.positive(name, number));
        let rotated = self.rotated_size.unwrap_or(head_size);
        checked
            .extent("rotated_size", self.rotated_size.unwrap_or(1), head_size.clamp(1, MAX_WIDTH))
            .extent("dynamic_rope.positions", self.dynamic_rope.as_ref().map_or(1, |it| it.positions), usize::MAX)
            .extent("query_growth.length", self.query_growth.as_ref().map_or(1, |it| it.length), usize::MAX)
            .done()?;
        let fail = |why: String, remedy| Err(Error::config("model", why, remedy));
        if self.backwards && self.neighbours {
            return fail("backwards rotations pair no neighbours".to_owned(), "leave one of the traits out");
        }
        if let Some(LongRope { short, long, .. }) = &self.long_rope
            && [short, long]
                .iter()
                .any(|all| all.len() != rotated / 2 || all.iter().any(|it| it.is_nan() || *it <= 0.0))
        {
            let why = format!("long_rope has {} and {} divisors", short.len(), long.len());
            return fail(why, "give half as many as rotated elements in a head, each above 0");
        }
        if self.dynamic_rope.is_some() && self.long_rope.is_some() {
            return fail("both dynamic_rope and long_rope are set".to_owned(), "set one of them");
        }
        for modules in SIBLINGS {
            let clash = modules.iter().enumerate().find_map(|(i, one)| {
                let other = modules[..i].iter().find(|other| self.name(other) == self.name(one))?;
                Some(format!("names gives {other} and {one} the same name, {:?}", self.name(one)))
            });
            if let Some(why) = clash {
                return fail(why, "give each a name of its own; modules of one name would share their parameters");
            }
        }
        if self.dynamic_rope.is_some() && rotated <= 2 {
            return fail(format!("{rotated} rotated elements are too few for dynamic_rope"), "rotate at least 4");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use gapless_engine::ops::RopeScaling;

    use super::*;
    use crate::LlamaConfig;

    /// Settings of which one would have no effect, and modules that would share parameters, are refused.
    #[test]
    fn settings_that_exclude_each_other_are_refused() {
        let dynamic_rope = Some(DynamicRope { factor: 2.0, positions: 8 });
        let divisors = LlamaConfig::default().width / LlamaConfig::default().heads / 2;
        let (short, long) = (vec![1.0; divisors], vec![2.0; divisors]);
        let long_rope = Some(LongRope { short, long, original: 8, amplitude: 1.0 });
        let config =
            |rope_scaling, traits| LlamaConfig { rope_scaling, traits: Box::new(traits), ..Default::default() };
        let scaled = RopeScaling::Linear { factor: 2.0 };
        let dynamic = Traits { dynamic_rope: dynamic_rope.clone(), ..Traits::default() };
        let long = Traits { long_rope: long_rope.clone(), ..Traits::default() };
        let both = Traits { dynamic_rope, long_rope, ..Traits::default() };
        let named = |names: &[(&str, &str)]| {
            let names = names.iter().map(|(one, own)| ((*one).to_owned(), (*own).to_owned())).collect();
            Traits { names, ..Traits::default() }
        };
        for allowed in [
            config(RopeScaling::None, dynamic.clone()),
            config(RopeScaling::None, long.clone()),
            config(scaled, Traits::default()),
            config(scaled, named(&[("q_proj", "k_proj"), ("k_proj", "q_proj"), ("mlp", "q_proj")])),
        ] {
            allowed.check().unwrap();
        }
        for (refused, part) in [
            (config(scaled, dynamic), "rope_scaling"),
            (config(scaled, long), "rope_scaling"),
            (config(RopeScaling::None, both), "long_rope"),
            (config(RopeScaling::None, named(&[("q_proj", "proj"), ("k_proj", "proj")])), "q_proj and k_proj"),
            (config(RopeScaling::None, named(&[("up_proj", "down_proj")])), "up_proj and down_proj"),
        ] {
            let error = refused.check().unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
    }
}

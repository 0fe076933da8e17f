//! Settings of rotary positions. A file has either `rope_parameters`, or `rope_theta` and optionally `rope_scaling`.

use gapless_engine::ops::RopeScaling;
use serde_json::{Value, json};

use super::family::Family;
use super::fields::Fields;
use crate::{DynamicRope, LlamaConfig, LongRope, QueryGrowth};

/// Reads the rotary base, scaling and rotated width into `config`.
pub(super) fn take(fields: &mut Fields, config: &mut LlamaConfig, family: &Family, head_size: usize) {
    let positions = fields.count("max_position_embeddings", Some(family.positions), 1..=1 << 40) as f64;
    let original = fields.optional_positive("original_max_position_embeddings");
    let original = original.or(family.original_positions.map(|it| it as f64));
    config.rope_theta = fields.positive("rope_theta", Some(config.rope_theta));
    let (old, new) = (fields.object("rope_scaling"), fields.object("rope_parameters"));
    if let (Some(_), Some(_)) = (&old, &new) {
        fields.unsupported("rope_scaling", &"given along with rope_parameters".into(), "one of the two");
    }
    // If layers with a window have a base of their own, `rope_parameters` has options for each type of layer.
    let given = match new {
        Some(both) if config.window_rope_theta.is_some() => by_layer_type(fields, config, both),
        new => new.or(old),
    };
    // `partial_rotary_factor` may be here or among the options of the scaling.
    let mut partial = fields.optional_positive("partial_rotary_factor");
    let mut given = given;
    if let Some(scaling) = &mut given {
        config.rope_theta = scaling.positive("rope_theta", Some(config.rope_theta));
        partial = scaling.optional_positive("partial_rotary_factor").or(partial);
    }
    let rotated = rotated_size(fields, family, partial, head_size);
    config.traits.rotated_size = (rotated != head_size).then_some(rotated);
    if let Some(mut scaling) = given {
        self::scaling(&mut scaling, config, family, &Lengths { rotated, positions, original });
        fields.problems.extend(scaling.problems());
    }
}

/// Sets the options of the rotary positions if the file has none.
pub(super) fn default(fields: &mut Fields, options: impl FnOnce() -> Value) {
    if fields.peek("rope_parameters").or(fields.peek("rope_scaling")).is_none() {
        fields.set("rope_parameters", options());
    }
}

/// Replaces the rotary positions of Hunyuan, whose type `dynamic` with an option `alpha` means a base that is multiplied
/// by alpha^(d / (d − 2)) for every length.
pub(super) fn fixed_alpha(fields: &mut Fields) {
    let name = if fields.peek("rope_parameters").is_some() { "rope_parameters" } else { "rope_scaling" };
    let number = |field: &str| fields.peek(field).and_then(Value::as_f64);
    let Some(scaling) = fields.peek(name) else { return };
    let Some(alpha) = scaling["alpha"].as_f64().filter(|alpha| *alpha > 0.0) else { return };
    if !["rope_type", "type"].iter().any(|kind| scaling[kind] == "dynamic") {
        return;
    }
    let width = number("hidden_size").unwrap_or(0.0) / number("num_attention_heads").unwrap_or(1.0);
    let size = number("head_dim").unwrap_or(width);
    let theta = scaling["rope_theta"].as_f64().or(number("rope_theta")).unwrap_or(Family::LLAMA.rope_theta);
    let theta = theta * alpha.powf(size / (size - 2.0));
    fields.set(name, json!({ "rope_type": "default", "rope_theta": theta }));
}

/// Returns the width of the rotated part of a head.
fn rotated_size(fields: &mut Fields, family: &Family, partial: Option<f64>, head_size: usize) -> usize {
    let Some(default) = family.partial else {
        if let Some(partial) = partial.filter(|partial| *partial != 1.0) {
            fields.unsupported("partial_rotary_factor", &partial.into(), "1 for this family");
        }
        return head_size;
    };
    let partial = partial.unwrap_or(default);
    let size = (head_size as f64 * partial) as usize;
    if size == 0 || size > head_size || !size.is_multiple_of(2) {
        let expected = format!("a share of head_dim, {head_size}, that is even and not 0");
        fields.wrong("partial_rotary_factor", &partial.into(), &expected);
        return head_size;
    }
    size
}

/// The extents on which frequencies depend.
struct Lengths {
    /// The rotated width of a head.
    rotated: usize,
    /// The greatest sequence length for which the model was trained.
    positions: f64,
    /// The sequence length of the original training, if the file has it beside the options of the scaling. It takes
    /// precedence.
    original: Option<f64>,
}

impl Lengths {
    fn original(&self, fields: &mut Fields) -> f64 {
        let inner = fields.positive("original_max_position_embeddings", Some(self.positions));
        self.original.unwrap_or(inner)
    }
}

/// Reads the rotary settings of the layers with a sliding window. Returns the options of the layers with full
/// attention, or `None` if there are none.
fn by_layer_type(fields: &mut Fields, config: &mut LlamaConfig, mut both: Fields) -> Option<Fields> {
    if let Some(mut sliding) = both.object("sliding_attention") {
        config.window_rope_theta = Some(sliding.positive("rope_theta", config.window_rope_theta));
        sliding.one_of("rope_type", &["default"]);
        fields.problems.extend(sliding.problems());
    }
    let full = both.object("full_attention");
    fields.problems.extend(both.problems());
    full
}

fn scaling(fields: &mut Fields, config: &mut LlamaConfig, family: &Family, lengths: &Lengths) {
    // `finetuned` only records how the weights were trained.
    fields.ignore(&["finetuned"]);
    // `type` is an older name of `rope_type`. If a file has both, their values agree.
    let older = fields.has("rope_type").then(|| fields.take("type")).is_none();
    let kinds = ["default", "linear", "llama3", "yarn", "dynamic", "longrope", "su"];
    let kind = fields.one_of(if older { "type" } else { "rope_type" }, &kinds);
    if family.growing_queries {
        fields.ignore(&["max_position_embeddings"]);
        let length = fields.peek("original_max_position_embeddings").and_then(Value::as_f64).or(lengths.original);
        let length = length.unwrap_or(lengths.positions) as usize;
        let rate = fields.optional_positive("llama_4_scaling_beta");
        config.traits.query_growth = rate.map(|rate| QueryGrowth { rate, length, unrotated: false });
    }
    config.rope_scaling = match kind {
        "linear" => {
            fields.ignore(&["original_max_position_embeddings"]);
            RopeScaling::Linear { factor: fields.positive("factor", None) }
        }
        "llama3" => {
            let factor = fields.positive("factor", None);
            let (low, high) = (fields.positive("low_freq_factor", None), fields.positive("high_freq_factor", None));
            if high < low {
                fields.wrong("high_freq_factor", &high.into(), "at least low_freq_factor");
            }
            RopeScaling::Llama3 { factor, low, high, original: lengths.original(fields) }
        }
        "yarn" => yarn(fields, config.rope_theta, lengths),
        "dynamic" => {
            fields.ignore(&["original_max_position_embeddings"]);
            let (factor, positions) = (fields.positive("factor", None), lengths.positions as usize);
            config.traits.dynamic_rope = Some(DynamicRope { factor, positions });
            RopeScaling::None
        }
        "longrope" | "su" => {
            config.traits.long_rope = Some(long_rope(fields, lengths));
            RopeScaling::None
        }
        // The kind `default` does not scale, so options of the other kinds have no effect.
        _ => {
            fields.ignore(&["factor", "original_max_position_embeddings"]);
            RopeScaling::None
        }
    };
}

/// Reads the divisors of LongRoPE, one per frequency.
fn long_rope(fields: &mut Fields, lengths: &Lengths) -> LongRope {
    let mut divisors = |field: &str| {
        let found = fields.positives(field);
        if !found.is_empty() && found.len() != lengths.rotated / 2 {
            let expected = format!("a list of {} numbers, half the rotated width", lengths.rotated / 2);
            fields.wrong(field, &format!("a list of {}", found.len()).into(), &expected);
        }
        found
    };
    let (short, long) = (divisors("short_factor"), divisors("long_factor"));
    let original = lengths.original(fields);
    let factor = fields.optional_positive("factor").unwrap_or(lengths.positions / original);
    let usual = if factor > 1.0 { (1.0 + factor.ln() / original.ln()).sqrt() } else { 1.0 };
    let amplitude = fields.optional_positive("attention_factor").unwrap_or(usual);
    LongRope { short, long, original: original as usize, amplitude }
}

fn yarn(fields: &mut Fields, theta: f64, lengths: &Lengths) -> RopeScaling {
    let factor = fields.positive("factor", None);
    let original = lengths.original(fields);
    let turns = (fields.positive("beta_fast", Some(32.0)), fields.positive("beta_slow", Some(1.0)));
    let whole = fields.flag("truncate", true);
    let mut scaling = RopeScaling::yarn(factor, turns, original, theta, lengths.rotated, whole);
    let given = fields.has("attention_factor").then(|| fields.positive("attention_factor", Some(0.0)));
    // DeepSeek has two options for the amplitude, which is the factor for `mscale` divided by the factor for
    // `mscale_all_dim`.
    let parts = fields.take("mscale").zip(fields.take("mscale_all_dim"));
    let parts =
        parts.and_then(|(one, all)| Some((one.as_f64()?, all.as_f64()?))).filter(|(a, b)| *a != 0.0 && *b != 0.0);
    let amplitude_of = |scale: f64| if factor > 1.0 { 0.1 * scale * factor.ln() + 1.0 } else { 1.0 };
    if let RopeScaling::Yarn { amplitude, .. } = &mut scaling {
        match (given.filter(|given| *given > 0.0), parts) {
            (Some(given), _) => *amplitude = given,
            (None, Some((one, all))) => *amplitude = amplitude_of(one) / amplitude_of(all),
            (None, None) => {}
        }
    }
    scaling
}

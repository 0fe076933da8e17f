//! Settings of rotary positions. A file has either `rope_parameters`, or `rope_theta` and optionally `rope_scaling`.

use gapless_engine::ops::RopeScaling;

use super::fields::Fields;
use crate::LlamaConfig;

/// Reads the rotary base and scaling into `config`. The scaling depends on `head_size`, the width of a head.
pub(super) fn take(fields: &mut Fields, config: &mut LlamaConfig, head_size: usize) {
    // `partial_rotary_factor` may be here or among the options of the scaling.
    fields.require("partial_rotary_factor", 1.0);
    let positions = fields.count("max_position_embeddings", Some(2048), 1..=1 << 40) as f64;
    config.rope_theta = fields.positive("rope_theta", Some(config.rope_theta));
    let (old, new) = (fields.object("rope_scaling"), fields.object("rope_parameters"));
    if let (Some(_), Some(_)) = (&old, &new) {
        fields.unsupported("rope_scaling", &"given along with rope_parameters".into(), "one of the two");
    }
    let mut given = new.or(old);
    if config.window_rope_theta.is_some() && given.as_ref().is_some_and(|given| given.has("full_attention")) {
        given = given.and_then(|given| by_layer_type(fields, config, given));
    }
    if let Some(mut scaling) = given {
        config.rope_theta = scaling.positive("rope_theta", Some(config.rope_theta));
        scaling.require("partial_rotary_factor", 1.0);
        config.rope_scaling = self::scaling(&mut scaling, config.rope_theta, head_size, positions);
        fields.problems.extend(scaling.problems());
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

fn scaling(fields: &mut Fields, theta: f64, head_size: usize, positions: f64) -> RopeScaling {
    // `finetuned` only records how the weights were trained.
    fields.ignore(&["finetuned"]);
    // `type` is an older name of `rope_type`. If a file has both, their values agree.
    let older = fields.has("rope_type").then(|| fields.take("type")).is_none();
    let kind = fields.one_of(if older { "type" } else { "rope_type" }, &["default", "linear", "llama3", "yarn"]);
    match kind {
        "linear" => {
            fields.ignore(&["original_max_position_embeddings"]);
            RopeScaling::Linear { factor: fields.positive("factor", None) }
        }
        "llama3" => {
            let factor = fields.positive("factor", None);
            let (low, high) = (fields.positive("low_freq_factor", None), fields.positive("high_freq_factor", None));
            if high <= low {
                fields.wrong("high_freq_factor", &high.into(), "above low_freq_factor");
            }
            let original = fields.positive("original_max_position_embeddings", Some(positions));
            RopeScaling::Llama3 { factor, low, high, original }
        }
        "yarn" => yarn(fields, theta, head_size, positions),
        // The kind `default` does not scale, so options of the other kinds have no effect.
        _ => {
            fields.ignore(&["factor", "original_max_position_embeddings"]);
            RopeScaling::None
        }
    }
}

fn yarn(fields: &mut Fields, theta: f64, head_size: usize, positions: f64) -> RopeScaling {
    let factor = fields.positive("factor", None);
    let original = fields.positive("original_max_position_embeddings", Some(positions));
    let turns = (fields.positive("beta_fast", Some(32.0)), fields.positive("beta_slow", Some(1.0)));
    let whole = fields.flag("truncate", true);
    let mut scaling = RopeScaling::yarn(factor, turns, original, theta, head_size, whole);
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

//! Sliding windows of attention: the layers that have one, and the width of the windows.
//!
//! Each family reads its own options. An option that transformers does not read for a family has no effect here either.

use serde_json::Value;

use super::fields::Fields;

/// The rule that decides which layers have a sliding window. The window's width is the option `sliding_window`.
#[derive(Debug, Clone, Copy)]
pub(super) enum WindowedLayers {
    /// No layer.
    Never,
    /// All layers. The value is the window's default width; `None` means no window by default.
    All(Option<usize>),
    /// All layers, if `use_sliding_window` is on.
    AllIfUsed,
    /// All layers. If the file has `layer_types`, they take precedence.
    Typed,
    /// The layers without rotary positions, if `use_sliding_window` is on. If the file has `layer_types`, they take
    /// precedence.
    Unrotated,
    /// The layers from `max_window_layers` on, with this default. If the file has `layer_types`, they take precedence.
    From(usize),
    /// The layers from `max_window_layers` on, if `use_sliding_window` is on. If the file has `layer_types`, they take
    /// precedence.
    Last,
    /// Every second layer below `max_window_layers`, if `use_sliding_window` is on. If the file has `layer_types`, they
    /// take precedence.
    Alternate,
    /// The layers with rotary positions, in chunks of `attention_chunk_size` tokens. If the file has `layer_types`, they
    /// take precedence.
    Chunked,
    /// All layers except every `every`th. If the file has `layer_types`, they take precedence.
    AllBut { every: usize },
}

/// Returns the width of the windows in tokens and the layers with full attention. If no layer has a window, returns
/// `None` and an empty list. `unrotated` are the layers without rotary positions.
pub(super) fn take(
    fields: &mut Fields,
    window: WindowedLayers,
    layers: usize,
    unrotated: &[usize],
) -> (Option<usize>, Vec<usize>) {
    if let WindowedLayers::Never = window {
        never(fields);
        return (None, Vec::new());
    }
    let mut limit = 0;
    match window {
        WindowedLayers::Last | WindowedLayers::Alternate => {
            limit = fields.count("max_window_layers", Some(28), 0..=1 << 40)
        }
        WindowedLayers::From(default) => limit = fields.count("max_window_layers", Some(default), 0..=1 << 40),
        _ => fields.ignore(&["max_window_layers"]),
    }
    let is_used = match window {
        WindowedLayers::AllIfUsed | WindowedLayers::Last | WindowedLayers::Alternate | WindowedLayers::Unrotated => {
            fields.flag("use_sliding_window", false)
        }
        _ => {
            fields.ignore(&["use_sliding_window"]);
            true
        }
    };
    let size = match window {
        _ if !is_used => {
            fields.ignore(&["sliding_window"]);
            None
        }
        WindowedLayers::All(default) => width(fields, "sliding_window", default),
        WindowedLayers::Unrotated => width(fields, "sliding_window", None),
        WindowedLayers::Chunked => width(fields, "attention_chunk_size", Some(8192)),
        _ => width(fields, "sliding_window", Some(4096)),
    };
    let types = match window {
        WindowedLayers::All(_) | WindowedLayers::AllIfUsed => {
            fields.ignore(&["layer_types"]);
            None
        }
        WindowedLayers::Chunked => layer_types(fields, layers, "chunked_attention"),
        _ => layer_types(fields, layers, SLIDING),
    };
    let slides = |layer: &usize| match (&types, window) {
        (Some(types), _) => types[*layer],
        (None, WindowedLayers::Last | WindowedLayers::From(_)) => size.is_some() && *layer >= limit,
        (None, WindowedLayers::Unrotated) => size.is_some() && unrotated.contains(layer),
        (None, WindowedLayers::Chunked) => size.is_some() && !unrotated.contains(layer),
        (None, WindowedLayers::Alternate) => is_used && layer.is_multiple_of(2) && *layer < limit,
        (None, WindowedLayers::AllBut { every }) => !(layer + 1).is_multiple_of(every),
        (None, _) => size.is_some(),
    };
    let (sliding, full): (Vec<usize>, Vec<usize>) = (0..layers).partition(slides);
    if sliding.is_empty() {
        return (None, Vec::new());
    }
    if size.is_none() {
        let supported = "a number of tokens (with use_sliding_window, where the family has it), as layers of the type \
                         sliding_attention need";
        fields.unsupported("sliding_window", &Value::Null, supported);
    }
    (size, full)
}

/// Reads the window options of a family without sliding windows. An option that switches windows on is recorded as a
/// problem.
fn never(fields: &mut Fields) {
    if fields.peek("use_sliding_window") == Some(&Value::Bool(false)) {
        fields.ignore(&["sliding_window"]);
    }
    fields.ignore(&["max_window_layers"]);
    fields.require_off(&["sliding_window", "use_sliding_window"]);
    if let Some(types) = fields.take("layer_types")
        && types.as_array().is_none_or(|types| types.iter().any(|one| one != FULL))
    {
        fields.unsupported("layer_types", &types, FULL);
    }
}

/// Returns the width of the windows in tokens. If the option is missing, returns `default`. If the option is null,
/// there are no windows, and the result is `None`.
fn width(fields: &mut Fields, option: &str, default: Option<usize>) -> Option<usize> {
    if !fields.has(option) {
        return default;
    }
    fields.peek(option)?;
    Some(fields.count(option, None, 1..=1 << 40))
}

/// Types of layers in `layer_types`.
pub(super) const FULL: &str = "full_attention";
pub(super) const SLIDING: &str = "sliding_attention";

/// Returns one entry per layer, which is true if `layer_types` has the type `windowed` for the layer. Returns `None` if the
/// file has no `layer_types`, or if the value is invalid. An invalid value is recorded as a problem.
fn layer_types(fields: &mut Fields, layers: usize, windowed: &str) -> Option<Vec<bool>> {
    let types = fields.take("layer_types")?;
    let all: Option<Vec<&str>> = types.as_array().and_then(|types| types.iter().map(Value::as_str).collect());
    match all {
        Some(all) if all.iter().all(|one| [FULL, windowed].contains(one)) => {
            if all.len() == layers {
                return Some(all.iter().map(|one| *one == windowed).collect());
            }
            fields.wrong("layer_types", &types, &format!("one for each of {layers} layers"));
        }
        _ => fields.unsupported("layer_types", &types, &[FULL, windowed].join(", ")),
    }
    None
}

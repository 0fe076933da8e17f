//! The location of a model's parameters in its weight files.
//!
//! In: the parameters of a configuration, and the names in the files. Out: for every parameter, the ranges of stored
//! tensors that make it up, in order. Never: the values of elements.
//!
//! ```text
//! model.layers.0.mlp.experts.gate_proj [E, I, H]  ◀── ….experts.0.gate_proj.weight [I, H], ….experts.1.…, …
//!                                             or  ◀── ….experts.gate_up_proj [E, 2I, H], rows 0..I of each expert
//! ```

use std::collections::BTreeSet;
use std::ops::Range;

use super::config::Config;
use super::{HEAD, gpt2};

/// A parameter as a concatenation of pieces of stored tensors.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct ParameterLayout {
    pub parameter: String,
    pub pieces: Vec<StoredRange>,
}

/// A range of the elements of a stored tensor.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct StoredRange {
    pub stored: String,
    /// Shape of the whole stored tensor.
    pub shape: Vec<usize>,
    /// The range of elements.
    pub elements: Range<usize>,
    /// True if the stored tensor is [in, out] for a parameter [out, in].
    pub transposed: bool,
}

/// Returns the location of every parameter. The stored names decide between the possible layouts.
pub(super) fn layout(config: &Config, stored: &BTreeSet<&str>) -> Vec<ParameterLayout> {
    let prefix = if stored.iter().any(|name| name.starts_with("transformer.")) { "transformer." } else { "" };
    let place = |(parameter, shape): (&str, &[usize])| {
        let pieces = match (config.is_gpt2(), expert_part(parameter)) {
            (true, _) => {
                let (name, transposed) = gpt2::stored(parameter, prefix);
                let shape: Vec<usize> = if transposed { shape.iter().rev().copied().collect() } else { shape.to_vec() };
                vec![StoredRange { transposed, ..whole(name, shape) }]
            }
            (false, Some((layer, part))) => experts(layer, part, shape, stored),
            (false, None) => vec![whole(dense(parameter, stored), shape.to_vec())],
        };
        ParameterLayout { parameter: parameter.to_owned(), pieces }
    };
    config.parameters().map(place).collect()
}

fn whole(stored: String, shape: Vec<usize>) -> StoredRange {
    StoredRange { stored, elements: 0..shape.iter().product(), shape, transposed: false }
}

/// Mixtral's name for the module that contains the experts.
pub(super) const MIXTRAL: &str = "block_sparse_moe";

fn dense(parameter: &str, stored: &BTreeSet<&str>) -> String {
    let other = parameter.replace(".mlp.gate.", &format!(".{MIXTRAL}.gate."));
    if stored.contains(other.as_str()) { other } else { parameter.to_owned() }
}

/// Splits the name of a parameter that holds the weights of all experts into the path of the layer and the projection.
/// Returns `None` for any other parameter.
fn expert_part(parameter: &str) -> Option<(&str, &str)> {
    parameter.split_once(".mlp.experts.")
}

fn experts(layer: &str, part: &str, shape: &[usize], stored: &BTreeSet<&str>) -> Vec<StoredRange> {
    let (count, each) = (shape[0], shape[1] * shape[2]);
    let fused = |name: &str| format!("{layer}.mlp.experts.{name}");
    if stored.contains(fused("gate_up_proj").as_str()) {
        if part == "down_proj" {
            return vec![whole(fused(part), shape.to_vec())];
        }
        // For each expert, the rows of the gate projection are stored before the rows of the up projection.
        let first = if part == "gate_proj" { 0 } else { each };
        let piece_of = |expert: usize| {
            let begin = 2 * each * expert + first;
            let both = vec![count, 2 * shape[1], shape[2]];
            StoredRange { elements: begin..begin + each, ..whole(fused("gate_up_proj"), both) }
        };
        return (0..count).map(piece_of).collect();
    }
    let mixtral = format!("{layer}.{MIXTRAL}.");
    let is_mixtral = stored.range(mixtral.as_str()..).next().is_some_and(|name| name.starts_with(&mixtral));
    let name = |expert: usize| match (is_mixtral, part) {
        (false, _) => fused(&format!("{expert}.{part}.weight")),
        (true, "gate_proj") => format!("{mixtral}experts.{expert}.w1.weight"),
        (true, "down_proj") => format!("{mixtral}experts.{expert}.w2.weight"),
        (true, _) => format!("{mixtral}experts.{expert}.w3.weight"),
    };
    (0..count).map(|expert| whole(name(expert), shape[1..].to_vec())).collect()
}

/// True if a stored tensor is not part of the model but is common in published files, and may therefore be skipped: a
/// causal mask, a table of frequencies, a tied head, or a layer that predicts further tokens.
pub(super) fn is_known_buffer(config: &Config, name: &str, shape: &[usize]) -> bool {
    let is_mask = name.ends_with(".attn.bias") && shape.len() == 4 && shape[..2] == [1, 1];
    config.is_unread(name)
        || (config.is_gpt2() && (is_mask || name.ends_with(".attn.masked_bias")))
        || (!config.is_gpt2() && name.ends_with(".rotary_emb.inv_freq"))
        || (config.tied_to().is_some() && name == HEAD)
}

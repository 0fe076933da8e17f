//! The location of a model's parameters in its weight files.
//!
//! In: the parameters of a configuration, and the names in the files. Out: for every parameter, the ranges of stored
//! tensors that make it up, in order. Never: the values of elements.
//!
//! ```text
//! model.layers.0.mlp.experts.gate_proj [E, I, H]  ◀── ….experts.0.gate_proj.weight [I, H], ….experts.1.…, …
//!                                             or  ◀── ….experts.gate_up_proj [E, 2I, H], rows 0..I of each expert
//! ```

use std::collections::BTreeMap;
use std::ops::Range;

use super::config::Config;
use super::gpt2;
use crate::GateActivation;
use crate::decoder::XIELU_BETA;

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
    /// The range of elements that holds the piece.
    pub elements: Range<usize>,
    /// The elements of the range that are those of the piece. `None` if all are, in their order.
    pub columns: Option<Columns>,
}

/// Columns of a range of elements, which is a matrix.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Columns {
    /// The number of all columns of the matrix.
    pub all: usize,
    pub first: usize,
    /// The difference between the numbers of neighbouring columns.
    pub step: usize,
    pub count: usize,
    /// True if the parameter has the columns as its rows.
    pub transposed: bool,
}

impl StoredRange {
    /// Number of elements of the piece.
    pub fn len(&self) -> usize {
        self.columns.map_or(self.elements.len(), |columns| self.elements.len() / columns.all * columns.count)
    }

    /// Returns, for each element of the piece in the order of the parameter, its place in the range of elements.
    pub fn places(&self) -> impl Iterator<Item = usize> {
        let all =
            Columns { all: self.elements.len(), first: 0, step: 1, count: self.elements.len(), transposed: false };
        let Columns { all, first, step, count, transposed } = self.columns.unwrap_or(all);
        let rows = self.elements.len() / all.max(1);
        (0..rows * count).map(move |i| {
            let (row, column) = if transposed { (i % rows, i / rows) } else { (i / count, i % count) };
            row * all + first + column * step
        })
    }
}

/// The names of the tensors of a layer with routed experts, under the path of the block. `{}` is the number of an expert.
/// Names without it are those of tensors with the weights of all experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ExpertNames {
    router: &'static str,
    bias: &'static str,
    /// Gate, up and down projection. If gate and up have the same name, the tensor has for each expert the rows of the gate
    /// before those of the up projection.
    projections: [&'static str; 3],
    /// The layout of tensors with the weights of all experts.
    fused: Fused,
    /// True if the shape of the bias is [1, experts].
    has_bias_row: bool,
}

/// The layout of a tensor with the weights of all experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fused {
    /// [experts, out, in], the gate's rows before those of the up projection.
    Rows,
    /// [experts, in, out], with a column of the gate before each column of the up projection, and biases [experts, out] of
    /// the same order.
    Interleaved,
    /// [experts, in, out], the gate's columns before those of the up projection.
    Columns,
}

/// The names in most files.
pub(super) const NUMBERED: ExpertNames = ExpertNames {
    router: "mlp.gate.weight",
    bias: "mlp.gate.e_score_correction_bias",
    projections: [
        "mlp.experts.{}.gate_proj.weight",
        "mlp.experts.{}.up_proj.weight",
        "mlp.experts.{}.down_proj.weight",
    ],
    fused: Fused::Rows,
    has_bias_row: false,
};
const FUSED: ExpertNames = ExpertNames {
    projections: ["mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    ..NUMBERED
};
pub(super) const MIXTRAL: ExpertNames = ExpertNames {
    router: "block_sparse_moe.gate.weight",
    bias: "block_sparse_moe.e_score_correction_bias",
    projections: [
        "block_sparse_moe.experts.{}.w1.weight",
        "block_sparse_moe.experts.{}.w3.weight",
        "block_sparse_moe.experts.{}.w2.weight",
    ],
    fused: Fused::Rows,
    has_bias_row: false,
};
pub(super) const GPT_OSS: ExpertNames = ExpertNames { fused: Fused::Interleaved, ..FUSED };
pub(super) const LLAMA4: ExpertNames = ExpertNames {
    projections: [
        "feed_forward.experts.gate_up_proj",
        "feed_forward.experts.gate_up_proj",
        "feed_forward.experts.down_proj",
    ],
    fused: Fused::Columns,
    ..NUMBERED
};
pub(super) const GRANITE: ExpertNames = ExpertNames {
    router: "block_sparse_moe.router.layer.weight",
    projections: [
        "block_sparse_moe.input_linear.weight",
        "block_sparse_moe.input_linear.weight",
        "block_sparse_moe.output_linear.weight",
    ],
    ..NUMBERED
};

pub(super) const AFMOE: ExpertNames =
    ExpertNames { router: "mlp.router.gate.weight", bias: "mlp.expert_bias", ..NUMBERED };
pub(super) const ERNIE: ExpertNames =
    ExpertNames { bias: "mlp.moe_statics.e_score_correction_bias", has_bias_row: true, ..NUMBERED };
pub(super) const EXAONE: ExpertNames = ExpertNames { bias: "mlp.e_score_correction_bias", ..NUMBERED };
pub(super) const HUNYUAN: ExpertNames = ExpertNames { router: "mlp.gate.wg.weight", ..NUMBERED };

/// Returns the location of every parameter. The stored names, with the shapes of their tensors, decide between the possible
/// layouts. If they do not, the layout is that in which transformers writes the family.
pub(super) fn layout(config: &Config, stored: &BTreeMap<&str, &[usize]>) -> Vec<ParameterLayout> {
    let prefix = if stored.keys().any(|name| name.starts_with("transformer.")) { "transformer." } else { "" };
    let found = [config.expert_names(), NUMBERED, FUSED, MIXTRAL, GRANITE].into_iter().find(|names| {
        let down = names.projections[2].replace("{}", "0");
        stored.keys().any(|name| name.ends_with(&down))
    });
    let mut names = found.unwrap_or(config.expert_names());
    // The published files of Qwen3-VL have the weights of all experts transposed.
    let is_transposed = |(parameter, shape): (&str, &[usize])| {
        parameter.ends_with(".experts.down_proj")
            && stored
                .get(&*config.stored(parameter.to_owned()))
                .is_some_and(|found| shape != *found && found.iter().eq([shape[0], shape[2], shape[1]].iter()))
    };
    if config.is_multimodal() && config.parameters().any(is_transposed) {
        names.fused = Fused::Columns;
    }
    let place = |(parameter, shape): (&str, &[usize])| {
        let mut pieces = match (config.is_gpt2(), parameter.split_once(".experts.")) {
            (true, _) => {
                let (name, transposed) = gpt2::stored(parameter, prefix);
                let shape: Vec<usize> = if transposed { shape.iter().rev().copied().collect() } else { shape.to_vec() };
                let all = shape[shape.len() - 1];
                let columns = Columns { all, first: 0, step: 1, count: all, transposed };
                vec![StoredRange { columns: transposed.then_some(columns), ..whole(name, shape) }]
            }
            (false, Some((layer, part))) => {
                let (block, _) = layer.rsplit_once('.').expect("experts are a part of a block");
                experts(&names, block, part, shape)
            }
            (false, None) => match parameter.strip_suffix(".norms.weight") {
                // StableLM stores the norms of heads one by one.
                Some(norms) => {
                    let row = |head| whole(format!("{norms}.norms.{head}.weight"), shape[1..].to_vec());
                    (0..shape[0]).map(row).collect()
                }
                None => vec![dense(&names, parameter, shape)],
            },
        };
        for piece in &mut pieces {
            piece.stored = config.stored(std::mem::take(&mut piece.stored));
        }
        ParameterLayout { parameter: parameter.to_owned(), pieces }
    };
    config.parameters().map(place).collect()
}

fn whole(stored: String, shape: Vec<usize>) -> StoredRange {
    StoredRange { stored, elements: 0..shape.iter().product(), shape, columns: None }
}

/// Returns the place of a parameter that does not have the weights of all experts.
fn dense(names: &ExpertNames, parameter: &str, shape: &[usize]) -> StoredRange {
    if let Some(block) = parameter.strip_suffix(NUMBERED.router) {
        return whole(format!("{block}{}", names.router), shape.to_vec());
    }
    match parameter.strip_suffix(NUMBERED.bias) {
        Some(block) if names.has_bias_row => whole(format!("{block}{}", names.bias), vec![1, shape[0]]),
        Some(block) => whole(format!("{block}{}", names.bias), shape.to_vec()),
        None => whole(parameter.to_owned(), shape.to_vec()),
    }
}

fn experts(names: &ExpertNames, block: &str, part: &str, shape: &[usize]) -> Vec<StoredRange> {
    let (part, bias) = part.strip_suffix("_bias").map_or((part, ""), |part| (part, "_bias"));
    let part = ["gate_proj", "up_proj", "down_proj"].iter().position(|name| *name == part).expect("one of the three");
    let name = format!("{block}.{}{bias}", names.projections[part]);
    if name.contains("{}") {
        let name = |expert: usize| name.replace("{}", &expert.to_string());
        return (0..shape[0]).map(|expert| whole(name(expert), shape[1..].to_vec())).collect();
    }
    // The extents of an expert: outputs, and inputs of a weight. Gate and up projection share a tensor.
    let (count, outputs, inputs) = (shape[0], shape[1], shape.get(2).copied());
    let share = if part == 2 { 1 } else { 2 };
    let (all, each) = (share * outputs, outputs * inputs.unwrap_or(1));
    let stored = match (names.fused, inputs) {
        (_, None) => vec![count, all],
        (Fused::Rows, Some(inputs)) => vec![count, all, inputs],
        (Fused::Interleaved | Fused::Columns, Some(inputs)) => vec![count, inputs, all],
    };
    let piece_of = |expert: usize| {
        let piece = whole(name.clone(), stored.clone());
        let begin = expert * share * each;
        match names.fused {
            Fused::Rows => {
                let begin = begin + part % share * each;
                StoredRange { elements: begin..begin + each, ..piece }
            }
            Fused::Interleaved | Fused::Columns => {
                let (first, step) = match names.fused {
                    Fused::Columns => (part % share * outputs, 1),
                    _ => (part % share, share),
                };
                let columns = Columns { all, first, step, count: outputs, transposed: inputs.is_some() };
                StoredRange { elements: begin..begin + share * each, columns: Some(columns), ..piece }
            }
        }
    };
    (0..count).map(piece_of).collect()
}

/// True if a stored tensor is not part of the model but is common in published files, and may therefore be skipped: a
/// causal mask, a table of frequencies, a tied head, a layer that predicts further tokens, or another part of a multimodal
/// model.
pub(super) fn is_known_buffer(config: &Config, name: &str, shape: &[usize]) -> bool {
    let is_mask = name.ends_with(".bias") && shape.len() == 4 && shape[..2] == [1, 1];
    config.is_unread(name)
        || config.text_part().is_some_and(|part| part.is_of_other(name))
        || is_mask
        || [".attn.masked_bias", ".attention.masked_bias"].iter().any(|end| name.ends_with(end))
        || (!config.is_gpt2() && name.ends_with(".rotary_emb.inv_freq"))
        || (shape.iter().product::<usize>() == 1 && xielu_constant(config, name).is_some())
        || (config.tied_to().is_some() && name == config.head())
}

/// Returns the value that a stored constant of xIELU, β or ε, must have. Returns `None` for any other tensor.
pub(super) fn xielu_constant(config: &Config, name: &str) -> Option<f64> {
    let has_xielu = config.architecture().llama().is_some_and(|llama| llama.activation == GateActivation::Xielu);
    let constants = [(".act_fn.beta", XIELU_BETA), (".act_fn.eps", -1e-6)];
    let found = constants.iter().find(|(end, _)| name.ends_with(end));
    found.filter(|_| has_xielu).map(|(_, value)| *value)
}

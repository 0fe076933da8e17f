//! Quantized storage of the frozen weights of linear layers (QLoRA).

use gapless_kernels::Spec;
use gapless_kernels::cpu::quantized::{Format, Rounding, dynamic_map};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Init, VarBuilder};
use crate::error::Result;
use crate::graph::lock;
use crate::ops::{QuantizedWeight, WeightSquares};
use crate::tensor::Tensor;

/// Quantized storage of the frozen weights of linear layers, as in bitsandbytes (QLoRA, arXiv 2305.14314). The weights are
/// dequantized for each product, one tile after another or, on a GPU, one weight after another. The head, embeddings, experts
/// and routers are not quantized.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Quantize {
    /// The format of the weights.
    pub format: QuantizedFormat,
    /// Whether the scales of `nf4` are quantized to eight bits, too (double quantization).
    pub double: bool,
    /// The type to which dequantized elements of `nf4` are rounded. In a run file, the default is the type of the model
    /// folder's weights, as in bitsandbytes.
    pub rounding: Option<QuantizedRounding>,
    /// The layers that are not quantized: the beginnings or ends of their paths, as in `llm_int8_skip_modules`.
    pub skip: Vec<String>,
}

/// A format of quantized weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum QuantizedFormat {
    /// Four-bit NormalFloat, with a scale for each block of 64 elements: 4.127 bits per element with double quantization,
    /// 4.5 bits without.
    #[default]
    Nf4,
    /// Eight-bit integers, with a scale for each row (the weights of LLM.int8(), arXiv 2208.07339). Activations are not
    /// quantized.
    Int8,
}

/// A type to which dequantized elements are rounded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum QuantizedRounding {
    /// No rounding.
    F32,
    /// bf16.
    Bf16,
    /// f16.
    F16,
}

impl Default for Quantize {
    fn default() -> Self {
        Self { format: QuantizedFormat::Nf4, double: true, rounding: None, skip: Vec::new() }
    }
}

impl Quantize {
    /// Returns the storage of a weight [out, in].
    pub fn weight(&self, outputs: usize, inputs: usize) -> QuantizedWeight {
        let (format, rounding) = match self.format {
            QuantizedFormat::Int8 => (Format::Int8, Rounding::None),
            QuantizedFormat::Nf4 => {
                let rounding = match self.rounding {
                    None | Some(QuantizedRounding::F32) => Rounding::None,
                    Some(QuantizedRounding::Bf16) => Rounding::Bf16,
                    Some(QuantizedRounding::F16) => Rounding::F16,
                };
                (Format::Nf4 { is_double: self.double }, rounding)
            }
        };
        QuantizedWeight { outputs, inputs, format, rounding, blocks: None }
    }

    /// True if the layer with this path is not quantized.
    pub fn skips(&self, layer: &str) -> bool {
        self.skip.iter().any(|name| layer.starts_with(name) || layer.ends_with(name))
    }

    /// Returns the names of the tensors in which the weight `parameter` is stored, in the order of
    /// [`QuantizedWeight::stored`].
    pub fn stored_names(&self, parameter: &str) -> Vec<String> {
        let ends: &[&str] = match (self.format, self.double) {
            (QuantizedFormat::Nf4, true) => &["", ".absmax", ".nested_absmax", ".nested_offset"],
            (QuantizedFormat::Nf4, false) | (QuantizedFormat::Int8, _) => &["", ".absmax"],
        };
        ends.iter().map(|end| format!("{parameter}{end}")).collect()
    }
}

/// The weight of a linear layer.
#[derive(Debug, Clone)]
pub(super) enum Weight {
    /// A parameter [out, in].
    Plain(Tensor),
    /// A quantized weight, and the tensors in which it is stored.
    Quantized(QuantizedWeight, Vec<Tensor>),
}

impl Weight {
    /// Declares the parameter `weight` of the layer under the builder's path, or the tensors in which it is stored.
    pub fn declare((in_dim, out_dim): (usize, usize), init: Init, vb: &VarBuilder) -> Result<Self> {
        let Some(quantize) = vb.quantize() else {
            return Ok(Self::Plain(vb.get_with_hints((out_dim, in_dim), "weight", init)?));
        };
        let weight = quantize.weight(out_dim, in_dim);
        let names = quantize.stored_names("weight");
        let declare = |((spec, name), init): ((&Spec, &String), Init)| {
            vb.to_dtype(spec.dtype).get_with_hints(spec.shape.clone(), name, init)
        };
        let stored = weight.stored();
        let stored = stored.iter().zip(&names).zip(initial(&weight, init)).map(declare).collect::<Result<Vec<_>>>()?;
        let mut graph = lock(vb.device());
        for (index, tensor) in stored.iter().enumerate() {
            graph.mark_packed(tensor.id(), if index == 0 { in_dim * out_dim } else { 0 });
        }
        drop(graph);
        Ok(Self::Quantized(weight, stored))
    }

    /// Returns x·Wᵀ + b.
    pub fn forward(&self, xs: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        match self {
            Self::Plain(weight) => xs.linear(weight, bias),
            Self::Quantized(weight, stored) => xs.quantized_linear(*weight, stored, bias),
        }
    }

    /// Returns the norms `[out]` of the rows of W + scale·B·A.
    pub fn norm(&self, a: &Tensor, b: &Tensor, scale: f64) -> Result<Tensor> {
        let (quantized, stored) = match self {
            Self::Plain(weight) => (None, std::slice::from_ref(weight)),
            Self::Quantized(weight, stored) => (Some(*weight), &stored[..]),
        };
        let inputs: Vec<&Tensor> = [a, b].into_iter().chain(stored).collect();
        let [squares] = Tensor::apply_op(WeightSquares { scale, quantized }, &inputs)?;
        squares.sqrt()?.to_dtype(a.dtype())
    }
}

/// Returns the initial values of the tensors in which a weight is stored: random codes, and scales with which the elements
/// have about the standard deviation of `init`. A model that is read from a folder does not keep them.
fn initial(weight: &QuantizedWeight, init: Init) -> Vec<Init> {
    let stdev = match init {
        Init::Randn { stdev, .. } => stdev,
        Init::Const(_) | Init::Uniform { .. } => 0.02,
    };
    let codes = Init::Uniform { lo: 0.0, up: 256.0 };
    // The root mean square of random codes: 0.58 · 127 for int8, and 0.52 for nf4.
    match weight.format {
        Format::Int8 => vec![codes, Init::Const(stdev / 0.58)],
        Format::Nf4 { is_double: false } => vec![codes, Init::Const(stdev / 0.52)],
        Format::Nf4 { is_double: true } => {
            let zero = dynamic_map().iter().position(|&value| value == 0.0).expect("the map has 0");
            vec![codes, Init::Const(zero as f64), Init::Const(0.0), Init::Const(stdev / 0.52)]
        }
    }
}

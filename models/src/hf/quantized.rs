//! Quantized weights in a folder: the formats of bitsandbytes, FP8 in blocks (DeepSeek-V3), and MXFP4 (gpt-oss).
//!
//! In: the `quantization_config` of a config.json, and tensors of codes and scales. Out: dequantized elements or, for a
//! trainer whose weights are stored in the same format, the codes and scales themselves. Never: a quantized weight that is
//! written to a folder.
//!
//! | method | tensors of a weight `W` [out, in] |
//! |---|---|
//! | bitsandbytes, 4 bits | `W` u8 [⌈out·in/2⌉, 1], `W.absmax`, `W.quant_map`, `W.quant_state.bitsandbytes__nf4`, and with double quantization `W.nested_absmax` and `W.nested_quant_map` |
//! | bitsandbytes, 8 bits | `W` i8 [out, in], and beside it `SCB` f32 `[out]` |
//! | fp8 | `W` F8_E4M3 [out, in], `W_scale_inv` f32 [⌈out/128⌉, ⌈in/128⌉] |
//! | mxfp4 | for the experts' weights `W` [experts, in, out]: `W_blocks` u8 [experts, out, in/32, 16], `W_scales` u8 [experts, out, in/32] |

use std::collections::BTreeSet;
use std::ops::Range;

use gapless_engine::Trainer;
use gapless_engine::kernels::cpu::quantized::{
    self, BLOCK, Matrix, NESTED_BLOCK, NF4, OwnedScales, Quantized, dynamic_map,
};
use gapless_engine::nn::{Quantize, QuantizedFormat, QuantizedRounding};
use gapless_engine::ops::QuantizedWeight;
use half::bf16;
use serde_json::Value;

use super::error::{HfError, Result, WeightProblem};
use super::fields::Fields;
use super::folder::Folder;
use super::layout::{ParameterLayout, StoredRange};
use super::tensors::Dtype;

/// The `quantization_config` of a config.json.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Quantization {
    BitsAndBytes(Quantize),
    /// FP8 with one scale for each block of so many rows and columns.
    Fp8([usize; 2]),
    Mxfp4,
}

/// Options of a `quantization_config` that do not affect the weights' values.
const PASSED_OVER: [&str; 10] = [
    "_load_in_4bit",
    "_load_in_8bit",
    "activation_scheme",
    "bnb_4bit_compute_dtype",
    "dequantize",
    "fmt",
    "llm_int8_enable_fp32_cpu_offload",
    "llm_int8_threshold",
    "modules_to_not_convert",
    "scale_fmt",
];

/// Reads `quantization_config`, and the type of the weights that are not quantized.
pub(super) fn take(fields: &mut Fields) -> (Option<Quantization>, QuantizedRounding) {
    let dtype = fields.peek("dtype").or_else(|| fields.peek("torch_dtype")).and_then(Value::as_str);
    let rounding = match dtype {
        Some("bfloat16") => QuantizedRounding::Bf16,
        Some("float16") => QuantizedRounding::F16,
        _ => QuantizedRounding::F32,
    };
    let Some(mut of) = fields.object("quantization_config") else { return (None, rounding) };
    let method = of.one_of("quant_method", &["bitsandbytes", "fp8", "mxfp4"]);
    let taken = match method {
        "fp8" => {
            let block = of.take("weight_block_size").unwrap_or_else(|| serde_json::json!([128, 128]));
            let extents = block.as_array().and_then(|block| {
                block.iter().map(|extent| usize::try_from(extent.as_u64()?).ok()).collect::<Option<Vec<_>>>()
            });
            match extents.as_deref() {
                Some(&[rows, columns]) if rows > 0 && columns > 0 => Quantization::Fp8([rows, columns]),
                _ => {
                    of.wrong("weight_block_size", &block, "two numbers above 0");
                    Quantization::Fp8([1, 1])
                }
            }
        }
        "mxfp4" => Quantization::Mxfp4,
        _ => Quantization::BitsAndBytes(bitsandbytes(&mut of, rounding)),
    };
    of.ignore(&PASSED_OVER);
    fields.problems.extend(of.problems());
    (Some(taken), rounding)
}

fn bitsandbytes(of: &mut Fields, rounding: QuantizedRounding) -> Quantize {
    let (eight, four) = (of.flag("load_in_8bit", false), of.flag("load_in_4bit", false));
    if eight == four {
        of.wrong("load_in_4bit", &four.into(), "the opposite of load_in_8bit");
    }
    let format = if eight { QuantizedFormat::Int8 } else { QuantizedFormat::Nf4 };
    let kind = of.take("bnb_4bit_quant_type");
    if let Some(kind) = kind.filter(|kind| four && kind != "nf4") {
        of.unsupported("bnb_4bit_quant_type", &kind, "nf4");
    }
    of.require("bnb_4bit_quant_storage", "uint8");
    of.require("llm_int8_has_fp16_weight", false);
    let double = of.flag("bnb_4bit_use_double_quant", false);
    let skip = of.take("llm_int8_skip_modules").unwrap_or_default();
    let names: Option<Vec<String>> = match &skip {
        Value::Null => Some(Vec::new()),
        _ => skip.as_array().and_then(|all| all.iter().map(|name| Some(name.as_str()?.to_owned())).collect()),
    };
    let skip = names.unwrap_or_else(|| {
        of.wrong("llm_int8_skip_modules", &skip, "a list of names of modules");
        Vec::new()
    });
    Quantize { format, double: double || eight, rounding: Some(rounding), skip }
}

/// A tensor that belongs to a quantized weight: its name, its type, and its shape, or `None` if it may have any shape.
type Part = (String, Dtype, Option<Vec<usize>>);

/// The format in which a weight of a folder is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Packing {
    Nf4 { is_double: bool },
    Int8,
    Fp8([usize; 2]),
    Mxfp4,
}

impl Folder {
    /// Returns the format in which a stored weight is quantized, or `None` if it is not.
    pub(super) fn packing(&self, piece: &StoredRange) -> Option<Packing> {
        let name = &piece.stored;
        let dtype = |name: &str| self.find(name).map(|(_, info)| info.dtype);
        match self.config.quantization()? {
            Quantization::BitsAndBytes(_) => match dtype(name)? {
                Dtype::I8 => Some(Packing::Int8),
                Dtype::U8 => Some(Packing::Nf4 { is_double: dtype(&format!("{name}.nested_absmax")).is_some() }),
                _ => None,
            },
            Quantization::Fp8(block) => (dtype(name)? == Dtype::F8_E4M3).then_some(Packing::Fp8(*block)),
            Quantization::Mxfp4 => dtype(&format!("{name}_blocks")).map(|_| Packing::Mxfp4),
        }
    }

    /// Checks the tensors of a quantized weight, and adds their names to `used`.
    pub(super) fn compare_packed(
        &self,
        piece: &StoredRange,
        packing: Packing,
        used: &mut BTreeSet<String>,
        problems: &mut Vec<WeightProblem>,
    ) {
        let is_mx = packing == Packing::Mxfp4;
        if piece.columns.is_some() != is_mx || piece.shape.len() != if is_mx { 3 } else { 2 } {
            let (name, found) = (piece.stored.clone(), format!("quantized ({packing:?})"));
            used.extend(self.places.keys().filter(|key| key.starts_with(&name)).cloned());
            problems.push(WeightProblem::Constant { name, found, supported: "elements that are not quantized".into() });
            return;
        }
        for (name, dtype, shape) in parts(piece, packing) {
            match (self.find(&name), shape) {
                (None, shape) => {
                    problems.push(WeightProblem::Missing { name: name.clone(), shape: shape.unwrap_or_default() })
                }
                (Some((_, info)), Some(expected)) if info.shape != expected => {
                    problems.push(WeightProblem::Shape { name: name.clone(), expected, found: info.shape.clone() });
                }
                (Some((_, info)), _) if info.dtype != dtype => {
                    let found = info.dtype.to_string();
                    problems.push(WeightProblem::Constant { name: name.clone(), found, supported: dtype.to_string() });
                }
                _ => {}
            }
        }
        used.extend(packed_names(piece, packing));
    }

    /// Reads the elements of a piece of a quantized weight, dequantized.
    pub(super) fn read_packed(&self, piece: &StoredRange, packing: Packing, elements: &mut Vec<f32>) -> Result<()> {
        let before = elements.len();
        match packing {
            Packing::Nf4 { .. } | Packing::Int8 => {
                let (stored, rounding) = self.bitsandbytes(piece, packing)?;
                let columns = piece.shape[1];
                let matrix = Matrix {
                    format: match packing {
                        Packing::Nf4 { is_double } => quantized::Format::Nf4 { is_double },
                        _ => quantized::Format::Int8,
                    },
                    columns,
                    codes: &stored.codes,
                    scales: stored.scales.view(),
                    rounding,
                };
                // The rows that have elements of the piece.
                let Range { start, end } = piece.elements;
                let rows = start / columns..end.div_ceil(columns);
                let mut block = vec![0.0f32; rows.len() * columns];
                matrix.dequantize(rows, 0..columns, &mut block);
                elements.extend_from_slice(&block[start % columns..][..end - start]);
            }
            Packing::Fp8([rows, columns]) => {
                let (codes, width) = (self.bytes(&piece.stored)?, piece.shape[1]);
                let scales = self.floats(&format!("{}_scale_inv", piece.stored))?;
                let per_row = width.div_ceil(columns);
                let element = |at: usize| {
                    let (row, column) = (at / width, at % width);
                    to_bf16(fp8(codes[at]) * scales[row / rows * per_row + column / columns])
                };
                elements.extend(piece.elements.clone().map(element));
            }
            Packing::Mxfp4 => self.mxfp4(piece, elements)?,
        }
        match elements[before..].iter().find(|x| !x.is_finite()) {
            None => Ok(()),
            Some(value) => {
                let problem = WeightProblem::NotFinite { name: piece.stored.clone(), value: value.to_string() };
                Err(HfError::Weights { path: self.path.clone(), problems: vec![problem] })
            }
        }
    }

    /// Reads columns of the experts' weights. A piece begins with the first row of an expert's [in, out].
    fn mxfp4(&self, piece: &StoredRange, elements: &mut Vec<f32>) -> Result<()> {
        let &[_, inputs, outputs] = &piece.shape[..] else { unreachable!("checked when the folder was opened") };
        let expert = piece.elements.start / (inputs * outputs);
        let groups = outputs * inputs / MX_BLOCK;
        let read = |end: &str, each: usize| {
            let name = format!("{}{end}", piece.stored);
            let (file, info) = self.find(&name).expect("found when the folder was opened");
            let mut bytes = Vec::with_capacity(groups * each);
            file.read(info, expert * groups * each, groups * each, &mut |part| bytes.extend_from_slice(part))?;
            Ok::<_, HfError>(bytes)
        };
        let (blocks, scales) = (read("_blocks", MX_BLOCK / 2)?, read("_scales", 1)?);
        elements.extend(piece.places().map(|place| {
            let at = place % outputs * inputs + place / outputs;
            let (byte, scale) = (blocks[at / 2], i32::from(scales[at / MX_BLOCK]) - 127);
            let code = if at % 2 == 0 { byte & 15 } else { byte >> 4 };
            to_bf16((f64::from(FP4[usize::from(code)]) * 2f64.powi(scale)) as f32)
        }));
        Ok(())
    }

    /// Reads the codes and scales of a weight that bitsandbytes has quantized, and the type to which it rounds elements.
    fn bitsandbytes(&self, piece: &StoredRange, packing: Packing) -> Result<(Quantized, quantized::Rounding)> {
        let name = &piece.stored;
        let codes = self.bytes(name)?;
        let Packing::Nf4 { is_double } = packing else {
            let scales = OwnedScales::Plain(self.floats(&beside(name, "SCB"))?);
            return Ok((Quantized { codes, scales }, quantized::Rounding::None));
        };
        let malformed = |why: String| HfError::Malformed { path: self.path.join(name), why };
        let state: Value = serde_json::from_slice(&self.bytes(&format!("{name}.{NF4_STATE}"))?)
            .map_err(|error| malformed(format!("its quantization state is not JSON: {error}")))?;
        let expect = |field: &str, expected: Value| match state.get(field) == Some(&expected) {
            true => Ok(()),
            false => {
                let found = state.get(field).unwrap_or(&Value::Null);
                Err(malformed(format!("{field} of its quantization state is {found}; supported: {expected}")))
            }
        };
        let same = |found: &[f32], expected: &[f32]| found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-6);
        expect("blocksize", BLOCK.into())?;
        expect("shape", piece.shape.clone().into())?;
        if !same(&self.floats(&format!("{name}.quant_map"))?, &NF4) {
            return Err(malformed("its quant_map is not that of nf4".into()));
        }
        let rounding = match state["dtype"].as_str() {
            Some("float32") => quantized::Rounding::None,
            Some("bfloat16") => quantized::Rounding::Bf16,
            Some("float16") => quantized::Rounding::F16,
            _ => {
                return Err(malformed(format!(
                    "its dtype is {}; supported: float32, bfloat16, float16",
                    state["dtype"]
                )));
            }
        };
        let absmax = format!("{name}.absmax");
        if !is_double {
            return Ok((Quantized { codes, scales: OwnedScales::Plain(self.floats(&absmax)?) }, rounding));
        }
        expect("nested_blocksize", NESTED_BLOCK.into())?;
        if !same(&self.floats(&format!("{name}.nested_quant_map"))?, dynamic_map()) {
            return Err(malformed("its nested_quant_map is not bitsandbytes' dynamic map".into()));
        }
        let Some(offset) = state["nested_offset"].as_f64() else {
            return Err(malformed("its quantization state has no nested_offset".into()));
        };
        let nested = self.floats(&format!("{name}.nested_absmax"))?;
        let scales = OwnedScales::Double { codes: self.bytes(&absmax)?, nested, offset: offset as f32 };
        Ok((Quantized { codes, scales }, rounding))
    }

    /// Fills a quantized parameter of a trainer. If the folder stores it in the same format, its codes and scales are
    /// copied. Otherwise the elements are quantized. Returns the codes and scales of the whole parameter.
    pub(super) fn load_quantized(
        &self,
        trainer: &mut Trainer,
        quantize: &Quantize,
        placed: &ParameterLayout,
        elements: impl FnOnce() -> Result<Vec<f32>>,
    ) -> Result<Quantized> {
        let shape = self.config.parameters().find(|(name, _)| *name == placed.parameter).map(|(_, shape)| shape);
        let Some(&[outputs, inputs]) = shape else { unreachable!("only weights of linear layers are quantized") };
        let weight = quantize.weight(outputs, inputs);
        let stored = match &placed.pieces[..] {
            [piece] => self.packing(piece).map(|packing| (piece, packing)),
            _ => None,
        };
        let is_same = |packing: Packing| match packing {
            Packing::Int8 => weight.format == quantized::Format::Int8,
            Packing::Nf4 { is_double } => weight.format == quantized::Format::Nf4 { is_double },
            Packing::Fp8(_) | Packing::Mxfp4 => false,
        };
        let quantized = match stored.filter(|(_, packing)| is_same(*packing)) {
            Some((piece, packing)) => {
                let (found, rounding) = self.bitsandbytes(piece, packing)?;
                if rounding != weight.rounding {
                    let why = format!("its elements are rounded to {rounding:?}, not to {:?}", weight.rounding);
                    let remedy = "set trainable.lora.quantize.rounding to the dtype of its quantization state";
                    return Err(HfError::Malformed {
                        path: self.path.join(&piece.stored),
                        why: format!("{why}; {remedy}"),
                    });
                }
                found
            }
            None => quantized::quantize(weight.format, &elements()?, inputs),
        };
        let names = quantize.stored_names(&placed.parameter);
        trainer.set_bytes(&names[0], &quantized.codes)?;
        match &quantized.scales {
            OwnedScales::Plain(scales) => trainer.set_whole(&names[1], scales)?,
            OwnedScales::Double { codes, nested, offset } => {
                trainer.set_bytes(&names[1], codes)?;
                trainer.set_whole(&names[2], nested)?;
                trainer.set_elements(&names[3], &[*offset])?;
            }
        }
        Ok(quantized)
    }

    fn bytes(&self, name: &str) -> Result<Vec<u8>> {
        let (file, info) = self.find(name).expect("found when the folder was opened");
        let mut bytes = Vec::new();
        file.read(info, 0, info.shape.iter().product(), &mut |part| bytes.extend_from_slice(part))?;
        Ok(bytes)
    }

    fn floats(&self, name: &str) -> Result<Vec<f32>> {
        let (file, info) = self.find(name).expect("found when the folder was opened");
        let mut elements = Vec::new();
        file.read_elements(name, 0, info.shape.iter().product(), |x| elements.push(x))?;
        Ok(elements)
    }
}

/// Returns the tensors of a quantized weight.
fn parts(piece: &StoredRange, packing: Packing) -> Vec<Part> {
    let (name, shape) = (&piece.stored, &piece.shape);
    let part = |end: &str, dtype, shape: Vec<usize>| (format!("{name}{end}"), dtype, Some(shape));
    let elements: usize = shape.iter().product();
    let blocks = elements.div_ceil(BLOCK);
    match packing {
        Packing::Nf4 { is_double } => {
            let mut parts = vec![
                part("", Dtype::U8, vec![elements.div_ceil(2), 1]),
                part(".absmax", if is_double { Dtype::U8 } else { Dtype::F32 }, vec![blocks]),
                part(".quant_map", Dtype::F32, vec![16]),
                (format!("{name}.{NF4_STATE}"), Dtype::U8, None),
            ];
            if is_double {
                parts.push(part(".nested_absmax", Dtype::F32, vec![blocks.div_ceil(NESTED_BLOCK)]));
                parts.push(part(".nested_quant_map", Dtype::F32, vec![256]));
            }
            parts
        }
        Packing::Int8 => {
            let scales = (beside(name, "SCB"), Dtype::F32, Some(vec![shape[0]]));
            vec![part("", Dtype::I8, shape.clone()), scales]
        }
        Packing::Fp8(block) => {
            let scales = shape.iter().zip(block).map(|(extent, block)| extent.div_ceil(block)).collect();
            vec![part("", Dtype::F8_E4M3, shape.clone()), part("_scale_inv", Dtype::F32, scales)]
        }
        Packing::Mxfp4 => {
            let groups = vec![shape[0], shape[2], shape[1] / MX_BLOCK];
            let blocks = [&groups[..], &[MX_BLOCK / 2]].concat();
            vec![part("_blocks", Dtype::U8, blocks), part("_scales", Dtype::U8, groups)]
        }
    }
}

/// Returns the names of the tensors that belong to a quantized weight.
pub(super) fn packed_names(piece: &StoredRange, packing: Packing) -> Vec<String> {
    let own = parts(piece, packing).into_iter().map(|(name, ..)| name);
    own.chain((packing == Packing::Int8).then(|| format!("{}_format", piece.stored))).collect()
}

/// Returns the dequantized elements of a trainer's weight, like [`dequantize`].
pub(super) fn dequantized(trainer: &Trainer, quantize: &Quantize, parameter: &str) -> Result<Vec<f32>> {
    let names = quantize.stored_names(parameter);
    let bytes = |name: &String| Ok::<_, HfError>(trainer.tensor(name)?.flatten_all()?.to_vec1::<u8>()?);
    let floats = |name: &String| Ok::<_, HfError>(trainer.tensor(name)?.flatten_all()?.to_vec1::<f32>()?);
    let scales = match names.len() {
        4 => {
            OwnedScales::Double { codes: bytes(&names[1])?, nested: floats(&names[2])?, offset: floats(&names[3])?[0] }
        }
        _ => OwnedScales::Plain(floats(&names[1])?),
    };
    Ok(dequantize(quantize, &Quantized { codes: bytes(&names[0])?, scales }))
}

/// Returns the elements of a weight, in row-major order. If their number is odd, a further element follows them.
pub(super) fn dequantize(quantize: &Quantize, Quantized { codes, scales }: &Quantized) -> Vec<f32> {
    let QuantizedWeight { format, rounding, .. } = quantize.weight(0, 0);
    // Only the scales of int8 depend on the number of columns.
    let (rows, columns) = match (format, scales) {
        (quantized::Format::Int8, OwnedScales::Plain(scales)) => (scales.len(), codes.len() / scales.len().max(1)),
        _ => (1, 2 * codes.len()),
    };
    let matrix = Matrix { format, columns, codes, scales: scales.view(), rounding };
    let mut elements = vec![0.0; rows * columns];
    matrix.dequantize(0..rows, 0..columns, &mut elements);
    elements
}

/// The last part of the name of the tensor with bitsandbytes' settings of a weight, as JSON.
const NF4_STATE: &str = "quant_state.bitsandbytes__nf4";

/// Returns the name of a tensor of the module whose weight is `weight`.
fn beside(weight: &str, name: &str) -> String {
    format!("{}{name}", weight.strip_suffix("weight").unwrap_or(weight))
}

/// Number of neighbours that share a scale in MXFP4.
const MX_BLOCK: usize = 32;

/// The values of FP4 (E2M1), by code.
const FP4: [f32; 16] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// Returns the value of an FP8 number (E4M3, without infinities).
fn fp8(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let magnitude = match (exponent, code & 7) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa * 2f32.powi(-9),
        _ => (8.0 + mantissa) * 2f32.powi(exponent - 10),
    };
    if code & 0x80 == 0 { magnitude } else { -magnitude }
}

fn to_bf16(x: f32) -> f32 {
    bf16::from_f32(x).to_f32()
}

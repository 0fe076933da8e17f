//! The kernels of quantized.cu.

use candle_core::{DType, Device, Layout};
use gapless_graph::Stream;
use gapless_kernels::cpu::quantized::{Format, Matrix, OwnedScales, Rounding, Scales, quantize};
use gapless_kernels::{Spread, Window};
use gapless_testing::few;

use super::host;
use super::judge::{Stored, check, outputs};
use crate::graph::Spec;
use crate::ops::{QuantizedLinear, QuantizedWeight, WeightSquares};
use crate::{Op, Result, Tensor};

const FORMATS: [Format; 3] = [Format::Int8, Format::Nf4 { is_double: false }, Format::Nf4 { is_double: true }];

/// Shapes of weights: whole packs and not, rows that end within a block and within a byte, and more blocks than one block
/// of the kernel has threads for.
const SHAPES: [(usize, usize); 4] = [(7, 9), (130, 72), (5, 24), (33, 1100)];

/// Returns the tensors in which a weight is stored, as constants of the graph of `x`.
fn stored(weight: &QuantizedWeight, x: &Tensor) -> Result<Vec<Tensor>> {
    let elements: Vec<f32> = (0..weight.outputs * weight.inputs).map(|i| (i as f32 * 0.7).sin()).collect();
    let quantized = quantize(weight.format, &elements, weight.inputs);
    let bytes = |data: &[u8]| candle_core::Tensor::from_slice(data, data.len(), &Device::Cpu).unwrap();
    let floats = |data: &[f32]| candle_core::Tensor::from_slice(data, data.len(), &Device::Cpu).unwrap();
    let scales = match &quantized.scales {
        OwnedScales::Plain(scales) => vec![floats(scales)],
        OwnedScales::Double { codes, nested, offset } => vec![bytes(codes), floats(nested), floats(&[*offset])],
    };
    [bytes(&quantized.codes)].iter().chain(&scales).map(|data| Tensor::from_candle(data, x.device())).collect()
}

fn weight((outputs, inputs): (usize, usize), format: Format) -> QuantizedWeight {
    QuantizedWeight { outputs, inputs, format, rounding: Rounding::None, blocks: None }
}

#[test]
fn products_with_quantized_weights() {
    for &shape in few(&SHAPES, 2) {
        for format in FORMATS {
            let weight = weight(shape, format);
            let named = ["quantized_linear", "quantized_linear_grad_input"];
            check(&named, &[&[2, 3, weight.inputs], &[weight.outputs]], &[], |x, _| {
                let frozen = x[1].detach();
                x[0].quantized_linear(weight, &stored(&weight, &x[0])?, Some(&frozen))
            });
        }
    }
}

#[test]
fn squares_of_adapted_weights() {
    for (turn, &(outputs, inputs)) in few(&SHAPES, 2).iter().enumerate() {
        let rank = [2, 5][turn % 2];
        let [a, b, y] = [[rank, inputs], [outputs, rank], [3, outputs]];
        let of = |x: &[Tensor], quantized, inputs: &[&Tensor]| {
            let [squares] = Tensor::apply_op(WeightSquares { scale: 0.5, quantized }, inputs)?;
            x[2].broadcast_mul(&squares.sqrt()?.to_dtype(x[0].dtype())?)
        };
        for format in FORMATS {
            check(&["weight_squares"], &[&a, &b, &y], &[], |x, _| {
                let weight = weight((outputs, inputs), format);
                let stored = stored(&weight, &x[0])?;
                of(x, Some(weight), &x[..2].iter().chain(&stored).collect::<Vec<_>>())
            });
        }
        check(&["weight_squares"], &[&a, &b, &y, &[outputs, inputs]], &[], |x, _| of(x, None, &[&x[0], &x[1], &x[3]]));
    }
}

/// A product with the identity is the dequantized weight, whose bits are those of the CPU, in every format, with every
/// rounding, and for a part of a weight whose scales share scales with those of other parts.
#[test]
fn dequantized_elements_have_the_bits_of_the_cpu() {
    if !host::is_there() {
        return;
    }
    const COLUMNS: usize = 64;
    let part = Window::of(&[300, 2], vec![vec![0..300], vec![1..2]]).spread();
    let cases = [(7, None), (300, None), (300, part)];
    for (rows, blocks) in cases {
        for format in FORMATS {
            let blocks = blocks.filter(|_| format == Format::Nf4 { is_double: true });
            let codes: Vec<u8> = (0..format.code_bytes(rows * COLUMNS)).map(|i| (i * i % 251) as u8).collect();
            let of_scales: Vec<u8> = (0..rows).map(|i| (i * 37 % 256) as u8).collect();
            // Some elements are subnormal in f16.
            let scales: Vec<f32> = (0..rows).map(|i| 1.7f32.powi(i as i32 % 40 - 30) * 1.1).collect();
            let spread = blocks.unwrap_or(Spread::whole(rows));
            let nested: Vec<f32> = scales[..spread.elements.div_ceil(256)].to_vec();
            let offset = 0.3;
            for rounding in [Rounding::None, Rounding::Bf16, Rounding::F16] {
                let weight = QuantizedWeight { outputs: rows, inputs: COLUMNS, format, rounding, blocks };
                let of_cpu = match format {
                    Format::Nf4 { is_double: true } => {
                        Scales::Double { codes: &of_scales, nested: &nested, offset, blocks: spread }
                    }
                    Format::Int8 | Format::Nf4 { .. } => Scales::Plain(&scales),
                };
                let matrix = Matrix { format, columns: COLUMNS, codes: &codes, scales: of_cpu, rounding };
                let mut expected = vec![0.0f32; rows * COLUMNS];
                matrix.dequantize(0..rows, 0..COLUMNS, &mut expected);
                let wide = |data: &[f32]| data.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
                let bytes = |data: &[u8]| data.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
                let data = match of_cpu {
                    Scales::Plain(scales) => vec![bytes(&codes), wide(scales)],
                    Scales::Double { .. } => vec![bytes(&codes), bytes(&of_scales), wide(&nested), wide(&[offset])],
                };
                let identity = (0..COLUMNS * COLUMNS).map(|i| if i % (COLUMNS + 1) == 0 { 1.0 } else { 0.0 }).collect();
                let x = Spec::f32((COLUMNS, COLUMNS));
                let specs: Vec<Spec> = [x].into_iter().chain(weight.stored()).collect();
                let inputs: Vec<Stored> = [identity]
                    .into_iter()
                    .chain(data)
                    .zip(&specs)
                    .map(|(data, spec)| Stored {
                        data,
                        layout: Layout::contiguous(spec.shape.clone()),
                        dtype: spec.dtype,
                    })
                    .collect();
                let op = QuantizedLinear { weight, has_bias: false };
                let to = op.infer(&specs).unwrap();
                assert_eq!(to[0].dtype, DType::F32);
                let y = outputs(&op, &inputs, &to, Stream::new(1, 1, 0)).remove(0);
                for (at, expected) in expected.into_iter().enumerate() {
                    let got = y[at % COLUMNS * rows + at / COLUMNS];
                    assert!(got == f64::from(expected), "{got:e}, not {expected:e}, at {at} of {weight:?}");
                }
            }
        }
    }
}
